"""Times of the collectives of the chunk loop, and what they and a matrix product cost each other."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from flce_dist import collectives

from . import measure
from .workload import Place

MESSAGE_BYTES = tuple(2**power for power in range(16, 28))


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long things are measured: rounds of the stages, calls of a collective, rounds of a step and seconds of each,
    the largest message, and tokens, hidden size and columns of the product beside a collective."""

    stage_rounds: int = 12
    calls: int = 20
    rounds: int = 4
    round_seconds: float = 0.04
    most_bytes: int = 2**27
    beside: tuple[int, int, int] = (4096, 4096, 65536)


QUICK = Effort(2, 3, 2, 0.005, 2**18, (64, 64, 4096))
"""For a CPU."""


def busy_work(device: torch.device) -> Callable[[], object]:
    """Some milliseconds of GPU work, during which the host can issue what is measured: else its own time counts."""
    if device.type != "cuda":
        return lambda: None
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    return lambda: [x @ x for _ in range(4)]


def collective_times(place: Place, effort: Effort) -> dict[str, list[list[float]]]:
    """`[bytes, seconds]` of each collective of the loop; bytes are those of the whole tensor."""
    device, group = place
    assert group is not None
    size = dist.get_world_size(group)
    busy = busy_work(device)

    def gather(num_bytes: int) -> Callable[[], object]:
        piece = torch.zeros(num_bytes // size // 2, device=device, dtype=torch.bfloat16)
        return lambda: collectives.all_gather(piece, group)

    def reduce(num_bytes: int) -> Callable[[], object]:
        whole = torch.zeros(num_bytes // 4, device=device)
        return lambda: collectives.all_reduce_start(whole, group).wait()

    def scatter(num_bytes: int) -> Callable[[], object]:
        whole = torch.zeros(num_bytes // 4 // size * size, device=device)
        mine = whole.new_empty(len(whole) // size)
        return lambda: collectives.reduce_scatter_start(mine, whole, group).wait()

    found: dict[str, list[list[float]]] = {}
    for name, make in (("all_gather", gather), ("all_reduce", reduce), ("reduce_scatter", scatter)):
        for num_bytes in (n for n in MESSAGE_BYTES if n <= effort.most_bytes):
            call = make(num_bytes)
            for _ in range(measure.WARM_UP_CALLS):
                call()
            measure.align_ranks(place)
            busy()
            marks = measure.Marks(device)
            for _ in range(effort.calls + 1):
                marks.mark("")
                call()
            marks.mark("")
            # The first call of the row waits for the other rank to arrive.
            times = [seconds for _, seconds in marks.seconds()][1:]
            found.setdefault(name, []).append([num_bytes, statistics.median(times)])
    return found


def beside(place: Place, dtype: torch.dtype, effort: Effort) -> dict[str, float]:
    """A product in two parts and an all-reduce that is issued before the first: as in the loop, it runs beside the
    second, because a product holds the GPU until its last tiles.

    `product_lost`: seconds that the product takes longer, for each second of the all-reduce alone.
    `collective_slower`: time of the all-reduce beside the product over that alone; on CPU it cannot be seen, and is
    left out.
    """
    device, group = place
    assert group is not None
    rows, width, columns = effort.beside
    grad = torch.randn(rows, columns, device=device, dtype=dtype)
    x = torch.randn(rows, width, device=device, dtype=dtype)
    out = torch.empty(columns, width, device=device, dtype=dtype)
    part = torch.zeros(rows, width, device=device)
    busy = busy_work(device)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    first = columns // 4

    def run(reduced: bool, product: bool = True) -> tuple[float, float]:
        """Seconds of the product, and from its second part's begin to the all-reduce's end."""
        measure.align_ranks(place)
        busy()
        marks, ends = measure.Marks(device), measure.Marks(device)
        marks.mark("")
        work = collectives.all_reduce_start(part, group) if reduced else None
        if product:
            torch.mm(grad[:, :first].t(), x, out=out[:first])
        ends.mark("")
        if product:
            torch.mm(grad[:, first:].t(), x, out=out[first:])
        marks.mark("product")
        with _on(side):
            if work is not None:
                work.wait()
            ends.mark("all-reduce")
        measure.synchronize(device)
        return next(marks.seconds())[1], next(ends.seconds())[1]

    for _ in range(measure.WARM_UP_CALLS):
        run(True)
    pairs = [(run(False), run(True), run(True, product=False)) for _ in range(effort.calls)]
    reduced_alone = statistics.median(alone for _, _, (_, alone) in pairs)
    longer = statistics.median(together - product for (product, _), (together, _), _ in pairs)
    found = {
        "product_seconds": statistics.median(product for (product, _), _, _ in pairs),
        "collective_seconds": reduced_alone,
        "product_lost": max(0.0, longer) / reduced_alone,
    }
    if side is None:
        return found
    return found | {"collective_slower": statistics.median(end for _, (_, end), _ in pairs) / reduced_alone}


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
