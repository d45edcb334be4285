"""Vocabulary-sharded fused linear cross entropy for PyTorch."""

from . import versions  # noqa: F401, it refuses a torch that the others cannot be imported with
from .api import count_valid_tokens, linear_cross_entropy
from .head import LinearCrossEntropyLoss, VocabParallelHead
from .options import LossOptions
from .outputs import LossOutput
from .shard import VocabShard

__all__ = [
    "LinearCrossEntropyLoss",
    "LossOptions",
    "LossOutput",
    "VocabParallelHead",
    "VocabShard",
    "count_valid_tokens",
    "linear_cross_entropy",
]
