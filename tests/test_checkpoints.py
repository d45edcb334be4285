"""Checkpoints of a model and its AdamW: written by any sharding of the head, read by any other, bit by bit.

Written sharded by torch.distributed.checkpoint, or as full tensors by the state-dict API. V is divisible by none of the
numbers of ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from flce_dist import VocabParallelHead
from flce_dist.integrations.never_gathered import shard_head
from tests.kit.data_parallel import Cell, Model, batch, groups_of, mesh_of, wrap
from tests.kit.workers import Context, Pool

KINDS = {
    "one process": 1,
    "tensor parallel": 3,
    "FSDP2": 2,
    "FSDP2 with TP": 4,
    "never gathered, 2 ranks": 2,
    "never gathered, 3 ranks": 3,
    "never gathered, hybrid": 4,
    "never gathered, FSDP1": 2,
    "never gathered, DDP": 2,
}
if torch.__version__ < (2, 13):
    # Older ones gather FSDP1's optimizer state over the default group, which here has more ranks.
    del KINDS["never gathered, FSDP1"]
SHARDED = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)  # torch cannot load full optimizer states that are flat as well
Built = tuple[nn.Module, torch.optim.Optimizer]


def build(ctx: Context, kind: str, seed: int) -> Built:
    model = Model().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    wrapped: nn.Module = model
    if kind.startswith("never gathered"):
        mesh = mesh_of(ctx, 2 if kind.endswith("hybrid") else 1)
        shard_head(model, "lm_head", mesh)
        wrapper = "fsdp1" if kind.endswith("FSDP1") else "ddp" if kind.endswith("DDP") else "fsdp2"
        wrapped = wrap(Cell(wrapper, ctx.world, 2 if kind.endswith("hybrid") else 1), model, ctx.group, mesh)
    elif kind == "FSDP2 with TP":
        mesh = ctx.mesh(2, 2, names=("data", "tensor"))
        model.lm_head = VocabParallelHead.from_linear(model.lm_head, mesh["tensor"])
        for module in (*model.layers, model.lm_head, model):
            fully_shard(module, mesh=mesh["data"])
    else:
        model.lm_head = VocabParallelHead.from_linear(model.lm_head, ctx.group if kind == "tensor parallel" else None)
        if kind == "FSDP2":
            for module in (*model.layers, model.lm_head, model):
                fully_shard(module, mesh=mesh_of(ctx, 1))
    return wrapped, torch.optim.AdamW(groups_of(wrapped), lr=0.1)


def step(built: Built, ctx: Context) -> None:
    """All ranks see the same batch, which every kind takes."""
    model, optimizer = built
    model(*batch(0, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(weights: dict[str, Tensor], moments: dict[str, Any]) -> dict[str, Tensor]:
    state = {f"{name} {key}": tensor for name, of in moments["state"].items() for key, tensor in of.items()}
    return {name: tensor.clone() for name, tensor in (weights | state).items()}


def write(ctx: Context, kind: str, folder: str) -> dict[str, Tensor]:
    built = build(ctx, kind, seed=1)
    for _ in range(2):
        step(built, ctx)
    weights, moments = get_state_dict(*built, options=SHARDED)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, process_group=ctx.group)
    return flat(*get_state_dict(*built, options=FULL))


def read(ctx: Context, kind: str, folder: str) -> dict[str, Tensor]:
    built = build(ctx, kind, seed=2)
    weights, moments = get_state_dict(*built, options=SHARDED)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder, process_group=ctx.group)
    set_state_dict(*built, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=SHARDED)
    found = flat(*get_state_dict(*built, options=FULL))
    step(built, ctx)  # the state is one to go on from
    return found


def read_full(ctx: Context, kind: str, weights: dict[str, Tensor], moments: dict[str, Any]) -> dict[str, Tensor]:
    built = build(ctx, kind, seed=2)
    set_state_dict(*built, model_state_dict=weights, optim_state_dict=moments, options=FULL)
    return flat(*get_state_dict(*built, options=FULL))


def write_full(ctx: Context, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    built = build(ctx, kind, seed=1)
    step(built, ctx)
    weights, moments = get_state_dict(*built, options=FULL)
    return {name: tensor.clone() for name, tensor in weights.items()}, moments


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def written(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Tensor]]]:
    """A checkpoint of each kind, and what is in it as full tensors."""
    found = {}
    for kind, world in KINDS.items():
        folder = str(tmp_path_factory.mktemp("checkpoint"))
        states = workers.run(world, write, kind, folder)
        for state in states[1:]:
            assert_same(state, states[0])
        assert {"lm_head.weight", "lm_head.weight exp_avg", "lm_head.bias exp_avg_sq"} <= states[0].keys()
        found[kind] = (folder, states[0])
    return found


NAMES = list(KINDS)
PAIRS = [
    (NAMES[i], NAMES[(i + offset) % len(NAMES)], offset) for offset in range(len(NAMES)) for i in range(len(NAMES))
]


@pytest.mark.parametrize(
    ("before", "after"),
    # Each kind is written three times and read three times by others in the quick suite.
    [pytest.param(*pair, marks=() if offset in (1, 4, 6) else pytest.mark.exhaustive) for *pair, offset in PAIRS],
)
def test_sharded_checkpoints(
    before: str, after: str, written: dict[str, tuple[str, dict[str, Tensor]]], workers: Pool
) -> None:
    folder, expected = written[before]
    for found in workers.run(KINDS[after], read, after, folder):
        assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_full_state_dicts(kind: str, workers: Pool) -> None:
    """Written by each kind and read by one process and by three that never gather, and the other way round."""
    pairs = [(kind, "one process"), (kind, "never gathered, 3 ranks"), ("one process", kind)]
    if kind == "FSDP2 with TP":  # torch cuts full tensors for two meshes only where the ranks divide the rows
        del pairs[2]
    for before, after in pairs:
        weights, moments = workers.run(KINDS[before], write_full, before)[0]
        for found in workers.run(KINDS[after], read_full, after, weights, moments):
            assert_same(found, flat(weights, moments))


def test_all_kinds_train_alike(written: dict[str, tuple[str, dict[str, Tensor]]], workers: Pool) -> None:
    """The states that the other tests compare are not those of the start, and not each kind's own."""
    _, first = written["one process"]
    start = workers.run(1, initial)[0]
    assert not torch.equal(first["lm_head.weight"], start["lm_head.weight"])
    assert first["lm_head.weight exp_avg"].any()  # weight decay alone would have moved the weight
    for _, state in written.values():
        torch.testing.assert_close(state["lm_head.weight"], first["lm_head.weight"], rtol=1e-3, atol=1e-3)


def initial(ctx: Context) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in build(ctx, "one process", 1)[0].state_dict().items()}
