"""How a chunk's logits lie in memory, and parts of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_ALIGNMENT = 16
"""Elements to which the row stride of the logits buffer is rounded up: at least 16 bytes for every dtype, so that
vocabularies like 50257 keep the GEMMs on their aligned path and the row kernels on wide loads."""


def row_stride(columns: int) -> int:
    """Elements from one row of a logits buffer to the next."""
    return -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT


def span(tensor: Tensor, start: int, stop: int, dim: int = 0) -> Tensor:
    """Entries `[start, stop)` along a dimension: the tensor itself when these are all, since with few tokens the host's
    time for a view is felt."""
    size = stop - start
    return tensor if size == tensor.shape[dim] else tensor.narrow(dim, start, size)


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its values in memory, where a kernel reads them: without torch's lazy negative bit, and no
    zero tensor, which has no memory."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def logits_buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised `[rows, columns]` buffer with the row stride that the row kernels require."""
    return span(torch.empty(rows, row_stride(columns), dtype=dtype, device=device), 0, columns, dim=1)
