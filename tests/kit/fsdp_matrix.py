"""Which ways of wrapping are tried, and a table of them all.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -W ignore -m tests.kit.fsdp_matrix

runs every cell and prints the table of docs/fsdp.md.
"""

import itertools
import random
import sys
from collections import defaultdict
from typing import Any

import torch

from tests.kit.cases import all_pairs
from tests.kit.fsdp import BFLOAT16, Cell, judge, train
from tests.kit.workers import Pool

EVEN, UNEVEN, EMPTY = 64, 65, 9
AXES: dict[str, tuple[Any, ...]] = {
    "framework": ("fsdp1", "fsdp2", "2d", "hsdp1", "hsdp2"),
    "unit": ("own", "grouped", "root", "tied", "tied-unit"),
    "dtype": (torch.float32, BFLOAT16),
    "vocab_size": (EVEN, UNEVEN, EMPTY),
    "world": (2, 4),
    "row": (1, 2, 4),
    "head": ("linear", "module"),
    "flag": (True, False),
    "bias": (False, True),
    "micro_steps": (1, 2),
    "sequence_parallel": (False, True),
}
PRIMARY = ("framework", "unit", "dtype", "vocab_size", "world", "flag")
SECONDARY = tuple(axis for axis in AXES if axis not in PRIMARY)


def allowed(row: dict[str, Any]) -> bool:
    cell = Cell(**row)
    if cell.framework in ("fsdp1", "fsdp2"):
        fits = cell.row == 2
    else:
        fits = cell.row <= cell.world
    if cell.framework == "hsdp1":
        # FSDP1 does not synchronise replicas whose shard group has one rank.
        fits = fits and cell.row > 1
    if cell.framework == "2d":
        # FSDP2 does not reduce an empty gradient.
        fits = fits and not cell.has_empty_shard
    else:
        fits = fits and not cell.sequence_parallel
    return fits and not (cell.unit == "tied-unit" and cell.framework.endswith("1"))


def selection() -> list[Cell]:
    """For each framework, every pair of values of two other axes together in some cell."""
    return [
        Cell(**row) for framework in AXES["framework"] for row in all_pairs(AXES | {"framework": (framework,)}, allowed)
    ]


def every_cell() -> list[Cell]:
    """All combinations of the primary axes that are possible; the others are drawn for each."""
    rng, cells = random.Random(0), []
    for values in itertools.product(*(AXES[axis] for axis in PRIMARY)):
        primary = dict(zip(PRIMARY, values, strict=True))
        others = [
            dict(zip(SECONDARY, drawn, strict=True)) for drawn in itertools.product(*(AXES[axis] for axis in SECONDARY))
        ]
        possible = [primary | other for other in others if allowed(primary | other)]
        if possible:
            cells.append(Cell(**rng.choice(possible)))
    return cells


def name(cell: Cell) -> str:
    """For a test's id."""
    values = [str(getattr(cell, axis)).removeprefix("torch.") for axis in AXES]
    return "-".join(values)


def main() -> None:
    pool = Pool()
    tried: dict[tuple[str, str], int] = defaultdict(int)
    failed: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for number, cell in enumerate(every_cell()):
        if number % 100 == 0:
            print(f"{number} cells", file=sys.stderr, flush=True)
        place = (cell.framework, cell.unit)
        tried[place] += 1
        try:
            judge(cell, pool.run(cell.world, train, cell))
        except AssertionError as error:
            failed[place].append(cell)
            print(f"{cell}: {error}")
    pool.close()
    units = AXES["unit"]
    print(f"| | {' | '.join(units)} |\n|---|{'---|' * len(units)}")
    for framework in AXES["framework"]:
        counts = [(tried[framework, unit], len(failed[framework, unit])) for unit in units]
        print(f"| {framework} | " + " | ".join(f"{n - bad} of {n}" if n else "–" for n, bad in counts) + " |")


if __name__ == "__main__":
    main()
