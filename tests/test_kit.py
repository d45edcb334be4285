"""The test kit judges the package, so it is judged first."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.kit import compare, heads, oracle
from tests.kit.cases import all_pairs, local_rows, shard_bounds
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool, WorkerFailed, WorkerHung


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_oracle_is_cross_entropy(reduction: str, smoothing: float, weighted: bool) -> None:
    hidden, weight, target = (t.double() if t.is_floating_point() else t for t in heads.random_head(9, 5, 11, 0))
    target[2] = -100
    column_weight = torch.rand(11, dtype=torch.float64) if weighted else None
    upstream = torch.randn(9 if reduction == "none" else (), dtype=torch.float64)
    ours = oracle.reference(
        hidden,
        weight,
        target,
        upstream=upstream,
        class_weight=column_weight,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, target, column_weight, reduction=reduction, label_smoothing=smoothing)
    loss.backward(upstream)
    compare.assert_close(ours.loss, loss.detach(), 1e-13, "loss")
    compare.assert_close(ours.hidden_grad, hidden.grad, 1e-13, "hidden gradient")
    compare.assert_close(ours.weight_grad, weight.grad, 1e-13, "weight gradient")


def test_oracle_z_gradient_is_the_formula() -> None:
    logits = torch.randn(5, 12, dtype=torch.float64)
    target = torch.tensor([0, 5, 6, -100, 11])
    ours = oracle.reference(logits, torch.eye(12, dtype=torch.float64), target, z_loss=1e-2)
    p, lse = logits.softmax(-1), logits.logsumexp(-1, keepdim=True)
    one_hot = F.one_hot(target.clamp(min=0), 12)
    expected = (p * (1 + 2e-2 * lse) - one_hot) / 4
    expected[3] = 0
    compare.assert_close(ours.hidden_grad, expected, 1e-13, "gradient of the logits")


def test_trained_head_has_the_measured_common_component() -> None:
    hidden, weight, target = heads.trained_head(128, 64, 1000, seed=0)
    share = weight.mean(0).norm() / weight.norm(dim=1).mean()
    assert abs(share - 0.94) < 0.01
    assert 2.0 < F.cross_entropy(hidden @ weight.T, target) < 3.0


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("split", ["even", "uneven", "empty", "padded"])
def test_shard_bounds_cover_the_vocabulary_once(world: int, split: str) -> None:
    for vocab_size in (1, 3, 10, 21, 129):
        weight = torch.arange(vocab_size)
        bounds = shard_bounds(vocab_size, world, split)
        shards = [local_rows(weight, start, stop, padding=-1) for start, stop in bounds]
        assert [len(s) for s in shards] == [stop - start for start, stop in bounds]
        joined = torch.cat(shards)
        assert joined[:vocab_size].tolist() == weight.tolist()
        assert (joined[vocab_size:] == -1).all()


def test_all_pairs_covers_every_pair() -> None:
    axes = {"a": [1, 2, 3], "b": "xyz", "c": [True, False], "d": range(4)}
    rows = all_pairs(axes)
    assert len(rows) < 3 * 3 * 2 * 4 / 2
    for (one, values), (two, others) in itertools.combinations(axes.items(), 2):
        seen = {(row[one], row[two]) for row in rows}
        assert seen == set(itertools.product(values, others))
    assert all(row["a"] != 1 or row["c"] for row in all_pairs(axes, lambda row: row["a"] != 1 or row["c"]))


def _sum_of_ranks(ctx: Context, scale: int) -> int:
    total = torch.tensor(ctx.rank * scale)
    dist.all_reduce(total, group=ctx.group)
    return int(total)


def _raise_on(ctx: Context, ranks: tuple[int, ...]) -> None:
    if ctx.rank in ranks:
        raise IndexError(f"target 7 on rank {ctx.rank}")


def _hang_on_rank_1(ctx: Context) -> None:
    if ctx.rank == 1:
        time.sleep(600)


def _one_collective_more_on_rank_0(ctx: Context) -> None:
    if ctx.rank == 0:
        dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=ctx.group)


def test_pool_runs_every_world_size(workers: Pool) -> None:
    for world in (1, 2, 3, 4):
        assert workers.run(world, _sum_of_ranks, 10) == [10 * sum(range(world))] * world


def test_pool_reports_errors_of_all_ranks_and_goes_on(workers: Pool) -> None:
    outcomes = workers.outcomes(3, _raise_on, (0, 2))
    assert [o.error is None for o in outcomes] == [False, True, False]
    assert outcomes[2].error is not None
    assert "IndexError" in outcomes[2].error.classes
    assert "target 7 on rank 2" in outcomes[2].error.message
    with pytest.raises(WorkerFailed, match="target 7 on rank 0"):
        workers.run(2, _raise_on, (0,))
    assert workers.run(2, _sum_of_ranks, 1) == [1, 1]


def test_pool_names_the_rank_that_hangs_and_restarts() -> None:
    pool = Pool()
    with pytest.raises(WorkerHung, match=r"rank\(s\) \[1\](.|\n)*_hang_on_rank_1"):
        pool.run(2, _hang_on_rank_1, timeout=2)
    with pytest.raises((WorkerHung, WorkerFailed)):
        pool.run(2, _one_collective_more_on_rank_0, timeout=2)
    assert pool.run(2, _sum_of_ranks, 1) == [1, 1]
    pool.close()


def _traced(ctx: Context) -> tuple[list[str], int]:
    x, w = torch.ones(8, 4), torch.ones(4, 4)
    with Trace() as trace:
        y = torch.mm(x, w)
        dist.all_reduce(y, group=ctx.group)
        gathered = torch.empty(ctx.world * 8, 4)
        dist.all_gather_into_tensor(gathered, y, group=ctx.group)
    return [e.name for e in trace.events if e.is_collective or e.name == "mm"], trace.largest_allocation[0]


def test_trace_sees_collectives_in_order_and_the_largest_storage(workers: Pool) -> None:
    assert workers.run(2, _traced) == [(["mm", "all_reduce", "all_gather"], 2 * 8 * 4 * 4)] * 2
