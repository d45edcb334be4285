"""Chunk rows (field report B41: rounding to full logits, division by zero, ranks that choose differently)."""

import inspect
import itertools

import pytest

from flce_dist import plan

TOKENS = [0, 1, 7, 127, 128, 129, 1000, 8192, 10**6]
COLUMNS = [0, 1, 16032, 50257, 128256, 262144]
ITEMSIZES = [2, 4, 8]
BUDGETS = [1, 4096, 2**20, 512 * 2**20, 2**40]
GRID = list(itertools.product(TOKENS, COLUMNS, ITEMSIZES, BUDGETS))


def test_rows_are_between_one_and_the_tokens() -> None:
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, itemsize, budget)
        assert isinstance(rows, int)
        assert 1 <= rows <= max(tokens, 1), (tokens, columns, itemsize, budget, rows)


def test_a_chunk_stays_within_the_budget_unless_one_row_is_larger() -> None:
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, itemsize, budget)
        assert rows == 1 or rows * columns * itemsize <= budget, (tokens, columns, itemsize, budget, rows)


def test_a_chunk_uses_most_of_the_budget() -> None:
    """No needlessly small chunks: twice the rows (and the rounding to 128) would not fit."""
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, itemsize, budget)
        if rows < tokens:
            stride = -(-columns // 64) * 64  # a row may be padded to an aligned length
            assert 2 * max(rows, 1) * stride * itemsize > budget, (tokens, columns, itemsize, budget, rows)


def test_rows_are_a_multiple_of_128_where_the_budget_allows() -> None:
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, itemsize, budget)
        if 128 <= rows < tokens:
            assert rows % 128 == 0, (tokens, columns, itemsize, budget, rows)


def test_few_tokens_are_one_chunk() -> None:
    for tokens in (1, 7, 128):
        assert plan.chunk_rows(tokens, 128256, 2, 512 * 2**20) == tokens


@pytest.mark.parametrize("explicit", [1, 3, 128, 10**9])
def test_an_explicit_choice_wins_and_is_clamped(explicit: int) -> None:
    for tokens, columns, itemsize, budget in GRID:
        rows = plan.chunk_rows(tokens, columns, itemsize, budget, explicit=explicit)
        assert rows == max(1, min(explicit, tokens)), (tokens, columns, itemsize, budget)


def test_more_budget_never_means_smaller_chunks() -> None:
    for tokens, columns, itemsize in itertools.product(TOKENS, COLUMNS, ITEMSIZES):
        rows = [plan.chunk_rows(tokens, columns, itemsize, budget) for budget in BUDGETS]
        assert rows == sorted(rows)


def test_free_memory_is_no_input() -> None:
    """The same on all ranks whatever their device's state: the module asks no device anything."""
    source = inspect.getsource(plan)
    for word in ("mem_get_info", "memory_allocated", "memory_reserved", "get_device_properties", "environ"):
        assert word not in source
    assert list(inspect.signature(plan.chunk_rows).parameters) == [
        "num_tokens",
        "max_columns",
        "itemsize",
        "budget_bytes",
        "explicit",
    ]
