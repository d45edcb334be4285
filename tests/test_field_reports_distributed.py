"""Faults that people reported of losses of this kind: distribution (B25, B26, B29, B30, B32, B33).

The numbers are those of docs/field-reports.md.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flce_dist import VocabShard, count_valid_tokens, linear_cross_entropy
from tests.kit import compare, heads, oracle
from tests.kit.cases import Case, judge, reference_of, run_case
from tests.kit.workers import Context, Pool, needs_unsorted
from tests.test_checks_ranks import assert_all_raise


def _replicated(ctx: Context, target: Tensor, reduction: str, layout: str) -> tuple[Tensor, ...]:
    hidden, weight, _ = heads.random_head(16, 8, 32, 0)
    rows = 32 // ctx.world
    weight = weight[ctx.rank * rows : (ctx.rank + 1) * rows].clone().requires_grad_()
    if layout == "sharded":
        mine = slice(ctx.rank * 16 // ctx.world, (ctx.rank + 1) * 16 // ctx.world)
        hidden, target = hidden[mine], target[mine]
    hidden = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, target, group=ctx.group, vocab_size=32, reduction=reduction, hidden_layout=layout
    )
    loss.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


class TestB25GradientOfReplicatedHiddenStates:
    """Only the local shard's part, or W times too much: the first loss is right and the curve is not."""

    @pytest.mark.parametrize("world", [2, 4])
    @pytest.mark.parametrize("where", ["last shard", "first shard", "random"])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("layout", ["replicated", "sharded"])
    def test_gradients(self, world: int, where: str, reduction: str, layout: str, workers: Pool) -> None:
        hidden, weight, target = heads.random_head(16, 8, 32, 0)
        rows = 32 // world
        if where != "random":
            target = target % rows + (32 - rows if where == "last shard" else 0)
        results = workers.run(world, _replicated, target, reduction, layout)
        upstream = torch.ones(16 if reduction == "none" else ())
        expected = oracle.reference(hidden, weight, target, reduction=reduction, upstream=upstream)
        if layout == "replicated":
            compare.assert_same_bits([hidden_grad for _, hidden_grad, _ in results], "hidden gradient")
            compare.assert_close(results[0][1], expected.hidden_grad, 1e-5, "hidden gradient")
        else:
            joined = torch.cat([hidden_grad for _, hidden_grad, _ in results])
            compare.assert_close(joined, expected.hidden_grad, 1e-5, "hidden gradient")
        for rank, (_, _, weight_grad) in enumerate(results):
            part = expected.weight_grad[rank * rows : (rank + 1) * rows]
            compare.assert_close(weight_grad, part, 1e-5, f"weight gradient of rank {rank}")
            assert weight_grad.norm() > 0, "a rank that owns no target still has the softmax part"


def _data_parallel(ctx: Context, target: Tensor, chunk_rows: int | None, scheme: str) -> tuple[Tensor, Tensor]:
    """Each rank its own 4 tokens; the weight gradient after what a data-parallel framework does, and the loss."""
    hidden, weight, _ = heads.random_head(4 * ctx.world, 8, 12, 3)
    mine = slice(4 * ctx.rank, 4 * ctx.rank + 4)
    if scheme == "unsharded head":
        weight.requires_grad_()
        count = count_valid_tokens(target, group=ctx.group)
        loss = linear_cross_entropy(
            hidden[mine], weight, target[mine], normalizer=count_valid_tokens(target[mine], group=ctx.group) / ctx.world
        )
        assert count == ctx.world * (target != -100).sum()
        loss.backward()
        assert weight.grad is not None
        reported = loss.detach().clone()
        for tensor in (weight.grad, reported):
            dist.all_reduce(tensor, group=ctx.group)
            tensor /= ctx.world
        return reported, weight.grad
    rows = 12 // ctx.world
    shard = weight[ctx.rank * rows : (ctx.rank + 1) * rows].clone().requires_grad_()
    loss = linear_cross_entropy(
        hidden[mine],
        shard,
        target[mine],
        group=ctx.group,
        vocab_size=12,
        hidden_layout="sharded",
        chunk_rows=chunk_rows,
    )
    loss.backward()
    assert shard.grad is not None
    return loss.detach(), shard.grad


class TestB26TokenWeightedMean:
    """Ranks or chunks with few valid tokens weigh too much."""

    @pytest.mark.parametrize("valid", [(1, 3), (0, 4), (4, 4), (2, 0)])
    @pytest.mark.parametrize("chunk_rows", [None, 1, 2])
    @pytest.mark.parametrize("scheme", ["unsharded head", "shared head"])
    def test_two_ranks(self, valid: tuple[int, int], chunk_rows: int | None, scheme: str, workers: Pool) -> None:
        hidden, weight, target = heads.random_head(8, 8, 12, 3)
        for rank, count in enumerate(valid):
            target[4 * rank + count : 4 * rank + 4] = -100
        expected = oracle.reference(hidden, weight, target)
        results = workers.run(2, _data_parallel, target, chunk_rows, scheme)
        compare.assert_same_bits([loss for loss, _ in results], "reported loss")
        compare.assert_loss(results[0][0], expected.loss, 1e-5)
        for rank, (_, grad) in enumerate(results):
            part = expected.weight_grad if scheme == "unsharded head" else expected.weight_grad[6 * rank : 6 * rank + 6]
            compare.assert_close(grad, part, 1e-5, "weight gradient")

    @pytest.mark.parametrize("chunk_rows", [1, 2, 3, 4])
    def test_chunks_of_one_rank(self, chunk_rows: int) -> None:
        hidden, weight, target = heads.random_head(4, 8, 12, 3)
        target[[0, 1, 3]] = -100
        weight.requires_grad_()
        linear_cross_entropy(hidden, weight, target, chunk_rows=chunk_rows).backward()
        compare.assert_close(weight.grad, oracle.reference(hidden, weight, target).weight_grad, 1e-5, "weight gradient")

    def test_evaluation_over_batches(self) -> None:
        """Sums and counts add up: (3, 1) and (40, 10) are 43/11, not the mean 3.5 of means."""
        total, count = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for loss, num_valid in ((3.0, 1), (4.0, 10)):
            logits = torch.tensor([[0.0, torch.tensor(loss).expm1().log()]]).expand(12, 2)
            target = torch.tensor([0] * num_valid + [-100] * (12 - num_valid))
            with torch.no_grad():
                out = linear_cross_entropy(logits, torch.eye(2), target, reduction="sum", aux=("num_valid",))
            total, count = total + out.loss, count + out.num_valid
        assert (total / count).item() == pytest.approx(43 / 11, rel=1e-5)


GROUP_CASES = {
    # group -> seed of its data; (1, 0) lists the ranks of the group in an order that is not that of the world
    (0, 2): 1,
    (1, 3): 2,
}


def _in_group(ctx: Context, ranks: tuple[int, ...], case: Case) -> Any:
    group = ctx.groups[ranks]
    place = ranks.index(ctx.rank)
    assert dist.get_rank(group) == place
    return run_case(Context(place, len(ranks), group, ctx.groups), case)


def _strided(ctx: Context) -> Any:
    ranks = (0, 2) if ctx.rank in (0, 2) else (1, 3)
    return _in_group(ctx, ranks, Case(world=2, seed=GROUP_CASES[ranks], split="uneven"))


def _others_idle(ctx: Context, ranks: tuple[int, ...], case: Case) -> Any:
    return _in_group(ctx, ranks, case) if ctx.rank in ranks else None


def _checkpointed(ctx: Context, use_reentrant: bool, reduction: str) -> tuple[Tensor, Tensor]:
    """Two groups recompute at different times; each must find its own data again."""
    ranks = (0, 2) if ctx.rank in (0, 2) else (1, 3)
    hidden, weight, target = heads.random_head(9, 8, 20, GROUP_CASES[ranks])
    place = ranks.index(ctx.rank)
    hidden.requires_grad_()
    weight = weight[10 * place : 10 * place + 10].clone().requires_grad_()

    def block(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, target, group=ctx.groups[ranks], vocab_size=20, reduction=reduction, chunk_rows=4
        )

    checkpoint(block, hidden, use_reentrant=use_reentrant).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


class TestB29SubsetsAndRecompute:
    """The default group or the global rank is used somewhere, or a recomputation mixes the data of two groups."""

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_two_strided_groups_at_once(self, reduction: str, workers: Pool) -> None:
        results = workers.run(4, _strided)
        for ranks, seed in GROUP_CASES.items():
            judge(Case(world=2, seed=seed, split="uneven"), [results[rank] for rank in ranks])

    @pytest.mark.parametrize("ranks", [(2, 3), (1, 3), pytest.param((1, 0), marks=needs_unsorted)])
    def test_the_place_is_that_in_the_group_and_other_ranks_idle(self, ranks: tuple[int, ...], workers: Pool) -> None:
        case = Case(world=2, split="uneven", reduction="none", chunk_rows=4)
        results = workers.run(4, _others_idle, ranks, case)
        judge(case, [results[rank] for rank in ranks])
        assert all(results[rank] is None for rank in range(4) if rank not in ranks)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_checkpointed(self, use_reentrant: bool, reduction: str, workers: Pool) -> None:
        results = workers.run(4, _checkpointed, use_reentrant, reduction)
        for ranks, seed in GROUP_CASES.items():
            upstream = torch.ones(9 if reduction == "none" else ())
            expected = oracle.reference(*heads.random_head(9, 8, 20, seed), reduction=reduction, upstream=upstream)
            for place, rank in enumerate(ranks):
                compare.assert_close(results[rank][0], expected.hidden_grad, 1e-5, "hidden gradient")
                part = expected.weight_grad[10 * place : 10 * place + 10]
                compare.assert_close(results[rank][1], part, 1e-5, "weight gradient")


def _rows_of_another_rank(ctx: Context, full: bool, shards: list[tuple[int, int]]) -> Tensor:
    hidden, weight, target = heads.random_head(6, 5, 8, 0)
    start, stop = shards[ctx.rank]
    if full:
        return linear_cross_entropy(hidden, weight, target, group=ctx.group, vocab_size=8)
    shard = VocabShard(8, start, stop)
    return linear_cross_entropy(hidden, weight[start:stop], target, group=ctx.group, vocab_shard=shard)


class TestB30FullWeightWhereAShardIsMeant:
    """The rows enter once a rank: a loss too large by log W, without an error."""

    def test_full_weight(self, workers: Pool) -> None:
        outcomes = workers.outcomes(2, _rows_of_another_rank, True, [(0, 8), (0, 8)])
        assert_all_raise(outcomes, "ValueError", "16", "8")

    @pytest.mark.parametrize("shards", [[(0, 5), (3, 8)], [(0, 8), (0, 8)], [(0, 8), (4, 8)]])
    def test_overlapping_ranges(self, shards: list[tuple[int, int]], workers: Pool) -> None:
        assert_all_raise(workers.outcomes(2, _rows_of_another_rank, False, shards), "ValueError", "overlap")

    def test_ranks_in_another_order_are_right(self, workers: Pool) -> None:
        """With explicit places any order is a partition: the loss is that of the whole weight."""
        expected = oracle.reference(*heads.random_head(6, 5, 8, 0)).loss
        for loss in workers.run(2, _rows_of_another_rank, False, [(4, 8), (0, 4)]):
            compare.assert_loss(loss, expected, 1e-5)


def _weight_freed_before_backward(ctx: Context, reduction: str, backward: str) -> Any:
    hidden, weight, target = heads.random_head(6, 5, 8, 0)
    hidden.requires_grad_()
    weight = torch.nn.Parameter(weight[4 * ctx.rank : 4 * ctx.rank + 4].clone())
    loss = linear_cross_entropy(
        hidden, weight, target, group=ctx.group, vocab_size=8, reduction=reduction, backward=backward
    )
    whole = weight.data
    weight.data = torch.empty(0)
    (hidden_grad,) = torch.autograd.grad(loss.sum(), hidden)
    weight.data = whole
    return hidden_grad


def _weight_freed_and_regathered(ctx: Context, reduction: str) -> Any:
    """What ZeRO-3 does around backward: the shape is back when autograd accumulates, the values are the same."""
    hidden, weight, target = heads.random_head(6, 5, 8, 0)
    hidden.requires_grad_()
    weight = torch.nn.Parameter(weight[4 * ctx.rank : 4 * ctx.rank + 4].clone())
    loss = linear_cross_entropy(hidden, weight, target, group=ctx.group, vocab_size=8, reduction=reduction)
    kept = weight.data.clone()
    weight.data = torch.empty(0)
    weight.data = kept
    loss.sum().backward()
    return hidden.grad, weight.grad


class TestB32PartitionedWeight:
    """ZeRO-3 frees the weight around the module. The messages for an empty one are tested in test_checks.py."""

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_gathered_in_forward_only(self, reduction: str, workers: Pool) -> None:
        """Gradients made in forward: backward does not read the weight."""
        expected = oracle.reference(*heads.random_head(6, 5, 8, 0), reduction=reduction)
        for hidden_grad in workers.run(2, _weight_freed_before_backward, reduction, "auto"):
            compare.assert_close(hidden_grad, expected.hidden_grad, 1e-5, "hidden gradient")

    @pytest.mark.parametrize(("reduction", "backward"), [("none", "auto"), ("mean", "recompute")])
    def test_a_backward_that_needs_the_freed_weight_names_the_frameworks(
        self, reduction: str, backward: str, workers: Pool
    ) -> None:
        outcomes = workers.outcomes(2, _weight_freed_before_backward, reduction, backward)
        assert_all_raise(outcomes, "RuntimeError", "ZeRO-3", "FSDP")

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_regathered_for_backward(self, reduction: str, workers: Pool) -> None:
        upstream = torch.ones(6 if reduction == "none" else ())
        expected = oracle.reference(*heads.random_head(6, 5, 8, 0), reduction=reduction, upstream=upstream)
        for rank, (hidden_grad, weight_grad) in enumerate(workers.run(2, _weight_freed_and_regathered, reduction)):
            compare.assert_close(hidden_grad, expected.hidden_grad, 1e-5, "hidden gradient")
            part = expected.weight_grad[4 * rank : 4 * rank + 4]
            compare.assert_close(weight_grad, part, 1e-5, "weight gradient")

    def test_a_legal_shard_without_rows_works(self, workers: Pool) -> None:
        case = Case(world=2, split="empty")
        results = workers.run(2, run_case, case)
        judge(case, results)
        assert results[0].weight_grad is not None
        assert results[0].weight_grad.shape == (0, case.hidden_size)


def _sequence_parallel(ctx: Context, targets: list[list[int]], reduction: str) -> tuple[Tensor, Tensor]:
    hidden, weight, _ = heads.random_head(8, 5, 20, 0)
    target = torch.tensor(targets[ctx.rank])
    hidden = hidden[4 * ctx.rank : 4 * ctx.rank + 4].clone().requires_grad_()
    out = linear_cross_entropy(
        hidden,
        weight[10 * ctx.rank : 10 * ctx.rank + 10],
        target,
        group=ctx.group,
        vocab_size=20,
        hidden_layout="sharded",
        reduction=reduction,
        aux=("num_valid",),
    )
    out.loss.backward()
    assert hidden.grad is not None
    return out.loss.detach(), out.num_valid


class TestB33LabelShift:
    """Labels shifted after sharding, or twice. Here they are never shifted: the caller shifts before it shards."""

    @pytest.mark.parametrize(
        ("targets", "num_valid"),
        [
            ([[11, 12, 13, 14], [15, 16, 17, -100]], 7),
            ([[11, 12, 13, 14], [-100, 16, 17, -100]], 6),  # packed documents of 5 and 3 tokens
        ],
    )
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_two_halves_of_a_sequence(
        self, targets: list[list[int]], num_valid: int, reduction: str, workers: Pool
    ) -> None:
        hidden, weight, _ = heads.random_head(8, 5, 20, 0)
        expected = oracle.reference(hidden, weight, torch.tensor(targets).reshape(-1), reduction=reduction)
        for loss, count in workers.run(2, _sequence_parallel, targets, reduction):
            compare.assert_loss(loss, expected.loss, 1e-5)
            assert count == num_valid

    def test_targets_are_taken_as_they_come(self) -> None:
        """Perfect predictions of the given targets have loss 0; of shifted ones they would not."""
        target = torch.tensor([3, 1, 4, 1, 5])
        logits = 50.0 * torch.nn.functional.one_hot(target, 6).float()
        assert linear_cross_entropy(logits, torch.eye(6), target) < 1e-6
        assert reference_of(Case()).loss > 0.1
