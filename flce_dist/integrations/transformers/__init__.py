"""Hugging Face `transformers`: causal LMs whose loss is computed in their head, without logits."""

from .fused import FusedLoss
from .install import apply
from .trainer import apply_to_trainer
from .verify import UnsupportedForward

__all__ = ["FusedLoss", "UnsupportedForward", "apply", "apply_to_trainer"]
