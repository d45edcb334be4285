"""The collectives called by name, each with an explicit group; none for a single rank (`group=None`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import SAC_IGNORED_OPS

# torch 2.13 renamed the two and deprecates the older names, which torch 2.11 knows alone.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Their results are where the caller wants them. A policy of selective activation checkpointing that keeps what was
# communicated would call none in the recomputation, which would read memory that nobody has written.
SAC_IGNORED_OPS.update(
    getattr(torch.ops.c10d, name).default
    for name in ("_allgather_base_", "_reduce_scatter_base_", "allgather_", "allreduce_")
)


def world_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def sharding_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, or None when it has one rank: then nothing is sharded.

    Raises:
        TypeError: not a process group.
        ValueError: this rank is not in it.
    """
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` gives it
            raise ValueError("this rank is not in the group that was passed")
        remedy = "; pass mesh.get_group()" if isinstance(group, DeviceMesh) else ""
        raise TypeError(f"group must be a process group or None, got {type(group).__name__} {group}{remedy}")
    return group if world_size(group) > 1 else None


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[...]` of each rank to `[W, ...]` on all ranks."""
    out = tensor.new_empty(world_size(group), *tensor.shape)
    _gather_single(out.view(-1), tensor.contiguous().view(-1), group=group)
    return out


def all_reduce_start(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts the sum of `tensor` over the ranks, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


def reduce_scatter_start(out: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts the sum over the ranks of `tensor [W * c, H]`, of which rank r gets rows `[r * c, (r + 1) * c)` in
    `out [c, H]`."""
    work = _scatter_single(out, tensor, group=group, async_op=True)
    assert work is not None
    return work


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `tensor` over the ranks, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


class SumGradient(torch.autograd.Function):
    """`(tensor, group) -> tensor`, whose gradient is summed over the ranks: one all-reduce in backward, as a
    column-parallel linear layer has it at its input."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


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
