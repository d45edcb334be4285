"""Results as rows: a table to read, a JSON file to keep."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env

import flce_dist

from .workload import Shape

MEBIBYTE = 2**20
PACKAGE = Path(flce_dist.__file__).parent
PACKAGES = ("triton", "liger-kernel", "cut-cross-entropy", "fla-core", "megatron-core", "verl", "numpy")

LABEL_WIDTH = 36
COLUMNS = {
    "chunk": 6, "ms": 9, "/floor": 7, "/cut": 6, "MiB": 8, "loss err": 9, "dX err": 8, "rows p99": 9, "dW err": 8
}  # fmt: skip
"""Of the table, with their widths."""


@dataclass
class Row:
    """One method with one setting on one shape. What was not measured is None.

    Args:
        status: "ok", "unavailable" (not installed, or not for this number of ranks) or "failed".
        chunk_rows: rows of a chunk, for what works in chunks.
        budget_bytes: what was given for the logits of a chunk.
        seconds: of one call, for each round; the slowest rank's.
        to_floor: median over the rounds of the time over the whole GEMMs' time.
        to_cut_floor: the same over the GEMMs cut into the same chunks.
        extra_peak_bytes: see `measure.extra_peak`.
        errors: see `accuracy.errors`.
        kernels, shares: of the first rank, see `kernel_table`.
        efficiency: see `scaling.set_efficiencies`.
    """

    shape: str
    num_tokens: int
    hidden_size: int
    vocab_size: int
    num_ranks: int
    method: str
    setting: str = ""
    chunk_rows: int | None = None
    budget_bytes: int | None = None
    status: str = "ok"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    to_floor: float | None = None
    to_cut_floor: float | None = None
    extra_peak_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    efficiency: float | None = None

    @classmethod
    def of(
        cls, shape: Shape, num_ranks: int, method: str, setting: str = "", chunk_rows: int | None = None, **more: Any
    ) -> Row:
        sizes = (shape.num_tokens, shape.hidden_size, shape.vocab_size)
        return cls(shape.name, *sizes, num_ranks, method, setting, chunk_rows, **more)

    @property
    def ms(self) -> float | None:
        return 1e3 * statistics.median(self.seconds) if self.seconds else None

    @property
    def label(self) -> str:
        return f"{self.method} {self.setting}".strip()


def median_ratio(seconds: Sequence[float], floor_seconds: Sequence[float]) -> float:
    """Median of the ratios of the rounds, in which both saw the same clock."""
    return statistics.median(a / b for a, b in zip(seconds, floor_seconds, strict=True))


def environment(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """Machine, versions and command that the figures belong to; a version that cannot be found is None."""
    found: dict[str, Any] = {
        "command": " ".join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "flce_dist": _version_of_package(),
        "commit": _commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
    }
    if device.type == "cuda":
        found["num_gpus"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
        found["driver"] = collect_env.get_nvidia_driver_version(collect_env.run)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
        found["device_memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
    for name in PACKAGES:
        if (installed := _version(name)) is not None:
            found[name] = installed
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _version_of_package() -> str | None:
    """Of the files that are imported: those of a checkout need not be what is installed."""
    project = PACKAGE.parent / "pyproject.toml"
    if project.exists():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    return _version("flce-dist")


def _commit() -> str | None:
    """The commit of the package's files, with "-dirty" when something was changed since; None outside of a checkout."""
    git = ["git", "-C", str(PACKAGE)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True)
        if tracked.returncode:
            return None
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except FileNotFoundError:  # no git on this machine
        return None


def table(rows: Sequence[Row]) -> str:
    """One line a row; shapes are headings."""
    header = _columns("method", COLUMNS)
    lines: list[str] = []
    heading = None
    for row in rows:
        ranks = f", {row.num_ranks} ranks" if row.num_ranks > 1 else ""
        this = f"{row.shape} (N {row.num_tokens} H {row.hidden_size} V {row.vocab_size}{ranks})"
        if this != heading:
            lines += ["", this, header]
            heading = this
        lines.append(_line(row))
    return "\n".join(lines[1:])


def _line(row: Row) -> str:
    if row.status != "ok":
        return f"{row.label:<{LABEL_WIDTH}} {row.status.upper()}: {row.reason}"
    peak = None if row.extra_peak_bytes is None else row.extra_peak_bytes / MEBIBYTE
    digits = ".1f" if peak is not None and peak < 100 else ".0f"
    error = row.errors.get
    names = ("loss_error", "hidden_error", "hidden_row_error_p99", "weight_error")
    times = [_number(value, ".3f") for value in (row.ms, row.to_floor, row.to_cut_floor)]
    errors = [_number(error(name), ".1e") for name in names]
    return _columns(row.label, [_number(row.chunk_rows, "d"), *times, _number(peak, digits), *errors])


def _columns(label: str, cells: Iterable[str]) -> str:
    """A space stands between two columns, however wide they are."""
    return " ".join(
        [f"{label:<{LABEL_WIDTH}}", *(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))]
    )


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def write_json(path: Path, rows: Sequence[Row], facts: dict[str, Any], settings: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "environment": facts,
        "settings": settings,
        "rows": [asdict(row) | {"ms": row.ms, "label": row.label} for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
