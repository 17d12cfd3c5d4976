"""The PTX front end: scopes, operands, line numbers, and refusal of what it does not understand."""

from __future__ import annotations

import re

import pytest

from kernels.emulator.findings import UnsupportedPTX
from kernels.emulator.program import is_branch, operand_regs
from kernels.emulator.ptx import (
    Imm,
    Instr,
    Label,
    Mem,
    Module,
    PTXSyntaxError,
    Reg,
    RegPair,
    Sink,
    Sym,
    Vec,
    parse,
)
from kernels.emulator.ptx.ast import Special

BODY = 6  # lines in front of a body
HEAD = ".version 9.1\n.target sm_100a\n.address_size 64\n"


def module(body: str, params: str = "", top: str = "") -> Module:
    return parse(f"{HEAD}{top}\n.visible .entry k({params})\n{{\n{body}\n}}\n")


def body_of(body: str, **more: str) -> list[Instr]:
    return module(body, **more).entries["k"].body


def operands(line: str, declare: str = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;"):  # type: ignore[no-untyped-def]
    (ins,) = body_of(f"{declare}\n{line}", top=".shared .b8 room[64];")
    return ins.operands


R1, R2, RD1, P1 = Reg("%r1", "b32"), Reg("%r2", "b32"), Reg("%rd1", "b64"), Reg("%p1", "pred")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mov.b32 %r1, -1;", (R1, Imm(-1))),
        ("mov.b32 %r1, 0xFFFF0000;", (R1, Imm(0xFFFF0000))),
        ("mov.b32 %r1, -0x7f;", (R1, Imm(-0x7F))),
        ("mov.b32 %r1, 0b101U;", (R1, Imm(5))),
        ("mov.b32 %r1, 017;", (R1, Imm(15))),
        ("mov.b32 %r1, 0;", (R1, Imm(0))),
        ("mov.f32 %r1, 0f3F800000;", (R1, Imm(0x3F800000, True, 32))),
        ("mov.f64 %rd1, 0d3FF0000000000001;", (RD1, Imm(0x3FF0000000000001, True, 64))),
        ("mov.f32 %r1, 1.5;", (R1, Imm(0x3FF8000000000000, True, 64))),
        ("mov.u32 %r1, %tid.x;", (R1, Special("%tid.x"))),
        ("mov.b64 {%r1, %r2}, %rd1;", (Vec((R1, R2)), RD1)),
        ("mov.b64 {_, %r2}, %rd1;", (Vec((Sink(), R2)), RD1)),
        ("setp.eq.s32 %p1|%p2, %r1, 0;", (RegPair(P1, Reg("%p2", "pred")), R1, Imm(0))),
        ("setp.eq.and.s32 _|%p1, %r1, 0, !%p2;",
         (RegPair(Sink(), P1), R1, Imm(0), Reg("%p2", "pred", True))),
        ("ld.shared.b32 %r1, [%r2];", (R1, Mem(R2))),
        ("ld.shared.b32 %r1, [%r2+16];", (R1, Mem(R2, 16))),
        ("ld.shared.b32 %r1, [%r2+-16];", (R1, Mem(R2, -16))),
        ("ld.shared.b32 %r1, [%r2-0x10];", (R1, Mem(R2, -16))),
        ("ld.shared.b32 %r1, [1024];", (R1, Mem(Imm(1024)))),
        ("ld.shared.b32 %r1, [room];", (R1, Mem(Sym("room")))),
        ("ld.shared.b32 %r1, [room+8];", (R1, Mem(Sym("room"), 8))),
        ("st.shared.v2.b32 [%r1], {%r2, 7};", (Mem(R1), Vec((R2, Imm(7))))),
        ("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
         " [%r1], [%rd1, {%r2, 0}], [%r2+8];",
         (Mem(R1), Mem(RD1, 0, (R2, Imm(0))), Mem(R2, 8))),
        ("tcgen05.wait::ld.sync.aligned;", ()),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1,%r2},[%r3 + 4];",
         (Vec((R1, R2)), Mem(Reg("%r3", "b32"), 4))),
    ],
)  # fmt: skip
def test_operands(line: str, expected: tuple[object, ...]) -> None:
    assert operands(line) == expected


def test_opcode_and_text_keep_double_colons() -> None:
    (ins,) = body_of("tcgen05.fence::after_thread_sync ;")
    assert ins.op == "tcgen05.fence::after_thread_sync"
    assert ins.mods == ("tcgen05", "fence::after_thread_sync")


def test_guards() -> None:
    plain, negated, none = body_of(
        ".reg .pred %p1; .reg .b32 %r1;\n@%p1 mov.b32 %r1, 1; @!%p1 mov.b32 %r1, 2; mov.b32 %r1, 3;"
    )
    assert (plain.guard, negated.guard, none.guard) == (P1, Reg("%p1", "pred", True), None)


# -- scopes ---------------------------------------------------------------------------------------


def test_nested_scopes_repeat_names() -> None:
    """Inline asm declares P and LAB again in every scope; each means its own."""
    scope = """{ .reg .pred P; .reg .b32 t; mov.b32 t, %r0;
      LAB: setp.eq.s32 P, t, 0; @P bra DONE; { .reg .b32 t; mov.b32 t, 1; bra LAB; } DONE: }"""
    entry = module(f".reg .b32 %r<2>; {scope}\n{scope}").entries["k"]
    writes = [i.operands[0].name for i in entry.body if i.op == "mov.b32"]
    assert len(set(writes)) == 4, "two scopes with an inner one each: four registers named t"
    targets = [i.operands[0].name for i in entry.body if is_branch(i)]
    assert len(set(targets)) == 4
    tests = [i for i, ins in enumerate(entry.body) if ins.op == "setp.eq.s32"]
    ends = [5, 10]  # DONE of each scope stands behind its five instructions
    assert [entry.labels[t] for t in targets] == [ends[0], tests[0], ends[1], tests[1]]
    assert entry.registers[writes[0]] == "b32"


def test_inner_scope_hides_and_outer_returns() -> None:
    a, b, c = body_of(".reg .b32 x; mov.b32 x, 1; { .reg .b64 x; mov.b64 x, 2; } mov.b32 x, 3;")
    assert a.operands[0] == c.operands[0] == Reg("x", "b32")
    assert b.operands[0].kind == "b64"


def test_label_of_the_enclosing_scope() -> None:
    """A jump out of a scope, forwards, to a label that stands later."""
    entry = module(".reg .b32 %r<2>; { { bra OUT; } } mov.b32 %r1, 0; OUT: ret;").entries["k"]
    (jump,) = [i for i in entry.body if is_branch(i)]
    assert entry.labels[jump.operands[0].name] == 2


def test_registers_of_vector_type() -> None:
    """quack's cluster-wide tile scheduler stores one from inline assembly."""
    write, store = body_of(
        ".reg .b32 %r<3>; { .reg .v4 .s32 v; mov.s32 v.z, %r1; st.shared.v4.s32 [%r2], v; }"
    )
    assert isinstance(store.operands[1], Vec)
    elements = [item.name for item in store.operands[1].items]
    assert [name.split("@")[0] for name in elements] == ["v.x", "v.y", "v.z", "v.w"]
    assert write.operands[0].name == elements[2]


def test_colours_name_the_elements_too() -> None:
    red, alpha = body_of(".reg .v2 .b32 v; mov.b32 v.r, 1; mov.b32 v.g, 2;")
    assert [ins.operands[0].name for ins in (red, alpha)] == ["v.x", "v.y"]


def test_register_ranges_with_digits_in_the_prefix() -> None:
    a, b = body_of(".reg .b32 %r<12>; .reg .b64 %r1<3>; mov.b32 %r11, 0; mov.b64 %r12, 0;")
    assert (a.operands[0].kind, b.operands[0].kind) == ("b32", "b64")


@pytest.mark.parametrize(
    ("declared", "kind"),
    [(".pred", "pred"), (".b16", "b16"), (".f32", "b32"), (".s64", "b64"), (".u16", "b16")],
)
def test_register_kinds(declared: str, kind: str) -> None:
    (ins,) = body_of(f".reg {declared} x; mov{declared} x, {'0.0' if '.f' in declared else 0};")
    assert (ins.operands[0].kind, ins.operands[0].type) == (kind, declared[1:])


# -- lines, files, comments -----------------------------------------------------------------------


def test_comments_and_strings() -> None:
    text = f"""{HEAD}// .entry nobody {{
.file 1 "/a /* no comment */ dir/x.entry.py"
/* .entry two (
 ; }} */
.entry k() // the one
{{ .pragma "no;unroll }}"; .reg .b32 %r1; /* in
between */ mov.b32 %r1, 1; // mov.b32 %r1, 2;
ret; }}
"""
    parsed = parse(text)
    assert list(parsed.entries) == ["k"]
    mov, ret = parsed.entries["k"].body
    assert (mov.op, mov.line, ret.line) == ("mov.b32", 10, 11)
    assert parsed.files == {1: "/a /* no comment */ dir/x.entry.py"}


def test_source_lines_follow_loc() -> None:
    parsed = module(
        """.reg .b32 %r1;
        mov.b32 %r1, 0;
        .loc 1 12 3
        mov.b32 %r1, 1;
        .loc 2 7 9, function_name $L__info_string0, inlined_at 1 20 3
        mov.b32 %r1, 2;
        .loc 1 0 0
        mov.b32 %r1, 3;""",
        top='.file 1 "a.py"\n.file 2 "b.py"',
    )
    assert [parsed.source_of(i) for i in parsed.entries["k"].body] == ["", "a.py:12", "b.py:7", ""]
    assert parsed.entries["k"].body[2].loc == (2, 7, 9)


def test_statements_over_several_lines() -> None:
    a, b = body_of(".reg .b32 %r<3>;\nadd.s32\n  %r1,\n  %r2, 1; mov.b32 %r2, %r1;\n")
    assert (a.op, a.line, b.line) == ("add.s32", 8, 10)


def test_entries_parameters_and_shared_variables() -> None:
    text = f"""{HEAD}.extern .shared .align 1024 .b8 dyn[];
.shared .align 8 .b64 bars[4];
.visible .entry one(.param .u64 .ptr .global .align 16 a, .param .align 64 .b8 map[128],
  .param .f32 s) .reqntid 384, 1, 1 .maxnreg 168 {{ .shared .b32 word; ret; }}
.entry two() {{ ret; }}
"""
    parsed = parse(text)
    one = parsed.entries["one"]
    assert [(p.name, p.nbytes, p.align, p.offset) for p in one.params] == [
        ("a", 8, 8, 0), ("map", 128, 64, 64), ("s", 4, 4, 192)
    ]  # fmt: skip
    assert one.param_bytes == 196
    shared = [(v.name, v.nbytes, v.align, v.extern) for v in one.shared]
    assert shared == [("dyn", 0, 1024, True), ("bars", 32, 8, False), ("word", 4, 4, False)]
    assert parsed.entries["two"].params == ()
    assert (parsed.version, parsed.target) == ("9.1", "sm_100a")


# -- refusal --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("ret;\nmov.b32 %r1, 0;", 2, "'%r1' is not declared"),
        (".reg .b32 %r<3>;\nmov.b32 %r3, 0;", 2, "'%r3' is not declared"),
        ("ret;\n\nbra NOWHERE;", 3, "label 'NOWHERE' is not defined"),
        (".reg .b32 %r1;\n@%r1 ret;", 2, "not a predicate"),
        ("@%p1 ret;", 1, "not a predicate"),
        ("L: ret;\nL: ret;", 2, "defined twice"),
        (".reg .b32 a;\n.reg .b64 a;", 2, "declared twice"),
        (".reg .v2 .b32 a;\n.reg .v4 .b32 a;", 2, "declared twice"),
        (".reg .v2 .b32 a;\nmov.b32 a.z, 0;", 2, "not understood"),
        (".reg .b32 %r1;\nmov.b32 %r1, 0f3F8;", 2, "'0f3F8' is not understood"),
        (".reg .b32 %r1;\nmov.b32 %r1, 09;", 2, "'09' is not understood"),
        (".reg .b32 %r1;\nld.shared.b32 %r1, [%r1+x];", 2, "is not understood"),
        (".reg .b32 %r1;\nld.shared.b32 %r1, [%r1, 4];", 2, "is not understood"),
        (".reg .b32 %r1;\nmov.b32 %r1, %r1 %r1;", 2, "is not understood|not declared"),
        ("ret;\n7up.b32 x;", 2, "not an instruction"),
        ("ret;\nret", 2, "statement has no end|not closed"),
    ],
)
def test_syntax_errors_name_the_line(body: str, line: int, message: str) -> None:
    with pytest.raises(PTXSyntaxError, match=rf"^ptx:{BODY + line}: .*(?:{message})"):
        module(body)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("ret;\n.local .v4 .b32 x;", 2),
        (".reg .b32 %r1;\ncall (%r1), %r1, (%r1);", 2),
        (".reg .pred %p;\n@%p call f, ();", 2),
        ("ret;\ncall nobody, ();", 2),
        ("ret;\n.reg .b8x4 x;", 2),
        ("ret;\n.branchtargets A, B;", 2),
    ],
)
def test_what_is_not_modelled_names_the_line(body: str, line: int) -> None:
    with pytest.raises(UnsupportedPTX, match=rf"^ptx:{BODY + line}: .*not modelled"):
        module(body)


@pytest.mark.parametrize(
    "top",
    [
        ".global .texref t;",
        ".global .u64 g = f;",
        ".global .attribute(.managed) .b32 m;",
        ".const .f32 c[2] = {0d3FF0000000000000};",
        ".global .b8 g[2] = {1, 2, 3};",
        ".func (.reg .b32 %r) f(.reg .b32 %a) { ret; }",
    ],
)
def test_module_parts_that_are_not_modelled(top: str) -> None:
    with pytest.raises((UnsupportedPTX, PTXSyntaxError), match=r"^ptx:4: "):
        module("ret;", top=top)


def test_module_variables() -> None:
    top = """.visible .global .align 16 .b8 g[8] = {1, 0xFF, 010, 0};
.const .align 4 .f32 c[2] = {1.5, 0fC0000000};
.global .s16 m[2][2] = {{1, -1}, {2, 3}};
.global .b64 open[] = {1, 2};
.global .f64 d = 0d4000000000000000;
.shared .b32 s[4];"""
    found = {v.name: v for v in module("ret;", top=top).variables}
    assert list(found) == ["g", "c", "m", "open", "d"]
    assert (found["g"].nbytes, found["g"].align, found["g"].data) == (8, 16, b"\1\xff\x08\0")
    assert (found["c"].space, found["c"].data.hex()) == ("const", "0000c03f000000c0")
    assert (found["m"].nbytes, found["m"].data.hex()) == (8, "0100ffff02000300")
    assert (found["open"].nbytes, found["open"].align) == (16, 8)
    assert found["d"].data == bytes(7) + b"\x40"


def test_carries_become_operands() -> None:
    body = """.reg .b32 %r<4>;
add.cc.u32 %r0, %r1, %r2;
addc.cc.u32 %r0, %r1, %r2;
madc.hi.u32 %r0, %r1, %r2, %r3;
mad.lo.u32 %r0, %r1, %r2, %r3;"""
    first, second, third, plain = module(body).entries["k"].body
    carry = Reg("%CC.CF", "pred")
    assert first.operands == (RegPair(Reg("%r0", "b32"), carry), *first.operands[1:])
    assert len(first.operands) == 3
    assert second.operands[0] == first.operands[0] and second.operands[-1] == carry
    assert third.operands[0] == Reg("%r0", "b32") and third.operands[4] == carry
    assert len(plain.operands) == 4


FUNCTION = """.func (.param .b32 out) twice(.param .b32 in)
{
.reg .b32 %r<3>;
.reg .pred %p;
ld.param.b32 %r1, [in];
setp.eq.u32 %p, %r1, 0;
@%p bra DONE;
add.u32 %r1, %r1, %r1;
@!%p ret;
DONE:
st.param.b32 [out], %r1;
ret;
}"""
CALL = """{
.param .b32 a; .param .b32 r;
st.param.b32 [a], %r1;
call.uni (r), twice, (a);
ld.param.b32 %r1, [r];
}
"""


def test_calls_are_inlined_each_with_registers_of_its_own() -> None:
    entry = module(f".reg .b32 %r<3>;\n{CALL}{CALL}ret;", top=FUNCTION).entries["k"]
    assert len(entry.local) == 4 and len({v.name for v in entry.local}) == 4
    ops = [ins.op for ins in entry.body]
    once = "st.local.b32 ld.local.b32 setp.eq.u32 bra add.u32 bra st.local.b32 bra ld.local.b32"
    assert ops == [*once.split() * 2, "ret"]
    stored, inner = entry.body[0], entry.body[1]
    assert stored.operands[1] == Reg("%r1", "b32")
    assert inner.operands[0] != Reg("%r1", "b32")  # the function's own %r1
    assert inner.operands[1] == stored.operands[0]  # the parameter's variable
    assert entry.body[10].operands[0] != inner.operands[0]
    leave = entry.body[5].operands[0]
    assert isinstance(leave, Label) and entry.labels[leave.name] == 8


def test_recursion_is_refused() -> None:
    top = ".func f() { call f, (); ret; }"
    with pytest.raises(UnsupportedPTX, match="f calls itself"):
        module("call f, ();", top=top)


@pytest.mark.parametrize("text", ["", "hello", "\x7fELF\x02", ".version 9.1\n"])
def test_not_ptx(text: str) -> None:
    with pytest.raises(PTXSyntaxError, match=r"not a PTX file"):
        parse(text)


# -- our own kernel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemm_ptx() -> str:
    torch = pytest.importorskip("torch")
    pytest.importorskip("cutlass")
    from kernels.blackwell.gemm import Gemm
    from kernels.emulator.capture import ptx_of

    a, b, c = (torch.zeros(128, 128, dtype=torch.bfloat16) for _ in range(3))
    return ptx_of(Gemm(), a, b, c)


def _statements(text: str) -> list[str]:
    """Opcodes in order, by another road: cut at semicolons, leading labels and braces dropped."""
    text = re.sub(r"//[^\n]*|^\s*\.loc[^\n]*", "", text, flags=re.M)
    body = text[text.index("{", text.index(".entry")) + 1 : text.rindex("}")]
    out = []
    for statement in body.split(";"):
        bare = re.sub(r"^(?:\s|[{}]|[\w$]+:)+", "", statement)
        bare = re.sub(r"^@!?[\w%$]+\s+", "", bare)
        if bare and not bare.startswith("."):
            out.append(bare.split()[0])
    return out


def test_a_compiled_kernel_is_read_in_full(gemm_ptx: str) -> None:
    """Every statement of the text becomes an instruction, at its line, with a source line."""
    parsed = parse(gemm_ptx)
    (entry,) = parsed.entries.values()
    assert [i.op for i in entry.body] == _statements(gemm_ptx)
    assert any(i.op.startswith("tcgen05.mma.") for i in entry.body)
    lines = gemm_ptx.splitlines()
    assert all(i.op in lines[i.line - 1] for i in entry.body)
    assert all(i.operands[0].name in entry.labels for i in entry.body if is_branch(i))
    used = [r for i in entry.body for op in i.operands for r in operand_regs(op)]
    assert all(entry.registers[r.name] == r.kind for r in used if isinstance(r, Reg))
    sources = {parsed.source_of(i).split(":")[0].rsplit("/", 1)[-1] for i in entry.body}
    assert "gemm.py" in sources


def test_inline_assembly_has_the_line_of_its_call():
    """NVVM writes a .loc for each line of inline assembly, counted on from the call's."""
    text = """.version 9.1
.target sm_100a
.address_size 64
.file 1 "kernel.py"
.visible .entry k()
{
.reg .b32 %r<3>;
.loc 1 74 8
// begin inline asm
{
.loc 1 76 8
mov.u32 %r1, 1;
}
// end inline asm
.loc 1 80 2
mov.u32 %r2, 2;
ret;
}
"""
    module = parse(text)
    lines = [module.source_of(ins) for ins in module.entries["k"].body]
    assert lines == ["kernel.py:74", "kernel.py:80", "kernel.py:80"]
