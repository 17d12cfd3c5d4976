"""What an emulation says: what ran, how fast, and what is wrong with the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.emulator.findings import EmulationError, Finding
from kernels.emulator.gpus import GpuModel
from kernels.emulator.host_runtime import Launch
from kernels.emulator.records import Records

if TYPE_CHECKING:
    from kernels.emulator.trace import Trace

# How much of a long list str(report) shows; to_dict() has everything.
_SHOWN_PER_CODE = 5
_KERNEL_NAME_CHARS = 56


@dataclass(frozen=True)
class LaunchReport:
    """One launch: how it was launched and what came of it.

    ctas: CTAs that ran. thread_instructions: one PTX instruction by one active lane each; MMA and
    TMA count once per issuing lane; declarations, labels and failed try_waits do not count.
    seconds: wall time of emulating. ran: False when an earlier launch's findings stopped the run.
    records: for the cycle model, if `emulate` was asked to record. trace: likewise, a timeline.
    """

    launch: Launch
    findings: tuple[Finding, ...] = ()
    thread_instructions: int = 0
    ctas: int = 0
    seconds: float = 0.0
    ran: bool = True
    records: Records | None = None
    trace: Trace | None = None

    @property
    def kernel(self) -> str:
        return self.launch.kernel

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the launch's shape and what came of it."""
        launch = self.launch
        return {
            "kernel": launch.kernel,
            "grid": list(launch.grid),
            "block": list(launch.block),
            "cluster": list(launch.cluster),
            "smem_bytes": launch.smem_bytes,
            "ran": self.ran,
            "ctas": self.ctas,
            "thread_instructions": self.thread_instructions,
            "seconds": json_ready(self.seconds),
            "findings": [json_ready(finding.to_dict()) for finding in self.findings],
        }

    def __str__(self) -> str:
        launch = self.launch
        shape = f"grid {_dims(launch.grid)}  block {_dims(launch.block)}"
        if launch.cluster != (1, 1, 1):
            shape += f"  cluster {_dims(launch.cluster)}"
        head = f"{shorten(launch.kernel, _KERNEL_NAME_CHARS)}  {shape}"
        head += f"  smem {launch.smem_bytes / 1024:.1f} KiB"
        if not self.ran:
            return f"{head}\n    not run: an earlier launch has findings"
        return (
            f"{head}\n    {count(self.ctas, 'CTA')}, "
            f"{speed(self.thread_instructions, self.seconds)}"
        )


@dataclass(frozen=True)
class Report:
    """What `emulate` returns.

    function: the host function. launches: one entry per launch, in order.
    compile_seconds: 0.0 when an earlier compile was used again.
    """

    function: str
    gpu: GpuModel
    launches: tuple[LaunchReport, ...] = ()
    seed: int = 0
    schedule: str = "round_robin"
    visibility: str = "eager"
    profile: str = "silicon"
    compile_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every launch ran to its end without a finding."""
        return not self.findings and all(launch.ran for launch in self.launches)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all launches, in the order in which they were made."""
        return tuple(finding for launch in self.launches for finding in launch.findings)

    @property
    def thread_instructions(self) -> int:
        """Of all launches together; see `LaunchReport`."""
        return sum(launch.thread_instructions for launch in self.launches)

    @property
    def seconds(self) -> float:
        """Wall time of emulating, without compiling."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def thread_instructions_per_second(self) -> float | None:
        """Speed while emulating; None when nothing was timed."""
        return self.thread_instructions / self.seconds if self.seconds > 0 else None

    def raise_if_findings(self) -> None:
        """Raise EmulationError, which carries this report, when there is a finding."""
        if self.ok:
            return
        codes = ", ".join(dict.fromkeys(finding.code for finding in self.findings))
        raise EmulationError(
            f"{self.function} on {self.gpu.name}: {count(len(self.findings), 'finding')} ({codes})"
            f"\n{self}",
            self,
        )

    def write_trace(self, path: str | Path) -> None:
        """Writes the run's timeline for Perfetto (ui.perfetto.dev): one track a warp and engine.

        Raises ValueError unless the run was made with ``emulate(..., trace=True)``.
        """
        from kernels.emulator.trace import write_trace

        traces = [launch.trace for launch in self.launches if launch.trace is not None]
        if not traces:
            raise ValueError("there is no trace: call emulate(..., trace=True)")
        write_trace(path, traces)

    def _repr_html_(self) -> str:
        """For notebooks: the verdict, the launches, and each finding in a box of its own."""
        color = "#1a7f37" if self.ok else "#b42318"
        verdict = "no findings" if self.ok else count(len(self.findings), "finding")
        head = (
            f"<b>{escape(self.function)}</b> emulated on {escape(self.gpu.name)}"
            f" ({escape(self.gpu.arch)}): <b style='color:{color}'>{verdict}</b>"
        )
        settings = f"seed {self.seed}, {self.schedule}, {self.visibility}, {self.profile}"
        runs = "".join(f"<li><code>{escape(str(launch))}</code></li>" for launch in self.launches)
        boxes = "".join(map(_finding_html, self.findings))
        return f"<div>{head}<br><small>{escape(settings)}</small><ol>{runs}</ol>{boxes}</div>"

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report as JSON-ready values; what is not a number becomes None."""
        return {
            "ok": self.ok,
            "function": self.function,
            "gpu": self.gpu.name,
            "arch": self.gpu.arch,
            "seed": self.seed,
            "schedule": self.schedule,
            "visibility": self.visibility,
            "profile": self.profile,
            "thread_instructions": self.thread_instructions,
            "seconds": json_ready(self.seconds),
            "compile_seconds": json_ready(self.compile_seconds),
            "findings": [json_ready(finding.to_dict()) for finding in self.findings],
            "launches": [launch.to_dict() for launch in self.launches],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.function} emulated on {self.gpu.name} ({self.gpu.arch}): "
            f"seed {self.seed}, {self.schedule}, {self.visibility}, {self.profile}"
        ]
        if not self.launches:
            lines.append("  nothing was launched")
        for index, launch in enumerate(self.launches, 1):
            lines.append(f"  {index}. {launch}")
        compiled = f"{self.compile_seconds:.2f} s" if self.compile_seconds else "reused"
        total = speed(self.thread_instructions, self.seconds)
        lines.append(f"  compile {compiled}; {total}")
        lines += [f"  {line}" for line in finding_lines(self.findings)]
        return "\n".join(lines)


def _finding_html(finding: Finding) -> str:
    rest = str(finding).removeprefix(f"{finding.code}: ")
    table = "\n".join(blocked_table(finding.details.get("blocked")))
    return (
        "<div style='border-left:3px solid #b42318;padding-left:8px;margin:8px 0'>"
        f"<b>{escape(finding.code)}</b>: {escape(rest)}"
        + (f"<pre>{escape(table)}</pre>" if table else "")
        + "</div>"
    )


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """The findings for a terminal: grouped by code, deadlocks in full."""
    if not findings:
        return ["no findings"]
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.code, []).append(finding)
    lines = [count(len(findings), "finding")]
    for code, group in groups.items():
        lines.append(f"{code} ({len(group)})")
        for finding in group[:_SHOWN_PER_CODE]:
            lines.append(f"  {str(finding).removeprefix(f'{code}: ')}")
            lines += [f"    {line}" for line in blocked_table(finding.details.get("blocked"))]
        if len(group) > _SHOWN_PER_CODE:
            lines.append(f"  ... and {len(group) - _SHOWN_PER_CODE} more")
    return lines


# Keys of one entry of a deadlock's details["blocked"], with the heading of its column.
BLOCKED_COLUMNS = {
    "cta": "cta",
    "warp": "warp",
    "role": "role",
    "source": "at",
    "ptx_line": "ptx",
    "waits_on": "waits on",
    "barrier": "barrier",
    "phase": "phase",
    "pending_arrivals": "arrivals missing",
    "pending_bytes": "bytes missing",
    "last_arrivers": "last arrived",
}


def blocked_table(blocked: Iterable[Mapping[str, Any]] | None) -> list[str]:
    """A deadlock's blocked warps, one a row; columns that nobody fills are left out."""
    rows = list(blocked or ())
    keys = [key for key in BLOCKED_COLUMNS if any(row.get(key) not in (None, "") for row in rows)]
    if not keys:
        return []
    cells = [[BLOCKED_COLUMNS[key] for key in keys]]
    cells += [[_cell(key, row.get(key)) for key in keys] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(keys))]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "barrier" and isinstance(value, int):
        return f"{value:#x}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "nobody"
    return str(value)


def speed(thread_instructions: int, seconds: float) -> str:
    """For example "1,234,567 thread-instructions in 0.43 s (2.9 M/s)"."""
    text = f"{count(thread_instructions, 'thread-instruction')} in {seconds:.2f} s"
    return f"{text} ({thread_instructions / seconds / 1e6:.1f} M/s)" if seconds > 0 else text


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 finding", "2,000 findings"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shorten(text: str, chars: int) -> str:
    """The text, cut in the middle to at most `chars` characters (the tail tells kernels apart)."""
    if len(text) <= chars:
        return text
    tail = chars // 4
    return f"{text[: chars - tail - 3]}...{text[-tail:]}"


def _dims(dims: Sequence[int]) -> str:
    return "x".join(map(str, dims))


def json_ready(value: Any) -> Any:
    """The value as JSON has it: None for NaN and infinity, lists for tuples, hex for bytes."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [json_ready(item) for item in sorted(value, key=str)]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return json_ready(value.tolist())
    return str(value)
