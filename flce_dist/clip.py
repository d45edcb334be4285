"""Gradient clipping for models whose gradients are plain, DTensors on one mesh or several, and FSDP1's at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all gradients of a model, whatever mix of kinds they are: plain ones
    (equal on all ranks, counted once), DTensors on one or several meshes (all their shards), and those of
    `FullyShardedDataParallel`, whose own method cannot count a sharded head and fails beside one.

    Args:
        model: as the wrapper returned it.
        max_norm: the norm to scale down to; `math.inf` only measures.
        norm_type: as torch takes it.

    Returns:
        The norm before, 0-d, equal on all ranks. Collectives: one all-reduce of a scalar for each mesh dimension that
        shards, and for each FSDP1 root.
    """
    roots = FullyShardedDataParallel.fsdp_modules(model, root_only=True)
    in_roots = {id(parameter) for root in roots for parameter in root.parameters()}
    distributed: dict[DeviceMesh, list[nn.Parameter]] = {}
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            distributed.setdefault(parameter.grad.device_mesh, []).append(parameter)
        elif parameter.grad is not None:
            plain.append(parameter)
    norms = [_full(torch.nn.utils.get_total_norm(_grads(parameters), norm_type)) for parameters in distributed.values()]
    norms += [_norm_of_fsdp1(root, norm_type) for root in roots]
    outside = [parameter for parameter in plain if id(parameter) not in in_roots]
    if outside:
        norms.append(torch.nn.utils.get_total_norm(_grads(outside), norm_type))
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if max_norm != math.inf:
        for parameters in (*distributed.values(), plain):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _norm_of_fsdp1(root: FullyShardedDataParallel, norm_type: float) -> Tensor:
    """The norm of what FSDP1 manages, and of plain parameters beside it: its own method, the DTensors out of sight."""
    set_aside = {parameter: parameter.grad for parameter in root.parameters() if isinstance(parameter.grad, DTensor)}
    for parameter in set_aside:
        parameter.grad = None
    try:
        return root.clip_grad_norm_(math.inf, norm_type)
    finally:
        for parameter, grad in set_aside.items():
            parameter.grad = grad


def _grads(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
