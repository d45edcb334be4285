"""Hugging Face `transformers`: causal LMs whose loss is computed in their head, without logits."""

from .fused import FusedLoss
from .install import apply
from .replace import replace_head

__all__ = ["FusedLoss", "apply", "replace_head"]
