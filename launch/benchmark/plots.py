"""PNG plots of a sweep. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .report import MEBIBYTE, Row

Value = Callable[[Row], float | None]

X_AXES: dict[str, tuple[str, Value]] = {
    "tokens": ("tokens N", lambda row: row.num_tokens),
    "vocab": ("vocabulary V", lambda row: row.vocab_size),
    "budget": ("logits of one chunk (MiB)", lambda row: _chunk_mebibytes(row)),
    "ranks": ("ranks", lambda row: row.num_ranks),
}
Y_AXES: dict[str, tuple[str, Value]] = {
    "time": ("forward + backward (ms)", lambda row: row.ms),
    "memory": ("extra peak (MiB)", lambda row: _mebibytes(row.extra_peak_bytes)),
    "ratio": ("time / three whole GEMMs", lambda row: row.to_floor),
    "efficiency": ("time of one rank / (ranks x time)", lambda row: row.efficiency),
}


def _mebibytes(value: int | None) -> float | None:
    return None if value is None else value / MEBIBYTE


def _chunk_mebibytes(row: Row) -> float | None:
    if row.chunk_rows is None or not row.setting.startswith("budget="):
        return None
    return float(row.setting.removeprefix("budget=").split("MiB")[0])


def plot_sweep(sweep: str, rows: Sequence[Row], title: str, folder: Path) -> list[Path]:
    """One picture for each of time, memory, ratio to the floor and, over ranks, efficiency; one line a method; returns
    the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    x_label, x_value = X_AXES[sweep]
    written = []
    for name, (y_label, y_value) in Y_AXES.items():
        lines = _lines([row for row in rows if row.status == "ok"], sweep, x_value, y_value)
        if not lines:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
        axes.set_xscale("log", base=2)
        if name in ("time", "memory"):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))  # some are seen in less than a decade
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        path = folder / f"{sweep}-{name}.png"
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)
    return written


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

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
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
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
