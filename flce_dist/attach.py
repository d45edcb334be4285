"""A linear head that a framework owns (wraps, shards or built) learns to compute the loss in its own forward."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch.distributed as dist
from torch import Tensor, nn

from . import collectives
from .api import linear_cross_entropy
from .head import VocabParallelHead, bound_arguments
from .options import HiddenLayout, LossOptionsDict, options_of
from .outputs import LossOutput
from .shard import VocabShard

_ATTRIBUTE = "_flce_loss"


@dataclass(frozen=True)
class HeadLoss:
    """What a head's forward needs to know beside its parameters, and the forward that it had."""

    plain_forward: Callable[..., Any]
    own_forward: bool
    """Whether `plain_forward` was an attribute of the instance (a framework had replaced it before)."""
    arguments: dict[str, Any]
    """`group`, `vocab_shard` … and the fields of `LossOptions`, as `linear_cross_entropy` takes them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadLoss:
        # The arguments hold process groups, which are handles. A bound method is copied with its module.
        return HeadLoss(copy.deepcopy(self.plain_forward, memo), self.own_forward, self.arguments)

    def __reduce__(self) -> Any:
        raise TypeError("a head with a loss cannot be pickled: save the model's state dict, or detach_loss(head) first")


def attach_loss(
    head: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    vocab_shard: VocabShard | None = None,
    hidden_layout: HiddenLayout = "replicated",
    hidden_grad_scale: float = 1.0,
    **options: Unpack[LossOptionsDict],
) -> None:
    """Gives `head` the forward `(hidden, target=None, **tensors)`: the loss, and without a target what it gave before.

    The loss is computed from `head.weight` (and `head.bias`) as they are inside the forward: gathered by FSDP or ZeRO,
    a vocabulary shard under tensor parallelism, a DTensor `Shard(0)` on the tensor mesh under both. Parameters, names
    and the state dict stay. `detach_loss` undoes it; until then the module can be copied, but not pickled.

    Args:
        head: a module with `weight [L, H]` and optionally `bias [L]`, and no other parameters, whose own forward is
            `hidden @ weight.T + bias`: what else it computes would be left out of the loss.
        group, vocab_size, vocab_shard, hidden_layout, hidden_grad_scale, options: as `linear_cross_entropy` takes
            them. What depends on no tensor and no rank is checked here, the rest with the first call.

    Raises:
        TypeError: `head` is a `VocabParallelHead`, which has options of its own; it has no weight, or parameters that
            the loss would leave out (an adapter's); it is an `nn.Linear` whose class has another forward, and no
            `group` says that it is a framework's parallel layer.
        ValueError: it has a loss already.
        TypeError, ValueError: another argument or an option is wrong.
    """
    changed = options_of(options).changed()
    if isinstance(head, VocabParallelHead):
        raise TypeError(
            f"a {type(head).__name__} computes a loss of its own options, and would leave these out: give it them "
            "(head.options = LossOptions(...))"
        )
    names = {name for name, _ in head.named_parameters()}
    if "weight" not in names or names - {"weight", "bias"}:
        raise TypeError(
            f"expected a linear head with the parameters weight and bias, got {type(head).__name__} with "
            f"{sorted(names)}: what the others compute would be left out of the loss. Give it to the linear layer "
            "itself, before FSDP1 or another wrapper is put around it"
        )
    if isinstance(head, nn.Linear) and type(head).forward is not nn.Linear.forward and group is None:
        raise TypeError(
            f"expected a linear head, got {type(head).__name__}, an nn.Linear with a forward of its own: what that "
            "computes would be left out of the loss. A factor on the logits is logit_scale="
        )
    if has_loss(head):
        raise ValueError(f"this {type(head).__name__} computes a loss already: detach_loss first")
    collectives.sharding_group(group)  # checks it
    bound = bound_arguments(vocab_size, vocab_shard, hidden_layout, hidden_grad_scale)
    arguments = {"group": group, **bound, **changed}
    setattr(head, _ATTRIBUTE, HeadLoss(head.forward, "forward" in vars(head), arguments))
    head.forward = types.MethodType(_forward, head)


def has_loss(head: nn.Module) -> bool:
    """Whether `attach_loss` gave it one."""
    return hasattr(head, _ATTRIBUTE)


def arguments_of(head: nn.Module) -> dict[str, Any]:
    """`group`, `hidden_layout` … and the fields of `LossOptions` that `attach_loss` gave a head which has a loss."""
    loss: HeadLoss = getattr(head, _ATTRIBUTE)
    return dict(loss.arguments)


def detach_loss(head: nn.Module) -> None:
    """Gives `head` the forward it had before `attach_loss`."""
    loss: HeadLoss = getattr(head, _ATTRIBUTE)
    delattr(head, _ATTRIBUTE)
    del head.forward
    if loss.own_forward:
        head.forward = loss.plain_forward


def _forward(
    self: nn.Module, hidden: Tensor | None = None, target: Tensor | None = None, **tensors: Any
) -> Tensor | LossOutput:
    loss: HeadLoss = getattr(self, _ATTRIBUTE)
    if target is None:
        return loss.plain_forward(*(() if hidden is None else (hidden,)), **tensors)  # or input=, of an nn.Linear
    if hidden is None:
        raise TypeError(f"with a target this {type(self).__name__} takes hidden, as the first argument or by its name")
    weight: Any = self.weight
    return linear_cross_entropy(hidden, weight, target, bias=getattr(self, "bias", None), **tensors, **loss.arguments)
