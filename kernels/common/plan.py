# SPDX-License-Identifier: Apache-2.0
"""The kernel plan: every byte of SMEM, column of TMEM, barrier, register and exp2 of a kernel.

A plan is pure Python (neither the DSL nor torch), frozen and hashable, so that kernels, roofline
and ``fa4`` share one derivation and compiled kernels are cached by it.
``print(KernelPlan.forward())`` shows it as tables.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

GPU_ARCHS = {
    "h100": "sm_90a",
    "h200": "sm_90a",
    "b200": "sm_100a",
    "gb200": "sm_100a",
    "b300": "sm_103a",
    "gb300": "sm_103a",
}

# CUDA C++ Programming Guide, "Compute Capabilities" table: 227 KiB per block, 64 Ki registers.
SMEM_LIMIT_BYTES = 227 * 1024
REGISTERS_PER_SM = 64 * 1024
# PTX ISA 9.1 section 9.7.16.1: 512 columns x 128 lanes of 32 bits per SM.
TMEM_COLUMNS = 512
# PTX ISA 9.1 section 9.7.19.5: setmaxnreg takes 24 to 256, in steps of 8.
REGISTER_RANGE, REGISTER_STEP = (24, 256), 8
# A 128-byte swizzle atom is 8 rows of 128 bytes and is anchored to the absolute SMEM address
# (PTX ISA 9.1 section 9.7.16.4), so tiles start on multiples of this.
SWIZZLE_ATOM_BYTES = 1024
WARP_THREADS = 32
MBARRIER_BYTES = 8

DTYPE_BYTES = {"bfloat16": 2, "float16": 2}
# P may reach 2^rescale_threshold before it is rounded to the 16-bit dtype (float16 ends at 65504),
# and the same factor goes into the float32 row sum and accumulator.
MAX_RESCALE_THRESHOLD = 15.0
FORWARD_ARCHS = ("sm_100a", "sm_103a")
# kernels/common/tile_order.py: all query tiles of a head in turn, or long ones of many heads first.
TILE_ORDERS = ("head_major", "longest_first")
MAX_HEAD_DIM = 128


class PlanError(ValueError):
    """A plan that no kernel can run. ``rules`` lists every broken rule, with value and way out."""

    def __init__(self, rules: list[str]):
        self.rules = tuple(rules)
        super().__init__("; ".join(rules))


@dataclass(frozen=True)
class Role:
    """A group of warps with one job and one register budget."""

    name: str
    warps: tuple[int, ...]
    registers: int  # per thread, as setmaxnreg takes it


@dataclass(frozen=True)
class SmemRegion:
    """Bytes of dynamic shared memory, from the start of the CTA's window."""

    name: str
    offset_bytes: int
    bytes: int


@dataclass(frozen=True)
class TmemRegion:
    """Columns of tensor memory, all 128 lanes deep, with their writer, reader and lifetime."""

    name: str
    first_col: int
    cols: int
    lifetime: str


@dataclass(frozen=True)
class Barrier:
    """A family of mbarriers with one protocol.

    ``arrivals`` complete a phase together with ``tx_bytes`` of TMA traffic. ``first_parity`` is the
    parity the consumer waits on first: 0 waits for the first completed phase, 1 passes at once, as
    a producer must that finds its buffer empty.
    """

    name: str
    count: int
    arrivals: int
    tx_bytes: int
    arrives: str
    waits: str
    first_parity: int


# (softmax, correction, others) registers per thread, by mask; 512 in all, softmax counted twice.
# FlashAttention-4's for head_dim 128 on B200. A softmax thread holds a row of 128 scores.
_REGISTERS = {False: (192, 80, 48), True: (192, 72, 56)}
# B200's MUFU does 16 ex2 a cycle and SM, so a part moves to the FMA pipe; B300's does 32 (arXiv
# 2603.05451; NVIDIA developer blog "Making Softmax More Efficient with NVIDIA Blackwell Ultra").
_EXP2_SHARE = {"sm_100a": 0.125, "sm_103a": 0.0}


@dataclass(frozen=True)
class KernelPlan:
    """How one attention forward kernel runs. Build it with :meth:`forward`, which fills defaults.

    Fields are what was asked; everything else is derived from them by the properties below.
    """

    gpu: str
    arch: str
    dtype: str  # "bfloat16" or "float16"
    head_dim: int  # as asked, a multiple of 16
    causal: bool
    softmax_registers: int
    correction_registers: int
    other_registers: int
    kv_stages: int  # K and V tiles in flight, one ring for both
    exp2_emulated_share: float  # asked share of exp2 on the FMA pipe, 0 to 1
    rescale_threshold: float = 8.0  # tau, in log2 units; 0 rescales at every new row maximum
    tile_m: int = 128  # query rows of one stage
    q_stages: int = 2  # query tiles in flight
    tile_n: int = 128  # keys of one block
    ctas: int = 1  # CTAs that share an MMA
    tile_order: str = "head_major"  # one of TILE_ORDERS

    @classmethod
    def forward(
        cls,
        *,
        gpu: str = "b200",
        dtype: str = "bfloat16",
        head_dim: int = 128,
        causal: bool = False,
        **overrides: Any,
    ) -> "KernelPlan":
        """The plan of the Blackwell forward kernel, or :class:`PlanError` with every broken rule.

        ``overrides`` replaces any other field. Unset ones are as FlashAttention-4 publishes them:
        registers and tile order by mask, ``exp2_emulated_share`` by arch; ``kv_stages`` as many as
        SMEM holds. `fa4` sets them from `roofline.choose`, which knows this kernel.
        """
        known = {f.name for f in dataclasses.fields(cls)} - {"gpu", "arch", "dtype", "head_dim"}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise PlanError([f"unknown plan field {unknown}: fields are {sorted(known)}"])
        arch = GPU_ARCHS.get(gpu, "") if isinstance(gpu, str) else ""
        padded = _pad_head_dim(head_dim)
        registers = _REGISTERS[bool(causal)]
        fields: dict[str, Any] = {
            "softmax_registers": registers[0],
            "correction_registers": registers[1],
            "other_registers": registers[2],
            "exp2_emulated_share": _EXP2_SHARE.get(arch, 0.0),
            "tile_order": TILE_ORDERS[bool(causal)],
        }
        fields |= overrides
        if "kv_stages" not in fields:
            fields["kv_stages"] = _most_kv_stages(padded, DTYPE_BYTES.get(dtype, 2))
        plan = cls(gpu=gpu, arch=arch, dtype=dtype, head_dim=head_dim, causal=causal, **fields)
        rules = broken_rules(plan)
        if rules:
            raise PlanError(rules)
        return plan

    @property
    def name(self) -> str:
        """Short name, for the kernel's symbol; not unique to the plan."""
        mask = "causal" if self.causal else "dense"
        return f"fa4_forward_{self.arch}_{self.dtype}_d{self.head_dim}_{mask}"

    # -- tiles ---------------------------------------------------------------------------

    @property
    def head_dim_padded(self) -> int:
        """Head dimension of the tiles: TMA fills the columns beyond head_dim with zeros."""
        return _pad_head_dim(self.head_dim)

    @property
    def tile_q(self) -> int:
        """Query rows of a CTA."""
        return self.tile_m * self.q_stages

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of Q, K, V, P and O."""
        return DTYPE_BYTES[self.dtype]

    @property
    def q_tile_bytes(self) -> int:
        """Bytes of one stage of Q, and of O."""
        return self.tile_m * self.head_dim_padded * self.element_bytes

    @property
    def kv_tile_bytes(self) -> int:
        """Bytes of one K or V tile."""
        return self.tile_n * self.head_dim_padded * self.element_bytes

    # -- exp2 ----------------------------------------------------------------------------

    @property
    def exp2_emulated_pairs(self) -> int:
        """Packed pairs of a row of tile_n scores that take the polynomial."""
        return round(self.exp2_emulated_share * self.tile_n / 2)

    @property
    def exp2_realised_share(self) -> float:
        """Share of exp2 on the FMA pipe: the asked one rounded to whole pairs of a row."""
        return self.exp2_emulated_pairs / (self.tile_n // 2)

    @property
    def exp2_degree(self) -> int:
        """Degree of the polynomial. Its error must drown in P's rounding to the 16-bit dtype: that
        of degree 3 does in bfloat16, in float16 it would show where all weights are alike."""
        return 4 if self.dtype == "float16" else 3

    def exp2_is_emulated(self, pair: int) -> bool:
        """Whether scores ``2 pair`` and ``2 pair + 1`` of a row take the polynomial.

        Emulated pairs are spread evenly over the row, so that both pipes stay busy throughout.
        """
        pairs = self.tile_n // 2
        emulated = self.exp2_emulated_pairs
        return (pair + 1) * emulated // pairs > pair * emulated // pairs

    @property
    def p_head_cols(self) -> int:
        """Columns of P (keys) whose MMA may start before the rest is written: three quarters."""
        return self.tile_n * 3 // 4

    # -- roles ---------------------------------------------------------------------------

    @property
    def roles(self) -> tuple[Role, ...]:
        """Warps by role. A warpgroup (4 warps) shares one setmaxnreg value."""
        return (
            Role("softmax0", (0, 1, 2, 3), self.softmax_registers),
            Role("softmax1", (4, 5, 6, 7), self.softmax_registers),
            Role("correction", (8, 9, 10, 11), self.correction_registers),
            Role("mma", (12,), self.other_registers),
            Role("store", (13,), self.other_registers),
            Role("load", (14,), self.other_registers),
            Role("idle", (15,), self.other_registers),
        )

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP_THREADS * sum(len(role.warps) for role in self.roles)

    def role_of_warp(self) -> dict[int, str]:
        """Role name of each warp index."""
        return {warp: role.name for role in self.roles for warp in role.warps}

    # -- tensor memory -------------------------------------------------------------------

    @property
    def tmem_map(self) -> tuple[TmemRegion, ...]:
        """Columns by tensor. P_i (16 bit, two keys a column) lies over the upper half of S_i."""
        regions = []
        p_cols = self.tile_n * self.element_bytes // 4
        for i in range(self.q_stages):
            first = i * self.tile_n
            regions += [
                TmemRegion(f"S{i}", first, self.tile_n, f"mma QK -> softmax{i} has read its row"),
                TmemRegion(f"P{i}", first + self.tile_n - p_cols, p_cols, f"softmax{i} -> mma PV"),
            ]
        first = self.q_stages * self.tile_n
        for i in range(self.q_stages):
            o_cols = self.head_dim_padded
            lifetime = "mma PV, rescaled by correction, which reads it at the end"
            regions.append(TmemRegion(f"O{i}", first + i * o_cols, o_cols, lifetime))
        return tuple(regions)

    def tmem_col(self, name: str) -> int:
        """First column of a TMEM region."""
        return next(r.first_col for r in self.tmem_map if r.name == name)

    @property
    def tmem_cols(self) -> int:
        """Columns to allocate: a power of two, at least 32 (PTX ISA 9.1 section 9.7.16.7)."""
        used = max(r.first_col + r.cols for r in self.tmem_map)
        return max(32, 1 << (used - 1).bit_length())

    # -- barriers ------------------------------------------------------------------------

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier of the kernel. "warp" arrives once for its 32 lanes."""
        q, kv, warps = self.q_stages, self.kv_stages, 4
        return (
            Barrier("q_full", q, 1, self.q_tile_bytes, "load, TMA", "mma", 0),
            Barrier("kv_full", kv, 1, self.kv_tile_bytes, "load, TMA", "mma", 0),
            Barrier("kv_empty", kv, 1, 0, "mma, commit", "load", 1),
            Barrier("s_full", q, 1, 0, "mma, commit", "softmax", 0),
            Barrier("pv_ready", q, 2 * warps, 0, "softmax + correction warps", "mma", 0),
            Barrier("p_tail", q, warps, 0, "softmax warps", "mma", 0),
            Barrier("stats_full", q * warps, 1, 0, "softmax warp", "correction warp", 0),
            Barrier("stats_empty", q * warps, 1, 0, "correction warp", "softmax warp", 1),
            Barrier("o_full", q, 1, 0, "mma, commit", "correction", 0),
            Barrier("o_stored", q, warps, 0, "correction warps", "store", 0),
        )

    # -- shared memory -------------------------------------------------------------------

    @property
    def smem_map(self) -> tuple[SmemRegion, ...]:
        """Dynamic shared memory by region, tiles first so that they start on swizzle atoms."""
        sizes = [
            ("Q", self.q_stages * self.q_tile_bytes),
            ("KV", self.kv_stages * self.kv_tile_bytes),
            ("O", self.q_stages * self.q_tile_bytes),
            # float32 (field, stage, row): field 0 is the rescale factor, at the end the row sum;
            # field 1 is the row maximum
            ("stats", 2 * self.q_stages * self.tile_m * 4),
        ]
        sizes += [(b.name, b.count * MBARRIER_BYTES) for b in self.barriers]
        sizes += [("tmem_base", 4)]
        regions, offset = [], 0
        for name, size in sizes:
            regions.append(SmemRegion(name, offset, size))
            offset += size
        return tuple(regions)

    def smem_offset(self, name: str) -> int:
        """Byte offset of an SMEM region."""
        return next(r.offset_bytes for r in self.smem_map if r.name == name)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of the launch, a multiple of 16."""
        last = self.smem_map[-1]
        return -(-(last.offset_bytes + last.bytes) // 16) * 16

    # -- out -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything asked and derived, JSON-ready."""
        out = dataclasses.asdict(self)
        out |= {
            "head_dim_padded": self.head_dim_padded,
            "tile_q": self.tile_q,
            "threads": self.threads,
            "exp2_realised_share": self.exp2_realised_share,
            "exp2_degree": self.exp2_degree,
            "smem_bytes": self.smem_bytes,
            "tmem_cols": self.tmem_cols,
        }
        for name in ("roles", "smem_map", "tmem_map", "barriers"):
            out[name] = [dataclasses.asdict(item) for item in getattr(self, name)]
        for role in out["roles"]:
            role["warps"] = list(role["warps"])
        return out

    def __str__(self) -> str:
        from kernels.common.plan_text import describe

        return describe(self)


def broken_rules(plan: KernelPlan) -> list[str]:
    """Every rule that the plan breaks, as sentences with the value, the rule and the way out."""
    rules = _broken_field_rules(plan)
    return rules or _broken_resource_rules(plan)


def _broken_field_rules(plan: KernelPlan) -> list[str]:
    """Rules on single fields; resources are only computed once these hold."""
    rules = []
    if plan.gpu not in GPU_ARCHS:
        rules.append(f"gpu {plan.gpu!r} is unknown: use one of {', '.join(GPU_ARCHS)}")
    elif plan.arch not in FORWARD_ARCHS:
        needed = " or ".join(FORWARD_ARCHS)
        rules.append(f"gpu {plan.gpu!r} is {plan.arch}: this kernel needs {needed}")
    if plan.dtype not in DTYPE_BYTES:
        rules.append(f"dtype {plan.dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
    if not _is_int(plan.head_dim) or not 16 <= plan.head_dim <= MAX_HEAD_DIM or plan.head_dim % 16:
        rules.append(f"head_dim {plan.head_dim!r}: use a multiple of 16 from 16 to {MAX_HEAD_DIM}")
    if not _is_bool(plan.causal):
        rules.append(f"causal {plan.causal!r}: use True or False")
    for name, only in (("tile_m", 128), ("tile_n", 128), ("q_stages", 2), ("ctas", 1)):
        value = getattr(plan, name)
        if not _is_int(value) or value != only:
            rules.append(f"{name} {value!r}: this kernel takes {only} only")
    if plan.tile_order not in TILE_ORDERS:
        rules.append(f"tile_order {plan.tile_order!r}: use one of {', '.join(TILE_ORDERS)}")
    if not _is_int(plan.kv_stages) or plan.kv_stages < 2:
        rules.append(f"kv_stages {plan.kv_stages!r}: use 2 or more, a K and a V tile are in use")
    if not _is_number(plan.exp2_emulated_share) or not 0 <= plan.exp2_emulated_share <= 1:
        rules.append(f"exp2_emulated_share {plan.exp2_emulated_share!r}: use a number from 0 to 1")
    tau = plan.rescale_threshold
    if not _is_number(tau) or not 0 <= tau <= MAX_RESCALE_THRESHOLD:
        rules.append(
            f"rescale_threshold {tau!r}: use 0 to {MAX_RESCALE_THRESHOLD:g} (P reaches 2^threshold)"
        )
    low, high = REGISTER_RANGE
    for name in ("softmax_registers", "correction_registers", "other_registers"):
        value = getattr(plan, name)
        if not _is_int(value) or not low <= value <= high or value % REGISTER_STEP:
            rules.append(f"{name} {value!r}: use {low} to {high} in steps of {REGISTER_STEP}")
    return rules


def _broken_resource_rules(plan: KernelPlan) -> list[str]:
    """Rules on what the plan takes of an SM: SMEM, TMEM, registers."""
    rules = []
    if plan.smem_bytes > SMEM_LIMIT_BYTES:
        rules.append(
            f"shared memory {plan.smem_bytes} bytes exceeds {SMEM_LIMIT_BYTES}: "
            f"lower kv_stages from {plan.kv_stages} to "
            f"{_most_kv_stages(plan.head_dim_padded, plan.element_bytes)}"
        )
    if plan.tmem_cols > TMEM_COLUMNS:
        rules.append(f"tensor memory {plan.tmem_cols} columns exceeds {TMEM_COLUMNS}")
    asked = 2 * plan.softmax_registers + plan.correction_registers + plan.other_registers
    pool = REGISTERS_PER_SM // (plan.threads // 4)
    if asked != pool:
        rules.append(
            f"registers 2 x {plan.softmax_registers} + {plan.correction_registers} + "
            f"{plan.other_registers} = {asked}: softmax twice, correction and others share {pool}"
        )
    return rules


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pad_head_dim(head_dim: object) -> int:
    return 64 if isinstance(head_dim, int) and head_dim <= 64 else MAX_HEAD_DIM


def _most_kv_stages(head_dim_padded: int, element_bytes: int) -> int:
    """K and V tiles that fit beside two Q and two O tiles of 128 rows, 3 KiB left for the rest."""
    tile = 128 * head_dim_padded * element_bytes
    return (SMEM_LIMIT_BYTES - 3 * 1024) // tile - 4
