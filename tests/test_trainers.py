"""The programs of docs/trainers.md: each trains as one process that sees the batches of all ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from flce_dist import VocabParallelHead
from tests.test_docs import ROOT, programs_of, run_program

pytestmark = pytest.mark.timeout(600)

PROGRAMS = {program.splitlines()[0].split()[-1]: program for program in programs_of(ROOT / "docs" / "trainers.md")}
Batch = tuple[Tensor, Tensor]


def printed_losses(name: str, folder: Path) -> list[float]:
    outputs = run_program(PROGRAMS[name], folder)
    assert all("loss " not in output for output in outputs[1:])
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", outputs[0], flags=re.MULTILINE)]


def train(head: nn.Module, body: nn.Module, steps: Sequence[Sequence[Batch]]) -> list[list[float]]:
    """The loss of each rank's batch in each step of one process, which trains on their mean."""
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for batches in steps:
        each = [
            nn.functional.cross_entropy(head(body(ids)).flatten(0, 1), targets.flatten()) for ids, targets in batches
        ]
        torch.stack(each).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses


def body() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.LayerNorm(64))


def test_accelerate_trains_as_one_process(tmp_path: Path) -> None:
    found = printed_losses("with_accelerate.py", tmp_path)
    torch.manual_seed(0)
    model, head = body(), nn.Linear(64, 1000, bias=False)
    of_ranks = []
    for rank in range(2):
        torch.manual_seed(rank)
        of_ranks.append([tuple(torch.randint(1000, (2, 4, 128))) for _ in range(3)])
    losses = train(head, model, list(zip(*of_ranks, strict=True)))
    assert found == pytest.approx([sum(each) / 2 for each in losses], abs=2e-5)
    assert found[0] != pytest.approx(found[2], abs=1e-3)


def test_lightning_trains_as_one_process(tmp_path: Path) -> None:
    found = printed_losses("with_lightning.py", tmp_path)
    tokens = torch.randint(1000, (64, 129), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model, head = body(), VocabParallelHead(64, 1000)
    # As Lightning does where the loader has no sampler of its own: shuffled, over the two data-parallel ranks.
    order = [list(DistributedSampler(tokens, 2, rank, shuffle=True, seed=0)) for rank in range(2)]
    rows = [[tokens[indices[4 * step : 4 * (step + 1)]] for indices in order] for step in range(3)]
    losses = train(head, model, [[(row[:, :-1], row[:, 1:]) for row in of_ranks] for of_ranks in rows])
    assert found == pytest.approx([each[0] for each in losses], abs=2e-5)
