# SPDX-License-Identifier: Apache-2.0
"""The plan: its arithmetic, recomputed here by hand or another way, and every rule it enforces."""

import dataclasses
import json

import pytest

from kernels.common.plan import (
    FORWARD_ARCHS,
    GPU_ARCHS,
    SMEM_LIMIT_BYTES,
    KernelPlan,
    PlanError,
)

BLACKWELL_GPUS = [gpu for gpu, arch in GPU_ARCHS.items() if arch in FORWARD_ARCHS]
PLANS = [
    KernelPlan.forward(gpu=gpu, head_dim=head_dim, causal=causal, dtype=dtype)
    for gpu in BLACKWELL_GPUS
    for head_dim in range(16, 129, 16)
    for causal in (False, True)
    for dtype in ("bfloat16", "float16")
]


def test_smem_of_head_dim_128_by_hand():
    plan = KernelPlan.forward(head_dim=128)
    assert [(r.name, r.offset_bytes, r.bytes) for r in plan.smem_map] == [
        ("Q", 0, 2 * 32768),
        ("KV", 65536, 3 * 32768),
        ("O", 163840, 2 * 32768),
        ("stats", 229376, 2 * 2 * 128 * 4),
        ("q_full", 231424, 2 * 8),
        ("kv_full", 231440, 3 * 8),
        ("kv_empty", 231464, 3 * 8),
        ("s_full", 231488, 2 * 8),
        ("pv_ready", 231504, 2 * 8),
        ("p_tail", 231520, 2 * 8),
        ("stats_full", 231536, 8 * 8),
        ("stats_empty", 231600, 8 * 8),
        ("o_full", 231664, 2 * 8),
        ("o_stored", 231680, 2 * 8),
        ("tmem_base", 231696, 4),
    ]
    assert plan.smem_bytes == 231712


def test_tmem_of_head_dim_128_is_the_published_layout():
    """S0 0, S1 128, O0 256, O1 384; P over the upper half of S (FlashAttention-4's forward)."""
    plan = KernelPlan.forward(head_dim=128)
    assert {r.name: (r.first_col, r.cols) for r in plan.tmem_map} == {
        "S0": (0, 128),
        "P0": (64, 64),
        "S1": (128, 128),
        "P1": (192, 64),
        "O0": (256, 128),
        "O1": (384, 128),
    }
    assert plan.tmem_cols == 512


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.gpu}-{p.name}")
def test_every_plan_fits_and_overlaps_nowhere(plan):
    smem = [(r.offset_bytes, r.offset_bytes + r.bytes) for r in plan.smem_map]
    for (_, end), (start, _) in zip(smem, smem[1:], strict=False):
        assert end <= start
    assert smem[-1][1] <= plan.smem_bytes <= SMEM_LIMIT_BYTES
    assert all(plan.smem_offset(tile) % 1024 == 0 for tile in ("Q", "KV", "O"))
    assert all(plan.smem_offset(b.name) % 8 == 0 for b in plan.barriers)
    assert plan.smem_bytes + plan.kv_tile_bytes > SMEM_LIMIT_BYTES  # not one K/V stage more

    columns = {r.name: set(range(r.first_col, r.first_col + r.cols)) for r in plan.tmem_map}
    for i in range(2):
        assert columns[f"P{i}"] < columns[f"S{i}"]
    del columns["P0"], columns["P1"]
    assert sum(map(len, columns.values())) == len(set().union(*columns.values()))
    assert max(set().union(*columns.values())) < plan.tmem_cols <= 512
    assert plan.tmem_cols & (plan.tmem_cols - 1) == 0


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.gpu}-{p.name}")
def test_roles_cover_the_warps_and_share_the_register_file(plan):
    warps = [warp for role in plan.roles for warp in role.warps]
    assert warps == list(range(16)) and plan.threads == 512
    by_warp = {warp: role.registers for role in plan.roles for warp in role.warps}
    for group in range(4):  # setmaxnreg is executed by whole warpgroups
        assert len({by_warp[warp] for warp in range(4 * group, 4 * group + 4)}) == 1
    assert sum(32 * registers for registers in by_warp.values()) == 65536
    assert all(24 <= registers <= 256 and registers % 8 == 0 for registers in by_warp.values())
    assert plan.role_of_warp()[12] == "mma"


@pytest.mark.parametrize("head_dim", range(16, 129, 16))
def test_head_dim_is_padded_to_what_the_tiles_take(head_dim):
    plan = KernelPlan.forward(head_dim=head_dim)
    assert plan.head_dim_padded == (64 if head_dim <= 64 else 128)
    assert plan.kv_tile_bytes == plan.q_tile_bytes == 128 * plan.head_dim_padded * 2
    full = {b.name: b.tx_bytes for b in plan.barriers if b.tx_bytes}
    assert full == {"q_full": plan.q_tile_bytes, "kv_full": plan.kv_tile_bytes}


def test_arrivals_follow_from_the_roles():
    plan = KernelPlan.forward()
    warps = {role.name: len(role.warps) for role in plan.roles}
    arrivals = {b.name: (b.count, b.arrivals) for b in plan.barriers}
    assert arrivals["pv_ready"] == (2, warps["softmax0"] + warps["correction"])
    assert arrivals["p_tail"] == (2, warps["softmax1"])
    assert arrivals["o_stored"] == (2, warps["correction"])
    assert arrivals["stats_full"] == arrivals["stats_empty"] == (2 * warps["softmax0"], 1)
    assert arrivals["kv_full"] == arrivals["kv_empty"] == (plan.kv_stages, 1)
    first = {b.name: b.first_parity for b in plan.barriers}
    assert {name for name, parity in first.items() if parity} == {"kv_empty", "stats_empty"}


@pytest.mark.parametrize(
    ("asked", "pairs"),
    [(0.0, 0), (0.001, 0), (0.01, 1), (0.1, 6), (0.125, 8), (1 / 3, 21), (0.5, 32), (1, 64)],
)
def test_exp2_share_is_realised_in_pairs_spread_evenly(asked, pairs):
    plan = KernelPlan.forward(exp2_emulated_share=asked)
    emulated = [pair for pair in range(64) if plan.exp2_is_emulated(pair)]
    assert len(emulated) == plan.exp2_emulated_pairs == pairs
    assert plan.exp2_realised_share == pairs / 64
    assert abs(plan.exp2_realised_share - asked) <= 0.5 / 64
    gaps = [b - a for a, b in zip(emulated, emulated[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_exp2_default_share_follows_the_mufu():
    """B200 does 16 ex2 a cycle and emulates an eighth; B300 does 32 and needs none."""
    assert KernelPlan.forward(gpu="b200").exp2_emulated_share == 0.125
    assert KernelPlan.forward(gpu="b300").exp2_emulated_share == 0


def test_tile_order_default_follows_the_mask():
    """Masked tiles differ in length, so the longest start first."""
    orders = [KernelPlan.forward(causal=causal).tile_order for causal in (False, True)]
    assert orders == ["head_major", "longest_first"]
    assert "tiles head major" in str(KernelPlan.forward(causal=True, tile_order="head_major"))


def test_plan_prints_all_it_derives():
    plan = KernelPlan.forward(gpu="b300", head_dim=80, causal=True, exp2_emulated_share=0.1)
    text = str(plan)
    for region in (*plan.smem_map, *plan.tmem_map, *plan.roles, *plan.barriers):
        assert region.name in text
    assert "asked 0.1, realised 0.09375 (6 of 64 pairs a row, degree 3)" in text
    assert f"SMEM, {plan.smem_bytes} of 232448 bytes" in text
    assert "TMEM, 512 columns" in text and "head_dim 80 in tiles of 128" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_plan_is_json_ready_hashable_and_frozen():
    plan = KernelPlan.forward(head_dim=64)
    out = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert out["head_dim_padded"] == 64 and out["kv_stages"] == 10 and out["tile_q"] == 256
    assert out["roles"][2] == {"name": "correction", "warps": [8, 9, 10, 11], "registers": 80}
    assert out["tmem_map"][4]["first_col"] == 256 and out["smem_bytes"] == plan.smem_bytes
    assert plan == KernelPlan.forward(head_dim=64) and len({plan, KernelPlan.forward()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.kv_stages = 2


BROKEN = [
    ({"gpu": "a100"}, "gpu 'a100' is unknown: use one of h100, h200, b200"),
    ({"gpu": None}, "gpu None is unknown"),
    ({"gpu": "h100"}, "gpu 'h100' is sm_90a: this kernel needs sm_100a or sm_103a"),
    ({"dtype": "float32"}, "dtype 'float32': use one of bfloat16, float16"),
    ({"head_dim": 0}, "head_dim 0: use a multiple of 16 from 16 to 128"),
    ({"head_dim": 72}, "head_dim 72"),
    ({"head_dim": 144}, "head_dim 144"),
    ({"head_dim": 64.0}, "head_dim 64.0"),
    ({"head_dim": True}, "head_dim True"),
    ({"causal": 1}, "causal 1: use True or False"),
    ({"tile_m": 64}, "tile_m 64: this kernel takes 128 only"),
    ({"tile_n": 64}, "tile_n 64: this kernel takes 128 only"),
    ({"q_stages": 1}, "q_stages 1: this kernel takes 2 only"),
    ({"ctas": 2}, "ctas 2: this kernel takes 1 only"),
    ({"tile_order": "random"}, "tile_order 'random': use one of head_major, longest_first"),
    ({"tile_order": True}, "tile_order True: use one of"),
    ({"kv_stages": 1}, "kv_stages 1: use 2 or more"),
    ({"kv_stages": 4}, "exceeds 232448: lower kv_stages from 4 to 3"),
    ({"head_dim": 64, "kv_stages": 11}, "lower kv_stages from 11 to 10"),
    ({"exp2_emulated_share": 1.5}, "exp2_emulated_share 1.5: use a number from 0 to 1"),
    ({"exp2_emulated_share": float("nan")}, "exp2_emulated_share nan"),
    ({"exp2_emulated_share": "half"}, "exp2_emulated_share 'half'"),
    ({"rescale_threshold": -1.0}, "rescale_threshold -1.0: use 0 to 15"),
    ({"rescale_threshold": 16}, "rescale_threshold 16"),
    ({"softmax_registers": 100}, "softmax_registers 100: use 24 to 256 in steps of 8"),
    ({"correction_registers": 16}, "correction_registers 16"),
    ({"other_registers": 264}, "other_registers 264"),
    ({"softmax_registers": 200}, "2 x 200 + 80 + 48 = 528: softmax twice, correction and others"),
    ({"stages": 2}, "unknown plan field ['stages']: fields are ["),
]


@pytest.mark.parametrize(("asked", "message"), BROKEN)
def test_every_rule_names_value_rule_and_way_out(asked, message):
    with pytest.raises(PlanError) as caught:
        KernelPlan.forward(**asked)
    assert message in str(caught.value)
    assert len(caught.value.rules) == 1
    assert isinstance(caught.value, ValueError)


def test_all_broken_rules_are_listed_at_once():
    with pytest.raises(PlanError) as caught:
        KernelPlan.forward(gpu="v100", dtype="int8", head_dim=17, kv_stages=0, tile_n=96)
    assert [rule.split()[0] for rule in caught.value.rules] == [
        "gpu",
        "dtype",
        "head_dim",
        "tile_n",
        "kv_stages",
    ]
