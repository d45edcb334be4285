"""VocabShard: the index arithmetic of the vocabulary, without processes."""

import dataclasses

import numpy as np
import pytest
import torch

from flce_dist import VocabShard
from flce_dist.shard import partition_error

SIZES = [1, 2, 3, 7, 8, 21, 128, 1000, 50257]
WORLDS = [1, 2, 3, 4, 5, 8, 16]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_even_split_is_torch_chunk(vocab_size: int, world: int) -> None:
    pieces = [piece.tolist() for piece in torch.arange(vocab_size).chunk(world)]
    pieces += [[]] * (world - len(pieces))
    for rank, piece in enumerate(pieces):
        shard = VocabShard.even(vocab_size, rank, world)
        assert list(range(shard.start, shard.stop)) == piece
        assert shard.vocab_size == vocab_size


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_even_split_is_dtensor_shard(vocab_size: int, world: int) -> None:
    from torch.distributed.tensor import Shard

    pieces, _ = Shard(0)._split_tensor(torch.arange(vocab_size), world, with_padding=False, contiguous=False)
    for rank, piece in enumerate(pieces):
        shard = VocabShard.even(vocab_size, rank, world)
        assert list(range(shard.start, shard.stop)) == piece.tolist()


@pytest.mark.parametrize("vocab_size", [5, 21])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_even_split_of_a_padded_vocabulary(vocab_size: int, world: int) -> None:
    padded = vocab_size + 11
    shards = [VocabShard.even(vocab_size, rank, world, num_rows=padded) for rank in range(world)]
    assert sum(s.num_rows for s in shards) == padded
    assert sum(s.num_columns for s in shards) == vocab_size
    assert all(s.num_columns <= s.num_rows for s in shards)
    assert partition_error(shards) is None


def test_rows_and_columns_of_shards_with_padding() -> None:
    for start, stop, columns in [(0, 8, 8), (8, 16, 2), (10, 16, 0), (16, 24, 0), (3, 3, 0)]:
        shard = VocabShard(10, start, stop)
        assert (shard.num_rows, shard.num_columns) == (stop - start, columns)
        taken = shard.take(torch.arange(10))
        assert taken.tolist() == list(range(start, start + columns))


def test_every_id_has_exactly_one_owner() -> None:
    target = torch.tensor([0, 1, 9, 4, -100, 5])
    shards = [VocabShard(10, 0, 4), VocabShard(10, 4, 4), VocabShard(10, 4, 5), VocabShard(10, 5, 16)]
    owners = torch.zeros(6, dtype=torch.int64)
    for shard in shards:
        local = shard.local_ids(target)
        owns = (local >= 0) & (local < shard.num_columns)
        assert ((local + shard.start)[owns] == target[owns]).all()
        owners += owns
    assert owners.tolist() == [1, 1, 1, 1, 0, 1]


def test_int32_targets_do_not_wrap() -> None:
    target = torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    local = VocabShard(2**31 + 10, 2**31, 2**31 + 10).local_ids(target)
    assert ((local < 0) | (local >= 10)).all()


def test_a_shard_is_frozen_hashable_and_equal_by_value() -> None:
    shard = VocabShard(10, 0, 5)
    assert shard == VocabShard(10, 0, 5)
    assert hash(shard) == hash(VocabShard(10, 0, 5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.start = 3  # type: ignore[misc]


def test_numbers_may_be_numpys() -> None:
    shard = VocabShard(np.int64(10), np.int32(0), np.uint8(5))
    assert shard == VocabShard(10, 0, 5)
    assert all(type(value) is int for value in dataclasses.astuple(shard))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ((0, 0, 0), ValueError, "vocab_size"),
        ((-3, 0, 1), ValueError, "vocab_size"),
        ((10, -1, 5), ValueError, "start"),
        ((10, 6, 5), ValueError, "stop"),
        ((10.0, 0, 5), TypeError, r"VocabShard\.vocab_size must be an int, got 10\.0"),
        ((10, 0, "5"), TypeError, r"VocabShard\.stop must be an int, got '5'"),
        ((10, True, 5), TypeError, r"VocabShard\.start must be an int, got True"),
    ],
)
def test_wrong_fields_are_named(fields: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        VocabShard(*fields)


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ([(0, 5), (5, 10)], None),
        ([(5, 10), (0, 5)], None),  # any order of ranks
        ([(0, 5), (5, 5), (5, 16)], None),
        ([(0, 10), (10, 16)], None),
        ([(0, 10), (0, 10)], "overlap"),
        ([(0, 6), (5, 10)], "overlap"),
        ([(0, 10), (2, 4)], "overlap"),
        ([(0, 4), (5, 10)], "no rank"),
        ([(1, 5), (5, 10)], "no rank"),
        ([(0, 5), (5, 9)], "no rank"),
        ([(0, 0), (0, 0)], "no rank"),
    ],
)
def test_gaps_and_overlaps_are_described(bounds: list[tuple[int, int]], problem: str | None) -> None:
    message = partition_error([VocabShard(10, start, stop) for start, stop in bounds])
    if problem is None:
        assert message is None
    else:
        assert message is not None
        assert problem in message


def test_different_vocabularies_are_described() -> None:
    message = partition_error([VocabShard(10, 0, 5), VocabShard(11, 5, 11)])
    assert message is not None
    assert "10" in message
    assert "11" in message
