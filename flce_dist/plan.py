"""Rows of one chunk of logits from a byte budget: a pure function of shapes and dtypes, so that all ranks agree.

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

GROWN_MULTIPLE = 512
"""The same for chunks whose size follows the number of tokens: where that varies from step to step, a few sizes that
come again leave a caching allocator fewer blocks that fit nothing else."""

FULL_RATE_ROWS = 2048
"""Rows of a chunk from which on cutting costs the GEMMs little: on an H200 4 to 7 % at 1024 rows, 1 to 4 % at 2048."""

MAX_NARROW_CHUNKS = 2
"""Chunks up to which a bfloat16 weight gradient is accumulated in bfloat16; beyond it is in float32. Each chunk rounds
the sum once more, and vendors' GEMMs round the product before they add it: on random data the error is 1.4 times that
of one rounding after 2 chunks, 1.6 times after 3, 1.8 times after 4."""

FIRST_PART_OUTPUTS = 2**22
"""Elements that a GEMM of 128 tiles of 128 x 256 makes: about as many tiles as a large GPU has multiprocessors, and so
the least work that keeps all of it busy."""


def chunk_rows(
    num_tokens: int,
    max_columns: int,
    hidden_size: int,
    itemsize: int,
    budget_bytes: int | None,
    explicit: int | None = None,
    prefer_few: bool = False,
) -> int:
    """Rows of a chunk: at least 1, at most `max(num_tokens, 1)`.

    Args:
        num_tokens: rows to split, the same on all ranks.
        max_columns: columns of the largest shard.
        hidden_size: of the weight's gradient, which bounds the default budget.
        itemsize: bytes of one logit.
        budget_bytes: bytes that one chunk of logits may take; None: `default_budget`. A single row may exceed it.
        explicit: the user's choice, which wins over the budget.
        prefer_few: `prefers_few_chunks`. The default budget then grows to `MAX_NARROW_CHUNKS` chunks, where their
            larger logits take no more memory than the float32 accumulator that they spare would.
    """
    most = max(num_tokens, 1)
    if explicit is not None:
        return min(explicit, most)
    row_bytes = row_stride(max_columns) * itemsize
    if budget_bytes is not None:
        return _rows_within(budget_bytes, most, row_bytes)
    rows = _rows_within(default_budget(row_bytes, hidden_size), most, row_bytes)
    if prefer_few and -(-most // rows) > MAX_NARROW_CHUNKS:
        few = min(most, _equal_rows(most, MAX_NARROW_CHUNKS, GROWN_MULTIPLE))
        grad_bytes = max_columns * hidden_size * torch.bfloat16.itemsize
        # A float32 accumulator is twice that, and has beside it first the logits, then the copy in bfloat16.
        if grad_bytes + few * row_bytes <= 2 * grad_bytes + max(rows * row_bytes, grad_bytes):
            return few
    return rows


def prefers_few_chunks(
    accum_dtype: torch.dtype | None, weight_dtype: torch.dtype, num_ranks: int, needs_weight: bool
) -> bool:
    """Whether the weight's gradient would be accumulated in bfloat16 over few chunks, and in float32 over more.

    Of several ranks one may not ask whether its own weight requires grad: others' may.
    """
    return accum_dtype is None and weight_dtype == torch.bfloat16 and (num_ranks > 1 or needs_weight)


def _rows_within(budget_bytes: int, most: int, row_bytes: int) -> int:
    rows = budget_bytes // row_bytes if row_bytes else most
    if rows >= most or rows < PREFERRED_MULTIPLE:
        return max(1, min(rows, most))
    return _equal_rows(most, -(-most // (rows - rows % PREFERRED_MULTIPLE)), PREFERRED_MULTIPLE)


def _equal_rows(num_tokens: int, num_chunks: int, multiple: int) -> int:
    """Of equal chunks, so that no small last one does badly and has to hide the reduction of a large one."""
    return -(-num_tokens // (num_chunks * multiple)) * multiple


def default_budget(row_bytes: int, hidden_size: int) -> int:
    """Bytes of one chunk of logits, unless few chunks are preferred: 512 MiB, or what `FULL_RATE_ROWS` take where that
    is more, but for small hidden sizes no more rows than `hidden_size`, which is what the weight's gradient takes
    beside it."""
    return max(512 * 2**20, min(FULL_RATE_ROWS, hidden_size) * row_bytes)


def first_part(columns: int, hidden_size: int) -> int:
    """Columns of the first of the two GEMMs that make a chunk's weight gradient where a reduction was started before.

    A GEMM holds the whole GPU until its last tiles, so the reduction runs beside the second, which should be long.
    """
    rows = -(-FIRST_PART_OUTPUTS // (hidden_size * PREFERRED_MULTIPLE)) * PREFERRED_MULTIPLE
    return min(rows, columns)


def row_stride(columns: int) -> int:
    """Elements from one row of a logits buffer to the next."""
    return -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT


def span(tensor: Tensor, start: int, stop: int, dim: int = 0) -> Tensor:
    """Entries `[start, stop)` along a dimension: the tensor itself when these are all, since with few tokens the host's
    time for a view is felt."""
    size = stop - start
    return tensor if size == tensor.shape[dim] else tensor.narrow(dim, start, size)


def logits_buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised `[rows, columns]` buffer with the row stride that the row kernels require."""
    return span(torch.empty(rows, row_stride(columns), dtype=dtype, device=device), 0, columns, dim=1)
