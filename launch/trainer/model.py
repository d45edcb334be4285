"""The language model: a causal LM of transformers whose head computes the loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.loss.loss_utils import ForCausalLMLoss

from flce_dist import LossOptions, VocabParallelHead, VocabShard
from flce_dist.attach import arguments_of
from flce_dist.backend import row_kernels
from flce_dist.checks import check_dtypes
from flce_dist.integrations.transformers import apply
from flce_dist.options import DTYPES
from flce_dist.plan import rows_of_call

from .config import loss_options
from .schema import Config, ConfigError
from .tokens import TokenFiles


class LanguageModel(nn.Module):
    """A causal language model that is called with the targets of its tokens, and the loss it returns."""

    def __init__(self, causal_lm: transformers.PreTrainedModel, autocast: torch.dtype | None = None):
        super().__init__()
        self.causal_lm = causal_lm
        self.autocast = autocast

    def forward(self, input_ids: Tensor, targets: Tensor, normalizer: Tensor | float) -> Tensor:
        """The summed loss of `targets` [B, T] (next tokens of `input_ids` [B, T]) over `normalizer`; 0-d fp32."""
        with torch.autocast(input_ids.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return self.causal_lm(
                input_ids=input_ids,
                labels=targets,
                shift_labels=targets,  # they are the next tokens already
                num_items_in_batch=normalizer,
                use_cache=False,
            ).loss

    @property
    def head(self) -> nn.Module:
        return self.causal_lm.get_output_embeddings()


def build_model(config: Config, tokens: TokenFiles, device: torch.device) -> LanguageModel:
    """The model on `device`. Equal on all ranks for one seed.

    Raises:
        ConfigError: a checkpoint that cannot be read, or a vocabulary that does not hold the data's ids.
    """
    torch.manual_seed(config.seed)
    if config.model.path is not None:
        causal_lm, vocab_key = _load(config.model.path), "model.path"
    else:
        causal_lm, vocab_key = _random(config, tokens), "model.vocab_size"
    vocab_size = causal_lm.get_output_embeddings().weight.shape[0]
    if tokens.largest_id >= vocab_size:
        raise ConfigError(vocab_key, f"a vocabulary of {vocab_size} does not hold the data's id {tokens.largest_id}")
    positions = getattr(causal_lm.config, "max_position_embeddings", None)
    if positions is not None and config.data.sequence_length > positions:
        raise ConfigError(
            "data.sequence_length", f"{config.data.sequence_length} is longer than the model's {positions} positions"
        )
    dtype = None if config.train.dtype == "float32" else DTYPES[config.train.dtype]
    return LanguageModel(causal_lm.to(device), dtype)


def give_loss(
    config: Config, model: LanguageModel, group: dist.ProcessGroup | DeviceMesh | None, device: torch.device
) -> None:
    """What the `loss` section says. `loss: torch` is what the model computes by itself, from all logits.

    Args:
        group: ranks that share the vocabulary, if any.

    Raises:
        ConfigError: the loss cannot be computed for this model, or on this device.
    """
    if not isinstance(config.loss, Mapping):
        model.causal_lm.loss_function = _loss_of_logits
        return
    options = loss_options(config.loss)
    _check_loss(options, DTYPES[config.train.dtype], device)
    if config.parallel.mode == "deepspeed":  # its engine gives the loss, once it has placed the head
        return
    # Only what the user wrote: a default given by name would override what the model's own config asks for.
    given = {name: getattr(options, name) for name in config.loss if name != "type"}
    try:
        apply(model.causal_lm, group, **given)
    except (TypeError, ValueError, NotImplementedError) as error:
        tied = config.model.config is not None and config.model.config.tie_word_embeddings
        key = "model.path" if config.model.path else "model.config.tie_word_embeddings" if tied else "loss"
        raise ConfigError(key, str(error)) from error


def _loss_of_logits(logits: Tensor, labels: Tensor, vocab_size: int, **keywords: Any) -> Tensor:
    """The model's own loss, but 0 for a batch without any valid target, as the fused one."""
    count = torch.as_tensor(keywords.pop("num_items_in_batch"))
    return ForCausalLMLoss(logits, labels, vocab_size, torch.where(count == 0, 1, count), **keywords)


def _check_loss(options: LossOptions, dtype: torch.dtype, device: torch.device) -> None:
    """What the loss would refuse in the first step, for the dtype and device of this run. Raises ConfigError."""
    try:
        row_kernels(options.backend, device)
    except ValueError as error:
        raise ConfigError("loss.backend", str(error)) from error
    try:
        check_dtypes(options, dtype)
    except ValueError as error:
        name, problem = str(error).split(" ", 1)
        raise ConfigError(f"loss.{name}", problem) from error


def _random(config: Config, tokens: TokenFiles) -> transformers.PreTrainedModel:
    shape = config.model.config
    assert shape is not None
    fields: dict[str, Any] = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    vocab_size = config.model.vocab_size or tokens.vocab_size
    llama = transformers.LlamaConfig(
        **fields,
        rope_parameters=rope,
        vocab_size=vocab_size,
        bos_token_id=tokens.separator,
        eos_token_id=tokens.separator,
    )
    return transformers.LlamaForCausalLM(llama)


def _load(path: str) -> transformers.PreTrainedModel:
    if not Path(path).is_dir():
        raise ConfigError("model.path", f"no such folder: {path}")
    try:
        # fp32 parameters whatever the checkpoint's dtype: the optimizer's small steps would be lost in 16 bits.
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # a broken file surfaces as whatever its reader makes of it
        raise ConfigError("model.path", f"{path} holds no causal language model: {error}") from error
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ConfigError(
            "model.path",
            f"{path} lacks {len(missing)} of the weights that its config.json asks for, which would start at random: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}",
        )
    kinds = {parameter.kind for parameter in inspect.signature(type(model).forward).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError("model.path", f"{type(model).__name__} takes no targets that are shifted already")
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            "model.path",
            f"{path}: the loss of the experts' router (output_router_logits) would be added once a micro-step, however "
            "many there are; set it to false in config.json",
        )
    return model


def logits_facts(config: Config, model: LanguageModel, tokens: int) -> dict[str, int]:
    """For the summary: the sizes of the full logits of `tokens` tokens, and of the fused loss's buffer."""
    head: Any = model.head
    facts = {"tokens": tokens, "vocab_size": model.causal_lm.config.get_text_config().vocab_size}
    if config.loss == "torch":
        return facts
    if isinstance(head, VocabParallelHead):
        group, layout, options = head.group, head.hidden_layout, head.options
    else:  # an nn.Linear, or DeepSpeed's
        arguments = arguments_of(head)
        group, layout = arguments["group"], arguments["hidden_layout"]
        options = LossOptions(**{name: arguments[name] for name in LossOptions.__annotations__ if name in arguments})
    if options.skip_ignored:
        return facts | {"skip_ignored": 1}  # how many tokens are cut into chunks differs from batch to batch
    weight_dtype = DTYPES[config.train.dtype] if head.weight.dtype == torch.float32 else head.weight.dtype
    ranks = dist.get_world_size(group) if group is not None else 1
    columns = VocabShard.even(facts["vocab_size"], 0, ranks).num_columns
    sharded = layout == "sharded"
    loop_tokens = tokens * ranks if sharded else tokens
    hidden_size = model.causal_lm.config.get_text_config().hidden_size  # under ZeRO-3 the weight has no shape
    rows = rows_of_call(
        options, loop_tokens, hidden_size, columns, weight_dtype, ranks, sharded, head.weight.requires_grad
    )
    itemsize = (options.logits_dtype or weight_dtype).itemsize
    return facts | {"loop_tokens": loop_tokens, "chunk_rows": rows, "columns": columns, "itemsize": itemsize}
