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
from typing import Any

import torch
import torch.distributed as dist

from flce_dist import VocabShard, collectives
from flce_dist.backend import row_kernels
from flce_dist.gemm import WeightGradient, accumulation_dtype, hidden_grad_into, logits_into
from flce_dist.kernels.spec import RowSpec, RowWeights, stats_dtype
from flce_dist.plan import logits_buffer

from . import floor, measure, methods, workload
from .costs import LocalWork
from .measure_links import WARM_UP_CALLS, Effort, beside, busy_work, collective_times, slowest
from .ranks import Ranks
from .workload import Shape

SPEC = RowSpec()
STEP_WIDTHS = (1, 2, 4, 8, 16)
TINY = Shape("tiny", 128, 128, 1024)


def stages(work: LocalWork, dtype: torch.dtype, device: torch.device, seconds: float) -> dict[str, float]:
    """Median seconds of each stage of one chunk of a rank, by the names of `costs.STAGES`."""
    rows, width, columns = work.rows, work.hidden_size, work.columns
    narrow, sharded = dtype in (torch.bfloat16, torch.float16), work.num_ranks > 1
    kernels = row_kernels("auto", device)
    x = torch.randn(rows, width, device=device, dtype=dtype)
    weight = torch.randn(columns, width, device=device, dtype=dtype) * width**-0.5
    target = torch.randint(columns, (rows,), device=device)
    logits = logits_buffer(rows, columns, dtype, device)
    local = torch.empty(SPEC.num_stats, rows, device=device, dtype=stats_dtype(dtype))
    stats, weights = torch.empty_like(local), RowWeights(local.new_full((rows,), 1 / rows), None, None)
    hidden_grad = torch.empty_like(x)
    part = x.new_empty(x.shape, dtype=torch.float32) if narrow and sharded else hidden_grad
    accumulator = accumulation_dtype(None, dtype, work.num_chunks)
    found: dict[str, list[float]] = {}

    def one_rank(marks: measure.Marks) -> None:
        kernels.row_stats_grad_(logits, logits, target, stats, weights, SPEC)
        marks.mark("row_stats_grad")

    def chunk(marks: measure.Marks) -> None:
        weight_grad = WeightGradient(weight, columns, accumulator, True, False)
        marks.mark("")
        logits_into(logits, x, weight, None, 1.0)
        marks.mark("logits")
        if sharded:
            kernels.row_stats(logits, target, local, SPEC, None, 0)
            marks.mark("row_stats")
            gathered = local.expand(work.num_ranks, -1, -1).contiguous()
            marks.mark("")
            kernels.combine(gathered, stats, SPEC)
            marks.mark("combine")
            kernels.row_grad_(logits, logits, target, stats, weights, SPEC)
            marks.mark("row_grad")
        else:
            one_rank(marks)
        hidden_grad_into(part, logits, weight, None, None)
        marks.mark("hidden_grad")
        if part is not hidden_grad:
            hidden_grad.copy_(part)
            marks.mark("copy")
        weight_grad.add(logits, x)
        marks.mark("weight_grad")
        if work.num_chunks > 1:
            weight_grad.add(logits, x)
            marks.mark("weight_grad_more")
        if accumulator != dtype and weight_grad.weight is not None:
            weight_grad.weight.to(dtype)
            marks.mark("narrow")
        if sharded:
            # Last, because the products before should see a gradient like the loop's.
            one_rank(marks)

    for _ in range(WARM_UP_CALLS):
        chunk(measure.Marks(device))
    measure.synchronize(device)
    busy, end = busy_work(device), time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        busy()
        marks = measure.Marks(device)
        for _ in range(WARM_UP_CALLS):
            chunk(marks)
        for name, value in marks.seconds():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items() if name}


def host_times(group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Seconds that the host takes to issue a call of one chunk, and each further chunk: those of shapes so small that
    the GPU waits for it; and the GPU's own time for all the small kernels of such a call (a CUDA graph of it)."""
    problem = _problem(TINY, group, dtype, device)
    seconds = []
    for num_chunks in (1, 9):
        chunking = {"chunk_rows": -(-TINY.num_tokens // num_chunks)}
        step = _step("flce", problem, chunking)
        seconds.append(min(measure.time_rounds([step], problem, 5, 0.01)[0]))
    found = {"call": seconds[0], "chunk": max(0.0, seconds[1] - seconds[0]) / 8}
    if device.type == "cuda":
        alone = _problem(TINY, None, dtype, device)
        graph = measure.captured(_step("flce", alone, {}), alone)
        found["small_kernels"] = min(measure.time_rounds([graph], alone, 5, 0.01)[0])
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
        names = ["flce"] if group is None else ["flce", "flce-sharded-tokens"]
        programs = [_step(name, problem, {}) for name in names]
        if group is not None:
            programs.append(_step("flce", problem, {"reduce_hidden_grad": False}))
            names.append("flce, hidden gradient not reduced")
        times = measure.time_rounds(
            [floor.gemms(problem, None, False), *programs], problem, effort.rounds, effort.round_seconds
        )
        bare = statistics.median(times[0])
        for name, seconds in zip(names, times[1:], strict=True):
            found.append(
                {
                    "num_tokens": shape.num_tokens,
                    "hidden_size": shape.hidden_size,
                    "vocab_size": narrower.vocab_size,
                    "num_ranks": size,
                    "method": name,
                    "seconds": statistics.median(seconds),
                    "floor_seconds": bare,
                }
            )
        del problem, programs
        _empty(device)
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
    shapes: Sequence[Shape], widths: Sequence[int], ranks: Ranks, dtype: torch.dtype, effort: Effort,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """All measurements of `shapes` as the ranks of groups of `widths` see them."""
    device, group = ranks.device, ranks.first(ranks.size)
    began = time.perf_counter()

    def told(what: str) -> None:
        say(f"{time.perf_counter() - began:6.1f} s  {what}")

    found: dict[str, Any] = {"num_ranks": ranks.size, "dtype": str(dtype).removeprefix("torch."), "points": []}
    for shape in shapes:
        for width in widths:
            columns = VocabShard.even(shape.vocab_size, 0, width).num_columns
            work = LocalWork.planned(shape.num_tokens, shape.hidden_size, columns, dtype.itemsize, width)
            times = stages(work, dtype, device, effort.stage_seconds)
            # In one order on all ranks, so that the maxima belong together.
            times = {name: slowest(times[name], group, device) for name in times}
            found["points"].append(dataclasses.asdict(work) | {"seconds": times})
            _empty(device)
        told(f"stages of {shape}")
    found["host"] = {name: slowest(v, group, device) for name, v in host_times(group, device, dtype).items()}
    told("host")
    if group is not None:
        times_of = collective_times(group, device, effort)
        found["collectives"] = {
            name: [[num_bytes, slowest(seconds, group, device)] for num_bytes, seconds in rows]
            for name, rows in times_of.items()
        }
        told("collectives")
        together = beside(group, device, dtype, effort)
        found["beside"] = {name: slowest(value, group, device) for name, value in together.items()}
        told("a product beside collectives")
    found["steps"] = []
    for shape in shapes:
        found["steps"] += steps(shape, group, dtype, device, effort)
        told(f"steps of {shape}")
    return found


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
