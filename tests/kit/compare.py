"""Comparisons by relative Frobenius error; a failure prints the worst element."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Relative bounds: of a loss (a scalar, or a vector by its norm), and of a gradient by its Frobenius norm."""

    loss: float
    grad: float


TOL64 = Tolerance(loss=1e-12, grad=1e-11)
TOL32 = Tolerance(loss=1e-5, grad=1e-5)
TOL16 = Tolerance(loss=2e-3, grad=1e-2)
BY_DTYPE = {torch.float64: TOL64, torch.float32: TOL32, torch.bfloat16: TOL16, torch.float16: TOL16}

# Logits of size 10 in fp32 are known to 1e-6, so a loss below this size is held to the absolute error of one of it.
SMALLEST_LOSS = 0.1


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; 0 for two zeros, inf where only the expected one is zero."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    difference, size = (actual - expected).norm().item(), expected.norm().item()
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def _worst(actual: Tensor, expected: Tensor) -> str:
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if actual.numel() == 0:
        return "empty"
    difference = (actual - expected).abs().nan_to_num(nan=float("inf")).reshape(-1)
    at = int(difference.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), actual.shape))
    return f"worst at {index}: {actual.reshape(-1)[at]:.9g}, expected {expected.reshape(-1)[at]:.9g}"


def assert_close(actual: Tensor | None, expected: Tensor, bound: float, what: str) -> None:
    """Fail when the relative Frobenius error is above `bound`. Where the reference is 0, only an exact 0 passes."""
    assert actual is not None, f"{what} is None"
    assert actual.shape == expected.shape, f"{what} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{what} is not finite"
    error = relative_error(actual, expected)
    assert error <= bound, f"{what}: relative error {error:.3g} > {bound:.3g}; {_worst(actual, expected)}"


def assert_loss(actual: Tensor, expected: Tensor, bound: float, what: str = "loss") -> None:
    """As assert_close for a loss, whose size counts as at least SMALLEST_LOSS (times the root of the tokens)."""
    assert actual.shape == expected.shape, f"{what} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{what} is not finite"
    difference = (actual.detach().double().cpu() - expected.double()).norm().item()
    size = max(expected.norm().item(), SMALLEST_LOSS * max(expected.numel(), 1) ** 0.5)
    assert difference <= bound * size, (
        f"{what}: error {difference:.3g} > {bound:.3g} x {size:.3g}; {_worst(actual, expected)}"
    )


def assert_same_bits(tensors: list[Tensor], what: str) -> None:
    """Fail unless all tensors have the same dtype, shape and bits (nan and the sign of 0 included)."""
    first = tensors[0].detach().contiguous()
    for rank, other in enumerate(tensors[1:], start=1):
        other = other.detach().contiguous()
        assert other.dtype == first.dtype, f"{what}: dtype {other.dtype} of number {rank}, {first.dtype} of number 0"
        assert other.shape == first.shape, f"{what}: shape of number {rank} differs"
        same = torch.equal(first.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        assert same, f"{what}: number {rank} differs from number 0; {_worst(other, first)}"


def assert_exactly_zero(tensor: Tensor | None, what: str) -> None:
    assert tensor is not None, f"{what} is None"
    assert torch.count_nonzero(tensor) == 0, f"{what} is not exactly 0"
