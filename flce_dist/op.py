"""The chunk loop and its autograd.

Letters: N rows of the loop (tokens of the group), H hidden, L columns of this rank's logits, C rows of a chunk.

Collectives with W > 1 ranks, for each chunk: one all-gather of `[K, C]` statistics (K = 4 without extras), and, where
the hidden states need a gradient, one reduction of `[C, H]`, which is started before the weight-gradient GEMM. A GEMM
holds the whole GPU until its last tiles, so the reduction runs beside the one after: that one is therefore made in two
parts, a short and a long one. Token-sharded hidden states add one all-gather of `[C/W, H]` of each rank for each chunk,
and for each call those of the targets and of given token weights, `[max_tokens]` of each rank.
Backward calls none, unless it recomputes: then the same for each chunk but for the statistics, and with token-sharded
hidden states and reduction "none" one all-gather of the upstream gradients, likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import collectives, row_math
from .buffers import in_memory, logits_buffer, span
from .checks import is_freed
from .gemm import WeightGradient, common_row, hidden_grad_into, logits_into
from .kernels.spec import RowCoefficients, RowSpec, stats_dtype
from .options import LossOptions, recomputes
from .plan import accumulation_dtype
from .shard import VocabShard
from .tokens import HiddenGradient, TokenLayout


class Needs(NamedTuple):
    """Which gradients are wanted. Whether `hidden` is, is the same on all ranks."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, *tensors: Tensor | None) -> Needs:
        """Those of `hidden, weight, bias` as they are now."""
        grad = torch.is_grad_enabled()
        return cls(*(grad and tensor is not None and tensor.requires_grad for tensor in tensors))


class RowInputs(NamedTuple):
    """What the rows know besides their logits, in loop order: global target ids `[N]`, the same as columns of this
    rank, which rows are valid, the coefficients of their losses, and where smoothing needs them class weights `[L]` and
    the sum of all their magnitudes (of V times 1 without class weights)."""

    ids: Tensor
    target: Tensor
    valid: Tensor
    coefficients: RowCoefficients
    column_weight: Tensor | None
    column_weight_sum: Tensor | int

    def versions(self) -> list[int]:
        """How often what may be the caller's own memory was written to; torch does not count it in inference mode."""
        owned = (self.ids, self.target, self.column_weight)
        return [tensor._version for tensor in owned if tensor is not None and not tensor.is_inference()]


@dataclass(eq=False)
class Call:
    """What one call knows besides its differentiable tensors."""

    options: LossOptions
    shard: VocabShard
    tokens: TokenLayout
    kernels: ModuleType
    spec: RowSpec
    needs: Needs
    repeatable: bool
    """Whether a second backward may communicate: it runs on all ranks, or the ranks never said."""
    reduce_hidden_grad: bool
    hidden_grad_scale: float
    make_inputs: Callable[[], RowInputs]

    @cached_property
    def inputs(self) -> RowInputs:
        """Made at the first use: behind the first GEMM, or before it in float16 (`grad_factor`). With token-sharded
        hidden states one all-gather of the targets, and one of the token weights if given."""
        return self.make_inputs()

    def hidden_gradient(self, hidden: Tensor) -> HiddenGradient:
        # A trained head's partial gradients share a large component, which cancels only in their sum.
        narrow = hidden.dtype in (torch.bfloat16, torch.float16)
        reduce_dtype = self.options.hidden_grad_reduce_dtype or (torch.float32 if narrow else hidden.dtype)
        return self.tokens.hidden_gradient(hidden, reduce_dtype, self.reduce_hidden_grad)

    def weight_gradient(self, weight: Tensor, needs: Needs) -> WeightGradient:
        dtype = accumulation_dtype(self.options.accum_dtype, weight.dtype, len(self.tokens.chunks))
        return WeightGradient(weight, self.shard.num_columns, dtype, needs.weight, needs.bias)


def grad_factor(call: Call, dtype: torch.dtype) -> Tensor | float:
    """Power of two, a normal float32, that fp16 gradients of forward carry until backward, where the loss scale
    arrives: a mean's `p / N` would underflow before. It brings the largest coefficient of a logit to about 1, so that
    nothing overflows instead."""
    if dtype != torch.float16 or call.tokens.num_rows == 0:
        return 1.0
    target, uniform, square = call.inputs.coefficients
    coefficient = target.abs()
    if uniform is not None:
        coefficient = coefficient + uniform.abs() * call.inputs.column_weight_sum
    if square is not None:
        coefficient = coefficient + 2.0 * square.abs()  # times the log-sum-exp, which is not known yet
    largest = coefficient.amax() * abs(call.options.logit_scale)
    return torch.where(largest > 0, torch.exp2(torch.floor(-torch.log2(largest)).clamp(-126, 126)), 1.0)


class Gradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def run_chunks(
    call: Call,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_scale: Tensor | float | None,
    known_stats: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """All chunks: global statistics `[K, N]`, and the gradients that `call.needs`, of `grad_scale` (a number or `[N]`)
    times the losses' sum; none when it is None.

    With `known_stats` (of an earlier forward) they are not computed and not exchanged again.
    """
    columns = call.shard.num_columns
    weight_rows, bias_rows = span(weight, 0, columns), None if bias is None else span(bias, 0, columns)
    logits_dtype = call.options.logits_dtype or hidden.dtype
    buffer = logits_buffer(call.tokens.chunk_rows, columns, logits_dtype, hidden.device)
    stats = known_stats
    if stats is None:
        stats = buffer.new_empty(call.spec.num_stats, call.tokens.num_rows, dtype=stats_dtype(logits_dtype))
    needs = call.needs if grad_scale is not None else Needs(False, False, False)
    hidden_grad = call.hidden_gradient(hidden) if needs.hidden else None
    weight_grad = call.weight_gradient(weight, needs)
    mean_row = common_row(weight_rows) if needs.hidden and logits_dtype.itemsize > hidden.dtype.itemsize else None

    for start, stop in call.tokens.chunks:
        x = call.tokens.hidden_chunk(hidden, start, stop)
        logits = span(buffer, 0, stop - start)
        logits_into(logits, x, weight_rows, bias_rows, call.options.logit_scale)
        if start == 0:  # not before the loop: these small operations hide behind the first GEMM
            coefficients = None if grad_scale is None else call.inputs.coefficients.scaled(grad_scale)
        chunk_coefficients = None if coefficients is None else coefficients.slice(start, stop)
        grad = logits if logits.dtype == x.dtype else logits.view(x.dtype)[:, :columns]
        residual = None if mean_row is None else stats.new_empty(stop - start)
        target, chunk_stats = span(call.inputs.target, start, stop), span(stats, start, stop, dim=1)
        stats_and_grad_rows(
            call, logits, grad, target, chunk_stats, chunk_coefficients, known_stats is not None, residual
        )
        if hidden_grad is not None:
            part = hidden_grad.chunk(start, stop)
            hidden_grad_into(part, grad, weight_rows, residual, mean_row)
            hidden_grad.start_reduce(part, start, stop)
        if needs.weight or needs.bias:
            weight_grad.add(grad, x, split=hidden_grad is not None and hidden_grad.is_reduced)
        del x  # so that a gathered chunk takes the memory of the one before

    return stats, Gradients(None if hidden_grad is None else hidden_grad.finish(), *weight_grad.finish())


def stats_and_grad_rows(
    call: Call,
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    stats: Tensor,
    coefficients: RowCoefficients | None,
    stats_known: bool,
    residual: Tensor | None,
) -> None:
    """Writes a chunk's global statistics `[K, C]`, unless they are known, and with `coefficients` its gradient.

    One all-gather of `[K, C]` with more than one rank, unless the statistics are known.
    """
    kernels, spec, group, column_weight = call.kernels, call.spec, call.tokens.group, call.inputs.column_weight
    if not stats_known:
        if group is None and coefficients is not None:
            kernels.row_stats_grad_(logits, grad, target, stats, coefficients, spec, column_weight, residual)
            return
        if group is None:
            kernels.row_stats(logits, target, stats, spec, column_weight)
        else:
            local = torch.empty_like(stats, memory_format=torch.contiguous_format)
            kernels.row_stats(logits, target, local, spec, column_weight, call.shard.start)
            kernels.combine(collectives.all_gather(local, group), stats, spec)
    if coefficients is not None:
        kernels.row_grad_(logits, grad, target, stats, coefficients, spec, column_weight, residual)


class Computed(NamedTuple):
    """`loss` is `[]`, or `[n]` with reduction "none"; `stats [K, N]` in loop order; whether each valid target is on
    exactly one rank (bool `[]`); gradients for an upstream gradient of `factor`, where forward makes them."""

    loss: Tensor
    stats: Tensor
    owned: Tensor
    gradients: Gradients | None
    factor: Tensor | float


def compute(call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Computed:
    """The forward pass."""
    now = any(call.needs) and not recomputes(call.options, hidden.dtype)
    factor = grad_factor(call, hidden.dtype) if now else 1.0
    grad_scale = factor * call.options.logit_scale if now else None
    stats, gradients = run_chunks(call, hidden, weight, bias, grad_scale)
    coefficients, valid = call.inputs.coefficients, call.inputs.valid
    if call.options.reduction == "none":
        # Cloned: an autograd function's output that is a view cannot be written to.
        loss = call.tokens.to_local(row_math.row_losses(stats, coefficients, valid, call.spec)).clone()
        owned = ~row_math.badly_owned(stats, valid).any()
    else:
        loss, owned = call.kernels.loss_sum(stats, coefficients, valid, call.spec)
    return Computed(loss, stats, owned, gradients if now else None, factor)


def recompute(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor | None, grad_loss: Tensor
) -> Gradients:
    """Gradients from logits made again, and from statistics made again when they are None. The upstream gradient, one
    or one a token, is folded into the rows' coefficients."""
    if call.options.reduction == "none":
        grad_loss = call.tokens.to_loop(grad_loss.contiguous(), fill=0.0)
        # What the caller computes from losses of 0 may be infinite: the root's derivative is.
        grad_loss = torch.where(call.inputs.valid, grad_loss, 0.0)
    _, gradients = run_chunks(call, hidden, weight, bias, grad_loss * call.options.logit_scale, stats)
    if gradients.hidden is not None and call.hidden_grad_scale != 1.0:
        gradients.hidden.mul_(call.hidden_grad_scale)
    return gradients


def scale_gradients_(call: Call, gradients: Gradients, grad_loss: Tensor, factor: Tensor | float) -> None:
    """Gradients for an upstream gradient of `factor` become those for `grad_loss`, in place."""
    grad_loss = in_memory(grad_loss)
    scale = grad_loss if isinstance(factor, float) and factor == 1.0 else grad_loss / factor
    pairs = zip(gradients, (call.hidden_grad_scale, 1.0, 1.0), strict=True)
    call.kernels.scale_([(gradient, host_factor) for gradient, host_factor in pairs if gradient is not None], scale)


def check_derivative(grad_loss: Tensor) -> None:
    """
    Raises:
        RuntimeError: in a backward with create_graph, whose result would lack the second derivative.
        NotImplementedError: for a batch of upstream gradients.
    """
    if torch._C._functorch.is_legacy_batchedtensor(grad_loss) or torch._C._functorch.is_batchedtensor(grad_loss):
        raise NotImplementedError(
            "linear_cross_entropy takes one upstream gradient: call autograd.grad once for each instead of with "
            "is_grads_batched, and torch.autograd.functional.jacobian without vectorize"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: call backward or autograd.grad without create_graph"
        )


class LinearCrossEntropy(torch.autograd.Function):
    """`(call, hidden [n, H], weight [rows, H], bias [rows] | None) -> (loss, stats, owned)`, as in `Computed`; only
    `loss` is differentiable."""

    @staticmethod
    def forward(ctx: Any, call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        loss, stats, owned, gradients, factor = compute(call, hidden, weight, bias)
        if any(call.needs):
            # Gradients are handed out once, so they stay beside the saved tensors, which may be read twice.
            ctx.call, ctx.gradients, ctx.factor = call, gradients, factor
            ctx.save_for_backward(hidden, weight, bias, stats)
            ctx.versions = call.inputs.versions()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats, owned)
        return loss, stats, owned

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return None, None, None, None
        check_derivative(grad_loss)
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None:
            scale_gradients_(ctx.call, gradients, grad_loss, ctx.factor)
            return None, *gradients
        if not ctx.call.repeatable:
            raise RuntimeError(
                "this second backward would gather token-sharded hidden states, and ranks of the group that want no "
                'gradient run none: pass backward="recompute", or check_ranks="always" if weight requires grad on all'
            )
        hidden, weight, bias, stats = ctx.saved_tensors
        if ctx.call.inputs.versions() != ctx.versions:
            raise RuntimeError(
                "target or class_weight was modified in place between forward and backward, and this backward needs "
                "it again: clone what is to be overwritten"
            )
        if is_freed(weight) or weight.dim() != 2:
            raise RuntimeError(
                "the head's weight was freed or resharded between forward and backward (FSDP and ZeRO-3 do so outside "
                "of the module that owns it), and this backward needs it again: compute the loss inside the head "
                'module\'s forward, or use backward="forward" and call backward once'
            )
        return None, *recompute(ctx.call, hidden, weight, bias, stats, grad_loss)
