"""Everything that can be refused, before the first step and on all ranks at once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from .checkpoint import check_resumable, complete
from .config import load_config, to_mapping
from .model import LanguageModel, build_model
from .parallel import ParallelMode, Ranks, SetupError, make_mode, pick_device
from .report import METRICS
from .schema import Config, ConfigError
from .tokens import TokenFiles, open_tokens, prepare_tokens

CONFIG, CHECKPOINTS, TENSORBOARD, EXPORT, PLOT = "config.yaml", "checkpoints", "tensorboard", "model", "loss.png"


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
    ranks.same_everywhere("the configuration", to_mapping(config))

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
        tokens = open_tokens(folders.pop(), config)
        model = build_model(config, tokens, mode.head_group, device)
    with ranks.agree():
        if ranks.is_main:
            _make_output(config, fresh=resume_from is None)
    return Setup(config, device, mode, tokens, model, resume_from)


def _earlier_run(config: Config) -> Path | None:
    """The checkpoint to resume from, if any. Raises ConfigError when an earlier run would be lost or changed."""
    output = Path(config.output.dir)
    checkpoints = complete(output / CHECKPOINTS)
    if config.checkpoint.resume and checkpoints:
        check_resumable(to_mapping(config), yaml.safe_load((output / CONFIG).read_text()))
        return checkpoints[-1]
    # Asked to resume, but nothing was saved yet: what is there is the start of this same run.
    if (output / METRICS).is_file() and not (config.output.overwrite or config.checkpoint.resume):
        raise ConfigError(
            "output.dir",
            f"{output} holds an earlier run; continue it (checkpoint.resume=true), replace it (output.overwrite=true) "
            "or name another folder",
        )
    return None


def _make_output(config: Config, fresh: bool) -> None:
    output = Path(config.output.dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if fresh:
            for name in (CHECKPOINTS, TENSORBOARD, EXPORT):
                shutil.rmtree(output / name, ignore_errors=True)
            for name in (METRICS, PLOT):
                (output / name).unlink(missing_ok=True)
        (output / CONFIG).write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))
    except OSError as error:
        raise ConfigError("output.dir", f"cannot write to {output}: {error}") from error
