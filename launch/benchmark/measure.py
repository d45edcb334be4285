"""Time, extra memory and CUDA-graph replay of steps.

All steps are timed in turn within each round: a card's clock drifts with heat, and what is compared must see the same
clock. The order is drawn anew for each round, since a step runs faster behind one that let the card cool. Ratios are
taken within a round, and their median over the rounds is the result.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .workload import Place

Step = Callable[[], object]

WARM_UP_CALLS = 3
MAX_CALLS = 200


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """What nothing refers to any more, the caching allocator's blocks too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_rounds(steps: Sequence[Step], place: Place, rounds: int, round_seconds: float) -> list[list[float]]:
    """Seconds of one call, of each step in each round: the slowest rank's.

    Each step is called without timing first, then as often as fits `round_seconds` (at least once) between two events.
    """
    calls = []
    for step in steps:
        for _ in range(WARM_UP_CALLS - 1):
            step()
        estimate = largest([_time_calls(step, 1, place)], place)[0]
        calls.append(max(1, min(MAX_CALLS, round(round_seconds / max(estimate, 1e-7)))))
    seconds = [[0.0] * rounds for _ in steps]
    for r in range(rounds):
        for i in random.Random(r).sample(range(len(steps)), len(steps)):  # the same on all ranks
            steps[i]()
            seconds[i][r] = _time_calls(steps[i], calls[i], place)
    slowest = largest([s for row in seconds for s in row], place)
    return [slowest[i * rounds : (i + 1) * rounds] for i in range(len(steps))]


def _time_calls(step: Step, calls: int, place: Place) -> float:
    device = place.device
    align_ranks(place)
    if device.type == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            step()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / calls
    began = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - began) / calls


def align_ranks(place: Place) -> None:
    """So that no rank's time holds another's delay from before."""
    synchronize(place.device)
    if place.group is not None:
        dist.all_reduce(torch.zeros(1, device=place.device), group=place.group)
        synchronize(place.device)


def largest(values: list[float], place: Place) -> list[float]:
    """Each value's largest of all ranks."""
    if place.group is None:
        return values
    of_ranks = torch.tensor(values, dtype=torch.float64, device=place.device)
    dist.all_reduce(of_ranks, op=dist.ReduceOp.MAX, group=place.group)
    return list(of_ranks.tolist())


def extra_peak(step: Step, place: Place) -> int:
    """Bytes at the peak of one call above those alive before it: the caching allocator's on CUDA, those of torch's
    CPU allocator (temporaries inside of operations included) on CPU. The rank with the most counts."""
    device = place.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        peak = _cpu_peak(step)
    return int(largest([float(peak)], place)[0])


def _cpu_peak(step: Step) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    allocations = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for _, num_bytes in sorted(allocations, key=lambda event: event[0]):
        alive += num_bytes
        peak = max(peak, alive)
    return peak


def captured(step: Step, place: Place) -> Step:
    """The step as a CUDA graph, and its replay as a step. The gradients of the captured call stay where they are."""
    device = place.device
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread asks for the state of events meanwhile, which a capture of all threads would forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


class Marks:
    """Seconds between marks on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def seconds(self) -> Iterator[tuple[str, float]]:
        """Names of marks and the time since the one before each; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            yield name, (before.elapsed_time(after) / 1e3 if self._on_gpu else after - before)
