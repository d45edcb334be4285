"""Overlay the loss curves of runs and say how far they are apart.

    python launch/compare.py runs/one runs/two --output comparison.png

Each run is a folder that `launch/train.py` wrote. Differences are taken to the first run, at the steps both have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.report import METRICS, Record, plot_curves, read_metrics


def largest_difference(one: list[Record], other: list[Record]) -> tuple[float, int, int]:
    """The largest absolute difference of training losses, its step, and the number of steps compared.

    Raises:
        ValueError: no step is in both.
    """
    losses = {record["step"]: record["loss"] for record in one if "loss" in record}
    differences = [
        (abs(record["loss"] - losses[record["step"]]), record["step"])
        for record in other
        if "loss" in record and record["step"] in losses
    ]
    if not differences:
        raise ValueError("the runs have no step in common")
    # The earliest step among equal differences.
    difference, step = max(differences, key=lambda pair: (pair[0], -pair[1]))
    return difference, step, len(differences)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; the first is the reference")
    parser.add_argument("--output", type=Path, default=Path("comparison.png"), help="the picture (PNG)")
    options = parser.parse_args(arguments)
    names = unique_names(options.runs)
    curves = {}
    for name, run in zip(names, options.runs, strict=True):
        curves[name] = read_metrics(run / METRICS)
        if not any("loss" in record for record in curves[name]):
            print(f"compare.py: {run / METRICS} holds no training losses", file=sys.stderr)
            return 2
    reference = names[0]
    for name in names[1:]:
        try:
            difference, step, steps = largest_difference(curves[reference], curves[name])
        except ValueError as error:
            print(f"compare.py: {reference} and {name}: {error}", file=sys.stderr)
            return 2
        print(f"{name} - {reference}: largest difference {difference:.3g} at step {step} ({steps} steps compared)")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    plot_curves(curves, options.output)
    print(f"wrote {options.output}")
    return 0


def unique_names(runs: Sequence[Path]) -> list[str]:
    """The folders' own names, or their paths where two are alike."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


if __name__ == "__main__":
    sys.exit(main())
