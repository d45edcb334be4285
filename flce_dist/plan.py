"""Rows of one chunk of logits from a byte budget: a pure function of shapes, so that all ranks agree.

Nothing a rank sees alone (free memory, its number of valid tokens, its own smaller shard) may enter: ranks with
different chunk counts would call different numbers of collectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_ALIGNMENT = 16
"""Elements to which the row stride of the logits buffer is rounded up: at least 16 bytes for every dtype, so that
vocabularies like 50257 keep the GEMMs on their aligned path and the row kernels on wide loads."""

PREFERRED_MULTIPLE = 128
"""Chunk rows are a multiple of this where the budget allows it: a GEMM tile's height."""


def chunk_rows(num_tokens: int, max_columns: int, itemsize: int, budget_bytes: int, explicit: int | None = None) -> int:
    """Rows of a chunk: at least 1, at most `max(num_tokens, 1)`.

    Args:
        num_tokens: rows to split, the same on all ranks.
        max_columns: columns of the largest shard.
        itemsize: bytes of one logit.
        budget_bytes: bytes that one chunk of logits may take. A single row may exceed it.
        explicit: the user's choice, which wins over the budget.
    """
    most = max(num_tokens, 1)
    if explicit is not None:
        return min(explicit, most)
    row_bytes = row_stride(max_columns) * itemsize
    rows = budget_bytes // row_bytes if row_bytes else most
    if rows < most and rows >= PREFERRED_MULTIPLE:
        rows -= rows % PREFERRED_MULTIPLE
    return max(1, min(rows, most))


def row_stride(columns: int) -> int:
    """Elements from one row of a logits buffer to the next."""
    return -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT


def logits_buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised `[rows, columns]` buffer with the row stride that the row kernels require."""
    return torch.empty(rows, row_stride(columns), dtype=dtype, device=device)[:, :columns]
