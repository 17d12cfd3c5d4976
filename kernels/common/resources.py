# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel costs: registers, stack, shared memory, setmaxnreg.

Everything here reads text or bytes that CuTe DSL hands out after a compile, so no GPU is needed:

    compiled = cute.compile(fn, *args, options="--gpu-arch sm_100a --keep-ptx --keep-cubin")
    kernel_resources(compiled.__cubin__)            # registers and stack, through cuobjdump
    setmaxnreg(compiled.__ptx__)                    # what each role asks for
    launch_smem_bytes(str(compiled.ir_module))      # dynamic SMEM of each launch, in order

ptxas puts spilled registers on the stack, so ``stack_bytes == 0`` also says that nothing spilled.
"""

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KernelResources:
    """One line of ``cuobjdump --dump-resource-usage``.

    registers: per thread, as ptxas allocated them (before any setmaxnreg);
    stack_bytes: per thread, spills included; local_bytes: per thread, outside the stack;
    static_smem_bytes: per CTA, what the driver and static arrays take, without dynamic SMEM.
    """

    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    static_smem_bytes: int


_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def parse_resource_usage(text: str) -> tuple[KernelResources, ...]:
    """The kernels of a ``cuobjdump --dump-resource-usage`` listing.

    Raises ValueError when the listing names no kernel, or lists one in a form not known here.
    """
    found = tuple(
        KernelResources(name, int(regs), int(stack), int(local), int(shared))
        for name, regs, stack, shared, local in _USAGE.findall(text)
    )
    named = text.count("Function ")
    if not found or len(found) != named:
        raise ValueError(f"cuobjdump listed {named} kernels, understood {len(found)}:\n{text}")
    return found


def find_cuobjdump() -> Path:
    """cuobjdump from $CUOBJDUMP, PATH, or the nvidia-cuda-cuobjdump wheel, in that order.

    Raises FileNotFoundError when none of them has it.
    """
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    named = os.environ.get("CUOBJDUMP"), shutil.which("cuobjdump")
    for candidate in (*named, *sorted(wheels.glob("cu*/bin/cuobjdump"), reverse=True)):
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise FileNotFoundError(
        "cuobjdump is neither named by $CUOBJDUMP, nor on PATH, nor in the nvidia-cuda-cuobjdump "
        "wheel; install that wheel (it is in the extra 'test') or the CUDA toolkit"
    )


def kernel_resources(cubin: bytes | Path) -> tuple[KernelResources, ...]:
    """Registers, stack and static SMEM of every kernel in a cubin (its bytes, or a file).

    Raises FileNotFoundError without cuobjdump, RuntimeError when it rejects the file.
    """
    if isinstance(cubin, bytes):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            return kernel_resources(Path(file.name))
    command = [str(find_cuobjdump()), "--dump-resource-usage", str(cubin)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
    return parse_resource_usage(result.stdout)


@dataclass(frozen=True)
class SetMaxNReg:
    """One ``setmaxnreg`` of the PTX: ``action`` is "inc" or "dec", ``registers`` per thread."""

    action: str
    registers: int


_SETMAXNREG = re.compile(r"\bsetmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)\s*;")


def setmaxnreg(ptx: str) -> tuple[SetMaxNReg, ...]:
    """Every setmaxnreg of a PTX text, in text order (PTX ISA 9.1 section 9.7.19.5).

    Raises ValueError when one is written in a form not known here, rather than dropping it.
    """
    code = re.sub(r"//[^\n]*", "", ptx)
    found = tuple(SetMaxNReg(action, int(n)) for action, n in _SETMAXNREG.findall(code))
    written = len(re.findall(r"\bsetmaxnreg\b", code))
    if written != len(found):
        raise ValueError(f"PTX has {written} setmaxnreg, understood {len(found)}")
    return found


# CuTe DSL 4.8.1 fills a cudaLaunchConfig_t (grid, block, dynamicSmemBytes, stream, attributes)
# in its host code; field 2 is the dynamic SMEM.
_SMEM_FIELD = re.compile(
    r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>\s+"
    r"llvm\.store (%\w+), \1 : i64"
)


def launch_smem_bytes(host_ir: str) -> tuple[int, ...]:
    """Dynamic SMEM in bytes of each launch in the lowered host module, in order.

    ``host_ir`` is ``str(compiled.ir_module)``. Raises ValueError when there is no launch, or when
    a size is not a compile-time constant.
    """
    sizes: list[int] = []
    for function in re.split(r"^  llvm\.func ", host_ir, flags=re.MULTILINE):
        for match in _SMEM_FIELD.finditer(function):
            value = match[2]
            constant = re.search(
                rf"^\s*{value} = llvm\.mlir\.constant\((\d+) : i64\)", function, flags=re.MULTILINE
            )
            if constant is None:
                raise ValueError(f"dynamic SMEM {value} of a launch is not a constant")
            sizes.append(int(constant[1]))
    if not sizes:
        raise ValueError("no launch found: is this str(compiled.ir_module)?")
    return tuple(sizes)
