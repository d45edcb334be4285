"""Several ranks beside one: parallel efficiency, and how much of a step is not hidden under the matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from .methods import METHODS
from .report import Row

ONE_RANK = {method.name: method.on_one_rank for method in METHODS.values() if method.on_one_rank}


def set_efficiencies(rows: Sequence[Row]) -> None:
    """Time of one rank over the number of ranks times theirs, of the same problem, method and setting, where both were
    measured in this run."""
    one = {(row.shape, row.method, row.setting): row.ms for row in rows if row.num_ranks == 1}
    for row in rows:
        alone = one.get((row.shape, ONE_RANK.get(row.method, row.method), row.setting))
        if alone and row.ms and any(other.num_ranks > 1 for other in rows):
            row.efficiency = alone / (row.num_ranks * row.ms)


def table(rows: Sequence[Row]) -> str:
    """One line a row that has an efficiency or a profile; nothing when none has."""
    shown = [row for row in rows if row.efficiency is not None or row.shares]
    if not shown:
        return ""
    names = ("products", "kernels", "collectives", "idle")
    header = f"{'shape':<20}{'method':<32}{'ranks':>6}{'ms':>10}{'efficiency':>12}" + "".join(
        f"{name:>13}" for name in names
    )
    lines = ["", "", "parallel efficiency, and the share of the time in which a product runs, else ...", header]
    for row in shown:
        efficiency = "-" if row.efficiency is None else f"{row.efficiency:.3f}"
        shares = "".join(f"{row.shares[name]:>13.3f}" if row.shares else f"{'-':>13}" for name in names)
        lines.append(f"{row.shape:<20}{row.label:<32}{row.num_ranks:>6}{row.ms or 0:>10.3f}{efficiency:>12}{shares}")
    return "\n".join(lines)
