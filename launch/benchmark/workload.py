"""Named shapes and the inputs of a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import LossOptions, VocabShard

IGNORE_INDEX = LossOptions.ignore_index

COMMON_SHARE = 0.94
"""Length of the mean row of a trained head over the mean length of its rows (seen in a model of 130 M parameters)."""


@dataclass(frozen=True)
class Shape:
    """N tokens, H hidden, V entries of the global vocabulary."""

    name: str
    num_tokens: int
    hidden_size: int
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.name} (N {self.num_tokens} H {self.hidden_size} V {self.vocab_size})"

    def resized(self, num_tokens: int | None = None, vocab_size: int | None = None) -> Shape:
        tokens, vocab = num_tokens or self.num_tokens, vocab_size or self.vocab_size
        return Shape(f"{tokens},{self.hidden_size},{vocab}", tokens, self.hidden_size, vocab)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3-8k", 8192, 4096, 128256),
        Shape("llama3-16k", 16384, 4096, 131072),
        Shape("gemma2-8k", 8192, 2304, 256000),
        Shape("small", 4096, 2048, 32000),
        Shape("2k", 2048, 4096, 128256),
        Shape("gpt2", 8192, 768, 50257),
        Shape("decode", 128, 4096, 128256),
        Shape("cpu", 512, 128, 4096),
        Shape("cpu-wide", 256, 64, 16384),
        Shape("cpu-odd", 255, 64, 4099),
    )
}


def parse_shape(text: str) -> Shape:
    """A named shape, or `N,H,V`.

    Raises:
        ValueError: neither; the message lists the names.
    """
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split(",")
    if len(parts) == 3 and all(part.strip().isdigit() and int(part) > 0 for part in parts):
        return Shape(text, *(int(part) for part in parts))
    raise ValueError(f"shape {text!r} is neither one of {', '.join(SHAPES)} nor N,H,V")


class Place(NamedTuple):
    """Where a step runs: this process's device, and the group of the ranks that run it together; None for one."""

    device: torch.device
    group: dist.ProcessGroup | None


@dataclass
class Problem:
    """Inputs of one rank: `hidden [N, H]` and `target [N]` are the same on all ranks, `weight [L, H]` is its shard.

    `hidden` and `weight` are leaves that require grad. `group` is None for one rank.
    """

    shape: Shape
    hidden: Tensor
    weight: Tensor
    target: Tensor
    shard: VocabShard
    group: dist.ProcessGroup | None

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def place(self) -> Place:
        return Place(self.device, self.group)

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def make_inputs(
    shape: Shape, dtype: torch.dtype, device: torch.device, data: str, ignored: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`hidden [N, H]`, full `weight [V, H]` and `target [N]`, from a seed.

    Args:
        data: "random": logits of spread 1 without structure; "trained": see `trained_inputs`.
        ignored: share of the targets that are `IGNORE_INDEX`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    make = {"random": random_inputs, "trained": trained_inputs}[data]
    hidden, weight, target = make(shape, device, generator)
    if ignored:
        drop = torch.randperm(shape.num_tokens, generator=generator, device=device)[: round(ignored * shape.num_tokens)]
        target[drop] = IGNORE_INDEX
    return hidden.to(dtype), weight.to(dtype), target


def random_inputs(shape: Shape, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(shape.num_tokens, shape.hidden_size, device=device, generator=generator)
    weight = torch.randn(shape.vocab_size, shape.hidden_size, device=device, generator=generator)
    weight *= shape.hidden_size**-0.5
    target = torch.randint(shape.vocab_size, (shape.num_tokens,), device=device, generator=generator)
    return hidden, weight, target


def trained_inputs(
    shape: Shape, device: torch.device, generator: torch.Generator, loss: float = 2.3
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs like those of a trained model, whose cross entropy is about `loss`.

    Rows of the weight are a common vector plus a part of their own; hidden states lean to their target's own part, by
    an amount that differs from token to token, and have a component along the common vector, which shifts all logits
    of a row together. Random data has no such component, which multiplies any rounding error of a sum over the
    vocabulary. Targets are Zipf-distributed, as token ids are.
    """

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    common = randn(shape.hidden_size)
    common /= common.norm()
    own = randn(shape.vocab_size, shape.hidden_size)
    own -= (own @ common)[:, None] * common
    own -= own.mean(0)
    own_size = (1 / COMMON_SHARE**2 - 1) ** 0.5
    own *= own_size / own.norm(dim=1).mean()

    frequency = 1.0 / torch.arange(1, shape.vocab_size + 1, device=device)
    target = torch.multinomial(frequency, shape.num_tokens, replacement=True, generator=generator)
    lean = 0.5 + torch.rand(shape.num_tokens, 1, device=device, generator=generator)
    noise = randn(shape.num_tokens, shape.hidden_size)
    noise -= (noise @ common)[:, None] * common
    # Noise gives the logits of a row a spread of about 2; the strength of the lean is set by bisection.
    noise *= 2.0 / own_size
    direction = lean * own[target] / own[target].norm(dim=1, keepdim=True)
    low, high = 0.0, 100.0 / own_size
    some = slice(0, 1024)
    for _ in range(25):
        strength = (low + high) / 2
        logits = (noise[some] + strength * direction[some]) @ own.t()
        if torch.nn.functional.cross_entropy(logits, target[some]).item() > loss:
            low = strength
        else:
            high = strength
    hidden = noise + strength * direction + (10.0 + 5.0 * randn(shape.num_tokens, 1)) * common
    return hidden, own + common, target


def make_problem(shape: Shape, inputs: tuple[Tensor, Tensor, Tensor], group: dist.ProcessGroup | None) -> Problem:
    """This rank's part of the full inputs; nothing of the full weight stays alive with more than one rank."""
    hidden, weight, target = inputs
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    shard = VocabShard.even(shape.vocab_size, rank, num_ranks)
    local = weight if num_ranks == 1 else weight[shard.start : shard.stop].clone()
    return Problem(shape, hidden.requires_grad_(), local.requires_grad_(), target, shard, group)


def make_class_weight(vocab_size: int, device: torch.device) -> Tensor:
    """`[V]` float32 in [0.5, 1.5), the same whenever it is made."""
    return 0.5 + torch.rand(vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
