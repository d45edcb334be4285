"""The time of a step on W ranks: a model of the chunk loop (`flce_dist/op.py`) over the costs of its parts.

`docs/scaling.md` explains it. All functions are pure; times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .costs import LINKS, REDUCED_ITEMSIZE, STATISTICS_BYTES, TARGET_BYTES, Costs, Link, LocalWork


@dataclass(frozen=True)
class Schedule:
    """How the loop overlaps. The defaults are the loop as it is.

    Args:
        prefetch: token-sharded hidden states of the next chunk are gathered while this one is computed.
        pieces: parts of a chunk's rows in which hidden states are gathered and multiplied, and in which the hidden
            gradient is made and its sum over the ranks started.
        narrow_gather: a replicated hidden gradient is reduce-scattered in float32, narrowed by each rank for its rows
            alone, and all-gathered in the inputs' dtype, all of it beside the products.
        double_buffered: the next chunk's logits are made before this chunk's statistics are waited for, in two buffers
            of half the rows.
    """

    prefetch: bool = False
    pieces: int = 1
    narrow_gather: bool = False
    double_buffered: bool = False


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and of what: `waits` by collective are when the GPU does nothing else; `lost` is what the
    products lose to collectives beside them; `host` what issuing the step takes, which is the step's time if longer.
    `one_rank` is the time of the same problem on one. `issued` are the products and collectives in order, the latter
    with the bytes of the whole tensor."""

    num_ranks: int
    rows: int
    gpu: float
    products: float
    kernels: float
    waits: dict[str, float]
    lost: float
    host: float
    one_rank: float | None = None
    issued: list[tuple[str, float]] = field(default_factory=list, repr=False)

    @property
    def seconds(self) -> float:
        return max(self.gpu, self.host)

    @property
    def efficiency(self) -> float | None:
        return None if self.one_rank is None else self.one_rank / (self.num_ranks * self.seconds)


class _Timeline:
    """Two queues, the GPU's kernels and its collectives, each in the order of issue."""

    def __init__(self, costs: Costs, num_ranks: int, link: Link) -> None:
        self._costs, self._num_ranks, self._link = costs, num_ranks, link
        self._running: list[tuple[float, float]] = []
        self._network = 0.0
        self.now = self.products = self.kernels = self.lost = 0.0
        self.waits: dict[str, float] = {}
        self.issued: list[tuple[str, float]] = []

    def kernel(self, stage: str, work: LocalWork) -> None:
        self.other(self._costs.stage(stage, work))

    def other(self, seconds: float) -> None:
        self.now += seconds
        self.kernels += seconds

    def product(self, stage: str, work: LocalWork, share: float = 1.0) -> None:
        seconds = share * self._costs.stage(stage, work)
        end = self.now + seconds
        beside = sum(max(0.0, min(end, b) - max(self.now, a)) for a, b in self._running)
        lost = self._costs.product_lost * beside
        self.now, self.products, self.lost = end + lost, self.products + seconds, self.lost + lost
        self.issued.append((stage, 0.0))

    def collective(self, name: str, num_bytes: float, slower: float = 1.0) -> float:
        """Starts after the kernels before it and the collectives before it; when it ends."""
        start = max(self.now, self._network)
        self._network = start + slower * self._costs.collective(name, num_bytes, self._num_ranks, self._link)
        self._running.append((start, self._network))
        self.issued.append((name, num_bytes))
        return self._network

    def beside(self, seconds: float) -> None:
        """A small kernel between two collectives, on their queue."""
        self._network += seconds

    def wait(self, name: str, end: float) -> None:
        self.waits[name] = self.waits.get(name, 0.0) + max(0.0, end - self.now)
        self.now = max(self.now, end)


def predict(
    num_tokens: int, hidden_size: int, vocab_size: int, num_ranks: int, costs: Costs, link: Link = LINKS[0],
    layout: str = "replicated", itemsize: int = 2, rows: int | None = None, schedule: Schedule = Schedule(),
) -> Prediction:  # fmt: skip
    """Forward and backward of the default loss. `num_tokens` are the group's; `layout` is "replicated" or "sharded".
    `rows` of a chunk default to those that the loop chooses."""
    columns, sharded = -(-vocab_size // num_ranks), layout == "sharded"
    group_tokens = -(-num_tokens // num_ranks) * num_ranks if sharded else num_tokens
    work = LocalWork.planned(group_tokens, hidden_size, columns, itemsize, num_ranks, rows)
    if sharded:
        work = replace(work, rows=max(1, work.rows // num_ranks) * num_ranks)
    if schedule.double_buffered:
        half = min(max(1, work.rows // 2), -(-num_tokens // 2))
        work = replace(work, rows=half)
    found = _run(work, costs, link, sharded, schedule)
    if num_ranks == 1:
        return replace(found, one_rank=found.seconds)
    alone = predict(num_tokens, hidden_size, vocab_size, 1, costs, link, itemsize=itemsize)
    return replace(found, one_rank=alone.seconds)


def _run(work: LocalWork, costs: Costs, link: Link, sharded_tokens: bool, schedule: Schedule) -> Prediction:
    line, ranks, chunks = _Timeline(costs, work.num_ranks, link), work.num_ranks, work.chunks()
    reduced = REDUCED_ITEMSIZE if work.itemsize == 2 else work.itemsize
    reduction = "reduce_scatter" if sharded_tokens else "all_reduce"
    narrow_gather = schedule.narrow_gather and not sharded_tokens
    gathered: list[float] = []
    exchanged: list[float] = []
    summed: list[float] = []

    def gather(piece: int) -> None:
        """Pieces are counted through all chunks."""
        if len(gathered) == piece < len(chunks) * schedule.pieces:
            num_bytes = chunks[piece // schedule.pieces].rows * work.hidden_size * work.itemsize
            gathered.append(line.collective("all_gather", num_bytes / schedule.pieces))

    def to_statistics(i: int) -> None:
        if len(exchanged) > i or i >= len(chunks):
            return
        for piece in range(i * schedule.pieces, (i + 1) * schedule.pieces):
            if sharded_tokens:
                gather(piece)
                line.wait("hidden states", gathered[piece])
                if schedule.prefetch or (piece + 1) % schedule.pieces:
                    gather(piece + 1)
            line.product("logits", chunks[i], 1 / schedule.pieces)
        if sharded_tokens and i == 0:
            line.wait("targets", line.collective("all_gather", TARGET_BYTES * work.num_tokens))
        line.kernel("row_stats", chunks[i])
        exchanged.append(line.collective("all_gather", STATISTICS_BYTES * chunks[i].rows * ranks))

    def take_sum(chunk: LocalWork) -> None:
        line.wait("hidden gradient", summed[-1])
        if reduced != work.itemsize and not narrow_gather:
            line.kernel("copy", chunk)

    def start_sum(num_bytes: float, chunk: LocalWork) -> None:
        if not narrow_gather:
            summed.append(line.collective(reduction, num_bytes, costs.collective_slower))
            return
        line.collective("reduce_scatter", num_bytes, costs.collective_slower)
        line.beside(costs.stage("copy", chunk) / ranks / schedule.pieces)
        gathered_bytes = num_bytes * work.itemsize / reduced
        summed.append(line.collective("all_gather", gathered_bytes, costs.collective_slower))

    for i, chunk in enumerate(chunks):
        if ranks == 1:
            line.product("logits", chunk)
            line.kernel("row_stats_grad", chunk)
            line.product("hidden_grad", chunk)
        else:
            to_statistics(i)
            if schedule.double_buffered:
                to_statistics(i + 1)
            line.wait("statistics", exchanged[i])
            line.kernel("combine", chunk)
            line.kernel("row_grad", chunk)
            if i > 0:
                take_sum(chunks[i - 1])
            num_bytes = chunk.rows * work.hidden_size * reduced
            for _ in range(schedule.pieces):
                line.product("hidden_grad", chunk, 1 / schedule.pieces)
                start_sum(num_bytes / schedule.pieces, chunk)
        line.product("weight_grad" if i == 0 else "weight_grad_more", chunk)
    if ranks > 1:
        take_sum(chunks[-1])
    line.other(costs.small_kernels)
    if work.accumulator_itemsize != work.itemsize:
        line.kernel("narrow", work)
    host = costs.host_call + (len(chunks) - 1) * costs.host_chunk
    return Prediction(
        ranks, work.rows, line.now, line.products, line.kernels, line.waits, line.lost, host, issued=line.issued
    )


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
