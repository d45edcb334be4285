"""Chunk rows (field report B41: rounding to full logits, division by zero, ranks that choose differently)."""

import inspect
import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from flce_dist import linear_cross_entropy, plan
from flce_dist.buffers import row_stride
from flce_dist.gemm import WeightGradient
from tests.kit import compare
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool

TOKENS = [0, 1, 7, 127, 128, 129, 1000, 8192, 10**6]
COLUMNS = [0, 1, 16032, 50257, 128256, 262144]
ITEMSIZES = [2, 4, 8]
BUDGETS = [1, 4096, 2**20, 512 * 2**20, 2**40]
GRID = list(itertools.product(TOKENS, COLUMNS, ITEMSIZES, BUDGETS))


def test_rows_are_between_one_and_the_tokens() -> None:
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, budget)
        assert isinstance(rows, int)
        assert 1 <= rows <= max(tokens, 1), (tokens, columns, itemsize, budget, rows)


def test_a_chunk_stays_within_the_budget_unless_one_row_is_larger() -> None:
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, budget)
        assert rows == 1 or rows * columns * itemsize <= budget, (tokens, columns, itemsize, budget, rows)


def test_a_chunk_uses_most_of_the_budget() -> None:
    """No needlessly small chunks: twice the rows (and the rounding to 128) would not fit."""
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, budget)
        if rows < tokens:
            stride = -(-columns // 64) * 64  # a row may be padded to an aligned length
            assert 2 * max(rows, 1) * stride * itemsize > budget, (tokens, columns, itemsize, budget, rows)


def test_rows_are_a_multiple_of_128_where_the_budget_allows() -> None:
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, budget)
        if 128 <= rows < tokens:
            assert rows % 128 == 0, (tokens, columns, itemsize, budget, rows)


def test_few_tokens_are_one_chunk() -> None:
    for tokens in (1, 7, 128):
        assert plan.chunk_rows(tokens, 128256, 4096, 2, 512 * 2**20) == tokens


@pytest.mark.parametrize("explicit", [1, 3, 128, 10**9])
def test_an_explicit_choice_wins_and_is_clamped(explicit: int) -> None:
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, budget, explicit=explicit)
        assert rows == max(1, min(explicit, tokens)), (tokens, columns, itemsize, budget)


def test_more_budget_never_means_smaller_chunks() -> None:
    for tokens, columns, itemsize in itertools.product(TOKENS, COLUMNS, ITEMSIZES):
        rows = [plan.chunk_rows(tokens, columns, 4096, itemsize, budget) for budget in BUDGETS]
        assert rows == sorted(rows)


def test_free_memory_is_no_input() -> None:
    """The same on all ranks whatever their device's state: the module asks no device anything."""
    source = inspect.getsource(plan)
    for word in ("mem_get_info", "memory_allocated", "memory_reserved", "get_device_properties", "environ"):
        assert word not in source
    assert list(inspect.signature(plan.chunk_rows).parameters) == [
        "num_tokens",
        "max_columns",
        "hidden_size",
        "itemsize",
        "budget_bytes",
        "explicit",
        "max_narrow_chunks",
        "num_parts",
    ]
    assert list(inspect.signature(plan.narrow_chunks).parameters) == ["accum_dtype", "weight_dtype"]


def test_chunks_are_equal() -> None:
    """The last chunk has as many rows as the others, up to the rounding to 128, and there are no more chunks for it."""
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, budget)
        if 128 <= rows < tokens:
            num_chunks = -(-tokens // rows)
            assert rows - 128 * num_chunks < tokens - (num_chunks - 1) * rows <= rows
            fits = budget // (row_stride(columns) * itemsize) // 128 * 128
            assert num_chunks == -(-tokens // fits)
    assert plan.chunk_rows(8192, 37984, 4096, 2, 512 * 2**20) == 4096, "not 7040 and 1152"


@pytest.mark.parametrize(
    ("tokens", "columns", "hidden_size", "itemsize", "rows"),
    [
        (8192, 128256, 4096, 2, 2048),  # 512 MiB hold 2092
        (8192, 256000, 2304, 2, 2048),  # 1000 MiB
        (8192, 151936, 4096, 4, 2048),
        (8192, 256000, 768, 2, 1024),  # as many as 512 MiB hold, more than the hidden size
        (8192, 256000, 1536, 2, 1408),  # 1536 fit, in six equal chunks
        (8192, 32064, 4096, 2, 8192),
        (100, 256000, 4096, 2, 100),
    ],
)
def test_the_default_budget(tokens: int, columns: int, hidden_size: int, itemsize: int, rows: int) -> None:
    """Large vocabularies get 2048 rows, unless that takes more than the weight's gradient."""
    assert plan.chunk_rows(tokens, columns, hidden_size, itemsize, None) == rows


@pytest.mark.parametrize(
    ("tokens", "columns", "hidden_size", "itemsize", "rows"),
    [
        (8192, 128256, 4096, 2, 4096),
        (8192, 128256, 4096, 4, 4096),
        (16384, 131072, 4096, 2, 8192),  # 3 GiB either way
        (16640, 131072, 4096, 2, 3328),  # 8320 rows would take 3.03 GiB; a float32 sum leaves room for 4096
        (8192, 256000, 2304, 2, 4096),
        (8192, 256000, 768, 2, 1024),  # 4096 rows would take five times as much as the gradient
        (1000, 10**6, 4096, 2, 1000),  # one chunk
        (3000, 200000, 4096, 2, 1536),  # two already
        (4500, 128256, 4096, 2, 2560),  # a multiple of 512: steps of other lengths share it
        (200, 3 * 10**6, 70, 2, 89),  # all 200 would take more
    ],
)
def test_the_default_budget_grows_to_two_chunks(
    tokens: int, columns: int, hidden_size: int, itemsize: int, rows: int
) -> None:
    assert plan.chunk_rows(tokens, columns, hidden_size, itemsize, None, max_narrow_chunks=2) == rows


@pytest.mark.parametrize(
    ("tokens", "columns", "hidden_size", "rows"),
    [(8192, 128256, 4096, 4096), (8192, 128256, 1024, 2048), (300, 128256, 4096, 300), (8192, 16032, 4096, 8192)],
)
def test_the_default_budget_grows_beside_a_float32_sum(tokens: int, columns: int, hidden_size: int, rows: int) -> None:
    assert plan.chunk_rows(tokens, columns, hidden_size, 2, None, max_narrow_chunks=0) == rows


@pytest.mark.parametrize("narrow", [0, 1, 2])
def test_what_grows_takes_no_more_memory_than_a_float32_accumulator(narrow: int) -> None:
    """The weight's gradient and the logits of few chunks; or a gradient twice as large with, beside it, first the
    logits and then the copy in 16 bits. Chunks that are few are left as they are."""
    for tokens, columns, itemsize, hidden_size in itertools.product(TOKENS, COLUMNS, (2, 4), (64, 768, 4096)):
        small = plan.chunk_rows(tokens, columns, hidden_size, itemsize, None)
        grown = plan.chunk_rows(tokens, columns, hidden_size, itemsize, None, max_narrow_chunks=narrow)
        row_bytes, gradient = row_stride(columns) * itemsize, columns * hidden_size * 2

        def peak(rows: int, tokens: int = tokens, row_bytes: int = row_bytes, gradient: int = gradient) -> int:
            if -(-tokens // rows) <= narrow:
                return gradient + rows * row_bytes
            return 2 * gradient + max(rows * row_bytes, gradient)

        assert small <= grown
        assert peak(grown) <= peak(small)
        if -(-tokens // small) <= narrow:
            assert grown == small


def test_a_choice_of_the_user_is_not_changed() -> None:
    for tokens, columns, itemsize, budget in GRID:
        chosen = plan.chunk_rows(tokens, columns, 4096, itemsize, budget)
        for narrow in (0, 2):
            assert plan.chunk_rows(tokens, columns, 4096, itemsize, budget, max_narrow_chunks=narrow) == chosen
            rows = plan.chunk_rows(tokens, columns, 4096, itemsize, None, 5, max_narrow_chunks=narrow)
            assert rows == max(1, min(5, tokens))


@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_rows_are_a_multiple_of_the_ranks_that_bring_them(num_parts: int) -> None:
    for tokens, columns, itemsize, budget in GRID:
        if tokens % num_parts:
            continue
        whole = plan.chunk_rows(tokens, columns, 4096, itemsize, budget)
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, budget, num_parts=num_parts)
        assert rows % num_parts == 0
        assert rows == num_parts or whole - num_parts < rows <= whole
        default = plan.chunk_rows(tokens, columns, 4096, itemsize, None)
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, None, num_parts=num_parts)
        assert rows % num_parts == 0
        assert default <= rows < default + num_parts


def test_up_to_how_many_chunks_a_gradient_is_accumulated_in_its_own_dtype() -> None:
    narrow = plan.narrow_chunks
    assert [narrow(None, torch.bfloat16), narrow(None, torch.float16)] == [2, 0]
    assert [narrow(torch.float32, dtype) for dtype in (torch.bfloat16, torch.float16)] == [0, 0]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert narrow(dtype, dtype) is None
    assert narrow(None, torch.float32) is narrow(None, torch.float64) is None


TOKENS_OF_A_CALL, WIDTH, ROWS_OF_A_RANK = 256, 64, 256


def rows_of_chunks(
    ctx: Context | None = None, dtype: torch.dtype = torch.bfloat16, frozen: tuple[int, ...] = (), **options: Any
) -> list[int]:
    """Rows of the logits' products of a call, where the default budget is 32 rows and two chunks are 128: two chunks
    and a gradient take what a float32 accumulator and a copy do. Ranks that are `frozen` have a weight without grad."""
    rank, world, group = (0, 1, None) if ctx is None else (ctx.rank, ctx.world, ctx.group)
    tokens = options.get("max_tokens", TOKENS_OF_A_CALL)
    hidden = torch.zeros(tokens, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.zeros(ROWS_OF_A_RANK, WIDTH, dtype=dtype, requires_grad=rank not in frozen)
    target = torch.zeros(tokens, dtype=torch.int64)
    budget = 32 * ROWS_OF_A_RANK * dtype.itemsize
    small = mock.patch.multiple(plan, default_budget=lambda *_: budget, GROWN_MULTIPLE=128)
    with small, Trace() as trace:
        linear_cross_entropy(hidden, weight, target, group=group, vocab_size=world * ROWS_OF_A_RANK, **options)
    products = [event.shapes for event in trace.matrix_products]
    return [left[0] for left, right, *_ in products if right == (WIDTH, ROWS_OF_A_RANK)]


def test_the_loop_has_two_chunks_where_they_spare_a_float32_accumulator() -> None:
    assert rows_of_chunks() == [128] * 2
    assert rows_of_chunks(reduction="none") == [128] * 2, "gradients are made in backward"
    assert rows_of_chunks(dtype=torch.float32) == rows_of_chunks(accum_dtype=torch.bfloat16) == [32] * 8
    beside_a_float32_sum = [64] * 4  # what the copy of the gradient takes in the end
    assert rows_of_chunks(dtype=torch.float16) == rows_of_chunks(accum_dtype=torch.float32) == beside_a_float32_sum
    assert rows_of_chunks(logits_budget="16KiB") == [32] * 8
    assert rows_of_chunks(chunk_rows=64) == [64] * 4


def test_a_head_without_a_gradient_keeps_small_chunks_on_one_rank() -> None:
    assert rows_of_chunks(frozen=(0,)) == [32] * 8
    with torch.no_grad():
        assert rows_of_chunks() == [32] * 8


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)], ids=str)
def test_ranks_cut_alike_whatever_needs_a_gradient(frozen: tuple[int, ...], workers: Pool) -> None:
    assert workers.run(2, rows_of_chunks, torch.bfloat16, frozen) == [[128] * 2] * 2


def test_ranks_cut_alike_in_evaluation(workers: Pool) -> None:
    assert workers.run(2, _without_grad) == [[128] * 2] * 2


def _without_grad(ctx: Context) -> list[int]:
    with torch.no_grad():
        return rows_of_chunks(ctx)


def test_two_chunks_are_two_where_the_ranks_do_not_divide_them(workers: Pool) -> None:
    """Three ranks bring 85 tokens each: 43 and 42, not the 42 of 128 rows twice and one more."""
    assert workers.run(3, _three_ranks, {}) == [[129, 126]] * 3
    assert workers.run(3, _three_ranks, {"chunk_rows": 128}) == [[126, 126, 3]] * 3


def _three_ranks(ctx: Context, options: dict[str, Any]) -> list[int]:
    return rows_of_chunks(ctx, hidden_layout="sharded", max_tokens=85, **options)


def test_the_first_part_is_as_short_as_keeps_a_gpu_busy() -> None:
    assert plan.first_part(64128, 4096) == 1024
    assert plan.first_part(64128, 2304) == 1920
    assert plan.first_part(500, 4096) == 500
    for columns, hidden_size in itertools.product(COLUMNS, (64, 768, 4096, 16384)):
        first = plan.first_part(columns, hidden_size)
        assert first == columns or (first % 128 == 0 and first * hidden_size >= plan.FIRST_PART_OUTPUTS)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_weight_gradient_in_two_parts_is_the_whole(num_chunks: int) -> None:
    grad, x = torch.randn(num_chunks, 3, 1100, dtype=torch.float64), torch.randn(num_chunks, 3, 4096).double()
    found = WeightGradient(torch.empty(1101, 4096, dtype=torch.float64), 1100, torch.float64, True, True)
    for i in range(num_chunks):
        found.add(grad[i], x[i], split=True)
    weight, bias = found.finish()
    assert weight is not None
    assert bias is not None
    compare.assert_close(weight[:1100], torch.einsum("icl,ich->lh", grad, x), 1e-12, "weight gradient")
    compare.assert_close(bias[:1100], grad.sum((0, 1)), 1e-12, "bias gradient")
    assert not weight[1100:].any()
