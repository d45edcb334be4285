"""Two GPUs under FSDP1, FSDP2 and tensor parallelism: steps against one process, curves beside full logits and torch's
`loss_parallel`. One GPU a rank also shows what the CPU cannot: streams, prefetching, offload to pinned memory."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from flce_dist import LossOutput
from tests.gpu.support import DevicePool
from tests.kit.fsdp import (
    BFLOAT16,
    Cell,
    FlceParallel,
    full,
    judge,
    make_batch,
    make_model,
    mesh_of,
    tensor_plan,
    train,
    wrap,
)
from tests.kit.fsdp_matrix import UNEVEN, name
from tests.kit.workers import Context

pytestmark = pytest.mark.gpu

CELLS = [
    Cell("fsdp1", "own", torch.float32, UNEVEN, micro_steps=2),
    Cell("fsdp1", "root", BFLOAT16, UNEVEN, head="module", flag=False),
    Cell("fsdp1", "tied", torch.float32, UNEVEN),
    Cell("fsdp2", "own", torch.float32, UNEVEN, micro_steps=2),
    Cell("fsdp2", "grouped", BFLOAT16, UNEVEN, head="module", flag=False),
    Cell("fsdp2", "root", BFLOAT16, UNEVEN, flag=False, micro_steps=2),
    Cell("fsdp2", "tied-unit", torch.float32, UNEVEN, head="module"),
    Cell("hsdp2", "own", torch.float32, UNEVEN, row=1),
    Cell("2d", "own", BFLOAT16, UNEVEN, head="module"),
    Cell("2d", "own", BFLOAT16, UNEVEN, sequence_parallel=True),
    Cell("2d", "tied", torch.float32, UNEVEN, flag=False, micro_steps=2),
    Cell("tp", "own", torch.float32, UNEVEN, head="module", sequence_parallel=True),
]


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_steps_are_those_of_one_process(cell: Cell, two_gpus: DevicePool) -> None:
    judge(cell, two_gpus.run(2, train, cell))


@pytest.mark.parametrize(
    "cell",
    [
        Cell("fsdp1", "own", offload=True),
        Cell("fsdp1", "root", BFLOAT16, offload=True, flag=False),
        Cell("fsdp2", "own", offload=True),
        Cell("fsdp2", "grouped", BFLOAT16, offload=True, flag=False),
    ],
    ids=name,
)
def test_cpu_offload(cell: Cell, two_gpus: DevicePool) -> None:
    judge(cell, two_gpus.run(2, train, cell))


def _compile(model: nn.Module) -> None:
    model.compile()


@pytest.mark.parametrize(
    "cell", [Cell("fsdp2", "own", BFLOAT16), Cell("fsdp1", "root"), Cell("tp", head="module")], ids=name
)
def test_compiled(cell: Cell, two_gpus: DevicePool) -> None:
    judge(cell, two_gpus.run(2, train, cell, _compile, timeout=240.0))


def _curve(ctx: Context, cell: Cell, method: str) -> list[float]:
    """Losses of 20 steps on one batch: "flce", "logits" or "loss_parallel" (with torch's own styles)."""
    model: Any = make_model(cell)
    if method == "flce":
        model = wrap(cell, ctx, model)
    elif method == "logits":
        model = _with_full_logits(ctx, cell, model)
    else:
        model.to(ctx.device)
        plan = tensor_plan(cell)
        assert isinstance(plan["tail.head"], FlceParallel)
        plan["tail.head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh_of(cell, ctx), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    ids, target = (tensor.to(ctx.device) for tensor in make_batch(cell, 0, ctx.rank // cell.tensor_ranks))
    losses = []
    for _ in range(20):
        with loss_parallel() if method == "loss_parallel" else contextlib.nullcontext():
            if method == "flce":
                loss = model(ids, target)
            else:
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), target.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not isinstance(loss, LossOutput)
        losses.append(full(loss.detach()).item())
    return losses


def _with_full_logits(ctx: Context, cell: Cell, model: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.to(ctx.device)
    policy = MixedPrecisionPolicy(cell.dtype, torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh_of(cell, ctx), mp_policy=policy)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("unit", ["own", "grouped"])
def test_the_curve_of_full_logits_under_fsdp2(dtype: torch.dtype, unit: str, two_gpus: DevicePool) -> None:
    cell = Cell("fsdp2", unit, dtype, UNEVEN, flag=False)
    _assert_equal_curves(cell, two_gpus, "logits")


def test_the_curve_of_loss_parallel(two_gpus: DevicePool) -> None:
    _assert_equal_curves(Cell("tp", bias=True), two_gpus, "loss_parallel")


def _assert_equal_curves(cell: Cell, pool: DevicePool, other: str) -> None:
    ours, theirs = pool.run(2, _curve, cell, "flce"), pool.run(2, _curve, cell, other)
    relative = 1e-4 if cell.dtype == torch.float32 else 2e-2
    for rank in range(2):
        assert ours[rank][-1] < 0.8 * ours[rank][0], "nothing was learnt"
        assert ours[rank] == pytest.approx(theirs[rank], rel=relative)
