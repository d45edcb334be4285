"""PNG plots of a sweep. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .report import MEBIBYTE, Row

Value = Callable[[Row], float | None]

X_AXES: dict[str, tuple[str, Value]] = {
    "tokens": ("tokens N", lambda row: row.num_tokens),
    "vocab": ("vocabulary V", lambda row: row.vocab_size),
    "budget": ("budget for the logits of a chunk (MiB)", lambda row: _mebibytes(row.budget_bytes)),
    "ranks": ("ranks", lambda row: row.num_ranks),
}
Y_AXES: dict[str, tuple[str, Value]] = {
    "time": ("{step} (ms)", lambda row: row.ms),
    "memory": ("extra peak (MiB)", lambda row: _mebibytes(row.extra_peak_bytes)),
    "ratio": ("{step} / {floor}", lambda row: row.to_floor),
    "efficiency": ("time of one rank / (ranks x time)", lambda row: row.efficiency),
}
TRAINING = {"step": "forward + backward", "floor": "three whole GEMMs"}
EVALUATION = {"step": "forward", "floor": "the whole logits GEMM"}
MARKERS = "osD^vPX*"
ROW_INCHES = 0.17
"""Of a legend."""


def _mebibytes(value: int | None) -> float | None:
    return None if value is None else value / MEBIBYTE


def plot_sweep(sweep: str, rows: Sequence[Row], title: str, folder: Path, forward_only: bool = False) -> list[Path]:
    """One picture for each of time, memory, ratio to the floor and, over ranks, efficiency; one line a method; returns
    the files. Over budgets, what has no chunks is a dashed line from side to side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    x_label, x_value = X_AXES[sweep]
    measured = [row for row in rows if row.status == "ok"]
    written = []
    for name, (y_label, y_value) in Y_AXES.items():
        lines = _lines(measured, sweep, x_value, y_value)
        if not lines:
            continue
        levels = _levels(measured, y_value) if sweep == "budget" else {}
        rows_of_legend = -(-(len(lines) + len(levels)) // 2)
        figure, axes = pyplot.subplots(figsize=(7, 4 + ROW_INCHES * rows_of_legend), layout="constrained")
        for i, (label, points) in enumerate(lines.items()):
            marker = MARKERS[i % len(MARKERS)]
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=5, alpha=0.8, label=label)
        for i, (label, y) in enumerate(levels.items(), start=len(lines)):
            axes.axhline(y, linestyle="--", color=f"C{i}", label=label)
        axes.set_xscale("log", base=2)
        if name in ("time", "memory"):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))  # some are seen in less than a decade
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label.format_map(EVALUATION if forward_only else TRAINING))
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        path = folder / f"{sweep}-{name}.png"
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)
    return written


def _levels(rows: Sequence[Row], y_value: Value) -> dict[str, float]:
    """Of what has neither chunks nor a budget for them."""
    whole = {row.label: y_value(row) for row in rows if row.chunk_rows is None and row.budget_bytes is None}
    return {label: y for label, y in whole.items() if y is not None}


def _lines(rows: Sequence[Row], sweep: str, x_value: Value, y_value: Value) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    several = sweep == "ranks" and len({row.shape for row in rows}) > 1
    for row in rows:
        x, y = x_value(row), y_value(row)
        if x is None or y is None:
            continue
        label = row.method if sweep == "budget" else f"{row.shape} {row.label}" if several else row.label
        lines.setdefault(label, []).append((x, y))
    return {label: sorted(points) for label, points in lines.items()}


Points = Sequence[tuple[float, float]]


def plot_efficiency(predicted: Mapping[str, Points], measured: Mapping[str, Points], path: Path) -> None:
    """Parallel efficiency over ranks: what is predicted as lines, what was measured as dots of the same colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4 + ROW_INCHES * -(-len(predicted) // 2)), layout="constrained")
    for label, points in predicted.items():
        (line,) = axes.plot(*zip(*points, strict=True), linestyle="--", marker="o", mfc="none", label=label)
        if label in measured:
            axes.plot(*zip(*measured[label], strict=True), linestyle="", marker="o", color=line.get_color())
    ticks = sorted({x for points in predicted.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks (hollow: predicted, full: measured)")
    axes.set_ylabel("time of one rank / (ranks x time)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
