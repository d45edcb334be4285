"""The language model: a transformers body and a head whose own forward returns the loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flce_dist import LossOptions, VocabParallelHead, VocabShard
from flce_dist.backend import row_kernels
from flce_dist.checks import check_accumulation
from flce_dist.integrations.transformers import replace_head
from flce_dist.plan import chunk_rows

from .config import loss_options
from .schema import Config, ConfigError
from .tokens import TokenFiles

_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FullLogitsHead(nn.Linear):
    """`loss: torch`: the head that makes all logits, for comparison; called as `VocabParallelHead` is."""

    ignore_index = -100

    @classmethod
    def replace(cls, model: transformers.PreTrainedModel) -> FullLogitsHead:
        """Put it in the place of the model's output embedding, with the very same parameters.

        Raises:
            ValueError: the model changes its logits after the head, which this head does not do.
        """
        changes = [name for name in _TRANSFORMS if getattr(model.config, name, None) not in (None, 1, 1.0)]
        if changes:
            raise ValueError(f"loss: torch has no {', '.join(changes)}, which this model applies to its logits")
        linear = model.get_output_embeddings()
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias = linear.weight, linear.bias
        model.set_output_embeddings(head)
        return head

    def forward(
        self, hidden: Tensor, target: Tensor | None = None, *, normalizer: Tensor | float | None = None
    ) -> Tensor:
        logits = F.linear(hidden, self.weight, self.bias)
        if target is None:
            return logits
        total = F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), reduction="sum")
        count = (target != self.ignore_index).sum() if normalizer is None else torch.as_tensor(normalizer)
        # A batch without any valid target has sum 0 and divisor 0: its loss is 0, as that of the sharded head.
        return total / torch.where(count == 0, 1, count)


class LanguageModel(nn.Module):
    """Hidden states of a causal language model's body, and the loss of its head on them.

    The loss is the tensor that the head module returned: under every wrapper (DDP, FSDP, ZeRO) the head's weight is
    then whole where it is used, and the wrapper sees its gradient.
    """

    def __init__(self, causal_lm: transformers.PreTrainedModel, autocast: torch.dtype | None = None):
        super().__init__()
        self.causal_lm = causal_lm
        self.autocast = autocast

    def forward(self, input_ids: Tensor, targets: Tensor, normalizer: Tensor | float) -> Tensor:
        """The summed loss of `targets` [B, T] (next tokens of `input_ids` [B, T]) over `normalizer`; 0-d fp32."""
        with torch.autocast(input_ids.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            hidden = self.causal_lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            return self.head(hidden, targets, normalizer=normalizer)

    @property
    def head(self) -> nn.Module:
        return self.causal_lm.get_output_embeddings()


def ignore_index(config: Config) -> int:
    """The target id that does not count."""
    return loss_options(config.loss).ignore_index if isinstance(config.loss, Mapping) else FullLogitsHead.ignore_index


def build_model(
    config: Config, tokens: TokenFiles, head_group: dist.ProcessGroup | DeviceMesh | None, device: torch.device
) -> LanguageModel:
    """The model on `device`, its head replaced as the `loss` section says. Equal on all ranks for one seed.

    Raises:
        ConfigError: a checkpoint that cannot be read, or a vocabulary that does not hold the data's ids.
    """
    torch.manual_seed(config.seed)
    if config.model.path is not None:
        causal_lm, vocab_key = _load(config.model.path), "model.path"
    else:
        causal_lm, vocab_key = _random(config, tokens), "model.vocab_size"
    vocab_size = causal_lm.get_output_embeddings().out_features
    if tokens.largest_id >= vocab_size:
        raise ConfigError(vocab_key, f"a vocabulary of {vocab_size} does not hold the data's id {tokens.largest_id}")
    positions = getattr(causal_lm.config, "max_position_embeddings", None)
    if positions is not None and config.data.sequence_length > positions:
        raise ConfigError(
            "data.sequence_length", f"{config.data.sequence_length} is longer than the model's {positions} positions"
        )
    if isinstance(config.loss, Mapping):
        _check_loss(loss_options(config.loss), DTYPES[config.train.dtype], device)
    causal_lm = causal_lm.to(device)
    if config.parallel.mode != "deepspeed":  # whose engine gives the head that it has a loss
        _replace_head(config, causal_lm, head_group)
    return LanguageModel(causal_lm, None if config.train.dtype == "float32" else DTYPES[config.train.dtype])


def _check_loss(options: LossOptions, dtype: torch.dtype, device: torch.device) -> None:
    """What the loss would refuse in the first step, for the dtype and device of this run. Raises ConfigError."""
    try:
        row_kernels(options.backend, device)
    except ValueError as error:
        raise ConfigError("loss.backend", str(error)) from error
    try:
        check_accumulation(options, dtype)
    except ValueError as error:
        name, problem = str(error).split(" ", 1)
        raise ConfigError(f"loss.{name}", problem) from error


def _random(config: Config, tokens: TokenFiles) -> transformers.PreTrainedModel:
    shape = config.model.config
    assert shape is not None
    fields: dict[str, Any] = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    vocab_size = config.model.vocab_size or tokens.vocab_size
    if tokens.largest_id >= vocab_size:
        raise ConfigError("model.vocab_size", f"{vocab_size} does not hold the data's largest id {tokens.largest_id}")
    separator = tokens.separator if tokens.separator < vocab_size else None
    llama = transformers.LlamaConfig(
        **fields,
        rope_parameters=rope,
        vocab_size=vocab_size,
        bos_token_id=separator,
        eos_token_id=separator,
    )
    return transformers.LlamaForCausalLM(llama)


def _load(path: str) -> transformers.PreTrainedModel:
    if not Path(path).is_dir():
        raise ConfigError("model.path", f"no such folder: {path}")
    try:
        # fp32 parameters whatever the checkpoint's dtype: the optimizer's small steps would be lost in 16 bits.
        return transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    except Exception as error:  # a broken file surfaces as whatever its reader makes of it
        raise ConfigError("model.path", f"{path} holds no causal language model: {error}") from error


def _replace_head(
    config: Config, causal_lm: transformers.PreTrainedModel, group: dist.ProcessGroup | DeviceMesh | None
) -> None:
    key = "loss"
    if config.model.path is not None:
        key = "model.path"
    elif config.model.config is not None and config.model.config.tie_word_embeddings:
        key = "model.config.tie_word_embeddings"
    try:
        if isinstance(config.loss, Mapping):
            # Only what the user wrote: a default given by name would override what the model's own config asks for.
            options = loss_options(config.loss)
            replace_head(causal_lm, group, **{name: getattr(options, name) for name in config.loss if name != "type"})
        else:
            FullLogitsHead.replace(causal_lm)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(key, str(error)) from error


def logits_facts(config: Config, model: LanguageModel, tokens: int) -> dict[str, int]:
    """For the summary: the sizes of the full logits of `tokens` tokens, and of the fused loss's buffer."""
    head: Any = model.head
    facts = {"tokens": tokens, "vocab_size": model.causal_lm.config.get_text_config().vocab_size}
    if config.loss == "torch":
        return facts
    if isinstance(head, VocabParallelHead):
        group, layout, options = head.group, head.hidden_layout, head.options
    else:  # DeepSpeed's
        arguments = head._flce_loss.arguments
        group, layout = arguments["group"], arguments["hidden_layout"]
        options = LossOptions(**{name: arguments[name] for name in LossOptions.__annotations__ if name in arguments})
    wide = head.weight.dtype == torch.float32
    dtype = options.logits_dtype or (DTYPES[config.train.dtype] if wide else head.weight.dtype)
    ranks = dist.get_world_size(group) if group is not None else 1
    columns = VocabShard.even(facts["vocab_size"], 0, ranks).num_columns
    loop_tokens = tokens * ranks if layout == "sharded" else tokens
    rows = chunk_rows(loop_tokens, columns, dtype.itemsize, options.budget_bytes, options.chunk_rows)
    return facts | {"loop_tokens": loop_tokens, "chunk_rows": rows, "columns": columns, "itemsize": dtype.itemsize}
