"""Batches of packed sequences: a pure function of the seed and the step, whatever the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Input ids and targets, both int64 [sequences, length]; the targets are the inputs' next tokens."""


class PackedSequences:
    """One long row of ids, cut into sequences of equal length.

    Ids are `~id`, negative, for tokens that are read but not learned: they are inputs, and ignored as targets.
    A sequence may hold the end of one document and the start of the next, with the separator between them. Which
    token a document starts with cannot be known from the one before: the target that follows a separator is ignored.
    """

    def __init__(self, ids: NDArray[np.int32], length: int, separator: int, ignore_index: int):
        self.ids, self.length, self.separator, self.ignore_index = ids, length, separator, ignore_index

    def __len__(self) -> int:
        return max(0, (len(self.ids) - 1) // self.length)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The sequences with these numbers; a negative number is a row without any valid target."""
        offsets = np.arange(self.length + 1)
        signed = torch.from_numpy(self.ids[np.maximum(indices, 0)[:, None] * self.length + offsets].astype(np.int64))
        tokens = torch.where(signed < 0, ~signed, signed)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
        targets[signed[:, 1:] < 0] = self.ignore_index
        targets[inputs == self.separator] = self.ignore_index
        targets[torch.from_numpy(indices < 0)] = self.ignore_index
        return inputs, targets


class TrainingBatches:
    """The micro-batches of each step for one data-parallel rank.

    Step s of the run trains on positions [s·B, (s+1)·B) of an endless row of sequences, a new permutation of all of
    them in each epoch. Those B are cut into `accumulation` micro-steps, and each of those over the ranks: a resumed
    run, and one with other ranks or accumulation, sees the same B sequences at the same step.
    """

    def __init__(
        self, data: PackedSequences, batch_size: int, accumulation: int, data_rank: int, data_ranks: int, seed: int
    ):
        self.data, self.batch_size, self.accumulation, self.seed = data, batch_size, accumulation, seed
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of optimizer step `step`, counted from 0."""
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, places = np.divmod(positions, len(self.data))
        indices = np.array([self._permutation(epoch)[place] for epoch, place in zip(epochs, places, strict=True)])
        parts = indices.reshape(self.accumulation, self.data_ranks, -1)[:, self.data_rank]
        return [self.data.batch(part) for part in parts]

    def _make_permutation(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, int(epoch)]).permutation(len(self.data))


def evaluation_batches(
    data: PackedSequences, sequences: int, rows: int, data_rank: int, data_ranks: int
) -> Iterator[Batch]:
    """The first `sequences` sequences in batches of `rows` per rank, the last filled up with rows that do not count."""
    indices = np.arange(min(sequences, len(data)))
    per_batch = rows * data_ranks
    indices = np.concatenate([indices, np.full(-len(indices) % per_batch, -1)])
    for part in indices.reshape(-1, data_ranks, rows)[:, data_rank]:
        yield data.batch(part)
