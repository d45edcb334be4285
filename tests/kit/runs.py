"""Runs of launch/train.py, alike but for what a test changes: in this process, or on several."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import train
from tests.kit.processes import ROOT, Processes, start_ranks
from tests.kit.workers import Context
from trainer.config import load_config
from trainer.data import PackedSequences, evaluation_batches
from trainer.parallel import Ranks
from trainer.report import read_metrics
from trainer.setup import prepare
from trainer.tokens import open_tokens, prepare_tokens

TRAIN = ROOT / "launch" / "train.py"
STEPS = 60

CONFIG = f"""
model:
  config: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}
data: {{max_bytes: 200_000, sequence_length: 48, holdout: 0.1}}
tokenizer: {{vocab_size: 509}}
train: {{steps: {STEPS}, batch_size: 4, log_every: 1, eval_every: 30, eval_sequences: 9}}
optimizer: {{lr: 3e-4, warmup_steps: 0, min_lr_ratio: 1.0}}
loss: {{type: flce, logits_budget: 32KiB}}
parallel: {{device: cpu}}
output: {{tensorboard: false, plot: false, export: false}}
"""


class Workplace:
    """A folder for the runs of this module, with their common configuration and token cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG)

    def arguments(self, name: str, *overrides: str) -> list[str]:
        common = [f"output.dir={self.folder / name}", f"data.cache_dir={self.folder / 'cache'}"]
        return ["--config", str(self.config), *common, *overrides]

    def here(self, name: str, *overrides: str) -> Path:
        """Run in this process, as a single rank."""
        generators = torch.get_rng_state()
        assert train.main(self.arguments(name, *overrides)) == 0
        torch.set_rng_state(generators)
        return self.folder / name

    def ranks(self, size: int, name: str, *overrides: str) -> Path:
        """Run on so many ranks, to a good end."""
        code, output = self.start(size, TRAIN, self.arguments(name, *overrides)).finish()
        assert code == 0, output
        return self.folder / name

    def start(self, size: int, script: Path, arguments: list[str]) -> Processes:
        return start_ranks(size, script, arguments, self.folder)

    def torchrun(self, size: int, script: Path, arguments: list[str]) -> Processes:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        return Processes(self.folder, [*launcher, str(script), *arguments], [{}])


def run_trainer(ctx: Context, arguments: list[str]) -> train.Trainer:
    """A run as `train.main` makes it, by ranks that exist already."""
    ranks = Ranks(ctx.rank, ctx.world, ctx.rank, ctx.world)
    trainer = train.Trainer(prepare(arguments[1], arguments[2:], ranks), ranks)
    trainer.fit()
    trainer.finish()
    ranks.gather(None)
    return trainer


def resumable_copy(run: Path, copy: Path, steps: int) -> Path:
    """`copy`: the run's folder without the checkpoint of its last step."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / f"step-{steps:08d}")
    return copy


def curve(run: Path, name: str = "loss") -> dict[int, float]:
    return {record["step"]: record[name] for record in read_metrics(run / "metrics.jsonl") if name in record}


def assert_same_curve(run: Path, reference: Path, bound: float, steps: int = STEPS) -> None:
    for name in ("loss", "grad_norm", "eval_loss"):
        one, other = curve(run, name), curve(reference, name)
        assert one.keys() == other.keys(), name
        if not one:
            continue  # no evaluation in either
        worst = max(one, key=lambda step: abs(one[step] - other[step]))
        assert abs(one[worst] - other[worst]) <= bound, (name, worst, one[worst], other[worst])
    assert list(curve(run)) == list(range(1, steps + 1))


def held_out_loss(run: Path, model: Any) -> float:
    """What a model of transformers loses on the run's held-out text, by full logits."""
    config = load_config(str(run / "config.yaml"))
    tokens = open_tokens(prepare_tokens(config), config)
    held_out = PackedSequences(tokens.evaluation, config.data.sequence_length, tokens.separator, -100)
    total, count = 0.0, 0
    for inputs, targets in evaluation_batches(held_out, config.train.eval_sequences, 3, 0, 1):
        logits = model(input_ids=inputs).logits
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += int((targets != -100).sum())
    return total / count
