"""A small language model under FSDP1, FSDP2, FSDP2 x TP and HSDP, trained some steps beside one process.

The single process computes full logits and `F.cross_entropy` over the tokens of all data-parallel ranks together.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from flce_dist import VocabParallelHead, VocabShard, count_valid_tokens
from flce_dist.attach import attach_loss
from flce_dist.integrations.fsdp import FlceParallel
from tests.kit.tail_model import H, Model
from tests.kit.workers import Context

BATCH, LENGTH = 2, 8
STEPS, RATE = 3, 0.5
IGNORED = -100
BFLOAT16 = torch.bfloat16


@dataclass(frozen=True)
class Cell:
    """One way of wrapping the model."""

    framework: str = "fsdp2"  # fsdp1 | fsdp2 | hsdp1 | hsdp2 | 2d (FSDP2 x TP) | tp
    unit: str = "own"  # own | grouped (with the norm) | root | tied (in the root) | tied-unit (embedding and head)
    dtype: torch.dtype = torch.float32
    vocab_size: int = 64
    world: int = 2
    head: str = "linear"  # linear: nn.Linear with the loss attached | module: VocabParallelHead
    bias: bool = False
    flag: bool = True  # FSDP1: use_orig_params, FSDP2: reshard_after_forward
    micro_steps: int = 1
    row: int = 2  # innermost mesh dimension: TP ranks of 2d, ranks that share a replica's shards of HSDP
    sequence_parallel: bool = False  # tp and 2d: hidden states sharded over the sequence
    offload: bool = False  # parameters and gradients wait on the CPU
    shard_grad_op: bool = False  # FSDP1: parameters stay gathered between forward and backward

    @property
    def tensor_ranks(self) -> int:
        return {"2d": self.row, "tp": self.world}.get(self.framework, 1)

    @property
    def data_ranks(self) -> int:
        return self.world // self.tensor_ranks

    @property
    def tied(self) -> bool:
        return self.unit.startswith("tied")

    @property
    def has_empty_shard(self) -> bool:
        """Whether the last tensor-parallel rank has no rows of the vocabulary."""
        return VocabShard.even(self.vocab_size, self.tensor_ranks - 1, self.tensor_ranks).num_rows == 0

    @property
    def options(self) -> dict[str, Any]:
        """Several chunks, so that a gather for each would be seen."""
        return {"chunk_rows": 5}


def make_model(cell: Cell) -> Model:
    """Full parameters, the same on all ranks; the head has no loss yet unless it is a VocabParallelHead."""
    torch.manual_seed(0)
    if cell.head == "module":
        head: nn.Module = VocabParallelHead(H, cell.vocab_size, bias=cell.bias, **cell.options)
    else:
        head = nn.Linear(H, cell.vocab_size, bias=cell.bias)
    model = Model(cell.vocab_size, head)
    if cell.tied:
        tie(model)
    return model


def tie(model: Model) -> None:
    model.tail.head.weight = model.embed.weight


def make_batch(cell: Cell, step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """ids and targets `[BATCH, LENGTH]`; the ranks have different numbers of valid tokens."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    ids = torch.randint(cell.vocab_size, (BATCH, LENGTH), generator=generator)
    target = torch.randint(cell.vocab_size, (BATCH, LENGTH), generator=generator)
    drop = torch.rand(BATCH, LENGTH, generator=generator) < 0.2 + 0.5 * (data_rank % 2)
    drop[0, 0] = False
    return ids, torch.where(drop, IGNORED, target)


@dataclass
class Run:
    """Losses of the steps, of the whole batch, and the full parameters after them by name."""

    losses: list[float]
    parameters: dict[str, Tensor]


def reference(cell: Cell, dtype: torch.dtype = torch.float32) -> Run:
    """Full logits in one process. 16-bit steps are those of FSDP's mixed precision: parameters in 32 bits are cast for
    forward and backward, gradients are cast back."""
    # Cells that differ in nothing else have one reference.
    unit = "tied" if cell.tied else "root"
    alike = Cell("fsdp2", unit, torch.float32, cell.vocab_size, cell.data_ranks, bias=cell.bias)
    return _reference(replace(alike, micro_steps=cell.micro_steps), dtype)


@functools.cache
def _reference(cell: Cell, dtype: torch.dtype) -> Run:
    model = make_model(cell)
    losses = []
    for step in range(STEPS):
        working = copy.deepcopy(model).to(dtype)
        parts = [make_batch(cell, step * cell.micro_steps + i, rank)
                 for i in range(cell.micro_steps) for rank in range(cell.data_ranks)]  # fmt: skip
        ids, target = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        loss = nn.functional.cross_entropy(working(ids).flatten(0, 1).float(), target.flatten())
        loss.backward()
        with torch.no_grad():
            for own, cast in zip(model.parameters(), working.parameters(), strict=True):
                assert cast.grad is not None
                own -= RATE * cast.grad.float()
        losses.append(loss.item())
    return Run(losses, {name: p.detach() for name, p in model.named_parameters()})


def mesh_of(cell: Cell, ctx: Context) -> DeviceMesh:
    """Of the pool's groups: one dimension, or two with `cell.row` neighbours in the inner one."""
    device = ctx.device.type
    names = {"2d": ("dp", "tp"), "hsdp1": ("replicate", "shard"), "hsdp2": ("replicate", "shard")}.get(cell.framework)
    if names is None:
        return DeviceMesh.from_group(ctx.group, device, mesh_dim_names=("tp" if cell.framework == "tp" else "dp",))
    ranks = torch.arange(ctx.world).reshape(-1, cell.row)
    column, row = (tuple(r.tolist()) for r in (ranks[:, ctx.rank % cell.row], ranks[ctx.rank // cell.row]))
    if column not in ctx.groups or row not in ctx.groups:
        return DeviceMesh(device, ranks, mesh_dim_names=names)
    return DeviceMesh.from_group([ctx.groups[column], ctx.groups[row]], device, mesh=ranks, mesh_dim_names=names)


def tensor_plan(cell: Cell) -> dict[str, Any]:
    """The stock styles for the body and ours for the head."""
    style = FlceParallel if cell.head == "module" else lambda **k: FlceParallel(**k, **cell.options)
    tokens: Any = Shard(1) if cell.sequence_parallel else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=tokens),
        "blocks.*.down": RowwiseParallel(output_layouts=tokens),
        "tail.norm": SequenceParallel(),
        "tail.head": style(input_layouts=tokens),
    }
    if not cell.sequence_parallel:
        plan = {name: value for name, value in plan.items() if not isinstance(value, SequenceParallel)}
    if cell.has_empty_shard:
        # torch's sharded embedding fails on a rank without rows.
        plan["embed"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=tokens)
    return plan


def wrap(cell: Cell, ctx: Context, model: Model) -> nn.Module:
    model = model.to(ctx.device)
    if cell.head == "linear" and cell.framework not in ("2d", "tp"):
        attach_loss(model.tail.head, **cell.options)
    return wrap_fsdp1(cell, ctx, model) if cell.framework.endswith("1") else wrap_fsdp2(cell, ctx, model)


def wrap_fsdp1(cell: Cell, ctx: Context, model: Model) -> nn.Module:
    group: Any = ctx.group
    strategy = ShardingStrategy.FULL_SHARD
    if cell.shard_grad_op:
        strategy = ShardingStrategy.SHARD_GRAD_OP
    if cell.framework == "hsdp1":
        mesh = mesh_of(cell, ctx)
        group, strategy = (mesh.get_group("shard"), mesh.get_group("replicate")), ShardingStrategy.HYBRID_SHARD
    units: list[nn.Module] = list(model.blocks)
    units += {"own": [model.tail.head], "grouped": [model.tail]}.get(cell.unit, [])
    mixed = MixedPrecision(BFLOAT16, torch.float32) if cell.dtype == BFLOAT16 else None
    return FSDP(
        model,
        process_group=group,
        sharding_strategy=strategy,
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        mixed_precision=mixed,
        use_orig_params=cell.flag,
        cpu_offload=CPUOffload(cell.offload),
        device_id=ctx.device,
    )


def wrap_fsdp2(cell: Cell, ctx: Context, model: Model) -> nn.Module:
    mesh = mesh_of(cell, ctx)
    if cell.framework in ("2d", "tp"):
        parallelize_module(model, mesh["tp"], tensor_plan(cell))
        if cell.tied:
            tie(model)
        if cell.framework == "tp":
            return model
        mesh = mesh["dp"]
    policy = MixedPrecisionPolicy(BFLOAT16, torch.float32) if cell.dtype == BFLOAT16 else MixedPrecisionPolicy()
    keywords: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": cell.flag}
    if cell.offload:
        keywords["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in model.blocks:
        fully_shard(block, **keywords)
    tail = model.tail
    unit: Any = {"own": tail.head, "grouped": [tail.norm, tail.head], "tied-unit": [model.embed, tail.head]}.get(
        cell.unit
    )
    if unit is not None:
        fully_shard(unit, **keywords)
    return fully_shard(model, **keywords)


def data_group(cell: Cell, ctx: Context) -> Any:
    """The ranks with batches of their own; None if all see one batch."""
    if cell.tensor_ranks == ctx.world:
        return None
    return mesh_of(cell, ctx).get_group("dp") if cell.framework == "2d" else ctx.group


@contextlib.contextmanager
def synchronised(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are reduced in the last micro-step only."""
    if isinstance(model, FSDP):
        with contextlib.nullcontext() if last else model.no_sync():
            yield
    else:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        yield


def train(ctx: Context, cell: Cell, change: Callable[[Any], None] | None = None) -> Run:
    """The job: some steps of SGD, wrapped as the cell says; `change` is done to the wrapped model."""
    model = wrap(cell, ctx, make_model(cell))
    if change is not None:
        change(model)
    group = data_group(cell, ctx)
    # DTensors on different meshes do not go into one foreach call.
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    losses = []
    for step in range(STEPS):
        losses.append(train_step(ctx, cell, model, optimizer, step, group))
    return Run(losses, full_parameters(model))


def train_step(ctx: Context, cell: Cell, model: nn.Module, optimizer: Any, step: int, group: Any) -> float:
    data_rank, device = ctx.rank // cell.tensor_ranks, ctx.device
    batches = [make_batch(cell, step * cell.micro_steps + i, data_rank) for i in range(cell.micro_steps)]
    batches = [(ids.to(device), target.to(device)) for ids, target in batches]
    num_valid = count_valid_tokens(torch.cat([target for _, target in batches]), group=group)
    total = torch.zeros((), device=device)
    for i, (ids, target) in enumerate(batches):
        with synchronised(model, last=i == cell.micro_steps - 1):
            loss = model(ids, target, normalizer=num_valid)
            (loss * cell.data_ranks).backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
    return total.item()


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    if not isinstance(model, FSDP):
        return {name: full(p).detach().cpu() for name, p in model.named_parameters()}
    with FSDP.summon_full_params(model):
        names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
        return {name: p.detach().to("cpu", copy=True) for name, p in zip(names, model.parameters(), strict=True)}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def judge(cell: Cell, runs: list[Run]) -> None:
    """Losses and the whole change of the parameters against one process.

    In 16 bits the error may be twice that of the same steps with full logits in 16 bits.
    """
    expected, start = reference(cell), dict(make_model(replace(cell, head="linear")).named_parameters())

    def errors(run: Run) -> dict[str, float]:
        found = {"loss": max(abs(a - b) for a, b in zip(run.losses, expected.losses, strict=True))}
        head = [name for name in start if name.startswith("tail.head") or (cell.tied and name == "embed.weight")]
        for what, names in (("head", head), ("all", list(start))):
            change = torch.cat([(expected.parameters[n] - start[n]).flatten() for n in names])
            difference = torch.cat([(run.parameters[n] - expected.parameters[n]).flatten() for n in names])
            assert change.norm() > 0.1
            found[what] = (difference.norm() / change.norm()).item()
        return found

    bounds = {"loss": 1e-5, "head": 2e-5, "all": 2e-5}
    if cell.dtype == BFLOAT16:
        bounds = {what: 2 * error for what, error in errors(reference(cell, BFLOAT16)).items()}
        # A loss is one number, and the eager one may be right by chance.
        bounds["loss"] = max(bounds["loss"], 2**-8 * max(expected.losses))
    for rank, run in enumerate(runs):
        assert sorted(run.parameters) == sorted(start)
        found = errors(run)
        assert all(found[what] <= bounds[what] for what in bounds), f"rank {rank}: errors {found}, bounds {bounds}"
