"""The head under FSDP1, FSDP2, FSDP2 x TP and HSDP against one process, after some steps of SGD."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flce_dist import count_valid_tokens
from tests.kit.fsdp import BFLOAT16, RATE, Cell, data_group, judge, make_model, train, train_step, wrap
from tests.kit.fsdp_matrix import UNEVEN, every_cell, name, selection
from tests.kit.tail_model import H
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool


@pytest.mark.parametrize("cell", selection(), ids=name)
def test_steps_are_those_of_one_process(cell: Cell, workers: Pool) -> None:
    judge(cell, workers.run(cell.world, train, cell))


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", every_cell(), ids=name)
def test_every_cell(cell: Cell, workers: Pool) -> None:
    judge(cell, workers.run(cell.world, train, cell))


def _checkpoint(model: Any) -> None:
    model.tail.checkpointed = True


def _compile(model: nn.Module) -> None:
    model.compile(backend="aot_eager")


def _no_backward_gather(model: Any) -> None:
    model.tail.head.set_unshard_in_backward(False)


WRAPPINGS = [
    Cell("fsdp1", "own", vocab_size=UNEVEN),
    Cell("fsdp1", "root", vocab_size=UNEVEN, flag=False),
    Cell("fsdp2", "own", vocab_size=UNEVEN),
    Cell("fsdp2", "grouped", vocab_size=UNEVEN, head="module", flag=False),
    Cell("fsdp2", "root", BFLOAT16, vocab_size=UNEVEN),
    Cell("2d", "own", vocab_size=UNEVEN, world=4),
    # Not tied-unit: torch's sharded embedding does not compile as a unit of its own that reduce-scatters its output.
    Cell("2d", "own", vocab_size=UNEVEN, world=4, head="module", sequence_parallel=True),
]


@pytest.mark.parametrize("change", [_checkpoint, _compile])
@pytest.mark.parametrize("cell", WRAPPINGS, ids=name)
def test_checkpointed_or_compiled(cell: Cell, change: Callable[[Any], None], workers: Pool) -> None:
    judge(cell, workers.run(cell.world, train, cell, change))


@pytest.mark.parametrize(
    "cell",
    [
        # FSDP1 offloads to memory that only an accelerator can pin: tests/gpu/test_fsdp.py.
        Cell("fsdp2", "own", offload=True, vocab_size=UNEVEN),
        Cell("fsdp2", "root", BFLOAT16, offload=True),
        Cell("fsdp1", "own", shard_grad_op=True, vocab_size=UNEVEN),
        Cell("fsdp1", "grouped", BFLOAT16, shard_grad_op=True, flag=False),
    ],
    ids=lambda cell: f"{name(cell)}-{'offload' if cell.offload else 'shard_grad_op'}",
)
def test_offload_and_shard_grad_op(cell: Cell, workers: Pool) -> None:
    judge(cell, workers.run(cell.world, train, cell))


def test_the_judge_sees_a_wrong_step(workers: Pool) -> None:
    """Gradients of a rank's mean instead of the mean of all ranks' tokens."""
    with pytest.raises(AssertionError, match="errors"):
        judge(Cell(), workers.run(2, _train_with_local_means))


def _train_with_local_means(ctx: Context) -> Any:
    return train(ctx, Cell(), _forget_the_count)


def _forget_the_count(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, {}), with_kwargs=True)


VOCAB = 80
HEAD = VOCAB * H


def _weight_collectives(ctx: Context, cell: Cell, change: Callable[[Any], None] | None) -> dict[str, Counter[int]]:
    """Sizes in elements of the parameters gathered and the gradients reduced in the second step, whole units."""
    model = wrap(cell, ctx, make_model(cell))
    if change is not None:
        change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    group = data_group(cell, ctx)
    train_step(ctx, cell, model, optimizer, 0, group)
    with Trace() as trace:
        train_step(ctx, cell, model, optimizer, 1, group)
    found: dict[str, Counter[int]] = {"all_gather": Counter(), "reduce_scatter": Counter(), "all_reduce": Counter()}
    for event in trace.events:
        if event.is_collective and event.dtypes[-1].is_floating_point:
            whole = torch.Size(event.shapes[-1]).numel() * (cell.data_ranks if event.name == "all_gather" else 1)
            if whole >= HEAD // cell.tensor_ranks:
                found[event.name][whole] += 1
    return found


@pytest.mark.parametrize(
    ("cell", "change", "gathers", "reductions"),
    [
        (Cell("fsdp1"), None, 2, 1),
        (Cell("fsdp1", shard_grad_op=True), None, 1, 1),
        (Cell("fsdp1", micro_steps=2), None, 4, 1),
        (Cell("fsdp2"), None, 2, 1),
        (Cell("fsdp2", flag=False), None, 1, 1),
        (Cell("fsdp2"), _no_backward_gather, 1, 1),
        (Cell("fsdp2", flag=False, micro_steps=2), None, 2, 1),
        (Cell("2d", world=4), None, 2, 1),
        (Cell("2d", world=4, flag=False, sequence_parallel=True), None, 1, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_the_head_is_gathered_once_a_pass_and_reduced_once_a_step(
    cell: Cell,
    change: Callable[[Any], None] | None,
    gathers: int,
    reductions: int,
    dtype: torch.dtype,
    workers: Pool,
) -> None:
    """However many chunks the loss has: a gather in forward, one in backward unless it is told off, one reduction."""
    cell = replace(cell, vocab_size=VOCAB, dtype=dtype)
    size = HEAD // cell.tensor_ranks
    for found in workers.run(cell.world, _weight_collectives, cell, change):
        assert found["all_gather"][size] == gathers
        assert found["reduce_scatter"][size] == reductions
        assert not found["all_reduce"]
        # Of this size there is also the root's unit, which has the embedding, and nothing else.
        assert len(found["all_gather"]) == len(found["reduce_scatter"]) == 2


def _bf16_normalizer(ctx: Context, as_float: bool) -> float:
    """300 tokens on one rank and 1 on the other; the sum has no bfloat16."""
    cell = Cell(dtype=BFLOAT16)
    model = wrap(cell, ctx, make_model(cell))
    generator = torch.Generator().manual_seed(ctx.rank)
    target = torch.randint(64, (1, 300 if ctx.rank == 0 else 1), generator=generator)
    normalizer = count_valid_tokens(target, group=ctx.group)
    loss = model(target, target, normalizer=normalizer.float() if as_float else normalizer)
    expected = nn.functional.cross_entropy(_logits(target).flatten(0, 1).float(), target.flatten(), reduction="sum")
    return (loss * 301 / expected).item()


def _logits(ids: torch.Tensor) -> torch.Tensor:
    return make_model(Cell()).to(BFLOAT16)(ids)


def test_a_count_survives_mixed_precision_and_a_float_is_refused(workers: Pool) -> None:
    """FSDP casts floating-point arguments to the parameters' dtype, also those of the head's call."""
    for ratio in workers.run(2, _bf16_normalizer, False):
        assert ratio == pytest.approx(1, abs=2e-3)
    for outcome in workers.outcomes(2, _bf16_normalizer, True):
        assert outcome.error is not None
        assert "ValueError" in outcome.error.classes
        assert "int64" in outcome.error.message
