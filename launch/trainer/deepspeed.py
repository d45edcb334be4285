"""Training through a DeepSpeed engine: `--deepspeed FILE`, with FILE in the place of what it describes.

What the file says of precision, clipping, the optimizer and the loss counts; what it leaves out comes from the YAML
configuration. The model is called with its labels, as any model of transformers is; the section "flce_dist" of the
file, or the YAML's `loss`, puts the loss into its head.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flce_dist.integrations.deepspeed.section import ALIAS, SECTION, load_config, read_section, tensor_ranks

from .checkpoint import Checkpoints, rng_state, set_rng_state
from .model import LanguageModel
from .optim import make_optimizer
from .parallel import DataParallel, Ranks
from .schema import Config, ConfigError

LAYOUT = "layout.json"  # in a checkpoint's folder: what DeepSpeed cannot change when it loads one
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_file(path: str) -> dict[str, Any]:
    """The DeepSpeed configuration of a file, its section checked. Raises ConfigError."""
    try:
        values = dict(load_config(path))
        section = read_section(values)
        tensor_ranks(values)
    except ImportError as error:
        raise ConfigError("parallel.deepspeed", f"{error}; pip install deepspeed") from error
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError("parallel.deepspeed", f"{path}: {error}") from error
    if ALIAS in values and (section is None or section.where != ALIAS):
        problem = f'{ALIAS}: expected {{"type": "{SECTION}", ...}}, got {values[ALIAS]!r}, which nothing would read'
        raise ConfigError("parallel.deepspeed", f"{path}: {problem}")
    return values


def complete_values(values: dict[str, Any], config: Config, data_ranks: int) -> None:
    """Adds what the file leaves out, from the trainer's configuration. Raises ConfigError where the two disagree."""
    for key in ("optimizer", "scheduler"):
        if key in values:
            raise refused(config, f"{key}: the trainer has it in its own configuration (optimizer.*); leave it out")
    zero = values.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage", 0) == 0:
        raise refused(config, "zero_optimization.stage: 1, 2 or 3; what stage 0 does is parallel.mode data")
    if zero.get("compute_grad_norm") is False:
        raise refused(config, "zero_optimization.compute_grad_norm: the trainer reports the norm; leave it out")
    accumulation = config.train.accumulation
    batch = (config.train.batch_size, config.train.batch_size // accumulation // data_ranks, accumulation)
    for key, ours in zip(_BATCH, batch, strict=True):
        if values.get(key, ours) != ours:
            raise refused(config, f"{key}: {values[key]}, but {ours} by train.batch_size and train.accumulation")
    values |= dict(zip(_BATCH[1:], batch[1:], strict=True))  # the rest follows; AutoTP counts its ranks otherwise
    values.setdefault("gradient_clipping", config.optimizer.max_grad_norm or 0.0)
    values.setdefault("steps_per_print", 10**9)  # the trainer has its own log
    narrow = {key: values.get(key) or {} for key in ("bf16", "fp16", "torch_autocast")}
    for key, value in narrow.items():
        if not isinstance(value, Mapping):
            raise refused(config, f'{key}: expected an object such as {{"enabled": true}}, got {value!r}')
    if config.train.dtype == "bfloat16" and not any(value.get("enabled") for value in narrow.values()):
        values["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    give_section(values, config)


def give_section(values: dict[str, Any], config: Config) -> None:
    """The section in either spelling, with the options of the trainer's `loss` beside its own; none for `loss: torch`.

    Raises ConfigError for an option that both give, and what the trainer has to decide.
    """
    found = read_section(values)
    where = SECTION if found is None else found.where
    if not isinstance(config.loss, Mapping):
        values.pop(where, None)
        return
    given = dict(values.get(where, {}))
    if given.get("head") is not None:
        raise refused(
            config,
            f"{where}.head: the trainer's models have one head, and would not use a named one for the "
            "loss; leave it out",
        )
    if "ignore_index" in given:
        raise refused(config, f"{where}.ignore_index: the trainer counts by loss.ignore_index; set that one")
    for key in config.loss:
        if key != "type" and key in given:
            raise refused(
                config, f"{where}.{key}: loss.{key} of the trainer's configuration gives it too; leave one out"
            )
    values[where] = given | {key: value for key, value in config.loss.items() if key != "type"}


def refused(config: Config, problem: str) -> ConfigError:
    return ConfigError("parallel.deepspeed", f"{config.parallel.deepspeed}: {problem}")


class DeepSpeed(DataParallel):
    """Each rank has its own part of the batch, but for those that AutoTP makes tensor-parallel, which share one."""

    engine: Any = None

    def check(self) -> None:
        super().check()
        if self.config.parallel.device == "cpu" or not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
        assert self.config.parallel.deepspeed is not None
        self.values = read_file(self.config.parallel.deepspeed)
        self.tensor_ranks = tensor_ranks(self.values)
        if self.ranks.size % self.tensor_ranks:
            raise refused(
                self.config, f"tensor_parallel.autotp_size {self.tensor_ranks} does not divide {self.ranks.size} ranks"
            )
        complete_values(self.values, self.config, self.data_ranks)

    def connect(self, device: torch.device) -> None:
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel("WARNING")  # it would print its whole configuration
        # Of torch's old names of collectives, which DeepSpeed still uses: some lines a step.
        warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
        if device.type == "cpu":
            # No compiled all-reduce through shared memory: it takes most of a minute to build.
            deepspeed.ops.__compatible_ops__ = {}
        os.environ.setdefault("LOCAL_RANK", str(self.ranks.local_rank))
        if not dist.is_initialized():  # started by plain python
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    @property
    def data_rank(self) -> int:
        return self.ranks.rank // self.tensor_ranks

    @property
    def data_ranks(self) -> int:
        return self.ranks.size // self.tensor_ranks

    def wrap(self, model: nn.Module) -> nn.Module:
        """The engine in the place of the causal LM, called as that is."""
        from flce_dist.integrations.deepspeed import initialize

        assert isinstance(model, LanguageModel)
        causal_lm: Any = model.causal_lm
        optimizer = make_optimizer(causal_lm, self.config.optimizer)
        if self.config.loss == "torch":
            import deepspeed

            self.engine = deepspeed.initialize(model=causal_lm, optimizer=optimizer, config=self.values)[0]
        else:
            self.engine = initialize(model=causal_lm, optimizer=optimizer, config=self.values)[0]
        return LanguageModel(self.engine)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """What holds the learning rates: the engine's optimizer."""
        return self.engine.optimizer

    def backward(self, loss: Tensor) -> None:
        # The trainer's divisor is that of the whole step already, and the engine divides by the micro-steps. (Without a
        # loss of ours, some engines of 0.19.8 also do when told not to.) Each micro-step is announced to the engine,
        # which updates the parameters in the last.
        self.engine.backward(loss * self.config.train.accumulation)
        self.engine.step()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        """The norm of the gradients that the last `backward` applied."""
        return torch.as_tensor(float(self.engine.get_global_grad_norm()))

    def whole_state(self, model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        if self.engine.zero_optimization_partition_weights() or self.engine.autotp_size() > 1:
            # In the parameters' own dtype, whatever its name says; None but on rank 0.
            state = self.engine._consolidated_16bit_state_dict() or {}
        else:
            state = dict(super().whole_state(model))
        for name, tensor in state.items():
            yield name, tensor.clone()  # a parameter is a view of a larger buffer, which safetensors refuses to write

    @property
    def layout(self) -> dict[str, Any]:
        """How the engine splits the model, as far as a checkpoint depends on it."""
        section = read_section(self.values)
        return {
            "number of ranks": self.ranks.size,
            "zero_optimization.stage": "3" if int(self.values["zero_optimization"]["stage"]) == 3 else "1 or 2",
            "tensor_parallel.autotp_size": self.tensor_ranks,
            "vocab_parallel": "data" if section is not None and section.vocab_parallel == "data" else "other than data",
        }

    def check_resumable(self, path: Path) -> None:
        if not (path / LAYOUT).is_file():
            raise ConfigError(
                "checkpoint.resume", f"{path} was not written by parallel.mode deepspeed (it has no {LAYOUT})"
            )
        before = json.loads((path / LAYOUT).read_text())
        for key, now in self.layout.items():
            if before.get(key) != now:
                raise ConfigError("checkpoint.resume", f"{path} was written with {key} {before.get(key)}, not {now}")

    def make_checkpoints(self, folder: Path) -> Checkpoints:
        return EngineCheckpoints(folder, self.config.checkpoint.keep, self.ranks, self)


class EngineCheckpoints(Checkpoints):
    """DeepSpeed's checkpoints in the trainer's folders: whole or absent, and exact to resume by as many ranks."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks, mode: DeepSpeed):
        super().__init__(folder, keep, ranks)
        self.mode = mode

    def write(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.ranks.is_main:
            (folder / LAYOUT).write_text(json.dumps(self.mode.layout))
        self.mode.engine.save_checkpoint(str(folder), tag="engine")
        torch.save(rng_state(), self._rng(folder))

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.mode.engine.load_checkpoint(str(path))
        set_rng_state(torch.load(self._rng(path)))

    def _rng(self, folder: Path) -> Path:
        return folder / f"rng_{self.ranks.rank}_of_{self.ranks.size}.pt"
