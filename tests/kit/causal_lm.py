"""Tiny causal LMs of transformers, and their loss and gradients."""

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

VOCAB = 101
TEXT = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(TEXT % 7 == 0, -100, TEXT)


def tiny(kind: str = "Llama", **config: Any) -> Any:
    """A model with the same random weights for the same arguments."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **config,
    }
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


_make_mesh = functools.cache(torch.distributed.init_device_mesh)


def load_sharded(folder: str, sizes: dict[str, int]) -> Any:
    """A saved model as transformers itself shards it, over `tp_size`, `fsdp_size` or both, of all ranks."""
    from transformers.distributed import DistributedConfig

    config, plain = DistributedConfig(**sizes), torch.distributed.init_device_mesh
    torch.distributed.init_device_mesh = _make_mesh  # its groups stay for the session: once for each size
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)
    finally:
        torch.distributed.init_device_mesh = plain


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_and_grads(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one forward and the gradients of all parameters that have one, by name."""
    model.zero_grad()
    loss = model(**{"input_ids": TEXT, "labels": LABELS, **inputs}).loss
    loss.backward()
    grads = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def assert_same(result: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Loss and all gradients equal to 1e-5 (relative; gradients by their norm)."""
    torch.testing.assert_close(result[0].float(), expected[0].float(), rtol=1e-5, atol=1e-6)
    assert list(result[1]) == list(expected[1])
    for name, grad in expected[1].items():
        error = torch.linalg.vector_norm(result[1][name] - grad)
        assert error <= 1e-5 * torch.linalg.vector_norm(grad) + 1e-7, f"{name}: {error:.2e} of {grad.norm():.2e}"
