"""Trainers that make the engine themselves: accelerate's `Accelerator`, and through it transformers' `Trainer`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from ...options import LossOptionsDict
from .engine import initialize
from .heads import shard_head_by_section
from .section import section_or_warning, tensor_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer


def attach_to_accelerator(accelerator: Accelerator) -> None:
    """Engines that `accelerator.prepare` makes have the loss that the configuration of its `DeepSpeedPlugin` describes.
    Call it before `prepare`. Without a section there is a warning.

    With `"vocab_parallel": "data"` and a model built under `deepspeed.zero.Init` also call
    `shard_head_by_section(model, config)` before the optimizer is made.

    Raises:
        TypeError, ValueError: the accelerator has no DeepSpeed plugin, or the section is wrong. `prepare` raises as
            `initialize` does.
    """
    if section_or_warning(_config_of(accelerator)) is None:
        return
    prepare = accelerator.prepare

    @wraps(prepare)
    def with_loss(*args: Any, **kwargs: Any) -> Any:
        with _in_place_of_deepspeeds():
            return prepare(*args, **kwargs)

    accelerator.prepare = with_loss


def attach_to_trainer(trainer: Trainer) -> None:
    """The engine that `trainer.train()` makes has the loss that the section in `TrainingArguments(deepspeed=...)`
    describes. Call it before `train`, on all ranks. Without a section there is a warning.

    TRL's `SFTTrainer` has a fused loss of its own in the model before there is an engine; it gets this one at once.

    Raises:
        TypeError, ValueError: as `attach_to_accelerator`; or a setting of the trainer needs logits, as
            `apply_to_trainer` of the transformers integration says.
    """
    from ..transformers.trainer import apply_checked, check_settings, count_exactly, has_own_loss

    config = _config_of(trainer.accelerator)
    section = section_or_warning(config)
    if section is None:
        return
    if has_own_loss(trainer):
        if section.vocab_parallel not in (None, "none") or tensor_ranks(config) > 1:
            raise ValueError(
                f"{section.where}.vocab_parallel: a {type(trainer).__name__} computes its loss from a whole head; only "
                '"none" without tensor parallelism is possible'
            )
        if section.head is not None:
            raise ValueError(
                f"{section.where}.head: a {type(trainer).__name__} uses the model's output embeddings: leave it out"
            )
        apply_checked(trainer, (), False, cast(LossOptionsDict, section.options))
        return
    check_settings(trainer, shared_head=section.vocab_parallel == "data")
    if section.vocab_parallel == "data":
        shard_head_by_section(trainer.model, config)  # now, because train() makes the optimizer before the engine
    attach_to_accelerator(trainer.accelerator)
    count_exactly(trainer)


def _config_of(accelerator: Any) -> Any:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        raise TypeError(
            f"this {type(accelerator).__name__} has no DeepSpeed plugin: give TrainingArguments(deepspeed=...), or "
            "Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=...))"
        )
    return plugin.deepspeed_config


@contextlib.contextmanager
def _in_place_of_deepspeeds() -> Iterator[None]:
    """`deepspeed.initialize` is this package's `initialize`, for the code that is called inside."""
    import deepspeed

    plain = deepspeed.initialize

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        deepspeed.initialize = plain
        return initialize(*args, **kwargs)

    deepspeed.initialize = stand_in
    try:
        yield
    finally:
        deepspeed.initialize = plain
