"""Checkpoints by torch.distributed.checkpoint: whole or absent, exact to resume, readable by other rank counts.

A checkpoint is written as `step-00000060.tmp` and renamed when all ranks are done, so a folder with its final name is
complete. Weights and optimizer state are stored as full tensors in parts, whatever the ranks that wrote them.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from .parallel import Ranks
from .schema import ConfigError

_NAME = re.compile(r"step-(\d{8})")
DEEPSPEED_LAST = "latest"
_LAST = (".metadata", DEEPSPEED_LAST)  # written at the end, by torch.distributed.checkpoint and by DeepSpeed
# Flat optimizer keys name the parameter, not its place in a group: groups differ with the number of ranks.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
# What must not change between the parts of one run; other sections (optimizer, loss, ranks, length) may.
_PINNED = ("model", "data.", "tokenizer.", "seed", "train.batch_size")
_FREE = ("data.cache_dir",)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints under `folder`, oldest first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(path for path in named if any((path / last).is_file() for last in _LAST))


def step_of(path: Path) -> int:
    """The number of optimizer steps that a checkpoint's weights have seen."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


class Checkpoints:
    """The checkpoints of one run, under `folder`. All methods are called by all ranks together."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks):
        self.folder, self.keep, self.ranks = folder, keep, ranks

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write the state after `step` optimizer steps, then drop all but the newest `keep` checkpoints."""
        final = self.folder / f"step-{step:08d}"
        work = final.with_suffix(".tmp")
        if self.ranks.is_main:
            for left_by_a_kill in self.folder.glob("step-*.tmp"):
                shutil.rmtree(left_by_a_kill)
            work.mkdir(parents=True)
        self.ranks.gather(None)
        self.write(work, model, optimizer)
        self.ranks.gather(None)
        if self.ranks.is_main:
            shutil.rmtree(final, ignore_errors=True)
            work.rename(final)
            for old in complete(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        self.ranks.gather(None)
        return final

    def write(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
        state = {"model": weights, "optimizer": moments, f"rng_{self.ranks.rank}_of_{self.ranks.size}": rng_state()}
        with _quiet_when_alone():
            dcp.save(state, checkpoint_id=folder)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the state of `path` into model, optimizer and random generators.

        With another number of ranks than the checkpoint's, the generators keep their state: only dropout would
        notice.
        """
        weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        rng_key = f"rng_{self.ranks.rank}_of_{self.ranks.size}"
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        same_ranks = any(key.startswith(f"{rng_key}.") for key in saved)
        if same_ranks:
            state[rng_key] = rng_state()
        with _quiet_when_alone():
            dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )
        if same_ranks:
            set_rng_state(state[rng_key])


@contextlib.contextmanager
def _quiet_when_alone() -> Iterator[None]:
    """Without the warning that a single process is assumed where there is no process group: there is just one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def check_resumable(config: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Refuse to continue a run under settings that would make it another run. Raises ConfigError."""
    now, before = dotted(config), dotted(earlier)
    for key in sorted(now.keys() | before.keys()):
        if key.startswith(_PINNED) and key not in _FREE and now.get(key) != before.get(key):
            raise ConfigError(key, f"the run to resume has {before.get(key)!r}, not {now.get(key)!r}")


def dotted(mapping: dict[str, Any], where: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            flat |= dotted(value, f"{where}{key}.")
        else:
            flat[where + key] = value
    return flat


def rng_state() -> dict[str, Any]:
    """The state of the random generators that a model may use; the data needs none (`TrainingBatches`)."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and isinstance(state["cuda"], Tensor):
        torch.cuda.set_rng_state(state["cuda"])
