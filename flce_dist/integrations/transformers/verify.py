"""Whether a model did with the head's output, its labels and its loss what the fused loss takes for granted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .after_head import AfterHead

HOST_CHECKS = 4
"""Calls whose checks wait for a GPU; later ones are left to it."""


class UnsupportedForward(RuntimeError):
    """The model's forward did what a loss that is computed in its head cannot follow."""


def check_after_head(name: str, after: AfterHead, probe: float, logits: Tensor, host: bool) -> None:
    """
    Raises:
        UnsupportedForward: `logits`, which the loss function was given, are not what was declared of the probe.
    """
    expected = after(probe)
    message = (
        f"{name} changes its logits after the head in another way than was declared (logit_scale={after.scale:g}, "
        f"softcap={after.softcap}): {{}}"
    )
    remedy = (
        ". Pass apply() the logit_scale and softcap of softcap * tanh(logit_scale * logits / softcap); what has not "
        "this form (an adapter on the head, for one) cannot be computed without logits"
    )
    if logits.dim() != 0:
        raise UnsupportedForward(message.format(f"the result has shape {tuple(logits.shape)}") + remedy)
    ulps = 4 if logits.dtype.itemsize >= 4 else 2
    close = (logits.detach() - expected).abs() <= ulps * torch.finfo(logits.dtype).eps * abs(expected)
    if host and not close:
        raise UnsupportedForward(message.format(f"{probe:g} became {logits.item():g} instead of {expected:g}") + remedy)
    _require(close, message.format(f"{probe:g} did not become {expected:g}"), host, remedy)


def check_labels(name: str, got: Tensor, given: Tensor, host: bool) -> None:
    """
    Raises:
        UnsupportedForward: the loss function got other labels than the model.
    """
    message = f"{name} gave its loss function other labels than it was given"
    if got.shape != given.shape:
        raise UnsupportedForward(message)
    _require((got == given.to(got.device)).all(), message, host)


def is_number(value: Any, other: Any) -> bool:
    """Whether both are the same Python number."""
    return isinstance(value, int | float) and value == other


def version_of(labels: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count."""
    return None if torch.compiler.is_compiling() or labels.is_inference() else labels._version


def check_unchanged(name: str, labels: Tensor, version: int | None) -> None:
    """
    Raises:
        UnsupportedForward: the model wrote to the labels, after the head's targets were made of them.
    """
    if version is not None and labels._version != version:
        raise UnsupportedForward(f"{name} changes its labels in place: change them before it is called")


DEVICE_MESSAGE_LENGTH = 254
"""Characters that torch allows a device-side assertion on a GPU; with more it raises, whatever the condition."""


def _require(condition: Tensor, message: str, host: bool, remedy: str = "") -> None:
    """Raises UnsupportedForward; without `host`, on a GPU, a device-side assertion that nobody waits for."""
    if condition.device.type != "cpu" and not host:
        torch._assert_async(condition, f"flce_dist: {message}"[:DEVICE_MESSAGE_LENGTH])
    elif not condition:
        raise UnsupportedForward(message + remedy)
