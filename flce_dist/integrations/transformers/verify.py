"""Whether a model did with the head's output, its labels and its loss what the fused loss takes for granted."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .after_head import AfterHead

HOST_CHECKS = 4
"""Calls whose checks wait for a GPU; later ones are left to it."""


class UnsupportedForward(RuntimeError):
    """The model's forward did what a loss that is computed in its head cannot follow."""


_FRAMEWORKS = ("torch.distributed.", "deepspeed.", "accelerate.", "transformers.", "flce_dist.")
"""Whose hooks and autograd functions around a head move its output and its parameters, and change no value."""


def is_of_framework(function: Any) -> bool:
    """Whether a function, method or partial was written by one of the frameworks that wrap modules."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    # Not __module__, which functools.wraps copies from what it wraps.
    name = getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", None))
    return isinstance(name, str) and name.startswith(_FRAMEWORKS)


def check_gradient_hooks(name: str, head: Any) -> None:
    """
    Raises:
        UnsupportedForward: the head has backward hooks, which would be given the gradient of its logits.
    """
    for hook in (*head._backward_hooks.values(), *head._backward_pre_hooks.values()):
        raise UnsupportedForward(
            f"the head of {name} has the backward hook {getattr(hook, '__qualname__', hook)}, but there will be no "
            "gradient of its logits that it could be given: remove it, or hook what comes before the head"
        )


def check_graph(name: str, made: Any, logits: Tensor) -> None:
    """
    Raises:
        UnsupportedForward: `logits`, which the loss function was given, do not lead back to the graph's node `made` of
            what the head returned, or by an autograd function that may do anything to their gradient.
    """
    if (made is not None) != logits.requires_grad:
        without = "without their gradient (detach(), no_grad?)" if made is not None else "with a gradient of their own"
        raise UnsupportedForward(f"{name} gave its loss function logits {without}, but the loss has that of its head")
    node: Any = logits.grad_fn
    while node is not None and node is not made:
        function = getattr(type(node), "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
        if function is not None and not function.__module__.startswith(_FRAMEWORKS):
            raise UnsupportedForward(
                f"{name} changes its logits in another way than was declared, by the autograd function "
                f"{function.__qualname__}, whose gradient may be anything: leave it out while the loss is computed in "
                "the head"
            )
        node = next((each for each, _ in node.next_functions if each is not None), None)
    if node is not made:
        raise UnsupportedForward(f"{name} gave its loss function something else than what its head returned")


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
    message = f"{name} gave its loss function other labels than it was given, or did not shift them"
    if got.shape != given.shape:
        raise UnsupportedForward(message)
    _require((got == given.to(got.device)).all(), message, host)


def is_number(value: Any, other: Any) -> bool:
    """Whether both are the same Python number."""
    return isinstance(value, int | float) and value == other


def version_of(labels: Tensor | None) -> int | None:
    """How often a tensor was written to; None where torch does not count."""
    if labels is None or torch.compiler.is_compiling() or labels.is_inference():
        return None
    return labels._version


def check_unchanged(name: str, labels: Tensor | None, version: int | None) -> None:
    """
    Raises:
        UnsupportedForward: the model wrote to the labels, after the head's targets were made of them.
    """
    if labels is not None and version is not None and labels._version != version:
        raise UnsupportedForward(f"{name} changes its labels in place: change them before it is called")


DEVICE_MESSAGE_LENGTH = 254
"""Characters that torch allows a device-side assertion on a GPU; with more it raises, whatever the condition."""


def _require(condition: Tensor, message: str, host: bool, remedy: str = "") -> None:
    """Raises UnsupportedForward; without `host` on a GPU, and in a graph that is traced, an assertion of the device
    that nobody waits for."""
    if torch.compiler.is_compiling() or (condition.device.type != "cpu" and not host):
        torch._assert_async(condition, f"flce_dist: {message}"[:DEVICE_MESSAGE_LENGTH])
    elif not condition:
        raise UnsupportedForward(message + remedy)
