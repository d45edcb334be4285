"""The loss and its gradients on a GPU against the float64 oracle."""

from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from tests.gpu.support import device_arguments, run_on
from tests.kit import compare, heads, oracle
from tests.kit.cases import Case, judge

pytestmark = pytest.mark.gpu

BACKEND = "triton"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES: dict[str, Any] = {"lead": (3, 67), "hidden_size": 64, "vocab_size": 1025}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum", "bias": True},
    "none": {"reduction": "none", "token_weight": True},
    "chunks": {"chunk_rows": 64, "bias": True},
    "rows-one": {"chunk_rows": 1, "lead": (7,)},
    "recompute": {"chunk_rows": 64, "options": (("backward", "recompute"),)},
    "smoothing": {"class_weight": True, "options": (("label_smoothing", 0.1), ("z_loss", 1e-3))},
    "softcap": {"options": (("softcap", 5.0), ("logit_scale", 0.7))},
    "token-scaling": {"options": (("token_scaling", True),), "normalizer": 50.0},
    "skip-ignored": {"options": (("skip_ignored", True),), "token_weight": True},
    "all-ignored": {"ignored": "all"},
    "fp32-accumulation": {"chunk_rows": 64, "options": (("accum_dtype", torch.float32),)},
    "fp32-logits": {"chunk_rows": 64, "options": (("logits_dtype", torch.float32),), "bias": True},
    "aux": {"aux": ("z_loss", "lse", "accuracy", "predictions", "entropy", "num_valid")},
    "no-tokens": {"lead": (0, 5)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_against_the_oracle(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Upstream gradients are random, not 1, as the kit makes them."""
    if name == "aux" and dtype != torch.float32:
        pytest.skip("16-bit logits have other ties than the oracle's: predictions are compared in float32")
    case = Case(**(SIZES | {"dtype": dtype, "backend": BACKEND} | OPTIONS[name]))
    judge(case, [run_on(device, case)])


def test_float64(device: torch.device) -> None:
    """0.1 is no float32, in which numbers reach a kernel."""
    options = (("z_loss", 1e-2), ("hidden_grad_scale", 0.1))
    case = Case(**SIZES, dtype=torch.float64, backend=BACKEND, chunk_rows=64, bias=True, options=options)
    result = run_on(device, case)
    assert result.hidden_grad is not None
    result.hidden_grad /= 0.1
    judge(case, [result])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", ["random", "trained"])
def test_a_wide_vocabulary_in_several_chunks(device: torch.device, head: str, dtype: torch.dtype) -> None:
    """An odd vocabulary of three tiles and more, and a head whose rows share a large common component."""
    make = {"random": heads.random_head, "trained": heads.trained_head}[head]
    hidden, weight, target = make(300, 128, 32003, seed=0)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    expected = oracle.reference(hidden, weight, target)
    options: dict[str, Any] = {} if dtype == torch.float32 else {"logits_dtype": torch.float32}
    x, w = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
    loss = linear_cross_entropy(x, w, target.to(device), chunk_rows=128, backend=BACKEND, **options)
    loss.backward()
    tolerance = compare.BY_DTYPE[dtype]
    # The common component, ten times the size of what distinguishes the ids, multiplies the rounding of logits.
    factor = 5.0 if head == "trained" and dtype == torch.float32 else 1.0
    compare.assert_loss(loss.cpu(), expected.loss, tolerance.loss)
    compare.assert_close(x.grad, expected.hidden_grad, factor * tolerance.grad, "hidden gradient")
    compare.assert_close(w.grad, expected.weight_grad, factor * tolerance.grad, "weight gradient")


def test_float16_with_a_loss_scale(device: torch.device) -> None:
    """A mean's p/N is below float16's smallest number until the loss scale arrives."""
    scale, tokens, vocab_size = 65536.0, 1024, 32000
    hidden, weight, target = heads.random_head(tokens, 32, vocab_size, 0)
    hidden, weight = hidden.half(), weight.half()
    expected = oracle.reference(hidden, weight, target, upstream=torch.tensor(scale))
    x, w = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
    loss = linear_cross_entropy(x, w, target.to(device), backend=BACKEND)
    (loss * scale).backward()
    assert 1.0 / vocab_size / tokens < 2.0**-24
    compare.assert_close(x.grad, expected.hidden_grad, 1e-2, "hidden gradient")
    compare.assert_close(w.grad, expected.weight_grad, 1e-2, "weight gradient")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accum_dtype": torch.float32},
        {"logits_dtype": torch.float32},
        {"backward": "recompute"},
        {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3},
    ],
    ids=str,
)
def test_repeated_runs_are_bitwise_equal(device: torch.device, options: dict[str, Any]) -> None:
    """float32 logits overwritten by a 16-bit gradient would show a race here, any reduction by atomics too."""
    hidden, weight, target = heads.random_head(700, 128, 32003, 0)
    target[::7] = -100
    first: list[torch.Tensor] = []
    for _ in range(8):
        x = hidden.to(device, torch.bfloat16).requires_grad_()
        w = weight.to(device, torch.bfloat16).requires_grad_()
        loss = linear_cross_entropy(x, w, target.to(device), chunk_rows=256, backend=BACKEND, **options)
        loss.sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        results = [loss.detach(), x.grad, w.grad]
        first = first or results
        for name, a, b in zip(("loss", "hidden gradient", "weight gradient"), first, results, strict=True):
            compare.assert_same_bits([a, b], name)


def test_a_bad_target_is_a_device_side_assertion(device: torch.device) -> None:
    """In a process of its own: the assertion ends the use of the device."""
    import subprocess
    import sys

    if device.type != "cuda":
        pytest.skip("targets on the CPU raise IndexError: test_checks.py")
    code = (
        "import torch, flce_dist\n"
        "x, w = torch.randn(8, 16, device='cuda'), torch.randn(32, 16, device='cuda')\n"
        "flce_dist.linear_cross_entropy(x, w, torch.full((8,), 32, device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    assert "outside [0, 32)" in result.stderr or "device-side assert" in result.stderr, result.stderr


def test_frozen_hidden_and_no_grad_give_the_same_loss(device: torch.device) -> None:
    case = Case(**SIZES, dtype=torch.bfloat16, backend=BACKEND, chunk_rows=64)
    (hidden, weight, target), keywords = device_arguments(case, device)
    loss = linear_cross_entropy(hidden, weight, target, **keywords)
    with torch.no_grad():
        silent = linear_cross_entropy(hidden, weight, target, **keywords)
    frozen = linear_cross_entropy(hidden.detach(), weight, target, **keywords)
    with torch.inference_mode():
        inference = linear_cross_entropy(hidden, weight, target, **keywords)
    compare.assert_same_bits([t.detach() for t in (loss, silent, frozen, inference)], "loss")
