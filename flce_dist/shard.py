"""Where a rank's rows of the head's weight stand in the vocabulary: all index arithmetic of the package.

Rows `[start, stop)` of the (possibly padded) vocabulary are on this rank. Rows at or past `vocab_size` are padding:
they take no part in the softmax and their gradient is zero. Shards may have different sizes, and may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .options import to_int


@dataclass(frozen=True)
class VocabShard:
    """Rows `[start, stop)` of a vocabulary of `vocab_size` entries. Numbers may be numpy's, and become Python's here.

    Raises:
        TypeError: a field is not an int.
        ValueError: `vocab_size < 1`, `start < 0` or `stop < start`.
    """

    vocab_size: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "start", "stop"):
            value = getattr(self, name)
            if type(value) is not int:  # numpy's, or wrong
                object.__setattr__(self, name, to_int(f"VocabShard.{name}", value))
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard.vocab_size must be at least 1, got {self.vocab_size}")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard needs 0 <= start <= stop, got start={self.start}, stop={self.stop}")

    @classmethod
    def even(cls, vocab_size: int, rank: int, world_size: int, num_rows: int | None = None) -> VocabShard:
        """The split of `torch.chunk` and of DTensor's `Shard(0)`: `ceil(rows / world_size)` rows each, the last
        ranks fewer or none. `num_rows` (default `vocab_size`) counts the rows that are split, padding included."""
        rows = vocab_size if num_rows is None else num_rows
        per_rank = -(-rows // world_size)
        start = min(rank * per_rank, rows)
        return cls(vocab_size, start, min(start + per_rank, rows))

    @property
    def num_rows(self) -> int:
        """Rows of the weight on this rank, padding included."""
        return self.stop - self.start

    @property
    def num_columns(self) -> int:
        """Columns of this rank's logits: its rows that are no padding."""
        return max(0, min(self.stop, self.vocab_size) - self.start)

    def take(self, full: Tensor) -> Tensor:
        """This rank's entries `[num_columns]` of a vector `[vocab_size]` over the vocabulary (a view)."""
        start = min(self.start, self.vocab_size)
        return full[start : start + self.num_columns]

    def local_ids(self, target: Tensor) -> Tensor:
        """Global ids as columns of this rank: outside `[0, num_columns)` for an id of another rank, or of none."""
        target = target.to(torch.int64)
        return target - self.start if self.start else target


def partition_error(shards: Sequence[VocabShard]) -> str | None:
    """Why `shards`, one a rank in any order, do not hold each entry of one vocabulary exactly once; None if they do."""
    ranges = ", ".join(f"rank {rank}: [{s.start}, {s.stop})" for rank, s in enumerate(shards))
    vocab_size = shards[0].vocab_size
    if any(s.vocab_size != vocab_size for s in shards):
        return f"vocabulary sizes differ: {[s.vocab_size for s in shards]}"
    next_id = 0
    for shard in sorted((s for s in shards if s.num_columns), key=lambda s: s.start):
        if shard.start < next_id:
            return f"shards overlap at id {shard.start} of {vocab_size} ({ranges})"
        if shard.start > next_id:
            return f"ids [{next_id}, {shard.start}) of {vocab_size} are on no rank ({ranges})"
        next_id = shard.start + shard.num_columns
    if next_id < vocab_size:
        return f"ids [{next_id}, {vocab_size}) are on no rank ({ranges})"
    return None
