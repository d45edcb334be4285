"""The yardstick of other suites, which is plain torch on the full weight, and our function on the same inputs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kit.workers import Context, Pool

FLOAT32_LOGITS = {"logits_dtype": torch.float32}
LIGER_TOLERANCE = {
    ("mean", torch.bfloat16): {"atol": 5e-3, "rtol": 5e-2},
    ("mean", torch.float32): {"atol": 1e-5, "rtol": 5e-4},
    ("sum", torch.bfloat16): {"atol": 5e-0, "rtol": 5e1},
    ("sum", torch.float32): {"atol": 1e-3, "rtol": 5e-2},
}
LIGER_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "ignore_index": 42, "z_loss": 1e-4, "softcap": 30.0},
}
# Of a gradient's Frobenius norm, because some of the suites' tolerances are larger than the gradients they are for.
GRAD_ERROR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@dataclass
class Inputs:
    """Full, unsharded inputs: hidden [..., H], weight [V, H], target [...], bias [V]."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        """Copies of hidden, weight and bias that require grad."""
        tensors = (self.hidden, self.weight, self.bias)
        return [None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in tensors]


@dataclass
class Outcome:
    """The loss, the gradients of hidden, weight and bias, and what `aux` named."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    aux: dict[str, Tensor]


def logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None = None, logit_scale: float = 1.0
) -> Tensor:
    """Float32 (float64) logits of a linear layer in the inputs' dtype, as eager code has them."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    logits = logit_scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def plain(
    inputs: Inputs,
    upstream: Tensor | float = 1.0,
    dtype: torch.dtype | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_scaling: bool = False,
    reduction: str = "mean",
    ignore_index: int = -100,
    **keywords: Any,
) -> Outcome:
    """`F.linear` in `dtype` (None: the inputs'), then `F.cross_entropy` of float32 logits."""
    hidden, weight, bias = inputs.leaves(dtype)
    assert hidden is not None
    assert weight is not None
    logits = logits_of(hidden, weight, bias, softcap, logit_scale)
    target = inputs.target.reshape(-1)
    valid = target != ignore_index
    loss = F.cross_entropy(logits, target, reduction="none", ignore_index=ignore_index, **keywords)
    loss = loss + torch.where(valid, z_loss * logits.logsumexp(-1).square(), 0.0)
    if token_scaling:
        label = torch.where(valid, target, 0)
        loss = loss * logits.detach().softmax(-1).gather(1, label[:, None])[:, 0]
    if reduction == "none":
        loss = loss.reshape(inputs.target.shape)
    elif reduction == "sum":
        loss = loss.sum()
    elif "weight" in keywords:
        z_part = torch.where(valid, z_loss * logits.logsumexp(-1).square(), 0.0).sum() / valid.sum()
        loss = F.cross_entropy(logits, target, ignore_index=ignore_index, **keywords) + z_part
    else:
        loss = loss.sum() / valid.sum()
    loss.backward(torch.as_tensor(upstream, dtype=loss.dtype).expand(loss.shape))
    return Outcome(loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad, {})


def cuts_of(vocab_size: int, world: int) -> list[int]:
    """As `torch.chunk` cuts."""
    rows = -(-vocab_size // world)
    return [min(rank * rows, vocab_size) for rank in range(world + 1)]


def run(
    ctx: Context | None,
    inputs: Inputs,
    upstream: Tensor | float = 1.0,
    cuts: list[int] | None = None,
    sharded_tokens: bool = False,
    **keywords: Any,
) -> Outcome:
    """The job: this rank's rows of the vocabulary, between `cuts`, and with `sharded_tokens` its equal part of the
    tokens along the first dimension; one forward and one backward."""
    from flce_dist import VocabShard, linear_cross_entropy

    rank, world, group = (0, 1, None) if ctx is None else (ctx.rank, ctx.world, ctx.group)
    cuts = cuts or cuts_of(len(inputs.weight), world)
    rows = slice(cuts[rank], cuts[rank + 1])
    target, upstream = inputs.target, torch.as_tensor(upstream)
    local = Inputs(inputs.hidden, inputs.weight[rows], target, None if inputs.bias is None else inputs.bias[rows])
    if sharded_tokens:
        local.hidden, local.target = inputs.hidden.chunk(world)[rank], target.chunk(world)[rank]
        upstream = upstream.chunk(world)[rank] if upstream.ndim else upstream
        keywords["hidden_layout"] = "sharded"
    hidden, weight, bias = local.leaves()
    assert hidden is not None
    assert weight is not None
    if world > 1:
        keywords |= {"group": group, "vocab_shard": VocabShard(len(inputs.weight), rows.start, rows.stop)}
    result = linear_cross_entropy(hidden, weight, local.target, bias=bias, **keywords)
    names = keywords.get("aux", ())
    loss = result.loss if names else result
    loss.backward(upstream.to(loss.dtype).expand(loss.shape))
    aux = {name: getattr(result, name).detach() for name in names}
    return Outcome(loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad, aux)


def close(actual: Tensor | None, expected: Tensor | None, tolerance: dict[str, float], what: str) -> None:
    """`torch.testing.assert_close` whatever the dtypes; `tolerance` empty: torch's for the actual dtype."""
    assert (actual is None) == (expected is None), what
    if actual is not None and expected is not None:
        torch.testing.assert_close(actual, expected.to(actual.dtype), **tolerance, msg=lambda text: f"{what}: {text}")


def close_grad(actual: Tensor | None, expected: Tensor | None, tolerance: dict[str, float], what: str) -> None:
    """`close`, and `close_in_norm`."""
    close(actual, expected, tolerance, what)
    close_in_norm(actual, expected, what)


def close_in_norm(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Within `GRAD_ERROR` of the gradient's own size, and half the dtype's smallest number for each element."""
    if actual is None or expected is None:
        return
    numbers = torch.finfo(actual.dtype)
    smallest = numbers.smallest_normal * numbers.eps
    difference, size = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in (actual - expected, expected))
    bound = GRAD_ERROR[actual.dtype] * size + smallest / 2 * actual.numel() ** 0.5
    assert difference <= bound, f"{what}: its error has norm {difference:.3g}, the gradient {size:.3g}"


def compare(
    outcomes: list[Outcome],
    expected: Outcome,
    loss: dict[str, float] | None = None,
    grad: dict[str, float] | None = None,
    *,
    sharded_tokens: bool = False,
) -> None:
    """Each rank's loss and hidden gradient, and the gradients of the shards put together, within the suites' `atol` and
    `rtol` (None: what `torch.testing.assert_close` takes by default), and the gradients within `GRAD_ERROR`."""
    loss, grad = loss or {}, grad or {}
    world = len(outcomes)
    for rank, outcome in enumerate(outcomes):
        want, want_hidden = expected.loss, expected.hidden
        if sharded_tokens:
            assert want_hidden is not None
            want_hidden = want_hidden.chunk(world)[rank]
            want = want.chunk(world)[rank] if want.ndim else want
        close(outcome.loss, want, loss, f"loss of rank {rank}")
        close_grad(outcome.hidden, want_hidden, grad, f"hidden gradient of rank {rank}")
    close_grad(together([o.weight for o in outcomes]), expected.weight, grad, "weight gradient")
    close_grad(together([o.bias for o in outcomes]), expected.bias, grad, "bias gradient")


def together(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def run_on(pool: Pool, world: int, inputs: Inputs, upstream: Tensor | float = 1.0, **keywords: Any) -> list[Outcome]:
    """`run` on so many ranks; on one, in this process."""
    if world == 1:
        return [run(None, inputs, upstream, **keywords)]
    return pool.run(world, _run, inputs, upstream, keywords)


def _run(ctx: Context, inputs: Inputs, upstream: Tensor | float, keywords: dict[str, Any]) -> Outcome:
    return run(ctx, inputs, upstream, **keywords)


def ignore_some(target: Tensor, ignore_index: int, share: float, seed: int = 5) -> Tensor:
    """A share of the targets, at random places, at least one, becomes `ignore_index`."""
    order = torch.randperm(target.numel(), generator=torch.Generator().manual_seed(seed))
    flat = target.reshape(-1).clone()
    flat[order[: max(1, int(share * target.numel()))]] = ignore_index
    return flat.reshape(target.shape)


def uniform(shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype, seed: int) -> Tensor:
    """Seeded uniform numbers in a dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Seeded standard normal numbers in a dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(vocab_size: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Seeded target ids."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
