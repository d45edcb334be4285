"""`linear_cross_entropy` under `torch.compile`: one opaque operator, so that the graph has no break.

What is no tensor travels as one JSON string that is a constant of the graph, the group by its name in it. The operator
checks and computes as the eager path does, when the graph runs. It returns its gradients beside the loss, and the
graph's backward scales them; where logits are recomputed, backward calls a second operator.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.experimental.symbolic_shapes import guard_scalar

from .arguments import Arguments, Given, checked_arguments
from .call import Prepared, loss_and_aux, on_device, prepare
from .checks import check_plain_autograd, no_grad_error
from .collectives import sharding_group
from .kernels.spec import stats_dtype
from .op import Gradients, Needs, check_derivative, compute, recompute
from .options import CHOICES, LARGEST, LossOptions, recomputes
from .outputs import AUX_NAMES, aux_dtype, is_per_token
from .plan import accumulation_dtype
from .shard import VocabShard
from .unpack import autocast, local_tensors

_HOST = ("vocab_size", "hidden_layout", "max_tokens", "reduce_hidden_grad", "hidden_grad_scale")
_WITHOUT_GRAD = ("class_weight", "token_weight", "normalizer")
_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weight, "
    "Tensor? normalizer, str config, bool[] needs"
)
"""Of both operators."""


def linear_cross_entropy(given: Given) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and what `given.aux` names, in a graph that is being traced."""
    _check_plain_autograd()
    given, group = autocast(local_tensors(given)), sharding_group(given.group)
    # An operator may not return one tensor twice.
    aux = given.aux if isinstance(given.aux, str) else tuple(dict.fromkeys(given.aux))
    normalizer, wrong_normalizer = given.normalizer, None
    if isinstance(normalizer, int | float) and not isinstance(normalizer, bool) and 0 <= normalizer <= LARGEST:
        # A number that changes from call to call, as a count of tokens does, shall not be compiled for each value.
        normalizer = torch.full((), normalizer, dtype=torch.float64, device=given.hidden.device)
    elif not isinstance(normalizer, Tensor):  # None, or what the operator's checks refuse
        normalizer, wrong_normalizer = None, _constant(normalizer)
    tensors, misplaced = _off_meta(
        hidden=given.hidden, weight=given.weight, target=given.target, bias=given.bias,
        class_weight=given.class_weight, token_weight=given.token_weight, normalizer=normalizer,
    )  # fmt: skip
    config = _encode(
        misplaced,
        None if group is None else group.group_name,
        _place(given.vocab_shard),
        wrong_normalizer,
        aux,
        tuple(name for name in _WITHOUT_GRAD if _requires_grad(getattr(given, name))),
        tuple((name, _constant(getattr(given, name))) for name in _HOST),
        tuple((name, _constant(value)) for name, value in given.options.items()),
    )
    outputs = _forward(*tensors, config, list(Needs.of(given.hidden, given.weight, given.bias)))
    named = zip(aux, outputs[1:], strict=False)
    return outputs[0], {name: output.detach() for name, output in named if name in AUX_NAMES}


def _off_meta(**tensors: Any) -> tuple[list[Any], str | None]:
    """The operator's tensors, and why it shall refuse them. With one on the meta device torch would run the operator's
    fake, without its checks, so stand-ins go in its place."""
    given = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    on_meta = [name for name, tensor in given.items() if tensor.is_meta]
    real = [tensor for tensor in given.values() if not tensor.is_meta]
    if not on_meta or not real:
        return list(tensors.values()), None
    device = real[0].device
    for name in on_meta:
        tensors[name] = torch.zeros(given[name].shape, dtype=given[name].dtype, device=device)
    return list(tensors.values()), f"{' and '.join(on_meta)} must be on {device}, got meta: a tensor without values"


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@torch.compiler.assume_constant_result
def _check_plain_autograd() -> None:
    check_plain_autograd(None)


def _constant(value: Any) -> Any:
    """A number that the compiler would make a variable of as a constant: the graph is compiled anew for each value."""
    return guard_scalar(value) if isinstance(value, int | float) else value


def _place(shard: VocabShard | None) -> tuple[int, int, int] | str | None:
    """What the operator makes `vocab_shard` of; of what is none, a name that its checks refuse."""
    if isinstance(shard, VocabShard):
        return _constant(shard.vocab_size), _constant(shard.start), _constant(shard.stop)
    return None if shard is None else type(shard).__name__


@torch.compiler.assume_constant_result
def _encode(
    misplaced: str | None,
    group: str | None,
    shard: tuple[int, int, int] | str | None,
    wrong_normalizer: Any,
    aux: tuple[str, ...] | str,
    requires_grad: tuple[str, ...],
    host: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...],
) -> str:
    texts = {key: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for key, v in options}
    refused = None
    try:
        if requires_grad:  # in the operator tensors no longer say so
            raise no_grad_error(requires_grad[0])
        if misplaced is not None:
            raise ValueError(misplaced)
        LossOptions.from_dict(texts)
    except (TypeError, ValueError) as error:
        if group is None:
            raise
        # Other ranks, whose arguments are right, wait for this one's answer: the operator gives it when the graph runs.
        refused = (isinstance(error, TypeError), str(error))
        texts = {key: value for key, value in texts.items() if key == "check_ranks" and value in CHOICES[key]}
    values = {
        "group": group,
        "shard": shard,
        "wrong_normalizer": wrong_normalizer,
        "aux": aux,
        "host": dict(host),
        "options": texts,
        "refused": refused,
    }
    return json.dumps(values, default=repr)  # of what is no JSON, a text that the checks refuse


@functools.lru_cache(maxsize=256)  # each run of the operator asks
def _values(config: str) -> dict[str, Any]:
    return json.loads(config)


@functools.lru_cache(maxsize=256)
def _options(config: str) -> LossOptions:
    return LossOptions.from_dict(_values(config)["options"])


def _decode(tensors: Sequence[Tensor | None], config: str) -> Given:
    hidden, weight, target, bias, class_weight, token_weight, normalizer = tensors
    values = _values(config)
    options = _options(config)
    assert hidden is not None
    assert weight is not None
    assert target is not None
    return Given(
        hidden=hidden,
        weight=weight,
        target=target,
        bias=bias,
        class_weight=class_weight,
        token_weight=token_weight,
        normalizer=normalizer if values["wrong_normalizer"] is None else values["wrong_normalizer"],
        group=None if values["group"] is None else _resolve_process_group(values["group"]),
        vocab_shard=VocabShard(*values["shard"]) if isinstance(values["shard"], list) else values["shard"],
        aux=values["aux"],
        options={key: getattr(options, key) for key in values["options"]},  # type: ignore[arg-type]
        **values["host"],
    )


def _prepare(tensors: Sequence[Tensor | None], config: str, needs: Sequence[bool]) -> tuple[Arguments, Prepared]:
    refused, error = _values(config)["refused"], None
    if refused is not None:
        is_type, message = refused
        error = TypeError(message) if is_type else ValueError(message)
    args, agreed = checked_arguments(_decode(tensors, config), Needs(*needs), error)
    return args, prepare(args, agreed)


@torch.library.custom_op("flce_dist::linear_cross_entropy", mutates_args=(), schema=f"({_INPUTS}) -> Tensor[]")
def _forward(*inputs: Any) -> list[Tensor]:
    *tensors, config, needs = inputs
    hidden: Tensor = tensors[0]
    with on_device(hidden.device):
        args, prepared = _prepare(tensors, config, needs)
        loss, stats, owned, gradients, factor = compute(prepared.call, prepared.hidden, args.weight, args.bias)
        loss, aux = loss_and_aux(args, prepared, loss, stats, owned)
        outputs = [loss, *(aux[name] for name in args.setting.aux)]
        if any(needs) and gradients is not None:
            scale = torch.stack([loss.new_full((), args.setting.hidden_grad_scale), loss.new_ones(())]) / factor
            outputs += [*_outputs(args, prepared, gradients, hidden), scale]
        return outputs


# It calls collectives and checks: a loss that one rank alone uses must run on all.
torch.fx.node.has_side_effect(torch.ops.flce_dist.linear_cross_entropy.default)


@_forward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    hidden, weight, target, bias, *_, config, needs = inputs
    options, aux = _options(config), _values(config)["aux"]
    dtype = stats_dtype(hidden.dtype)
    outputs = [hidden.new_empty(target.shape if options.reduction == "none" else (), dtype=dtype)]
    for name in aux:
        shape = target.shape if is_per_token(name, options.reduction) else ()
        outputs.append(hidden.new_empty(shape, dtype=aux_dtype(name, dtype)))
    if any(needs) and not recomputes(options, hidden.dtype):
        outputs += [*_fake_outputs(hidden, weight, bias, options, needs), hidden.new_empty((2,), dtype=dtype)]
    return outputs


@torch.library.custom_op(
    "flce_dist::linear_cross_entropy_backward", mutates_args=(), schema=f"(Tensor grad_loss, {_INPUTS}) -> Tensor[]"
)
def _backward(grad_loss: Tensor, *inputs: Any) -> list[Tensor]:
    *tensors, config, needs = inputs
    hidden: Tensor = tensors[0]
    with on_device(hidden.device):
        args, prepared = _prepare(tensors, config, needs)
        if args.setting.options.reduction == "none":
            grad_loss = grad_loss.reshape(-1)
            grad_loss = grad_loss if prepared.kept is None else grad_loss[prepared.kept]
        gradients = recompute(prepared.call, prepared.hidden, args.weight, args.bias, None, grad_loss)
        return _outputs(args, prepared, gradients, hidden)


@_backward.register_fake
def _(grad_loss: Tensor, *inputs: Any) -> list[Tensor]:
    hidden, weight, _target, bias, *_, config, needs = inputs
    return _fake_outputs(hidden, weight, bias, _options(config), needs)


def _gradient_dtypes(hidden: Tensor, weight: Tensor, options: LossOptions) -> tuple[torch.dtype, ...]:
    """Of the gradients as the operator returns them, which may not depend on the number of chunks."""
    accumulated = accumulation_dtype(options.accum_dtype, weight.dtype, num_chunks=1)
    return hidden.dtype, accumulated, torch.promote_types(weight.dtype, torch.float32)


def _outputs(args: Arguments, prepared: Prepared, gradients: Gradients, hidden: Tensor) -> list[Tensor]:
    """Gradients as outputs of an operator, which may not be None: an empty tensor for one that nobody needs."""
    grad, *others = gradients
    if grad is not None:
        if prepared.kept is not None:
            grad = torch.zeros_like(args.hidden).index_copy_(0, prepared.kept, grad)
        grad = grad.reshape(hidden.shape)
    dtypes = _gradient_dtypes(hidden, args.weight, args.setting.options)
    return [
        hidden.new_empty(0) if gradient is None else gradient.to(dtype)
        for gradient, dtype in zip((grad, *others), dtypes, strict=True)
    ]


def _fake_outputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions, needs: Sequence[bool]
) -> list[Tensor]:
    tensors = zip((hidden, weight, bias), _gradient_dtypes(hidden, weight, options), needs, strict=True)
    return [hidden.new_empty(t.shape, dtype=dtype) if t is not None and need else hidden.new_empty(0)
            for t, dtype, need in tensors]  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, config, needs = inputs
    options, num_aux = _options(config), len(_values(config)["aux"])
    ctx.config, ctx.needs, ctx.recompute = config, needs, recomputes(options, tensors[0].dtype)
    ctx.dtypes = [None if t is None else t.dtype for t in (tensors[0], tensors[1], tensors[3])]
    ctx.save_for_backward(*(tensors if ctx.recompute else output[1 + num_aux :]))


def _grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    grad_loss = grads[0]
    assert grad_loss is not None
    check_derivative(grad_loss)
    if ctx.recompute:
        gradients = _backward(grad_loss, *ctx.saved_tensors, ctx.config, ctx.needs)
    else:
        *kept, scale = ctx.saved_tensors
        # Wide: a GPU would round the 0-d scale to 16 bits first, unless the compiler fuses the two.
        gradients = [g.to(scale.dtype) * (grad_loss * scale[0 if i == 0 else 1]) for i, g in enumerate(kept)]
    hidden, weight, bias = (
        g.to(dtype) if need else None for g, dtype, need in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
    )
    return hidden, weight, None, bias, None, None, None, None, None


_forward.register_autograd(_grad, setup_context=_setup_context)
