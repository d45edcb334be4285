"""AdamW and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .schema import OptimizerConfig


def make_optimizer(model: nn.Module, options: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only.

    Sharded (DTensor) parameters have groups of their own, those of each mesh: torch's multi-tensor kernels refuse to
    mix them.
    """
    groups: dict[tuple[DeviceMesh | None, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((mesh, parameter.ndim >= 2), []).append(parameter)
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
