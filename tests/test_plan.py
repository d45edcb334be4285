"""Chunk rows (field report B41: rounding to full logits, division by zero, ranks that choose differently)."""

import inspect
import itertools

import pytest
import torch

from flce_dist import plan
from flce_dist.gemm import WeightGradient
from tests.kit import compare

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
    ]


def test_chunks_are_equal() -> None:
    """The last chunk has as many rows as the others, up to the rounding to 128, and there are no more chunks for it."""
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, 4096, itemsize, budget)
        if 128 <= rows < tokens:
            num_chunks = -(-tokens // rows)
            assert rows - 128 * num_chunks < tokens - (num_chunks - 1) * rows <= rows
            fits = budget // (plan.row_stride(columns) * itemsize) // 128 * 128
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
