"""How the tokens of a call lie over the ranks, and their way through the chunk loop.

The loop sees rows in "loop order": all tokens of the group, chunk after chunk. With replicated hidden states that is
the caller's order. With token-sharded ones a chunk holds the same slice of each rank's tokens, rank after rank; ranks
with fewer tokens are filled up with ignored rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives
from .buffers import span


def _bounds(num_rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


@dataclass(frozen=True)
class ReplicatedTokens:
    """All ranks hold the same `num_tokens` tokens."""

    num_tokens: int
    chunk_rows: int
    group: dist.ProcessGroup | None

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """Loop-order bounds of the chunks."""
        return _bounds(self.num_rows, self.chunk_rows)

    @property
    def num_rows(self) -> int:
        return self.num_tokens

    def to_loop(self, per_token: Tensor, fill: float) -> Tensor:
        """Per-token values `[n]` of this rank to those of all rows `[num_rows]`."""
        return per_token

    def to_local(self, per_row: Tensor) -> Tensor:
        """Values of all rows `[..., num_rows]` to this rank's `[..., n]`."""
        return per_row

    def hidden_chunk(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Hidden states `[C, H]` of a chunk: a view, no collective."""
        return span(hidden, start, stop)

    def hidden_gradient(self, hidden: Tensor, reduce_dtype: torch.dtype, reduce: bool) -> HiddenGradient:
        """The gradient of `hidden [n, H]`, not yet written. Without `reduce` it stays this rank's part of the sum."""
        return HiddenGradient(hidden, reduce_dtype, self.group if reduce else None)


class HiddenGradient:
    """The gradient of replicated hidden states: each rank's part is summed over the ranks, chunk by chunk."""

    def __init__(self, hidden: Tensor, reduce_dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._grad = torch.empty_like(hidden)
        self._reduce_dtype = reduce_dtype if group is not None else hidden.dtype
        self._scratch: Tensor | None = None
        self._pending: list[tuple[dist.Work, Tensor, Tensor]] = []

    @property
    def is_reduced(self) -> bool:
        """Whether `start_reduce` calls a collective."""
        return self._group is not None

    def chunk(self, start: int, stop: int) -> Tensor:
        """Where the loop writes this rank's part of a chunk's gradient."""
        if self._reduce_dtype == self._grad.dtype:
            return span(self._grad, start, stop)
        return self._idle_scratch(stop - start)

    def _idle_scratch(self, num_rows: int) -> Tensor:
        """One buffer for all chunks, once what the last one left there has been summed."""
        self.wait()
        if self._scratch is None:  # the first chunk is the largest
            self._scratch = self._grad.new_empty(num_rows, self._grad.shape[1], dtype=self._reduce_dtype)
        return self._scratch[:num_rows]

    def start_reduce(self, part: Tensor, start: int, stop: int) -> None:
        """Starts the sum over the ranks. One all-reduce of `[C, H]` in the reduction dtype; none for one rank."""
        if self._group is not None:
            work = collectives.all_reduce_start(part, self._group)
            self._pending.append((work, part, self._grad[start:stop]))

    def wait(self) -> None:
        """Until all sums that were started are in the gradient, in its dtype."""
        for work, part, place in self._pending:
            work.wait()
            if part.data_ptr() != place.data_ptr():
                place.copy_(part)
        self._pending.clear()

    def finish(self) -> Tensor:
        """The gradient `[n, H]` in the hidden states' dtype, once all its sums are there."""
        self.wait()
        return self._grad


@dataclass(frozen=True)
class ShardedTokens:
    """Each rank holds its own `num_tokens` tokens, at most `max_tokens` of them; `chunk_tokens` of each rank make a
    chunk."""

    num_tokens: int
    max_tokens: int
    chunk_tokens: int
    group: dist.ProcessGroup

    @property
    def num_ranks(self) -> int:
        return collectives.world_size(self.group)

    @property
    def chunk_rows(self) -> int:
        return self.chunk_tokens * self.num_ranks

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """Loop-order bounds of the chunks."""
        return _bounds(self.num_rows, self.chunk_rows)

    @property
    def num_rows(self) -> int:
        return self.max_tokens * self.num_ranks

    def to_loop(self, per_token: Tensor, fill: float) -> Tensor:
        """Per-token values `[n]` of this rank to those of all rows `[num_rows]`. One all-gather of `[max_tokens]`."""
        padded = per_token.new_full((self.max_tokens,), fill)
        padded[: self.num_tokens] = per_token
        gathered = collectives.all_gather(padded, self.group)
        whole = self.max_tokens - self.max_tokens % self.chunk_tokens
        chunks = gathered[:, :whole].reshape(self.num_ranks, -1, self.chunk_tokens).transpose(0, 1)
        return torch.cat([chunks.reshape(-1), gathered[:, whole:].reshape(-1)])

    def to_local(self, per_row: Tensor) -> Tensor:
        """Values of all rows `[..., num_rows]` to this rank's `[..., n]`."""
        rank, lead = collectives.rank_in(self.group), per_row.shape[:-1]
        tail = self.max_tokens % self.chunk_tokens
        whole = (self.max_tokens - tail) * self.num_ranks
        chunks = per_row[..., :whole].reshape(*lead, -1, self.num_ranks, self.chunk_tokens)[..., rank, :]
        rest = per_row[..., whole:].reshape(*lead, self.num_ranks, tail)[..., rank, :]
        return torch.cat([chunks.reshape(*lead, whole // self.num_ranks), rest], -1)[..., : self.num_tokens]

    def hidden_chunk(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Hidden states `[C, H]` of a chunk. One all-gather of `[C/W, H]` of each rank, in the hidden states' dtype."""
        start, stop = start // self.num_ranks, stop // self.num_ranks
        piece = hidden[start:stop]
        if piece.shape[0] < stop - start:
            filled = hidden.new_zeros(stop - start, hidden.shape[1])
            filled[: piece.shape[0]] = piece
            piece = filled
        return collectives.all_gather(piece, self.group).flatten(0, 1)

    def hidden_gradient(self, hidden: Tensor, reduce_dtype: torch.dtype, reduce: bool) -> HiddenGradient:
        """The gradient of `hidden [n, H]`, not yet written; always reduced."""
        return ShardedHiddenGradient(hidden, reduce_dtype, self.group)


class ShardedHiddenGradient(HiddenGradient):
    """The gradient of token-sharded hidden states: a rank gets the sum over the ranks for its own tokens."""

    def chunk(self, start: int, stop: int) -> Tensor:
        return self._idle_scratch(stop - start)

    def start_reduce(self, part: Tensor, start: int, stop: int) -> None:
        """Starts the sum over the ranks, of which each gets its own tokens. One reduce-scatter of `[C, H]` in the
        reduction dtype."""
        assert self._group is not None
        num_ranks = collectives.world_size(self._group)
        start, stop = start // num_ranks, stop // num_ranks
        summed = part.new_empty(stop - start, part.shape[1])
        work = collectives.reduce_scatter_start(summed, part, self._group)
        place = self._grad[start:stop]
        self._pending.append((work, summed[: place.shape[0]], place))


TokenLayout = ReplicatedTokens | ShardedTokens
