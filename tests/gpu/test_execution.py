"""How the step runs: no host synchronisation, CUDA graphs, streams, devices, compiled variants, kernels chosen."""

import re
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from flce_dist.kernels.spec import RowSpec
from tests.gpu.support import NEEDS_TWO_DEVICES, capture, kernel_names, no_host_synchronisation, run_on
from tests.kit import compare, heads
from tests.kit.cases import Case, judge

pytestmark = pytest.mark.gpu

STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accum_dtype": torch.float32, "logits_dtype": torch.float32},
    "recompute": {"backward": "recompute"},
    "none": {"reduction": "none"},
    "features": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "logit_scale": 0.5},
    "number-as-normalizer": {"normalizer": 123.0},
    "aux": {"aux": ("z_loss", "lse", "accuracy", "predictions", "entropy", "num_valid")},
}


def inputs(
    device: torch.device, seed: int = 0, tokens: int = 300, ignored: int = 40
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight, target = heads.random_head(tokens, 128, 8200, seed)
    target[:ignored] = -100
    return (
        hidden.to(device, torch.bfloat16).requires_grad_(),
        weight.to(device, torch.bfloat16).requires_grad_(),
        target.to(device),
    )


def step(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    hidden.grad = weight.grad = None
    output = linear_cross_entropy(hidden, weight, target, chunk_rows=128, **options)
    loss = output.loss if "aux" in options else output
    assert isinstance(loss, torch.Tensor)
    (loss.sum() * 0.5).backward()
    return loss.detach()


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS.keys())
def test_no_host_synchronisation(device: torch.device, options: dict[str, Any]) -> None:
    hidden, weight, target = inputs(device)
    step(hidden, weight, target, **options)
    with no_host_synchronisation():
        step(hidden, weight, target, **options)


def test_no_host_synchronisation_with_device_normalizer_and_weights(device: torch.device) -> None:
    hidden, weight, target = inputs(device)
    class_weight = torch.rand(weight.shape[0], device=device)
    tensors = {
        "class_weight": class_weight,
        "token_weight": torch.rand(hidden.shape[0], device=device),
        "normalizer": torch.tensor(123.0, device=device),
        "label_smoothing": 0.1,
    }
    step(hidden, weight, target, **tensors)
    with no_host_synchronisation():
        step(hidden, weight, target, **tensors)


@pytest.mark.parametrize("name", [name for name in STEPS if name != "aux"])
def test_a_captured_step_is_replayed_with_new_data(device: torch.device, name: str) -> None:
    hidden, weight, target = inputs(device)
    results: list[torch.Tensor] = []

    def captured_step() -> None:
        results[:] = [step(hidden, weight, target, **STEPS[name])]

    graph = capture(captured_step)
    for seed in (1, 2):
        fresh = inputs(device, seed, ignored=100 * seed)
        with torch.no_grad():
            for static, new in zip((hidden, weight, target), fresh, strict=True):
                static.copy_(new)
        graph.replay()
        loss = step(*fresh, **STEPS[name])
        assert fresh[0].grad is not None
        assert fresh[1].grad is not None
        compare.assert_close(results[0], loss, 1e-6, "loss")
        compare.assert_close(hidden.grad, fresh[0].grad, 1e-3, "hidden gradient")
        compare.assert_close(weight.grad, fresh[1].grad, 1e-3, "weight gradient")


def test_on_a_side_stream(device: torch.device) -> None:
    """Inputs made late on a side stream: work that went to the default stream would read them too early."""
    expected = inputs(device)
    loss = step(*expected)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(tensor) for tensor in expected]
        torch.cuda._sleep(200_000_000)
        for tensor, value in zip(late, expected, strict=True):
            tensor.copy_(value.detach())
        hidden, weight, target = late[0].requires_grad_(), late[1].requires_grad_(), late[2]
        found = step(hidden, weight, target)
    torch.cuda.current_stream(device).wait_stream(stream)
    compare.assert_same_bits([loss, found], "loss")
    for name, a, b in (("hidden", expected[0].grad, hidden.grad), ("weight", expected[1].grad, weight.grad)):
        assert a is not None
        assert b is not None
        compare.assert_same_bits([a, b], f"{name} gradient")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NEEDS_TWO_DEVICES)
@pytest.mark.parametrize("name", ["plain", "recompute"])
def test_on_a_device_that_is_not_the_current_one(name: str) -> None:
    assert torch.cuda.current_device() == 0
    options = () if name == "plain" else (("backward", "recompute"),)
    case = Case(lead=(129,), hidden_size=64, vocab_size=1025, dtype=torch.bfloat16, chunk_rows=64, backend="triton")
    case = Case(**{**vars(case), "options": options})
    judge(case, [run_on(torch.device("cuda", 1), case)])
    assert torch.cuda.current_device() == 0


ROW_KERNELS = (
    "_row_stats_kernel",
    "_row_grad_kernel",
    "_row_stats_grad_kernel",
    "_combine_kernel",
    "_token_shares_kernel",
    "_loss_sum_kernel",
    "_scale_kernel",
)
MAX_VARIANTS = 6
SPEC = RowSpec(softcap=None, uniform=False, argmax=False, entropy=False, token_scaling=False)


def test_few_compiled_variants_over_many_shapes(device: torch.device) -> None:
    """With dtype and flags fixed. A shape that compiles again costs its user a second."""
    from flce_dist.kernels import launch, triton_rows

    launch._variants.clear()
    kernels = {name: getattr(triton_rows, name) for name in ROW_KERNELS}
    for kernel in kernels.values():
        kernel.device_caches.clear()
    for tokens in (1, 2, 16, 17, 128, 200, 513):
        for vocab_size in (1, 2, 15, 16, 17, 127, 500, 512, 513, 1000, 1024, 4096, 4097, 8192, 10007, 32000, 50257):
            hidden = torch.randn(tokens, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.randn(vocab_size, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
            target = torch.randint(vocab_size, (tokens,), device=device)
            for options in ({}, {"chunk_rows": 33}, {"backward": "recompute"}):
                linear_cross_entropy(hidden, weight, target, **options).backward()
        for num_ranks in (2, 3, 8):
            gathered = torch.zeros(num_ranks, SPEC.num_stats, tokens, device=device)
            triton_rows.combine(gathered, gathered.new_empty(SPEC.num_stats, tokens), SPEC)
    counts = {name: sum(len(caches[0]) for caches in kernel.device_caches.values()) for name, kernel in kernels.items()}
    assert max(counts.values()) <= MAX_VARIANTS, counts
    assert min(counts.values()) > 0, f"one was never launched: {counts}"


# Names of NVIDIA's GEMM kernels: cuBLAS (nvjet for Hopper and later, xmma and cutlass before), and what it does with
# one or few rows. In nvjet's names the letters give the types: t is bfloat16, s float32, h float16.
GEMM = re.compile(r"nvjet|gemm|gemv|splitK|cutlass|dot_kernel", re.IGNORECASE)
FLOAT32_OPERANDS = re.compile(r"sgemm|simt|ffma|nvjet(_sm\d+)?_s[a-z]s_|gemm_f32f32", re.IGNORECASE)
INDEXING = re.compile(r"nonzero|index_kernel|index_elementwise|indexSelect|gather|scatter|masked_|DeviceSelect")


@pytest.mark.parametrize("vocab_size", [16032, 128256])
@pytest.mark.parametrize("tokens", [1, 16, 128, 1024])
def test_b43_kernels_of_small_batches(device: torch.device, tokens: int, vocab_size: int) -> None:
    """All products take bfloat16 operands; nothing indexes. Up to 128 tokens make one chunk, so three products."""
    hidden = torch.randn(tokens, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocab_size, (tokens,), device=device)

    def run() -> None:
        hidden.grad = weight.grad = None
        linear_cross_entropy(hidden, weight, target).backward()

    names = kernel_names(run)
    gemms = [name for name in names if GEMM.search(name)]
    assert len(gemms) >= 3, f"fewer than three products among {names}"
    assert not [name for name in gemms if FLOAT32_OPERANDS.search(name)], gemms
    assert not [name for name in names if INDEXING.search(name)], names
    rows = [name for name in names if "row_stats_grad" in name]
    assert len(rows) == 1, f"more than one chunk: {rows}"
