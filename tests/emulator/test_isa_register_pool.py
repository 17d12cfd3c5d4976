"""setmaxnreg against the CTA's register pool (PTX ISA 9.1 section 9.7.19.5)."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.emulator.isa.register_pool import launch_registers
from kernels.emulator.ptx import parse
from tests.emulator.cluster_harness import clean, code_of, every_way, launch, module

BODY = """
.reg .b32 %t, %g, %v; .reg .b64 %o, %w; .reg .pred %p;
mov.u32 %t, %tid.x; shr.u32 %g, %t, 7; ld.param.b64 %o, [out];
mul.wide.u32 %w, %t, 4; add.u64 %o, %o, %w;
setp.lt.u32 %p, %g, {grow};
@%p bra GROW;
setmaxnreg.dec.sync.aligned.u32 {less};
bra DONE;
GROW:
setmaxnreg.inc.sync.aligned.u32 {more};
DONE:
st.global.b32 [%o], %g;
"""


def run(bounds: str, grow: int, less: int, more: int, threads: int = 512, **way):  # type: ignore[no-untyped-def]
    text = module("out", BODY.format(grow=grow, less=less, more=more))
    out = np.full(threads, 99, np.uint32)
    ran = launch(text.replace(")\n{", f")\n{bounds}\n{{", 1), [out], threads=threads, **way)
    return ran, out


@pytest.mark.parametrize(
    "bounds,registers",
    [
        (".reqntid 512, 1, 1", 128), (".reqntid 384, 1, 1", 168), (".maxntid 128, 2, 1", 256),
        (".reqntid 512, 1, 1\n.minnctapersm 2", 64), (".maxnreg 100", 104), ("", None),
        (".reqntid 64, 1, 1", 256),
    ],
)  # fmt: skip
def test_registers_at_the_start(bounds: str, registers: int | None) -> None:
    text = module("", "").replace(")\n{", f")\n{bounds}\n{{", 1)
    assert launch_registers(parse(text).entries["k"], 1 << 16) == registers


@every_way
def test_what_is_given_up_can_be_taken(way: dict) -> None:
    """Two warpgroups of four give 128 - 72 each; two take 184 - 128 = 56 each, not more."""
    ran, out = run(".reqntid 512, 1, 1", 2, 72, 184, **way)
    clean(ran)
    assert np.array_equal(out, np.arange(512) // 128)
    ran, _ = run(".reqntid 512, 1, 1", 2, 72, 192, **way)
    assert code_of(ran) == "deadlock"
    (row, *_) = ran.findings[0].details["blocked"]
    assert row["barrier"] == "register pool"
    assert "setmaxnreg.inc to 192" in row["waits_on"]


def test_without_bounds_there_is_no_pool() -> None:
    clean(run("", 2, 72, 256)[0])


def test_directions() -> None:
    """Against what the launch gives only isa minds, against an earlier setmaxnreg both do."""
    for less, more in ((136, 136), (72, 120)):
        asked = (".reqntid 512, 1, 1", 2, less, more)
        assert code_of(run(*asked, profile="isa")[0]) == "setmaxnreg_direction"
    assert code_of(run(".reqntid 512, 1, 1", 2, 72, 120)[0]) == "ok"
    twice = BODY.replace("DONE:", "setmaxnreg.dec.sync.aligned.u32 64;\nDONE:", 1)
    wrong = BODY.replace("bra DONE;", "setmaxnreg.inc.sync.aligned.u32 64;\nbra DONE;", 1)
    for body, code in ((twice, "ok"), (wrong, "setmaxnreg_direction")):
        text = module("out", body.format(grow=2, less=72, more=184))
        text = text.replace(")\n{", ")\n.reqntid 512, 1, 1\n{", 1)
        out = np.zeros(512, np.uint32)
        assert code_of(launch(text, [out], threads=512)) == code
