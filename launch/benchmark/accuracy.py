"""Errors of a step against the same computation in higher precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .methods import Program
from .workload import IGNORE_INDEX, Problem

CHUNK_BYTES = 2**29


@dataclass(frozen=True)
class Reference:
    """Loss, gradient of all hidden states `[N, H]` and of this rank's weight `[L, H]`, for the rounded inputs."""

    loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def reference(problem: Problem, full_weight: Tensor) -> Reference:
    """In float64 on the CPU, in float32 (float64 for float64 inputs) on a GPU; full weight, chunks of tokens."""
    wide = torch.float32 if problem.device.type == "cuda" and full_weight.dtype != torch.float64 else torch.float64
    hidden, target, weight = problem.hidden.detach(), problem.target, full_weight.detach().to(wide)
    valid = target != IGNORE_INDEX
    scale = 1.0 / valid.sum().clamp(min=1).to(wide)
    rows = max(1, CHUNK_BYTES // (wide.itemsize * weight.shape[0]))
    losses, hidden_grad = [], torch.empty(hidden.shape, dtype=wide, device=hidden.device)
    mine = slice(problem.shard.start, problem.shard.start + problem.shard.num_columns)
    weight_grad = torch.zeros(problem.weight.shape, dtype=wide, device=hidden.device)
    for start in range(0, hidden.shape[0], rows):
        at = slice(start, start + rows)
        x = hidden[at].to(wide)
        logits = x @ weight.t()
        label, here = torch.where(valid[at], target[at], 0)[:, None], valid[at]
        lse = logits.logsumexp(-1, keepdim=True)
        losses.append(torch.where(here, (lse - logits.gather(1, label))[:, 0], 0.0).sum())
        grad = logits.sub_(lse).exp_()
        grad.scatter_add_(1, label, grad.new_full(label.shape, -1.0))
        grad.mul_((here * scale)[:, None])
        hidden_grad[at] = grad @ weight
        weight_grad[: problem.shard.num_columns].addmm_(grad[:, mine].t(), x)
    return Reference(torch.stack(losses).sum() * scale, hidden_grad, weight_grad)


def errors(loss: Tensor, program: Program, expected: Reference, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Relative errors: of the loss; of the hidden and weight gradients by Frobenius norm, over all ranks; median and
    99th percentile over the rows of the hidden gradient (those of valid tokens)."""
    found = {"loss_error": _relative(_sums(loss, expected.loss))}
    if program.hidden.grad is None or program.weight.grad is None:
        return found
    want = expected.hidden_grad[program.tokens]
    difference = program.hidden.grad.to(want.dtype) - want
    per_row = difference.norm(dim=1)[want.norm(dim=1) > 0] / want.norm(dim=1)[want.norm(dim=1) > 0]
    rows = per_row.sort().values
    for name, share in (("hidden_row_error_median", 0.5), ("hidden_row_error_p99", 0.99)):
        found[name] = rows[min(len(rows) - 1, int(share * len(rows)))].item() if len(rows) else 0.0
    hidden, weight = _sums(program.hidden.grad, want), _sums(program.weight.grad, expected.weight_grad)
    if group is not None:
        dist.all_reduce(weight, group=group)
        if len(want) < len(expected.hidden_grad):
            dist.all_reduce(hidden, group=group)
    return found | {"hidden_error": _relative(hidden), "weight_error": _relative(weight)}


def _sums(actual: Tensor, expected: Tensor) -> Tensor:
    """Sums of squares of the difference and of what is expected."""
    return torch.stack([(actual.to(expected.dtype) - expected).square().sum(), expected.square().sum()])


def _relative(sums: Tensor) -> float:
    difference, size = sums.tolist()
    return (difference / size) ** 0.5 if size else (0.0 if difference == 0 else float("inf"))
