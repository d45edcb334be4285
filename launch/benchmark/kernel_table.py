"""Where the time of a step goes, by the profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .measure import Step, synchronize

CALLS = 5


def kernel_table(step: Step, device: torch.device) -> list[dict[str, Any]]:
    """Kernels on CUDA, operations on CPU: name, calls and milliseconds of one step; the longest first."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    step()
    synchronize(device)
    with profile(activities=activities, acc_events=True) as found:
        for _ in range(CALLS):
            step()
        synchronize(device)
    rows = []
    for event in found.key_averages():
        # Ranges that libraries annotate hold kernels that are counted by themselves.
        if on_gpu and (event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation):
            continue
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if micros > 0:
            rows.append({"name": event.key, "calls": event.count / CALLS, "ms": micros / 1e3 / CALLS})
    return sorted(rows, key=lambda row: -row["ms"])


def format_kernel_table(rows: list[dict[str, Any]], most: int = 14) -> str:
    total = sum(row["ms"] for row in rows)
    lines = [f"    {row['ms']:9.3f} ms  {row['calls']:6.1f} x  {row['name'][:100]}" for row in rows[:most]]
    rest = sum(row["ms"] for row in rows[most:])
    return "\n".join([*lines, f"    {rest:9.3f} ms  {len(rows[most:])} others", f"    {total:9.3f} ms  in all"])
