"""A training step under FSDP2, and under tensor parallelism, with the head of this package beside others.

    torchrun --nproc-per-node 2 launch/bench_fsdp.py
    torchrun --nproc-per-node 2 launch/bench_fsdp.py --device cpu --hidden 32 --layers 1 --vocab 300 --length 16

Every method trains the same model on the same batches from the same start: first some steps whose losses are compared
with those of full logits, then, in turn within each round, the steps that are timed. Under `fsdp` each rank has its own
batch, parameters are float32 and computed in bfloat16 (float32 on CPU). Under `tensor` the ranks share the vocabulary
and see one batch, the body is whole on each, parameters are bfloat16. `launch/bench_fsdp_head.py` compares a head that
FSDP2 gathers with one that is never gathered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from benchmark import measure, report
from benchmark.ranks import BenchRanks, run_and_exit
from benchmark.workload import Place
from flce_dist.attach import attach_loss
from flce_dist.integrations.fsdp import FlceParallel

LEARNING_RATE = 1e-3


@dataclass
class TrainingRow:
    """What is reported of a method. Ratios and differences are to full logits in the same setup."""

    setup: str
    method: str
    ms: float
    to_logits: float
    extra_peak_bytes: int
    losses: list[float]
    curve_difference: float


class Model(nn.Module):
    """A causal transformer; `head_computes_loss` or full logits and `F.cross_entropy`."""

    head_computes_loss = True

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden, device=device)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                args.hidden, args.heads, 4 * args.hidden, 0.0, "gelu", batch_first=True, norm_first=True, device=device
            )
            for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(args.hidden, device=device)
        self.lm_head = nn.Linear(args.hidden, args.vocab, bias=False, device=device)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        hidden = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        hidden = self.norm(hidden)
        if self.head_computes_loss:
            return self.lm_head(hidden, target)
        return nn.functional.cross_entropy(self.lm_head(hidden).flatten(0, 1).float(), target.flatten())


def _fsdp(args: argparse.Namespace, model: Model, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(args.dtype, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The last unit of forward is the first of backward.
    fully_shard([model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp_flce(args: argparse.Namespace, model: Model, mesh: DeviceMesh) -> None:
    attach_loss(model.lm_head)
    _fsdp(args, model, mesh)


def fsdp_logits(args: argparse.Namespace, model: Model, mesh: DeviceMesh) -> None:
    model.head_computes_loss = False
    _fsdp(args, model, mesh)


def tensor_flce(args: argparse.Namespace, model: Model, mesh: DeviceMesh) -> None:
    parallelize_module(model.to(args.dtype), mesh, {"lm_head": FlceParallel()})


def tensor_loss_parallel(args: argparse.Namespace, model: Model, mesh: DeviceMesh) -> None:
    model.head_computes_loss = False
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model.to(args.dtype), mesh, {"lm_head": style})


def tensor_logits(args: argparse.Namespace, model: Model, mesh: DeviceMesh) -> None:
    """The whole head on every rank."""
    model.head_computes_loss = False
    model.to(args.dtype)


Prepare = Callable[[argparse.Namespace, Model, DeviceMesh], None]
METHODS: dict[str, Prepare] = {
    "fsdp:logits": fsdp_logits,
    "fsdp:flce": fsdp_flce,
    "tensor:logits": tensor_logits,
    "tensor:flce": tensor_flce,
    "tensor:loss_parallel": tensor_loss_parallel,
}


def step(
    model: Model, optimizer: torch.optim.Optimizer, around: Callable[[], Any], batch: tuple[Tensor, ...]
) -> Tensor:
    with around():
        loss = model(*batch)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def make_batch(args: argparse.Namespace, number: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(args.seed + 1000 * number + rank)
    ids = torch.randint(args.vocab, (args.batch, args.length + 1), generator=generator).to(device)
    return ids[:, :-1], ids[:, 1:]


def run(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[TrainingRow]:
    """Rows of all methods; collective."""
    mesh = DeviceMesh.from_group(group, device.type)
    place = Place(device, group)
    steps: dict[str, Callable[[], Tensor]] = {}
    curves: dict[str, list[float]] = {}
    for name in args.methods:
        torch.manual_seed(args.seed)
        model = Model(args, device)
        METHODS[name](args, model, mesh)
        # Plain parameters and DTensors do not go into one foreach call.
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
        around = loss_parallel if name.endswith("loss_parallel") else contextlib.nullcontext
        one = partial(step, model, optimizer, around)
        rank = dist.get_rank(group) if name.startswith("fsdp") else 0
        losses = torch.stack([one(make_batch(args, i, rank, device)).float() for i in range(args.curve)])
        dist.all_reduce(losses, group=group)
        curves[name] = (losses / dist.get_world_size(group)).tolist()
        steps[name] = partial(one, make_batch(args, args.curve, rank, device))
    seconds = measure.time_rounds(list(steps.values()), place, args.rounds, args.round_seconds)
    by_name = dict(zip(steps, seconds, strict=True))
    rows = []
    for name, one_step in steps.items():
        setup, _, method = name.partition(":")
        base = f"{setup}:logits"
        ratio = report.median_ratio(by_name[name], by_name[base])
        difference = max(abs(a - b) for a, b in zip(curves[name], curves[base], strict=True))
        peak = measure.extra_peak(one_step, place)
        milliseconds = 1e3 * statistics.median(by_name[name])
        rows.append(TrainingRow(setup, method, milliseconds, ratio, peak, curves[name], difference))
    return rows


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="a setup's logits are always measured")
    for name, default in (("hidden", 4096), ("layers", 4), ("heads", 0), ("vocab", 128256), ("batch", 2)):
        add(f"--{name}", type=int, default=default, help="default: hidden / 128" if name == "heads" else None)
    add("--length", type=int, default=2048, help="tokens of a sequence")
    add("--curve", type=int, default=10, help="steps whose losses are compared")
    add("--rounds", type=int, default=10)
    add("--round-seconds", type=float, default=1.0, help="time a method gets in a round")
    add("--seed", type=int, default=0)
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args(arguments)
    args.heads = args.heads or max(1, args.hidden // 128)
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    bases = [f"{name.partition(':')[0]}:logits" for name in args.methods]
    args.methods = [name for name in METHODS if name in args.methods or name in bases]
    return args


def table(rows: list[TrainingRow]) -> str:
    lines = [
        "| setup | method | ms a step | / logits | extra peak MiB | largest loss difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.setup} | {row.method} | {row.ms:.2f} | {row.to_logits:.3f} | {row.extra_peak_bytes / 2**20:.1f} "
            f"| {row.curve_difference:.1e} of {row.losses[-1]:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    args = parse_arguments(arguments)
    ranks = BenchRanks.start_several(args.device)
    group = ranks.first(ranks.size)
    assert group is not None
    rows = run(args, group, ranks.device)
    ranks.say(table(rows))
    if ranks.rank == 0 and args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
