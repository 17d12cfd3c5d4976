"""The tensor core's inner loops as native functions: operands to float64, and their product.

`product_*` form D^T one register tile at a time: 16 rows of D by a few of its columns. An element
is a chain of fused multiply-adds over ascending k from +0; D is added to it and the sum rounded,
all to nearest even. So the bits are the same on every host, however wide its vectors are.
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from .jit import NativeModule, compile_functions, host_has
from .loops import Function, Loop

TILE_ROWS = 16
NEGATE, ACCUMULATE = 1, 2  # flags of product_float32
_CHUNK = 8  # 16-bit elements of 16 bytes
_C_TYPES: dict[str, Any] = {
    "i32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "ptr": ctypes.c_void_p,
    "void": None,
}


@cache
def functions() -> NativeModule:
    """The compiled functions, by name. Their arguments are integers: addresses, counts (above
    zero), and distances in elements.

    gather_T(window, flags, chunks, out, count) -> 1 if every byte's flag is 1, else 0:
        float64 values of T = float16 or bfloat16 from the 16-byte chunks numbered ``chunks``, one
        after the other.
    gather_turned_T(window, flags, chunks, out, rows, across) -> as above: of rows of ``across``
        chunks, each row becomes a column of ``out``, 8 * across by ``rows``.
    words_T(words, out, blocks, distance): from 8 columns of Tensor Memory, whose blocks of 16 lanes
        are ``distance`` cells apart, ``out``, 16 by 16 * blocks: low halves before high ones.
    product_D(a, b, d, row_blocks, columns, depth, a_k, b_k, b_n, d_column, d_block, flags): D^T
        from A, rows side by side and lines of k ``a_k`` apart, and B, whose elements are ``b_k``
        and ``b_n`` apart; D's columns, a multiple of 8 of them, are ``d_column`` apart, its blocks
        of 16 rows ``d_block``. D = float64 is the product; D = float32 heeds the flags: the product
        is negated, then D added.
    mma_S_T(plan, window, flags, cells, accumulate) -> 0 if a byte was not written, else 1: all of
        this in one call, D in float32. ``plan``: the int64 fields of `MmaPlan`; S, where A comes
        from: turned, gathered (both shared memory) or words (Tensor Memory, from ``cells`` on).
    """
    made = [
        write(dtype)
        for dtype in ("float16", "bfloat16")
        for write in (_gather, _gather_turned, _words)
    ]
    made += [_product("double"), _product("float")]
    made += [_mma(source, dtype) for dtype in ("float16", "bfloat16") for source in A_SOURCES]
    types = {
        f.name: ctypes.CFUNCTYPE(_C_TYPES[f.returns], *(_C_TYPES[t] for t in f.parameters))
        for f, _ in made
    }
    declared = sorted(set().union(*(f.intrinsics for f, _ in made)))
    text = "\n".join([*declared, *(f.text(result) for f, result in made)])
    return compile_functions(text, types)


A_SOURCES = ("turned", "gathered", "words")


class MmaPlan(NamedTuple):
    """What an MMA is before it meets memory, for ``mma_S_T``: arguments of the functions that it
    calls, in their units. ``a``: chunk numbers' address, or with words the first cell."""

    a: int
    b: int
    a_buffer: int
    b_buffer: int
    a_count: int  # rows of chunks; gathered: chunks; words: blocks
    a_other: int  # turned: chunks of a row; words: distance of the blocks; else unused
    b_count: int
    d: int  # first cell
    row_blocks: int
    columns: int
    depth: int
    a_k: int
    b_k: int
    b_n: int
    d_block: int
    flags: int  # NEGATE


def _widened(f: Function, bits: str, dtype: str, lanes: int) -> str:
    """Vector of 16-bit floats, as i16, to float64: exact."""
    if dtype == "float16":
        half = f.t(f"bitcast <{lanes} x i16> {bits} to <{lanes} x half>")
        single = f.t(f"fpext <{lanes} x half> {half} to <{lanes} x float>")
    else:
        word = f.t(f"zext <{lanes} x i16> {bits} to <{lanes} x i32>")
        word = f.t(f"shl <{lanes} x i32> {word}, splat (i32 16)")
        single = f.t(f"bitcast <{lanes} x i32> {word} to <{lanes} x float>")
    return f.t(f"fpext <{lanes} x float> {single} to <{lanes} x double>")


# -- operands --------------------------------------------------------------------------------------

_GATHER = ("ptr", "ptr", "ptr", "ptr", "i64")
_FLAGS = ("<16 x i8>", "splat (i8 1)")


def _chunk(f: Function, number: str, written: str, dtype: str) -> tuple[str, str]:
    """A chunk's values, and ``written`` and its bytes' flags."""
    offset = f.t(f"shl i64 {number}, 4")
    flags = f.load("<16 x i8>", f.at("i8", "%p1", offset), 16)
    bits = f.load("<8 x i16>", f.at("i8", "%p0", offset), 16)
    return _widened(f, bits, dtype, _CHUNK), f.t(f"and <16 x i8> {written}, {flags}")


def _every(f: Function, loop: Loop) -> str:
    """Whether every flag of the vector that the loop has carried is set."""
    (flags,) = loop.values
    one = f.call("i8", "llvm.vector.reduce.and.v16i8", ("<16 x i8>", flags))
    return f.t(f"zext i8 {one} to i32")


def _gather(dtype: str) -> tuple[Function, str]:
    f = Function(f"gather_{dtype}", "i32", _GATHER)
    with f.loop("%p4", _FLAGS) as chunks:
        number = f.load("i64", f.at("i64", "%p2", chunks.index), 8)
        values, written = _chunk(f, number, chunks.values[0], dtype)
        f.store("<8 x double>", values, f.at("<8 x double>", "%p3", chunks.index), 64)
        chunks.after = [written]
    return f, _every(f, chunks)


def _gather_turned(dtype: str) -> tuple[Function, str]:
    f = Function(f"gather_turned_{dtype}", "i32", (*_GATHER, "i64"))
    with f.loop("%p4", _FLAGS) as rows:
        numbers = f.at("i64", "%p2", f.t(f"mul i64 {rows.index}, %p5"))
        column = f.at("double", "%p3", rows.index)
        with f.loop("%p5", ("<16 x i8>", rows.values[0]), ("ptr", column)) as chunks:
            number = f.load("i64", f.at("i64", numbers, chunks.index), 8)
            values, written = _chunk(f, number, chunks.values[0], dtype)
            at = chunks.values[1]
            for k in range(_CHUNK):
                element = f.t(f"extractelement <8 x double> {values}, i64 {k}")
                f.store("double", element, at, 8)
                at = f.at("double", at, "%p4")
            chunks.after = [written, at]
        rows.after = [chunks.values[0]]
    return f, _every(f, rows)


def _words(dtype: str) -> tuple[Function, str]:
    f = Function(f"words_{dtype}", "void", ("ptr", "ptr", "i64", "i64"))
    lanes = f.t("shl i64 %p2, 4")
    with f.loop("%p2") as blocks:
        source = f.at("i32", "%p0", f.t(f"mul i64 {blocks.index}, %p3"))
        out = f.at("double", "%p1", f.t(f"shl i64 {blocks.index}, 4"))
        for _ in range(8):
            words = f.load("<16 x i32>", source, 4)
            source = f.at("i32", source, "128")
            high = f.t(f"lshr <16 x i32> {words}, splat (i32 16)")
            for half in (words, high):
                bits = f.t(f"trunc <16 x i32> {half} to <16 x i16>")
                f.store("<16 x double>", _widened(f, bits, dtype, 16), out, 8)
                out = f.at("double", out, lanes)
    return f, ""


# -- the product -----------------------------------------------------------------------------------


def _tile() -> tuple[int, int]:
    """Lanes of a vector and columns of a tile: as many accumulators as the registers hold beside
    a column of A."""
    if host_has("avx512f"):
        return 8, 8
    return (4, 2) if host_has("avx2") else (2, 2)


def _product(d_type: str) -> tuple[Function, str]:
    lanes, columns = _tile()
    vector = f"<{lanes} x double>"
    parts = TILE_ROWS // lanes
    name = "float64" if d_type == "double" else "float32"
    f = Function(f"product_{name}", "void", ("ptr",) * 3 + ("i64",) * 8 + ("i32",))
    flags = [f.t(f"and i32 %p11, {bit}") for bit in (NEGATE, ACCUMULATE)]
    negate, adds = [f.t(f"icmp ne i32 {flag}, 0") for flag in flags]
    count = f.t(f"udiv i64 %p4, {columns}")
    with f.loop(count) as tiles:
        first = f.t(f"mul i64 {tiles.index}, {columns}")
        b_first = f.at("double", "%p1", f.t(f"mul i64 {first}, %p8"))
        d_first = f.at(d_type, "%p2", f.t(f"mul i64 {first}, %p9"))
        b_starts = [b_first]
        for _ in range(columns - 1):
            b_starts.append(f.at("double", b_starts[-1], "%p8"))
        with f.loop("%p3") as blocks:
            a_start = f.at("double", "%p0", f.t(f"shl i64 {blocks.index}, 4"))
            zeros = [(vector, "zeroinitializer")] * (parts * columns)
            with f.loop("%p5", *zeros) as depth:
                a_at = f.at("double", a_start, f.t(f"mul i64 {depth.index}, %p6"))
                a = [f.load(vector, f.at(vector, a_at, str(i)), 8) for i in range(parts)]
                b_offset = f.t(f"mul i64 {depth.index}, %p7")
                for j, start in enumerate(b_starts):
                    b = _splat(f, f.load("double", f.at("double", start, b_offset), 8), lanes)
                    for i in range(parts):
                        total = depth.values[j * parts + i]
                        arguments = [(vector, x) for x in (a[i], b, total)]
                        depth.after.append(f.call(vector, f"llvm.fma.v{lanes}f64", *arguments))
            d_at = f.at(d_type, d_first, f.t(f"mul i64 {blocks.index}, %p10"))
            for j in range(columns):
                for i in range(parts):
                    place = f.at(f"<{lanes} x {d_type}>", d_at, str(i))
                    value = depth.values[j * parts + i]
                    if d_type == "float":
                        value = _rounded(f, value, place, lanes, negate, adds)
                    f.store(f"<{lanes} x {d_type}>", value, place, 4)
                d_at = f.at(d_type, d_at, "%p9")
    return f, ""


def _splat(f: Function, value: str, lanes: int) -> str:
    one = f.t(f"insertelement <{lanes} x double> poison, double {value}, i64 0")
    zeros = f"<{lanes} x i32> zeroinitializer"
    return f.t(f"shufflevector <{lanes} x double> {one}, <{lanes} x double> poison, {zeros}")


def _rounded(f: Function, value: str, place: str, lanes: int, negate: str, adds: str) -> str:
    """What a float32 D becomes: the product, negated if asked, and D, if asked."""
    vector, singles = f"<{lanes} x double>", f"<{lanes} x float>"
    minus = f.t(f"fneg {vector} {value}")
    value = f.t(f"select i1 {negate}, {vector} {minus}, {vector} {value}")
    before = f.t(f"fpext {singles} {f.load(singles, place, 4)} to {vector}")
    total = f.t(f"fadd {vector} {value}, {before}")
    value = f.t(f"select i1 {adds}, {vector} {total}, {vector} {value}")
    return f.t(f"fptrunc {vector} {value} to {singles}")


# -- all of an MMA ---------------------------------------------------------------------------------

_D_COLUMN = 128  # cells from one of D's columns to the next: Tensor Memory's lanes


def _mma(source: str, dtype: str) -> tuple[Function, str]:
    f = Function(f"mma_{source}_{dtype}", "i32", ("ptr", "ptr", "ptr", "ptr", "i32"))
    places = {name: f.at("i64", "%p0", str(k)) for k, name in enumerate(MmaPlan._fields)}
    plan = SimpleNamespace(**{name: f.load("i64", at, 8) for name, at in places.items()})
    a, b, a_buffer, b_buffer = (
        f.t(f"inttoptr i64 {x} to ptr") for x in (plan.a, plan.b, plan.a_buffer, plan.b_buffer)
    )
    memory = (("ptr", "%p1"), ("ptr", "%p2"))
    sizes = [("i64", plan.a_count)] + [("i64", plan.a_other)] * (source != "gathered")
    if source == "words":
        cells = f.at("i32", "%p3", plan.a)
        f.call_own("void", f"words_{dtype}", ("ptr", cells), ("ptr", a_buffer), *sizes)
        written = "1"
    else:
        name = f"gather_turned_{dtype}" if source == "turned" else f"gather_{dtype}"
        written = f.call_own("i32", name, *memory, ("ptr", a), ("ptr", a_buffer), *sizes)
    count = ("i64", plan.b_count)
    also = f.call_own("i32", f"gather_{dtype}", *memory, ("ptr", b), ("ptr", b_buffer), count)
    both = f.t(f"and i32 {written}, {also}")
    f.leave_unless(f.t(f"icmp ne i32 {both}, 0"), "0")
    adds = f.t(f"mul i32 %p4, {ACCUMULATE}")
    flags = f.t(f"or i32 {f.t(f'trunc i64 {plan.flags} to i32')}, {adds}")
    d = f.at("float", "%p3", plan.d)
    steps = (plan.row_blocks, plan.columns, plan.depth, plan.a_k, plan.b_k, plan.b_n)
    f.call_own(
        "void",
        "product_float32",
        *(("ptr", x) for x in (a_buffer, b_buffer, d)),
        *(("i64", x) for x in (*steps, str(_D_COLUMN), plan.d_block)),
        ("i32", flags),
    )
    return f, "1"
