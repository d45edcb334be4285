"""Eight ranks: more than other tests have, so that some are without rows of the vocabulary and some without tokens."""

from collections.abc import Callable

import pytest

from tests.kit.cases import Case, check
from tests.kit.workers import Pool
from tests.test_token_sharded import make_case

Engines = Callable[[int], Pool]


@pytest.mark.parametrize("vocab_size", [5, 21, 130])
@pytest.mark.parametrize("split", ["even", "uneven", "empty", "padded"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_replicated_tokens(vocab_size: int, split: str, reduction: str, engine_workers: Engines) -> None:
    case = Case(world=8, vocab_size=vocab_size, split=split, reduction=reduction, bias=True, chunk_rows=5, lead=(13,))
    check(case, engine_workers(8))


@pytest.mark.parametrize("split", ["even", "uneven", "empty", "padded"])
@pytest.mark.parametrize("tokens", [(3, 0, 5, 1, 0, 2, 7, 4), (0, 0, 0, 0, 0, 0, 0, 1), (2,) * 8])
def test_sharded_tokens(split: str, tokens: tuple[int, ...], engine_workers: Engines) -> None:
    row = {"tokens": tokens, "split": split, "reduction": "mean", "chunk_rows": 16, "z_loss": 1e-2}
    check(make_case(row, vocab_size=21), engine_workers(8))
