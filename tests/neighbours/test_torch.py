"""PyTorch's cases of `cross_entropy`, `CrossEntropyLoss`, `linear_cross_entropy` and `LinearCrossEntropyLoss`."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flce_dist import LinearCrossEntropyLoss, linear_cross_entropy
from tests.kit.workers import Pool
from tests.neighbours.support import Inputs, close, compare, ids, normal, plain, run, run_on

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
REDUCTIONS = ["mean", "sum", "none"]
# torch's own defaults, and the widest that its OpInfo grants the 16-bit types.
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {},
    torch.float32: {},
    torch.float16: {"atol": 5e-3, "rtol": 5e-3},
    torch.bfloat16: {"atol": 4e-3, "rtol": 2e-2},
}


def through_identity(logits: Tensor, target: Tensor) -> Inputs:
    """Logits with the classes in dimension 1, as torch takes them, as hidden states of an identity weight."""
    hidden = logits if logits.ndim == 1 else logits.movedim(1, -1)
    return Inputs(hidden, torch.eye(hidden.shape[-1], dtype=logits.dtype), target)


def logits_grad(inputs: Inputs, upstream: Tensor, keywords: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`F.cross_entropy` of the logits in their layout: the loss and the gradient, the classes moved last."""
    logits = inputs.hidden if inputs.hidden.ndim == 1 else inputs.hidden.movedim(-1, 1)
    logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    loss = F.cross_entropy(logits, inputs.target, **in_dtype(keywords, logits.dtype))
    loss.backward(upstream.to(loss.dtype).expand(loss.shape))
    assert logits.grad is not None
    return loss.detach(), logits.grad if logits.ndim == 1 else logits.grad.movedim(1, -1)


def in_dtype(keywords: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in keywords.items()}


def ours_of(keywords: dict[str, Any]) -> dict[str, Any]:
    """torch's `weight` is our `class_weight`; its `ignore_index=None` means that nothing was passed."""
    return {
        {"weight": "class_weight"}.get(name, name): value
        for name, value in keywords.items()
        if name != "ignore_index" or value is not None
    }


SHAPES = [(2, 3), (2, 3, 5), (2, 3, 5, 5), (2, 3, 5, 5, 2, 2), (3,), (2, 3, 1), (2, 3, 1, 2), (2, 3, 1, 2, 3)]
KEYWORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weight": torch.tensor([0.4, 1.5, 0.9])},
    "ignore_index": {"ignore_index": 1},
    "label_smoothing": {"label_smoothing": 0.15},
    "ignore_index_label_smoothing": {"ignore_index": 1, "label_smoothing": 0.15},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All reductions and keywords of the module's and the function's samples."""
    lead = shape[:1] + shape[2:] if len(shape) > 1 else ()
    for reduction, (name, given) in itertools.product(REDUCTIONS, KEYWORDS.items()):
        keywords = in_dtype(given, dtype)
        logits, target = normal(shape, dtype, 1), ids(3, lead, 2)
        if target.ndim and (target == 1).all():
            target.view(-1)[0] = 0
        elif not target.ndim and name.startswith("ignore"):
            target = torch.tensor(2)
        inputs = through_identity(logits, target)
        upstream = normal(lead if reduction == "none" else (), torch.float32, 3)
        expected, grad = logits_grad(inputs, upstream, keywords | {"reduction": reduction})
        got = run(None, inputs, upstream, reduction=reduction, **ours_of(keywords))
        close(got.loss, expected, TOLERANCE[dtype], f"loss, {name}, {reduction}")
        close(got.hidden, grad, TOLERANCE[dtype], f"gradient, {name}, {reduction}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(8, 5, 4), (None, 8, 4)], ids=str)
@pytest.mark.parametrize("chunk_rows", [None, 2, 3])
def test_linear_cross_entropy(sizes: tuple[int | None, int, int], dtype: torch.dtype, chunk_rows: int | None) -> None:
    """Reductions x ignored ids inside and outside of the vocabulary x smoothing x weights x bias; some targets ignored,
    and all of them."""
    num_tokens, hidden_size, vocab_size = sizes
    lead = () if num_tokens is None else (num_tokens,)
    class_weight = torch.exp(normal((vocab_size,), torch.float32, 4))
    choices = itertools.product(
        REDUCTIONS,
        [None, -100, 1, vocab_size + 5],
        [0.0, 0.1],
        [None, class_weight],
        [False, True],
        ["none", "some", "all"],
    )
    for reduction, ignore_index, smoothing, weights, bias, ignored in choices:
        target = ids(vocab_size, lead, 5)
        if ignore_index is None and ignored != "none":
            continue
        if ignored == "all":
            target = torch.full(lead, ignore_index)
        elif ignored == "some" and num_tokens is not None:
            target[num_tokens // 2] = ignore_index
            target[0] = 0
        inputs = Inputs(
            normal((*lead, hidden_size), dtype, 6),
            normal((vocab_size, hidden_size), dtype, 7),
            target,
            normal((vocab_size,), dtype, 8) if bias else None,
        )
        upstream = normal(lead if reduction == "none" else (), torch.float32, 9)
        keywords: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        keywords |= {} if weights is None else {"weight": weights.to(dtype)}
        keywords |= {} if ignore_index is None else {"ignore_index": ignore_index}
        got = run(None, inputs, upstream, chunk_rows=chunk_rows, **ours_of(keywords))
        nothing = ignore_index is not None and bool((target == ignore_index).all())
        if reduction == "mean" and nothing:
            # torch: nan.
            assert got.loss == 0
            assert all(grad is None or not grad.any() for grad in (got.hidden, got.weight, got.bias))
            continue
        wide = torch.promote_types(dtype, torch.float32)
        reference = plain(inputs, upstream, wide, **in_dtype({"ignore_index": -100} | keywords, wide))
        tolerance = TOLERANCE[dtype]
        close(got.loss, reference.loss, tolerance, "loss")
        for name in ("hidden", "weight", "bias"):
            grad, want = getattr(got, name), getattr(reference, name)
            if dtype in (torch.float16, torch.bfloat16) and want is not None:
                # A sum of terms of any size: rounding is seen beside the largest.
                tolerance = {"rtol": 0.0, "atol": TOLERANCE[dtype]["rtol"] * max(want.abs().amax().item(), 0.1)}
            close(grad, want, tolerance, f"{name} gradient")


def test_weights_of_more_than_two_dimensions_are_refused() -> None:
    """K-dimensional targets with a weight [C, d1, ..., dK, H] are torch's alone."""
    with pytest.raises(ValueError, match="target"):
        linear_cross_entropy(torch.randn(8, 5), torch.randn(4, 3, 2, 4, 5), torch.randint(4, (8, 3, 2, 4)))
    with pytest.raises(ValueError, match="weight"):
        linear_cross_entropy(torch.randn(8, 5), torch.randn(4, 3, 2, 4, 5), torch.randint(4, (8,)))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        # the same shape as the logits: torch takes the target for probabilities
        ({"target": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, "target"),
        ({"target": torch.rand(2, 3)}, (TypeError, ValueError), "target"),
        ({"target": torch.rand(2, 3), "ignore_index": 1}, (TypeError, ValueError), "target"),
        ({"target": torch.rand(2)}, TypeError, "float32"),
        ({"target": torch.tensor([0, 1, 2])}, ValueError, "3"),
        ({"class_weight": torch.rand(2)}, ValueError, "class_weight"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing"),
        ({"reduction": "invalid"}, ValueError, "reduction"),
        ({"chunk_rows": -5}, ValueError, "chunk_rows"),
        ({"hidden": torch.randn(2, 3, 3), "target": torch.zeros(2, 4, dtype=torch.int64)}, ValueError, "target"),
        ({"weight": torch.randn(3)}, ValueError, "weight"),
        ({"weight": torch.randn(3, 4)}, ValueError, "4"),
        ({"bias": torch.randn(2)}, ValueError, "bias"),
        ({"target": torch.tensor([0, 3])}, IndexError, "3"),
        ({"target": torch.tensor([0, -1])}, IndexError, "-1"),
    ],
)
def test_errors(arguments: dict[str, Any], error: Any, words: str) -> None:
    """Of the modules' and functions' error inputs, and of `test_nn.py`: out of bounds class indices."""
    given = {"hidden": torch.randn(2, 3), "weight": torch.randn(3, 3), "target": torch.tensor([0, 1]), **arguments}
    with pytest.raises(error, match=words):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_class_ids_are_their_one_hot_probabilities(
    reduction: str, weighted: bool, shape: tuple[int, ...], smoothing: float
) -> None:
    """torch with probabilities (smoothed by hand) and ours with ids; the weighted mean has another divisor there."""
    logits, target = normal(shape, torch.float32, 1), ids(3, shape[:1] + shape[2:], 2)
    weight = torch.tensor([0.3, 1.1, 0.6]) if weighted else None
    probabilities = F.one_hot(target, 3).movedim(-1, 1) * (1 - smoothing) + smoothing / 3
    expected = F.cross_entropy(logits, probabilities, weight=weight, reduction=reduction)
    if weighted and reduction == "mean":
        assert weight is not None
        expected = expected * target.numel() / weight[target].sum()
    got = run(
        None, through_identity(logits, target), reduction=reduction, label_smoothing=smoothing, class_weight=weight
    )
    close(got.loss, expected, {}, "loss")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 1.0]), torch.tensor([0.3, 0.6])], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.05])
def test_an_ignored_row_does_not_matter_whatever_it_holds(
    reduction: str, weight: Tensor | None, smoothing: float
) -> None:
    options = {"reduction": reduction, "label_smoothing": smoothing, "class_weight": weight}
    results = []
    for ignore_index in (-100, -2, 2):
        for first in ([0.3, 0.4], [0.3, 0.6]):
            inputs = through_identity(torch.tensor([first, [1.0, 2.0]]), torch.tensor([ignore_index, 1]))
            results.append(run(None, inputs, ignore_index=ignore_index, **options))
            assert results[-1].hidden is not None
            assert not results[-1].hidden[0].any()
    assert all(torch.equal(result.loss, results[0].loss) for result in results)


@pytest.mark.parametrize("weight", [torch.ones(3), torch.tensor([1.0, 2.0, 3.0])], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_unit_weights(weight: Tensor, reduction: str) -> None:
    inputs = through_identity(normal((5, 3), torch.float32, 1), ids(3, (5,), 2))
    unweighted = run(None, inputs, reduction=reduction)
    weighted = run(None, inputs, reduction=reduction, class_weight=weight)
    assert torch.equal(weighted.loss, unweighted.loss) == bool((weight == 1).all())


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
def test_empty_tensors(lead: tuple[int, ...]) -> None:
    """The sum is 0, `none` is empty, and the mean 0 where torch has nan."""
    for reduction in REDUCTIONS:
        inputs = Inputs(torch.randn(*lead, 4), torch.randn(3, 4), torch.zeros(lead, dtype=torch.int64))
        got = run(None, inputs, reduction=reduction)
        assert got.loss.shape == (lead if reduction == "none" else ())
        assert not got.loss.any()
        assert not got.weight.any()


def test_all_targets_ignored() -> None:
    inputs = Inputs(torch.randn(512, 16), torch.randn(128, 16), torch.full((512,), -1), torch.randn(128))
    for reduction in REDUCTIONS:
        got = run(None, inputs, reduction=reduction, ignore_index=-1)
        assert not got.loss.any()
        assert not got.bias.any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk_rows", [None, 2])
def test_gradcheck(reduction: str, chunk_rows: int | None) -> None:
    target = torch.tensor([3, 19, 0])

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction, chunk_rows=chunk_rows)

    leaves = [normal(shape, torch.float64, 1).requires_grad_() for shape in ((3, 5), (20, 5), (20,))]
    assert torch.autograd.gradcheck(loss, leaves)


def test_forward_mode_is_an_error() -> None:
    hidden, weight = torch.randn(3, 5), torch.randn(20, 5)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(lambda h: linear_cross_entropy(h, weight, torch.tensor([3, 19, 0])), (hidden,), (hidden,))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inputs_are_not_written_to_and_a_retained_graph_serves_twice(reduction: str) -> None:
    """`cow_input` and `allow_retain_graph` of the OpInfo."""
    hidden, weight, bias = (normal(s, torch.float32, 1).requires_grad_() for s in ((5, 4), (7, 4), (7,)))
    versions = [tensor._version for tensor in (hidden, weight, bias)]
    loss = linear_cross_entropy(hidden, weight, ids(7, (5,), 2), bias=bias, reduction=reduction)
    upstream = torch.rand_like(loss)
    first = torch.autograd.grad(loss, (hidden, weight, bias), upstream, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, (hidden, weight, bias), upstream)
    for one, other in zip(kept, second, strict=True):
        torch.testing.assert_close(one, other)
    assert versions == [tensor._version for tensor in (hidden, weight, bias)]


def test_the_module_is_the_function() -> None:
    inputs = Inputs(torch.randn(8, 5), torch.randn(4, 5), ids(4, (8,), 1))
    module = LinearCrossEntropyLoss(reduction="sum", label_smoothing=0.1)
    expected = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, reduction="sum", label_smoothing=0.1)
    assert torch.equal(module(inputs.hidden, inputs.weight, inputs.target), expected)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(8, 16), (8, 16, 12)], ids=str)
def test_dtensor_loss_parallel(
    world: int, reduction: str, weighted: bool, shape: tuple[int, ...], workers: Pool
) -> None:
    """`test_nll_loss_and_cross_entropy`: classes sharded over the ranks."""
    inputs = through_identity(normal(shape, torch.float32, 1).abs(), ids(16, shape[:1] + shape[2:], 2))
    weight = {"weight": normal((16,), torch.float32, 3).abs()} if weighted else {}
    upstream = torch.ones(inputs.target.shape if reduction == "none" else ())
    expected = plain(inputs, upstream, reduction=reduction, **weight)
    outcomes = run_on(workers, world, inputs, upstream, reduction=reduction, **ours_of(weight))
    compare(outcomes, expected)
