"""ZeRO-3 with a stock loss, with this one, and with a head that is never gathered: time and peak, in one run.

    torchrun --standalone --nproc-per-node 2 launch/bench_deepspeed.py --tokens 4096 --hidden 4096 --vocab 128256
    torchrun --standalone --nproc-per-node 2 launch/bench_deepspeed.py --device cpu --dtype float32

One block of a body (H x 4H x H) and the head. Measured as in bench_fsdp_head.py, whose options these are.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench_fsdp_head import Model, Variant, measure_in_turn, parse
from benchmark.ranks import BenchRanks, run_and_exit
from flce_dist.options import DTYPES

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

    def step(self) -> None:
        self.engine.backward(self.engine(self.hidden, self.target))
        self.engine.step()


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments, __doc__)
    if options.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled
    ranks = BenchRanks.start_several(options.device)
    device = ranks.device
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    ranks.say(f"{ranks.size} x {name}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, {options.dtype}")
    ranks.say(f"{options.tokens:,} tokens a rank, H {options.hidden:,}, V {options.vocab:,}")
    measure_in_turn([EngineVariant(name, options, device) for name in VARIANTS], options, ranks)
    return 0


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
