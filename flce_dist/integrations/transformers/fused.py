"""How a causal LM of transformers computes its loss in its head, once `apply` has given it these forwards.

No forward is copied. The model's forward is wrapped to put the labels aside; the head's forward, which runs inside
whatever FSDP, ZeRO or tensor parallelism wrapped around it, computes the loss from them and returns it as if it were
the logits; and `model.loss_function`, to which the model hands those, returns it. So the loss is the tensor that the
head module returned, which is what those frameworks need.

What the model does with logits in between (softcap, factors) happens to that tensor too. So its value is not the loss
but a probe, of one sign in one call and of the other in the next: the value that arrives at the loss function is
compared with what the declared transformation makes of the probe. The gradient of the loss flows through the tensor;
its value travels beside it. And it is a `StandIn`, which raises when the model uses it for anything else.

A forward with labels, in order, and what each step leaves in `FusedLoss.call` (a `_Call`):

    model_forward    makes the call: labels, target, probe; runs the model's own forward
    head_forward     computes the loss (output); returns the probe, with the loss's gradient (node)
    keep_returned    a hook of the head behind all others: what its module returned (returned)
    loss_function    compares what became of that with what was declared (received, delivered); returns the loss
    model_forward    takes the call away, and leaves its output and target in the handle
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...outputs import LossOutput
from ...row_math import scaled_and_capped
from . import after_head, heads
from .no_logits import NO_LOGITS, with_logits
from .stand_in import StandIn, plain
from .verify import (
    HOST_CHECKS,
    UnsupportedForward,
    check_after_head,
    check_gradient_hooks,
    check_graph,
    check_labels,
    check_unchanged,
    is_number,
    version_of,
)

ATTRIBUTE = "_flce_fused_loss"
_SHARED_WITH_COPIES = ("signature", "output", "target", "on_remove")


@dataclass
class _Call:
    """One forward of the model with labels."""

    labels: Tensor
    """As the loss function will be given them."""
    target: Tensor
    """Shifted: what the head predicts."""
    num_items: Tensor | float | None
    shift_labels: Tensor | None
    keep: int | Tensor
    """`logits_to_keep`, when the caller asked for logits."""
    probe: float
    """What the head returns."""
    versions: tuple[int | None, int | None]
    """Of `labels` and `shift_labels`, which count writes to them."""
    output: LossOutput | None = None
    logits: Tensor | None = None
    node: Any = None
    """In the graph, of what the head's forward returned; None without gradient, and in what is compiled."""
    returned: Tensor | None = None
    """What the head module returned, after the hooks of all frameworks."""
    received: Tensor | None = None
    """What the loss function was given as logits."""
    delivered: bool = False


@dataclass(eq=False)
class Head:
    """What a head keeps: the forward it had, and the hook it was given."""

    shared: FusedLoss
    module: nn.Module
    plain_forward: Callable[..., Any]
    own_forward: bool
    hook: int = -1


@dataclass(eq=False)
class FusedLoss:
    """What `apply` returns; it is shared by the model and its heads."""

    model: Any
    after: after_head.AfterHead
    ignore_index: int
    aux: tuple[str, ...]
    eval_logits: bool
    data_ranks: int
    """Ranks with tokens of their own whose loss is one (`hidden_layout="sharded"`)."""
    plain_forward: Callable[..., Any]
    own_forward: bool
    signature: inspect.Signature
    """Of the class's forward."""
    extra_name: str
    """Of its **kwargs."""
    sharded_here: bool = False
    heads: list[Head] = field(default_factory=list)
    num_calls: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """With labels, in training and in evaluation."""
    on_remove: list[Callable[[], None]] = field(default_factory=list)
    call: _Call | None = None
    output: LossOutput | None = None
    """Of the last forward with labels: the loss, detached, and what `aux` asked for."""
    target: Tensor | None = None
    """Of the last forward with labels: the next token of each."""

    def remove(self) -> None:
        """Gives the model the forwards and the loss function it had. A head that `apply` sharded becomes a full
        `nn.Linear` again (one all-gather a parameter, on all ranks of its group)."""
        if vars(self.model).get(ATTRIBUTE) is not self:
            raise ValueError("this loss was removed already")
        for head in list(self.model.modules()):  # copies that PEFT made of a head are among them
            mine = vars(head).get(ATTRIBUTE)
            if not isinstance(mine, Head):
                continue
            head._forward_hooks.pop(mine.hook)
            delattr(head, ATTRIBUTE)
            _restore(head, mine.own_forward, mine.plain_forward)
            heads.take_loss(head)
        if self.sharded_here:
            heads.to_linear_head(self.model, self.heads[0].module)
        del self.model._loss_function
        delattr(self.model, ATTRIBUTE)
        _restore(self.model, self.own_forward, self.plain_forward)
        for undo in self.on_remove:
            undo()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model with a fused loss cannot be pickled: save its state dict (save_pretrained), or remove() it first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedLoss:
        """A copied model has a loss of its own; a copied head (PEFT's `modules_to_save`) stays with its model."""
        if id(self.model) not in memo:
            return self
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        for name, value in vars(self).items():
            setattr(clone, name, value if name in _SHARED_WITH_COPIES else copy.deepcopy(value, memo))
        return clone


def base_model(model: Any) -> Any:
    """The model of transformers inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    shared: FusedLoss = getattr(self, ATTRIBUTE)
    bound = shared.signature.bind_partial(self, *args, **kwargs)
    given = bound.arguments
    extra = given.get(shared.extra_name, {})
    labels, shift_labels = given.get("labels"), given.get("shift_labels", extra.get("shift_labels"))
    if labels is None and shift_labels is None:
        return shared.plain_forward(*args, **kwargs)
    if shared.eval_logits and not self.training:
        return shared.plain_forward(*args, **kwargs)
    keep = given.get("logits_to_keep", 0)
    if labels is None or not _is_default(keep):
        given["labels"] = shift_labels if labels is None else labels
        if "logits_to_keep" in given:
            given["logits_to_keep"] = 0
        args, kwargs = bound.args[1:], bound.kwargs
    call = _Call(
        labels=given["labels"],
        target=_shifted(given["labels"], shared.ignore_index) if shift_labels is None else shift_labels,
        num_items=given.get("num_items_in_batch", extra.get("num_items_in_batch")),
        shift_labels=shift_labels,
        keep=keep,
        probe=shared.after.probe(1 if shared.num_calls[self.training] % 2 else -1),
        versions=(version_of(given["labels"]), version_of(shift_labels)),
    )
    if not torch.compiler.is_compiling():  # a graph is for one number
        shared.num_calls[self.training] += 1
    shared.call = call
    try:
        outputs = shared.plain_forward(*args, **kwargs)
    except Exception as error:
        if call.returned is not None and not isinstance(error, UnsupportedForward):
            error.add_note(
                f"flce_dist: raised by {type(self).__name__} after its head had computed the loss in the place of "
                "logits: it does with its logits what this loss cannot follow"
            )
        raise
    finally:
        shared.call = None
    if not call.delivered:
        raise UnsupportedForward(
            f"{type(self).__name__} did not call its loss_function, though it was given labels (TRL's SFTTrainer "
            "computes a loss of its own: apply_to_trainer gives it this one)"
        )
    assert call.output is not None
    shared.output, shared.target = call.output, call.target
    return with_logits(outputs, call.received, NO_LOGITS if call.logits is None else call.logits)


def head_forward(self: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # the name that nn.Linear gives it
    mine: Head = getattr(self, ATTRIBUTE)
    hidden = input
    shared, plain = mine.shared, mine.plain_forward
    call = shared.call
    if call is None or args or kwargs:
        outputs = plain(hidden, *args, **kwargs)
        return outputs if args or kwargs else heads.full_logits(self, outputs)
    if call.output is not None:
        raise UnsupportedForward(
            f"{type(shared.model).__name__} called its head twice in one forward (multi-token prediction?): which of "
            "the two the labels belong to is not known"
        )
    if hidden.shape[:-1] != call.target.shape:
        raise UnsupportedForward(
            f"the head of {type(shared.model).__name__} was given hidden states {tuple(hidden.shape)} for labels "
            f"{tuple(call.target.shape)}: one for each token is needed"
        )
    weight: Any = self.weight
    if weight.is_meta:
        raise UnsupportedForward(
            "the head's weight is offloaded (device_map) and comes back for the stock forward only: keep the head on a "
            "device, or call apply() before accelerate's dispatch_model()"
        )
    hidden = hidden.to(weight.device)  # the body's last device may be another
    normalizer = call.num_items
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.reshape(()).to(hidden.device)
    if normalizer is not None:
        # The caller multiplies such a loss by the number of data-parallel ranks, because their gradients will be
        # averaged. A loss that is the sum over all ranks already is divided by it instead.
        normalizer = normalizer * shared.data_ranks
    result = plain(hidden, call.target.to(hidden.device), normalizer=normalizer, aux=shared.aux)
    loss = result.loss if isinstance(result, LossOutput) else result
    call.output = result._replace(loss=loss.detach()) if isinstance(result, LossOutput) else LossOutput(loss.detach())
    if not _is_default(call.keep):
        with torch.no_grad():
            kept = hidden[:, slice(-call.keep, None) if isinstance(call.keep, int) else call.keep]
            raw = heads.full_logits(self, plain(kept))
            call.logits = scaled_and_capped(raw, shared.after.scale, shared.after.softcap)
    check_gradient_hooks(type(shared.model).__name__, self)
    hooks: Any = self._forward_hooks
    if [*hooks][-1] != mine.hook:  # frameworks added some since: what they return is what the model gets
        hooks.move_to_end(mine.hook)
    made = _WithValue.apply(loss, torch.full_like(loss.detach(), call.probe), type(shared.model).__name__)
    call.node = None if torch.compiler.is_compiling() else made.grad_fn
    return made


def keep_returned(module: nn.Module, args: Any, output: Any) -> Any:
    shared: FusedLoss = getattr(module, ATTRIBUTE).shared
    call = shared.call
    if call is None:
        return None
    if not isinstance(output, StandIn) and not torch.compiler.is_compiling():  # of a hook
        output = StandIn.of(output, type(shared.model).__name__)
    call.returned = output
    return output


def loss_function(
    self: Any,
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int | None = None,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    shared: FusedLoss = getattr(self, ATTRIBUTE)
    call, name = shared.call, type(self).__name__
    if call is None:
        ignore_index = shared.ignore_index if ignore_index is None else ignore_index
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if call.returned is None or call.output is None:
        raise UnsupportedForward(
            f"{name} did not call the head that apply() was given for its loss; was it replaced since (a resized "
            "vocabulary, an adapter)? Then remove() this loss and apply() again"
        )
    if call.delivered:
        raise UnsupportedForward(f"{name} called its loss function twice in one forward: the head computed one loss")
    if isinstance(call.returned, StandIn):
        if not isinstance(logits, StandIn):
            raise UnsupportedForward(f"{name} gave its loss function something else than what its head returned")
        logits.use("its loss function")
        check_graph(name, call.node, logits)
    host = shared.num_calls[self.training] <= HOST_CHECKS and not torch.compiler.is_compiling()
    check_after_head(name, shared.after, call.probe, plain(logits), host)
    if labels is not None and labels is not call.labels:
        check_labels(name, labels, call.labels, host)
    if shift_labels is not None and shift_labels is not call.shift_labels:
        check_labels(name, shift_labels, call.target, host)
    for given, version in zip((call.labels, call.shift_labels), call.versions, strict=True):
        check_unchanged(name, given, version)
    if ignore_index not in (None, shared.ignore_index):
        raise UnsupportedForward(f"ignore_index={ignore_index} was passed, but {shared.ignore_index} to apply()")
    if call.shift_labels is not None and shift_labels is None:
        raise UnsupportedForward(f"{name} was given shift_labels, but does not hand them to its loss function")
    if call.num_items is not None and num_items_in_batch is None:
        raise UnsupportedForward(f"{name} was given num_items_in_batch, but does not hand it to its loss function")
    if num_items_in_batch is not call.num_items and not is_number(num_items_in_batch, call.num_items):
        raise UnsupportedForward(f"{name} gives its loss function another num_items_in_batch than it was given")
    call.received, call.delivered = logits, True
    return _WithValue.apply(call.returned, call.output.loss, None)


class _WithValue(torch.autograd.Function):
    """A 0-d tensor with the gradient of one and the value of another; with a model's name, a `StandIn` for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, model: str | None) -> Tensor:
        ctx.dtype = tensor.dtype
        value = value.clone()
        return value if model is None or torch.compiler.is_compiling() else StandIn.of_head(value, model)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """The next token of each, and `ignore_index` for the last."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _is_default(keep: int | Tensor) -> bool:
    return isinstance(keep, int) and keep == 0


def _restore(module: nn.Module, own: bool, forward: Callable[..., Any]) -> None:
    del module.forward
    if own:
        module.forward = forward
