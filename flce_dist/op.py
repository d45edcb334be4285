"""The chunk loop and its autograd.

Letters: N rows of the loop (tokens of the group), H hidden, L columns of this rank's logits, C rows of a chunk.

Collectives with W > 1 ranks, for each chunk: one all-gather of `[K, C]` statistics (K = 4 without extras), and, where
the hidden states need a gradient, one reduction of `[C, H]`, which is started before the weight-gradient GEMM that
hides it. Token-sharded hidden states add one all-gather of `[C, H]`. Backward calls none, unless it recomputes: then
the same but for the statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import collectives, row_math
from .gemm import WeightGradient, logits_into, mm_into
from .kernels.spec import RowSpec, RowWeights, stats_dtype
from .options import LossOptions
from .plan import logits_buffer
from .shard import VocabShard
from .tokens import HiddenGradient, TokenLayout

MAX_FP16_GRAD_FACTOR = 1024


class Needs(NamedTuple):
    """Which gradients are wanted. Whether `hidden` is, is the same on all ranks."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class Call:
    """What one call knows besides its differentiable tensors. `target` holds columns of this rank, and like `valid`
    and `weights` it is in loop order."""

    options: LossOptions
    shard: VocabShard
    tokens: TokenLayout
    rows: ModuleType
    spec: RowSpec
    needs: Needs
    reduce_hidden_grad: bool
    hidden_grad_scale: float
    target: Tensor
    valid: Tensor
    weights: RowWeights
    column_weight: Tensor | None

    def hidden_gradient(self, hidden: Tensor) -> HiddenGradient:
        reduce_dtype = self.options.hidden_grad_reduce_dtype or hidden.dtype
        return self.tokens.hidden_gradient(hidden, reduce_dtype, self.reduce_hidden_grad)

    def grad_factor(self, dtype: torch.dtype) -> float:
        """Power of two that gradients made in forward carry until backward: in fp16 a mean's `p / N` underflows before
        the loss scale arrives."""
        if dtype != torch.float16 or self.options.reduction != "mean":
            return 1.0
        return float(1 << max(0, min(self.tokens.num_rows, MAX_FP16_GRAD_FACTOR).bit_length() - 1))


class Gradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def run_chunks(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_weights: RowWeights | None,
    known_stats: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """All chunks: global statistics `[K, N]`, and the gradients that `call.needs` when `grad_weights` are given.

    With `known_stats` (of an earlier forward) they are not computed and not exchanged again.
    """
    columns = call.shard.num_columns
    weight_rows, bias_rows = weight[:columns], None if bias is None else bias[:columns]
    logits_dtype = call.options.logits_dtype or hidden.dtype
    buffer = logits_buffer(call.tokens.chunk_rows, columns, logits_dtype, hidden.device)
    num_stats = call.spec.num_stats
    stats = buffer.new_empty(num_stats, call.tokens.num_rows, dtype=stats_dtype(logits_dtype))
    needs = call.needs if grad_weights is not None else Needs(False, False, False)
    hidden_grad = call.hidden_gradient(hidden) if needs.hidden else None
    weight_grad = WeightGradient(weight, columns, call.options.accum_dtype, needs.weight, needs.bias)

    for start, stop in call.tokens.chunks:
        x = call.tokens.hidden_chunk(hidden, start, stop)
        logits = buffer[: stop - start]
        logits_into(logits, x, weight_rows, bias_rows, call.options.logit_scale)
        chunk_weights = None if grad_weights is None else grad_weights.slice(start, stop)
        known = None if known_stats is None else known_stats[:, start:stop]
        stats[:, start:stop], grad = softmax_rows(call, logits, call.target[start:stop], chunk_weights, known, x.dtype)
        if hidden_grad is not None:
            part = hidden_grad.chunk(start, stop)
            mm_into(part, grad, weight_rows)
            hidden_grad.start_reduce(part, start, stop)
        if needs.weight or needs.bias:
            weight_grad.add(grad, x)

    return stats, Gradients(None if hidden_grad is None else hidden_grad.finish(), *weight_grad.finish())


def softmax_rows(
    call: Call, logits: Tensor, target: Tensor, weights: RowWeights | None, known: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Global statistics of a chunk, and its logits, overwritten by their gradient in `dtype` when `weights` are given.

    One all-gather of `[K, C]` with more than one rank, unless the statistics are `known`.
    """
    rows, spec, columns = call.rows, call.spec, call.column_weight
    grad = logits if logits.dtype == dtype else logits.view(dtype)[:, : logits.shape[1]]
    if known is None:
        if call.tokens.group is None:
            if weights is not None:
                return rows.row_stats_grad_(logits, grad, target, weights, spec, columns), grad
            return rows.row_stats(logits, target, spec, columns), grad
        local = rows.row_stats(logits, target, spec, columns, call.shard.start)
        known = rows.combine(collectives.all_gather(local, call.tokens.group), spec)
    if weights is not None:
        rows.row_grad_(logits, grad, known, target, weights, spec, columns)
    return known, grad


class LinearCrossEntropy(torch.autograd.Function):
    """`(call, hidden [n, H], weight [rows, H], bias [rows] | None) -> (loss, stats [K, N])`.

    `loss` is `[]`, or `[n]` with reduction "none"; `stats` is not differentiable and in loop order.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        factor = call.grad_factor(hidden.dtype)
        grad_weights = None
        if any(call.needs) and not call.options.recompute:
            grad_weights = call.weights.scaled(factor * call.options.logit_scale)
        stats, gradients = run_chunks(call, hidden, weight, bias, grad_weights)
        losses = row_math.row_losses(stats, call.weights, call.valid, call.spec)
        loss = call.tokens.to_local(losses).clone() if call.options.reduction == "none" else losses.sum()
        if any(call.needs):
            ctx.call, ctx.factor = call, factor
            # Handed out once, so kept beside the saved tensors, which a retained graph may read twice.
            ctx.gradients = None if grad_weights is None else gradients
            ctx.save_for_backward(hidden, weight, bias, stats)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return None, None, None, None
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients, grad_loss = _recompute(ctx, grad_loss)
        scale_hidden = ctx.call.hidden_grad_scale / ctx.factor
        for gradient, host_factor in zip(gradients, (scale_hidden, 1.0 / ctx.factor, 1.0 / ctx.factor), strict=True):
            if gradient is not None:
                ctx.call.rows.scale_(gradient, grad_loss, host_factor)
        return None, *gradients


def _recompute(ctx: Any, grad_loss: Tensor) -> tuple[Gradients, Tensor]:
    """Gradients from logits made again. For one upstream gradient a token it is folded into the rows' coefficients and
    the factor that is left is 1."""
    call: Call = ctx.call
    hidden, weight, bias, stats = ctx.saved_tensors
    if weight.untyped_storage().nbytes() < weight.numel() * weight.element_size() or weight.dim() != 2:
        raise RuntimeError(
            "the head's weight was freed or resharded between forward and backward (FSDP and ZeRO-3 do so outside of "
            "the module that owns it), and this backward needs it again: compute the loss inside the head module's "
            'forward, or use backward="forward" and call backward once'
        )
    weights = call.weights
    if call.options.reduction == "none":
        per_row = call.tokens.to_loop(grad_loss.contiguous(), fill=0.0)
        weights, grad_loss = weights.scaled(per_row), grad_loss.new_ones(())
    _, gradients = run_chunks(call, hidden, weight, bias, weights.scaled(ctx.factor * call.options.logit_scale), stats)
    return gradients, grad_loss
