"""What a step allocates: one chunk of logits or a weight-sized tensor at most, never the logits of all tokens."""

import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor

from flce_dist import VocabShard, linear_cross_entropy
from flce_dist.tokens import ShardedTokens
from tests.kit import heads
from tests.kit.cases import Case, loss_arguments
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool

BACKWARDS = [("mean", "forward"), ("mean", "recompute"), ("sum", "auto"), ("none", "auto")]
TOKENS, HIDDEN, VOCAB, ROWS = 512, 16, 1000, 32
PADDED_VOCAB = 1024  # a row of the buffer may be longer for alignment
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-3},
}


def step(reduction: str, backward: str, dtype: torch.dtype = torch.float32, **options: object) -> Trace:
    hidden, weight, target = heads.random_head(TOKENS, HIDDEN, VOCAB, 0)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    with Trace() as trace:
        loss = linear_cross_entropy(
            hidden, weight, target, reduction=reduction, backward=backward, chunk_rows=ROWS, **options
        )
        loss.backward(torch.ones_like(loss))
    return trace


@pytest.mark.parametrize(("reduction", "backward"), BACKWARDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_largest_allocation_is_a_chunk_of_logits(reduction: str, backward: str, options: dict[str, object]) -> None:
    size, what = step(reduction, backward, **options).largest_allocation
    chunk, weight, hidden = ROWS * PADDED_VOCAB * 4, VOCAB * HIDDEN * 4, TOKENS * HIDDEN * 4
    assert size <= max(chunk, weight, hidden), f"{size} bytes by {what}; N x V is {TOKENS * VOCAB * 4}"


@pytest.mark.parametrize(("reduction", "backward"), BACKWARDS)
def test_16_bit_inputs_need_no_fp32_logits_of_all_tokens(reduction: str, backward: str) -> None:
    size, what = step(reduction, backward, dtype=torch.bfloat16).largest_allocation
    assert size <= ROWS * PADDED_VOCAB * 4, f"{size} bytes by {what}"


@pytest.mark.parametrize(("reduction", "backward"), BACKWARDS)
def test_the_logits_buffer_is_allocated_once_a_pass(reduction: str, backward: str) -> None:
    """And no product makes another; the row functions have temporaries of a block of rows, here a chunk."""
    passes = 2 if reduction == "none" or backward == "recompute" else 1
    found = step(reduction, backward).allocations_of(ROWS * VOCAB * 4)
    assert len([what for what in found if what.startswith("empty ")]) == passes
    assert [what for what in found if what.startswith(("mm ", "addmm ", "matmul ", "bmm "))] == []


@pytest.mark.parametrize("budget", ["64KiB", "1MiB"])
def test_budget_bounds_the_chunk(budget: str) -> None:
    hidden, weight, target = heads.random_head(TOKENS, HIDDEN, VOCAB, 0)
    hidden.requires_grad_()
    num_bytes = {"64KiB": 2**16, "1MiB": 2**20}[budget]
    with Trace() as trace:
        linear_cross_entropy(hidden, weight, target, logits_budget=budget).backward()
    size, what = trace.largest_allocation
    assert size <= max(num_bytes, VOCAB * HIDDEN * 4, TOKENS * HIDDEN * 4), f"{size} bytes by {what}"


def _largest_of_uneven_shards(ctx: Context, budget: int) -> tuple[int, str]:
    start, stop = ((0, 4000), (4000, 4096))[ctx.rank]
    hidden, weight, target = heads.random_head(TOKENS, HIDDEN, 4096, 0)
    shard = weight[start:stop].clone().requires_grad_()
    with Trace() as trace:
        linear_cross_entropy(
            hidden.requires_grad_(), shard, target, group=ctx.group, vocab_shard=VocabShard(4096, start, stop),
            logits_budget=budget,
        ).backward()  # fmt: skip
    return trace.largest_allocation


def test_budget_bounds_the_chunk_of_the_largest_shard(workers: Pool) -> None:
    """An even split would have half its columns."""
    budget = 2**18
    assert budget >= 4000 * HIDDEN * 4, "the weight's gradient may not hide what the logits take"
    for size, what in workers.run(2, _largest_of_uneven_shards, budget):
        assert size <= budget, f"{size} bytes by {what}"


def _sharded_step(ctx: Context, case: Case) -> tuple[int, str]:
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    with Trace() as trace:
        loss = linear_cross_entropy(hidden, weight, target, **keywords)
        loss.backward(torch.ones_like(loss))
    return trace.largest_allocation


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("split", ["even", "uneven"])
def test_sharded_step_never_holds_the_full_vocabulary(reduction: str, split: str, workers: Pool) -> None:
    case = Case(lead=(256,), hidden_size=8, vocab_size=999, world=3, split=split, reduction=reduction, chunk_rows=16)
    for (start, stop), (size, what) in zip(case.bounds(), workers.run(3, _sharded_step, case), strict=True):
        columns = -(-(stop - start) // 64) * 64
        allowed = max(16 * columns * 4, (stop - start) * 8 * 4, 256 * 8 * 4)
        assert size <= allowed, f"{size} > {allowed} bytes by {what}"


def _gathered_chunks_alive(ctx: Context, case: Case) -> list[int]:
    """How many of the chunks before are alive when the next is gathered."""
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    gathered: list[weakref.ref[Tensor]] = []
    alive = []
    gather = ShardedTokens.hidden_chunk

    def watch(tokens: ShardedTokens, hidden: Tensor, start: int, stop: int) -> Tensor:
        alive.append(sum(chunk() is not None for chunk in gathered))
        x = gather(tokens, hidden, start, stop)
        gathered.append(weakref.ref(x))
        return x

    with mock.patch.object(ShardedTokens, "hidden_chunk", watch):
        loss = linear_cross_entropy(hidden, weight, target, **keywords)
        loss.backward(torch.ones_like(loss))
    return alive


@pytest.mark.parametrize(("reduction", "passes"), [("mean", 1), ("none", 2)])
def test_a_gathered_chunk_takes_the_memory_of_the_one_before(reduction: str, passes: int, workers: Pool) -> None:
    case = Case(lead=(16,), world=2, tokens=(8, 8), reduction=reduction, chunk_rows=4)
    assert workers.run(2, _gathered_chunks_alive, case) == [[0] * 4 * passes] * 2


def test_evaluation_allocates_no_gradient() -> None:
    hidden, weight, target = heads.random_head(64, 64, 512, 0)
    weight.requires_grad_()
    with torch.no_grad(), Trace() as trace:
        linear_cross_entropy(hidden, weight, target, chunk_rows=4)
    assert trace.allocations_of(min(hidden.nbytes, weight.nbytes)) == []


def test_an_unsharded_full_batch_is_chunked_for_a_small_budget() -> None:
    hidden, weight, target = heads.random_head(TOKENS, HIDDEN, VOCAB, 0)
    with torch.no_grad(), Trace() as trace:
        linear_cross_entropy(hidden, weight, target, logits_budget=128 * PADDED_VOCAB * 4)
    assert len(trace.matrix_products) == TOKENS // 128
