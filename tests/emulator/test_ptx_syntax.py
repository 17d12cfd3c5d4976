"""PTX is printed back unchanged, and an edit of one statement changes that statement alone."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable

import pytest

from kernels.emulator.findings import UnsupportedPTX
from kernels.emulator.ptx import Module, PTXSyntaxError, Statement, cut, parse
from tests.emulator.samples import fresh_seed

TEXT = """// Made by hand
.version 9.1
.target sm_100a
.address_size 64 /* bits */
\t.file\t1 "/tmp/no;such{dir}/k.py" , 0, 17
.extern .shared .align 1024 .b8 dyn[];
.global .b16 table[2][2] = {{1, -1}, {2, 3}};
.weak .func (.param .b32 out) twice(.param .b32 in);
.func (.param .b32 out) twice
(
  .param .b32 in // taken
)
{
  .reg .b32 %r<3>; ld.param.b32 %r1, [in];
  add.u32 %r1, %r1, %r1; st.param.b32 [out], %r1; ret;
}
.visible .entry k(
  .param .u64 .ptr .global .align 16 a
)
.reqntid 32, 1, 1
.maxnreg 40
{
  .reg .b32 %r<9>;
  .reg .pred %p<3>;
  .loc 1 10 2, function_name $L__info_string0, inlined_at 1 20 3
  // begin inline asm
  { .reg .pred P; LAB : setp.eq.s32 P, %r1, 0; @!P bra LAB; }
  // end inline asm
  mov.b32\t%r2 , /* ; } */ 0x7F ;
  st.shared.v2.b32 [ dyn + 8 ], { %r1,
                                 %r2 };
  .pragma "nounroll; {";
  { .param .b32 x; .param .b32 y;
    st.param.b32 [x], %r2; call.uni (y), twice, (x); ld.param.b32 %r3, [y]; }
  ret;
}
.section .debug_str
{
$L__info_string0: .b8 102,0
}
// the end"""


def test_a_file_is_printed_back_unchanged() -> None:
    parsed = parse(TEXT)
    assert str(parsed) == TEXT
    kinds = [statement.kind for statement in parsed.syntax.statements]
    assert kinds.count("header") == 3 and kinds.count("section") == 1
    assert [s.line for s in parsed.syntax.statements if s.kind == "header"] == [8, 9, 17]
    assert [s.in_asm for s in parsed.syntax.statements if s.kind == "label"] == [True]


def test_statements_know_what_they_say() -> None:
    statements = [s for s in cut(TEXT).statements if s.text.startswith(("mov", "st.shared"))]
    move, store = statements
    assert move.code == "mov.b32 %r2 , 0x7F"
    assert store.code == "st.shared.v2.b32 [ dyn + 8 ], { %r1, %r2 }"
    assert move.lead == "\n  // end inline asm\n  "
    assert TEXT.splitlines()[move.line - 1].lstrip().startswith("mov.b32")
    assert store.line == move.line + 1


def test_an_edit_changes_one_statement() -> None:
    syntax = cut(TEXT)
    at = next(i for i, s in enumerate(syntax.statements) if s.text.startswith("mov.b32"))
    syntax.statements[at] = syntax.statements[at].with_code("mov.b32 %r2, 5;")
    assert str(syntax) == TEXT.replace("mov.b32\t%r2 , /* ; } */ 0x7F ;", "mov.b32 %r2, 5;")
    assert parse(str(syntax)).entries["k"].body[2].text == "mov.b32 %r2, 5"


@pytest.mark.parametrize("code", ["mov.b32 %r1, 5", "ret; ret;", "", "}", "ret; // and"])
def test_an_edit_is_one_statement(code: str) -> None:
    (statement,) = cut("ret;", inside=True).statements
    with pytest.raises(PTXSyntaxError):
        statement.with_code(code)


def _meaning(module: Module) -> list[object]:
    """What a module does: everything but lines, text and the numbers of scopes."""
    out: list[object] = [module.version, module.target, module.files, module.variables]
    for entry in module.entries.values():
        numbers: dict[str, int] = {}
        body = [(ins.op, ins.operands, ins.guard, ins.loc) for ins in entry.body]
        out.append(
            re.sub(
                r"@\d+",
                lambda m: f"@{numbers.setdefault(m[0], len(numbers))}",  # noqa: B023
                repr([body, entry.params, entry.shared, entry.local, entry.directives]),
            )
        )
        out.append(sorted(entry.labels.values()))
    return out


def _spaced(statement: Statement, rng: random.Random) -> Statement:
    """The statement with other white space and comments wherever PTX allows any."""
    gaps = [" ", "\n", "\t ", " /* x; } */ ", " // {\n", " /* a\nb */"]
    lead = rng.choice(["", statement.lead, *gaps])
    if statement.kind in ("words", "label", "section", "open", "close"):
        return statement._replace(lead=statement.lead + lead + "\n")
    text = statement.text
    if not re.search(r'["/]', text):
        gap = re.compile(r",\s*|(?<=\w)\s*(?=[,;\]}])")
        text = gap.sub(lambda m: m[0].strip() + rng.choice(["", "", *gaps]), text)
    keep = statement.lead if "inline asm" in statement.lead else ""
    return statement._replace(lead=keep + lead + "\n", text=text)


def _respaced(text: str, rng: random.Random) -> str:
    syntax = cut(text)
    syntax.statements = [_spaced(statement, rng) for statement in syntax.statements]
    return str(syntax)


@pytest.mark.parametrize("part", range(8))
def test_white_space_and_comments_mean_nothing(part: int) -> None:
    """Wherever they stand; and such a file is printed back unchanged as well."""
    rng = random.Random(seed := fresh_seed())
    other = _respaced(TEXT, rng)
    assert other != TEXT
    assert str(parse(other)) == other
    assert _meaning(parse(other)) == _meaning(parse(TEXT)), f"FA4_TEST_SEED={seed}"


def _gemm() -> str:
    import torch

    from kernels.blackwell.gemm import Gemm
    from kernels.emulator.capture import ptx_of

    return ptx_of(Gemm(), *(torch.zeros(128, 128, dtype=torch.bfloat16) for _ in range(3)))


def _forward(gpu: str) -> str:
    import torch

    from kernels.emulator.capture import ptx_of

    if gpu == "b200":
        from kernels.blackwell.forward import AttentionForward
        from kernels.common.plan import KernelPlan

        kernel = AttentionForward(KernelPlan.forward())
    q, k, v, out = (torch.zeros(1, 256, 2, 128, dtype=torch.bfloat16) for _ in range(4))
    return ptx_of(kernel, q, k, v, out, torch.zeros(1, 2, 256), 0.1, None)


@pytest.mark.parametrize("make", [_gemm, lambda: _forward("b200")], ids=["gemm", "forward"])
def test_our_kernels_are_printed_back_unchanged(make: Callable[[], str]) -> None:
    for name in ("torch", "cutlass"):
        pytest.importorskip(name)
    text = make()
    parsed = parse(text)
    assert str(parsed) == text
    assert sum(len(entry.body) for entry in parsed.entries.values()) > 200
    respaced = _respaced(text, random.Random(fresh_seed()))
    assert _meaning(parse(respaced)) == _meaning(parsed)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (".shared .b32 a\n.entry k() { ret; }", 4, "not a declaration|no end"),
        (".entry k() { ret; }\nret;", 5, "not a declaration"),
        (".entry k() { ret; } }", 4, "no brace is open"),
        (".entry k()\n{\n{ ret; }", 5, "not closed"),
        (".entry k() { ret; }\n.version 9.0", 5, "a second .version"),
        (".entry k() { ret; }\n.entry k() { ret; }", 5, "a second entry k"),
        (".entry k()\n{\nret;;\n}", 6, "ends no statement"),
        (".entry k()\n{\nret\n}", 6, "no end"),
        (".entry k()\n{\nret; /* ret;\n}", 6, "no end"),
        (".entry k(.param .b32)\n{ ret; }", 4, "is not understood"),
        ("{ ret; }", 4, "outside every function"),
    ],
)
def test_what_is_no_module_is_refused_at_its_line(text: str, line: int, message: str) -> None:
    head = ".version 9.1\n.target sm_100a\n.address_size 64\n"
    with pytest.raises(PTXSyntaxError, match=rf"^ptx:{line}: .*(?:{message})"):
        parse(head + text)


def test_declarations_that_nobody_knows_are_refused() -> None:
    with pytest.raises(UnsupportedPTX, match="^ptx:3: this declaration is not modelled"):
        parse(".version 9.1\n.target sm_90\n.alias f, g;\n")


def test_long_files_are_read_in_linear_time() -> None:
    """No rule of the grammar backtracks: a statement without an end costs one pass."""
    body = "add.s32 %r1, %r1, {1, 2}, \n" * 20_000
    depth = sys.getrecursionlimit()
    with pytest.raises(PTXSyntaxError, match="no end"):
        cut("{" + body, inside=True)
    assert sys.getrecursionlimit() == depth
