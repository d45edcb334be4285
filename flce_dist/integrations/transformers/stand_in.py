"""What a model holds in the place of its logits, between its head and its loss function."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .verify import UnsupportedForward, is_of_framework

# What is not its value; among it what debuggers ask of a module's output.
_FREE = {"dim", "size", "numel", "stride", "element_size", "get_device", "is_floating_point", "is_contiguous"}
_FREE |= {"__repr__", "__hash__"}
# The same number in another place; accelerate's hooks do it to all outputs of a model.
_MOVES = {"to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16", "contiguous"}
# What models do with logits, number by number: the number that comes out says what it was. Others, along the
# vocabulary, may leave a single number as it is; those in place would change the graph of what the head returned.
_CHANGES = {"mul", "__mul__", "__rmul__", "div", "__truediv__", "add", "__add__", "__radd__", "sub", "__sub__", "tanh"}
_CHANGES |= {"clone", "view", "reshape", "__getitem__"}


@dataclass
class _Use:
    """Shared by a stand-in and what is only moved."""

    model: str
    by: str | None = None


class StandIn(Tensor):
    """A number, 0-d, that can be used once: what is computed from it alone is a stand-in again, and the last one goes
    to the loss function. Whatever else a model computes from its logits, differentiable or not, is a second use, and
    raises. That needs no device and no graph, so it holds in every step, in training and in evaluation."""

    state: _Use

    @classmethod
    def of(cls, tensor: Tensor, model: str) -> StandIn:
        """A new one for the model of this name."""
        return cls._made(tensor, _Use(model))

    @classmethod
    def of_head(cls, value: Tensor, model: str) -> StandIn:
        """What a head's forward returns; not a view, of which FSDP2 would warn."""
        made: StandIn = torch.Tensor._make_subclass(cls, value)
        made.state = _Use(model)
        return made

    @classmethod
    def _made(cls, tensor: Tensor, state: _Use) -> StandIn:
        made = tensor.as_subclass(cls)
        made.state = state
        return made

    def use(self, by: str) -> None:
        """
        Raises:
            UnsupportedForward: it was used before.
        """
        if self.state.by is not None:
            raise UnsupportedForward(
                f"{self.state.model} uses its logits twice, by {self.state.by} and by {by}, but they were not made: "
                "only its loss function can have them. z_loss= adds that penalty to the loss; other numbers of the "
                "logits are outputs of the loss (aux=) or need logits (model(..., logits_to_keep=n), or a call without "
                "labels)"
            )
        self.state.by = by

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, keywords = func.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":  # of shape, device and the like; of data as well
                name, found = func.__self__.__name__, func(*args)
                if not isinstance(found, Tensor):
                    return found
            if name in _FREE:
                return func(*args, **keywords)
            if name == "register_hook" and is_of_framework(args[1]):  # FSDP's, which wait for any gradient
                return func(*args, **keywords)
            tensors = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, Tensor)]
            used = {id(tensor): tensor for tensor in tensors if isinstance(tensor, cls)}
            first = next(iter(used.values()))
            if name in _MOVES:
                result = func(*args, **keywords)
                return result if result is first else cls._made(result, first.state)
            for each in used.values():
                each.use(name)
            if name not in _CHANGES and not (name == "detach" and _is_deepspeed(sys._getframe(1))):
                raise UnsupportedForward(
                    f"{first.state.model} uses its logits in another way than was declared, by {name}: between head "
                    "and loss a model may scale, shift and cap them (logit_scale=, softcap=), cast and move them. "
                    "z_loss= adds a penalty on them to the loss; other numbers of the logits are outputs of the loss "
                    "(aux=) or need logits (model(..., logits_to_keep=n), or a call without labels)"
                )
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors if not isinstance(t, cls)):
                raise UnsupportedForward(
                    f"{first.state.model} changes its logits by a trained parameter (in {name}; an adapter on its "
                    "head, a learned temperature?), which would get no gradient"
                )
            result = func(*args, **keywords)
            return cls.of(result, first.state.model) if isinstance(result, Tensor) else result


def _is_deepspeed(caller: types.FrameType) -> bool:
    """Whether its hooks are at work, which detach the output of each module, the ones around the head too, in an
    autograd function that hands the gradient on."""
    return str(caller.f_globals.get("__name__")).startswith("deepspeed.")


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, for computing with it here."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, StandIn) else tensor
