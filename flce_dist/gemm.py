"""The three matrix products of a chunk, each into memory that exists already, and the accumulation of the weight's
gradient.

The vendor's GEMM is 2 to 4 times faster than a fused Triton one on an H200, which is why logits of one chunk are
stored at all. When the output is wider than the operands (float32 logits, float32 accumulation), a GPU multiplies the
16-bit operands as they are (`out_dtype`); a CPU has no such kernel, and the operands are widened there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from .buffers import span
from .plan import first_part

# A policy of selective activation checkpointing that keeps products would keep our buffer, which is written over, and
# would not write the one of the recomputation.
SAC_IGNORED_OPS.update(
    getattr(op, name) for op in (torch.ops.aten.mm, torch.ops.aten.addmm) for name in ("out", "dtype_out")
)


def mm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out = a @ b`; `out` may be wider than the operands."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def addmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b`; `out` may be wider than the operands."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)


def logits_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> None:
    """`out = scale * (x @ weight.T + bias)`, with scale and bias in the GEMM's epilogue where it has one."""
    if out.dtype != x.dtype:
        mm_into(out, x, weight.t())
        if bias is not None:
            out += bias
        if scale != 1.0:
            out *= scale
    elif bias is not None:
        torch.addmm(bias, x, weight.t(), beta=scale, alpha=scale, out=out)
    elif scale != 1.0:
        torch.addmm(out, x, weight.t(), beta=0.0, alpha=scale, out=out)
    else:
        torch.mm(x, weight.t(), out=out)


_COMMON_ROWS = 4096


def common_row(weight: Tensor) -> Tensor:
    """A vector `[H]` that a trained head's rows have in common: their mean, estimated from some thousand of them."""
    rows = weight[:: max(1, weight.shape[0] // _COMMON_ROWS)]
    # Not `mean`, whose temporaries are twice the rows in float32.
    return torch.mv(rows.t(), rows.new_full((rows.shape[0],), 1 / max(1, rows.shape[0])))


def hidden_grad_into(
    out: Tensor, grad_logits: Tensor, weight: Tensor, residual: Tensor | None, common: Tensor | None
) -> None:
    """`out = grad_logits @ weight`, less `residual [C]` times `common [H]` when given.

    The rows of a trained head share a large component, which cancels in the exact product: the gradients of a row's
    logits sum to 0. What rounding added to them, `residual` in all, does not cancel, and times the common component it
    is most of the error of 16-bit gradients.
    """
    if residual is None or common is None:
        mm_into(out, grad_logits, weight)
    else:
        torch.mul(residual.neg()[:, None], common, out=out)
        addmm_into(out, grad_logits, weight)


class WeightGradient:
    """The gradient `[num_rows, H]` of a shard, and of its bias `[num_rows]`, over the chunks.

    The first chunk writes and later ones accumulate in place, so nothing is filled with zeros first, except rows of
    padding (those past `num_columns`) and everything when there is no chunk at all.
    """

    def __init__(
        self, weight: Tensor, num_columns: int, accum_dtype: torch.dtype, needs_weight: bool, needs_bias: bool
    ) -> None:
        self._num_columns = num_columns
        self._first = True
        self.weight = torch.empty(weight.shape, dtype=accum_dtype, device=weight.device) if needs_weight else None
        self.bias: Tensor | None = None
        if needs_bias:  # a column sum costs no bandwidth worth saving: never in 16 bits
            bias_dtype = torch.promote_types(weight.dtype, torch.float32)
            self.bias = torch.zeros(weight.shape[0], dtype=bias_dtype, device=weight.device)

    def add(self, grad_logits: Tensor, x: Tensor, split: bool = False) -> None:
        """Adds a chunk: `grad_logits [C, num_columns]`, `x [C, H]`. With `split` in two GEMMs (`plan.first_part`)."""
        if self.weight is not None:
            into = mm_into if self._first else addmm_into
            first = first_part(self._num_columns, x.shape[1]) if split else self._num_columns
            for start, stop in ((0, first), (first, self._num_columns)):
                if start < stop:
                    into(span(self.weight, start, stop), span(grad_logits, start, stop, dim=1).t(), x)
        if self.bias is not None:
            self.bias[: self._num_columns] += grad_logits.sum(0, dtype=self.bias.dtype)
        self._first = False

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the shard `[num_rows, H]`, in the dtype of accumulation, and of its bias `[num_rows]`, in at
        least float32; None where not needed. Rows of padding are 0."""
        if self.weight is not None and (self._first or self._num_columns < self.weight.shape[0]):
            self.weight[0 if self._first else self._num_columns :].zero_()
        return self.weight, self.bias
