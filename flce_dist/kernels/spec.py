"""What the row kernels are asked for, and the layout of what they return.

Letters: C rows of a chunk, L columns of this rank's logits, W ranks, K statistics a row.

Both implementations (`torch_rows`, the specification and the CPU path, and `triton_rows`) have these functions:

    row_stats(logits[C, L], target[C], stats[K, C], spec, column_weight, first_column)
    combine(gathered[W, K, C], stats[K, C], spec)
    row_grad_(logits[C, L], grad[C, L], target[C], stats[K, C], coefficients, spec, column_weight, residual[C])
    row_stats_grad_(logits, grad, target, stats, coefficients, spec, column_weight, residual)
    token_shares(ids[N], ignore_index, mean, dtype) -> (valid[N] bool, share[N])
    loss_sum(stats[K, N], coefficients, valid[N], spec) -> (loss [], owned [] bool)
    scale_(gradients, factor [])

`row_stats`, `combine` and `row_stats_grad_` write `stats`, which may be columns of a wider tensor; the latter is
`row_stats` and `row_grad_` in one, for a single rank. `target` holds columns of this rank (int64; outside `[0, L)` when
the target is another rank's or ignored). `logits` comes from `buffers.logits_buffer`; `row_stats` may change it in ways
that `row_grad_` does not depend on, and that one overwrites it with its gradient: `grad` is the same storage, seen in
the dtype of the GEMM operands. Where that is narrower and `residual` is given, it gets each row's sum of what rounding
added. Statistics are float32, and float64 for float64 logits. `token_shares` says which ids are not `ignore_index`, and
what share of the loss each of these has: 1, or for a mean 1 over their number; the others have 0. `loss_sum` also says
whether each valid row's target is on exactly one rank. `scale_` multiplies contiguous gradients, each given with a host
number, by that number and a 0-d tensor that the host does not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers import span

MAX, OTHERS, TARGET, OWNED = range(4)
"""Rows of the statistics: max of the logits z; sum of exp(z - max) over the columns other than the target; the target's
z (0 where it is not here); 1 where the target is one of this rank's columns.

The target stays out of the sum because a confident model's 1 - p is the sum of the others, and would drown in the
rounding of the whole: with p = 1 - 1e-7 neither the loss nor the gradient of that row has a digit left in float32."""

NO_ID = 2**30
"""Stands, or a larger number does, for the arg-max of a row whose logits are all nan."""


@dataclass(frozen=True)
class RowSpec:
    """The compile-time flags of the row kernels.

    Args:
        softcap: z = softcap * tanh(u / softcap); None: z = u.
        uniform: also return sum_j c_j (z_j - max) and sum_j c_j (c: class weights, 1 when absent), which label
            smoothing needs, and take its gradient.
        argmax: also return the global id of the largest z, the lowest of equals.
        entropy: also return sum_j (z_j - max) exp(z_j - max), over the columns other than the target.
        token_scaling: multiply the gradient by the target's probability.
    """

    softcap: float | None = None
    uniform: bool = False
    argmax: bool = False
    entropy: bool = False
    token_scaling: bool = False

    @cached_property
    def stat_rows(self) -> dict[str, int]:
        """The row of each statistic that a flag asks for, -1 without the flag, by the name of the Triton kernels'
        constant."""
        row = count(OWNED + 1)
        asked = {"WEIGHTED": self.uniform, "WEIGHT": self.uniform, "ARGMAX": self.argmax, "ENTROPY": self.entropy}
        return {name: next(row) if on else -1 for name, on in asked.items()}

    @property
    def weighted_sum_row(self) -> int:
        return self.stat_rows["WEIGHTED"]

    @property
    def weight_sum_row(self) -> int:
        return self.stat_rows["WEIGHT"]

    @property
    def argmax_row(self) -> int:
        return self.stat_rows["ARGMAX"]

    @property
    def entropy_row(self) -> int:
        return self.stat_rows["ENTROPY"]

    @cached_property
    def num_stats(self) -> int:
        return OWNED + 1 + sum(row >= 0 for row in self.stat_rows.values())


class RowCoefficients(NamedTuple):
    """Per-row coefficients `[C]`, or `[N]`, in the dtype of the statistics:

        loss = target * (lse - z_y) + uniform * sum_j c_j (lse - z_j) + square * lse^2

    and so the gradient of z is `A * p_j - target * [j = y] - uniform * c_j` with
    `A = target + uniform * sum_j c_j + 2 * square * lse`. A row whose coefficients are all 0 gets gradient 0, whatever
    its logits hold. `uniform` and `square` are None when the feature is off.
    """

    target: Tensor
    uniform: Tensor | None
    square: Tensor | None

    def slice(self, start: int, stop: int) -> RowCoefficients:
        return self._each(lambda w: span(w, start, stop))

    def scaled(self, factor: Tensor | float) -> RowCoefficients:
        return self if isinstance(factor, float) and factor == 1.0 else self._each(lambda w: w * factor)

    def _each(self, change: Callable[[Tensor], Tensor]) -> RowCoefficients:
        uniform = None if self.uniform is None else change(self.uniform)
        return RowCoefficients(change(self.target), uniform, None if self.square is None else change(self.square))


def stats_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if logits_dtype == torch.float64 else torch.float32
