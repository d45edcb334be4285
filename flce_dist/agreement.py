"""The ranks of a group agree about a call, or all raise.

A rank that raised alone would leave the others waiting in a collective. So on a group's first call for a vocabulary
size (`check_ranks="first"`), or on every call ("always"), each rank sends the outcome of its own checks and a summary
of its arguments, and all raise when one has failed or they disagree. What "first" cannot catch: a rank that fails its
own checks in a later call; the others then wait for the process group's timeout.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives
from .shard import VocabShard, partition_error


class Agreed(NamedTuple):
    """What the ranks of a group told each other: the columns of the largest shard, and whether it is known that all of
    them or none want a gradient in this call, so that a backward runs on all or on none."""

    max_columns: int
    differentiate_alike: bool


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Agreed]] = weakref.WeakKeyDictionary()
"""By group and vocabulary size, of the last checked call."""

_OTHER_DATA = (
    "do the ranks see different batches (data parallel), or is the group not the tensor-parallel one? A weight that "
    "FSDP2 has sharded over the data-parallel ranks is no vocabulary shard: compute the loss inside the forward of the "
    'module that owns it. For tokens that are spread over the ranks pass hidden_layout="sharded"'
)
_DATA = ("the number of tokens", "the targets (compared by checksum)")


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
    on_host: bool,
    vocab_size: int | None,
    error: Exception | None,
    summarize: Callable[[], Summary],
) -> Agreed | None:
    """Raises on ALL ranks of the group what one has found, or that they disagree, when this call is to be checked.

    One all-gather of objects when it is, which waits for the device; otherwise none.

    Returns:
        What the ranks told each other, now or in the last call that was checked; None when they never did.
    """
    known = _agreed.setdefault(group, {})
    if check_ranks == "auto":
        check_ranks = "always" if on_host else "first"
    checked = bool(known) if vocab_size is None else vocab_size in known
    if check_ranks == "never" or (check_ranks == "first" and checked):
        if error is not None:
            raise error
        agreed = None if vocab_size is None else known.get(vocab_size)
        # Which ranks want a gradient may have changed since.
        return None if agreed is None else agreed._replace(differentiate_alike=False)
    summary = None
    with torch._C._DisableFuncTorch(), _no_jit_trace():  # a rank under either is refused, and has to tell the others
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
    max_columns = max(s.shard.num_columns for s in summaries)
    known[vocab_size] = Agreed(max_columns, len({s.differentiates for s in summaries}) == 1)
    return known[vocab_size]


@contextlib.contextmanager
def _no_jit_trace() -> Iterator[None]:
    state = torch._C._get_tracing_state()
    if state is not None:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if state is not None:
            torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


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
