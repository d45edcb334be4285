"""AdamW, the learning-rate schedule, and the norm of gradients that are partly sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .schema import OptimizerConfig


def make_optimizer(model: nn.Module, options: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only.

    Sharded (DTensor) parameters have groups of their own: torch's multi-tensor kernels refuse to mix them with plain
    ones.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((isinstance(parameter, DTensor), parameter.ndim >= 2), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": options.weight_decay if is_matrix else 0.0}
            for (_, is_matrix), parameters in groups.items()
        ],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
    )


def learning_rate(step: int, steps: int, options: OptimizerConfig) -> float:
    """Linear warm-up, then a cosine to `min_lr_ratio` of the peak at the last step; `step` counts from 0."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, steps - 1 - options.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * cosine)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before, 0-d.

    It is the norm of the whole model's gradient, the same on all ranks: a replicated parameter counts once, and a
    sharded one with all its shards (one all-reduce of a scalar).
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    plain = [parameter for parameter in with_grad if not isinstance(parameter.grad, DTensor)]
    sharded = [parameter for parameter in with_grad if isinstance(parameter.grad, DTensor)]
    norms = []
    for group in (plain, sharded):
        if group:
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        for group in (plain, sharded):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total
