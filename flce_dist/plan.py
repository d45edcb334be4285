"""Rows of one chunk of logits from a byte budget: a pure function of shapes and dtypes, so that all ranks agree.

Nothing a rank sees alone (free memory, its number of valid tokens, its own smaller shard) may enter: ranks with
different chunk counts would call different numbers of collectives.
"""

from __future__ import annotations

import torch

from .buffers import row_stride
from .options import LossOptions

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
    max_narrow_chunks: int | None = None,
    num_parts: int = 1,
) -> int:
    """Rows of a chunk: at least `num_parts`, at most `max(num_tokens, num_parts)`.

    Args:
        num_tokens: rows to split, the same on all ranks.
        max_columns: columns of the largest shard.
        hidden_size: of the weight's gradient, which bounds the default budget.
        itemsize: bytes of one logit.
        budget_bytes: bytes that one chunk of logits may take; None: `default_budget`. A single row may exceed it.
        explicit: the user's choice, which wins over the budget.
        max_narrow_chunks: as `narrow_chunks`, and None where no weight gradient is made. With more chunks than these
            the default budget grows to what a float32 accumulator takes anyway (`_grown_rows`).
        num_parts: ranks that bring equal parts of a chunk, of which the rows are a multiple: more by default, fewer for
            a choice or a budget.
    """
    most = max(num_tokens, 1)
    row_bytes = row_stride(max_columns) * itemsize
    chosen = explicit
    if chosen is None and budget_bytes is not None:
        chosen = _rows_within(budget_bytes, most, row_bytes)
    if chosen is not None:
        rows = min(chosen, most)
        return max(rows - rows % num_parts, num_parts)
    rows = _rows_within(default_budget(row_bytes, hidden_size), most, row_bytes)
    if max_narrow_chunks is not None and -(-most // rows) > max_narrow_chunks:
        rows = _grown_rows(rows, most, row_bytes, max_columns * hidden_size * 2, max_narrow_chunks)
    return rows + -rows % num_parts  # rounded down, a few rows would be left for one chunk more


def rows_of_call(
    options: LossOptions,
    num_tokens: int,
    hidden_size: int,
    max_columns: int,
    dtype: torch.dtype,
    num_ranks: int,
    sharded_tokens: bool,
    needs_weight: bool,
) -> int:
    """Rows of a chunk of a whole call, whose `num_tokens` are the group's and whose operands are of `dtype`."""
    # Of several ranks one may not ask whether its own weight needs a gradient: others' may.
    makes_weight_grad = num_ranks > 1 or needs_weight
    return chunk_rows(
        num_tokens, max_columns, hidden_size, (options.logits_dtype or dtype).itemsize, options.budget_bytes,
        options.chunk_rows, narrow_chunks(options.accum_dtype, dtype) if makes_weight_grad else None,
        num_ranks if sharded_tokens else 1,
    )  # fmt: skip


def narrow_chunks(accum_dtype: torch.dtype | None, weight_dtype: torch.dtype) -> int | None:
    """Chunks up to which the gradient of a 16-bit weight is accumulated in the weight's dtype, and in float32 beyond.
    None: any number, or the weight is wider.

    `MAX_NARROW_CHUNKS` for bfloat16; 0 for float16, in which a sum over many tokens may overflow where the scaled
    gradient would not, and where the user has chosen float32.
    """
    if weight_dtype not in (torch.bfloat16, torch.float16) or accum_dtype not in (None, torch.float32):
        return None
    return MAX_NARROW_CHUNKS if accum_dtype is None and weight_dtype == torch.bfloat16 else 0


def accumulation_dtype(explicit: torch.dtype | None, weight_dtype: torch.dtype, num_chunks: int) -> torch.dtype:
    """The dtype of a weight gradient while it is accumulated. Unless the user has chosen: the weight's, or float32 over
    more than `narrow_chunks`."""
    narrow = narrow_chunks(explicit, weight_dtype)
    return explicit or (weight_dtype if narrow is None or num_chunks <= narrow else torch.float32)


def _grown_rows(rows: int, most: int, row_bytes: int, grad_bytes: int, max_narrow_chunks: int) -> int:
    """Rows of a chunk that costs no more memory than `rows` and a float32 accumulator: that is twice `grad_bytes`, the
    16-bit gradient, and has beside it first the logits, then the gradient as it is handed out."""
    if max_narrow_chunks:  # which spare the accumulator
        few = min(most, _equal_rows(most, max_narrow_chunks, GROWN_MULTIPLE))
        if grad_bytes + few * row_bytes <= 2 * grad_bytes + max(rows * row_bytes, grad_bytes):
            return few
    return max(rows, _rows_within(grad_bytes, most, row_bytes))


def _rows_within(budget_bytes: int, most: int, row_bytes: int) -> int:
    rows = budget_bytes // row_bytes if row_bytes else most
    if rows >= most or rows < PREFERRED_MULTIPLE:
        return max(1, min(rows, most))
    return _equal_rows(most, -(-most // (rows - rows % PREFERRED_MULTIPLE)), PREFERRED_MULTIPLE)


def _equal_rows(num_tokens: int, num_chunks: int, multiple: int) -> int:
    """Of equal chunks, so that no small last one does badly and has to hide the reduction of a large one."""
    return -(-num_tokens // (num_chunks * multiple)) * multiple


def default_budget(row_bytes: int, hidden_size: int) -> int:
    """Bytes of one chunk of logits, unless it grows (`_grown_rows`): 512 MiB, or what `FULL_RATE_ROWS` take where that
    is more, but for small hidden sizes no more rows than `hidden_size`, which is what the weight's gradient takes
    beside it."""
    return max(512 * 2**20, min(FULL_RATE_ROWS, hidden_size) * row_bytes)


def first_part(columns: int, hidden_size: int) -> int:
    """Columns of the first of the two GEMMs that make a chunk's weight gradient where a reduction was started before.

    A GEMM holds the whole GPU until its last tiles, so the reduction runs beside the second, which should be long.
    """
    rows = -(-FIRST_PART_OUTPUTS // (hidden_size * PREFERRED_MULTIPLE)) * PREFERRED_MULTIPLE
    return min(rows, columns)
