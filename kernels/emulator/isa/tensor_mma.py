"""tcgen05.mma in all its forms, and tcgen05.cp: what the tensor core does in the order of issue
(PTX ISA 9.1 sections 9.7.16.9 and 9.7.16.10)."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..engines import forms, tensorcore, tmem_copy
from ..engines.descriptors import BLOCK_SCALED, InstrDescriptor
from ..engines.formats import ELEMENT_BYTES
from ..engines.operands import K_BYTES, operand_chunks
from ..memory.tensor import COLUMNS
from ..ptx.ast import Imm, Mem, Vec
from ..schedule import AsyncOp
from .pair import group_of
from .table import LANES, Binding, Handler, Wait, machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..state import Cta, Warp

Span = tuple[int, int]  # first column of Tensor Memory, number of columns
# Of A (.ws: of B); what is read from a collector buffer is read from memory here.
_COLLECTOR = r"(?:\.collector::a::(?:fill|use|lastuse|discard))?"
_WS_COLLECTOR = r"(?:\.collector::b[0-3]::(?:fill|use|lastuse|discard))?"
_QUADS = (0, 1, 2, 3)


@machine(rf"tcgen05\.mma\.cta_group::([12])\.kind::(f16|tf32|f8f6f4){_COLLECTOR}")
def mma(b: Binding) -> Handler:
    """D = A B (+ D): A from shared memory (a descriptor) or Tensor Memory (an address)."""
    d, a, b_desc, idesc, *rest = b.ins.operands
    disable = rest[0] if rest and isinstance(rest[0], Vec) else None
    rest = rest[1:] if disable is not None else rest
    if not rest or len(rest) > 2:
        raise b.unsupported("operands after the instruction descriptor are not understood")
    enable = b.predicate(rest[0])
    scale_d = rest[1].value if len(rest) == 2 and isinstance(rest[1], Imm) else None
    if len(rest) == 2 and scale_d is None:
        raise b.unsupported("scale-input-d must be an immediate")
    read_d, in_tmem = b.address(d), isinstance(a, Mem)
    read_a = b.address(a) if in_tmem else b.scalar(a)
    read_b, read_i = b.scalar(b_desc), b.scalar(idesc)
    read_lanes = [b.scalar(x) for x in disable.items] if disable is not None else None
    group, kind = int(b.match[1]), b.match[2]
    multiply = partial(_multiply, a_in_tmem=in_tmem, kind=kind, scale_d=scale_d)

    def run(w: Warp, mask: int) -> None:
        accumulate, machine = enable(w), w.cta.machine
        ctas = group_of(w, group)
        for lane in LANES[mask].tolist():
            off = tuple(x(w, lane) for x in read_lanes) if read_lanes is not None else None
            operands = (read_i(w, lane), read_a(w, lane), read_b(w, lane), read_d(w, lane))
            if machine.race is not None:
                _note_mma(w, ctas, operands, in_tmem, kind)
            effect = partial(multiply, ctas, operands, bool(accumulate >> lane & 1), off)
            _start(w, "MMA", effect)
        machine.events += 1

    return run


Operands = tuple[int, int, int, int]  # instruction descriptor, A, B, D


def _multiply(
    ctas: tuple[Cta, ...],
    operands: Operands,
    accumulate: bool,
    off: tuple[int, ...] | None,
    **form: Any,
) -> None:
    form |= {"accumulate": accumulate, "disable_output_lane": off}
    if len(ctas) == 1:
        tensorcore.mma(*operands, ctas[0].smem, ctas[0].tmem, **form)
        return
    even, odd = ctas
    tensorcore.mma_pair(*operands, (even.smem, odd.smem), (even.tmem, odd.tmem), **form)


def _note_mma(
    w: Warp, ctas: tuple[Cta, ...], operands: Operands, a_in_tmem: bool, kind: str
) -> None:
    """Tells the race detector which cells the MMA touches, in each CTA."""
    idesc, a, b_desc, d = operands
    inst = InstrDescriptor.decode(idesc, kind, len(ctas))
    rows_a, rows_b = inst.m // len(ctas), inst.n // len(ctas)
    cells = [("B", operand_cells(b_desc, rows_b, inst.b_mn_major, ELEMENT_BYTES[inst.b_dtype]))]
    if not a_in_tmem:
        nbytes = ELEMENT_BYTES[inst.a_dtype]
        cells.append(("A", operand_cells(a, rows_a, inst.a_mn_major, nbytes)))
    reads = [(a & 0xFFFF, 8)] if a_in_tmem else []
    columns = inst.n // 2 if len(ctas) == 2 and inst.m == 128 else inst.n
    _note(w, ctas, cells, reads, (d & 0xFFFF, columns))


@lru_cache(maxsize=4096)
def operand_cells(
    descriptor: int, rows: int, mn_major: bool, element_bytes: int, k_bytes: int = K_BYTES
) -> NDArray[np.int64]:
    """The 4-byte cells (address / 4) of an operand in shared memory."""
    chunks = operand_chunks(descriptor, rows, mn_major, element_bytes, k_bytes).index.reshape(-1, 1)
    return np.sort((chunks * 4 + np.arange(4)).reshape(-1))


# -- the less common forms ------------------------------------------------------------------------

_SCALE = r"(?:\.scale_vec::([124])X|\.block(16|32))?"


@machine(
    rf"tcgen05\.mma(\.sp)?\.cta_group::([12])\.kind::({'|'.join(BLOCK_SCALED)})\.block_scale{_SCALE}"
    rf"{_COLLECTOR}"
)
def mma_scaled(b: Binding) -> Handler:
    """D = (A * scale A) (B * scale B) (+ D), scale factors in Tensor Memory."""
    kind, vectors, block = b.match[3], b.match[4], b.match[5]
    sparse = b.match[1] is not None
    form = forms.Form(kind, int(b.match[2]), _block(b, kind, vectors, block, sparse), sparse)
    ops = list(b.ins.operands)
    *ops, scale_a, scale_b, enable = ops
    read = _readers(b, form, ops, enable)
    read["scale_a"], read["scale_b"] = b.address(scale_a), b.address(scale_b)
    return _issue(b, form, isinstance(ops[1], Mem), b.predicate(enable), read, None, 0)


def _block(b: Binding, kind: str, vectors: str | None, block: str | None, sparse: bool) -> int:
    """Elements of K that share a scale factor (table 56). A sparse A has as many factors for a K
    of twice the length."""
    known = {"mxf8f6f4": {1: 32}, "mxf4": {2: 32}, "mxf4nvf4": {2: 32, 4: 16}}[kind]
    if block is None and vectors is None:
        if kind == "mxf4nvf4":
            raise b.unsupported(".kind::mxf4nvf4 needs .scale_vec or .block")
        elements = 32
    else:
        elements = int(block) if block is not None else known.get(int(vectors or 0), 0)
    if elements not in known.values():
        raise b.unsupported(f".kind::{kind} has scale factors of {[*known.values()]} elements")
    return elements * (2 if sparse else 1)


@machine(rf"tcgen05\.mma\.cta_group::([12])\.kind::i8{_COLLECTOR}")
@machine(rf"tcgen05\.mma(\.sp)\.cta_group::([12])\.kind::(f16|tf32|f8f6f4|i8){_COLLECTOR}")
def mma_integer_or_sparse(b: Binding) -> Handler:
    """Integers, and A with half of its elements left out."""
    sparse = b.match.re.groups == 3
    form = forms.Form(b.match[3] if sparse else "i8", int(b.match[2 if sparse else 1]), 0, sparse)
    ops = list(b.ins.operands)
    scale_d = 0
    if len(ops) > 5 + sparse + any(isinstance(op, Vec) for op in ops):
        last = ops.pop()
        if not isinstance(last, Imm) or form.kind not in ("f16", "tf32") or last.value > 15:
            raise b.unsupported("scale-input-d is from 0 to 15, of .kind::f16 and .kind::tf32")
        scale_d = last.value
    enable = ops.pop()
    disabled = ops.pop() if isinstance(ops[-1], Vec) else None
    read = _readers(b, form, ops, enable)
    lanes = [b.scalar(x) for x in disabled.items] if isinstance(disabled, Vec) else None
    return _issue(b, form, isinstance(ops[1], Mem), b.predicate(enable), read, lanes, scale_d)


@machine(rf"tcgen05\.mma\.ws(\.sp)?\.cta_group::1\.kind::(f16|tf32|f8f6f4|i8){_WS_COLLECTOR}")
def mma_weight_stationary(b: Binding) -> Handler:
    """The collector buffers keep B, and M may be 32; the numbers are those of any other MMA."""
    form = forms.Form(b.match[2], 1, 0, b.match[1] is not None, True)
    ops = list(b.ins.operands)
    mask = b.scalar(ops.pop()) if len(ops) == 6 + form.sparse else None
    enable = ops.pop()
    read = _readers(b, form, ops, enable)
    issue = _issue(b, form, isinstance(ops[1], Mem), b.predicate(enable), read, None, 0)

    def run(w: Warp, lanes: int) -> Wait | None:
        if mask is not None and any(mask(w, lane) for lane in map(int, LANES[lanes])):
            raise b.unsupported("zero-column masks other than 0")
        return issue(w, lanes)

    return run


Read = dict[str, "Callable[[Warp, int], int]"]


def _readers(b: Binding, form: forms.Form, ops: list[Any], enable: Any) -> Read:
    """Readers of d, a, b, (metadata,) idesc."""
    if len(ops) != 4 + form.sparse:
        raise b.unsupported(f"{len(ops) + 1} operands are not understood")
    d, a, b_desc, *metadata, idesc = ops
    read = {
        "d": b.address(d),
        "a": b.address(a) if isinstance(a, Mem) else b.scalar(a),
        "b": b.scalar(b_desc),
        "idesc": b.scalar(idesc),
    }
    if metadata:
        read["metadata"] = b.address(metadata[0])
    return read


def _issue(
    b: Binding,
    form: forms.Form,
    in_tmem: bool,
    enable: Callable[[Warp], int],
    read: Read,
    disabled: list[Callable[[Warp, int], int]] | None,
    scale_d: int,
) -> Handler:
    def run(w: Warp, mask: int) -> None:
        accumulate, machine = enable(w), w.cta.machine
        ctas = group_of(w, form.ctas)
        for lane in map(int, LANES[mask]):
            operands = forms.Operands(
                **{name: reader(w, lane) for name, reader in read.items()},
                a_in_tmem=in_tmem,
                accumulate=bool(accumulate >> lane & 1),
                disabled=[x(w, lane) for x in disabled] if disabled is not None else None,
                scale_d=scale_d,
            )
            if machine.race is not None:
                _note_form(w, ctas, form, operands)
            smem, tmem = [cta.smem for cta in ctas], [cta.tmem for cta in ctas]
            effect = partial(forms.multiply, form, operands, smem, tmem)
            _start(w, "MMA", effect)
        machine.events += 1

    return run


def _start(w: Warp, what: str, effect: Callable[[], None]) -> None:
    """What the tensor core of the CTA does next: now, or as late as is legal."""
    machine = w.cta.machine
    if machine.asyncs.at_once:
        effect()
    else:
        machine.asyncs.issue(("tensor core", w.cta.rank), AsyncOp(what, w, w.pc, effect))


def _note_form(w: Warp, ctas: tuple[Cta, ...], form: forms.Form, ops: forms.Operands) -> None:
    """Tells the race detector which cells the MMA touches, in each CTA."""
    inst = forms.decode(form, ops.idesc)
    whole = inst.k_bytes * (2 if inst.sparse else 1)
    element = ELEMENT_BYTES[inst.b_dtype]
    cells = [("B", operand_cells(ops.b, inst.n // len(ctas), inst.b_mn_major, element, whole))]
    reads: list[Span] = []
    if ops.a_in_tmem:
        reads.append((ops.a & 0xFFFF, inst.k_bytes // 4))
    else:
        rows = inst.m // len(ctas)
        element = ELEMENT_BYTES[inst.a_dtype]
        cells.append(("A", operand_cells(ops.a, rows, inst.a_mn_major, element, inst.k_bytes)))
    for factors in forms.scale_factors(form, inst, ops):
        reads += factors.columns()
    if inst.sparse:
        reads.append(forms.metadata(form, inst, ops).columns)
    columns = forms.parts(form, inst, ops.d, "D")[0].count
    _note(w, ctas, cells, reads, (ops.d & 0xFFFF, columns))


def _note(
    w: Warp,
    ctas: tuple[Cta, ...],
    cells: list[tuple[str, NDArray[np.int64]]],
    reads: list[Span],
    written: Span,
) -> None:
    """Tells the race detector; not of what lies outside, where the operation itself will fault."""
    race, smem = w.cta.machine.race, w.cta.smem
    assert race is not None
    low, high = smem.base >> 2, smem.end >> 2
    there = all(at[0] >= low and at[-1] < high for _, at in cells)
    if there and all(first + count <= COLUMNS for first, count in [*reads, written]):
        race.mma(w, ctas, cells, reads, written, _QUADS)


# -- tcgen05.cp -----------------------------------------------------------------------------------


@machine(
    r"tcgen05\.cp\.cta_group::([12])\.(128x256b|4x256b|128x128b|64x128b\.warpx2::02_13"
    r"|64x128b\.warpx2::01_23|32x128b\.warpx4)(?:\.b8x16\.(b6x16_p32|b4x16_p64))?"
)
def cp(b: Binding) -> Handler:
    """Shared to Tensor Memory, in the pipeline of the thread's MMAs; its commit covers it too."""
    form = tmem_copy.COPIES[b.match[2]]
    target, source = b.ins.operands
    read_address, read_descriptor = b.address(target), b.scalar(source)
    group, packing = int(b.match[1]), b.match[3]

    def run(w: Warp, mask: int) -> None:
        machine = w.cta.machine
        ctas = group_of(w, group)
        for lane in map(int, LANES[mask]):
            taddr, descriptor = read_address(w, lane), read_descriptor(w, lane)
            if machine.race is not None:
                cells = operand_cells(descriptor, form.rows, False, 1, form.row_bytes)
                written = (taddr & 0xFFFF, form.columns)
                _note(w, ctas, [("source", cells)], [], written)
            _start(w, "tcgen05.cp", partial(_copy, form, packing, ctas, taddr, descriptor))
        machine.events += 1

    return run


def _copy(
    form: tmem_copy.Copy, packing: str | None, ctas: tuple[Cta, ...], taddr: int, descriptor: int
) -> None:
    for cta in ctas:
        tmem_copy.copy(form, packing, taddr, descriptor, cta.smem, cta.tmem)
