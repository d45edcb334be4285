"""Checks of a call: the arguments of one rank, then the agreement of the ranks of a group.

A rank that raised alone would leave the others waiting in a collective. So on a group's first call for a vocabulary
size (`check_ranks="first"`), or on every call ("always"), each rank sends the outcome of its own checks and a summary
of its arguments, and all raise when one has failed or they disagree. What "first" cannot catch: a rank that fails its
own checks in a later call; the others then wait for the process group's timeout.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from . import collectives
from .options import LossOptions, is_finite
from .shard import VocabShard, partition_error

if TYPE_CHECKING:
    from .arguments import Given


class Agreed(NamedTuple):
    """What the ranks of a group told each other: the columns of the largest shard, and whether all of them or none want
    a gradient, so that a backward runs on all or on none."""

    most_columns: int
    differentiate_alike: bool


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Agreed]] = weakref.WeakKeyDictionary()
"""By group and vocabulary size, of the last checked call."""

_REMEDY = "compute the loss inside the forward of the module that owns it, as VocabParallelHead and attach_loss do"
_OTHER_DATA = (
    "do the ranks see different batches (data parallel), or is the group not the tensor-parallel one? A weight that "
    "FSDP2 has sharded over the data-parallel ranks is no vocabulary shard: compute the loss inside the forward of the "
    'module that owns it. For tokens that are spread over the ranks pass hidden_layout="sharded"'
)
_DATA = ("the number of tokens", "the targets (compared by checksum)")

_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Shapes, dtypes and devices of the main tensors of one rank.

    Raises:
        TypeError, ValueError: with what was expected and what came.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight), ("target", target), ("bias", bias)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name != "bias"):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor is not None:
            _check_dense(name, tensor)
    if hidden.dim() < 1:
        raise ValueError("hidden must be [..., H], got a 0-d tensor")
    if hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., H] with H > 0, got {tuple(hidden.shape)}")
    if hidden.dtype not in _FLOATING:
        raise TypeError(f"hidden must be float64, float32, bfloat16 or float16, got {hidden.dtype}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(
            f"target must hold class ids (int64 or int32; soft targets are not supported), got {target.dtype}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int64 or int32, got {target.dtype}")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must have the leading dimensions of hidden, {tuple(hidden.shape[:-1])}, got {tuple(target.shape)}"
        )
    check_weight(weight, hidden.shape[-1])
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype}: cast one of them, or call "
            "under torch.autocast"
        )
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be this rank's slice, ({weight.shape[0]},), got {tuple(bias.shape)}")
        if bias.dtype != weight.dtype:
            raise TypeError(f"bias and weight must have one dtype, got {bias.dtype} and {weight.dtype}")
    devices = {t.device for t in (hidden, weight, target, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"hidden, weight, target and bias must be on one device, got {sorted(map(str, devices))}")


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")


def check_plain_autograd(given: Given) -> None:
    """
    Raises:
        NotImplementedError: under `torch.jit.trace`; a `torch.func` transform is on; or a tensor, which is named, has a
            tangent of forward-mode differentiation.
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            "linear_cross_entropy does not work under torch.jit.trace, which would keep sizes and options of this one "
            "call as constants: use torch.compile or torch.export"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError("linear_cross_entropy does not work under torch.func transforms: use autograd")
    if forward_ad._current_level < 0:  # asking each tensor would be felt in small calls
        return
    for name, tensor in given._asdict().items():
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name} is a dual tensor: linear_cross_entropy has no forward-mode derivative; take the gradients by "
                "backward or torch.autograd.grad, whose product with the tangents is the directional derivative"
            )


def check_weight(weight: Tensor, hidden_size: int) -> None:
    """
    Raises:
        ValueError: not `[rows, H]`; a weight as FSDP and ZeRO-3 leave it is named as such.
    """
    if weight.dim() != 2 or weight.shape[1] != hidden_size:
        raise ValueError(f"weight must be [rows, {hidden_size}], got {tuple(weight.shape)}{_left_by(weight)}")


def check_not_freed(weight: Tensor) -> None:
    """
    Raises:
        ValueError: FSDP has freed the weight's memory, which its shape does not tell.
    """
    if weight.numel() > 0 and weight.untyped_storage().nbytes() == 0:
        raise ValueError(f"weight {tuple(weight.shape)} has no memory: FSDP has freed it; {_REMEDY}")


def _left_by(weight: Tensor) -> str:
    """The framework that leaves such a weight outside of the module that owns it, and the remedy."""
    if hasattr(weight, "ds_id") or hasattr(weight, "ds_shape"):
        return f": DeepSpeed ZeRO-3 has partitioned it; {_REMEDY}, or gather it around forward and backward"
    if getattr(weight, "_fsdp_flattened", False):  # FSDP1 marks the original parameters
        return f": FSDP1 has flattened and sharded it; {_REMEDY}"
    if weight.dim() == 1 or weight.numel() == 0:
        return f": a flat or empty weight is what FSDP and DeepSpeed ZeRO-3 leave behind; {_REMEDY}"
    return ""


def check_shard(weight: Tensor, shard: VocabShard, rank: int, world_size: int, explicit: bool) -> None:
    """The weight has the rows of its shard.

    Raises:
        ValueError: comparing the rows.
    """
    rows = weight.shape[0]
    if rows == shard.num_rows:
        return
    if explicit:
        raise ValueError(f"weight has {rows} rows, but vocab_shard {shard} has {shard.num_rows}{_left_by(weight)}")
    message = (
        f"weight has {rows} rows, but rank {rank} of {world_size} holds {shard.num_rows} of vocab_size="
        f"{shard.vocab_size} (rows [{shard.start}, {shard.stop}))"
    )
    if rows == shard.vocab_size:
        message += f": this is the full weight, whose {world_size} copies have {rows * world_size} rows; pass the shard"
    elif rows == 0:
        message += _left_by(weight)
    else:
        message += "; pass vocab_shard=VocabShard(vocab_size, start, stop) for another split or for padded rows"
    raise ValueError(message)


def check_not_empty(weight: Tensor) -> None:
    """
    Raises:
        ValueError: an unsharded weight without rows.
    """
    if weight.shape[0] == 0:
        raise ValueError(f"weight has no rows, {tuple(weight.shape)}{_left_by(weight)}")


def check_vector(name: str, value: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """A float tensor of known shape on the right device that does not require grad (class_weight, token_weight).

    Raises:
        TypeError, ValueError: naming it.
    """
    if isinstance(value, DTensor):
        raise TypeError(f"{name} must be a plain tensor, the whole of it on every rank, got a DTensor")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {getattr(value, 'dtype', type(value).__name__)}")
    _check_dense(name, value)
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")
    if value.requires_grad:
        raise ValueError(f"{name} may not require grad: no gradient for it is computed; pass {name}.detach()")


def check_normalizer(value: Tensor | float, device: torch.device) -> None:
    """
    Raises:
        TypeError, ValueError: not a number or plain 0-d tensor on the inputs' device or the CPU, or one of 16 bits,
            or not finite and positive as far as the host knows.
    """
    if isinstance(value, DTensor):
        raise TypeError("normalizer must be a number or a plain 0-d tensor, got a DTensor")
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.requires_grad or value.is_complex():
            raise ValueError(
                f"normalizer must be a number or a real 0-d tensor without grad, got shape {tuple(value.shape)}"
                f"{' with grad' if value.requires_grad else ''}"
            )
        if value.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"normalizer must not be a {value.dtype} tensor, which cannot count tokens: a mixed-precision wrapper "
                "casts the floating-point arguments of a module's forward; pass an int64 tensor (as count_valid_tokens "
                "gives it) or a Python number"
            )
        if value.device.type not in (device.type, "cpu"):
            raise ValueError(f"normalizer must be on {device} or the CPU, got {value.device}")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"normalizer must be a number or a 0-d tensor, got {value!r}")
    elif not is_finite(value) or value < 0:
        raise ValueError(f"normalizer must be finite in float32 and not negative, got {value}")


def check_accumulation(options: LossOptions, dtype: torch.dtype) -> None:
    """The dtypes of intermediate results are those of the tensors, or float32 for 16-bit tensors.

    Raises:
        ValueError: naming the option.
    """
    allowed = (dtype, torch.float32) if dtype in (torch.bfloat16, torch.float16) else (dtype,)
    for name in ("accum_dtype", "logits_dtype", "hidden_grad_reduce_dtype"):
        value = getattr(options, name)
        if value is not None and value not in allowed:
            expected = " or ".join(str(d) for d in dict.fromkeys(allowed))
            raise ValueError(f"{name} must be None or {expected} for {dtype} tensors, got {value}")


@dataclass(frozen=True)
class Summary:
    """What the ranks of a group compare. Everything in `equal` must be the same on all; the sketches of replicated
    tensors may differ by rounding, as those of bodies with non-deterministic kernels do."""

    shard: VocabShard
    differentiates: bool
    equal: dict[str, Any]
    sketches: dict[str, list[float]]


def agree(
    group: dist.ProcessGroup,
    check_ranks: str,
    on_cpu: bool,
    vocab_size: int | None,
    error: Exception | None,
    summarize: Callable[[], Summary],
) -> Agreed | None:
    """Raises on ALL ranks of the group what one has found, or that they disagree, when this call is to be checked.

    One all-gather of objects when it is, which waits for the device; otherwise none.

    Returns:
        What the ranks ever told each other; None otherwise.
    """
    known = _agreed.setdefault(group, {})
    if check_ranks == "auto":
        check_ranks = "always" if on_cpu else "first"
    checked = bool(known) if vocab_size is None else vocab_size in known
    if check_ranks == "never" or (check_ranks == "first" and checked):
        if error is not None:
            raise error
        return None if vocab_size is None else known.get(vocab_size)
    summary = None
    if error is None:
        try:
            summary = summarize()
        except Exception as caught:  # raised below, once the other ranks know
            error = caught
    answers = collectives.all_gather_object(
        (None if error is None else f"{type(error).__name__}: {error}", summary), group
    )
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(answers):
        if text is not None:
            raise ValueError(f"rank {rank} of the group failed its checks: {text}")
    summaries: list[Summary] = [other for _, other in answers]
    message = _disagreement(summaries)
    if message is not None:
        raise ValueError(message)
    assert vocab_size is not None
    most_columns = max(s.shard.num_columns for s in summaries)
    known[vocab_size] = Agreed(most_columns, len({s.differentiates for s in summaries}) == 1)
    return known[vocab_size]


def _disagreement(summaries: list[Summary]) -> str | None:
    first = summaries[0]
    for key in first.equal:
        values: list[Any] = [s.equal.get(key) for s in summaries]
        if any(value != values[0] for value in values):
            if isinstance(values[0], dict):
                values = [{k: v for k, v in mine.items() if any(v != other[k] for other in values)} for mine in values]
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            hint = f": {_OTHER_DATA}" if key in _DATA else ""
            return f"the ranks of the group must agree about {key}, got {each}{hint}"
    wrong = partition_error([s.shard for s in summaries])
    if wrong is not None:
        return f"the shards of the group must hold each id once: {wrong}"
    for name in first.sketches:
        for rank, other in enumerate(summaries):
            if not _close(first.sketches[name], other.sketches[name]):
                return (
                    f"all ranks of the group must have the same {name}, but rank {rank} has another than rank 0: "
                    + _OTHER_DATA
                )
    return None


def checksum(ids: Tensor) -> int:
    """An order-sensitive checksum of int ids; reads the device."""
    position = torch.arange(1, ids.numel() + 1, device=ids.device)
    return int((ids.reshape(-1).to(torch.int64) * (position * 2654435761 + 1)).sum())


def sketch(tensor: Tensor) -> list[float]:
    """Norm of a tensor `[N, ...]` and four weighted sums along N; reads the device.

    A row's weights are the upper bytes of a hash of its place, which repeat at no distance. They are spread over
    [-1/2, 1): mean and mean square are a quarter, as they are for sums over each fourth row, so that rounding moves
    these sums as little as those.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    tensor = tensor.detach()
    rows = tensor.sum(1, dtype=dtype) if tensor.dim() > 1 else tensor.to(dtype)
    norm = torch.linalg.vector_norm(tensor, dtype=dtype)
    place = torch.arange(1, len(rows) + 1, device=rows.device)
    hashes = place.mul_(place).mul_(-7046029254386353131)  # 2**64 / 1.618..., modulo 2**64
    weights = hashes.view(torch.int8).view(-1, 8)[:, 4:].to(dtype).mul_(0.75 / 128).add_(0.25)
    sums = weights.mul_(rows[:, None]).sum(0)  # no product of matrices: autocast would round it to 16 bits
    return torch.cat([norm[None], sums]).tolist()


def _close(a: list[float], b: list[float]) -> bool:
    largest = max(a[0], b[0])
    if not math.isfinite(largest):
        # A run that has diverged must not be told that its ranks disagree.
        return not math.isfinite(a[0]) and not math.isfinite(b[0])
    return all(abs(x - y) <= 0.02 * largest for x, y in zip(a, b, strict=True))
