"""The floor: the matrix products that any exact loss needs, and nothing else.

Three bare GEMMs of this rank's shapes (logits, hidden gradient, weight gradient; only the first when no gradient is
wanted), whole or cut into the chunks that a chunked loss uses. No loss, no communication. The second and third take
the logits where a loss would take their gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flce_dist.buffers import logits_buffer

from .workload import Problem


def gemms(problem: Problem, chunk_rows: int | None, forward_only: bool) -> Callable[[], None]:
    """The products of one step as a function; `chunk_rows=None` does not cut them."""
    x, weight = problem.hidden.detach(), problem.weight.detach()[: problem.shard.num_columns]
    num_tokens = x.shape[0]
    rows = num_tokens if chunk_rows is None else min(chunk_rows, num_tokens)

    def run() -> None:
        logits = logits_buffer(rows, weight.shape[0], x.dtype, x.device)
        if forward_only:
            for start in range(0, num_tokens, rows):
                _logits(logits, x[start : start + rows], weight)
            return
        hidden_grad, weight_grad = torch.empty_like(x), torch.empty_like(weight)
        for start in range(0, num_tokens, rows):
            chunk = x[start : start + rows]
            part = _logits(logits, chunk, weight)
            torch.mm(part, weight, out=hidden_grad[start : start + rows])
            if start == 0:
                torch.mm(part.t(), chunk, out=weight_grad)
            else:
                torch.addmm(weight_grad, part.t(), chunk, out=weight_grad)

    return run


def _logits(buffer: Tensor, chunk: Tensor, weight: Tensor) -> Tensor:
    part = buffer[: chunk.shape[0]]
    torch.mm(chunk, weight.t(), out=part)
    return part
