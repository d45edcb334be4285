"""The arguments of a call as the loop wants them: token dimensions flattened, the shard's place found, everything
checked on this rank, and what follows from all but the tensors' contents remembered."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import agreement, checks, collectives
from .backend import row_kernels
from .kernels import torch_rows
from .kernels.spec import RowSpec
from .op import Needs
from .options import HiddenLayout, LossOptions, LossOptionsDict, options_of, recomputes, to_float
from .outputs import AUX_NAMES, OF_ALL_TOKENS
from .shard import VocabShard, partition_error
from .unpack import autocast, local_tensors

MAX_EXACT_ID = 2**24
"""Arg-max ids travel as float32 beside the other statistics, and are exact up to here."""


class Given(NamedTuple):
    """The arguments of `linear_cross_entropy` as they came; it says what they are."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    normalizer: Tensor | float | None
    group: dist.ProcessGroup | None
    vocab_size: int | None
    vocab_shard: VocabShard | None
    hidden_layout: HiddenLayout
    max_tokens: int | None
    reduce_hidden_grad: bool
    hidden_grad_scale: float
    aux: Sequence[str]
    options: LossOptionsDict


@dataclass(frozen=True)
class Setting:
    """What follows from a call's arguments without the contents of its tensors. `kernels` are the row kernels;
    `target_shape` is the target's, as it came."""

    options: LossOptions
    shard: VocabShard
    hidden_layout: HiddenLayout
    max_tokens: int | None
    reduce_hidden_grad: bool
    hidden_grad_scale: float
    aux: tuple[str, ...]
    kernels: ModuleType
    spec: RowSpec
    target_shape: torch.Size


class Arguments(NamedTuple):
    """Checked arguments of one rank: `hidden [N, H]`, `target [N]` int64, `token_weight [N]`, local tensors of one
    dtype; `group` is None for one rank."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    normalizer: Tensor | float | None
    group: dist.ProcessGroup | None
    setting: Setting
    needs: Needs


def resolve(given: Given, compiled_needs: Needs | None = None) -> Arguments:
    """
    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    given = autocast(local_tensors(given))
    group = collectives.sharding_group(given.group)
    setting = _cached_setting(given, group)
    hidden, weight, target, token_weight = given.hidden, given.weight, given.target, given.token_weight
    checks.check_not_freed(weight)
    if given.normalizer is not None:
        checks.check_normalizer(given.normalizer, hidden.device)
    if hidden.dim() != 2:
        hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        token_weight = None if token_weight is None else token_weight.reshape(-1)
    return Arguments(
        hidden=hidden.contiguous(),
        weight=weight if 1 in weight.stride() else weight.contiguous(),
        target=target.to(torch.int64).contiguous(),
        bias=given.bias,
        class_weight=given.class_weight,
        token_weight=token_weight,
        normalizer=given.normalizer,
        group=group,
        setting=setting,
        needs=compiled_needs or Needs.of(hidden, given.weight, given.bias),
    )


_MAX_SETTINGS = 256
_settings: dict[Hashable, Setting] = {}
_settings_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Setting]] = weakref.WeakKeyDictionary()
"""Calls that were checked, by all that their checks read: a training step repeats its call, and with few tokens the
checks would take the host longer than the loss takes the GPU."""


def _cached_setting(given: Given, group: dist.ProcessGroup | None) -> Setting:
    known = _settings if group is None else _settings_of_group.setdefault(group, {})
    key = _cache_key(given)
    setting = None if key is None else known.get(key)
    if setting is None:
        setting = _setting(given, group)
        if key is not None:
            if len(known) >= _MAX_SETTINGS:
                known.clear()
            known[key] = setting
    return setting


def _cache_key(given: Given) -> Hashable | None:
    """All that `_setting` reads of a call but its group; None where that cannot be a key (tensor subclasses, nested
    tensors, values of wrong types that have no hash)."""
    (*tensors, normalizer, _, vocab_size, vocab_shard, layout, max_tokens, reduce, scale, aux, options) = given
    aux = tuple(aux) if type(aux) is list else aux  # a list may not be a key
    others = (vocab_size, vocab_shard, layout, max_tokens, reduce, scale, aux)
    kinds: list[Any] = [normalizer is None, *others, *map(type, others)]  # True is equal to 1
    for name, value in options.items():
        kinds += (name, value, type(value))
    for tensor in tensors:
        if tensor is None:
            kinds.append(None)
        elif type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested:
            return None
        else:
            kinds += (tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad)
    kind = tuple(kinds)
    try:
        hash(kind)
    except TypeError:  # a value of a wrong type, which the checks refuse
        return None
    return kind


def _setting(given: Given, group: dist.ProcessGroup | None) -> Setting:
    """
    Raises:
        TypeError, ValueError: as `resolve`.
    """
    options = options_of(given.options)
    _check_call(given, options)
    hidden, weight, target, token_weight = given.hidden, given.weight, given.target, given.token_weight
    checks.check_tensors(hidden, weight, target, given.bias)
    checks.check_dtypes(options, hidden.dtype)
    kernels = row_kernels(options.backend, hidden.device)
    if kernels is not torch_rows:
        for name in ("target", "class_weight", "token_weight"):
            checks.check_own_memory(name, getattr(given, name))
    max_tokens, vocab_size = (
        None if value is None else checks.checked_count(name, value, least)
        for name, value, least in (("max_tokens", given.max_tokens, 0), ("vocab_size", given.vocab_size, 1))
    )
    shard = _place(weight, group, vocab_size, given.vocab_shard)
    if given.class_weight is not None:
        checks.check_vector("class_weight", given.class_weight, (shard.vocab_size,), hidden.device)
    if token_weight is not None:
        checks.check_vector("token_weight", token_weight, target.shape, hidden.device)
    argmax = not {"predictions", "accuracy"}.isdisjoint(given.aux)
    if argmax and shard.vocab_size > MAX_EXACT_ID:
        raise ValueError(f"aux predictions need vocab_size <= {MAX_EXACT_ID}, got {shard.vocab_size}")
    if max_tokens is not None and target.numel() > max_tokens:
        raise ValueError(f"this rank has {target.numel()} tokens, more than max_tokens={max_tokens}")
    return Setting(
        options=options,
        shard=shard,
        hidden_layout=given.hidden_layout,
        max_tokens=max_tokens,
        reduce_hidden_grad=given.reduce_hidden_grad,
        hidden_grad_scale=to_float("hidden_grad_scale", given.hidden_grad_scale),
        aux=tuple(dict.fromkeys(given.aux)),
        kernels=kernels,
        spec=RowSpec(
            softcap=options.softcap,
            uniform=options.label_smoothing > 0,
            argmax=argmax,
            entropy="entropy" in given.aux,
            token_scaling=options.token_scaling,
        ),
        target_shape=target.shape,
    )


def checked_arguments(
    given: Given, compiled_needs: Needs | None = None, error: Exception | None = None
) -> tuple[Arguments, agreement.Agreed | None]:
    """`resolve` on all ranks of the group together. Inside a compiled graph's operator tensors no longer know whether
    they require grad: `compiled_needs` says so of hidden, weight and bias. `error` is what this rank has found before.

    Returns:
        The arguments, and what the ranks told each other.

    Raises:
        TypeError, ValueError: on all ranks when the call is checked (`agreement.agree`, whose collectives these are).
        NotImplementedError: likewise (`checks.check_plain_autograd`).
    """
    args = None
    try:
        if error is not None:
            raise error
        checks.check_plain_autograd(given if compiled_needs is None else None)
        args = resolve(given, compiled_needs)
    except Exception as caught:  # raised below, once the other ranks know
        error = caught
    group = collectives.sharding_group(given.group)
    if group is None:
        if error is not None:
            raise error
        return _present(args), None
    # A rank whose tensors are elsewhere than the others' may be alone with that.
    on_host = all(t.device.type in ("cpu", "meta") for t in given[:3] if isinstance(t, Tensor))
    agreed = agreement.agree(
        group,
        str(given.options.get("check_ranks", "auto")),
        on_host,
        _named_vocab_size(given),
        error,
        lambda: summarize(_present(args), is_compiled=compiled_needs is not None),
    )
    return _present(args), agreed


def _named_vocab_size(given: Given) -> int | None:
    """The vocabulary size of a call of several ranks. It is read before anything is checked: it decides whether the
    ranks meet, so one whose other arguments are wrong must not decide otherwise."""
    if given.vocab_size is None and isinstance(given.vocab_shard, VocabShard):
        return given.vocab_shard.vocab_size
    if given.vocab_size is None and isinstance(given.weight, DTensor):
        return given.weight.shape[0]
    return int(given.vocab_size) if isinstance(given.vocab_size, numbers.Integral) else None


def _present(args: Arguments | None) -> Arguments:
    assert args is not None
    return args


def summarize(args: Arguments, is_compiled: bool = False) -> agreement.Summary:
    """What the ranks of the group compare; reads the device."""
    setting, options, needs = args.setting, args.setting.options, args.needs
    budget = {"logits_budget": options.budget_bytes}  # however it was written
    replicated = setting.hidden_layout == "replicated"
    equal = {
        "vocab_size": setting.shard.vocab_size,
        "the hidden size": args.hidden.shape[1],
        "the dtype": str(args.hidden.dtype),
        "the kind of device": args.hidden.device.type,
        "the hidden layout": setting.hidden_layout,
        "the options": {key: str(value) for key, value in (asdict(options) | budget).items()},
        "whether hidden requires grad": needs.hidden,
        "which optional arguments are given": [
            name for name in ("bias", "class_weight", "token_weight", "normalizer") if getattr(args, name) is not None
        ],
        "aux": sorted(setting.aux),
        "max_tokens": setting.max_tokens,
        "reduce_hidden_grad": setting.reduce_hidden_grad,
        "hidden_grad_scale": setting.hidden_grad_scale,
        "normalizer": None if args.normalizer is None else str(float(args.normalizer)),
    }
    communicates = not replicated or is_compiled
    if recomputes(options, args.hidden.dtype) and not needs.hidden and communicates:
        # This backward communicates, so it must run on all ranks or on none.
        equal["whether weight or bias requires grad"] = needs.weight or needs.bias
    same = {"class_weight": args.class_weight}
    if replicated:
        equal["the number of tokens"] = args.hidden.shape[0]
        equal["the targets (compared by checksum)"] = agreement.checksum(args.target)
        same |= {"hidden": args.hidden, "token_weight": args.token_weight}
    sketches = {name: agreement.sketch(tensor) for name, tensor in same.items() if tensor is not None}
    return agreement.Summary(setting.shard, any(needs), equal, sketches)


def _check_call(given: Given, options: LossOptions) -> None:
    layout = checks.checked_layout(given.hidden_layout)
    if layout == "replicated" and given.max_tokens is not None:
        raise ValueError('max_tokens is for hidden_layout="sharded"')
    if layout == "sharded" and given.reduce_hidden_grad is False:
        raise ValueError('reduce_hidden_grad=False is for hidden_layout="replicated"')
    if not isinstance(given.reduce_hidden_grad, bool):
        raise TypeError(f"reduce_hidden_grad must be true or false, got {given.reduce_hidden_grad!r}")
    if given.normalizer is not None and options.reduction != "mean":
        raise ValueError(f'normalizer replaces the divisors of reduction="mean", got reduction={options.reduction!r}')
    if isinstance(given.aux, str) or not isinstance(given.aux, Sequence):
        raise TypeError(f"aux must be a sequence of names, got {given.aux!r}")
    for name in given.aux:
        if name not in AUX_NAMES:
            raise ValueError(f"aux names must be among {', '.join(AUX_NAMES)}, got {name!r}")
        if options.skip_ignored and name in OF_ALL_TOKENS:
            raise ValueError(f"aux {name!r} is given for ignored tokens too, which skip_ignored=True never computes")


def _place(
    weight: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None, vocab_shard: VocabShard | None
) -> VocabShard:
    rank, world_size = collectives.rank_in(group), collectives.world_size(group)
    checks.check_vocab_shard(vocab_shard)
    if vocab_shard is not None:
        if vocab_size not in (None, vocab_shard.vocab_size):
            raise ValueError(f"vocab_size={vocab_size} and vocab_shard={vocab_shard} disagree")
        shard = vocab_shard
    elif world_size > 1:
        if vocab_size is None:
            raise ValueError(
                f"a plain weight that is sharded over {world_size} ranks needs vocab_size (split as torch.chunk does) "
                "or vocab_shard=VocabShard(vocab_size, start, stop)"
            )
        shard = VocabShard.even(vocab_size, rank, world_size)
    else:
        checks.check_not_empty(weight)
        shard = VocabShard(weight.shape[0] if vocab_size is None else vocab_size, 0, weight.shape[0])
    checks.check_shard(weight, shard, rank, world_size, explicit=vocab_shard is not None)
    if world_size == 1:
        wrong = partition_error([shard])
        if wrong is not None:
            raise ValueError(f"without a group the weight must hold the whole vocabulary: {wrong}")
    return shard
