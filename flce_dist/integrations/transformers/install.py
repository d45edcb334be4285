"""`apply`: a causal LM of transformers computes its loss in its head whenever it is given labels."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ... import collectives
from ...options import HiddenLayout, LossOptions, LossOptionsDict, suggestion
from ...outputs import AUX_NAMES
from ...shard import VocabShard
from . import after_head, heads
from .fused import ATTRIBUTE, FusedLoss, Head, base_model, head_forward, keep_returned, loss_function, model_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def apply(
    model: PreTrainedModel,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    vocab_size: int | None = None,
    vocab_shard: VocabShard | None = None,
    hidden_layout: HiddenLayout | None = None,
    hidden_grad_scale: float | None = None,
    aux: Sequence[str] = (),
    eval_logits: bool = False,
    **options: Unpack[LossOptionsDict],
) -> FusedLoss:
    """Whenever `model` is called with `labels` (or `shift_labels`), its loss is computed in the head without logits, in
    training and in evaluation. Without labels, and in `generate`, it gives the logits it always gave.

    A `VocabParallelHead` that the model has already keeps its group, layout and options; options given here are changed
    in it, until `remove()`.

    Call it before DDP or FSDP wraps the model or after, after PEFT, and after `deepspeed.initialize` on its `module`.

    Args:
        model: a causal LM, or an image-text model built on one, or a `PeftModel` around it.
        group: ranks that share the vocabulary, as a process group or a 1-D device mesh. A full head is then replaced
            by a `VocabParallelHead` with this rank's rows; one that a framework has sharded is taken as it is
            (`vocab_size`, `vocab_shard`). A model that transformers loaded with `tp_size` brings its own. None: not
            sharded.
        vocab_size, vocab_shard: as `linear_cross_entropy` takes them, for a head that is sharded already.
        hidden_layout: "sharded" when the ranks of `group` are data-parallel ranks, each with its own tokens. None:
            "replicated".
        hidden_grad_scale: as in `linear_cross_entropy`. None: 1, and with "sharded" the number of ranks, for a body
            whose gradients are averaged over them (DDP, FSDP, ZeRO).
        aux: names of further outputs (the fields of `LossOutput`), left in the handle's `output` after each forward.
        eval_logits: in evaluation, compute the stock loss on stock logits, for metrics that need predictions.
        options: the fields of `LossOptions`. `logit_scale` and `softcap` say what the model does after its head; by
            default they are read from its config.

    Returns:
        The handle: `remove()` undoes it, `output` is the last `LossOutput`.

    Raises:
        TypeError: the head is not linear, or has an adapter or a forward of its own; `model` is something else, or
            inside of a wrapper.
        ValueError: an option is wrong, the model computes its loss in its own way, it or its head has a loss already,
            or its `VocabParallelHead` was made with another group, layout or scale than given here.

    The model's forward raises UnsupportedForward, a RuntimeError, when the logits are changed after the head in a way
    that was not declared, when the head is called twice or not at all, and when what it was called with cannot be
    honoured.
    """
    _check_names(options)
    base: Any = base_model(model)
    _check_model(base)
    found = heads.find_heads(base)
    for head in found:
        heads.check_forward(head)
    # The model's config counts least, what is written here most.
    options = {**after_head.from_config(base), **heads.own_options(found[0]), **options}  # type: ignore[typeddict-item]
    checked = LossOptions(**options)
    if checked.reduction != "mean":
        raise ValueError(f'a model returns one loss: reduction must be "mean", got {checked.reduction!r}')
    if isinstance(aux, str) or not set(aux) <= set(AUX_NAMES):
        raise ValueError(f"aux must be a sequence of names among {', '.join(AUX_NAMES)}, got {aux!r}")
    heads.check_arguments(found[0], group, vocab_size, vocab_shard, hidden_layout, hidden_grad_scale)
    place = group if group is not None else heads.tensor_parallel_group(base, found[0])
    group = place.get_group() if isinstance(place, DeviceMesh) else place
    size = collectives.world_size(group)
    hidden_layout = "replicated" if hidden_layout is None else hidden_layout
    if hidden_grad_scale is None:
        hidden_grad_scale = float(size) if hidden_layout == "sharded" else 1.0
    where: dict[str, Any] = {"hidden_layout": hidden_layout, "hidden_grad_scale": hidden_grad_scale, **options}
    sharded_here = size > 1 and vocab_size is None and vocab_shard is None and type(found[0]) is nn.Linear
    sharded_here = sharded_here and not isinstance(found[0].weight, DTensor)
    if sharded_here:
        if len(found) > 1:
            raise TypeError("a head that is trained beside an adapter (modules_to_save) cannot be sharded over a group")
        assert place is not None
        found = [heads.to_vocab_parallel_head(base, found[0], place, **where)]
    for head in found:
        heads.give_loss(head, group, vocab_size=vocab_size, vocab_shard=vocab_shard, **where)
    layout = getattr(found[0], "hidden_layout", hidden_layout)
    signature = inspect.signature(type(base).forward)
    shared = FusedLoss(
        model=base,
        after=after_head.AfterHead(checked.logit_scale, checked.softcap),
        ignore_index=checked.ignore_index,
        aux=tuple(aux),
        eval_logits=eval_logits,
        data_ranks=collectives.world_size(getattr(found[0], "group", group)) if layout == "sharded" else 1,
        plain_forward=base.forward,
        own_forward="forward" in vars(base),
        signature=signature,
        extra_name=next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), ""),
        sharded_here=sharded_here,
    )
    _set_forwards(shared, found)
    return shared


def _set_forwards(shared: FusedLoss, found: Sequence[nn.Module]) -> None:
    """Puts ours in the place of the heads' forwards, of the model's and of its loss function."""
    base = shared.model
    for head in found:
        mine = Head(shared, head, head.forward, "forward" in vars(head))
        mine.hook = head.register_forward_hook(keep_returned).id
        head.forward = types.MethodType(head_forward, head)
        setattr(head, ATTRIBUTE, mine)
        shared.heads.append(mine)
    setattr(base, ATTRIBUTE, shared)
    base.loss_function = types.MethodType(loss_function, base)

    @wraps(type(base).forward)  # whose signature Trainer and generate read
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return model_forward(self, *args, **kwargs)

    base.forward = types.MethodType(forward, base)


def _check_names(options: Mapping[str, Any]) -> None:
    known = [*inspect.signature(apply).parameters, *LossOptionsDict.__annotations__]
    known = [name for name in known if name not in ("model", "options")]
    for name in options:
        if name not in LossOptionsDict.__annotations__:
            raise TypeError(f"unknown option {name!r}; {suggestion(name, known)}")


def _check_model(model: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    name = type(model).__name__
    if hasattr(model, ATTRIBUTE):
        raise ValueError(f"this {name} has a fused loss already: remove() it first")
    for inner, wrapping in (("_orig_mod", "torch.compile"), ("module", "the wrapper")):
        if isinstance(getattr(model, inner, None), nn.Module):
            raise TypeError(f"got {name}: call apply() before {wrapping}, or on its .{inner}")
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "loss_function"):
        raise TypeError(f"expected a causal language model of transformers, got {name}")
    heads.owner_of_head(model)
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{name} has the loss function {getattr(model.loss_function, '__name__', model.loss_function)}; only "
            "ForCausalLMLoss, the cross entropy of the next token, can be computed in the head"
        )
    code = inspect.unwrap(type(model).forward).__code__
    if "loss_function" not in code.co_names and "super" not in code.co_names:
        if "labels" not in code.co_varnames:
            raise ValueError(f"{name}.forward takes no labels: it has no loss")
        raise ValueError(f"{name}.forward computes its loss itself, not by model.loss_function: it would need logits")
