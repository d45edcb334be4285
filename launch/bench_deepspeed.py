"""ZeRO-3 with a stock loss, with this one, and with a head that is never gathered: time and peak, in one run.

    torchrun --standalone --nproc-per-node 2 launch/bench_deepspeed.py --tokens 4096 --hidden 4096 --vocab 128256
    torchrun --standalone --nproc-per-node 2 launch/bench_deepspeed.py --device cpu --dtype float32

One block of a body (H x 4H x H) and the head. Measured as in bench_fsdp_head.py, whose options these are.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench_fsdp_head import DTYPES, Model, Variant, table

VARIANTS = ("stock loss", "flce", "never gathered")


class StockModel(Model):
    """Full logits, and their cross entropy in fp32."""

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(self.body(hidden)).float(), target)


class EngineVariant(Variant):
    """A ZeRO-3 engine whose step is measured."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device):
        import deepspeed

        from flce_dist.integrations.deepspeed import initialize

        self.name, self.device = name, device
        self.times: list[float] = []
        before = self.allocated()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": options.dtype == "bfloat16"},
        }
        torch.manual_seed(0)
        if name == "stock loss":
            model: Model = StockModel(options.hidden, options.vocab, device)
            start = deepspeed.initialize
        else:
            model, start = Model(options.hidden, options.vocab, device), initialize
            config["flce_dist"] = {"logits_budget": options.budget, "check_ranks": "first"}
        if name == "never gathered":
            config["flce_dist"]["vocab_parallel"] = "data"
            model.arguments["max_tokens"] = options.tokens  # spares waiting for the device in each step
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.engine = start(model=model, optimizer=optimizer, config=config)[0]
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        shape = (options.tokens, options.hidden)
        self.hidden = torch.randn(shape, device=device, dtype=DTYPES[options.dtype], generator=generator)
        self.target = torch.randint(options.vocab, shape[:1], device=device, generator=generator)
        self.step()
        self.held = self.allocated() - before
        self.peak = 0

    def step(self) -> None:
        self.engine.backward(self.engine(self.hidden, self.target))
        self.engine.step()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="of each rank")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=1001)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--budget", default="512MiB", help="the loss's logits_budget")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-seconds", type=float, default=0.5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    ranks = dist.get_world_size()
    say(f"{ranks} x {name}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, {options.dtype}")
    say(f"{options.tokens:,} tokens a rank, H {options.hidden:,}, V {options.vocab:,}")
    variants = [EngineVariant(name, options, device) for name in VARIANTS]
    for number in range(options.rounds):
        turn = number % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            variant.measure(options.round_seconds)
    table(variants, say, device)
    return 0


if __name__ == "__main__":
    try:
        exit_code = main()
        dist.barrier()
    except Exception:
        traceback.print_exc()
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)  # tearing gloo down may hang
