"""The parallel modes by name."""

from __future__ import annotations

from flce_dist.options import suggestion

from .deepspeed import DeepSpeed
from .fsdp import FullySharded, FullyShardedTensorParallel
from .parallel import DataParallel, ParallelMode, Ranks, TensorParallel
from .schema import Config, ConfigError

MODES: dict[str, type[ParallelMode]] = {
    "tensor": TensorParallel,
    "data": DataParallel,
    "fsdp": FullySharded,
    "fsdp+tensor": FullyShardedTensorParallel,
    "deepspeed": DeepSpeed,
}


def make_mode(config: Config, ranks: Ranks) -> ParallelMode:
    """The mode of `parallel.mode`, once the batch is known to divide. Raises ConfigError."""
    name = config.parallel.mode
    if name not in MODES:
        raise ConfigError("parallel.mode", f"unknown mode {name!r}; {suggestion(name, MODES)}")
    if (name == "deepspeed") != (config.parallel.deepspeed is not None):
        raise ConfigError("parallel.deepspeed", "a DeepSpeed configuration goes with parallel.mode deepspeed")
    mode = MODES[name](ranks, config)
    parts = mode.data_ranks * config.train.accumulation
    if config.train.batch_size % parts:
        raise ConfigError(
            "train.batch_size",
            f"{config.train.batch_size} sequences do not divide over {mode.data_ranks} data-parallel ranks x "
            f"{config.train.accumulation} accumulation steps (train.accumulation)",
        )
    return mode
