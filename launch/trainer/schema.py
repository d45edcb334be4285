"""The training configuration: one frozen dataclass per section, with the bounds of each key.

`launch/trainer/config.py` fills these from YAML and the command line; `docs/training.md` explains every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting that cannot be used. The message starts with the dotted key."""

    def __init__(self, key: str, problem: str):
        super().__init__(f"{key}: {problem}")
        self.key = key


def number(default: Any, *, least: float | None = None, above: float | None = None, most: float | None = None) -> Any:
    """A field with bounds: `least <= value`, `above < value`, `value <= most`."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


@dataclass(frozen=True)
class LlamaShape:
    """A randomly initialised Llama; names and meaning as in `transformers.LlamaConfig`."""

    hidden_size: int = number(256, least=1)
    intermediate_size: int = number(704, least=1)
    num_hidden_layers: int = number(4, least=1)
    num_attention_heads: int = number(4, least=1)
    num_key_value_heads: int | None = number(None, least=1)
    max_position_embeddings: int = number(2048, least=1)
    rms_norm_eps: float = number(1e-5, above=0)
    rope_theta: float = number(10000.0, above=0)
    initializer_range: float = number(0.02, above=0)
    attention_dropout: float = number(0.0, least=0, most=0.99)
    tie_word_embeddings: bool = False

    def check(self, where: str) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"{where}.num_attention_heads",
                f"{self.num_attention_heads} does not divide hidden_size {self.hidden_size}",
            )
        if self.hidden_size // self.num_attention_heads % 2:
            raise ConfigError(
                f"{where}.hidden_size", "hidden_size / num_attention_heads must be even (rotary embedding)"
            )
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{where}.num_key_value_heads",
                f"{self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}",
            )


@dataclass(frozen=True)
class ModelConfig:
    config: LlamaShape | None = None
    path: str | None = None
    vocab_size: int | None = number(None, least=1)

    def check(self, where: str) -> None:
        if self.config is not None and self.path is not None:
            raise ConfigError(f"{where}.path", f"excludes {where}.config; set one of them to null")
        if self.config is None and self.path is None:
            raise ConfigError(where, "give config (a random start) or path (a local checkpoint directory)")
        if self.path is not None and self.vocab_size is not None:
            raise ConfigError(f"{where}.vocab_size", "a checkpoint brings its own vocabulary; set it to null")


@dataclass(frozen=True)
class DataConfig:
    paths: tuple[str, ...] = ()
    eval_paths: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
    text_field: str = "text"
    messages_field: str | None = None
    document_separator: str | None = None
    max_bytes: int | None = number(None, least=1)
    holdout: float = number(0.05, least=0, most=0.5)
    sequence_length: int = number(256, least=1)
    cache_dir: str = ".cache/flce_dist"


@dataclass(frozen=True)
class TokenizerConfig:
    path: str | None = None
    chat_template: str | None = None
    vocab_size: int = number(8192, least=257)  # 256 bytes and the end-of-text token


@dataclass(frozen=True)
class TrainConfig:
    steps: int = number(100, least=1)
    batch_size: int = number(8, least=1)
    accumulation: int = number(1, least=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    log_every: int = number(10, least=1)
    eval_every: int = number(0, least=0)
    eval_sequences: int = number(32, least=1)


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = number(3e-4, above=0)
    min_lr_ratio: float = number(0.1, least=0, most=1)
    warmup_steps: int = number(10, least=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = number(1e-8, above=0)
    weight_decay: float = number(0.1, least=0)
    max_grad_norm: float | None = number(1.0, above=0)

    def check(self, where: str) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"{where}.betas", f"each must be in [0, 1), got {list(self.betas)}")


@dataclass(frozen=True)
class ParallelConfig:
    mode: str = "tensor"
    tensor_size: int | None = number(None, least=1)
    head: Literal["gathered", "sharded"] | None = None
    deepspeed: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = number(0, least=0)
    keep: int = number(2, least=1)
    resume: bool = False


@dataclass(frozen=True)
class OutputConfig:
    dir: str = "runs/train"
    overwrite: bool = False
    tensorboard: bool = True
    plot: bool = True
    export: bool = True


@dataclass(frozen=True)
class Config:
    model: ModelConfig
    seed: int = number(0, least=0, most=2**62)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # "torch", or a mapping {type: flce, ...} whose other keys are the fields of flce_dist.LossOptions.
    loss: Literal["torch"] | Mapping[str, Any] = field(default_factory=lambda: {"type": "flce"})
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def check(self, where: str) -> None:
        shape = self.model.config
        if shape is not None and self.data.sequence_length > shape.max_position_embeddings:
            raise ConfigError(
                "data.sequence_length",
                f"{self.data.sequence_length} is longer than model.config.max_position_embeddings "
                f"{shape.max_position_embeddings}",
            )
