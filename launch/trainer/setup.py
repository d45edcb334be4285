"""Everything that can be refused, before the first step and on all ranks at once."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from .checkpoint import check_resumable, complete, dotted, step_of
from .config import load_config, to_mapping
from .model import LanguageModel, build_model, give_loss
from .modes import make_mode
from .parallel import ParallelMode, Ranks, SetupError, pick_device
from .report import METRICS
from .schema import Config, ConfigError
from .tokens import TokenFiles, open_tokens, prepare_tokens

CONFIG, CHECKPOINTS, TENSORBOARD, EXPORT, PLOT = "config.yaml", "checkpoints", "tensorboard", "model", "loss.png"
TOKENS = "tokens.json"


@dataclass(frozen=True)
class Setup:
    """What a run starts from."""

    config: Config
    device: torch.device
    mode: ParallelMode
    tokens: TokenFiles
    model: LanguageModel
    resume_from: Path | None

    @property
    def output(self) -> Path:
        return Path(self.config.output.dir)


def prepare(config_path: str, overrides: Sequence[str], ranks: Ranks) -> Setup:
    """Read, check and build everything. Raises SetupError, with the same message on all ranks."""
    with ranks.agree():
        config = load_config(config_path, overrides)
        device = pick_device(config, ranks)
        mode = make_mode(config, ranks)
    ranks.same_everywhere("the configuration", dotted(to_mapping(config)))
    mode.connect(device)

    resume_from, folder = None, None
    with ranks.agree():
        if ranks.is_main:
            resume_from = _earlier_run(config)
        if ranks.local_rank == 0:
            folder = prepare_tokens(config)
    resume_from = ranks.gather(resume_from)[0]
    folders = {path for path in ranks.gather(folder) if path is not None}
    if len(folders) > 1:
        raise SetupError(f"data.paths: the machines do not read the same text: {sorted(map(str, folders))}")

    with ranks.agree():
        if resume_from is not None:
            mode.check_resumable(resume_from)
        tokens = open_tokens(folders.pop(), config)
        model = build_model(config, tokens, device)
        mode.place_head(model)
        give_loss(config, model, mode.head_group, device)
    with ranks.agree():
        if ranks.is_main:
            if resume_from is not None:
                _check_tokens(Path(config.output.dir), tokens)
            _make_output(config, tokens, fresh=resume_from is None)
    return Setup(config, device, mode, tokens, model, resume_from)


def _earlier_run(config: Config) -> Path | None:
    """The checkpoint to resume from, if any. Raises ConfigError when an earlier run, or what is no run of ours, would
    be lost or changed."""
    if not config.output.dir.strip():
        raise ConfigError("output.dir", "expects the name of a folder of its own, got an empty one")
    output, resume = Path(config.output.dir), config.checkpoint.resume
    checkpoints = complete(output / CHECKPOINTS)
    if resume and checkpoints:
        check_resumable(to_mapping(config), _earlier_config(output))
        done = step_of(checkpoints[-1])
        if done > config.train.steps:
            raise ConfigError("train.steps", f"{config.train.steps}, but the run to resume has done {done}")
        return checkpoints[-1]
    written = [name for name in (CHECKPOINTS, TENSORBOARD, EXPORT, PLOT, METRICS) if (output / name).exists()]
    if written and not (output / METRICS).is_file():
        raise ConfigError(
            "output.dir", f"{output} holds {', '.join(written)}, but no run of this trainer: name another"
        )
    if not written or config.output.overwrite:
        return None
    if resume and EXPORT not in written and PLOT not in written:
        # Nothing was saved yet: what is there is the start of this same run.
        check_resumable(to_mapping(config), _earlier_config(output))
        return None
    found, way_out = "an earlier run", "continue it (checkpoint.resume=true), "
    if resume:
        found, way_out = "a finished run without checkpoints", ""
    raise ConfigError(
        "output.dir", f"{output} holds {found}; {way_out}replace it (output.overwrite=true) or name another folder"
    )


def _earlier_config(output: Path) -> dict[str, Any]:
    try:
        earlier = yaml.safe_load((output / CONFIG).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            "checkpoint.resume", f"the earlier run's {output / CONFIG} cannot be read: {error}"
        ) from error
    if not isinstance(earlier, dict):
        raise ConfigError("checkpoint.resume", f"the earlier run's {output / CONFIG} holds no mapping")
    return earlier


def _check_tokens(output: Path, tokens: TokenFiles) -> None:
    """Raises ConfigError: the run to resume was trained on others, although its settings are the same."""
    try:
        earlier = json.loads((output / TOKENS).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            "checkpoint.resume", f"the earlier run's {output / TOKENS} cannot be read: {error}"
        ) from error
    if earlier != _fingerprint(tokens):
        raise ConfigError(
            "data.paths", "the training tokens are not those of the run to resume: its text or tokenizer has changed"
        )


def _fingerprint(tokens: TokenFiles) -> dict[str, int]:
    return {"tokens": len(tokens.train), "crc32": zlib.crc32(tokens.train.data)}


def _make_output(config: Config, tokens: TokenFiles, fresh: bool) -> None:
    output = Path(config.output.dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if fresh:
            for name in (CHECKPOINTS, TENSORBOARD, EXPORT):
                shutil.rmtree(output / name, ignore_errors=True)
            for name in (METRICS, PLOT):
                (output / name).unlink(missing_ok=True)
            (output / TOKENS).write_text(json.dumps(_fingerprint(tokens)) + "\n")
        # Renamed into place: a kill in the middle leaves no half of it.
        partial = output / f"{CONFIG}.partial"
        partial.write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))
        partial.replace(output / CONFIG)
        if fresh:
            (output / METRICS).touch()
    except OSError as error:
        raise ConfigError("output.dir", f"cannot write to {output}: {error}") from error
