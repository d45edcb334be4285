"""Weights that FSDP has sharded, passed by hand: an error that names it and the remedy, on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from flce_dist import linear_cross_entropy
from tests.kit.fsdp import Cell, make_batch, make_model, wrap
from tests.kit.tail_model import H
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import assert_all_raise

REMEDY = "compute the loss in"


def _head_of(model: Any) -> nn.Module:
    head = model.tail.head
    return getattr(head, "_fsdp_wrapped_module", head)


def _by_hand(ctx: Context, cell: Cell, when: str, grouped: bool) -> float:
    """The loss computed from the weight as FSDP leaves it outside of the module that owns it."""
    model = wrap(cell, ctx, make_model(cell))
    ids, target = make_batch(cell, 0, ctx.rank)
    if when == "after forward":
        model(ids, target)
    elif when == "after backward":
        model(ids, target).backward()
    return _loss(ctx, _head_of(model).weight, target, grouped, cell.vocab_size)


def _loss(ctx: Context, weight: Any, target: Tensor, grouped: bool, vocab_size: int = 64) -> float:
    hidden = torch.randn(*target.shape, H, generator=torch.Generator().manual_seed(ctx.rank))
    keywords: dict[str, Any] = {}
    if grouped:
        keywords = {"group": ctx.group}
        if not hasattr(weight, "device_mesh"):
            keywords["vocab_size"] = vocab_size
    return linear_cross_entropy(hidden, weight, target, **keywords).item()  # type: ignore[union-attr]


@pytest.mark.parametrize("grouped", [False, True], ids=["no-group", "group"])
@pytest.mark.parametrize(
    ("cell", "when", "word"),
    [
        # A flat part of the parameter, on some ranks an empty one.
        (Cell("fsdp1", "own"), "before forward", "FSDP1"),
        (Cell("fsdp1", "own"), "after forward", "FSDP1"),
        (Cell("fsdp1", "own"), "after backward", "FSDP1"),
        (Cell("fsdp1", "root"), "after backward", "FSDP1"),
        # A view of a flat parameter that was freed.
        (Cell("fsdp1", "own", flag=False), "before forward", "FSDP"),
        (Cell("fsdp1", "own", flag=False), "after forward", "FSDP"),
        (Cell("fsdp1", "own", flag=False), "after backward", "FSDP"),
        (Cell("fsdp1", "root", flag=False), "after backward", "FSDP"),
        # A DTensor.
        (Cell("fsdp2", "own"), "before forward", "FSDP2"),
        (Cell("fsdp2", "own"), "after forward", "FSDP2"),
        (Cell("fsdp2", "own", flag=False), "after backward", "FSDP2"),
        (Cell("fsdp2", "root"), "after backward", "FSDP2"),
        (Cell("hsdp2", "own"), "after backward", "FSDP2"),
        (Cell("2d", "own", row=1), "before forward", "FSDP2"),
    ],
    ids=lambda value: f"{value.framework}-{value.unit}-{value.flag}" if isinstance(value, Cell) else None,
)
def test_a_weight_outside_of_its_module(cell: Cell, when: str, word: str, grouped: bool, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _by_hand, cell, when, grouped), "ValueError", word, REMEDY)


def _kept_too_long(ctx: Context) -> float:
    """The gathered weight, taken while FSDP2 lent it and used after it was freed."""
    head = fully_shard(nn.Linear(H, 64, bias=False), mesh=DeviceMesh.from_group(ctx.group, "cpu"))
    head.unshard()
    weight = head.weight
    head.reshard()
    return _loss(ctx, weight, torch.randint(64, (5,)), False)


def test_a_gathered_weight_that_was_freed(workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _kept_too_long), "ValueError", "FSDP", REMEDY)


def _sharded_over_columns(ctx: Context, grouped: bool) -> float:
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    head = fully_shard(nn.Linear(H, 64, bias=False), mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
    return _loss(ctx, head.weight, torch.randint(64, (5,)), grouped)


@pytest.mark.parametrize("grouped", [False, True], ids=["no-group", "group"])
def test_a_weight_that_fsdp2_shards_over_columns(grouped: bool, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _sharded_over_columns, grouped), "ValueError", "FSDP2")
