"""A small language model, batches that differ from rank to rank, and the wrappers that train it data-parallel with a
head that is never gathered; and the same training in one process, in float64.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flce_dist import count_valid_tokens
from flce_dist.clip import clip_grad_norm_
from flce_dist.integrations.never_gathered import NeverGatheredHead, shard_head
from tests.kit.workers import Context

IDS, H, V = 11, 8, 29  # V is not divisible by 2, 3 or 4
STEPS, LR = 3, 0.5


class Model(nn.Module):
    """The loss is computed in forward, by calling the head."""

    def __init__(self, vocab_size: int = V) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(IDS, H)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.norm = nn.LayerNorm(H)
        self.lm_head = nn.Linear(H, vocab_size)
        self.double()

    def body(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.norm(hidden)

    def forward(self, ids: Tensor, target: Tensor, **arguments: Any) -> Tensor:
        return self.lm_head(self.body(ids), target, **arguments)


def batch(step: int, micro: int, rank: int, vocab_size: int = V) -> tuple[Tensor, Tensor]:
    """Each rank has another number of tokens; in the second step those of rank 1 are all ignored."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    shape = (rank + 1, 3 + micro)
    ids = torch.randint(IDS, shape, generator=generator)
    target = torch.randint(vocab_size, shape, generator=generator)
    target[torch.rand(shape, generator=generator) < 0.2] = -100
    if step == 1 and rank == 1:
        target[:] = -100
    return ids, target


@dataclass(frozen=True)
class Cell:
    wrapper: str = "fsdp2"
    world: int = 2
    replicas: int = 1
    accumulation: int = 1
    max_norm: float = math.inf
    clip: str = "stock"
    no_sync: bool = True
    bf16: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters. FSDP1 measures norms in float32, and refuses float64."""
        return torch.float32 if self.bf16 or self.wrapper.startswith("fsdp1") else torch.float64

    @property
    def bound(self) -> float:
        return 2e-2 if self.bf16 else 1e-11 if self.dtype == torch.float64 else 1e-5

    def __str__(self) -> str:
        parts = [self.wrapper, f"{self.replicas}x{self.world // self.replicas}", f"accumulation {self.accumulation}"]
        if self.max_norm != math.inf:
            parts.append(f"clip {self.clip}")
        return ", ".join([*parts, *["every pass synced"] * (not self.no_sync), *["bf16"] * self.bf16])


def wrap(cell: Cell, model: Model, group: Any, mesh: DeviceMesh) -> nn.Module:
    head = model.lm_head
    narrow = torch.bfloat16 if cell.bf16 else None
    if cell.wrapper.startswith("fsdp2"):
        if cell.wrapper == "fsdp2 on all ranks":  # beside a head with replicas
            mesh = mesh._flatten()
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=None if narrow is None else torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=set(head.parameters()))
    if cell.wrapper == "ddp":
        return DistributedDataParallel(model, process_group=group)
    hybrid = cell.replicas > 1
    return FSDP(
        model,
        process_group=None if hybrid else group,
        device_mesh=mesh if hybrid else None,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in set(model.layers),
        ignored_modules=[head],
        mixed_precision=None if narrow is None else MixedPrecision(narrow, torch.float32),
        use_orig_params=cell.wrapper == "fsdp1",
        device_id=torch.device("cpu"),
    )


@contextlib.contextmanager
def synchronised(wrapped: nn.Module, head: NeverGatheredHead, wanted: bool) -> Iterator[None]:
    head.set_requires_gradient_sync(wanted)
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(wanted)
        yield
    else:
        with contextlib.nullcontext() if wanted else wrapped.no_sync():
            yield


def mesh_of(ctx: Context, replicas: int) -> DeviceMesh:
    if replicas == 1:
        return ctx.mesh(ctx.world, names=("shard",))
    return ctx.mesh(replicas, ctx.world // replicas, names=("replicate", "shard"))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) == kind] for kind in (False, True)]
    return [{"params": kind} for kind in kinds if kind]


def train(ctx: Context, cell: Cell) -> dict[str, Any]:
    mesh = mesh_of(ctx, cell.replicas)
    model = Model().to(cell.dtype)
    head = shard_head(model, "lm_head", mesh, chunk_rows=8)
    wrapped = wrap(cell, model, ctx.group, mesh)
    optimizer = torch.optim.SGD(groups_of(wrapped), lr=LR)
    norms, losses, dtypes = [], [], set()
    for step in range(STEPS):
        batches = [batch(step, micro, ctx.rank) for micro in range(cell.accumulation)]
        targets = torch.cat([target.flatten() for _, target in batches])
        count = count_valid_tokens(targets, group=ctx.group)  # an integer, or mixed precision would cast it
        normalizer = count if cell.replicas == 1 else count.item() / cell.replicas
        total = 0.0
        for number, (ids, target) in enumerate(batches, start=1):
            with synchronised(wrapped, head, number == cell.accumulation or not cell.no_sync):
                loss = wrapped(ids, target, normalizer=normalizer)
                loss.backward()
            total += loss.item()
        losses.append(total)
        if cell.clip == "stock":
            norm = torch.nn.utils.clip_grad_norm_(wrapped.parameters(), cell.max_norm)
        else:
            norm = clip_grad_norm_(wrapped, cell.max_norm)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        dtypes |= {p.grad.dtype for p in head.parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    state = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
    return {
        "losses": losses,
        "norms": norms,
        "rows": [p.to_local().shape[0] for p in head.parameters()],
        "dtypes": {str(p.dtype) for p in head.parameters()} | {str(dtype) for dtype in dtypes},
        "state": {name: tensor.clone() for name, tensor in state.items()},
    }


@functools.cache
def reference(world: int, accumulation: int, max_norm: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and the final state of one float64 process that sees the tokens of all ranks."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [batch(step, micro, rank) for micro in range(accumulation) for rank in range(world)]
        count = sum(int((target != -100).sum()) for _, target in batches)
        loss = torch.zeros((), dtype=torch.float64)
        for ids, target in batches:
            logits = model.lm_head(model.body(ids))
            loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / count
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
