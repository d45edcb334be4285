"""The row kernels with fresh statistics returned instead of written into a place; `rows` is either implementation."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flce_dist.kernels.spec import RowCoefficients, RowSpec, stats_dtype


def new_stats(spec: RowSpec, logits: Tensor) -> Tensor:
    """Columns of a wider tensor, as the chunk loop has them, full of nan."""
    wide = torch.full(
        (spec.num_stats, logits.shape[0] + 3), torch.nan, dtype=stats_dtype(logits.dtype), device=logits.device
    )
    return wide[:, 2:-1]


def row_stats(rows: ModuleType, logits: Tensor, target: Tensor, spec: RowSpec, *others: Any) -> Tensor:
    stats = new_stats(spec, logits)
    rows.row_stats(logits, target, stats, spec, *others)
    return stats


def combine(rows: ModuleType, gathered: Tensor, spec: RowSpec) -> Tensor:
    stats = new_stats(spec, gathered[0, 0][:, None])
    rows.combine(gathered, stats, spec)
    return stats


def row_stats_grad_(
    rows: ModuleType,
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    coefficients: RowCoefficients,
    spec: RowSpec,
    *others: Any,
) -> Tensor:
    stats = new_stats(spec, logits)
    rows.row_stats_grad_(logits, grad, target, stats, coefficients, spec, *others)
    return stats
