"""Faults that people reported of losses of this kind, with real DeepSpeed engines (B26, B32, B33).

The numbers are those of docs/field-reports.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.kit.skips import needs

pytest.importorskip("deepspeed", reason=needs("deepspeed"))

from flce_dist import count_valid_tokens, linear_cross_entropy
from flce_dist.integrations.deepspeed import initialize
from tests.kit.compare import assert_close, assert_loss
from tests.kit.engines import LR, Cell, deepspeed_ready, gathered, make_model, train_engine
from tests.kit.workers import Context, Pool

Engines = Callable[[int], Pool]
DATA = {"vocab_parallel": "data"}


def trained_alone(ids: list[Tensor], labels: list[Tensor], cell: Cell) -> tuple[float, dict[str, Tensor]]:
    """One optimizer step on the mean over all valid tokens of all micro-steps."""
    model = make_model(cell)
    logits = F.linear(model.hidden(torch.cat(ids)), model.lm_head.weight).flatten(0, 1)
    loss = F.cross_entropy(logits, torch.cat(labels).flatten())
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return loss.item(), {name: value.detach() for name, value in model.named_parameters()}


def assert_parameters(actual: dict[str, Tensor], expected: dict[str, Tensor], cell: Cell) -> None:
    for name, start in make_model(cell).named_parameters():
        if actual[name].shape == start.shape:  # a sharded head is looked at elsewhere
            assert_close(actual[name] - start, expected[name] - start, 1e-5, f"change of {name}")


def micro_batches(valid: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """`valid[micro-step][rank]` labels count; the tokens of a micro-step, one row of four a rank."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(37, (len(counts), 4), generator=generator) for counts in valid]
    labels = [torch.randint(37, (len(counts), 4), generator=generator) for counts in valid]
    for step, counts in enumerate(valid):
        for rank, count in enumerate(counts):
            labels[step][rank, count:] = -100
    return ids, labels


def _token_weighted(ctx: Context, cell: Cell, valid: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    """The loop of docs/deepspeed.md: one count for the step, and no division by the accumulation steps."""
    ids, labels = micro_batches(valid)
    with deepspeed_ready(ctx):
        model = make_model(cell)
        config = cell.config() | {"train_micro_batch_size_per_gpu": 1}
        engine = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)[0]
        mine = [step[ctx.rank : ctx.rank + 1] for step in labels]
        count = count_valid_tokens(torch.cat(mine), group=engine.data_parallel_group)
        shares = 1 if cell.section == DATA else ctx.world
        total = torch.zeros(())
        for step, target in enumerate(mine):
            loss = engine(ids[step][ctx.rank : ctx.rank + 1], target, normalizer=count / shares)
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        parameters = gathered(engine)
        engine.destroy()
    return total.item() / ctx.world, parameters


class TestB26TokenWeightedMean:
    """Ranks or micro-steps with few valid tokens weigh too much."""

    @pytest.mark.parametrize("valid", [[[1, 3]], [[1, 3], [4, 2]], [[0, 4], [1, 0]]], ids=str)
    @pytest.mark.parametrize("cell", [Cell(2), Cell(3), Cell(3, section=DATA)], ids=lambda cell: cell.id)
    def test_one_count_for_ranks_and_micro_steps(
        self, cell: Cell, valid: list[list[int]], engine_workers: Engines
    ) -> None:
        cell = replace(cell, accumulation=len(valid))
        loss, parameters = trained_alone(*micro_batches(valid), cell)
        for reported, result in engine_workers(2).run(2, _token_weighted, cell, valid):
            assert reported == pytest.approx(loss, rel=1e-5)
            assert_parameters(result, parameters, cell)


class TestB32PartitionedWeight:
    """ZeRO-3 leaves a weight of no elements outside of its module, and partitions it again before backward."""

    def test_an_empty_weight_names_zero_and_gathering(self) -> None:
        hidden, target = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 1, 2])
        weight = torch.nn.Parameter(torch.empty(0))
        weight.ds_id = 0  # type: ignore[attr-defined]
        weight.ds_shape = torch.Size([5, 8])  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"DeepSpeed ZeRO-3 has partitioned it.* gather it around"):
            linear_cross_entropy(hidden, weight, target)

    @pytest.mark.parametrize("section", [{}, DATA], ids=["gathered", "sharded"])
    def test_stages_2_and_3_agree(self, section: dict[str, Any], engine_workers: Engines) -> None:
        two = engine_workers(2).run(2, train_engine, Cell(2, clip=0.3))[0]
        three = engine_workers(2).run(2, train_engine, Cell(3, clip=0.3, section=section))[0]
        assert three.losses == pytest.approx(two.losses, rel=1e-6)
        for name, value in two.parameters.items():
            assert_close(three.parameters[name], value, 1e-6, name)

    def test_outside_of_the_head_module_is_an_error_that_says_so(self, engine_workers: Engines) -> None:
        for outcome in engine_workers(2).outcomes(2, _outside):
            assert outcome.error is not None
            assert "ZeRO" in outcome.error.message


def _outside(ctx: Context) -> None:
    cell = Cell(3)
    with deepspeed_ready(ctx):
        model = make_model(cell)
        engine = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=cell.config())[0]
        linear_cross_entropy(torch.zeros(2, 16), engine.module.lm_head.weight, torch.tensor([1, 2]))


def _sequence_parallel(ctx: Context, cell: Cell, ids: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Each rank has a part of the sequence (Ulysses, ALST). DeepSpeed 0.19.8 sums the gradients of a sequence's ranks
    in stages 0 to 2, so that the divisor is the sequence's valid tokens, and averages them in stage 3."""
    with deepspeed_ready(ctx):
        from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

        mpu.initialize_sequence_parallel(ctx.world)
        sequence = mpu.get_sequence_parallel_group()
        model = make_model(cell)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        config = cell.config() | {"train_micro_batch_size_per_gpu": 1}
        engine = initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]
        mine = targets.chunk(ctx.world, dim=1)[ctx.rank]
        shares = ctx.world if cell.stage == 3 else 1
        count = count_valid_tokens(mine, group=sequence)
        loss = engine(ids.chunk(ctx.world, dim=1)[ctx.rank], mine, normalizer=count / shares)
        engine.backward(loss)
        engine.step()
        total = loss.detach() / shares
        dist.all_reduce(total, group=sequence)
        parameters = gathered(engine)
        engine.destroy()
    return total.item(), parameters


class TestB33LabelsAtTheEdgesOfSequenceParallelRanks:
    """The target of a rank's last token is on the next rank; shifting after the split loses it."""

    @pytest.mark.parametrize("documents", [(8,), (5, 3)], ids=["one document", "two documents"])
    @pytest.mark.parametrize("stage", [1, 3])
    def test_targets_are_shifted_before_the_split(
        self, documents: tuple[int, ...], stage: int, engine_workers: Engines
    ) -> None:
        ids = torch.arange(10, 18)[None]
        targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
        if len(documents) > 1:
            targets[:, documents[0] - 1] = -100
        assert (targets != -100).sum() == 8 - len(documents)
        loss, parameters = trained_alone([ids], [targets], Cell())
        for reported, result in engine_workers(2).run(2, _sequence_parallel, Cell(stage), ids, targets):
            assert_loss(torch.tensor(reported), torch.tensor(loss), 1e-5)
            assert_parameters(result, parameters, Cell())
