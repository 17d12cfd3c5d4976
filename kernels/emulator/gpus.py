"""The GPUs that the emulator models: the few hardware limits that a functional run depends on.

These are the emulator's own numbers, not the roofline's: a clock, a bandwidth or a peak has no
place here, because the emulator knows no cycles.
"""

from __future__ import annotations

from dataclasses import dataclass

# CUDA C++ Programming Guide, "Compute Capabilities", technical specifications table: compute
# capabilities 9.0, 10.0 and 10.3 alike allow 1024 threads a block, 64 warps and 228 KiB of shared
# memory an SM, of which one block may use 227 KiB (1 KiB is reserved by the system).
_MAX_THREADS_PER_CTA = 1024
_SMEM_PER_CTA_BYTES = 227 * 1024
_SMEM_PER_SM_BYTES = 228 * 1024
_WARPS_PER_SM = 64
_REGISTERS_PER_SM = 64 * 1024
# Same guide, "Thread Block Clusters": 8 is portable, 16 needs the non-portable attribute.
_MAX_CLUSTER_CTAS = 16
# PTX ISA 9.1 section 9.7.16.1: Tensor Memory is 128 lanes x 512 columns of 32 bit a CTA (sm_100+).
_TMEM_COLUMNS = 512


@dataclass(frozen=True)
class GpuModel:
    """Limits of one GPU that decide whether and how a launch runs.

    Bytes are bytes, `tmem_columns` counts 32-bit columns of 128 lanes (0: no Tensor Memory),
    `compute_capability` is (major, minor), `arch` the DSL's and PTX's target name.
    """

    name: str
    arch: str
    compute_capability: tuple[int, int]
    sm_count: int
    tmem_columns: int
    smem_per_cta_bytes: int = _SMEM_PER_CTA_BYTES
    smem_per_sm_bytes: int = _SMEM_PER_SM_BYTES
    max_threads_per_cta: int = _MAX_THREADS_PER_CTA
    max_cluster_ctas: int = _MAX_CLUSTER_CTAS
    warps_per_sm: int = _WARPS_PER_SM
    registers_per_sm: int = _REGISTERS_PER_SM


def _hopper(name: str, sm_count: int) -> GpuModel:
    return GpuModel(name, "sm_90a", (9, 0), sm_count, tmem_columns=0)


def _blackwell(name: str, sm_count: int) -> GpuModel:
    return GpuModel(name, "sm_100a", (10, 0), sm_count, tmem_columns=_TMEM_COLUMNS)


def _blackwell_ultra(name: str, sm_count: int) -> GpuModel:
    return GpuModel(name, "sm_103a", (10, 3), sm_count, tmem_columns=_TMEM_COLUMNS)


GPUS: dict[str, GpuModel] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H100 Tensor Core GPU Architecture white paper: H100 SXM5 has 132 SMs enabled; H200
        # is the same chip with other memory (NVIDIA H200 datasheet).
        _hopper("h100", 132),
        _hopper("h200", 132),
        # NVIDIA Blackwell tuning and product tables: 148 SMs on B200, 152 on GB200; both are what
        # their device query reports.
        _blackwell("b200", 148),
        _blackwell("gb200", 152),
        # NVIDIA Blackwell Ultra: 160 SMs on the full chip, 148 enabled on B300. GB300 is assumed to
        # have as many as GB200; only host code that sizes its grid by it can tell.
        _blackwell_ultra("b300", 148),
        _blackwell_ultra("gb300", 152),
    )
}

# An architecture alone picks the GPU that defines it.
_ARCH_DEFAULTS = {"sm_90a": "h100", "sm_100a": "b200", "sm_103a": "b300"}


def gpu_model(name: str | GpuModel) -> GpuModel:
    """Look up a GPU by name ("b200"), by architecture ("sm_100a"), in any case.

    Raises ValueError that lists the names when there is no such model.
    """
    if isinstance(name, GpuModel):
        return name
    key = str(name).lower()
    key = _ARCH_DEFAULTS.get(key, key)
    if key not in GPUS:
        raise ValueError(
            f"gpu={name!r}: the emulator has no such GPU; it models {', '.join(GPUS)}, "
            f"or name an architecture: {', '.join(_ARCH_DEFAULTS)}"
        )
    return GPUS[key]
