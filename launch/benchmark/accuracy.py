"""Errors of a step against the same computation in higher precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flce_dist import collectives

from .methods import Method, Program
from .workload import IGNORE_INDEX, Problem, make_class_weight

CHUNK_BYTES = 2**29


@dataclass(frozen=True)
class Reference:
    """Loss, gradient of all hidden states `[N, H]` and of this rank's weight `[L, H]`, for the rounded inputs."""

    loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def reference(
    problem: Problem,
    full_weight: Tensor,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_scaling: bool = False,
    class_weight: bool = False,
) -> Reference:
    """In float64 on the CPU, in float32 (float64 for float64 inputs) on a GPU; full weight, chunks of tokens.

    The options are those that a `Method` has for its loss.
    """
    wide = torch.float32 if problem.device.type == "cuda" and full_weight.dtype != torch.float64 else torch.float64
    hidden, target, weight = problem.hidden.detach(), problem.target, full_weight.detach().to(wide)
    of_class = make_class_weight(weight.shape[0], weight.device).to(wide) if class_weight else None
    valid = target != IGNORE_INDEX
    num_valid = valid.sum().clamp(min=1)
    divisor = num_valid if of_class is None else of_class[target[valid]].sum()

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        losses = F.cross_entropy(
            logits, target, of_class, ignore_index=IGNORE_INDEX, label_smoothing=label_smoothing, reduction="none"
        )
        losses = losses / divisor
        if z_loss:
            losses = losses + torch.where(target == IGNORE_INDEX, 0.0, z_loss * logits.logsumexp(-1) ** 2 / num_valid)
        if token_scaling:
            losses = losses * F.cross_entropy(logits.detach(), target, reduction="none").neg().exp()
        return losses.sum()

    rows = max(1, CHUNK_BYTES // (wide.itemsize * weight.shape[0]))
    losses, hidden_grad = [], torch.empty(hidden.shape, dtype=wide, device=hidden.device)
    mine = slice(problem.shard.start, problem.shard.start + problem.shard.num_columns)
    weight_grad = torch.zeros(problem.weight.shape, dtype=wide, device=hidden.device)
    for start in range(0, hidden.shape[0], rows):
        at = slice(start, start + rows)
        x = hidden[at].to(wide)
        logits = (x @ weight.t()).requires_grad_()
        loss = loss_of(logits, target[at])
        (grad,) = torch.autograd.grad(loss, logits)
        losses.append(loss.detach())  # its graph would keep the logits
        hidden_grad[at] = grad @ weight
        weight_grad[: problem.shard.num_columns].addmm_(grad[:, mine].t(), x)
    return Reference(torch.stack(losses).sum(), hidden_grad, weight_grad)


class References:
    """What methods are compared with: each with its own loss. Only the last one is kept."""

    def __init__(self, problem: Problem, full_weight: Tensor) -> None:
        self._make = partial(reference, problem, full_weight)
        self._loss: Mapping[str, Any] | None = None
        self._made: Reference | None = None

    def of(self, method: Method) -> Reference:
        if self._made is None or self._loss != method.loss:
            self._made = None  # its memory
            self._loss, self._made = method.loss, self._make(**method.loss)
        return self._made


def errors(loss: Tensor, program: Program, expected: Reference, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Relative errors: of the loss; of the hidden and weight gradients by Frobenius norm; median and 99th percentile
    over the rows of the hidden gradient (those of valid tokens). All ranks call it, and all get those of all ranks."""
    found = {"loss_error": _relative(_sums(loss, expected.loss))}
    if program.hidden.grad is None or program.weight.grad is None:
        return found
    want = expected.hidden_grad[program.tokens]
    difference = program.hidden.grad.to(want.dtype) - want
    per_row = difference.norm(dim=1)[want.norm(dim=1) > 0] / want.norm(dim=1)[want.norm(dim=1) > 0]
    token_group = None if program.tokens == slice(None) else group
    if token_group is not None:
        per_row = torch.cat(collectives.all_gather_object(per_row.cpu(), token_group))
    rows = per_row.sort().values
    for name, share in (("hidden_row_error_median", 0.5), ("hidden_row_error_p99", 0.99)):
        found[name] = rows[min(len(rows) - 1, int(share * len(rows)))].item() if len(rows) else 0.0
    hidden, weight = _sums(program.hidden.grad, want), _sums(program.weight.grad, expected.weight_grad)
    if group is not None:
        dist.all_reduce(weight, group=group)
    if token_group is not None:
        dist.all_reduce(hidden, group=token_group)
    return found | {"hidden_error": _relative(hidden), "weight_error": _relative(weight)}


def _sums(actual: Tensor, expected: Tensor) -> Tensor:
    """Sums of squares of the difference and of what is expected."""
    return torch.stack([(actual.to(expected.dtype) - expected).square().sum(), expected.square().sum()])


def _relative(sums: Tensor) -> float:
    difference, size = sums.tolist()
    return (difference / size) ** 0.5 if size else (0.0 if difference == 0 else float("inf"))
