"""Runs of launch/train.py, alike but for what a test changes: in this process, or on several."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from tests.kit.workers import Context
from trainer.config import load_config
from trainer.data import PackedSequences, evaluation_batches
from trainer.parallel import Ranks
from trainer.report import read_metrics
from trainer.setup import prepare
from trainer.tokens import open_tokens, prepare_tokens

ROOT = Path(__file__).resolve().parents[2]
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
        """The processes that torchrun would start, without torchrun: they can be killed for sure, and start faster."""
        command = [sys.executable, str(script), *arguments]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return Processes(self.folder, command, [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)])

    def torchrun(self, size: int, script: Path, arguments: list[str]) -> Processes:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        return Processes(self.folder, [*launcher, str(script), *arguments], [{}])


class Processes:
    """One command in several environments, with their output in one file."""

    def __init__(self, folder: Path, command: list[str], environments: list[dict[str, object]]):
        common = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "launch")]),
            "OMP_NUM_THREADS": "1",
        }
        descriptor, self.output = tempfile.mkstemp(dir=folder, suffix=".log")
        with os.fdopen(descriptor, "w") as file:
            self.processes = [
                subprocess.Popen(
                    command,
                    env=common | {name: str(value) for name, value in environment.items()},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                for environment in environments
            ]

    def finish(self, seconds: float = 250) -> tuple[int, str]:
        """The largest exit code and the output. When one fails the others are ended; none outlives `seconds`."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            late = time.monotonic() > deadline
            if late or any(process.poll() for process in self.processes):
                time.sleep(0 if late else 1)  # let the others say why they end
                self.end(signal.SIGTERM)
                if late:
                    pytest.fail(f"no end after {seconds} s:\n{self.text()}")
            time.sleep(0.02)
        return max(abs(process.returncode) for process in self.processes), self.text()

    def end(self, how: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(how)
        for process in self.processes:
            process.wait(timeout=60)

    def text(self) -> str:
        return Path(self.output).read_text()


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
