"""From options to the coefficients of each row, and from row statistics to losses: everything about a feature that is
not a flag of the row kernels.

With `lse = max + log(sum)` over the global vocabulary, class weights c (1 when absent), smoothing e, z coefficient k
and token weight w (1 when absent), a token's loss is

    w * ((1 - e) * c_y * (lse - z_y) + e/V * sum_j c_j (lse - z_j) + k * lse^2)

(label smoothing and class weights as in `torch.nn.functional.cross_entropy`, the z term as in PaLM, section 5).
`kernels.spec.RowCoefficients` holds the three factors with the reduction's divisor in them, and has the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.spec import MAX, NO_ID, OTHERS, OWNED, TARGET, RowCoefficients, RowSpec
from .options import LossOptions


def row_coefficients(
    options: LossOptions,
    target: Tensor,
    valid: Tensor,
    share: Tensor,
    vocab_size: int,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | float | None,
) -> RowCoefficients:
    """Coefficients of the rows' losses, in the dtype of `share`, reduction included.

    `target`, `valid` and `share` (of `token_shares`, of a mean if there is no normalizer) are `[N]`, the tokens of the
    whole group; `class_weight [vocab_size]`; `token_weight [N]` in the dtype of `share`.
    """
    of_target, of_all = share, share
    if class_weight is not None:
        # A target outside the vocabulary is reported later, on all ranks; here it must only not fault.
        of_target = torch.where(valid, class_weight.to(share.dtype)[target.clamp(0, vocab_size - 1)], 0.0)
        if options.reduction == "mean" and normalizer is None:
            divisor = _never_zero(of_target.sum())
            of_target, of_all = of_target / divisor, valid.to(share.dtype) / divisor
    if token_weight is not None:
        weight = torch.where(valid, token_weight, 0.0)
        of_target, of_all, share = of_target * weight, of_all * weight, share * weight
    if normalizer is not None:
        divisor = _never_zero(_as_scalar(normalizer, share.dtype, share.device))
        of_target, of_all, share = of_target / divisor, of_all / divisor, share / divisor
    smoothing = options.label_smoothing
    return RowCoefficients(
        target=of_target * (1.0 - smoothing) if smoothing else of_target,
        uniform=of_all * (smoothing / vocab_size) if smoothing else None,
        square=share * options.z_loss if options.z_loss else None,
    )


def scaled_and_capped(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The logits z of which the loss is computed, of a head's `[...]` logits."""
    scaled = logits if scale == 1.0 else logits * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def row_losses(stats: Tensor, coefficients: RowCoefficients, valid: Tensor, spec: RowSpec) -> Tensor:
    """Losses `[N]` of the rows from global statistics `[K, N]`; exactly 0 where not valid.

    Max and log-sum stay apart until the end: with logits near 1e4 their sum has no digits left for the loss.
    """
    log_sum = log_of_sum(stats)
    negative_log_prob = (stats[MAX] - stats[TARGET]) + log_sum
    losses = coefficients.target * negative_log_prob
    if coefficients.uniform is not None:
        losses = losses + coefficients.uniform * (stats[spec.weight_sum_row] * log_sum - stats[spec.weighted_sum_row])
    if coefficients.square is not None:
        losses = losses + coefficients.square * log_sum_exp(stats).square()
    if spec.token_scaling:
        losses = losses * torch.exp(-negative_log_prob)
    return torch.where(valid, losses, 0.0)


def z_losses(stats: Tensor, coefficients: RowCoefficients, valid: Tensor, spec: RowSpec) -> Tensor:
    """The z part `[N]` of `row_losses`."""
    if coefficients.square is None:
        return torch.zeros_like(stats[MAX])
    losses = coefficients.square * log_sum_exp(stats).square()
    if spec.token_scaling:
        losses = losses * torch.exp(stats[TARGET] - log_sum_exp(stats))
    return torch.where(valid, losses, 0.0)


def target_exp(stats: Tensor) -> Tensor:
    """`exp(z_y - max)` `[N]` of the target; 0 where no rank has it."""
    return torch.where(stats[OWNED] > 0, (stats[TARGET] - stats[MAX]).exp(), 0.0)


def log_of_sum(stats: Tensor) -> Tensor:
    """Log `[N]` of the sum of `exp(z - max)`. Where the target is the max it is `log(1 + others)`, the loss of a
    confident model, with all its digits."""
    return torch.log1p(stats[OTHERS] + (target_exp(stats) - 1.0))


def log_sum_exp(stats: Tensor) -> Tensor:
    """Log-sum-exp `[N]` of the logits over the global vocabulary."""
    return stats[MAX] + log_of_sum(stats)


def entropies(stats: Tensor, spec: RowSpec) -> Tensor:
    """Entropy `[N]`, in nats, of the softmax over the global vocabulary."""
    at_target = target_exp(stats)
    of_target = torch.where(at_target > 0, (stats[TARGET] - stats[MAX]) * at_target, 0.0)
    return log_of_sum(stats) - (stats[spec.entropy_row] + of_target) / (stats[OTHERS] + at_target)


def predictions(stats: Tensor, spec: RowSpec) -> Tensor:
    """Arg-max `[N]` (int64) over the global vocabulary, the lowest id of equals; an id too where all logits are nan."""
    best = stats[spec.argmax_row]
    return torch.where(best < NO_ID, best, 0.0).to(torch.int64)


def badly_owned(stats: Tensor, valid: Tensor) -> Tensor:
    """Rows `[N]` (bool) whose target is not on exactly one rank: out of range, or shards that overlap or leave gaps."""
    return valid & (stats[OWNED] != 1)


def _as_scalar(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A fill takes a host number without the copy that would wait for the device.
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    return torch.full((), float(value), dtype=dtype, device=device)


def _never_zero(divisor: Tensor) -> Tensor:
    """Infinity for a divisor of 0: no valid token makes loss 0, not nan."""
    return torch.where(divisor == 0, torch.inf, divisor)
