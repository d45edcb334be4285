"""A small language model whose norm and head are a module of their own, for wrappers that group them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

H, WIDE = 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up, self.down = nn.Linear(H, WIDE, bias=False), nn.Linear(WIDE, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tail(nn.Module):
    checkpointed = False

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(H), head

    def forward(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.head, self.norm(x), *arguments, **keywords, use_reentrant=False)
        return self.head(self.norm(x), *arguments, **keywords)


class Model(nn.Module):
    """Embedding, two blocks without mixing of tokens, and a tail of norm and head."""

    def __init__(self, vocab_size: int, head: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, H)
        self.blocks = nn.Sequential(Block(), Block())
        self.tail = Tail(head)

    def forward(self, ids: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return self.tail(self.blocks(self.embed(ids)), *arguments, **keywords)
