"""Train a language model with the vocabulary-sharded cross entropy.

    torchrun --nproc-per-node 2 launch/train.py --config configs/quickstart.yaml train.steps=200

`docs/training.md` explains every key. The parts are in `launch/trainer/`; this file puts them together.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import traceback
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leave import exit_process
from trainer.checkpoint import step_of
from trainer.config import ignore_index
from trainer.data import Batch, PackedSequences, TrainingBatches, evaluation_batches
from trainer.export import save_pretrained
from trainer.model import logits_facts
from trainer.optim import learning_rate
from trainer.parallel import Ranks, SetupError
from trainer.report import METRICS, Clock, Metrics, Progress, peak_memory, plot_curves, summary
from trainer.setup import CHECKPOINTS, CONFIG, EXPORT, PLOT, TENSORBOARD, TOKENS, Setup, prepare


class Trainer:
    """The training loop of one process; every rank runs the same."""

    def __init__(self, setup: Setup, ranks: Ranks):
        self.setup, self.ranks, self.config = setup, ranks, setup.config
        train, mode = self.config.train, setup.mode
        self.ignore_index = ignore_index(self.config)
        self.model = setup.model
        self.wrapped = mode.wrap(self.model)
        self.optimizer = mode.make_optimizer(self.model)
        self.checkpoints = mode.make_checkpoints(setup.output / CHECKPOINTS)

        def packed(ids: NDArray[np.int32]) -> PackedSequences:
            return PackedSequences(ids, self.config.data.sequence_length, setup.tokens.separator, self.ignore_index)

        self.batches = TrainingBatches(
            packed(setup.tokens.train),
            train.batch_size,
            train.accumulation,
            mode.data_rank,
            mode.data_ranks,
            self.config.seed,
        )
        self.held_out = packed(setup.tokens.evaluation)
        self.rows = train.batch_size // train.accumulation // mode.data_ranks  # sequences of one micro-step here
        torch.manual_seed(self.config.seed + mode.data_rank)  # dropout: alike on ranks that see the same batch
        self.done = 0
        if setup.resume_from is not None:
            self.checkpoints.load(setup.resume_from, self.model, self.optimizer)
            self.done = step_of(setup.resume_from)
        self.metrics = Metrics(setup.output, self.done, self.config.output.tensorboard) if ranks.is_main else None
        self.progress = Progress(self.done, train.steps, enabled=ranks.is_main)
        self.clock = Clock(setup.device)
        self.pending: list[tuple[int, Tensor, Tensor, float]] = []  # steps whose numbers are still on the device

    def fit(self) -> None:
        train, every = self.config.train, self.config.checkpoint.every
        self.clock.lap()
        for step in range(self.done, train.steps):
            self.step(step)
            self.done = step + 1
            last = self.done == train.steps
            evaluate = bool(train.eval_every) and (last or self.done % train.eval_every == 0)
            save = bool(every) and (last or self.done % every == 0)
            if evaluate or save or last or self.done % train.log_every == 0:
                self.log()
            if evaluate:
                self.evaluate()
            if save:
                self.checkpoints.save(self.done, self.model, self.optimizer)
            if evaluate or save:
                self.clock.lap()  # tokens/s counts training only
        self.progress.close()

    def step(self, step: int) -> None:
        """One optimizer step over `train.accumulation` micro-batches."""
        batches = [self.to_device(batch) for batch in self.batches.step(step)]
        mode = self.setup.mode
        normalizer = mode.normalizer(torch.cat([targets for _, targets in batches]), self.ignore_index)
        lr = learning_rate(step, self.config.train.steps, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        losses = []
        for number, (inputs, targets) in enumerate(batches, start=1):
            with mode.micro_step(self.wrapped, last=number == len(batches)):
                loss = self.wrapped(inputs, targets, normalizer)
                mode.backward(loss)
            losses.append(loss.detach())
        norm = mode.update(self.model, self.optimizer)
        self.pending.append((step + 1, torch.stack(losses).sum(), norm, lr))

    def log(self) -> None:
        """Bring the numbers of the pending steps to the host: the only place where training waits for the device."""
        losses = self.setup.mode.mean_loss(torch.stack([loss for _, loss, _, _ in self.pending])).tolist()
        norms = torch.stack([norm for _, _, norm, _ in self.pending]).tolist()
        tokens = self.config.train.batch_size * self.config.data.sequence_length
        speed = len(self.pending) * tokens / self.clock.lap()
        memory = peak_memory(self.setup.device)
        for (step, _, _, lr), loss, norm in zip(self.pending, losses, norms, strict=True):
            if not math.isfinite(loss):
                saved = "; the last checkpoint is from before it" if self.config.checkpoint.every else ""
                raise FloatingPointError(f"the loss of step {step} is {loss}{saved}")
            if self.metrics is not None:
                record = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr}
                self.metrics.write(record | {"tokens_per_second": speed, "peak_memory_bytes": memory})
        self.progress.update(self.done, losses[-1], speed, memory)
        self.pending.clear()

    @torch.no_grad()
    def evaluate(self) -> None:
        """The mean loss over the valid tokens of the held-out sequences."""
        mode = self.setup.mode
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.setup.device)
        sequences = self.config.train.eval_sequences
        for batch in evaluation_batches(self.held_out, sequences, self.rows, mode.data_rank, mode.data_ranks):
            inputs, targets = self.to_device(batch)
            totals[0] += self.wrapped(inputs, targets, 1.0)
            totals[1] += mode.normalizer(targets, self.ignore_index)
        self.model.train()
        total, count = mode.mean_loss(totals).tolist()
        if self.metrics is not None:
            self.metrics.write({"step": self.done, "eval_loss": total / count})
        self.progress.say(f"step {self.done}: held-out loss {total / count:.4f}")

    def finish(self) -> None:
        """Export, plot and sum up."""
        output, wanted = self.setup.output, self.config.output
        files = [output / name for name in (CONFIG, TOKENS, METRICS)]
        if wanted.export:
            state, tokenizer = self.setup.mode.whole_state(self.model), self.setup.tokens.tokenizer_folder
            files.append(save_pretrained(self.model, state, tokenizer, output / EXPORT, self.ranks))
        if self.metrics is None:
            return
        self.metrics.close()
        if wanted.plot:
            plot_curves({output.name: self.metrics.records}, output / PLOT)
            files.append(output / PLOT)
        if wanted.tensorboard:
            files.append(output / TENSORBOARD)
        if self.config.checkpoint.every:
            files.append(output / CHECKPOINTS)
        tokens = self.rows * self.config.data.sequence_length
        print(summary(self.metrics.records, logits_facts(self.config, self.model, tokens), files), flush=True)

    def to_device(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.setup.device), targets.to(self.setup.device)


def describe(setup: Setup, ranks: Ranks) -> str:
    """One line that says what is about to be trained."""
    config, info = setup.config, setup.tokens.info
    parameters = sum(parameter.numel() for parameter in setup.model.parameters())
    loss = config.loss if isinstance(config.loss, str) else config.loss["type"]
    share = info["learned"] / len(setup.tokens.train)
    learned = f", {share:.0%} of them learned" if config.data.messages_field else ""
    start = f", from {setup.resume_from}" if setup.resume_from else ""
    return (
        f"{parameters / 1e6:.1f} M parameters, vocabulary {setup.tokens.vocab_size:,}; "
        f"{info['documents']:,} documents, {info['bytes'] / 1e6:.1f} MB, {len(setup.tokens.train):,} training tokens"
        f"{learned}; "
        f"{ranks.size} x {setup.device.type}, {config.parallel.mode} parallel, loss {loss}{start}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file; see configs/")
    parser.add_argument("--deepspeed", metavar="FILE", help="DeepSpeed configuration (JSON); see configs/deepspeed/")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # from the deepspeed launcher; in LOCAL_RANK
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys with YAML values")
    options = parser.parse_intermixed_args(arguments)  # overrides on both sides of an option
    ranks = Ranks.start()
    code = 0
    try:
        overrides = list(options.overrides)
        if options.deepspeed is not None:
            overrides += ["parallel.mode=deepspeed", f"parallel.deepspeed={json.dumps(options.deepspeed)}"]
        setup = prepare(options.config, overrides, ranks)
    except SetupError as error:
        if ranks.is_main:
            print(f"train.py: {error}", file=sys.stderr)
        code = 2
    else:
        if ranks.is_main:
            print(describe(setup, ranks), flush=True)
        trainer = Trainer(setup, ranks)
        trainer.fit()
        trainer.finish()
    ranks.gather(None)  # no rank leaves while another still reads from it
    return code


if __name__ == "__main__":
    try:
        exit_code = main()
    except Exception:
        traceback.print_exc()
        exit_code = 1
    exit_process(exit_code)
