"""Autocast, mixed dtypes, and fp16's small range (field report B22 and its neighbours)."""

from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from tests.kit import compare, heads, oracle
from tests.kit.cases import Case, make_inputs
from tests.kit.workers import Context, Pool

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = [(BF16, F32), (F32, F32), (F32, BF16), (BF16, BF16)]
REDUCTIONS = ["mean", "sum", "none"]
CASE = Case(lead=(40,), hidden_size=16, vocab_size=64)


def _under_autocast(
    ctx: Context | None, autocast: torch.dtype, dtypes: tuple[torch.dtype, ...], reduction: str
) -> list[torch.Tensor]:
    world = 1 if ctx is None else ctx.world
    rank = 0 if ctx is None else ctx.rank
    full = make_inputs(CASE)
    rows = slice(rank * 64 // world, (rank + 1) * 64 // world)
    hidden = full.hidden.to(dtypes[0]).requires_grad_()
    weight = full.weight[rows].to(dtypes[1]).clone().requires_grad_()
    bias = torch.linspace(-1, 1, 64)[rows].clone().requires_grad_()
    upstream = torch.linspace(0.5, 1.5, 40) if reduction == "none" else torch.tensor(0.7)
    with torch.autocast("cpu", autocast):
        loss = linear_cross_entropy(
            hidden,
            weight,
            full.target,
            bias=bias,
            reduction=reduction,
            group=None if ctx is None else ctx.group,
            vocab_size=None if ctx is None else 64,
        )
    loss.backward(upstream)
    assert loss.dtype == F32
    assert (hidden.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (*dtypes, F32)
    return [loss.detach(), hidden.grad, weight.grad, bias.grad]


def _expected(autocast: torch.dtype, dtypes: tuple[torch.dtype, ...], reduction: str) -> oracle.Reference:
    full = make_inputs(CASE)
    # Autocast rounds the operands of the product.
    hidden = full.hidden.to(dtypes[0]).to(autocast)
    weight = full.weight.to(dtypes[1]).to(autocast)
    bias = torch.linspace(-1, 1, 64).to(autocast)
    upstream = torch.linspace(0.5, 1.5, 40) if reduction == "none" else torch.tensor(0.7)
    return oracle.reference(hidden, weight, full.target, bias=bias, upstream=upstream, reduction=reduction)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("autocast", [BF16, F16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast(dtypes: tuple[torch.dtype, ...], autocast: torch.dtype, reduction: str) -> None:
    expected = _expected(autocast, dtypes, reduction)
    loss, *grads = _under_autocast(None, autocast, dtypes, reduction)
    compare.assert_loss(loss, expected.loss, compare.TOL16.loss)
    wanted = (expected.hidden_grad, expected.weight_grad, expected.bias_grad)
    for name, grad, want in zip(("hidden", "weight", "bias"), grads, wanted, strict=True):
        compare.assert_close(grad, want, compare.TOL16.grad, f"{name} gradient")


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_autocast_sharded(dtypes: tuple[torch.dtype, ...], workers: Pool) -> None:
    expected = _expected(BF16, dtypes, "mean")
    for rank, (loss, *grads) in enumerate(workers.run(2, _under_autocast, BF16, dtypes, "mean")):
        rows = slice(rank * 32, rank * 32 + 32)
        compare.assert_loss(loss, expected.loss, compare.TOL16.loss)
        wanted = (expected.hidden_grad, expected.weight_grad[rows], expected.bias_grad[rows])
        for name, grad, want in zip(("hidden", "weight", "bias"), grads, wanted, strict=True):
            compare.assert_close(grad, want, compare.TOL16.grad, f"{name} gradient")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64_stays_under_autocast(reduction: str) -> None:
    """As `F.linear` leaves it."""
    full = make_inputs(CASE)
    hidden, weight = full.hidden.double().requires_grad_(), full.weight.double().requires_grad_()
    bias = torch.linspace(-1, 1, 64, dtype=torch.float64).requires_grad_()
    with torch.autocast("cpu", BF16):
        loss = linear_cross_entropy(hidden, weight, full.target, bias=bias, reduction=reduction)
    loss.sum().backward()
    expected = oracle.reference(
        hidden, weight, full.target, bias=bias, upstream=torch.ones(loss.shape), reduction=reduction
    )
    assert loss.dtype == torch.float64
    compare.assert_loss(loss, expected.loss, 1e-12)
    for name, leaf in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        compare.assert_close(leaf.grad, getattr(expected, f"{name}_grad"), 1e-12, f"{name} gradient")


@pytest.mark.parametrize("name", ["hidden", "weight", "target", "bias"])
def test_what_is_no_tensor_is_refused_under_autocast(name: str) -> None:
    full = make_inputs(CASE)
    arguments: dict[str, Any] = {"hidden": full.hidden, "weight": full.weight, "target": full.target, name: 3.0}
    with torch.autocast("cpu", BF16), pytest.raises(TypeError, match=f"{name} must be a tensor, got float"):
        linear_cross_entropy(**arguments)


def test_disabled_autocast_changes_nothing() -> None:
    full = make_inputs(CASE)
    with torch.autocast("cpu", BF16, enabled=False):
        inside = linear_cross_entropy(full.hidden, full.weight, full.target)
    compare.assert_same_bits([linear_cross_entropy(full.hidden, full.weight, full.target), inside], "loss")


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (F16, BF16), (torch.float64, F32)], ids=str)
def test_mixed_dtypes_without_autocast_name_both(dtypes: tuple[torch.dtype, ...]) -> None:
    full = make_inputs(CASE)
    names = [str(d).removeprefix("torch.") for d in dtypes]
    with pytest.raises(TypeError, match="hidden and weight must have one dtype") as caught:
        linear_cross_entropy(full.hidden.to(dtypes[0]), full.weight.to(dtypes[1]), full.target)
    assert all(name in str(caught.value) for name in names), caught.value


def test_fp32_bias_with_16_bit_weight_names_both() -> None:
    full = make_inputs(CASE)
    with pytest.raises(TypeError, match=r"bias and weight must have one dtype, got torch\.float32 and torch\.bfloat16"):
        linear_cross_entropy(full.hidden.bfloat16(), full.weight.bfloat16(), full.target, bias=torch.zeros(64))


@pytest.mark.parametrize("dtypes", [(F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_and_token_weights_may_have_their_own_dtype(dtypes: tuple[torch.dtype, ...], reduction: str) -> None:
    own, dtype = dtypes
    full = make_inputs(CASE)
    class_weight = torch.linspace(0.5, 2, 64).to(own)
    token_weight = torch.linspace(0.1, 2, 40).to(own)
    hidden, weight = full.hidden.to(dtype), full.weight.to(dtype)
    loss = linear_cross_entropy(
        hidden, weight, full.target, class_weight=class_weight, token_weight=token_weight, reduction=reduction
    )
    expected = oracle.reference(
        hidden, weight, full.target, class_weight=class_weight, token_weight=token_weight, reduction=reduction
    )
    compare.assert_loss(loss, expected.loss, compare.TOL16.loss)


@pytest.mark.parametrize("num_tokens", [64, 2048])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
def test_fp16_mean_does_not_underflow_before_the_loss_scale_arrives(num_tokens: int, scale: float) -> None:
    """p/N of a large vocabulary is far below fp16's smallest number; the gradient times the loss scale is not."""
    hidden, weight, target = (
        t.half() if t.is_floating_point() else t for t in heads.random_head(num_tokens, 16, 512, 0)
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, target).backward(torch.tensor(scale))
    expected = oracle.reference(hidden, weight, target, upstream=torch.tensor(scale))
    # What a 16-bit gradient can hold at all: its own smallest step.
    step = 2.0**-24
    for name, grad, want in (
        ("hidden", hidden.grad, expected.hidden_grad),
        ("weight", weight.grad, expected.weight_grad),
    ):
        difference = (grad.double() - want).norm()
        bound = compare.TOL16.grad * want.norm() + step * want.numel() ** 0.5
        assert torch.isfinite(grad).all()
        assert difference <= bound, f"{name} gradient: error {difference:.3g} > {bound:.3g}"


@pytest.mark.parametrize("unseen", [1.0, 1e-3, 1e3, 1e8])
@pytest.mark.parametrize("scale_of_weights", [1.0, 1 / 512, 1 / 512**2, 1e6])
def test_fp16_with_smoothing_and_class_weights_of_any_scale(scale_of_weights: float, unseen: float) -> None:
    """A mean forgets the scale: nothing underflows, nor overflows because of a class that is never a target."""
    hidden, weight, target = (t.half() if t.is_floating_point() else t for t in heads.random_head(64, 16, 512, 0))
    class_weight = torch.linspace(0.5, 2, 512)
    class_weight[511] = unseen
    options = {"class_weight": class_weight * scale_of_weights, "label_smoothing": 0.1}
    target = target % 511
    hidden.requires_grad_()
    weight.requires_grad_()
    scale = torch.tensor(65536.0 / max(1.0, unseen))
    linear_cross_entropy(hidden, weight, target, **options).backward(scale)
    expected = oracle.reference(hidden, weight, target, upstream=scale, **options)
    compare.assert_close(hidden.grad, expected.hidden_grad, compare.TOL16.grad, "hidden gradient")
    compare.assert_close(weight.grad, expected.weight_grad, compare.TOL16.grad, "weight gradient")


def test_fp16_coefficients_below_float32s_normal_numbers() -> None:
    hidden, weight = torch.ones(3, 4, dtype=torch.float16), torch.eye(4, dtype=torch.float16)
    hidden.requires_grad_()
    tiny = torch.full((3,), 1e-3)
    linear_cross_entropy(hidden, weight, torch.arange(3), token_weight=tiny, normalizer=1e38).backward()
    assert (hidden.grad == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_grad_scaler_round_trip(reduction: str) -> None:
    full = make_inputs(CASE)
    hidden, weight = full.hidden.half().requires_grad_(), full.weight.half().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, full.target, reduction=reduction)
    upstream = torch.full_like(loss, 256.0)
    loss.backward(upstream)
    expected = oracle.reference(hidden, weight, full.target, upstream=upstream, reduction=reduction)
    compare.assert_close(hidden.grad, expected.hidden_grad, compare.TOL16.grad, "hidden gradient")
    compare.assert_close(weight.grad, expected.weight_grad, compare.TOL16.grad, "weight gradient")
