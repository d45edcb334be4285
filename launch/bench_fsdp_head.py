"""A head that FSDP2 gathers against one that is never gathered: time, peak and their ratio, in one run.

    torchrun --standalone --nproc-per-node 2 launch/bench_fsdp_head.py --tokens 4096 --hidden 4096 --vocab 128256
    torchrun --standalone --nproc-per-node 2 launch/bench_fsdp_head.py --device cpu

One block of a body (H x 4H x H) under FSDP2, and the head after it. The variants take turns in one process; times are
medians over the rounds of the slowest rank, ratios medians of the rounds' ratios. "held" is what parameters and
optimizer state take on the fullest rank, "step" what a step takes beyond that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmark import measure, report
from benchmark.ranks import BenchRanks, run_and_exit
from flce_dist import VocabParallelHead
from flce_dist.integrations.never_gathered import shard_head
from flce_dist.options import DTYPES, LossOptionsDict

VARIANTS = ("gathered", "gathered twice", "never gathered")  # twice: resharded between its forward and backward


class Model(nn.Module):
    def __init__(self, hidden_size: int, vocab_size: int, device: torch.device):
        super().__init__()
        self.arguments: dict[str, int] = {}
        self.body = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size, device=device),
            nn.GELU(),
            nn.Linear(4 * hidden_size, hidden_size, device=device),
            nn.LayerNorm(hidden_size, device=device),
        )
        self.lm_head: nn.Module = nn.Linear(hidden_size, vocab_size, bias=False, device=device)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.lm_head(self.body(hidden), target, **self.arguments)


class Variant:
    """A model with fp32 parameters, and AdamW, whose step is measured."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device):
        self.name, self.device = name, device
        before = self.allocated()
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
        policy = MixedPrecisionPolicy(DTYPES[options.dtype], torch.float32, cast_forward_inputs=False)
        torch.manual_seed(0)
        model = Model(options.hidden, options.vocab, device)
        loss: LossOptionsDict = {"logits_budget": options.budget, "check_ranks": "first"}
        ignored: set[nn.Parameter] = set()
        if name == "never gathered":
            model.arguments["max_tokens"] = options.tokens  # spares waiting for the device in each step
            ignored = set(shard_head(model, "lm_head", mesh, **loss).parameters())
        else:
            assert isinstance(model.lm_head, nn.Linear)
            model.lm_head = VocabParallelHead.from_linear(model.lm_head, **loss)
            fully_shard(model.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=name == "gathered twice")
        fully_shard(model.body, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        shape = (options.tokens, options.hidden)
        self.hidden = torch.randn(shape, device=device, dtype=DTYPES[options.dtype], generator=generator)
        self.target = torch.randint(options.vocab, shape[:1], device=device, generator=generator)
        self.step()
        self.held = self.allocated() - before  # parameters and optimizer state, after the first step has made it

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def step(self) -> None:
        self.model(self.hidden, self.target).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure_in_turn(
    variants: Sequence[Variant], options: argparse.Namespace, ranks: BenchRanks
) -> dict[str, list[float]]:
    """Measures the variants; rank 0 prints the table.

    Returns:
        Seconds of a step in each round, by variant.
    """
    place = ranks.place
    times = measure.time_rounds([v.step for v in variants], place, options.rounds, options.round_seconds)
    ranks.say(f"{'head':<16} {'ms':>9} {'/first':>10} {'held MiB':>9} {'step MiB':>9}")
    for variant, seconds in zip(variants, times, strict=True):
        most = measure.largest([variant.held], place)[0]
        held = f"{most / 2**20:.0f}" if ranks.device.type == "cuda" else "-"
        peak = measure.extra_peak(variant.step, place) / 2**20
        ratio = report.median_ratio(seconds, times[0])
        ranks.say(f"{variant.name:<16} {1e3 * statistics.median(seconds):9.2f} {ratio:10.3f} {held:>9} {peak:9.0f}")
    return {variant.name: seconds for variant, seconds in zip(variants, times, strict=True)}


def parse(arguments: Sequence[str], description: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="of each rank")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=1001)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the computation and the gathers")
    parser.add_argument("--budget", default="512MiB", help="the loss's logits_budget")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-seconds", type=float, default=0.5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, ranks: BenchRanks) -> dict[str, list[float]]:
    """`measure_in_turn` of all variants on all ranks."""
    device, tokens = ranks.device, ranks.size * options.tokens
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    ranks.say(f"{ranks.size} x {name}, torch {torch.__version__}, {options.dtype}")
    ranks.say(
        f"{options.tokens:,} tokens a rank, H {options.hidden:,}, V {options.vocab:,}: hidden states of "
        f"{tokens:,} tokens travel instead of {options.vocab:,} rows of the weight "
        f"({tokens / options.vocab:.2f} of them)"
    )
    return measure_in_turn([Variant(name, options, device) for name in VARIANTS], options, ranks)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    compare(options, BenchRanks.start_several(options.device))
    return 0


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
