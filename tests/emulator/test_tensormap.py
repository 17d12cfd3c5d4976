"""Tensor maps: the bits of two real encoders, and every other bit refused."""

from __future__ import annotations

import struct

import pytest

from kernels.emulator.findings import EmulatorFault, UnsupportedPTX
from kernels.emulator.tensormap import TensorMap
from tests.emulator.hardware import goldens

ADDRESS = 0x7F0000000000
DRIVER = goldens.load("tma_sm90.json")
# By CUtensorMapDataType of cuda.h.
CUDA_TYPES = [
    "uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "bfloat16", "float32_ftz", "float32", "float32_ftz",
]  # fmt: skip
TF32_TYPES = (11, 12)


def of_case(case: dict, address: int) -> TensorMap:
    """The map that cuTensorMapEncodeTiled was asked for."""
    return TensorMap(
        address=address + case["address"],
        dtype=CUDA_TYPES[case["dtype"]],
        dims=tuple(case["dims"]),
        strides_bytes=tuple(case["strides"]),
        box=tuple(case["box"]),
        element_strides=tuple(case["element_strides"]),
        swizzle_bytes=(0, 32, 64, 128)[case["swizzle"]],
        nan_fill=bool(case["oob"]),
        tf32_rounding=case["dtype"] in TF32_TYPES,
        l2_promotion_bytes=(0, 64, 128, 256)[case["l2"]],
    )


# Maps from CuTe DSL 4.8.1's make_tiled_tma_atom, the address replaced: element type, sizes, byte
# strides, box, swizzle span and atom, tf32 rounding, and the eight words as they lie in memory.
DSL = [
    (
        "uint8",
        (128, 256),
        (128,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 1200040008000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "uint16",
        (128, 256),
        (256,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 9200040010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "uint32",
        (128, 256),
        (512,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 1201240020000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "uint32",
        (128, 256),
        (512,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 1201240020000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "uint64",
        (128, 256),
        (1024,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 1202240040000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "uint64",
        (128, 256),
        (1024,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 1202240040000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "float16",
        (128, 256),
        (256,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 1203040010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "bfloat16",
        (128, 256),
        (256,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 1205040010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "float32",
        (128, 256),
        (512,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 9203240020000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "float64",
        (128, 256),
        (1024,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 9204240040000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "uint8",
        (128, 256),
        (128,),
        (16, 64),
        0,
        16,
        False,
        "00000000007f0000 1200040008000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "bfloat16",
        (128, 256),
        (256,),
        (64, 64),
        0,
        16,
        False,
        "00000000007f0000 1205040010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000003f 3f00000000000000",
    ),
    (
        "bfloat16",
        (128, 256),
        (256,),
        (16, 64),
        32,
        16,
        False,
        "00000000007f0000 1225040010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000000f 3f00000000000000",
    ),
    (
        "bfloat16",
        (128, 256),
        (256,),
        (32, 64),
        64,
        16,
        False,
        "00000000007f0000 1245040010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000001f 3f00000000000000",
    ),
    (
        "bfloat16",
        (128, 256),
        (256,),
        (64, 64),
        128,
        16,
        False,
        "00000000007f0000 1265040010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000003f 3f00000000000000",
    ),
    (
        "bfloat16",
        (128, 256),
        (256,),
        (64, 64),
        128,
        32,
        False,
        "00000000007f0000 12650c0010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000003f 3f00000000000000",
    ),
    (
        "bfloat16",
        (128, 256),
        (256,),
        (64, 64),
        128,
        64,
        False,
        "00000000007f0000 12651c0010000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000003f 3f00000000000000",
    ),
    (
        "bfloat16",
        (1024, 1024),
        (2048,),
        (64, 64),
        128,
        16,
        False,
        "00000000007f0000 1265240080000000 0000000000000000 0000000000000000"
        " ff030000ff030000 0000000000000000 000000000000003f 3f00000000000000",
    ),
    (
        "float32",
        (128, 256),
        (512,),
        (32, 64),
        128,
        16,
        True,
        "00000000007f0000 9263250020000000 0000000000000000 0000000000000000"
        " 7f000000ff000000 0000000000000000 000000000000001f 3f00000000000000",
    ),
    (
        "bfloat16",
        (512,),
        (),
        (128,),
        0,
        16,
        False,
        "00000000007f0000 0205040000000000 0000000000000000 0000000000000000"
        " ff01000000000000 0000000000000000 000000000000007f 0000000000000000",
    ),
    (
        "bfloat16",
        (72, 40),
        (160,),
        (24, 16),
        0,
        16,
        False,
        "00000000007f0000 120504000a000000 0000000000000000 0000000000000000"
        " 4700000027000000 0000000000000000 0000000000000017 0f00000000000000",
    ),
    (
        "bfloat16",
        (72, 40, 3),
        (160, 6560),
        (16, 8, 2),
        0,
        16,
        False,
        "00000000007f0000 220504000a000000 9a01000000000000 0000000000000000"
        " 4700000027000000 0200000000000000 000000000000000f 0701000000000000",
    ),
    (
        "bfloat16",
        (72, 40, 5, 3),
        (160, 6560, 39360),
        (16, 8, 2, 1),
        0,
        16,
        False,
        "00000000007f0000 320504000a000000 9a0100009c090000 0000000000000000"
        " 4700000027000000 0400000002000000 000000000000000f 0701000000000000",
    ),
    (
        "bfloat16",
        (72, 40, 5, 2, 3),
        (160, 6560, 157440, 39360),
        (16, 8, 2, 1, 1),
        0,
        16,
        False,
        "00000000007f0000 420524000a000000 9a01000070260000 9c09000000000000"
        " 4700000027000000 0400000001000000 020000000000000f 0701000000000000",
    ),
]


@pytest.mark.parametrize("case", [c for c in DRIVER["encode"] if not c["interleave"]])
def test_maps_of_the_driver(case: dict) -> None:
    want = of_case(case, ADDRESS)
    raw = bytes.fromhex(case["hex"])
    assert TensorMap.decode(raw) == want
    assert want.encode(dsl=False)[:64] == raw


def test_the_driver_was_asked_for_every_kind_of_field() -> None:
    cases = [c for c in DRIVER["encode"] if not c["interleave"]]
    assert len(cases) >= 90
    assert {c["dtype"] for c in cases} == set(range(13))
    assert {len(c["dims"]) for c in cases} == {1, 2, 3, 4, 5}
    assert {c["swizzle"] for c in cases} == {0, 1, 2, 3}
    assert max(max(c["strides"], default=0) for c in cases) > 1 << 36


@pytest.mark.parametrize("case", [c for c in DRIVER["encode"] if c["interleave"]])
def test_interleaved_maps_are_refused(case: dict) -> None:
    with pytest.raises(UnsupportedPTX, match="bits 12:11"):
        TensorMap.decode(bytes.fromhex(case["hex"]))


@pytest.mark.parametrize("dtype,dims,strides,box,swizzle,atom,tf32,words", DSL)
def test_maps_of_the_dsl(dtype, dims, strides, box, swizzle, atom, tf32, words) -> None:
    raw = bytes.fromhex(words)
    tail = bytes(range(64))  # the DSL leaves the second half as it was
    got = TensorMap.decode(raw + tail)
    want = TensorMap(
        address=ADDRESS,
        dtype=dtype,
        dims=dims,
        strides_bytes=strides,
        box=box,
        element_strides=(1,) * len(dims),
        swizzle_bytes=swizzle,
        swizzle_atom_bytes=atom,
        tf32_rounding=tf32,
    )
    assert got == want
    assert want.encode()[:64] == raw


GOOD = TensorMap.decode(bytes.fromhex(DSL[14][-1]))  # bf16, 128 x 256, SW128


def flip(word: int, bit: int) -> bytes:
    words = list(struct.unpack("<8Q", GOOD.encode()[:64]))
    words[word] ^= 1 << bit
    return struct.pack("<8Q", *words)


UNKNOWN = (
    [(0, bit) for bit in (*range(4), *range(57, 64))]
    + [(1, bit) for bit in (0, 2, 3, 11, 12, 20, *range(22, 32))]
    + [(3, bit) for bit in range(48, 64)]
    + [(6, bit) for bit in range(47, 56)]
    + [(7, bit) for bit in range(32, 64)]
)


@pytest.mark.parametrize("word,bit", UNKNOWN)
def test_an_unknown_bit_is_refused_by_name(word: int, bit: int) -> None:
    with pytest.raises(UnsupportedPTX, match=f"word {word} "):
        TensorMap.decode(flip(word, bit))


@pytest.mark.parametrize(
    "word,bit", [(2, 0), (2, 40), (3, 5), (3, 36), (5, 0), (6, 3), (6, 38), (7, 8), (7, 31)]
)
def test_fields_beyond_the_rank_are_refused(word: int, bit: int) -> None:
    with pytest.raises(UnsupportedPTX, match="higher dimensions"):
        TensorMap.decode(flip(word, bit))


@pytest.mark.parametrize("word,bit", [(1, 1), (1, 17), (1, 18), (1, 21)])
def test_bits_without_effect_on_values(word: int, bit: int) -> None:
    got = TensorMap.decode(flip(word, bit))
    assert (got.dims, got.box, got.strides_bytes) == (GOOD.dims, GOOD.box, GOOD.strides_bytes)


def test_every_other_bit_changes_the_map() -> None:
    """No bit of the defined half is ignored unseen."""
    silent = {(1, 1), (1, 21)}
    for word in range(8):
        for bit in range(64):
            if (word, bit) in silent or (word, bit) in UNKNOWN:
                continue
            try:
                assert TensorMap.decode(flip(word, bit)) != GOOD, (word, bit)
            except (EmulatorFault, UnsupportedPTX):
                pass


@pytest.mark.parametrize("rank_code", [5, 6, 7])
def test_ranks_above_five_are_refused(rank_code: int) -> None:
    words = list(struct.unpack("<8Q", GOOD.encode()[:64]))
    words[1] = words[1] & ~(7 << 4) | rank_code << 4
    with pytest.raises(UnsupportedPTX, match="rank"):
        TensorMap.decode(struct.pack("<8Q", *words))


@pytest.mark.parametrize(
    "changes",
    [
        {"strides_bytes": (0x108,)},
        {"box": (60, 64)},
        {"box": (72, 64)},
        {"element_strides": (2, 1)},
        {"nan_fill": True, "dtype": "uint16"},
        {"tf32_rounding": True},
        {"swizzle_atom_bytes": 32, "swizzle_bytes": 64, "box": (32, 64)},
    ],
)
def test_rules_of_the_encoder(changes: dict) -> None:
    fields = {name: getattr(GOOD, name) for name in GOOD.__dataclass_fields__}
    with pytest.raises(EmulatorFault) as caught:
        TensorMap(**{**fields, **changes}).check()
    assert caught.value.code == "tma_bad_tensor_map"


def test_a_short_buffer() -> None:
    with pytest.raises(ValueError, match="128 bytes"):
        TensorMap.decode(bytes(63))


def test_the_tile() -> None:
    thin = TensorMap(
        address=ADDRESS,
        dtype="float32",
        dims=(100, 50),
        strides_bytes=(400,),
        box=(32, 31),
        element_strides=(1, 2),
    )
    assert thin.tile == (32, 16) and thin.tile_bytes == 2048
    assert thin.all_strides_bytes == (4, 400)
    assert thin.span_bytes == 400 * 50
