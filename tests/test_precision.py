"""Precision of 16-bit gradients on plain random heads and on trained-looking ones, whose rows share a large component.

The yardstick is the error of eager 16-bit `linear` and float32 cross entropy on the same data, one rank.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import VocabShard, gemm, linear_cross_entropy
from flce_dist.plan import accumulation_dtype
from tests.kit import heads, oracle
from tests.kit.compare import assert_loss, relative_error
from tests.kit.workers import Context, Pool

SIZES = (512, 64, 1536)  # tokens, hidden, vocabulary
HEADS = ["random", "trained"]
FULL_PRECISION = {
    "accum_dtype": torch.float32,
    "logits_dtype": torch.float32,
    "hidden_grad_reduce_dtype": torch.float32,
}
Gradients = tuple[Tensor, Tensor]


def make(head: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generate = heads.trained_head if head == "trained" else heads.random_head
    hidden, weight, target = generate(*SIZES, seed=7)
    return hidden.to(dtype), weight.to(dtype), target


def eager(head: str, dtype: torch.dtype) -> Gradients:
    hidden, weight, target = make(head, dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = torch.nn.functional.linear(hidden, weight)
    torch.nn.functional.cross_entropy(logits.float(), target).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


def exact(head: str, dtype: torch.dtype) -> Gradients:
    reference = oracle.reference(*make(head, dtype))
    return reference.hidden_grad, reference.weight_grad


def ours(ctx: Context, head: str, dtype: torch.dtype, options: dict[str, Any]) -> Gradients:
    hidden, weight, target = make(head, dtype)
    rows = SIZES[2] // ctx.world
    hidden.requires_grad_()
    weight = weight[ctx.rank * rows : (ctx.rank + 1) * rows].clone().requires_grad_()
    linear_cross_entropy(hidden, weight, target, group=ctx.group, vocab_size=SIZES[2], **options).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


def errors(results: list[Gradients], expected: Gradients) -> tuple[float, float]:
    return (
        relative_error(results[0][0], expected[0]),
        relative_error(torch.cat([weight for _, weight in results]), expected[1]),
    )


def worst_rows(actual: Tensor, expected: Tensor) -> float:
    """99th percentile of the relative errors of rows."""
    difference = (actual.double() - expected).norm(dim=1) / expected.norm(dim=1)
    return difference.quantile(0.99).item()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("chunk_rows", [None, 256, 171, 128, 64])
def test_default_options(head: str, world: int, chunk_rows: int | None, workers: Pool) -> None:
    """At most 1.5 times the eager errors, at any number of ranks and chunks."""
    expected = exact(head, torch.bfloat16)
    allowed = errors([eager(head, torch.bfloat16)], expected)
    got = errors(workers.run(world, ours, head, torch.bfloat16, {"chunk_rows": chunk_rows}), expected)
    assert got[0] <= 1.5 * allowed[0], f"hidden gradient {got[0]:.3g}, eager {allowed[0]:.3g}"
    assert got[1] <= 1.5 * allowed[1], f"weight gradient {got[1]:.3g}, eager {allowed[1]:.3g}"


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("chunk_rows", [None, 64])
@pytest.mark.parametrize("backward", ["forward", "recompute"])
def test_float32_inside(head: str, world: int, chunk_rows: int | None, backward: str, workers: Pool) -> None:
    """At most the eager errors."""
    expected = exact(head, torch.bfloat16)
    allowed = errors([eager(head, torch.bfloat16)], expected)
    options = {"chunk_rows": chunk_rows, "backward": backward, **FULL_PRECISION}
    got = errors(workers.run(world, ours, head, torch.bfloat16, options), expected)
    assert got[0] <= allowed[0], f"hidden gradient {got[0]:.3g}, eager {allowed[0]:.3g}"
    assert got[1] <= allowed[1], f"weight gradient {got[1]:.3g}, eager {allowed[1]:.3g}"


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk_rows", [None, 64])
def test_float32_logits_with_a_bias_and_a_scale(head: str, chunk_rows: int | None) -> None:
    """The loss is exact. With logits this small all of the eager error is the rounding of their gradient, as here."""
    inputs = [*make(head), torch.linspace(-2.0, 2.0, SIZES[2]).bfloat16()]
    leaves, eager_leaves = ([t.clone().requires_grad_(t.is_floating_point()) for t in inputs] for _ in range(2))
    hidden, weight, target, bias = leaves
    options = {"chunk_rows": chunk_rows, **FULL_PRECISION}
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, logit_scale=0.3, **options)
    loss.backward()
    hidden, weight, target, bias = eager_leaves
    logits = 0.3 * torch.nn.functional.linear(hidden, weight, bias).float()
    torch.nn.functional.cross_entropy(logits, target).backward()
    expected = oracle.reference(*inputs[:3], bias=inputs[3], logit_scale=0.3)
    assert_loss(loss, expected.loss, 1e-6)
    for at, name in ((0, "hidden"), (1, "weight"), (3, "bias")):
        grad = getattr(expected, f"{name}_grad")
        got, allowed = (relative_error(tensors[at].grad, grad) for tensors in (leaves, eager_leaves))
        assert got <= 1.05 * allowed, f"{name} gradient {got:.3g}, eager {allowed:.3g}"


@pytest.mark.parametrize("world", [1, 2])
def test_float32_logits_mend_the_worst_rows(world: int, workers: Pool) -> None:
    """bf16 logits, not the bf16 gradient, make the worst rows of dX bad."""
    expected = exact("trained", torch.bfloat16)[0]
    default = workers.run(world, ours, "trained", torch.bfloat16, {})[0][0]
    better = workers.run(world, ours, "trained", torch.bfloat16, FULL_PRECISION)[0][0]
    assert worst_rows(better, expected) < 0.5 * worst_rows(default, expected)


@pytest.mark.parametrize("world", [1, 2])
def test_float32_logits_keep_the_worst_rows_below_six_thousandths(world: int, workers: Pool) -> None:
    """Neither the rounding of the gradient times the head's common component nor a confident row's 1 - p is lost."""
    hidden, weight, target = heads.trained_head(512, 256, 8192, seed=3)
    expected = oracle.reference(hidden.bfloat16(), weight.bfloat16(), target).hidden_grad
    got = workers.run(world, _worst_rows_case, FULL_PRECISION)[0]
    assert worst_rows(got, expected) <= 6e-3


def _worst_rows_case(ctx: Context, options: dict[str, Any]) -> Tensor:
    hidden, weight, target = heads.trained_head(512, 256, 8192, seed=3)
    hidden = hidden.bfloat16().requires_grad_()
    rows = 8192 // ctx.world
    shard = weight.bfloat16()[ctx.rank * rows : (ctx.rank + 1) * rows].clone().requires_grad_()
    linear_cross_entropy(hidden, shard, target, group=ctx.group, vocab_size=8192, **options).backward()
    assert hidden.grad is not None
    return hidden.grad


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-3, "softcap": 40.0}, {"backward": "recompute"}], ids=str)
def test_a_confident_model_keeps_its_digits(world: int, backend: str, options: dict[str, Any], pool_for: Any) -> None:
    """With 1 - p down to 1e-8 loss and gradient have the relative precision of any other row."""
    for hidden, weight, loss, grad in pool_for(backend).run(world, _confident, backend, options):
        target = torch.arange(12) % 9
        reference = oracle.reference(
            hidden, weight, target, upstream=torch.ones(12), reduction="none",
            **{key: value for key, value in options.items() if key != "backward"},
        )  # fmt: skip
        torch.testing.assert_close(loss.double(), reference.loss, rtol=1e-5, atol=0)
        difference = (grad.double() - reference.hidden_grad).norm(dim=1) / reference.hidden_grad.norm(dim=1)
        assert difference.max() <= 1e-5


def _confident(ctx: Context, backend: str, options: dict[str, Any]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    target = torch.arange(12) % 9
    lead = torch.linspace(14.0, 20.0, 12)[:, None]
    hidden = torch.randn(12, 9, generator=generator) + lead * torch.nn.functional.one_hot(target, 9)
    weight = torch.eye(9)
    shard = VocabShard.even(9, ctx.rank, ctx.world)
    leaf = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(
        leaf, weight[shard.start : shard.stop], target, reduction="none", backend=backend, group=ctx.group,
        vocab_shard=shard, **options,
    )  # fmt: skip
    loss.sum().backward()
    assert leaf.grad is not None
    return hidden, weight, loss.detach(), leaf.grad


@pytest.mark.parametrize("head", HEADS)
def test_float32_inputs(head: str, workers: Pool) -> None:
    """float32 throughout: 1e-5 or twice what eager float32 reaches, with a common component too."""
    expected = exact(head, torch.float32)
    allowed = errors([eager(head, torch.float32)], expected)
    for world in (1, 2, 4):
        got = errors(workers.run(world, ours, head, torch.float32, {"chunk_rows": 100}), expected)
        assert got[0] <= max(1e-5, 2 * allowed[0])
        assert got[1] <= max(1e-5, 2 * allowed[1])


@pytest.mark.parametrize("chunks", [1, 8, 32])
def test_float32_accumulation_does_not_depend_on_the_number_of_chunks(chunks: int, workers: Pool) -> None:
    expected = exact("trained", torch.bfloat16)
    options = {"chunk_rows": SIZES[0] // chunks, **FULL_PRECISION}
    one = errors(workers.run(1, ours, "trained", torch.bfloat16, {**FULL_PRECISION}), expected)
    many = errors(workers.run(1, ours, "trained", torch.bfloat16, options), expected)
    assert many[1] <= 1.05 * one[1]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk_rows", [None, 64, 4])
def test_the_gradient_of_a_bias_is_summed_in_float32(head: str, chunk_rows: int | None) -> None:
    """At most the eager error, which is one rounding of the sum over all tokens, at any number of chunks."""
    hidden, weight, target = make(head)
    ours, theirs = (torch.linspace(-0.1, 0.1, SIZES[2]).bfloat16().requires_grad_() for _ in range(2))
    linear_cross_entropy(hidden, weight, target, bias=ours, chunk_rows=chunk_rows).backward()
    torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, theirs).float(), target).backward()
    expected = oracle.reference(hidden, weight, target, bias=ours).bias_grad
    assert ours.grad is not None
    assert theirs.grad is not None
    assert expected is not None
    assert relative_error(ours.grad, expected) <= 1.05 * relative_error(theirs.grad, expected)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_float32_logits_near_1e4_with_a_common_offset_lose_nothing(world: int, offset: float, workers: Pool) -> None:
    """The offset is representable, so the logits carry the rounding of 1e4; loss and gradient add none of their own."""
    for logits, loss, grad in workers.run(world, _offset_logits, offset):
        reference = logits.double().requires_grad_()
        target = torch.arange(40) % 24
        expected = torch.nn.functional.cross_entropy(reference, target, reduction="none")
        expected.sum().backward()
        assert (loss - expected).abs().max() < 3e-6
        assert (grad - reference.grad).abs().max() < 1e-6


def _offset_logits(ctx: Context, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)) + offset
    hidden = logits.clone().requires_grad_()
    rows = 24 // ctx.world
    weight = torch.eye(24)[ctx.rank * rows : (ctx.rank + 1) * rows]
    loss = linear_cross_entropy(hidden, weight, torch.arange(40) % 24, reduction="none", group=ctx.group, vocab_size=24)
    loss.sum().backward()
    assert hidden.grad is not None
    return logits, loss.detach(), hidden.grad


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("num_tokens", [64, 2048])
def test_fp16_gradients_that_fit_do_not_overflow_on_the_way(size: float, num_tokens: int) -> None:
    """A mean's gradient is small although the sum over the tokens is not: every token has the same wrong prediction."""
    hidden = torch.full((num_tokens, 16), size, dtype=torch.float16).requires_grad_()
    weight = torch.zeros(32, 16, dtype=torch.float16).requires_grad_()
    target = torch.zeros(num_tokens, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, target).backward()
    expected = oracle.reference(hidden, weight, target)
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
    assert relative_error(weight.grad, expected.weight_grad) <= 1e-2


FP16_OPTIONS: list[dict[str, Any]] = [
    {},
    {"token_scaling": True},
    {"label_smoothing": 1.0},
    {"label_smoothing": 0.1, "z_loss": 1e-4},
    {"logit_scale": 1 / 256},
    {"logit_scale": -4.0},
]


def _fp16_eager(logits: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
    """Per-token loss of fp16 logits in float32 torch: what a GradScaler user would write."""
    logits = logits.float() * options.get("logit_scale", 1.0)
    log_prob = logits.log_softmax(-1)
    smoothing = options.get("label_smoothing", 0.0)
    of_target = log_prob.gather(1, target[:, None])[:, 0]
    loss = -(1 - smoothing) * of_target - smoothing * log_prob.mean(-1)
    loss = loss + options.get("z_loss", 0.0) * logits.logsumexp(-1).square()
    return loss * of_target.detach().exp() if options.get("token_scaling") else loss


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", FP16_OPTIONS, ids=str)
@pytest.mark.parametrize(("reduction", "scale"), [("mean", 8192.0), ("sum", 64.0), ("none", 64.0)])
@pytest.mark.parametrize("backward", ["auto", "recompute"])
def test_fp16_with_a_loss_scale(
    head: str, options: dict[str, Any], reduction: str, scale: float, backward: str
) -> None:
    """Small probabilities do not underflow before the loss scale arrives: at most 1.5 times the eager errors."""
    generate = heads.trained_head if head == "trained" else heads.random_head
    hidden, weight, target = generate(256, 32, 8192, seed=7)
    hidden, weight = hidden.half(), weight.half()
    upstream = torch.full((256,) if reduction == "none" else (), scale)
    expected = oracle.reference(hidden, weight, target, upstream=upstream, reduction=reduction, **options)
    leaves = [[t.clone().requires_grad_() for t in (hidden, weight)] for _ in range(2)]
    per_token = _fp16_eager(leaves[0][0] @ leaves[0][1].T, target, options)
    {"mean": per_token.mean(), "sum": per_token.sum(), "none": per_token}[reduction].backward(upstream)
    loss = linear_cross_entropy(*leaves[1], target, reduction=reduction, backward=backward, **options)
    loss.backward(upstream)
    for name, at, want in (("hidden", 0, expected.hidden_grad), ("weight", 1, expected.weight_grad)):
        eager_grad, grad = leaves[0][at].grad, leaves[1][at].grad
        assert eager_grad is not None
        assert grad is not None
        error, allowed = relative_error(grad, want), 1.5 * relative_error(eager_grad, want)
        assert error <= allowed, f"{name} gradient: error {error:.3g} > {allowed:.3g}"


def test_fp16_where_only_the_z_loss_has_a_gradient() -> None:
    """Classes of weight 0 leave no other coefficient that would say how far the gradients can be lifted."""
    hidden, weight, target = heads.random_head(256, 32, 8192, seed=7)
    hidden, weight = hidden.half().requires_grad_(), weight.half().requires_grad_()
    options = {"class_weight": torch.zeros(8192), "z_loss": 1e-4, "normalizer": 256.0}
    upstream = torch.tensor(8192.0)
    linear_cross_entropy(hidden, weight, target, **options).backward(upstream)  # type: ignore[union-attr,arg-type]
    expected = oracle.reference(hidden, weight, target, upstream=upstream, **options)  # type: ignore[arg-type]
    assert hidden.grad is not None
    assert relative_error(hidden.grad, expected.hidden_grad) <= 2e-3


@pytest.mark.parametrize(
    ("dtype", "num_chunks", "expected"),
    [
        (torch.bfloat16, 2, torch.bfloat16),
        (torch.bfloat16, 3, torch.float32),
        (torch.bfloat16, 4, torch.float32),
        (torch.float16, 1, torch.float32),
        (torch.float32, 9, torch.float32),
        (torch.float64, 9, torch.float64),
    ],
    ids=str,
)
def test_what_the_weight_gradient_is_accumulated_in(dtype: torch.dtype, num_chunks: int, expected: torch.dtype) -> None:
    assert accumulation_dtype(None, dtype, num_chunks) == expected
    assert accumulation_dtype(torch.bfloat16, dtype, num_chunks) == torch.bfloat16


SMALL_LOGITS = [(2048, 64, 256, 0.1), (4096, 64, 64, 0.3), (2048, 48, 192, 1.0)]
"""Tokens, hidden, vocabulary, spread of the logits: many tokens for each entry, so that eager's error of the weight's
gradient is little more than one rounding of it."""


def _add_rounded_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b` as a GPU's vendor GEMM does it; a CPU's rounds only the sum."""
    out += torch.mm(a, b) if out.dtype == a.dtype else torch.mm(a.to(out.dtype), b.to(out.dtype))


def _weight_gradient_over_eager(sizes: tuple[int, int, int, float], num_chunks: int, **options: Any) -> float:
    """Error of the weight's gradient in chunks over that of eager bfloat16 `linear` and float32 cross entropy."""
    num_tokens, hidden_size, vocab_size, spread = sizes
    hidden, weight, target = heads.random_head(num_tokens, hidden_size, vocab_size, seed=5)
    hidden, weight = hidden.bfloat16(), (spread * weight).bfloat16()
    expected = oracle.reference(hidden, weight, target).weight_grad
    eager_weight, our_weight = (weight.clone().requires_grad_() for _ in range(2))
    torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, eager_weight).float(), target).backward()
    rows = -(-num_tokens // num_chunks)
    linear_cross_entropy(hidden, our_weight, target, chunk_rows=rows, **options).backward()
    assert eager_weight.grad is not None
    assert our_weight.grad is not None
    return relative_error(our_weight.grad, expected) / relative_error(eager_weight.grad, expected)


@pytest.mark.parametrize("sizes", SMALL_LOGITS, ids=str)
@pytest.mark.parametrize("product", ["rounded", "not rounded"])
@pytest.mark.parametrize("num_chunks", [2, 3, 4, 5, 8])
def test_the_weight_gradient_at_any_number_of_chunks(
    sizes: tuple[int, int, int, float], product: str, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.5 times eager's error, where each rounding of a partial sum shows most."""
    if product == "rounded":
        monkeypatch.setattr(gemm, "addmm_into", _add_rounded_product)
    ratio = _weight_gradient_over_eager(sizes, num_chunks)
    assert ratio <= 1.5, f"{ratio:.2f} times eager's error"
    if num_chunks > 2:
        assert ratio <= 1.01, f"{ratio:.2f} times eager's error, in float32"


@pytest.mark.parametrize("num_chunks", [3, 4])
def test_more_chunks_in_bfloat16_would_be_too_many(num_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the weight gradient's dtype changes at 2 chunks."""
    monkeypatch.setattr(gemm, "addmm_into", _add_rounded_product)
    assert _weight_gradient_over_eager(SMALL_LOGITS[0], num_chunks, accum_dtype=torch.bfloat16) > 1.5
