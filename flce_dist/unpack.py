"""Arguments as one rank's plain tensors in one dtype: DTensors replaced by their local parts, results of asynchronous
collectives awaited, autocast applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .checks import checked_count, checked_layout
from .collectives import sharding_group
from .shard import VocabShard

if TYPE_CHECKING:
    from .arguments import Given


def local_tensors(given: Given) -> Given:
    """DTensors replaced by their local parts, and a DTensor weight's place in the vocabulary by a `VocabShard`; waits
    for target, token_weight and class_weight where a functional collective has not finished them.

    Raises:
        TypeError, ValueError: a DTensor with placements or a mesh that do not fit.
    """
    if isinstance(given.weight, DTensor):
        given = _local_weight(given, given.weight)
    elif isinstance(given.bias, DTensor):
        raise TypeError("bias is a DTensor but weight is not: pass both as DTensors, or both local")
    hidden, target, token_weight = given.hidden, given.target, given.token_weight
    if any(isinstance(tensor, AsyncCollectiveTensor) for tensor in (target, token_weight, given.class_weight)):
        # Operations wait for it themselves, but a Triton kernel reads memory.
        target, token_weight, class_weight = map(_awaited, (target, token_weight, given.class_weight))
        given = given._replace(target=target, token_weight=token_weight, class_weight=class_weight)
    if not any(isinstance(tensor, DTensor) for tensor in (hidden, target, token_weight)):
        return given
    return given._replace(
        hidden=_local_tokens("hidden", hidden, given),
        target=_local_tokens("target", target, given),
        token_weight=None if token_weight is None else _local_tokens("token_weight", token_weight, given),
    )


def _awaited(tensor: Any) -> Any:
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _local_weight(given: Given, weight: DTensor) -> Given:
    mesh, bias, group = weight.device_mesh, given.bias, sharding_group(given.group)
    where = f"a DTensor on mesh {mesh} with placements {weight.placements}"
    if mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise ValueError(
            f"weight must be a plain tensor or a DTensor Shard(0) on the 1-D mesh of the group, got {where}: FSDP2's "
            "sharded parameter is seen outside of the module that owns it; compute the loss in that module's forward"
        )
    if given.vocab_shard is not None:
        raise ValueError("vocab_shard is for a plain weight: a DTensor knows its place")
    if group is None and mesh.size() > 1:
        raise ValueError(
            f"weight is {where}, but group=None means that the vocabulary is not sharded: for a tensor-parallel mesh "
            "pass group=weight.device_mesh.get_group(); for FSDP2's sharded parameter compute the loss in the forward "
            "of the module that owns it"
        )
    if group is not None and not _is_of(mesh, group):
        raise ValueError(
            f"weight is {where}, which is not that of ranks {dist.get_process_group_ranks(group)}, the group"
        )
    if bias is not None:
        if not isinstance(bias, DTensor) or bias.placements != (Shard(0),) or bias.device_mesh != mesh:
            raise TypeError("bias must be a DTensor sharded like weight")
        bias = bias.to_local()
    rows = weight.shape[0]
    size = rows if given.vocab_size is None else checked_count("vocab_size", given.vocab_size, 1)
    shard = VocabShard.even(size, mesh.get_local_rank(), mesh.size(), num_rows=rows)
    return given._replace(weight=weight.to_local(), bias=bias, vocab_size=None, vocab_shard=shard)


def _local_tokens(name: str, tensor: Tensor, given: Given) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, group = tensor.device_mesh, sharding_group(given.group)
    where = f"{name} is a DTensor on mesh {mesh} with placements {tensor.placements}"
    expected = Replicate() if checked_layout(given.hidden_layout) == "replicated" else Shard(0)
    if mesh.ndim != 1 or tensor.placements[0] != expected:
        raise ValueError(
            f'{where}, but hidden_layout="{given.hidden_layout}" takes plain tensors or DTensors on the 1-D mesh of '
            'the group, Replicate() for "replicated" and Shard(0) for "sharded"'
        )
    if group is None and mesh.size() > 1 and expected != Replicate():
        raise ValueError(
            f"{where}, but group=None computes a loss of this rank's tokens alone: pass "
            f"group={name}.device_mesh.get_group() for one loss of them all, or {name}.to_local()"
        )
    if group is not None and not _is_of(mesh, group):
        raise ValueError(
            f"{where}, which is not that of ranks {dist.get_process_group_ranks(group)}, the group: pass "
            f"{name}.to_local(), and as hidden_layout how the tokens lie over the ranks of the group"
        )
    if expected != Replicate():
        return tensor.to_local()
    summed = given.reduce_hidden_grad or group is None
    return tensor.to_local(grad_placements=[Replicate() if summed else Partial()])


def _is_of(mesh: DeviceMesh, group: dist.ProcessGroup) -> bool:
    """Whether a 1-D mesh has the ranks of the group, in its order."""
    return dist.get_process_group_ranks(mesh.get_group()) == dist.get_process_group_ranks(group)


def under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; torch knows none for "meta"."""
    # Not `is_autocast_available`, on which torch 2.11 breaks a graph that is being traced.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast(given: Given) -> Given:
    """Operands in autocast's dtype when it is on for their device, as `F.linear` takes them (float64 stays)."""
    if not isinstance(given.hidden, Tensor) or not under_autocast(given.hidden.device):
        return given
    dtype = torch.get_autocast_dtype(given.hidden.device.type)

    def cast(tensor: Any) -> Any:  # nothing has been checked yet
        is_cast = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if is_cast else tensor

    return given._replace(hidden=cast(given.hidden), weight=cast(given.weight), bias=cast(given.bias))
