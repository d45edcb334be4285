"""Seeded inputs that look like those of a trained model, and plain random ones.

A trained head's rows share a large common component (in one measured model the mean row is 0.94 as long as the mean
length of a row), which random data lacks; rounding in a sum over the vocabulary is multiplied by it.
"""

import torch
from torch import Tensor

COMMON_SHARE = 0.94


def random_head(num_tokens: int, hidden_size: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 hidden [N, H], weight [V, H], target [N] without structure; logits have a spread of about 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    weight = torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5
    target = torch.randint(vocab_size, (num_tokens,), generator=generator)
    return hidden, weight, target


def trained_head(
    num_tokens: int, hidden_size: int, vocab_size: int, seed: int, loss: float = 2.3, common_share: float = COMMON_SHARE
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 hidden [N, H], weight [V, H], target [N] whose cross entropy is about `loss`.

    Rows of the weight are a common vector plus a part of their own; |mean row| / mean |row| is `common_share`. Hidden
    states lean to their target's own part, by an amount that differs from token to token, and have a component along
    the common vector, which shifts all logits of a row together. Targets are Zipf-distributed as token ids are.
    """
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(hidden_size, generator=generator)
    common /= common.norm()
    own = torch.randn(vocab_size, hidden_size, generator=generator)
    own -= (own @ common)[:, None] * common
    own -= own.mean(0)
    own_size = (1 / common_share**2 - 1) ** 0.5
    own *= own_size / own.norm(dim=1).mean()
    weight = common + own

    frequency = 1.0 / torch.arange(1, vocab_size + 1).float()
    target = torch.multinomial(frequency, num_tokens, replacement=True, generator=generator)
    lean = 0.3 + 1.4 * torch.rand(num_tokens, 1, generator=generator)
    noise = torch.randn(num_tokens, hidden_size, generator=generator)
    noise -= (noise @ common)[:, None] * common
    offset = (10.0 + 5.0 * torch.randn(num_tokens, 1, generator=generator)) * common
    direction = own[target] / own[target].norm(dim=1, keepdim=True)

    # Noise gives the logits of a row a spread of about 2; the strength of the lean is set by bisection.
    noise *= 2.0 / own_size
    low, high = 0.0, 100.0 / own_size
    hidden = noise
    for _ in range(40):
        strength = (low + high) / 2
        hidden = offset + noise + strength * lean * direction
        if torch.nn.functional.cross_entropy(hidden @ weight.T, target).item() > loss:
            low = strength
        else:
            high = strength
    return hidden, weight, target
