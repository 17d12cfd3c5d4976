"""LLVM IR of the blocks -> callable host code, through llvmlite.

llvmlite is a public, versioned interface to LLVM (numba's); the DSL's own MLIR engine could do the
same but is private to it, and the emulator's core stays independent of the DSL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from .builder import BlockBuilder
from .cache import cached
from .ir import I1
from .mufu import symbols

# A block: (registers, active lanes, parameters) -> taken lanes.
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
# Compiling is most of the wait before a kernel runs and running is not: a softmax block of 600
# instructions takes 2.5 us at level 0, far less than the scheduler around it.
_BLOCKS_LEVEL = 0
_LOOPS_LEVEL = 2  # of the few functions that every kernel uses
_CACHED_FROM_BYTES = 1 << 16  # of IR; less compiles as fast as a file is found
_ATTRIBUTES = (
    'attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }'
)
_lock = threading.Lock()


def _target_machine(opt: int) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    cpu, features = _host()
    return target.create_target_machine(
        cpu=cpu, features=features, opt=opt, codemodel="jitdefault", jit=True
    )


@cache
def _host() -> tuple[str, str]:
    """CPU name and features. Raises RuntimeError on an x86 CPU without FMA and half conversions:
    LLVM would call library functions that are not in the process."""
    features = llvm.get_host_cpu_features()
    missing = [f for f in ("avx2", "fma", "f16c") if f in features and not features[f]]
    if missing:
        raise RuntimeError(
            "the emulator's generated code needs an x86-64-v3 CPU (Haswell, Zen or newer); "
            f"this one ({llvm.get_host_cpu_name()}) lacks {', '.join(missing)}"
        )
    return llvm.get_host_cpu_name(), features.flatten()


def host_has(feature: str) -> bool:
    """Whether LLVM reports the CPU to have a feature, by LLVM's name ("avx512f")."""
    return bool(llvm.get_host_cpu_features().get(feature, False))


@dataclass
class NativeModule:
    """Compiled functions by name. Keeps the engine alive."""

    functions: Mapping[str, Callable[..., Any]]
    _engine: Any


def function_text(block: BlockBuilder, taken: str | None) -> str:
    """The IR of one block; ``taken`` is the branch condition, returned for the active lanes."""
    parameters = "ptr noalias %regs, i32 %mask, ptr noalias readonly %params"
    head = [
        f"define i32 @{block.name}({parameters}) #0 {{",
        f"  %lanes = bitcast i32 %mask to {I1}",
    ]
    tail = ["  ret i32 0", "}"]
    if taken is not None:
        tail = [
            f"  %taken = bitcast {I1} {taken} to i32",
            "  %taken.active = and i32 %taken, %mask",
            "  ret i32 %taken.active",
            "}",
        ]
    return "\n".join(head + block.lines + tail)


def module_text(blocks: list[tuple[BlockBuilder, str | None]]) -> str:
    """One module: the intrinsics' declarations, the functions that blocks share, the blocks."""
    helpers = {name: helper for block, _ in blocks for name, helper in block.helpers.items()}
    declares = set().union(
        *(block.intrinsics for block, _ in blocks), *(h.intrinsics for h in helpers.values())
    )
    shared = [helpers[name].text for name in sorted(helpers)]
    functions = (function_text(*item) for item in blocks)
    return "\n".join([*sorted(declares), *shared, *functions, _ATTRIBUTES])


def _object_code(text: str, opt: int) -> bytes:
    machine = _target_machine(opt)
    module = llvm.parse_assembly(text, llvm.create_context())
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    return bytes(machine.emit_object(module))


def _key(text: str, opt: int) -> tuple[str, ...]:
    version = ".".join(map(str, llvm.llvm_version_info))
    host = (*_host(), llvm.get_default_triple())
    return (llvmlite.__version__, version, *host, str(opt), text)


def compile_blocks(blocks: list[tuple[BlockBuilder, str | None]]) -> NativeModule:
    """Compiles all blocks of a kernel as one module, or takes them from the cache."""
    text = module_text(blocks)
    with _lock:
        if len(text) < _CACHED_FROM_BYTES:
            code = _object_code(text, _BLOCKS_LEVEL)
        else:
            code = cached(_key(text, _BLOCKS_LEVEL), lambda: _object_code(text, _BLOCKS_LEVEL))
        return _loaded(code, text, {b.name: _PROTOTYPE for b, _ in blocks})


def compile_functions(text: str, prototypes: Mapping[str, Any]) -> NativeModule:
    """Compiles functions that every kernel uses, with optimisation; ``prototypes``: ctypes function
    types by name."""
    text = f"{text}\n{_ATTRIBUTES}"
    with _lock:
        code = cached(_key(text, _LOOPS_LEVEL), lambda: _object_code(text, _LOOPS_LEVEL))
        return _loaded(code, text, prototypes)


def _loaded(code: bytes, text: str, prototypes: Mapping[str, Any]) -> NativeModule:
    for name, address in symbols(text).items():  # an object from the cache names them too
        llvm.add_symbol(name, address)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(_BLOCKS_LEVEL))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    functions = {name: make(engine.get_function_address(name)) for name, make in prototypes.items()}
    return NativeModule(functions, engine)
