"""Values at the edge: -inf and nan logits, weights of 0, scales of 0 and below, one-word vocabularies."""

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.two_tensor import TwoTensor

from flce_dist import VocabShard, linear_cross_entropy
from tests.kit import compare, oracle
from tests.kit.cases import Case, Result, judge, loss_arguments, make_inputs, reference_of, run_case
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import assert_all_raise

BACKENDS = ["torch", "triton"]
CUTS = {1: [0, 12], 2: [0, 5, 12], 3: [0, 4, 8, 12]}


def _with_bias(ctx: Context, bias: Tensor, keywords: dict[str, Any], poison: str | None = None) -> tuple[Any, ...]:
    full = make_inputs(Case(lead=(6,), vocab_size=12, ignored="none"))
    start, stop = CUTS[ctx.world][ctx.rank], CUTS[ctx.world][ctx.rank + 1]
    if poison == "hidden":
        full.hidden[2, 1] = math.nan
    elif poison == "weight":
        full.weight[7, 0] = math.nan
    hidden = full.hidden.requires_grad_()
    weight, local_bias = full.weight[start:stop].clone().requires_grad_(), bias[start:stop].clone().requires_grad_()
    loss = linear_cross_entropy(
        hidden,
        weight,
        full.target.clamp(max=3),
        bias=local_bias,
        group=ctx.group,
        vocab_shard=VocabShard(12, start, stop),
        **keywords,
    )
    loss.sum().backward()
    return loss.detach(), hidden.grad, weight.grad, local_bias.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("masked", [[5], [4, 5, 6, 7], [8, 9, 10, 11], list(range(4, 12))], ids=str)
def test_columns_switched_off_by_a_bias_of_minus_infinity(
    masked: list[int], world: int, backend: str, pool_for: Any
) -> None:
    """Also all columns of a shard: max -inf and sum 0 there, and never nan."""
    bias = torch.linspace(-1, 1, 12)
    bias[masked] = -math.inf
    full = make_inputs(Case(lead=(6,), vocab_size=12, ignored="none"))
    expected = oracle.reference(full.hidden, full.weight, full.target.clamp(max=3), bias=bias)
    results = pool_for(backend).run(world, _with_bias, bias, {"backend": backend})
    assert expected.bias_grad is not None
    for rank, (loss, hidden_grad, weight_grad, bias_grad) in enumerate(results):
        at = slice(CUTS[world][rank], CUTS[world][rank + 1])
        compare.assert_loss(loss, expected.loss, 1e-5)
        compare.assert_close(hidden_grad, expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(weight_grad, expected.weight_grad[at], 2e-5, "weight gradient")
        compare.assert_close(bias_grad, expected.bias_grad[at], 2e-5, "bias gradient")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("poison", ["hidden", "weight"])
def test_nan_is_reported_and_stays_where_it_is(poison: str, world: int, backend: str, pool_for: Any) -> None:
    """A nan of one token is that token's loss; one of the weight is everybody's; on all ranks, and no error or hang."""
    keywords = {"reduction": "none", "backend": backend}
    for loss, *_ in pool_for(backend).run(world, _with_bias, torch.zeros(12), keywords, poison):
        bad = torch.isnan(loss)
        assert bad.tolist() == ([i == 2 for i in range(6)] if poison == "hidden" else [True] * 6)


def _nan_predictions(ctx: Context, backend: str, bad: list[int]) -> list[int]:
    full = make_inputs(Case(lead=(6,), vocab_size=12))
    shard = VocabShard.even(12, ctx.rank, ctx.world)
    weight = full.weight.clone()
    weight[bad] = math.nan
    output = linear_cross_entropy(
        full.hidden, weight[shard.start : shard.stop], full.target, group=ctx.group, vocab_shard=shard, backend=backend,
        aux=("predictions",),
    )  # fmt: skip
    return list(output.predictions.tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("bad", [[7], list(range(6, 12)), list(range(12))], ids=str)
def test_predictions_of_nan_logits_are_ids(bad: list[int], world: int, backend: str, pool_for: Any) -> None:
    for predictions in pool_for(backend).run(world, _nan_predictions, backend, bad):
        assert all(0 <= id < 12 for id in predictions), predictions


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_an_impossible_target_has_infinite_loss(world: int, backend: str, pool_for: Any) -> None:
    bias = torch.zeros(12)
    bias[:4] = -math.inf
    keywords = {"reduction": "none", "backend": backend}
    for loss, *_ in pool_for(backend).run(world, _with_bias, bias, keywords):
        assert (loss == math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_the_entropy_of_a_row_whose_target_is_impossible(world: int, backend: str, pool_for: Any) -> None:
    """The target's term is 0 and not 0 times infinity."""
    full = make_inputs(Case(lead=(6,), vocab_size=12, ignored="none"))
    log_prob = (full.hidden.double() @ full.weight[4:].double().T).log_softmax(-1)
    expected = -(log_prob.exp() * log_prob).sum(-1)
    for entropy in pool_for(backend).run(world, _entropy_without_the_first_columns, backend):
        compare.assert_close(entropy, expected, 1e-5, "entropy")


def _entropy_without_the_first_columns(ctx: Context, backend: str) -> Tensor:
    full = make_inputs(Case(lead=(6,), vocab_size=12, ignored="none"))
    start, stop = CUTS[ctx.world][ctx.rank], CUTS[ctx.world][ctx.rank + 1]
    bias = torch.zeros(12)
    bias[:4] = -math.inf
    return linear_cross_entropy(
        full.hidden, full.weight[start:stop], full.target.clamp(max=3), bias=bias[start:stop], group=ctx.group,
        vocab_shard=VocabShard(12, start, stop), aux=("entropy",), backend=backend,
    ).entropy  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("target", [2**31, 2**32 + 3, 3 - 2**32, 2**40 + 3, 2**63 - 1, -(2**63)])
def test_ids_beyond_32_bits_are_outside_the_vocabulary(target: int, world: int, backend: str, pool_for: Any) -> None:
    """Whatever columns their lower bits would be."""
    assert_all_raise(
        pool_for(backend).outcomes(world, _wide_id, target, backend), "IndexError", f"target {target} of token 1 "
    )


def _wide_id(ctx: Context, target: int, backend: str) -> None:
    shard = VocabShard.even(12, ctx.rank, ctx.world)
    linear_cross_entropy(
        torch.ones(3, 4), torch.ones(shard.num_rows, 4), torch.tensor([0, target, 1]), group=ctx.group,
        vocab_shard=shard, backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("scale", [0.0, -1.0, -0.25, 100.0])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("world", [1, 2])
def test_unusual_logit_scales(scale: float, softcap: float | None, world: int, workers: Pool) -> None:
    case = Case(world=world, bias=True, options=(("logit_scale", scale), ("softcap", softcap), ("z_loss", 1e-3)))
    judge(case, workers.run(world, run_case, case), conditioned=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_weight_0(reduction: str, backend: str, pool_for: Any) -> None:
    """In the divisor, with loss 0 and gradient exactly 0."""
    loss, grad, weight_grad = pool_for(backend).run(1, _some_weights_0, reduction, backend)[0]
    full = make_inputs(Case(ignored="none", reduction=reduction))
    weights = (torch.arange(13) % 2).float()
    expected = oracle.reference(
        full.hidden, full.weight, full.target, token_weight=weights, reduction=reduction, z_loss=1e-2
    )
    compare.assert_loss(loss, expected.loss, 1e-5)
    compare.assert_exactly_zero(grad[::2], "gradient of tokens of weight 0")
    if reduction != "none":
        compare.assert_close(grad, expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(weight_grad, expected.weight_grad, 1e-5, "weight gradient")


def _some_weights_0(_: Context, reduction: str, backend: str) -> tuple[Any, ...]:
    full = make_inputs(Case(ignored="none", reduction=reduction))
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
    weights = (torch.arange(13) % 2).float()
    loss = linear_cross_entropy(
        hidden, weight, full.target, token_weight=weights, reduction=reduction, z_loss=1e-2, backend=backend
    )
    loss.sum().backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("world", [1, 2])
def test_classes_of_weight_0(smoothing: float, world: int, workers: Pool) -> None:
    """Targets of weight 0 leave the divisor, as in F.cross_entropy."""
    for loss, grad, expected, expected_grad in workers.run(world, _some_classes_0, smoothing):
        compare.assert_loss(loss, expected, 1e-5)
        compare.assert_close(grad, expected_grad, 1e-5, "hidden gradient")


def _some_classes_0(ctx: Context, smoothing: float) -> tuple[Any, ...]:
    full = make_inputs(Case(ignored="none", vocab_size=20))
    class_weight = (torch.arange(20) % 3).float()
    rows = 20 // ctx.world
    hidden = full.hidden.clone().requires_grad_()
    loss = linear_cross_entropy(
        hidden,
        full.weight[ctx.rank * rows : (ctx.rank + 1) * rows],
        full.target,
        class_weight=class_weight,
        label_smoothing=smoothing,
        group=ctx.group,
        vocab_size=20,
    )
    loss.backward()
    double = full.hidden.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        double @ full.weight.double().T, full.target, class_weight.double(), label_smoothing=smoothing
    )
    expected.backward()
    return loss.detach(), hidden.grad, expected.detach(), double.grad


def test_only_targets_of_weight_0_give_0_and_not_nan() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    loss = linear_cross_entropy(
        hidden, torch.randn(5, 4), torch.tensor([1, 1, 1]), class_weight=torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    )
    loss.backward()
    compare.assert_exactly_zero(loss, "loss")
    compare.assert_exactly_zero(hidden.grad, "hidden gradient")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("options", [(), (("z_loss", 0.1),), (("softcap", 1.0), ("z_loss", 0.1))], ids=str)
def test_vocabulary_of_one(world: int, options: Any, workers: Pool) -> None:
    case = Case(vocab_size=1, world=world, reduction="none", options=options)
    results = workers.run(world, run_case, case)
    judge(case, results)
    if not options:
        for result in results:
            compare.assert_exactly_zero(result.loss, "loss")


def test_hidden_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden"):
        linear_cross_entropy(torch.empty(4, 0), torch.empty(5, 0), torch.tensor([0, 4, -100, 2]))


def test_predictions_of_a_vocabulary_beyond_exact_float32_ids_are_refused() -> None:
    """The loss itself of such a vocabulary is right."""
    vocab_size = 2**24 + 3
    bias = torch.zeros(vocab_size)
    bias[-2] = 1.0
    arguments = (torch.zeros(1, 1), torch.zeros(vocab_size, 1), torch.tensor([0]))
    for name in ("predictions", "accuracy"):
        with pytest.raises(ValueError, match="aux predictions need vocab_size <= 16777216, got 16777219"):
            linear_cross_entropy(*arguments, bias=bias, aux=(name,))
    assert linear_cross_entropy(*arguments, bias=bias).item() == pytest.approx(math.log(vocab_size), rel=1e-5)


def test_low_rank_adapter_on_the_body() -> None:
    """A frozen body and head, and a trained adapter between them."""
    full = make_inputs(Case())
    down, up = torch.randn(2, 8) * 0.3, torch.randn(8, 2) * 0.3
    ours = [t.clone().requires_grad_() for t in (down, up)]
    theirs = [t.double().requires_grad_() for t in (down, up)]
    linear_cross_entropy(full.hidden + full.hidden @ ours[0].T @ ours[1].T, full.weight, full.target).backward()
    hidden = full.hidden.double()
    logits = (hidden + hidden @ theirs[0].T @ theirs[1].T) @ full.weight.double().T
    torch.nn.functional.cross_entropy(logits, full.target).backward()
    for a, b in zip(ours, theirs, strict=True):
        compare.assert_close(a.grad, b.grad, 1e-5, "adapter gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("gap", [2.0, 6.0, 8.0])
def test_the_gradient_of_a_confident_target_is_rounded_once(dtype: torch.dtype, reduction: str, gap: float) -> None:
    """p - 1 of a p near 1 is lost when p is rounded to 16 bits before the 1 is taken off."""
    logits = torch.zeros(3, 16, dtype=dtype)
    logits[torch.arange(3), torch.tensor([0, 7, 15])] = gap
    hidden = logits.clone().requires_grad_()
    target = torch.tensor([0, 7, 15])
    linear_cross_entropy(hidden, torch.eye(16, dtype=dtype), target, reduction=reduction).sum().backward()
    exact = logits.double().softmax(-1) - torch.nn.functional.one_hot(target, 16)
    assert hidden.grad is not None
    # fp16's numbers end at 6e-8, which is seen in absolute terms only.
    torch.testing.assert_close(hidden.grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=2.0**-24)


SETTINGS: dict[str, Any] = {
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "default 16-bit dtype": (torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device": (torch.set_default_device, "meta", None),
    "deterministic algorithms": (torch.use_deterministic_algorithms, True, False),
    "anomaly detection": (torch.autograd.set_detect_anomaly, True, False),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_settings_of_the_process_do_not_reach_in(name: str, reduction: str) -> None:
    options = (("label_smoothing", 0.1), ("z_loss", 1e-2))
    case = Case(
        reduction=reduction, bias=True, token_weight=True, chunk_rows=4, options=options, aux=("lse", "entropy")
    )
    full = make_inputs(case)
    hidden, weight, bias = (t.requires_grad_() for t in (full.hidden, full.weight, full.bias) if t is not None)
    change, value, before = SETTINGS[name]
    change(value)
    try:
        output = linear_cross_entropy(
            hidden, weight, full.target, bias=bias, token_weight=full.token_weight, reduction=reduction, chunk_rows=4,
            aux=case.aux, **dict(options),
        )  # fmt: skip
        output.loss.backward(full.upstream)
    finally:
        change(before)
    aux = {field: getattr(output, field) for field in case.aux}
    judge(case, [Result(output.loss.detach(), hidden.grad, weight.grad, bias.grad, aux)])


def test_hooks_on_loss_and_inputs() -> None:
    """Of a tensor, of a leaf whose gradient is complete, and of saved tensors that live elsewhere until backward."""
    case = Case()
    full = make_inputs(case)
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
    complete: list[Tensor] = []
    hidden.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(complete.append)
    with torch.autograd.graph.save_on_cpu():
        loss = linear_cross_entropy(hidden, weight, full.target, backward="recompute")
    loss.register_hook(lambda grad: grad * 3)
    loss.backward(full.upstream)
    expected = reference_of(case)
    compare.assert_close(hidden.grad, 6 * expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(weight.grad, 3 * expected.weight_grad, 1e-5, "weight gradient")
    assert len(complete) == 1
    assert complete[0] is weight


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_infinite_upstream_gradient_of_an_ignored_token(
    backend: str, smoothing: float, request: pytest.FixtureRequest
) -> None:
    """Its loss is 0, where a root has no finite derivative; the other tokens' gradients are not touched."""
    pool: Pool = request.getfixturevalue("workers" if backend == "torch" else "interpreted_workers")
    (answer, expected), *_ = pool.run(1, _root_of_losses, backend, smoothing)
    for name, actual, wanted in zip(("hidden", "weight"), answer, expected, strict=True):
        compare.assert_close(actual, wanted, 1e-5, f"{name} gradient")


def _root_of_losses(ctx: Context, backend: str, smoothing: float) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (6, 21))
    target = torch.tensor([3, -100, 20, 0, -100, 7])
    losses = linear_cross_entropy(
        hidden,
        weight,
        target,
        reduction="none",
        backend=backend,
        label_smoothing=smoothing,  # type: ignore[arg-type]
    )
    answer = torch.autograd.grad(losses.sqrt().sum(), (hidden, weight))
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    reference = torch.nn.functional.cross_entropy(
        exact[0] @ exact[1].T, target, reduction="none", label_smoothing=smoothing
    )
    return answer, torch.autograd.grad(reference[target >= 0].sqrt().sum(), exact)


@pytest.mark.parametrize("name", ["token_weight", "class_weight"])
def test_weights_that_only_ignored_tokens_have_may_be_anything(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (4, 5))
    target = torch.tensor([-100, 2, 4, -100])
    tame, wild = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0]), torch.tensor([math.nan, 2.0, 0.5, math.inf, 3.0])
    size = 4 if name == "token_weight" else 5
    results = []
    for values in (tame, wild):
        keywords: dict[str, Any] = {name: values[:size]}
        loss = linear_cross_entropy(hidden, weight, target, **keywords)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for actual, wanted in zip(results[1], results[0], strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"backward": "recompute"}, {"label_smoothing": 0.1, "bias": True}], ids=str)
def test_the_meta_device_gives_shapes_and_dtypes(reduction: str, options: dict[str, Any]) -> None:
    """As torch's own losses do, without data and without Triton."""
    kinds: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    hidden, weight, bias = (torch.empty(*shape, **kinds) for shape in ((2, 3, 8), (21, 8), (21,)))
    keywords = {**options, "bias": bias} if "bias" in options else options
    target = torch.empty(2, 3, dtype=torch.int64, device="meta")
    output = linear_cross_entropy(hidden, weight, target, reduction=reduction, aux=("lse", "num_valid"), **keywords)
    output.loss.sum().backward()
    assert output.loss.shape == ((2, 3) if reduction == "none" else ())
    assert (output.loss.dtype, output.loss.device.type) == (torch.float32, "meta")
    assert (output.lse.shape, output.num_valid.dtype) == ((2, 3), torch.int64)
    for leaf in (hidden, weight, *([bias] if "bias" in options else [])):
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"logits_dtype": torch.float32}], ids=str)
def test_fake_tensors_give_shapes_and_the_memory_of_a_step(options: dict[str, Any]) -> None:
    """What a framework plans memory with: chunk buffers and gradients count as in a step that is computed."""

    def peak(mode: contextlib.AbstractContextManager[Any]) -> int:
        with mode, MemTracker() as tracker:
            hidden, weight = (torch.randn(n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (64, 301))
            target = torch.randint(301, (64,))
            output = linear_cross_entropy(hidden, weight, target, chunk_rows=16, aux=("lse", "accuracy"), **options)
            output.loss.sum().backward()
            assert output.loss.shape == (target.shape if "reduction" in options else ())
            for leaf in (hidden, weight):
                assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)
        return sum(tracker.get_tracker_snapshot("peak")[torch.device("cpu")].values())

    assert peak(FakeTensorMode()) == peak(contextlib.nullcontext()) > 0


GATHERED = Case(world=2, class_weight=True, token_weight=True, options=(("label_smoothing", 0.1),))


def _gathered(ctx: Context, backend: str) -> Result:
    (hidden, weight, target), keywords = loss_arguments(replace(GATHERED, backend=backend), ctx.rank, ctx.group)
    whole = keywords | {"target": target}
    for name in ("target", "token_weight", "class_weight"):
        # A functional collective's result, which nothing has waited for yet.
        whole[name] = all_reduce(whole[name] if ctx.rank == 0 else whole[name] * 0, "sum", ctx.group)
        assert isinstance(whole[name], AsyncCollectiveTensor)
    loss = linear_cross_entropy(hidden, weight, **whole)
    loss.backward(make_inputs(GATHERED).upstream)  # type: ignore[union-attr]
    return Result(loss.detach(), hidden.grad, weight.grad, None, {})  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_of_functional_collectives_are_awaited(backend: str, pool_for: Any) -> None:
    judge(GATHERED, pool_for(backend).run(2, _gathered, backend))


def _wrapped(_: Context, name: str) -> None:
    full = make_inputs(replace(GATHERED, world=1))
    given = {key: value for key, value in vars(full).items() if key != "upstream"} | {"label_smoothing": 0.1}
    given[name] = TwoTensor(given[name], given[name])
    linear_cross_entropy(**given, backend="triton")


@pytest.mark.parametrize("name", ["target", "token_weight", "class_weight"])
def test_wrappers_without_memory_do_not_reach_a_triton_kernel(name: str, pool_for: Any) -> None:
    words = f"{name} is a TwoTensor", "pass the plain tensor", 'backend="torch"'
    assert_all_raise(pool_for("triton").outcomes(1, _wrapped, name), "TypeError", *words)
