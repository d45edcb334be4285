"""Hugging Face `transformers`: causal LMs whose loss is computed in their head, without logits."""

from .fused import FusedLoss, UnsupportedForward
from .install import apply
from .trainer import apply_to_trainer

__all__ = ["FusedLoss", "UnsupportedForward", "apply", "apply_to_trainer"]
