"""The trained model as a folder that `transformers` loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from .model import LanguageModel
from .parallel import Ranks


@torch.no_grad()
def save_pretrained(
    model: LanguageModel, whole_state: Iterable[tuple[str, Tensor]], tokenizer_folder: Path, folder: Path, ranks: Ranks
) -> Path:
    """Write safetensors, config and tokenizer for `AutoModelForCausalLM.from_pretrained(folder)`.

    Called by all ranks, because sharded tensors are gathered while `whole_state` is read; rank 0 writes them.
    """
    state = {}
    for name, tensor in whole_state:
        if ranks.is_main:
            state[name] = tensor.cpu()
    if ranks.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tokenizer_folder, folder)
        model.causal_lm.config.architectures = [type(model.causal_lm).__name__]
        model.causal_lm.config.save_pretrained(folder)
        if model.causal_lm.generation_config is not None:
            model.causal_lm.generation_config.save_pretrained(folder)
        save_torch_state_dict(state, folder)
    ranks.gather(None)
    return folder
