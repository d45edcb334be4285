"""The row kernels in torch: the CPU path, and the specification of `triton_rows`. The contract is in `spec`.

Rows are taken in blocks that fit a CPU's cache, so temporaries are far smaller than a chunk of logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import row_math
from .spec import MAX, OTHERS, OWNED, TARGET, RowCoefficients, RowSpec, stats_dtype

_BLOCK_ELEMENTS = 2**18


def row_stats(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    spec: RowSpec,
    column_weight: Tensor | None = None,
    first_column: int = 0,
) -> None:
    for rows in _row_blocks(logits):
        stats[:, rows] = _block_stats(_capped(logits[rows], spec), target[rows], spec, column_weight, first_column)


def combine(gathered: Tensor, stats: Tensor, spec: RowSpec) -> None:
    maxima, sums = gathered[:, MAX], gathered[:, OTHERS]
    stats[MAX] = maxima.amax(0)
    # Equal maxima differ by 0 even when both are -inf; a rank without columns has -inf and shifts to -inf.
    shift = torch.where(maxima == stats[MAX], 0.0, maxima - stats[MAX])
    factor = shift.exp()
    stats[OTHERS] = (sums * factor).sum(0)
    stats[TARGET] = gathered[:, TARGET].sum(0)
    stats[OWNED] = gathered[:, OWNED].sum(0)
    if spec.uniform:
        weight = gathered[:, spec.weight_sum_row]
        shifted = gathered[:, spec.weighted_sum_row] + torch.where(weight == 0, 0.0, weight * shift)
        stats[spec.weighted_sum_row] = shifted.sum(0)
        stats[spec.weight_sum_row] = weight.sum(0)
    if spec.argmax:
        ids = gathered[:, spec.argmax_row]
        stats[spec.argmax_row] = torch.where((maxima == stats[MAX]) | maxima.isnan(), ids, torch.inf).amin(0)
    if spec.entropy:
        shifted = gathered[:, spec.entropy_row] + torch.where(sums == 0, 0.0, sums * shift)
        stats[spec.entropy_row] = (shifted * factor).sum(0)


def row_grad_(
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    stats: Tensor,
    coefficients: RowCoefficients,
    spec: RowSpec,
    column_weight: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    for rows in _row_blocks(logits):
        z = _capped(logits[rows], spec)
        wide = _block_grad(
            z, stats[:, rows], target[rows], coefficients.slice(rows.start, rows.stop), spec, column_weight
        )
        grad[rows] = wide
        if residual is not None:
            residual[rows] = (grad[rows] - wide).sum(1)


def row_stats_grad_(
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    stats: Tensor,
    coefficients: RowCoefficients,
    spec: RowSpec,
    column_weight: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    row_stats(logits, target, stats, spec, column_weight)
    row_grad_(logits, grad, target, stats, coefficients, spec, column_weight, residual)


def token_shares(ids: Tensor, ignore_index: int, mean: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    valid = ids != ignore_index
    share = valid.to(dtype)
    return valid, share / share.sum().clamp(min=1) if mean else share


def loss_sum(stats: Tensor, coefficients: RowCoefficients, valid: Tensor, spec: RowSpec) -> tuple[Tensor, Tensor]:
    return row_math.row_losses(stats, coefficients, valid, spec).sum(), ~row_math.badly_owned(stats, valid).any()


def scale_(gradients: Sequence[tuple[Tensor, float]], factor: Tensor) -> None:
    for gradient, host_factor in gradients:
        gradient.mul_(factor.to(stats_dtype(gradient.dtype)) * host_factor)


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], rows):
        yield slice(start, min(start + rows, logits.shape[0]))


def _capped(logits: Tensor, spec: RowSpec) -> Tensor:
    z = logits.to(stats_dtype(logits.dtype))
    return z if spec.softcap is None else spec.softcap * torch.tanh(z / spec.softcap)


def _owned(target: Tensor, num_columns: int) -> Tensor:
    return (target >= 0) & (target < num_columns)


def _block_stats(z: Tensor, target: Tensor, spec: RowSpec, column_weight: Tensor | None, first_column: int) -> Tensor:
    num_columns = z.shape[1]
    out = z.new_zeros(spec.num_stats, z.shape[0])
    out[MAX] = -torch.inf
    if spec.argmax:
        out[spec.argmax_row] = torch.inf
    if num_columns == 0:
        return out
    out[MAX] = z.amax(1)
    # A row of nothing but -inf keeps max -inf and sum 0: shifting it by -inf would make nan.
    shifted = z - torch.where(out[MAX] == -torch.inf, 0.0, out[MAX])[:, None]
    exp = shifted.exp()
    owned = _owned(target, num_columns)
    column = torch.where(owned, target, 0)[:, None]
    at_target = z.gather(1, column)[:, 0]
    exp.scatter_(1, column, torch.where(owned[:, None], 0.0, exp.gather(1, column)))
    out[OTHERS] = exp.sum(1)
    out[TARGET] = torch.where(owned, at_target, 0.0)
    out[OWNED] = owned.to(z.dtype)
    if spec.uniform:
        weighted = shifted if column_weight is None else shifted * column_weight
        out[spec.weighted_sum_row] = weighted.sum(1)
        out[spec.weight_sum_row] = num_columns if column_weight is None else column_weight.sum()
    if spec.argmax:
        out[spec.argmax_row] = (z.argmax(1) + first_column).to(z.dtype)
    if spec.entropy:
        out[spec.entropy_row] = torch.where(exp > 0, shifted * exp, 0.0).sum(1)
    return out


def _block_grad(
    z: Tensor, stats: Tensor, target: Tensor, coefficients: RowCoefficients, spec: RowSpec, column_weight: Tensor | None
) -> Tensor:
    num_columns = z.shape[1]
    prob_weight, target_coef, uniform = coefficients.target, coefficients.target, coefficients.uniform
    active = coefficients.target != 0
    if uniform is not None:
        active = active | (uniform != 0)
        prob_weight = prob_weight + uniform * stats[spec.weight_sum_row]
    if coefficients.square is not None:
        active = active | (coefficients.square != 0)
        prob_weight = prob_weight + 2.0 * coefficients.square * row_math.log_sum_exp(stats)
    at_target = row_math.target_exp(stats)
    total = stats[OTHERS] + at_target
    if spec.token_scaling:
        target_prob = at_target / total
        prob_weight, target_coef = prob_weight * target_prob, target_coef * target_prob
        uniform = None if uniform is None else uniform * target_prob
    grad = (z - stats[MAX][:, None]).exp_().mul_((prob_weight / total)[:, None])
    owned = _owned(target, num_columns)
    if num_columns:
        # A p - B with p = 1 - others / total, so that no digit of a small 1 - p is lost.
        of_target = ((prob_weight - target_coef) * at_target - target_coef * stats[OTHERS]) / total
        column = torch.where(owned, target, 0)[:, None]
        grad.scatter_(1, column, torch.where(owned[:, None], of_target[:, None], grad.gather(1, column)))
    if uniform is not None:
        grad -= uniform[:, None] if column_weight is None else uniform[:, None] * column_weight
    if spec.softcap is not None:
        grad *= 1.0 - (z / spec.softcap).square()
    return grad.masked_fill_(~active[:, None], 0.0)
