"""What a call returns: the loss, and what `aux` asks for, found from the row statistics after the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import row_math
from .kernels.spec import MAX

if TYPE_CHECKING:
    from .op import Call


class LossOutput(NamedTuple):
    """The loss and what `aux` asked for (None otherwise). All but `loss` carry no gradient.

    Scalars are equal on all ranks of the group; per-token tensors have the shape of `target` on this rank.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    """The z-loss part of `loss`, reduced like it."""
    lse: Tensor | None = None
    """Per token: log-sum-exp over the global vocabulary, in nats."""
    accuracy: Tensor | None = None
    """Share of valid tokens whose arg-max is the target; 0 when there is none. 0-d."""
    predictions: Tensor | None = None
    """Per token: arg-max over the global vocabulary (int64), the lowest id of equals; given for ignored tokens too."""
    entropy: Tensor | None = None
    """Per token: entropy of the softmax over the global vocabulary, in nats."""
    num_valid: Tensor | None = None
    """Valid tokens of the group. 0-d int64."""


AUX_NAMES = LossOutput._fields[1:]
OF_ALL_TOKENS = ("lse", "predictions", "entropy")
"""Given for ignored tokens too."""


def is_per_token(name: str, reduction: str) -> bool:
    """Whether an output has an element for each token; it is a number of the group otherwise."""
    return name in OF_ALL_TOKENS or (name == "z_loss" and reduction == "none")


def aux_dtype(name: str, loss_dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if name in ("predictions", "num_valid") else loss_dtype


def aux_value(name: str, call: Call, stats: Tensor) -> Tensor:
    """An output, from global statistics `[K, N]`: `[]`, or `[N]` in loop order where `is_per_token`."""
    spec, valid = call.spec, call.inputs.valid
    if name == "z_loss":
        losses = row_math.z_losses(stats, call.inputs.coefficients, valid, spec)
        return losses if is_per_token(name, call.options.reduction) else losses.sum()
    if name == "lse":
        largest = stats[MAX]
        return torch.where(largest.isinf(), largest, row_math.log_sum_exp(stats))
    if name == "predictions":
        return row_math.predictions(stats, spec)
    if name == "entropy":
        return row_math.entropies(stats, spec)
    if name == "num_valid":
        return valid.sum()
    assert name == "accuracy"
    hits = (valid & (row_math.predictions(stats, spec) == call.inputs.ids)).sum()
    return hits.to(stats.dtype) / valid.sum().clamp(min=1)
