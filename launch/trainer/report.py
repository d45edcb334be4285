"""What a run shows and leaves behind: progress, metrics, TensorBoard, the loss curve and the summary."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on the machines that train

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Record = dict[str, Any]
METRICS = "metrics.jsonl"


class Metrics:
    """`metrics.jsonl`, one object a line, and the same numbers for TensorBoard. Used on rank 0 only."""

    def __init__(self, folder: Path, resume_step: int, tensorboard: bool):
        """Keep the records of the first `resume_step` steps, which the resumed run does not repeat."""
        self.path = folder / METRICS
        kept = [record for record in read_metrics(self.path) if record["step"] <= resume_step] if resume_step else []
        work = self.path.with_suffix(".tmp")
        work.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(work, self.path)
        self.records = kept
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1) if tensorboard else None

    def write(self, record: Record) -> None:
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics file; a last line cut short by a kill is left out."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [json.loads(line) for line in lines]


class Progress:
    """A bar with loss, tokens/s and peak memory, or a line at each update where stderr is no terminal."""

    def __init__(self, first: int, steps: int, enabled: bool):
        self.steps, self.enabled = steps, enabled
        interactive = enabled and sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=first, unit="step", disable=not interactive)
        self.lines = enabled and not interactive

    def update(self, step: int, loss: float, tokens_per_second: float, memory: int) -> None:
        """Show the state after `step` steps."""
        self.bar.update(step - self.bar.n)
        self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s, {human_bytes(memory)}")
        if self.lines:
            print(
                f"step {step}/{self.steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  "
                f"peak {human_bytes(memory)}",
                flush=True,
            )

    def say(self, text: str) -> None:
        if self.enabled:
            self.bar.write(text) if not self.lines else print(text, flush=True)

    def close(self) -> None:
        self.bar.close()


class Clock:
    """Seconds since the last reading, after the device has finished what was asked of it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last = time.perf_counter()

    def lap(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch has held on the GPU, or the most that this process has had resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def human_bytes(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def plot_curves(curves: dict[str, list[Record]], path: Path) -> None:
    """One picture of training losses (lines) and evaluation losses (dots) over steps."""
    figure, axes = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    styles = ["-", "--", "-.", ":"]
    for index, (name, records) in enumerate(curves.items()):
        train = [(record["step"], record["loss"]) for record in records if "loss" in record]
        held_out = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
        color = f"C{index % 10}"
        label = name if len(curves) > 1 else "training"
        axes.plot(*zip(*train, strict=True), styles[index % 4], color=color, linewidth=1.6, label=label)
        if held_out:
            label = f"{name}, held out" if len(curves) > 1 else "held out"
            axes.plot(*zip(*held_out, strict=True), "o", color=color, markerfacecolor="white", label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    if len(curves) == 1:
        axes.set_title(next(iter(curves)))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def summary(records: list[Record], facts: Record, files: list[Path]) -> str:
    """The closing lines of a run.

    Args:
        records: all metrics of the run.
        facts: `tokens` of one micro-step on one rank, `vocab_size`, and for the fused loss `chunk_rows`, `columns` and
            `itemsize` of its logits buffer, and `loop_tokens`, the tokens that went through it; or `skip_ignored`,
            where these vary.
        files: what the run wrote.
    """
    losses = [record["loss"] for record in records if "loss" in record]
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    full = facts["tokens"] * facts["vocab_size"] * 4
    lines = [
        f"full logits of a micro-step would take {human_bytes(2 * full)} per rank: {facts['tokens']:,} tokens x "
        f"{facts['vocab_size']:,} entries in fp32, and their gradient"
    ]
    if "chunk_rows" in facts:
        chunk = facts["chunk_rows"] * facts["columns"] * facts["itemsize"]
        chunks = math.ceil(facts["loop_tokens"] / facts["chunk_rows"])
        lines.append(
            f"the loss held {human_bytes(chunk)} of them at a time: {chunks} chunks of {facts['chunk_rows']:,} tokens "
            f"x {facts['columns']:,} local entries"
        )
    elif "skip_ignored" in facts:
        lines.append("the loss made those of tokens that are learned alone, a chunk at a time")
    else:
        lines.append("loss: torch made them all")
    lines.append("files written:")
    lines += [f"  {path}" for path in files]
    if held_out:
        lines.append(f"held-out loss: {held_out[-1]:.4f}")
    lines.append(f"loss: first {losses[0]:.4f}, last {losses[-1]:.4f}")
    return "\n".join(lines)
