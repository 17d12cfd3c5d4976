"""GPU entries: complete, sourced, consistent with the vendor's peaks; a user's TOML is checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roofline import RooflineError, budget, find_gpu, gpus
from roofline.gpus import FIELDS, GPU_NAMES, TAGS, read_gpu

MINIMAL = """
name = "mine"
base = "b200"
[mufu_ex2]
value = 32
unit = "op/clk/SM"
tag = "assumed"
source = "what if"
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


@pytest.mark.parametrize("gpu", gpus(), ids=lambda g: g.name)
def test_every_number_has_unit_tag_and_source(gpu) -> None:  # type: ignore[no-untyped-def]
    for name, quantity in gpu.quantities.items():
        assert quantity.unit == FIELDS[name].unit
        assert quantity.tag in TAGS
        assert len(quantity.source) > 6, name
        assert quantity.value > 0
    for name, field in FIELDS.items():
        assert not field.required or gpu.has(name)


@pytest.mark.parametrize("name", GPU_NAMES)
def test_no_gpu_lacks_a_cost(name: str) -> None:
    """Launch, clocks, power and MMA rates of every GPU; TMEM, mxfp8 and nvfp4 of Blackwell."""
    gpu = find_gpu(name)
    for field in ("launch_latency", "cta_launch", "clock_max", "mma_tf32", "mma_fp8", "tdp"):
        assert gpu[field].value > 0
    blackwell = gpu.arch_number >= 100
    for field in ("tmem_columns", "tmem_read_bandwidth", "mma_mxfp8", "mma_nvfp4"):
        assert gpu.has(field) == blackwell


# TFLOP/s dense and ex2 in Top/s as NVIDIA's data sheets give them.
PEAKS = [
    ("h100", "bf16", 989, 5e-3),
    ("h100", "fp8", 1979, 5e-3),
    ("h200", "bf16", 989, 5e-3),
    ("b200", "bf16", 2250, 5e-3),
    ("b200", "fp8", 4500, 5e-3),
    ("b200", "nvfp4", 9000, 5e-3),
    ("b200", "tf32", 1100, 3e-2),
    ("gb200", "bf16", 2250, 5e-3),
    ("gb200", "nvfp4", 9000, 5e-3),
    ("b300", "bf16", 2250, 5e-3),
    ("b300", "nvfp4", 14000, 5e-2),
    ("gb300", "bf16", 2500, 5e-3),
    ("gb300", "fp8", 5000, 5e-3),
    ("gb300", "nvfp4", 15000, 5e-3),
]


@pytest.mark.parametrize(("name", "dtype", "tflops", "relative"), PEAKS)
def test_peaks(name: str, dtype: str, tflops: float, relative: float) -> None:
    peak = budget(name, 128, 128, 128, dtype=dtype).peak_tflops
    assert peak == pytest.approx(tflops, rel=relative)


def test_measured_exponentials() -> None:
    """NVIDIA developer blog 2026-02-25: 4943 and 10024 Gop/s, at the highest clock."""
    for name, gops in (("gb200", 4943), ("gb300", 10024)):
        gpu = find_gpu(name)
        rate = gpu["mufu_ex2"].value * gpu["sms"].value * gpu["clock_max"].value
        assert rate == pytest.approx(gops, rel=2e-2)


def test_what_was_measured_elsewhere_is_assumed_here() -> None:
    assert find_gpu("b200")["l2_bandwidth"].tag == "measured"
    inherited = find_gpu("gb200")["l2_bandwidth"]
    assert inherited.tag == "assumed"
    assert inherited.source.startswith("as b200: ")
    assert find_gpu("h200")["sms"].tag == "vendor"


def test_architectures_agree_with_the_plan() -> None:
    plan = pytest.importorskip("kernels.common.plan")
    assert {gpu.name: gpu.arch for gpu in gpus()} == plan.GPU_ARCHS
    for gpu in gpus():
        assert gpu["smem_block"].value == plan.SMEM_LIMIT_BYTES
        assert gpu["registers"].value == plan.REGISTERS_PER_SM
    assert find_gpu("b200")["tmem_columns"].value == plan.TMEM_COLUMNS


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("B200", "b200"),
        ("sm_90a", "h100"),
        ("sm_90", "h100"),
        ("sm_100a", "b200"),
        ("sm_100f", "b200"),
        ("sm_103a", "b300"),
    ],
)
def test_names_and_architectures(name: str, found: str) -> None:
    assert find_gpu(name).name == found


@pytest.mark.parametrize("name", ["", "a100", "sm_80", "sm_1000a", "sm_", "b20"])
def test_unknown_gpu_lists_the_names(name: str) -> None:
    with pytest.raises(RooflineError) as error:
        find_gpu(name)
    for known in GPU_NAMES:
        assert known in str(error.value)


def test_user_gpu_changes_the_budget(toml: Path) -> None:
    gpu = read_gpu(write(toml, MINIMAL))
    assert (gpu.name, gpu.arch) == ("mine", "sm_100a")
    assert budget(gpu, 128, 128, 64).exp == 512
    assert budget(str(toml), 128, 128, 64).exp == 512
    assert gpu["mufu_ex2"].source == "what if"


def test_user_gpu_without_base_must_say_everything(toml: Path) -> None:
    text = "".join(
        f'[{name}]\nvalue = {q.value}\nunit = "{q.unit}"\n'
        for name, q in find_gpu("b200").quantities.items()
    )
    gpu = read_gpu(write(toml, 'name = "mine"\narch = "sm_100a"\n' + text))
    assert budget(gpu, 256, 128, 128).to_dict()["smem"] == 1536
    assert gpu["sms"].tag == "assumed"
    without = re.sub(r"\[alu\]\n.*\n.*\n", "", text)
    with pytest.raises(RooflineError, match=r"alu: missing; .*lane/clk/SM"):
        read_gpu(write(toml, 'name = "mine"\narch = "sm_100a"\n' + without))


BROKEN = [
    ("value = 32", "value = -32", "mufu_ex2.value: -32 must be positive"),
    ("value = 32", "value = 0", "mufu_ex2.value: 0 must be positive"),
    (
        '[mufu_ex2]\nvalue = 32\nunit = "op/clk/SM"',
        '[sms]\nvalue = 1.5\nunit = "SM"',
        "sms.value: 1.5 must be a whole number of SM",
    ),
    ("value = 32", "value = nan", "mufu_ex2.value: nan is not a finite number"),
    ("value = 32", "value = inf", "mufu_ex2.value: inf is not a finite number"),
    ("value = 32", "value = true", "mufu_ex2.value: True is not a finite number"),
    ("value = 32", 'value = "32"', "mufu_ex2.value: '32' is not a finite number"),
    ("value = 32\n", "", "mufu_ex2.value: missing"),
    ("op/clk/SM", "Gop/s", "mufu_ex2.unit: 'Gop/s' is not its unit; convert to 'op/clk/SM'"),
    ('unit = "op/clk/SM"\n', "", "mufu_ex2.unit: missing"),
    ('"assumed"', '"guessed"', "mufu_ex2.tag: 'guessed' is none of measured"),
    ('"what if"', '""', "mufu_ex2.source: must be a text"),
    ("[mufu_ex2]", "[mufu_exp2]", "mufu_exp2: unknown field; known are sms"),
    ("source =", "sauce =", "mufu_ex2.sauce: unknown"),
    ('base = "b200"', 'base = "b100"', "base: 'b100' is none of h100"),
    ('base = "b200"', "", "arch: missing"),
    ('base = "b200"', 'base = "b200"\narch = "blackwell"', "arch 'blackwell': must look like"),
    (
        'base = "b200"',
        'base = "b200"\narch = "sm_90a"',
        "arch 'sm_90a': has no TMEM, but tmem_columns says so",
    ),
    ('base = "b200"', 'base = "h100"\narch = "sm_103a"', "arch 'sm_103a': needs tmem_columns"),
    (
        'base = "b200"\n',
        'base = "h100"\n[tmem_columns]\nvalue = 512\nunit = "column/SM"\n',
        "arch 'sm_90a': has no TMEM, but tmem_columns says so",
    ),
    ('base = "b200"', 'base = "b200"\narch = "sm_700"', "arch 'sm_700': unknown; known are sm_90a"),
    (
        '[mufu_ex2]\nvalue = 32\nunit = "op/clk/SM"',
        '[smem_block]\nvalue = 999999\nunit = "B"',
        "smem_block.value: 999999 B, but smem_sm is 233472: 766527 too many",
    ),
    ("value = 32", "value = 1e30", "mufu_ex2.value: 1e+30 is more than 1000 times off"),
    ("value = 32", "value = 1e-3", "mufu_ex2.value: 0.001 is more than 1000 times off"),
    ('name = "mine"', "", "name: missing"),
    ('name = "mine"', "name = 3", "name: 3 must be a non-empty text"),
    ("[mufu_ex2]", "mufu_ex2 = 3\n[fma]", "mufu_ex2: must be a table"),
    ("[mufu_ex2]", "[mufu_ex2", "not TOML"),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN)
def test_bad_toml_names_the_field(toml: Path, old: str, new: str, message: str) -> None:
    assert old in MINIMAL
    with pytest.raises(RooflineError) as error:
        read_gpu(write(toml, MINIMAL.replace(old, new)))
    text = str(error.value)
    assert message in text
    assert "\n" not in text


def test_base_must_be_built_in(toml: Path) -> None:
    """A file on itself would be read for ever."""
    write(toml, MINIMAL.replace('base = "b200"', f'base = "{toml}"'))
    with pytest.raises(RooflineError, match="base: .* is none of h100"):
        read_gpu(toml)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(RooflineError, match=r"none\.toml: cannot be read: No such file"):
        find_gpu(str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RooflineError, match="not UTF-8"):
        find_gpu(str(tmp_path / "binary.toml"))


def test_a_bare_number_is_assumed_by_its_file(toml: Path) -> None:
    text = MINIMAL.replace('tag = "assumed"\n', "").replace('source = "what if"\n', "")
    found = read_gpu(write(toml, text))["mufu_ex2"]
    assert (found.value, found.tag, found.source) == (32, "assumed", str(toml))


def test_override_keeps_what_must_hold() -> None:
    with pytest.raises(RooflineError, match="smem_block.value: 300000 B, but smem_sm is 233472"):
        find_gpu("b200").override(smem_block=300000)


def test_override_is_tagged_assumed() -> None:
    gpu = find_gpu("b200").override(mufu_ex2=32, smem_bandwidth=256)
    assert budget(gpu, 256, 128, 128).to_dict()["smem"] == 768
    assert gpu["mufu_ex2"].tag == "assumed"
    assert find_gpu("b200")["mufu_ex2"].value == 16
    with pytest.raises(RooflineError, match="warp_speed: unknown field"):
        find_gpu("b200").override(warp_speed=9)
