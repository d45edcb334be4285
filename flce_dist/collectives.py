"""Every collective of the package, each with an explicit group. None is called for a single rank (`group=None`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the two and deprecates the older names, which torch 2.11 knows alone.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def world_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[...]` of each rank to `[W, ...]` on all ranks."""
    out = tensor.new_empty(world_size(group), *tensor.shape)
    _gather_single(out.view(-1), tensor.contiguous().view(-1), group=group)
    return out


class Started(Protocol):
    """A collective under way. Its tensors must be kept until it was waited for."""

    def wait(self) -> object: ...


def all_reduce_start(tensor: Tensor, group: dist.ProcessGroup) -> Started:
    """Starts the sum of `tensor` over the ranks, in place."""
    return _start(tensor.device, partial(dist.all_reduce, tensor, group=group))


def reduce_scatter_start(out: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Started:
    """Starts the sum over the ranks of `tensor [W * c, H]`, of which rank r gets rows `[r * c, (r + 1) * c)` in
    `out [c, H]`."""
    return _start(tensor.device, partial(_scatter_single, out, tensor, group=group))


def _start(device: torch.device, collective: Callable[..., Any]) -> Started:
    return _OnSideStream(device, collective) if device.type == "cuda" else collective(async_op=True)


class _OnSideStream:
    """A collective beside the kernels that the caller launches next, and before them.

    The vendor's GEMMs hold all of a GPU until their last tile, so one that starts first leaves the collective to run
    after it. The caller's stream therefore waits until the side stream has come to the collective.
    """

    def __init__(self, device: torch.device, collective: Callable[[], Any]) -> None:
        self._device = device
        here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1)
        side.wait_stream(here)
        here.wait_event(side.record_event())
        with torch.cuda.stream(side):
            collective()
        self._done = side.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `tensor` over the ranks, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


def max_over_ranks(value: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """The largest of the ranks' host integers. Waits for the device."""
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return int(tensor)


def all_gather_object(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """A picklable value of each rank, in rank order, on all ranks. Waits for the device."""
    values: list[Any] = [None] * world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
