"""The trained model as a folder that `transformers` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch.distributed.tensor import DTensor

from .model import LanguageModel
from .parallel import Ranks


@torch.no_grad()
def save_pretrained(model: LanguageModel, tokenizer_folder: Path, folder: Path, ranks: Ranks) -> Path:
    """Write safetensors, config and tokenizer for `AutoModelForCausalLM.from_pretrained(folder)`.

    Called by all ranks: a sharded weight is gathered from all of them (one all-gather each) and written by rank 0.
    """
    state = {}
    for name, tensor in model.causal_lm.state_dict().items():
        # A copy: with uneven shards the whole is a view of a larger buffer, which safetensors refuses to write.
        whole = tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor
        if ranks.is_main:
            state[name] = whole.cpu()
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
