"""The time of a step on W ranks: a model of the chunk loop (`flce_dist/op.py`) over the costs of its parts.

`docs/scaling.md` explains it. All functions are pure; times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flce_dist.plan import first_part
from flce_dist.shard import VocabShard

from .costs import LINKS, REDUCED_ITEMSIZE, STATISTICS_BYTES, TARGET_BYTES, Costs, Link, LocalWork


@dataclass(frozen=True)
class Schedule:
    """How the loop overlaps. The defaults are the loop as it is.

    Args:
        split: a chunk's weight gradient is made in two products, of which the first is short (`plan.first_part`).
        prefetch: token-sharded hidden states of the next chunk are gathered while this one is computed.
        double_buffered: the next chunk's logits are made before this chunk's statistics are waited for, in two buffers
            of half the rows.
    """

    split: bool = True
    prefetch: bool = False
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


@dataclass
class _Collective:
    seconds: float
    issued: float
    stood_behind: bool = False
    end: float | None = None


class _Timeline:
    """Two queues, the GPU's kernels and its collectives, each in the order of issue.

    A product holds the whole GPU until its last tiles. A collective that is issued right before one therefore starts
    at its end, beside the next; between other kernels there is room.
    """

    def __init__(self, costs: Costs, num_ranks: int, link: Link) -> None:
        self._costs, self._num_ranks, self._link = costs, num_ranks, link
        self._waiting: list[_Collective] = []
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
        while self._waiting and max(self._waiting[0].issued, self._network) < self.now:
            self._start(self._waiting[0].issued, 1.0)

    def product(self, stage: str, work: LocalWork, share: float = 1.0) -> None:
        if self._waiting and self._waiting[0].stood_behind and self._network <= self.now:
            self._start(self.now, self._costs.collective_slower)
        seconds = share * self._costs.stage(stage, work)
        end = self.now + seconds
        beside = sum(max(0.0, min(end, b) - max(self.now, a)) for a, b in self._running)
        lost = self._costs.product_lost * beside
        self.now, self.products, self.lost = end + lost, self.products + seconds, self.lost + lost
        for collective in self._waiting:
            collective.stood_behind = True
        self.issued.append((stage, 0.0))

    def collective(self, name: str, num_bytes: float) -> _Collective:
        seconds = self._costs.collective(name, num_bytes, self._num_ranks, self._link)
        found = _Collective(seconds, self.now)
        self._waiting.append(found)
        self.issued.append((name, num_bytes))
        return found

    def _start(self, earliest: float, slower: float) -> None:
        found = self._waiting.pop(0)
        start = max(earliest, self._network)
        found.end = self._network = start + slower * found.seconds
        self._running.append((start, found.end))

    def wait(self, name: str, collective: _Collective) -> None:
        while collective.end is None:
            self._start(self.now, 1.0)
        self.waits[name] = self.waits.get(name, 0.0) + max(0.0, collective.end - self.now)
        self.now = max(self.now, collective.end)


def predict(
    num_tokens: int, hidden_size: int, vocab_size: int, num_ranks: int, costs: Costs, link: Link = LINKS[0],
    layout: str = "replicated", itemsize: int = 2, rows: int | None = None, schedule: Schedule = Schedule(),
) -> Prediction:  # fmt: skip
    """Forward and backward of the default loss. `num_tokens` are the group's; `layout` is "replicated" or "sharded".
    `rows` of a chunk default to those that the loop chooses."""
    columns, sharded = VocabShard.even(vocab_size, 0, num_ranks).num_columns, layout == "sharded"
    planned = partial(LocalWork.planned, num_tokens, hidden_size, columns, itemsize, num_ranks, sharded_tokens=sharded)
    work = planned(rows=rows)
    if schedule.double_buffered:
        work = planned(rows=min(max(1, work.rows // 2), -(-num_tokens // 2)))
    found = _run(work, costs, link, sharded, schedule)
    if num_ranks == 1:
        return replace(found, one_rank=found.seconds)
    alone = predict(num_tokens, hidden_size, vocab_size, 1, costs, link, itemsize=itemsize)
    return replace(found, one_rank=alone.seconds)


def _run(work: LocalWork, costs: Costs, link: Link, sharded_tokens: bool, schedule: Schedule) -> Prediction:
    line, ranks, chunks = _Timeline(costs, work.num_ranks, link), work.num_ranks, work.chunks()
    reduced = REDUCED_ITEMSIZE if work.itemsize == 2 else work.itemsize
    reduction = "reduce_scatter" if sharded_tokens else "all_reduce"
    first = 1.0
    if ranks > 1 and schedule.split:
        first = first_part(work.columns, work.hidden_size) / work.columns
    gathered: list[_Collective] = []
    exchanged: list[_Collective] = []
    summed: list[_Collective] = []

    def gather(i: int) -> None:
        if len(gathered) == i < len(chunks):
            gathered.append(line.collective("all_gather", chunks[i].rows * work.hidden_size * work.itemsize))

    def to_statistics(i: int) -> None:
        if len(exchanged) > i or i >= len(chunks):
            return
        if sharded_tokens:
            gather(i)
            line.wait("hidden states", gathered[i])
            if schedule.prefetch:
                gather(i + 1)
        line.product("logits", chunks[i])
        if sharded_tokens and i == 0:
            line.wait("targets", line.collective("all_gather", TARGET_BYTES * work.num_tokens))
        line.kernel("row_stats", chunks[i])
        exchanged.append(line.collective("all_gather", STATISTICS_BYTES * chunks[i].rows * ranks))

    def take_sum(chunk: LocalWork) -> None:
        line.wait("hidden gradient", summed[-1])
        if reduced != work.itemsize:
            line.kernel("copy", chunk)

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
            line.product("hidden_grad", chunk)
            summed.append(line.collective(reduction, chunk.rows * work.hidden_size * reduced))
        for share in (first, 1 - first):
            if share:
                line.product("weight_grad" if i == 0 else "weight_grad_more", chunk, share)
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
    """Each measured step with its prediction, for the chunks that it had: `predicted` seconds, and
    `predicted_to_cut_floor`, the same over the products' time, which no clock moves."""
    found = []
    for step in measurements["steps"]:
        sharded = {"flce": False, "flce-sharded-tokens": True}.get(step["method"])
        if sharded is not None:
            guess = _run(LocalWork(**step["work"]), costs, LINKS[0], sharded, Schedule())
            found.append(step | {"predicted": guess.seconds, "predicted_to_cut_floor": guess.seconds / guess.products})
    return found
