"""Hugging Face `transformers`: the output embedding of a causal LM replaced by a vocabulary-sharded head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ... import collectives
from ...head import VocabParallelHead
from ...options import LossOptionsDict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRANSFORMS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "logits_soft_cap")
"""Config fields with which some models change the logits after the head; this function does not know their meaning."""


def replace_head(
    model: PreTrainedModel, group: dist.ProcessGroup | DeviceMesh | None = None, **options: Unpack[LossOptionsDict]
) -> VocabParallelHead:
    """Replaces the output embedding of a causal LM by a `VocabParallelHead`, and returns it.

    The loss is then `model.lm_head(hidden, target)` with the body's last hidden states and targets that are shifted by
    the caller. The model's own loss on logits is switched off when the vocabulary is sharded: a rank has its shard's
    logits only. `final_logit_softcapping` of the config becomes the option `softcap`, unless that is given.

    Args:
        model: with the same parameters on all ranks of `group`.
        group: ranks that share the vocabulary, as a process group or a 1-D device mesh; None: not sharded.
        options: the fields of `LossOptions`.

    Raises:
        TypeError: the output embedding is no plain `nn.Linear`.
        ValueError: it is tied to the input embedding and `group` has more than one rank, or the model changes the
            logits after the head in a way that is not known here.
    """
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"{type(model).__name__} has no linear output embedding, but {type(linear).__name__}")
    sharded = collectives.world_size(group.get_group() if isinstance(group, DeviceMesh) else group) > 1
    if sharded and linear.weight is getattr(model.get_input_embeddings(), "weight", None):
        raise ValueError(
            "the model ties its output to its input embedding: a sharded head cannot share the full embedding; set "
            "tie_word_embeddings to false, or do not shard the head"
        )
    config = model.config.get_text_config()
    for name in _TRANSFORMS:
        if getattr(config, name, None) not in (None, 1, 1.0) and "logit_scale" not in options:
            raise ValueError(
                f"{type(model).__name__} changes the logits after the head ({name}={getattr(config, name)}): pass "
                "logit_scale (or softcap and logit_scale) with the factor that it amounts to"
            )
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        options.setdefault("softcap", softcap)
    head = VocabParallelHead.from_linear(linear, group, **options)
    head.raw_logits = True  # the model caps and scales them itself
    model.set_output_embeddings(head)
    if sharded:
        model.loss_function = _no_loss_on_logits
    return head


def _no_loss_on_logits(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "the head of this model is sharded over the vocabulary, and its logits are this rank's only: compute the loss "
        "as model.lm_head(hidden, target)"
    )
