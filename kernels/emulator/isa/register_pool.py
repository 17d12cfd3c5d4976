"""setmaxnreg: warps give registers to their CTA's pool, and take them from it.

PTX ISA 9.1 section 9.7.19.5. A kernel starts with as many registers a thread as its launch bounds
allow (65536 registers for 512 threads are 128 each), none in the pool; without launch bounds the
compiler ignores setmaxnreg, and so does the pool. An .inc to fewer registers than the launch gives
is undefined in PTX; kernels do it (CUTLASS's dense_gemm_fp8_2xacc: 232 where 256 threads have 256
each), and it then has no effect but under the ``isa`` profile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings import EmulatorFault
from ..ptx.ast import Entry, Imm
from .table import Binding, Handler, Wait, machine

if TYPE_CHECKING:
    from ..state import Warp

_STEP = 8  # of a thread's number of registers
_MOST = 256  # 255 that instructions can name, rounded up


def launch_registers(entry: Entry, registers_per_sm: int) -> int | None:
    """Registers that each thread has at the start, or None where nothing bounds the launch."""
    directives = entry.directives
    if ".maxnreg" in directives:
        return -(-int(directives[".maxnreg"]) // _STEP) * _STEP
    bounds = directives.get(".reqntid") or directives.get(".maxntid")
    if bounds is None:
        return None
    threads = 1
    for extent in bounds.split(","):
        threads *= int(extent)
    warps = (threads + 31) // 32
    ctas = int(directives.get(".minnctapersm", "1"))
    return min(registers_per_sm // (ctas * warps * 32) // _STEP * _STEP, _MOST)


@machine(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", converged=True)
def setmaxnreg(b: Binding) -> Handler:
    count = b.ins.operands[0]
    if not isinstance(count, Imm):
        raise b.unsupported("the register count must be an immediate")
    if not 24 <= count.value <= 256 or count.value % 8:
        raise b.unsupported(f"{count.value} registers: it must be a multiple of 8 from 24 to 256")
    grow, value = b.match[1] == "inc", count.value

    def run(w: Warp, mask: int) -> Wait | None:
        cta = w.cta
        before = w.max_registers if w.max_registers is not None else cta.launch_registers
        if before is not None and (value < before if grow else value > before):
            if w.max_registers is None and cta.machine.options.profile != "isa":
                return None
            raise EmulatorFault(
                "setmaxnreg_direction",
                f"setmaxnreg.{b.match[1]} to {value} registers, but the warp has {before}",
                registers=value,
                before=before,
            )
        if cta.launch_registers is not None and before is not None:
            if value - before > cta.free_registers:
                lacks = f"{value - before} registers a thread, {cta.free_registers} are free"
                detail = (("barrier", "register pool"), ("waits_for", lacks))
                return Wait(("registers",), f"setmaxnreg.inc to {value} registers", detail=detail)
            cta.free_registers += before - value
            if not grow:
                cta.machine.wake(("registers",), cta)
        cta.machine.events += 1
        w.max_registers = value
        return None

    return run
