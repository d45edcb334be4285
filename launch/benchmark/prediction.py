"""The time of a step on W ranks: a model of the chunk loop (`flce_dist/op.py`) over the costs of its parts.

`docs/scaling.md` explains it. All functions are pure; times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .costs import LINKS, REDUCED_ITEMSIZE, STATISTICS_BYTES, Costs, Link, LocalWork


@dataclass(frozen=True)
class Schedule:
    """How the loop overlaps. The defaults are the loop as it is.

    Args:
        prefetch: token-sharded hidden states of the next chunk are gathered while this one is computed.
        pieces: parts in which the hidden gradient of a chunk is made; the sum over ranks of each starts at once.
        double_buffered: the next chunk's logits are made before this chunk's statistics are waited for, in two buffers
            of half the rows.
    """

    prefetch: bool = False
    pieces: int = 1
    double_buffered: bool = False


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and of what: `waits` by collective are when the GPU does nothing else; `lost` is what the
    products lose to collectives beside them; `host` what issuing the step takes, which is the step's time if longer.
    `one_rank` is the time of the same problem on one."""

    num_ranks: int
    rows: int
    gpu: float
    products: float
    kernels: float
    waits: dict[str, float]
    lost: float
    host: float
    one_rank: float | None = None

    @property
    def seconds(self) -> float:
        return max(self.gpu, self.host)

    @property
    def efficiency(self) -> float | None:
        return None if self.one_rank is None else self.one_rank / (self.num_ranks * self.seconds)


class _Timeline:
    """Two queues, the GPU's kernels and its collectives, each in the order of issue."""

    def __init__(self, product_lost: float) -> None:
        self.now = self.network = 0.0
        self._product_lost = product_lost
        self._running: list[tuple[float, float]] = []
        self.products = self.kernels = self.lost = 0.0
        self.waits: dict[str, float] = {}

    def kernel(self, seconds: float) -> None:
        self.now += seconds
        self.kernels += seconds

    def product(self, seconds: float) -> None:
        end = self.now + seconds
        beside = sum(max(0.0, min(end, b) - max(self.now, a)) for a, b in self._running)
        self.now = end + self._product_lost * beside
        self.products += seconds
        self.lost += self._product_lost * beside

    def collective(self, seconds: float) -> float:
        """Starts after the kernels before it and the collectives before it; when it ends."""
        start = max(self.now, self.network)
        self.network = start + seconds
        self._running.append((start, self.network))
        return self.network

    def wait(self, name: str, end: float) -> None:
        self.waits[name] = self.waits.get(name, 0.0) + max(0.0, end - self.now)
        self.now = max(self.now, end)


def predict(
    num_tokens: int, hidden_size: int, vocab_size: int, num_ranks: int, costs: Costs, link: Link = LINKS[0],
    layout: str = "replicated", itemsize: int = 2, rows: int | None = None, schedule: Schedule = Schedule(),
) -> Prediction:  # fmt: skip
    """Forward and backward of the default loss. `num_tokens` are the group's; `layout` is "replicated" or "sharded".
    `rows` of a chunk default to those that the loop chooses."""
    columns = -(-vocab_size // num_ranks)
    work = LocalWork.planned(num_tokens, hidden_size, columns, itemsize, num_ranks, rows)
    if schedule.double_buffered:
        half = min(max(1, work.rows // 2), -(-num_tokens // 2))
        work = replace(work, rows=half)
    found = _run(work, costs, link, layout == "sharded", schedule)
    if num_ranks == 1:
        return replace(found, one_rank=found.seconds)
    alone = predict(num_tokens, hidden_size, vocab_size, 1, costs, link, itemsize=itemsize)
    return replace(found, one_rank=alone.seconds)


def _run(work: LocalWork, costs: Costs, link: Link, sharded_tokens: bool, schedule: Schedule) -> Prediction:
    line, ranks, chunks = _Timeline(costs.product_lost), work.num_ranks, work.chunks()
    reduced = REDUCED_ITEMSIZE if work.itemsize == 2 else work.itemsize
    reduction = "reduce_scatter" if sharded_tokens else "all_reduce"
    pending: float | None = None
    exchanged: list[float] = []
    gathered: list[float] = []

    def gather(i: int) -> None:
        if ranks > 1 and sharded_tokens and len(gathered) == i < len(chunks):
            num_bytes = chunks[i].rows * work.hidden_size * work.itemsize
            gathered.append(line.collective(costs.collective("all_gather", num_bytes, ranks, link)))

    def to_statistics(i: int) -> None:
        if i >= len(chunks) or len(exchanged) > i:
            return
        gather(i)
        if gathered:
            line.wait("hidden states", gathered[i])
        if schedule.prefetch:
            gather(i + 1)
        line.product(costs.stage("logits", chunks[i]))
        line.kernel(costs.stage("row_stats", chunks[i]))
        num_bytes = STATISTICS_BYTES * chunks[i].rows * ranks
        exchanged.append(line.collective(costs.collective("all_gather", num_bytes, ranks, link)))

    def take_sum(i: int) -> None:
        if pending is not None:
            line.wait("hidden gradient", pending)
            if reduced != work.itemsize:
                line.kernel(costs.stage("copy", chunks[i]))

    for i, chunk in enumerate(chunks):
        if ranks == 1:
            line.product(costs.stage("logits", chunk))
            line.kernel(costs.stage("row_stats_grad", chunk))
            line.product(costs.stage("hidden_grad", chunk))
        else:
            to_statistics(i)
            if schedule.double_buffered:
                to_statistics(i + 1)
            line.wait("statistics", exchanged[i])
            line.kernel(costs.stage("combine", chunk))
            line.kernel(costs.stage("row_grad", chunk))
            take_sum(i - 1)
            num_bytes = chunk.rows * work.hidden_size * reduced / schedule.pieces
            for _ in range(schedule.pieces):
                line.product(costs.stage("hidden_grad", chunk) / schedule.pieces)
                seconds = costs.collective(reduction, num_bytes, ranks, link)
                # Where it is faster than the products, it is beside them all the time.
                pending = line.collective(seconds * costs.collective_slower)
        line.product(costs.stage("weight_grad" if i == 0 else "weight_grad_more", chunk))
    take_sum(len(chunks) - 1)
    line.kernel(costs.small_kernels)
    if work.accumulator_itemsize != work.itemsize:
        line.kernel(costs.stage("narrow", work))
    host = costs.host_call + (len(chunks) - 1) * costs.host_chunk
    return Prediction(ranks, work.rows, line.now, line.products, line.kernels, line.waits, line.lost, host)


def check_steps(costs: Costs, measurements: dict[str, Any]) -> list[dict[str, Any]]:
    """Each measured step with its prediction, `predicted`, and the relative error, `error`."""
    found = []
    for step in measurements["steps"]:
        sharded = step["method"] == "flce-sharded-tokens"
        if step["method"] not in ("flce", "flce-sharded-tokens"):
            continue
        guess = predict(
            step["num_tokens"], step["hidden_size"], step["vocab_size"], step["num_ranks"], costs,
            layout="sharded" if sharded else "replicated",
            itemsize=getattr(torch, measurements["dtype"]).itemsize,
        )  # fmt: skip
        found.append(step | {"predicted": guess.seconds, "error": guess.seconds / step["seconds"] - 1})
    return found
