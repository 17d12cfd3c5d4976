"""The operands of every modelled instruction, by opcode: what ptxas refuses is refused here.

One row is a pattern that the whole opcode matches, and its slots (`operand_types`), or "never" for
forms that do not exist. The first row that matches counts. Opcodes without a row are none that the
machine executes: it refuses them when it decodes. Which modifiers exist is up to the tables of the
machine and of native code. Syntax of each instruction: PTX ISA 9.1 chapter 9.
"""

from __future__ import annotations

import re
from functools import cache

from .ast import Operand
from .operand_types import Shape, Slot, place_of_mismatch, read_slots, shape_of

_MODS = r"(?:\.[\w:]+)*?"
_INT = r"[us](?:16|32|64)"
_BITS = r"b(?:16|32|64)"
_FLOAT = r"f16x2|bf16x2|f32x2|f16|bf16|f32|f64"
_ANY = r"[busf](?:8|16|32|64)|b128|f16x2|bf16x2|bf16"
_T = rf"(?P<t>{_ANY}|f32x2|u16x2|s16x2)"

_M = r"(?P<t>[bus](?:8|16|32|64)|b128|f32|f64)"
# What atom and red do with which types.
_COMBINED = (
    rf"(?:(?:and|or|xor){_MODS}(?=\.b(?:32|64)$)|(?:inc|dec){_MODS}(?=\.u32$)|"
    rf"add{_MODS}(?=\.(?:u32|s32|u64|f32|f64)$)|add\.noftz{_MODS}(?=\.b?f16(?:x2)?$)|"
    rf"(?:min|max){_MODS}(?=\.[us](?:32|64)$))\.(?P<t>\w+)"
)
_PACKED = (
    r"(?:add(?:\.L2::cache_hint)?\.v(?P<n>[24])\.(?P<t>f32)|"
    r"(?:add|min|max)\.noftz(?:\.L2::cache_hint)?\.v(?P<m>[248])\.(?P<u>b?f16(?:x2)?))"
)
# What the bulk reductions to shared and to global memory do with which types.
_BULK_SHARED = r"(?:(?:and|or|xor)\.b32|(?:add|min|max)\.[us]32|add\.u64|(?:inc|dec)\.u32)"
_BULK_GLOBAL = (
    r"(?:(?:and|or|xor)\.b(?:32|64)|add\.(?:u32|s32|u64|f32|f64)|add\.noftz\.b?f16|"
    r"(?:min|max)\.(?:[us](?:32|64)|b?f16)|(?:inc|dec)\.u32)"
)

_ROWS: tuple[tuple[str, str], ...] = (
    # Arithmetic (9.7.1 to 9.7.6)
    (r"mul\.wide\.(?P<t>[us](?:16|32))", "=wide t t"),
    (r"mad\.wide\.(?P<t>[us](?:16|32))", "=wide t t wide"),
    (rf"(?:add|sub){_MODS}\.f32\.(?P<t>b?f16)", "=f32 t f32"),
    (rf"fma{_MODS}\.f32\.(?P<t>b?f16)", "=f32 t t f32"),
    (r"(?:min|max)(?:\.ftz)?(?:\.NaN)?\.(?P<t>f32)", "=t t t | =t t t t"),
    (r"(?:min|max)(?:\.ftz)?(?:\.NaN)?\.abs\.(?P<t>f32)", "=t t t t"),
    (r"(?:min|max)(?:\.ftz)?(?:\.NaN)?\.xorsign\.abs\.(?P<t>f32|b?f16(?:x2)?)", "=t t t"),
    (rf"(?:min|max)(?:\.ftz|\.NaN|\.relu)*\.{_T}", "=t t t"),
    (rf"(?:add|sub|mul|mul24|div|rem|addc|subc|copysign){_MODS}\.{_T}", "=t t t"),
    (rf"(?:mad|madc|mad24|fma|sad){_MODS}\.{_T}", "=t t t t"),
    (rf"(?:abs|neg|sqrt|rcp|rsqrt|ex2|lg2|sin|cos|tanh|brev|not|cnot){_MODS}\.{_T}", "=t t"),
    (r"not\.pred", "=pred pred"),
    (r"(?:popc|clz)\.(?P<t>b(?:32|64))", "=i32 t"),
    (rf"bfind(?:\.shiftamt)?\.(?P<t>{_INT})", "=i32 t"),
    (rf"bfe\.(?P<t>{_INT})", "=t t i32 i32"),
    (r"bfi\.(?P<t>b(?:32|64))", "=t t t i32 i32"),
    (r"dp[24]a(?:\.lo|\.hi)?\.([us]32)\.(?P<t>[us]32)", "=i32 t t i32"),
    (rf"testp\.\w+\.(?P<t>{_FLOAT})", "=pred t"),
    # Comparison, selection, logic (9.7.7, 9.7.8)
    (rf"setp\.\w+\.(?:and|or|xor){_MODS}\.(?P<t>bf16)", "=pred_ t t flag"),
    (rf"setp\.\w+\.(?:and|or|xor){_MODS}\.(?P<t>bf16x2)", "=pred_[|p] t t flag"),
    (rf"setp\.\w+\.(?:and|or|xor){_MODS}\.(?P<t>f16)", "=pred_ t t pred"),
    (rf"setp\.\w+{_MODS}\.(?P<t>b?f16)", "=pred_ t t"),
    (rf"setp\.\w+\.(?:and|or|xor){_MODS}\.{_T}", "=pred_[|p] t t pred"),
    (rf"setp\.\w+{_MODS}\.{_T}", "=pred_[|p] t t"),
    (rf"selp\.{_T}", "=t t t pred"),
    (r"(?:and|or|xor)\.pred", "=pred pred pred"),
    (rf"(?:and|or|xor)\.(?P<t>{_BITS})", "=t t t"),
    (rf"(?:shl|shr)\.(?P<t>{_BITS}|{_INT})", "=t t i32"),
    (r"shf\.[lr]\.(?:wrap|clamp)\.b32", "=b32 b32 b32 i32"),
    (r"lop3\.b32", "=b32 b32 b32 b32 #"),
    (r"prmt\.b32(?:\.\w+)?", "=b32 b32 b32 b32"),
    # Data movement and conversion (9.7.9)
    (r"mov\.pred", "=pred pred"),
    (rf"mov\.(?P<t>{_BITS}|b128)",
     "=t &t | =t {half*2} | =t {quarter*4} | ={half*2} t | ={quarter*4} t"),
    (rf"mov\.{_T}", "=t &t"),
    (rf"cvt\.rs{_MODS}\.(?P<t>b?f16x2)\.f32", "=t f32 f32 b32"),
    (rf"cvt{_MODS}\.(?P<t>f16x2)\.f32", "=~t ~f32 ~f32"),
    (rf"cvt{_MODS}\.(?P<t>bf16x2|e4m3x2|e5m2x2|ue8m0x2|e2m1x2|e2m3x2|e3m2x2)\.f32",
     "=t f32 f32"),
    (rf"cvt{_MODS}\.(?P<t>e[45]m[32]x2|ue8m0x2|e2m[13]x2|e3m2x2)\.(?P<a>b?f16x2)", "=t a"),
    (rf"cvt{_MODS}\.scaled::n2::ue8m0{_MODS}\.bf16x2\.s2f6x2", "=bf16x2 s2f6x2 ue8m0x2"),
    (rf"cvt{_MODS}\.scaled::n2::ue8m0{_MODS}\.s2f6x2\.f32", "=s2f6x2 f32 f32 ue8m0x2"),
    (rf"cvt{_MODS}\.bf16x2\.s2f6x2", "=bf16x2 s2f6x2"),
    (rf"cvt{_MODS}\.s2f6x2\.f32", "=s2f6x2 f32 f32"),
    (rf"cvt{_MODS}\.(?P<t>[us]\d+)\.(?P<a>bf16)", "=t a"),
    (rf"cvt{_MODS}\.(?P<t>bf16)\.(?P<a>[us]\d+|f16|f64)", "=t a"),
    (rf"cvt{_MODS}\.(?P<t>bf16|tf32)\.(?P<a>f32)", "=t a"),
    (rf"cvt{_MODS}\.(?P<t>b?f16x2)\.(?P<a>e4m3x2|e5m2x2|ue8m0x2|e2m1x2|e2m3x2|e3m2x2)", "=t a"),
    (rf"cvt{_MODS}\.(?P<t>[us]\d+)\.(?P<a>[us]\d+)", "=~t ~%a"),
    (rf"cvt{_MODS}\.(?P<t>{_ANY})\.(?P<a>{_ANY})", "=~t ~a"),
    (r"cvta(?:\.to)?\.[\w:]+\.(?P<t>u(?:32|64))", "=t &t"),
    (r"isspacep\.[\w:]+", "=pred &i64 | =pred i32"),
    (r"mapa(?:\.shared::cluster)?\.(?P<t>u(?:32|64))", "=t &t i32"),
    (r"getctarank(?:\.shared::cluster)?\.(?P<t>u(?:32|64))", "=i32 &t"),
    (r"(?:ld|st)\.(?!(?:[\w:.]+\.)?global\.)[\w:.]*(?:v8\.[busf]\d+|v4\.[busf]64)", "never"),
    (rf"ldu?{_MODS}\.v(?P<n>[248])\.{_M}", "={~t*n} @ i64:L2::cache_hint"),
    (rf"ldu?{_MODS}\.{_M}", "=~t @ i64:L2::cache_hint"),
    (rf"st\.async{_MODS}\.v(?P<n>[24])\.{_M}", "@ {t*n} @"),
    (rf"st\.async{_MODS}\.{_M}", "@ t @"),
    (r"red\.async[\w:.]*\.(?:inc|dec)\.(?P<t>u32)", "@ t @"),
    (r"red\.async[\w:.]*\.(?:min|max|add)\.(?P<t>[us]32|u64)", "@ t @"),
    (r"red\.async[\w:.]*\.(?:and|or|xor)\.(?P<t>b32)", "@ t @"),
    (rf"st{_MODS}\.v(?P<n>[248])\.{_M}", "@ {~t*n} i64:L2::cache_hint"),
    (rf"st{_MODS}\.{_M}", "@ ~t i64:L2::cache_hint"),
    (rf"atom{_MODS}\.cas{_MODS}\.(?P<t>b(?:16|32|64|128))", "=t_ @ t t i64:L2::cache_hint"),
    (rf"atom{_MODS}\.exch{_MODS}\.(?P<t>b(?:32|64|128))", "=t_ @ t i64:L2::cache_hint"),
    (rf"atom{_MODS}\.{_PACKED}", "={t*n} @ {t*n} i64:L2::cache_hint"),
    (rf"red{_MODS}\.{_PACKED}", "@ {t*n} i64:L2::cache_hint"),
    (rf"atom{_MODS}\.{_COMBINED}", "=t_ @ t i64:L2::cache_hint"),
    (rf"red{_MODS}\.{_COMBINED}", "@ t i64:L2::cache_hint"),
    (rf"(?:prefetch|prefetchu){_MODS}", "@"),
    (rf"(?:applypriority|discard){_MODS}", "@ #"),
    (r"createpolicy\.fractional[\w:.]*\.b64", "=b64 f32?"),
    (r"createpolicy\.range[\w:.]*\.b64", "=b64 @ i32 i32"),
    (r"createpolicy\.cvt[\w:.]*\.b64", "=b64 b64"),
    # Asynchronous copies (9.7.9.25, 9.7.9.27)
    (r"cp\.async\.(?:bulk\.)?commit_group|cp\.async\.wait_all", ""),
    (r"cp\.async\.(?:bulk\.)?wait_group(?:\.read)?", "#"),
    (r"cp\.async\.mbarrier\.arrive[\w:.]*", "@"),
    (r"cp\.async\.c[ag]\.[\w:.]*",
     "@ @ # i32? i64:L2::cache_hint | @ @ # pred? i64:L2::cache_hint"),
    (r"cp\.async\.bulk\.prefetch\.tensor\.[\w:.]*", "^ {b16*any}?:im2col i64:L2::cache_hint"),
    (r"cp\.async\.bulk\.prefetch\.L2\.[\w:.]*", "@ i32 i64:L2::cache_hint"),
    (r"cp\.async\.bulk\.tensor\.\dd(?:\.cta_group::[12])?\.shared::\w+\.global[\w:.]*",
     "@ ^ @ {b16*any}:im2col i16:multicast::cluster i64:L2::cache_hint"),
    (r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta[\w:.]*", "^ @ i64:L2::cache_hint"),
    (r"cp\.reduce\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.(?:add|min|max|inc|dec|and|or|xor)[\w:.]*",
     "^ @ i64:L2::cache_hint"),
    (r"cp\.async\.bulk\.shared::\w+\.global[\w:.]*",
     "@ @ i32 @ i16:multicast::cluster i64:L2::cache_hint"),
    (r"cp\.async\.bulk\.shared::cluster\.shared::cta[\w:.]*", "@ @ i32 @"),
    (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(?:\.L2::cache_hint)?(?:\.cp_mask)?",
     "@ @ i32 i64:L2::cache_hint i16:cp_mask"),
    (rf"cp\.reduce\.async\.bulk\.shared::cluster\.shared::cta[\w:.]*\.{_BULK_SHARED}", "@ @ i32 @"),
    (rf"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group[\w:.]*?\.{_BULK_GLOBAL}",
     "@ @ i32 i64:L2::cache_hint"),
    # Tensor maps in memory (9.7.9.28, 9.7.13.18)
    (r"tensormap\.cp_fenceproxy[\w:.]*", "@ @ #"),
    (r"tensormap\.replace\.tile\.(?:global_address|rank)[\w:.]*\.(?P<t>b32|b64)", "@ int"),
    (r"tensormap\.replace\.tile\.(?:box_dim|global_dim|global_stride|element_stride)[\w:.]*"
     r"\.(?P<t>b32|b64)", "@ # int"),
    (r"tensormap\.replace\.tile\.[\w:.]*\.b32", "@ #"),
    # Barriers and fences (9.7.13)
    (r"(?:bar|barrier)(?:\.cta)?\.sync(?:\.aligned)?", "i32 i32?"),
    (r"(?:bar|barrier)(?:\.cta)?\.arrive(?:\.aligned)?", "i32 i32"),
    (r"(?:bar|barrier)(?:\.cta)?\.red\.popc(?:\.aligned)?\.u32", "=i32 i32 i32? pred"),
    (r"(?:bar|barrier)(?:\.cta)?\.red\.(?:and|or)(?:\.aligned)?\.pred", "=pred i32 i32? pred"),
    (r"barrier\.cluster\.[\w:.]*", ""),
    (r"bar\.warp\.sync", "i32"),
    (r"fence\.proxy\.tensormap::generic\.acquire[\w:.]*", "@ #"),
    (r"(?:membar|fence)[\w:.]*|griddepcontrol\.\w+|trap|brkpt|exit|ret(?:\.uni)?", ""),
    (r"mbarrier\.init[\w:.]*", "@ i32"),
    (r"mbarrier\.inval[\w:.]*", "@"),
    (r"mbarrier\.arrive(?:_drop)?\.expect_tx[\w:.]*", "=b64_ @ i32"),
    (r"mbarrier\.arrive(?:_drop)?\.noComplete[\w:.]*", "=b64 @ i32"),
    (r"mbarrier\.arrive(?:_drop)?\.[\w:.]*", "=b64_ @ i32?"),
    (r"mbarrier\.(?:expect|complete)_tx[\w:.]*", "@ i32"),
    (r"mbarrier\.(?:try|test)_wait\.parity[\w:.]*", "=pred @ i32 i32?"),
    (r"mbarrier\.(?:try|test)_wait[\w:.]*", "=pred @ i64 i32?"),
    (r"mbarrier\.pending_count\.b64", "=i32 i64"),
    # Warps (9.7.9.6, 9.7.13)
    (r"elect\.sync", "=i32_|p i32"),
    (r"shfl\.sync\.\w+\.b32", "=b32[|p] b32 b32 b32 i32"),
    (r"vote\.sync\.ballot\.b32", "=i32 pred i32"),
    (r"vote\.sync\.\w+\.pred", "=pred pred i32"),
    (r"match\.all\.sync\.(?P<t>b(?:32|64))", "=i32[|p] t i32"),
    (r"match\.any\.sync\.(?P<t>b(?:32|64))", "=i32 t i32"),
    (rf"redux\.sync{_MODS}\.(?P<t>[busf]32)", "=t t i32"),
    (r"activemask\.b32", "=i32"),
    (r"setmaxnreg\.\w+\.sync\.aligned\.u32", "#"),
    (r"nanosleep\.u32", "i32"),
    # Matrices (9.7.14 to 9.7.16)
    (r"ldmatrix\.sync\.aligned\.m16n16\.x1[\w:.]*", "={b32*2} @"),
    (r"ldmatrix\.sync\.aligned\.m16n16\.x2[\w:.]*", "={b32*4} @"),
    (r"ldmatrix\.sync\.aligned\.\w+\.x(?P<n>[124])[\w:.]*", "={b32*n} @"),
    (r"stmatrix\.sync\.aligned\.\w+\.x(?P<n>[124])[\w:.]*", "@ {b32*n}"),
    (r"movmatrix[\w:.]*", "=b32 b32"),
    (r"wgmma\.(?:fence|commit_group)[\w:.]*", ""),
    (r"wgmma\.wait_group[\w:.]*", "#"),
    (r"mma\.sync\.aligned\.m(?P<rows>8|16)n8k(?P<k>\d+)\.row\.col(?:\.satfinite)?\.(?P<d>f(?:16|32|64)|s32)"
     r"\.(?P<a>\w+)\.\w+\.(?P<c>f(?:16|32|64)|s32)(?:\.r[nzmp])?",
     "={dreg*dn} {areg*an} {areg*bn} {creg*cn}"),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.(?P<d>f32|f16)\.(?:f16\.f16|bf16\.bf16)",
     "={dreg*gn} i64 i64 pred # # # # | ={dreg*gn} {b32*4} i64 pred # # #"),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k\d+\.(?P<d>f32|f16)\.\w+\.\w+",
     "={dreg*gn} i64 i64 pred # # | ={dreg*gn} {b32*4} i64 pred # #"),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k\d+(?:\.satfinite)?\.(?P<d>s32)\.\w+\.\w+",
     "={dreg*gn} i64 i64 pred | ={dreg*gn} {b32*4} i64 pred"),
    (r"tcgen05\.mma(?:\.ws)?(?:\.sp)?[\w:.]*\.block_scale[\w:.]*",
     "$ i64 i64 $:sp i32 $ $ pred | $ $ i64 $:sp i32 $ $ pred"),
    (r"tcgen05\.mma\.ws(?:\.sp)?[\w:.]*",
     "$ i64 i64 $:sp i32 pred i64? | $ $ i64 $:sp i32 pred i64?"),
    (r"tcgen05\.mma(?:\.sp)?\.cta_group::1[\w:.]*",
     "$ i64 i64 $:sp i32 {b32*4}? pred #? | $ $ i64 $:sp i32 {b32*4}? pred #?"),
    (r"tcgen05\.mma(?:\.sp)?\.cta_group::2[\w:.]*",
     "$ i64 i64 $:sp i32 {b32*8}? pred #? | $ $ i64 $:sp i32 {b32*8}? pred #?"),
    (r"tcgen05\.alloc[\w:.]*", "@ i32"),
    (r"tcgen05\.dealloc[\w:.]*", "i32 i32"),
    (r"tcgen05\.(?:relinquish_alloc_permit|wait|fence)[\w:.]*", ""),
    (r"tcgen05\.commit[\w:.]*", "@ i16:multicast::cluster"),
    (r"tcgen05\.cp[\w:.]*", "$ i64"),
    (r"tcgen05\.shift[\w:.]*", "$"),
    (r"tcgen05\.ld\.red[\w:.]*\.(?P<s>32x32b)\.x(?P<x>\d+)[\w:.]*", "={b32*columns} =b32 $"),
    (r"tcgen05\.ld\.sync\.aligned\.16x32bx2\.x(?P<n>\d+)[\w:.]*", "={b32*n} $ #"),
    (r"tcgen05\.ld\.sync\.aligned\.(?P<s>\d+x\d+b)\.x(?P<x>\d+)[\w:.]*", "={b32*columns} $"),
    (r"tcgen05\.st\.sync\.aligned\.16x32bx2\.x(?P<n>\d+)[\w:.]*", "$ # {b32*n}"),
    (r"tcgen05\.st\.sync\.aligned\.(?P<s>\d+x\d+b)\.x(?P<x>\d+)[\w:.]*", "$ {b32*columns}"),
    (r"clusterlaunchcontrol\.try_cancel[\w:.]*", "@ @"),
    (r"clusterlaunchcontrol\.query_cancel\.is_canceled\.pred\.b128", "=pred b128"),
    (r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid\.v4\.b32\.b128", "={b32*4} b128"),
    (r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid::[xyz]\.b32\.b128", "=i32 b128"),
)  # fmt: skip
_PATTERNS = [(re.compile(pattern), slots) for pattern, slots in _ROWS]
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_COLUMNS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}  # registers for each .x
_BITS_OF = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f64": 64}


# Of these, every form that exists has a row.
_COMPLETE = frozenset(
    "add sub mul div rem min max addc subc mad madc fma sad abs neg popc clz bfind bfe bfi setp "
    "selp and or xor not shl shr shf lop3 prmt mov cvta ld st atom red mbarrier elect shfl vote "
    "cp".split()
)


# Memory of these is generic or global unless the opcode says otherwise.
_GENERIC = frozenset("ld ldu st atom red prefetch prefetchu mbarrier applypriority discard".split())
_RE_WINDOW = re.compile(r"\.(?:shared|local|param|const|async)\b")


_ACCESSES = frozenset("ld st atom red".split())
_ONE_OF = (
    ("scope", frozenset("cta cluster gpu sys".split())),
    ("space", frozenset("shared global local param const".split())),
    ("order", frozenset("weak relaxed acquire release acq_rel volatile mmio".split())),
)


def _bad_modifiers(op: str) -> str | None:
    """What is wrong with the modifiers of a load, store or atomic, or None (9.7.9.8, 9.7.9.12)."""
    mods = op.split(".")[1:]
    for what, names in _ONE_OF:
        if sum(mod.partition("::")[0] in names for mod in mods) > 1:
            return f"{op} names more than one {what}"
    hints = [mod for mod in mods if mod.startswith(("L1::", "L2::evict"))]
    if hints and _RE_WINDOW.search(op) is not None:
        return f"{op}: {hints[0]} is for global memory"
    wide = "v8" in mods or "v4" in mods and mods[-1].endswith("64")
    if any(hint.startswith("L2::") for hint in hints) and not wide:
        return f"{op}: {hints[-1]} is for loads and stores of 32 bytes"
    return None


def _narrow(shapes: tuple[Shape, ...]) -> bool:
    """Whether some address is a register of less than 64 bits."""
    bases = [shape[1] for shape in shapes if isinstance(shape, tuple) and shape[0] == "["]
    return any(base in ("b16", "u16", "s16", "b32", "u32", "s32") for base in bases)


def problem(op: str, operands: tuple[Operand, ...]) -> str | None:
    """What is wrong with the operands of an instruction, or None."""
    return _problem(op, tuple(map(shape_of, operands)))


@cache
def has_row(op: str) -> bool:
    return any(pattern.fullmatch(op) for pattern, _ in _PATTERNS)


@cache
def _ways(op: str) -> list[list[Slot]]:
    """The ways to write the operands of an opcode; none where it has no row."""
    for pattern, slots in _PATTERNS:
        if (m := pattern.fullmatch(op)) is not None:
            types, counts = _meanings(m.groupdict())
            if slots == "never":
                return []
            return [read_slots(way, op, types, counts) for way in slots.split(" | ")]
    return []


def _meanings(groups: dict[str, str | None]) -> tuple[dict[str, str], dict[str, int]]:
    """What the names of types and counts in a row stand for."""
    found = {key: value for key, value in groups.items() if value}
    found = {{"m": "n", "u": "t"}.get(key, key): value for key, value in found.items()}
    types, counts = dict(found), {k: int(v) for k, v in found.items() if v.isdigit()}
    t = found.get("t", "")
    if t in _WIDER:
        types["wide"] = _WIDER[t]
    if t in ("b16", "b32", "b64", "b128"):
        types["int"] = f"i{t[1:]}"
        types["half"], types["quarter"] = (f"b{int(t[1:]) // part}" for part in (2, 4))
    if "s" in found and "x" in found:
        counts["columns"] = _COLUMNS[found["s"]] * int(found["x"])
    for name in "dc":  # an accumulator: halves are packed two in a register
        if name in found:
            kind = found[name]
            types[f"{name}reg"] = {"f16": "f16x2"}.get(kind, kind)
            counts[f"{name}n"] = int(found.get("rows", 16)) // (8 if kind == "f16" else 4)
    if "k" in found and "a" in found:
        bits = _BITS_OF.get(found["a"], 4)
        register = 64 if bits == 64 else 32
        types["areg"] = {"f16": "f16x2", "f64": "f64"}.get(found["a"], "b32")
        counts["an"] = counts["rows"] * counts["k"] * bits // (32 * register)
        counts["bn"] = 8 * counts["k"] * bits // (32 * register)
    if "n" in found and "d" in found:
        counts["gn"] = int(found["n"]) // (4 if found["d"] == "f16" else 2)
    return types, counts


@cache
def _problem(op: str, shapes: tuple[Shape, ...]) -> str | None:
    family = op.partition(".")[0]
    ways = _ways(op)
    if family in _COMPLETE and not ways:
        return f"{op} is no form of {family} that is known"
    if family in _ACCESSES and (wrong := _bad_modifiers(op)) is not None:
        return wrong
    if family in _GENERIC and _RE_WINDOW.search(op) is None and _narrow(shapes):
        return f"{op} needs a 64-bit address"
    places = [place_of_mismatch(slots, shapes) for slots in ways]
    if not ways or None in places:
        return None
    at = max(place for place in places if place is not None)
    slots = ways[places.index(at)]
    least, most = sum(not slot.optional for slot in slots), len(slots)
    if len(ways) == 1 and not least <= len(shapes) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        return f"{op} takes {count} operands, not {len(shapes)}"
    if at == len(shapes):
        return f"{op} needs more operands than {len(shapes)}"
    return f"operand {at + 1} of {op} is of the wrong type or kind"
