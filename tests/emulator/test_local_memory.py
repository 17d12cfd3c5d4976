"""Local memory, variables of the module, device functions and printf, as PTX."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels.emulator.findings import Finding, UnsupportedPTX
from kernels.emulator.memory import LocalMemory
from kernels.emulator.memory.local import LOCAL_BASE

from .ptx_harness import HEADER, execute, launch_text, run

DEPOT = """.local .align 8 .b8 depot[32];
.reg .b64 %sp, %spl, %x; .reg .b32 %i, %v;
mov.b64 %spl, depot;
cvta.local.u64 %sp, %spl;
"""


def _thread(n: int = 64) -> np.ndarray:
    return np.arange(n, dtype=np.uint32)


def test_each_thread_has_its_own() -> None:
    """Written at an index of the thread's, read back through local and generic addresses."""
    body = f"""{DEPOT}
    and.b32 %i, %a, 7; mul.wide.u32 %x, %i, 4;
    add.u64 %spl, %spl, %x; add.u64 %sp, %sp, %x;
    mul.lo.u32 %v, %a, 1000003;
    st.local.b32 [%spl], %v;
    bar.sync 0;
    ld.b32 %d, [%sp];
    add.u32 %v, %d, 1;
    st.b32 [%sp], %v;
    ld.local.b32 %e, [%spl];"""
    got = execute(body, {"a": _thread()}, {"d": np.uint32, "e": np.uint32}, block=64)
    assert (got["d"] == _thread() * 1000003).all()
    assert (got["e"] == got["d"] + 1).all()


def test_vectors_narrow_elements_and_sub_words() -> None:
    body = f"""{DEPOT} .reg .b16 %h; .reg .b32 %w<4>;
    st.local.v4.b32 [%spl+16], {{%a, 2, 3, %a}};
    cvt.u16.u32 %h, %a; st.local.b8 [%spl+21], %h;
    ld.local.v4.b32 {{%w0, %w1, %w2, %w3}}, [%spl+16];
    ld.local.u8 %v, [%spl+21];
    shl.b32 %v, %v, 8; or.b32 %v, %v, 2; sub.u32 %d, %w1, %v;
    add.u32 %e, %w0, %w3;
    st.local.b64 [depot+8], 0x0000000500000009; ld.local.b32 %v, [depot+12]; add.u32 %e, %e, %v;"""
    got = execute(body, {"a": _thread()}, {"d": np.uint32, "e": np.uint32})
    assert (got["d"] == 0).all()
    assert (got["e"] == 2 * _thread() + 5).all()


def test_generic_accesses_pick_the_window_lane_by_lane() -> None:
    """Odd threads read local memory, even threads global and shared, in one instruction."""
    body = f"""{DEPOT} .reg .pred %odd, %third, %l; .reg .b64 %s;
    st.local.b32 [%spl+4], %a;
    mov.u64 %s, room; cvta.shared.u64 %s, %s;
    mul.wide.u32 %x, %thread_, 4; add.u64 %s, %s, %x;
    add.u32 %v, %a, 1000; st.b32 [%s], %v;
    add.u64 %x, %sp, 4;
    and.b32 %i, %a, 1; setp.ne.u32 %odd, %i, 0;
    selp.b64 %x, %x, %s, %odd;
    and.b32 %i, %a, 2; setp.ne.u32 %third, %i, 0;
    @%third mov.b64 %x, %at_a;
    ld.b32 %d, [%x];
    isspacep.local %l, %x; selp.b32 %e, 1, 0, %l;
    isspacep.global %l, %x; selp.b32 %g, 1, 0, %l;"""
    outs = dict.fromkeys("deg", np.uint32)
    got = execute(body, {"a": _thread(32)}, outs, shared=".shared .align 4 .b8 room[128];")
    t = _thread(32)
    local, elsewhere = (t % 2 == 1) & (t & 2 == 0), t & 2 != 0
    assert (got["d"] == np.where(local | elsewhere, t, t + 1000)).all()
    assert (got["e"] == local).all() and (got["g"] == elsewhere).all()


def _finding(body: str) -> Finding:
    (finding,) = run(DEPOT + body, {"a": _thread(32)}, {"d": np.uint32}).findings
    return finding


@pytest.mark.parametrize(
    ("access", "code"),
    [
        ("ld.local.b32 %d, [%spl];", "local_unwritten_read"),
        ("st.local.b8 [%spl], 1; ld.local.b16 %h, [%spl];", "local_unwritten_read"),
        ("st.local.b32 [%spl+32], 1;", "local_out_of_bounds"),
        ("st.local.b64 [%spl+-8], 1;", "local_out_of_bounds"),
        ("ld.b32 %d, [%sp+32];", "local_out_of_bounds"),
        ("st.local.b32 [%spl+2], 1;", "local_misaligned"),
    ],
)
def test_findings(access: str, code: str) -> None:
    finding = _finding(f".reg .b16 %h; mov.b32 %d, 0; {access}")
    assert finding.code == code
    assert finding.details["lane"] == 0


def test_a_finding_names_the_thread() -> None:
    """Lane 9 alone writes one byte too few."""
    finding = _finding(
        """mov.b32 %d, 0; .reg .pred %p; setp.ne.u32 %p, %a, 9;
        st.local.b16 [%spl+4], 7; @%p st.local.b16 [%spl+6], 7; ld.local.b32 %d, [%spl+4];"""
    )
    assert (finding.code, finding.details["lane"]) == ("local_unwritten_read", 9)


def test_local_memory_itself() -> None:
    memory = LocalMemory(8)
    lanes, at = np.array([3, 30]), np.array([LOCAL_BASE, LOCAL_BASE + 4])
    memory.store(lanes, at, np.arange(8, dtype=np.uint8).reshape(2, 4))
    assert memory.load(lanes, at, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert memory.data[3, :4].tolist() == [0, 1, 2, 3] and memory.valid.sum() == 8


# -- module variables ------------------------------------------------------------------------------


def _with_top(top: str, body: str, **outputs: str) -> dict[str, np.ndarray]:
    return execute(body, {"a": _thread(32)}, outputs, shared=top)


def test_variables_are_initialised_and_the_rest_is_zero() -> None:
    top = """.const .align 4 .u32 table[4] = {10, 20, 30};
.global .align 8 .b8 bytes[12] = {1, 0, 0, 0, 2};"""
    body = """.reg .b64 %x, %y; .reg .b32 %i, %v; .reg .b16 %h;
    mov.u64 %y, table; and.b32 %i, %a, 3; mul.wide.u32 %x, %i, 4; add.u64 %x, %x, %y;
    ld.const.u32 %d, [%x];
    ld.global.b64 %x, [bytes]; shr.u64 %y, %x, 32; cvt.u32.u64 %e, %y;
    ld.global.u8 %v, [bytes+4]; add.u32 %e, %e, %v;
    mov.u64 %y, bytes; cvta.global.u64 %y, %y; ld.b32 %v, [%y+8]; add.u32 %e, %e, %v;"""
    got = _with_top(top, body, d="u4", e="u4")
    assert got["d"].tolist() == [10, 20, 30, 0] * 8
    assert (got["e"] == 4).all()


def test_a_global_variable_starts_anew_at_each_launch() -> None:
    body = """.reg .b32 %v; ld.global.b32 %v, [counter]; add.u32 %v, %v, 1; bar.warp.sync -1;
    st.global.b32 [counter], %v; bar.warp.sync -1; ld.global.b32 %d, [counter];"""
    for _ in range(2):
        assert (_with_top(".global .u32 counter = 41;", body, d="u4")["d"] == 42).all()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("st.global.b32 [%y], 1;", "global_read_only"),
        ("ld.global.b32 %d, [%y+8];", "global_out_of_bounds"),
    ],
)
def test_variables_have_bounds(body: str, code: str) -> None:
    text = f"mov.b32 %d, 0; .reg .b64 %y; mov.u64 %y, c; {body}"
    top = ".const .align 8 .u32 c[2] = {1, 2};"
    (finding,) = run(text, {}, {"d": np.uint32}, shared=top).findings
    assert finding.code == code


# -- device functions ------------------------------------------------------------------------------

POWER = """.func (.param .b64 out) power(.param .b32 base, .param .b32 n)
{
.reg .b32 %n; .reg .b64 %r, %b; .reg .pred %p; .reg .b32 %w;
ld.param.b32 %w, [base]; cvt.u64.u32 %b, %w;
ld.param.b32 %n, [n];
mov.b64 %r, 1;
LOOP:
setp.eq.u32 %p, %n, 0;
@%p bra DONE;
mul.lo.u64 %r, %r, %b;
sub.u32 %n, %n, 1;
bra LOOP;
DONE:
st.param.b64 [out], %r;
ret;
}"""


def _call(base: str, n: str, into: str) -> str:
    return f"""{{ .param .b32 x; .param .b32 y; .param .b64 z;
    st.param.b32 [x], {base}; st.param.b32 [y], {n};
    call.uni (z), power, (x, y);
    ld.param.b64 {into}, [z]; }}"""


def test_divergent_calls() -> None:
    """Each thread loops as often as its own argument says; two calls, one under a branch."""
    body = f""".reg .b64 %s, %t; .reg .pred %p; .reg .b32 %m;
    {_call("3", "%a", "%s")}
    setp.gt.u32 %p, %a, 20;
    mov.b64 %t, 0;
    @%p bra SKIP;
    add.u32 %m, %a, 5;
    {_call("%m", "2", "%t")}
    SKIP: add.u64 %d, %s, %t;"""
    got = _with_top(POWER, body, d="u8")["d"].tolist()
    assert got == [3**a + (0 if a > 20 else (a + 5) ** 2) for a in range(32)]


def test_functions_call_functions() -> None:
    top = f"""{POWER}
.func (.param .b64 sum) both(.param .b32 n)
{{
.reg .b32 %n; .reg .b64 %s, %t;
ld.param.b32 %n, [n];
{_call("2", "%n", "%s")}
{_call("%n", "3", "%t")}
add.u64 %s, %s, %t;
st.param.b64 [sum], %s;
}}"""
    body = """{ .param .b32 n; .param .b64 sum; st.param.b32 [n], %a;
    call (sum), both, (n); ld.param.b64 %d, [sum]; }"""
    assert _with_top(top, body, d="u8")["d"].tolist() == [2**a + a**3 for a in range(32)]


def test_an_unknown_function_names_the_line() -> None:
    top = ".extern .func (.param .b32 r) vanish(.param .b32 a);"
    body = "{ .param .b32 x; .param .b32 y; mov.b32 %d, 0;\ncall (y), vanish, (x); }"
    with pytest.raises(UnsupportedPTX, match=r"ptx:\d+: the function vanish is not in this file"):
        run(body, {}, {"d": np.uint32}, shared=top)


# -- printf ----------------------------------------------------------------------------------------

PRINTF = ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);\n"


def _print(form: str, store: str) -> str:
    """A whole module whose threads print; ``store`` fills the buffer at %spl."""
    codes = ", ".join(str(c) for c in form.encode() + b"\0")
    return f"""{HEADER}{PRINTF}
.global .align 1 .b8 form[{len(form) + 1}] = {{{codes}}};
.global .align 1 .b8 word[4] = {{104, 105, 33, 0}};
.visible .entry k(.param .u64 out)
{{
.local .align 8 .b8 buffer[64];
.reg .b64 %sp, %spl, %f, %w, %o, %x; .reg .b32 %t, %n; .reg .pred %p;
ld.param.u64 %o, [out];
mov.b64 %spl, buffer; cvta.local.u64 %sp, %spl;
mov.u32 %t, %tid.x; setp.ge.u32 %p, %t, 2; @%p bra OUT;
mov.b64 %w, word; cvta.global.u64 %w, %w;
{store}
{{ .param .b64 p0; .param .b64 p1; .param .b32 r;
mov.b64 %f, form; cvta.global.u64 %f, %f;
st.param.b64 [p0], %f; st.param.b64 [p1], %sp;
call.uni (r), vprintf, (p0, p1);
ld.param.b32 %n, [r]; }}
mul.wide.u32 %x, %t, 4; add.u64 %o, %o, %x; st.global.u32 [%o], %n;
OUT: ret;
}}"""


def test_printf(capsys: pytest.CaptureFixture[str]) -> None:
    form = "t=%d %5.2f|%-4u|%lld 0x%08x %s %c%%"
    store = """st.local.b32 [%spl], %t; st.local.b64 [%spl+8], 0d400921FB54442D18;
    st.local.b32 [%spl+16], 7; st.local.b64 [%spl+24], -5; st.local.b32 [%spl+32], 48879;
    st.local.b64 [%spl+40], %w; st.local.b32 [%spl+48], 65;"""
    counts = np.zeros(2, np.uint32)
    result = launch_text(_print(form, store), {"out": counts}, threads=64)
    assert not result.findings and counts.tolist() == [7, 7]
    line = "[block 0,0,0 thread {0}] t={0}  3.14|7   |-5 0x0000beef hi! A%\n"
    assert capsys.readouterr().out == line.format(0) + line.format(1)


def test_printf_reads_only_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    counts = np.zeros(2, np.uint32)
    result = launch_text(_print("%d %d", "st.local.b32 [%spl], 1;"), {"out": counts}, threads=32)
    assert [f.code for f in result.findings] == ["local_unwritten_read"]
    assert "vprintf" in result.findings[0].details["instruction"]
    assert not capsys.readouterr().out


def test_printf_of_an_unknown_conversion() -> None:
    counts = np.zeros(2, np.uint32)
    result = launch_text(_print("%k", ""), {"out": counts}, threads=32)
    assert [f.code for f in result.findings] == ["printf_format"]
    assert re.search("'%k'", result.findings[0].message)
