"""Vocabulary-sharded fused linear cross entropy for PyTorch."""

from .api import LossOutput, count_valid_tokens, linear_cross_entropy
from .options import LossOptions
from .shard import VocabShard

__all__ = [
    "LossOptions",
    "LossOutput",
    "VocabShard",
    "count_valid_tokens",
    "linear_cross_entropy",
]
