"""Measures what the cost model (`costs`, `prediction`) is made of, and steps to check it against.

Every stage of the chunk loop is called as the loop calls it, by this package's own functions, on the shapes that one
rank of a larger group would have: a rank's local work needs no other rank. Collectives, and steps with them, are those
of the ranks that are here. Times are medians over calls, of the slowest rank.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flce_dist import VocabShard, collectives
from flce_dist.backend import row_kernels
from flce_dist.buffers import logits_buffer
from flce_dist.gemm import WeightGradient, hidden_grad_into, logits_into
from flce_dist.kernels.spec import RowCoefficients, RowSpec, stats_dtype

from . import floor, measure, methods, workload
from .costs import LocalWork
from .measure_links import Effort, beside, busy_work, collective_times
from .ranks import BenchRanks
from .report import median_ratio
from .workload import Shape

SPEC = RowSpec()
STEP_WIDTHS = (1, 2, 4, 8, 16)
TINY = Shape("tiny", 128, 128, 1024)


class Chunk:
    """One chunk of a rank's work, made ready: its stages by the names of `costs.STAGES`."""

    def __init__(self, work: LocalWork, dtype: torch.dtype, device: torch.device) -> None:
        rows, width, columns = work.rows, work.hidden_size, work.columns
        self.work, self._dtype = work, dtype
        self._sharded = work.num_ranks > 1
        self._kernels = row_kernels("auto", device)
        self._x = torch.randn(rows, width, device=device, dtype=dtype)
        self._weight = torch.randn(columns, width, device=device, dtype=dtype) * width**-0.5
        self._target = torch.randint(columns, (rows,), device=device)
        self._logits = logits_buffer(rows, columns, dtype, device)
        self._local = torch.empty(SPEC.num_stats, rows, device=device, dtype=stats_dtype(dtype))
        self._stats = torch.empty_like(self._local)
        self._coefficients = RowCoefficients(self._local.new_full((rows,), 1 / rows), None, None)
        self._hidden_grad = torch.empty_like(self._x)
        wide = dtype in (torch.bfloat16, torch.float16) and self._sharded
        self._part = self._x.new_empty(self._x.shape, dtype=torch.float32) if wide else self._hidden_grad

    def run(self, marks: measure.Marks) -> None:
        work, kernels, logits, stats = self.work, self._kernels, self._logits, self._stats
        accumulator = torch.float32 if work.accumulator_itemsize == 4 else self._dtype
        weight_grad = WeightGradient(self._weight, work.columns, accumulator, True, False)
        marks.mark("")
        logits_into(logits, self._x, self._weight, None, 1.0)
        marks.mark("logits")
        if self._sharded:
            kernels.row_stats(logits, self._target, self._local, SPEC, None, 0)
            marks.mark("row_stats")
            gathered = self._local.expand(work.num_ranks, -1, -1).contiguous()
            marks.mark("")
            kernels.combine(gathered, stats, SPEC)
            marks.mark("combine")
            kernels.row_grad_(logits, logits, self._target, stats, self._coefficients, SPEC)
            marks.mark("row_grad")
        else:
            self._one_rank(marks)
        hidden_grad_into(self._part, logits, self._weight, None, None)
        marks.mark("hidden_grad")
        if self._part is not self._hidden_grad:
            self._hidden_grad.copy_(self._part)
            marks.mark("copy")
        weight_grad.add(logits, self._x)
        marks.mark("weight_grad")
        if work.num_chunks > 1:
            weight_grad.add(logits, self._x)
            marks.mark("weight_grad_more")
        if accumulator != self._dtype and weight_grad.weight is not None:
            weight_grad.weight.to(self._dtype)
            marks.mark("narrow")
        if self._sharded:
            # Last, because the products before should see a gradient like the loop's.
            self._one_rank(marks)

    def _one_rank(self, marks: measure.Marks) -> None:
        self._kernels.row_stats_grad_(self._logits, self._logits, self._target, self._stats, self._coefficients, SPEC)
        marks.mark("row_stats_grad")


def stages(works: Sequence[LocalWork], dtype: torch.dtype, device: torch.device, rounds: int) -> list[dict[str, float]]:
    """Median seconds of each stage of a chunk of each work. All take turns in each round: the clock drifts."""
    chunks = [Chunk(work, dtype, device) for work in works]
    for chunk in chunks:
        for _ in range(measure.WARM_UP_CALLS):
            chunk.run(measure.Marks(device))
    measure.synchronize(device)
    busy = busy_work(device)
    found: list[dict[str, list[float]]] = [{} for _ in chunks]
    for _ in range(rounds):
        busy()
        marks = [measure.Marks(device) for _ in chunks]
        for chunk, its_marks in zip(chunks, marks, strict=True):
            for _ in range(measure.WARM_UP_CALLS):
                chunk.run(its_marks)
        for times, its_marks in zip(found, marks, strict=True):
            for name, value in its_marks.seconds():
                times.setdefault(name, []).append(value)
    return [{name: statistics.median(values) for name, values in times.items() if name} for times in found]


def host_times(group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Seconds that the host takes to issue a call of one chunk, and each further chunk: those of shapes so small that
    the GPU waits for it; and the GPU's own time for all the small kernels of such a call (a CUDA graph of it)."""
    problem = _problem(TINY, group, dtype, device)
    seconds = []
    for num_chunks in (1, 9):
        chunking = {"chunk_rows": -(-TINY.num_tokens // num_chunks)}
        step = _step("flce", problem, chunking)
        seconds.append(min(measure.time_rounds([step], problem.place, 5, 0.01)[0]))
    found = {"call": seconds[0], "chunk": max(0.0, seconds[1] - seconds[0]) / 8}
    if device.type == "cuda":
        alone = _problem(TINY, None, dtype, device)
        graph = measure.captured(_step("flce", alone, {}), alone.place)
        found["small_kernels"] = min(measure.time_rounds([graph], alone.place, 5, 0.01)[0])
    return found


def steps(
    shape: Shape, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device, effort: Effort
) -> list[dict[str, Any]]:
    """Forward and backward on the ranks that are here, and the bare products, with the columns that a rank of a larger
    group has: what the model is checked against."""
    size, found = collectives.world_size(group), []
    for width in (w for w in STEP_WIDTHS if w >= size):
        narrower = shape.resized(vocab_size=-(-shape.vocab_size // width) * size)
        problem = _problem(narrower, group, dtype, device)
        columns = problem.shard.num_columns
        plan = partial(LocalWork.planned, shape.num_tokens, shape.hidden_size, columns, dtype.itemsize, size)
        measured = [("flce", plan(), _step("flce", problem, {}))]
        if group is not None:
            tokens, alone = "flce-sharded-tokens", {"reduce_hidden_grad": False}
            measured.append((tokens, plan(sharded_tokens=True), _step(tokens, problem, {})))
            measured.append(("flce, hidden gradient not reduced", plan(), _step("flce", problem, alone)))
        floors = [floor.gemms(problem, rows, False) for rows in (None, plan().rows)]
        programs = [program for *_, program in measured]
        times = measure.time_rounds([*floors, *programs], problem.place, effort.rounds, effort.round_seconds)
        for (name, work, _), seconds in zip(measured, times[2:], strict=True):
            found.append(
                {
                    "num_tokens": shape.num_tokens,
                    "hidden_size": shape.hidden_size,
                    "vocab_size": narrower.vocab_size,
                    "num_ranks": size,
                    "method": name,
                    "work": dataclasses.asdict(work),
                    "seconds": statistics.median(seconds),
                    "to_floor": median_ratio(seconds, times[0]),
                    "to_cut_floor": median_ratio(seconds, times[1]),
                }
            )
        del problem, measured, floors, programs
        measure.free_memory(device)
    return found


def _problem(
    shape: Shape, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device
) -> workload.Problem:
    inputs = workload.make_inputs(shape, dtype, device, "random", 0.0, 0)
    return workload.make_problem(shape, inputs, group)


def _step(method: str, problem: workload.Problem, options: dict[str, Any]) -> Callable[[], object]:
    program = methods.build(methods.METHODS[method], problem, options, False)
    return lambda: program.run(False)


def everything(
    shapes: Sequence[Shape], widths: Sequence[int], ranks: BenchRanks, dtype: torch.dtype, effort: Effort,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """All measurements of `shapes` as the ranks of groups of `widths` see them."""
    place = ranks.place
    device, group = place
    began = time.perf_counter()

    def told(what: str) -> None:
        say(f"{time.perf_counter() - began:6.1f} s  {what}")

    def slowest(times: dict[str, float]) -> dict[str, float]:
        """Of the ranks, which hold them in the same order."""
        return dict(zip(times, measure.largest(list(times.values()), place), strict=True))

    found: dict[str, Any] = {"num_ranks": ranks.size, "dtype": str(dtype).removeprefix("torch."), "points": []}
    works = []
    for shape in shapes:
        for width in widths:
            columns = VocabShard.even(shape.vocab_size, 0, width).num_columns
            works.append(LocalWork.planned(shape.num_tokens, shape.hidden_size, columns, dtype.itemsize, width))
    for work, times in zip(works, stages(works, dtype, device, effort.stage_rounds), strict=True):
        found["points"].append(dataclasses.asdict(work) | {"seconds": slowest(times)})
    measure.free_memory(device)
    told("stages")
    found["host"] = slowest(host_times(group, device, dtype))
    told("host")
    if group is not None:
        found["collectives"] = {
            name: [[num_bytes, measure.largest([seconds], place)[0]] for num_bytes, seconds in rows]
            for name, rows in collective_times(place, effort).items()
        }
        told("collectives")
        found["beside"] = slowest(beside(place, dtype, effort))
        told("a product beside collectives")
    found["steps"] = []
    for shape in shapes:
        found["steps"] += steps(shape, group, dtype, device, effort)
        told(f"steps of {shape}")
    return found
