"""Two GPUs over NCCL: values, bits, synchronisation, CUDA graph."""

from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from flce_dist.buffers import row_stride
from tests.gpu.support import (
    DevicePool,
    capture,
    device_arguments,
    extra_peak,
    no_host_synchronisation,
    run_on,
)
from tests.kit import compare
from tests.kit.cases import Case, Result, judge
from tests.kit.workers import Context

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"lead": (201,), "hidden_size": 64, "vocab_size": 1025, "world": 2, "backend": "triton"}
CASES: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"split": "uneven", "bias": True},
    "empty": {"split": "empty"},
    "padded": {"split": "padded", "bias": True},
    "sum": {"reduction": "sum", "chunk_rows": 50},
    "none": {"reduction": "none", "chunk_rows": 50, "token_weight": True},
    "recompute": {"options": (("backward", "recompute"),), "chunk_rows": 50},
    "features": {
        "split": "uneven",
        "class_weight": True,
        "options": (("label_smoothing", 0.1), ("z_loss", 1e-3), ("softcap", 8.0), ("logit_scale", 0.7)),
    },
    "token-scaling": {"options": (("token_scaling", True),)},
    "skip-ignored": {"options": (("skip_ignored", True),)},
    "all-ignored": {"ignored": "all"},
    "no-tokens": {"lead": (0,)},
    "tokens-even": {"lead": (200,), "tokens": (100, 100), "chunk_rows": 64},
    "tokens-uneven": {"tokens": (130, 71), "chunk_rows": 64, "bias": True},
    "tokens-one-empty": {"tokens": (201, 0), "split": "uneven"},
    "tokens-none": {"tokens": (130, 71), "reduction": "none", "chunk_rows": 64},
}
FLOAT32_STEPS: tuple[tuple[str, Any], ...] = (
    ("accum_dtype", torch.float32),
    ("logits_dtype", torch.float32),
    ("hidden_grad_reduce_dtype", torch.float32),
)


def _run(ctx: Context, case: Case) -> Result:
    return run_on(ctx.device, case, ctx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(two_gpus: DevicePool, name: str, dtype: torch.dtype) -> None:
    """`judge` also demands the same bits of the loss, and of the gradient of replicated hidden states, on both."""
    case = Case(**(SIZES | CASES[name] | {"dtype": dtype}))
    judge(case, two_gpus.run(2, _run, case))


@pytest.mark.parametrize("tokens", [None, (130, 71)], ids=["replicated", "sharded"])
def test_float32_intermediates_of_16_bit_tensors(two_gpus: DevicePool, tokens: tuple[int, int] | None) -> None:
    case = Case(**SIZES, dtype=torch.bfloat16, options=FLOAT32_STEPS, tokens=tokens, chunk_rows=64)
    judge(case, two_gpus.run(2, _run, case))


def _each_token_once(ctx: Context, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(vocab_size, 8, generator=generator).to(ctx.device) for _ in range(2))
    rows = -(-vocab_size // 2)
    local = weight[ctx.rank * rows : (ctx.rank + 1) * rows].contiguous()
    target = torch.arange(vocab_size, device=hidden.device)
    return linear_cross_entropy(
        hidden, local, target, group=ctx.group, vocab_size=vocab_size, reduction="none", backend="triton"
    ).cpu()  # type: ignore[union-attr]


@pytest.mark.parametrize("vocab_size", [1000, 1026, 1001])
def test_b12_every_token_is_a_target_once(two_gpus: DevicePool, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(vocab_size, 8, generator=generator).double() for _ in range(2))
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, torch.arange(vocab_size), reduction="none")
    for loss in two_gpus.run(2, _each_token_once, vocab_size):
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


def _repeat(ctx: Context, case: Case, times: int) -> list[tuple[torch.Tensor, ...]]:
    results = [run_on(ctx.device, case, ctx) for _ in range(times)]
    return [(r.loss, r.hidden_grad, r.weight_grad) for r in results]  # type: ignore[misc]


@pytest.mark.parametrize("options", [(), FLOAT32_STEPS], ids=["bf16", "fp32"])
def test_repeated_runs_are_bitwise_equal(two_gpus: DevicePool, options: tuple[tuple[str, Any], ...]) -> None:
    case = Case(**(SIZES | {"vocab_size": 9001}), dtype=torch.bfloat16, options=options, chunk_rows=50)
    for results in two_gpus.run(2, _repeat, case, 6):
        for later in results[1:]:
            for name, a, b in zip(("loss", "hidden gradient", "weight gradient"), results[0], later, strict=True):
                compare.assert_same_bits([a, b], name)


def _without_synchronisation(ctx: Context, case: Case) -> None:
    (hidden, weight, target), keywords = device_arguments(case, ctx.device, ctx)

    def step() -> None:
        loss = linear_cross_entropy(hidden, weight, target, **keywords)
        loss.sum().backward()  # type: ignore[union-attr]

    step()
    with no_host_synchronisation():
        step()


@pytest.mark.parametrize("name", ["even", "uneven", "none", "recompute", "features"])
def test_no_host_synchronisation(two_gpus: DevicePool, name: str) -> None:
    case = Case(**(SIZES | CASES[name] | {"dtype": torch.bfloat16}))
    two_gpus.run(2, _without_synchronisation, case)


def test_no_host_synchronisation_with_sharded_tokens_of_known_length(two_gpus: DevicePool) -> None:
    two_gpus.run(2, _sharded_tokens_without_synchronisation)


def _sharded_tokens_without_synchronisation(ctx: Context) -> None:
    case = Case(**SIZES, dtype=torch.bfloat16, tokens=(130, 71), chunk_rows=64)
    (hidden, weight, target), keywords = device_arguments(case, ctx.device, ctx)
    keywords["max_tokens"] = 130

    def step() -> None:
        linear_cross_entropy(hidden, weight, target, **keywords).backward()  # type: ignore[union-attr]

    step()
    with no_host_synchronisation():
        step()


def _graph(ctx: Context, first: Case, later: Case) -> Result:
    """The first case captured, then replayed with the later case's data."""
    device = ctx.device
    (hidden, weight, target), keywords = device_arguments(first, device, ctx)
    (new_hidden, new_weight, new_target), _ = device_arguments(later, device, ctx)
    kept: list[torch.Tensor] = []

    def step() -> None:
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, target, **keywords)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        kept[:] = [loss.detach()]

    graph = capture(step)
    with torch.no_grad():
        for static, new in ((hidden, new_hidden), (weight, new_weight), (target, new_target)):
            static.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert hidden.grad is not None
    assert weight.grad is not None
    result = Result(kept[0].cpu(), hidden.grad.cpu(), weight.grad.cpu(), None, {})
    # Memory of a graph with collectives is released before the group is.
    del graph
    return result


@pytest.mark.parametrize("tokens", [None, (100, 100)], ids=["replicated", "sharded"])
def test_a_captured_step_is_replayed_with_new_data(two_gpus: DevicePool, tokens: tuple[int, int] | None) -> None:
    sizes: dict[str, Any] = SIZES | {"lead": (200,), "dtype": torch.bfloat16, "chunk_rows": 64, "tokens": tokens}
    options: tuple[tuple[str, Any], ...] = () if tokens is None else (("max_tokens", 100),)
    first, later = Case(**sizes, seed=3, options=options), Case(**sizes, seed=4, options=options)
    results = two_gpus.run(2, _graph, first, later)
    compare.assert_same_bits([r.loss for r in results], "loss over the ranks")
    from tests.kit.cases import reference_of

    expected = reference_of(later)
    # The graph's upstream gradient is 1, the kit's is not.
    from tests.kit.cases import make_inputs

    upstream = make_inputs(later).upstream
    compare.assert_loss(results[0].loss, expected.loss, 2e-3)
    hidden = results[0].hidden_grad
    if tokens is not None:
        hidden = torch.cat([r.hidden_grad for r in results])  # type: ignore[misc]
    compare.assert_close(hidden, expected.hidden_grad / upstream, 1e-2, "hidden gradient")
    weight = torch.cat([r.weight_grad for r in results])  # type: ignore[misc]
    compare.assert_close(weight, expected.weight_grad / upstream, 1e-2, "weight gradient")


def _extra_peak(ctx: Context, token_sharded: bool) -> tuple[int, int]:
    """Bytes of a step above its inputs, and of the buffers that docs/performance.md names."""
    num_tokens, hidden_size, vocab_size, chunk = 4096, 2048, 128256, 1024
    columns = vocab_size // 2
    own_tokens = num_tokens // 2 if token_sharded else num_tokens
    torch.manual_seed(0)  # replicated tokens are the same on both
    hidden = torch.randn(own_tokens, hidden_size, device=ctx.device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocab_size, (own_tokens,), device=ctx.device)
    weight = torch.randn(columns, hidden_size, device=ctx.device, dtype=torch.bfloat16, requires_grad=True)
    options: dict[str, Any] = {"hidden_layout": "sharded", "max_tokens": own_tokens} if token_sharded else {}

    def step() -> None:
        linear_cross_entropy(
            hidden, weight, target, group=ctx.group, vocab_size=vocab_size, chunk_rows=chunk,
            accum_dtype=torch.bfloat16, check_ranks="never", **options,
        ).backward()  # type: ignore[union-attr]  # fmt: skip

    named = 2 * (own_tokens * hidden_size + columns * hidden_size + chunk * row_stride(columns))
    named += 4 * chunk * hidden_size  # the part of dX that is summed, in float32
    if token_sharded:
        named += 2 * chunk * hidden_size + 4 * chunk // 2 * hidden_size  # the gathered chunk, and this rank's sum
    return extra_peak(step, hidden, weight), named


@pytest.mark.parametrize("token_sharded", [False, True])
def test_extra_peak_is_the_sum_of_the_named_buffers(two_gpus: DevicePool, token_sharded: bool) -> None:
    for extra, named in two_gpus.run(2, _extra_peak, token_sharded):
        per_token = 4096 * 400 + 2**17
        assert extra <= 1.02 * named + per_token, f"{extra / 2**20:.1f} MiB, the buffers are {named / 2**20:.1f} MiB"
