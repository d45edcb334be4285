"""Where the time of a step goes, by the profiler."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from .measure import Step, synchronize

CALLS = 5


class Interval(NamedTuple):
    """When a kernel ran, in microseconds."""

    name: str
    start: float
    end: float


class Profile(NamedTuple):
    """`kernels`: see `kernel_table`; `shares`: see `time_shares`."""

    kernels: list[dict[str, Any]]
    shares: dict[str, float]


def profile_step(step: Step, device: torch.device) -> Profile:
    """Kernels on CUDA, operations on CPU."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    step()
    synchronize(device)
    with profile(activities=activities, acc_events=True) as found:
        for _ in range(CALLS):
            step()
        synchronize(device)
    return Profile(kernel_table(found.key_averages(), on_gpu), time_shares(_intervals(found.events() or [], on_gpu)))


def kernel_table(averages: Iterable[Any], on_gpu: bool) -> list[dict[str, Any]]:
    """Name, calls and milliseconds of one step; the longest first."""
    rows = []
    for event in averages:
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if micros > 0 and _counts(event, on_gpu):
            rows.append({"name": event.key, "calls": event.count / CALLS, "ms": micros / 1e3 / CALLS})
    return sorted(rows, key=lambda row: -row["ms"])


def _counts(event: Any, on_gpu: bool) -> bool:
    """Not the ranges that libraries annotate, which hold kernels that are counted by themselves."""
    return not on_gpu or (event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation)


PRODUCT = re.compile(r"gemm|nvjet|cutlass|splitk|^aten::(mm|addmm)$", re.IGNORECASE)
COLLECTIVE = re.compile(r"nccl|^gloo:", re.IGNORECASE)


def _intervals(events: Iterable[Any], on_gpu: bool) -> list[Interval]:
    found = []
    for event in events:
        # An operation on CPU holds those that it calls: of the others only the innermost count.
        inner = on_gpu or not event.cpu_children or PRODUCT.search(event.name) or COLLECTIVE.search(event.name)
        if inner and _counts(event, on_gpu):
            found.append(Interval(event.name, event.time_range.start, event.time_range.end))
    return found


def time_shares(intervals: Sequence[Interval]) -> dict[str, float]:
    """Shares, which add up to 1, of the time from the first kernel to the last: while a matrix product runs
    ("products"), else while another kernel does that is no collective ("kernels"), else while a collective does
    ("collectives"), else "idle". What is not "products" is not hidden under them."""
    if not intervals:
        return {}
    products = [i for i in intervals if PRODUCT.search(i.name)]
    kernels = [i for i in intervals if not COLLECTIVE.search(i.name)]
    lengths = [_covered(products), _covered(kernels), _covered(intervals)]
    lengths.append(max(i.end for i in intervals) - min(i.start for i in intervals))
    names = ("products", "kernels", "collectives", "idle")
    differences = [b - a for a, b in zip([0.0, *lengths], lengths, strict=False)]
    return {name: value / lengths[-1] for name, value in zip(names, differences, strict=True)}


def _covered(intervals: Sequence[Interval]) -> float:
    """Length of their union."""
    total, end = 0.0, float("-inf")
    for interval in sorted(intervals, key=lambda i: i.start):
        total += max(0.0, interval.end - max(end, interval.start))
        end = max(end, interval.end)
    return total


def format_kernel_table(rows: list[dict[str, Any]], most: int = 14) -> str:
    total = sum(row["ms"] for row in rows)
    lines = [f"    {row['ms']:9.3f} ms  {row['calls']:6.1f} x  {row['name'][:100]}" for row in rows[:most]]
    rest = sum(row["ms"] for row in rows[most:])
    return "\n".join([*lines, f"    {rest:9.3f} ms  {len(rows[most:])} others", f"    {total:9.3f} ms  in all"])
