"""The output embedding of a model as modules that compute the loss: found, refused, sharded."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from ... import collectives
from ...attach import attach_loss, detach_loss, has_loss
from ...checks import tied_names
from ...head import VocabParallelHead
from ...options import HiddenLayout, LossOptionsDict
from ...shard import VocabShard
from .verify import is_of_framework

_FORMER = "_flce_former_options"
_OPTIONS = frozenset(LossOptionsDict.__annotations__)


def find_owner(model: nn.Module) -> Any | None:
    """The model, or the causal LM inside of it whose logits it takes for its own: what has output embeddings."""
    for owner in (model, *model.children()):
        get: Any = getattr(owner, "get_output_embeddings", None)
        if callable(get) and get() is not None:
            return owner
    return None


def owner_of_head(model: Any) -> Any:
    """
    Raises:
        TypeError: `find_owner` finds none.
    """
    owner = find_owner(model)
    if owner is None:
        raise TypeError(
            f"{type(model).__name__} has no output embedding: it is a body without a head; take the class that has one "
            "(AutoModelForCausalLM)"
        )
    return owner


def find_heads(model: Any) -> list[nn.Module]:
    """The modules that may compute the model's logits: one, or with PEFT's `modules_to_save` the original and its
    trained copies.

    Raises:
        TypeError: there is none, or an adapter is around it, whose part the loss would leave out.
    """
    head = owner_of_head(model).get_output_embeddings()
    if isinstance(head, FullyShardedDataParallel):  # a unit of its own, whose forward calls the layer's
        head = head.module
    if "peft" not in sys.modules:
        return [head]
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for wrapper in model.modules():
        if not isinstance(wrapper, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        if not any(part is head for part in wrapper.modules()):  # get_output_embeddings may look through it
            continue
        if not isinstance(wrapper, ModulesToSaveWrapper):
            raise TypeError(
                f"the head of this model has an adapter ({type(wrapper).__name__}): the loss is computed from the "
                "head's weight, and the adapter would neither count nor be trained. Take the head out of "
                'target_modules, or train all of it: modules_to_save=["lm_head"]'
            )
        return [wrapper.original_module, *wrapper.modules_to_save.values()]
    return [head]


def tensor_parallel_group(model: Any, head: nn.Module) -> dist.ProcessGroup | None:
    """The group over which transformers' own tensor parallelism (`DistributedConfig(tp_size=...)`) sharded the head's
    vocabulary; None when it did not."""
    if not isinstance(getattr(head, "weight", None), DTensor) or (getattr(model, "tp_size", None) or 1) == 1:
        return None
    return model._mesh_manager.get_mesh("tp").get_group()


def check_forward(head: nn.Module) -> None:
    """
    Raises:
        TypeError: somebody put a forward of his own in the place of the head's.
        ValueError: it was given a loss by `attach_loss`.
    """
    if has_loss(head):
        raise ValueError(f"the head ({type(head).__name__}) has a loss already, from attach_loss: detach_loss first")
    own = vars(head)
    for name in ("forward", "_old_forward") if "_hf_hook" in own else ("forward",):  # accelerate's keeps the other
        forward = own.get(name)
        if forward is None or getattr(forward, "__func__", None) is type(head).forward or is_of_framework(forward):
            continue
        raise TypeError(
            f"the head ({type(head).__name__}) has another forward than its class, set on the instance: "
            f"{getattr(forward, '__qualname__', forward)}. What it computes would be left out of the loss. Take it off "
            "(del head.forward); a factor or a softcap belongs in the model's forward (logit_scale=, softcap=)"
        )


def own_options(head: nn.Module) -> dict[str, Any]:
    """What a `VocabParallelHead` computes, as far as it is not the default."""
    return head.options.changed() if isinstance(head, VocabParallelHead) else {}


def check_arguments(
    head: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None,
    vocab_size: int | None,
    vocab_shard: VocabShard | None,
    hidden_layout: HiddenLayout | None,
    hidden_grad_scale: float | None,
) -> None:
    """
    Raises:
        ValueError: `head` is a `VocabParallelHead` that was made with other values than these; None is no value.
    """
    if not isinstance(head, VocabParallelHead):
        return
    group = collectives.sharding_group(group.get_group() if isinstance(group, DeviceMesh) else group)
    for name, given, own in (
        ("group", group, head.group),
        ("vocab_size", vocab_size, head.vocab_size),
        ("vocab_shard", vocab_shard, head.shard),
        ("hidden_layout", hidden_layout, head.hidden_layout),
        ("hidden_grad_scale", hidden_grad_scale, head.hidden_grad_scale),
    ):
        if given is not None and given != own:
            raise ValueError(
                f"{name}: the head is a {type(head).__name__} that was made with {own}, and would ignore {given}: "
                "leave it out here"
            )


def give_loss(head: nn.Module, group: dist.ProcessGroup | None, **arguments: Any) -> None:
    """`attach_loss` for a head that is known to be linear; a `VocabParallelHead` has a loss of its own, and gets the
    options.

    Raises:
        TypeError: it computes something else, or its weight is quantized.
    """
    if isinstance(head, VocabParallelHead):
        options = {name: value for name, value in arguments.items() if name in _OPTIONS}
        setattr(head, _FORMER, (head.options, head.raw_logits))
        head.options = dataclasses.replace(head.options, **options)
        head.raw_logits = True  # the model caps and scales them itself
        return
    # With vocab_shard it is a framework's own parallel layer, whose caller knows what it is.
    if type(head).forward is not nn.Linear.forward and arguments["vocab_shard"] is None:
        raise TypeError(
            f"expected nn.Linear as output embedding, got {type(head).__name__}, whose forward computes something else"
        )
    weight: Any = head.weight
    if not weight.is_floating_point():
        raise TypeError(f"the head's weight is quantized ({weight.dtype}); keep the head in floating point")
    attach_loss(head, group, **arguments)


def take_loss(head: nn.Module) -> None:
    """Undoes `give_loss`."""
    if not isinstance(head, VocabParallelHead):
        detach_loss(head)
        return
    head.options, head.raw_logits = getattr(head, _FORMER)
    delattr(head, _FORMER)


def to_vocab_parallel_head(
    model: Any, linear: nn.Module, group: dist.ProcessGroup | DeviceMesh, **arguments: Any
) -> VocabParallelHead:
    """Puts a `VocabParallelHead` with this rank's rows in the place of the full head.

    Raises:
        TypeError: the head is no plain `nn.Linear`.
        ValueError: it is tied to the input embedding.
    """
    owner, names = owner_of_head(model), tied_names(model, getattr(linear, "weight", None))
    if len(names) > 1:
        raise ValueError(
            f"the head's weight is tied ({' is '.join(names)}): a sharded head cannot share the full weight; set "
            "tie_word_embeddings to false, or do not shard the head"
        )
    head = VocabParallelHead.from_linear(linear, group, **arguments)  # type: ignore[arg-type]
    owner.set_output_embeddings(head)
    return head


@torch.no_grad()
def to_linear_head(model: Any, head: VocabParallelHead) -> None:
    """Puts an `nn.Linear` with the gathered values in the place of the sharded head: one all-gather a parameter."""

    def full(parameter: nn.Parameter) -> nn.Parameter:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return nn.Parameter(whole.clone(), parameter.requires_grad)

    linear = nn.Linear(head.hidden_size, head.vocab_size, bias=head.bias is not None, device="meta")
    linear.weight = full(head.weight)
    if head.bias is not None:
        linear.bias = full(head.bias)
    owner_of_head(model).set_output_embeddings(linear.train(head.training))


def full_logits(head: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """Logits `[..., V]` from those of a `VocabParallelHead`'s shard: one all-gather of them when it is sharded."""
    if not isinstance(head, VocabParallelHead) or not isinstance(head.weight, DTensor):
        return logits
    shape = torch.Size((*logits.shape[:-1], head.vocab_size))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = head.weight.device_mesh, [Shard(logits.dim() - 1)]
    return DTensor.from_local(logits, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()
