"""The arguments of a call as the loop wants them: DTensors unpacked, autocast applied, token dimensions flattened, the
shard's place found, everything checked on this rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from . import checks, collectives
from .options import LossOptions
from .shard import VocabShard, partition_error

AUX_NAMES = ("z_loss", "lse", "accuracy", "predictions", "entropy", "num_valid")
PER_TOKEN_AUX = ("lse", "predictions", "entropy")
MAX_EXACT_ID = 2**24
"""Arg-max ids travel as float32 beside the other statistics, and are exact up to here."""


@dataclass(frozen=True)
class Arguments:
    """Checked arguments of one rank. `hidden [N, H]`, `target [N]` int64, `token_weight [N]`; `group` is None for one
    rank; `shape` is the target's, as it came."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    normalizer: Tensor | float | None
    group: dist.ProcessGroup | None
    shard: VocabShard
    hidden_layout: str
    max_tokens: int | None
    reduce_hidden_grad: bool
    hidden_grad_scale: float
    aux: tuple[str, ...]
    options: LossOptions
    shape: torch.Size


def group_of(weight: Tensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group whose ranks take part in a call: the one given, or that of a DTensor weight's mesh."""
    if group is None and isinstance(weight, DTensor) and weight.device_mesh.ndim == 1:
        group = weight.device_mesh.get_group()
    return group if collectives.world_size(group) > 1 else None


def resolve(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | float | None,
    group: dist.ProcessGroup | None,
    vocab_size: int | None,
    vocab_shard: VocabShard | None,
    hidden_layout: str,
    max_tokens: int | None,
    reduce_hidden_grad: bool,
    hidden_grad_scale: float,
    aux: tuple[str, ...],
    options: LossOptions,
) -> Arguments:
    """
    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _check_layout(hidden_layout, max_tokens, reduce_hidden_grad, hidden_grad_scale, aux, options)
    if isinstance(weight, DTensor):
        weight, bias, vocab_shard = _unpack_weight(weight, bias, group_of(weight, group), vocab_size, vocab_shard)
    elif isinstance(bias, DTensor):
        raise TypeError("bias is a DTensor but weight is not: pass both as DTensors, or both local")
    hidden, target = _unpack_tokens(hidden, hidden_layout), _unpack_tokens(target, hidden_layout)
    token_weight = None if token_weight is None else _unpack_tokens(token_weight, hidden_layout)
    hidden, weight, bias = _autocast(hidden, weight, bias)
    checks.check_tensors(hidden, weight, target, bias)
    checks.check_accumulation(options, hidden.dtype)
    group = group_of(weight, group)
    shard = _place(weight, group, vocab_size, vocab_shard)
    if class_weight is not None:
        checks.check_vector("class_weight", class_weight, (shard.vocab_size,), hidden.device)
    if token_weight is not None:
        checks.check_vector("token_weight", token_weight, target.shape, hidden.device)
    if normalizer is not None:
        checks.check_normalizer(normalizer)
    if {"predictions", "accuracy"} & set(aux) and shard.vocab_size > MAX_EXACT_ID:
        raise ValueError(f"aux predictions need vocab_size <= {MAX_EXACT_ID}, got {shard.vocab_size}")
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if max_tokens is not None and hidden.shape[0] > max_tokens:
        raise ValueError(f"this rank has {hidden.shape[0]} tokens, more than max_tokens={max_tokens}")
    return Arguments(
        hidden=hidden.contiguous(),
        weight=weight if 1 in weight.stride() else weight.contiguous(),
        target=target.reshape(-1).to(torch.int64),
        bias=bias,
        class_weight=class_weight,
        token_weight=None if token_weight is None else token_weight.reshape(-1),
        normalizer=normalizer,
        group=group,
        shard=shard,
        hidden_layout=hidden_layout,
        max_tokens=max_tokens,
        reduce_hidden_grad=reduce_hidden_grad,
        hidden_grad_scale=float(hidden_grad_scale),
        aux=aux,
        options=options,
        shape=target.shape,
    )


def summarize(args: Arguments) -> checks.Summary:
    """What the ranks of the group compare; reads the device."""
    replicated = args.hidden_layout == "replicated"
    equal = {
        "vocab_size": args.shard.vocab_size,
        "the hidden size": args.hidden.shape[1],
        "the dtype": str(args.hidden.dtype),
        "the hidden layout": args.hidden_layout,
        "the options": {key: str(value) for key, value in asdict(args.options).items()},
        "whether hidden requires grad": torch.is_grad_enabled() and args.hidden.requires_grad,
        "which optional arguments are given": [
            name for name in ("bias", "class_weight", "token_weight", "normalizer") if getattr(args, name) is not None
        ],
        "aux": args.aux,
        "max_tokens": args.max_tokens,
        "reduce_hidden_grad": args.reduce_hidden_grad,
        "hidden_grad_scale": args.hidden_grad_scale,
        "normalizer": None if args.normalizer is None else float(args.normalizer),
    }
    if not replicated:
        return checks.Summary(args.shard, equal)
    equal["the number of tokens"] = args.hidden.shape[0]
    equal["the targets (compared by checksum)"] = checks.checksum(args.target)
    return checks.Summary(args.shard, equal, checks.sketch(args.hidden))


def _check_layout(
    hidden_layout: str,
    max_tokens: int | None,
    reduce_hidden_grad: bool,
    hidden_grad_scale: float,
    aux: tuple[str, ...],
    options: LossOptions,
) -> None:
    if hidden_layout not in ("replicated", "sharded"):
        raise ValueError(f'hidden_layout must be "replicated" or "sharded", got {hidden_layout!r}')
    if hidden_layout == "replicated" and max_tokens is not None:
        raise ValueError('max_tokens is for hidden_layout="sharded"')
    if hidden_layout == "sharded" and not reduce_hidden_grad:
        raise ValueError('reduce_hidden_grad=False is for hidden_layout="replicated"')
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0):
        raise ValueError(f"max_tokens must be a non-negative int, got {max_tokens!r}")
    if isinstance(hidden_grad_scale, bool) or not isinstance(hidden_grad_scale, int | float):
        raise TypeError(f"hidden_grad_scale must be a number, got {hidden_grad_scale!r}")
    for name in aux:
        if name not in AUX_NAMES:
            raise ValueError(f"aux names must be among {', '.join(AUX_NAMES)}, got {name!r}")
        if options.skip_ignored and name in PER_TOKEN_AUX:
            raise ValueError(f"aux {name!r} is given for ignored tokens too, which skip_ignored=True never computes")


def _place(
    weight: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None, vocab_shard: VocabShard | None
) -> VocabShard:
    rank, world_size = collectives.rank_in(group), collectives.world_size(group)
    if vocab_shard is not None:
        if not isinstance(vocab_shard, VocabShard):
            raise TypeError(f"vocab_shard must be a VocabShard, got {vocab_shard!r}")
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
        shard = VocabShard(weight.shape[0] if vocab_size is None else vocab_size, 0, weight.shape[0])
    checks.check_shard(weight, shard, rank, world_size, explicit=vocab_shard is not None)
    if world_size == 1:
        wrong = partition_error([shard])
        if wrong is not None:
            raise ValueError(f"without a group the weight must hold the whole vocabulary: {wrong}")
    return shard


def _unpack_weight(
    weight: DTensor,
    bias: Tensor | None,
    group: dist.ProcessGroup | None,
    vocab_size: int | None,
    vocab_shard: VocabShard | None,
) -> tuple[Tensor, Tensor | None, VocabShard]:
    mesh, where = weight.device_mesh, f"a DTensor on mesh {weight.device_mesh} with placements {weight.placements}"
    if mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise ValueError(
            f"weight must be a plain tensor or a DTensor Shard(0) on the 1-D mesh of the group, got {where}: FSDP2's "
            "sharded parameter is seen outside of the module that owns it; compute the loss in that module's forward"
        )
    if vocab_shard is not None:
        raise ValueError("vocab_shard is for a plain weight: a DTensor knows its place")
    world_size = collectives.world_size(group)
    ranks = [mesh.get_local_rank()] if group is None else dist.get_process_group_ranks(group)
    if world_size != mesh.size() or (world_size > 1 and ranks != mesh.mesh.flatten().tolist()):
        raise ValueError(f"weight is {where}, which is not the group's mesh (ranks {ranks})")
    if bias is not None:
        if not isinstance(bias, DTensor) or bias.placements != (Shard(0),) or bias.device_mesh != mesh:
            raise TypeError("bias must be a DTensor sharded like weight")
        bias = bias.to_local()
    rows = weight.shape[0]
    size = rows if vocab_size is None else vocab_size
    return weight.to_local(), bias, VocabShard.even(size, mesh.get_local_rank(), mesh.size(), num_rows=rows)


def _unpack_tokens(tensor: Tensor, hidden_layout: str) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim == 1:
        placement = tensor.placements[0]
        if hidden_layout == "replicated" and placement == Replicate():
            return tensor.to_local(grad_placements=[Replicate()])
        if hidden_layout == "sharded" and isinstance(placement, Shard) and placement.dim == 0:
            return tensor.to_local()
    raise ValueError(
        f'hidden_layout="{hidden_layout}" takes plain tensors or DTensors on a 1-D mesh, Replicate() for "replicated" '
        f'and Shard(0) for "sharded"; got placements {tensor.placements} on {tensor.device_mesh}'
    )


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands in autocast's dtype when it is on for their device, as `F.linear` takes them (float64 stays)."""
    if not isinstance(hidden, Tensor) or not torch.is_autocast_enabled(hidden.device.type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(hidden), cast(weight), None if bias is None else cast(bias)
