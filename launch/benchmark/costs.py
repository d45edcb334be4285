"""What the parts of a step cost: coefficients that are fitted to the times of `measure_costs`.

All functions are pure. Times are seconds, sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from flce_dist.options import LossOptions
from flce_dist.plan import accumulation_dtype, rows_of_call

PRODUCTS = ("logits", "hidden_grad", "weight_grad", "weight_grad_more")
STAGES = (*PRODUCTS, "row_stats", "row_grad", "row_stats_grad", "combine", "copy", "narrow")
"""Of a chunk on one rank: the products (`weight_grad` writes, `weight_grad_more` accumulates), and the kernels between
them. `row_stats_grad` is what one rank alone has in place of `row_stats`, `combine`, `row_grad`; `copy` narrows the
summed hidden gradient, and `narrow`, once a step, a weight gradient that was accumulated in float32."""
STATISTICS_BYTES = 16
"""Of a row and rank: four float32."""
TARGET_BYTES = 8
ALIGNED_COLUMNS = 8
REDUCED_ITEMSIZE = 4
"""The hidden gradient is summed in float32."""


@dataclass(frozen=True)
class LocalWork:
    """What one of `num_ranks` ranks computes: `num_tokens` rows, `rows` at a time, on `columns` of the vocabulary, and
    a weight gradient that is accumulated in numbers of `accumulator_itemsize` bytes."""

    num_tokens: int
    hidden_size: int
    columns: int
    num_ranks: int
    itemsize: int
    rows: int
    accumulator_itemsize: int

    @classmethod
    def planned(
        cls,
        num_tokens: int,
        hidden_size: int,
        columns: int,
        itemsize: int,
        num_ranks: int,
        rows: int | None = None,
        sharded_tokens: bool = False,
    ) -> LocalWork:
        """As the loop does it for the group's `num_tokens`; without `rows` with those that it chooses by default."""
        dtype, step = torch.bfloat16 if itemsize == 2 else torch.float32, num_ranks if sharded_tokens else 1
        loop_tokens = num_tokens + -num_tokens % step
        options = LossOptions(chunk_rows=rows)
        planned = rows_of_call(options, loop_tokens, hidden_size, columns, dtype, num_ranks, sharded_tokens, True)
        accumulator = accumulation_dtype(None, dtype, -(-loop_tokens // planned))
        return cls(loop_tokens, hidden_size, columns, num_ranks, itemsize, planned, accumulator.itemsize)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tokens // self.rows)

    def chunks(self) -> list[LocalWork]:
        """The work of each chunk, for all of the tokens."""
        last = self.num_tokens - (self.num_chunks - 1) * self.rows
        return [self] * (self.num_chunks - 1) + [replace(self, rows=last)]

    @property
    def is_aligned(self) -> bool:
        """Whether products are on the vendor's fast path; others are slower, and not predicted by shape."""
        return self.columns % ALIGNED_COLUMNS == 0

    def features(self, stage: str) -> tuple[float, float, float]:
        """What its time is taken to be linear in: (1, operations, bytes) of a product, (1, rows, bytes) of a kernel."""
        rows, columns, width, item = self.rows, self.columns, self.hidden_size, self.itemsize
        reduced = REDUCED_ITEMSIZE if self.num_ranks > 1 and item == 2 else item
        logits, x, weight = rows * columns, rows * width, columns * width
        operations = 2.0 * rows * columns * width
        wide = self.accumulator_itemsize
        return {
            "logits": (1.0, operations, item * (x + weight + logits)),
            "hidden_grad": (1.0, operations, item * (logits + weight) + reduced * x),
            "weight_grad": (1.0, operations, item * (logits + x) + wide * weight),
            "weight_grad_more": (1.0, operations, item * (logits + x) + 2 * wide * weight),
            "row_stats": (1.0, rows, item * logits),
            "row_grad": (1.0, rows, 2 * item * logits),
            "row_stats_grad": (1.0, rows, 3 * item * logits),
            "combine": (1.0, rows, STATISTICS_BYTES * rows * (self.num_ranks + 1)),
            "copy": (1.0, rows, (reduced + item) * x),
            "narrow": (1.0, columns, (wide + item) * weight),
        }[stage]


class Link(NamedTuple):
    """What a ring of GPUs is made of: bytes a second that each sends and, at the same time, receives (None: as
    measured, for each collective), and seconds that a further step of a ring takes."""

    name: str
    bandwidth: float | None
    hop: float


LINKS = (
    Link("measured", None, 1.9e-6),
    Link("PCIe 50 GB/s", 50e9, 2.5e-6),
    Link("network 100 GB/s", 100e9, 4.0e-6),
    Link("network 25 GB/s", 25e9, 4.0e-6),
)
"""Two GPUs cannot measure the hops: they are NCCL's own estimates for NVLink, PCIe and networks, of a ring with its
LL128 protocol (`hwLat` in its src/graph/tuning.cc)."""


class CollectiveCost(NamedTuple):
    """Seconds of a collective on the measured link, with two ranks, and the bytes a second that a rank sends."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Costs:
    """
    Args:
        stages: coefficients of `LocalWork.features` by stage.
        measured: seconds of stages at exactly these shapes, which win over the coefficients.
        collectives: by name, as in `flce_dist.collectives`.
        product_lost: seconds a product is delayed for each second that a collective runs beside it.
        collective_slower: factor on the time of a collective beside a product.
        small_kernels: seconds of GPU time of a call's other kernels.
        host_call, host_chunk: seconds that the host takes to issue a call of one chunk, and each further one.
    """

    stages: dict[str, list[float]]
    measured: dict[tuple[str, int, int, int, int, int], float]
    collectives: dict[str, CollectiveCost]
    product_lost: float
    collective_slower: float
    small_kernels: float
    host_call: float
    host_chunk: float

    def stage(self, stage: str, work: LocalWork) -> float:
        found = self.measured.get(_key(stage, work))
        return self.fitted(stage, work) if found is None else found

    def fitted(self, stage: str, work: LocalWork) -> float:
        return sum(c * f for c, f in zip(self.stages[stage], work.features(stage), strict=True))

    def collective(self, name: str, num_bytes: float, num_ranks: int, link: Link) -> float:
        """Of a tensor of `num_bytes` in all, in a ring."""
        steps, steps_of_two = (2 * (num_ranks - 1), 2) if name == "all_reduce" else (num_ranks - 1, 1)
        found = self.collectives[name]
        sent = num_bytes * steps / num_ranks
        return found.latency + (steps - steps_of_two) * link.hop + sent / (link.bandwidth or found.bandwidth)


def _key(stage: str, work: LocalWork) -> tuple[str, int, int, int, int, int]:
    wide = work.accumulator_itemsize if stage.startswith("weight_grad") else 0
    sharded = work.num_ranks > 1 and stage == "hidden_grad"
    return (
        stage,
        work.rows,
        work.hidden_size,
        work.columns,
        wide,
        work.num_ranks if stage == "combine" else int(sharded),
    )


def costs_from(measurements: dict[str, Any]) -> Costs:
    """From what `measure_costs.everything` found, on two ranks or, then without collectives, on one."""
    itemsize = getattr(torch, measurements["dtype"]).itemsize
    measured = {}
    any_aligned = any(point["columns"] % ALIGNED_COLUMNS == 0 for point in measurements["points"])
    by_stage: dict[str, list[tuple[LocalWork, float]]] = {}
    for point in measurements["points"]:
        work = LocalWork(**{name: value for name, value in point.items() if name != "seconds"})
        assert work.itemsize == itemsize
        for stage, seconds in point["seconds"].items():
            measured[_key(stage, work)] = seconds
            if work.is_aligned or not any_aligned:
                by_stage.setdefault(stage, []).append((work, seconds))
    collectives = {}
    for name, rows in measurements.get("collectives", {}).items():
        steps = 2 if name == "all_reduce" else 1
        ranks = measurements["num_ranks"]
        sent = [(1.0, num_bytes * steps * (ranks - 1) / ranks) for num_bytes, _ in rows]
        latency, per_byte = fit(sent, [seconds for _, seconds in rows])
        collectives[name] = CollectiveCost(latency, 1 / per_byte if per_byte else float("inf"))
    together, host = measurements.get("beside", {}), measurements["host"]
    return Costs(
        stages={
            stage: fit([work.features(stage) for work, _ in points], [seconds for _, seconds in points])
            for stage, points in by_stage.items()
        },
        measured=measured,
        collectives=collectives,
        product_lost=together.get("product_lost", 0.0),
        collective_slower=max(1.0, together.get("collective_slower", 1.0)),
        small_kernels=host.get("small_kernels", 0.0),
        host_call=host["call"],
        host_chunk=host["chunk"],
    )


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none negative, with the least sum of squared relative errors."""
    a = torch.tensor(features, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]
    scale = a.abs().amax(0).clamp(min=1e-300)
    kept = list(range(a.shape[1]))
    while kept:
        # Few columns: what comes out negative does not show in these times, and is left out.
        found = torch.linalg.lstsq(a[:, kept] / scale[kept], torch.ones(len(seconds), 1, dtype=torch.float64)).solution
        values = (found[:, 0] / scale[kept]).tolist()
        if min(values) >= 0:
            return [values[kept.index(i)] if i in kept else 0.0 for i in range(a.shape[1])]
        kept.pop(values.index(min(values)))
    return [0.0] * a.shape[1]


def fit_error(costs: Costs, measurements: dict[str, Any]) -> dict[str, list[float]]:
    """Relative errors of the coefficients (not of the measured stages) by stage: how much a prediction for another
    shape is worth."""
    found: dict[str, list[float]] = {}
    for point in measurements["points"]:
        work = LocalWork(**{name: value for name, value in point.items() if name != "seconds"})
        for stage, seconds in point["seconds"].items() if work.is_aligned else ():
            found.setdefault(stage, []).append(costs.fitted(stage, work) / seconds - 1)
    return found


def largest_and_median(errors: Sequence[float]) -> tuple[float, float]:
    """Of absolute values."""
    sizes = [abs(error) for error in errors]
    return max(sizes), statistics.median(sizes)
