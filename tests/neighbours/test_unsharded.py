"""The cases of losses on one device: Liger, Cut Cross Entropy, fla, Transformer Engine."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flce_dist import LinearCrossEntropyLoss, LossOutput, linear_cross_entropy
from tests.kit.cases import all_pairs, case_id, product
from tests.kit.compare import relative_error
from tests.neighbours.support import (
    LIGER_OPTIONS,
    LIGER_TOLERANCE,
    Inputs,
    Outcome,
    close,
    close_in_norm,
    compare,
    ids,
    ignore_some,
    logits_of,
    normal,
    plain,
    run,
    uniform,
)

# Liger


def liger_inputs(sizes: tuple[int, ...], dtype: torch.dtype, bias: bool, ignore_index: int) -> Inputs:
    batch, length, hidden_size, vocab_size = sizes
    return Inputs(
        normal((batch * length, hidden_size), dtype, 1),
        uniform((vocab_size, hidden_size), 0.0, 1.0, dtype, 2),
        ignore_some(ids(vocab_size, (batch * length,), 3), ignore_index, 0.3),
        uniform((vocab_size,), 0.0, 1.0, dtype, 4) if bias else None,
    )


@pytest.mark.parametrize(("reduction", "dtype"), LIGER_TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LIGER_OPTIONS)
@pytest.mark.parametrize("grad", [True, False])
def test_liger_correctness(reduction: str, dtype: torch.dtype, bias: bool, name: str, grad: bool) -> None:
    """`test_correctness` and `test_correctness_with_forward_only`, with the odd sizes; z-loss and class weights too."""
    options = dict(LIGER_OPTIONS[name])
    inputs = liger_inputs((4, 47, 31, 123), dtype, bias, options.get("ignore_index", -100))
    weight = {"weight": uniform((123,), 0.0, 1.0, torch.float32, 5)} if name == "all" else {}
    expected = plain(inputs, reduction=reduction, **options, **weight)
    tolerance = LIGER_TOLERANCE[reduction, dtype]
    options |= {"class_weight": weight["weight"], "accum_dtype": torch.float32} if weight else {}
    if grad:
        got = run(None, inputs, reduction=reduction, aux=("z_loss",), **options)
        compare([got], expected, tolerance, tolerance)
        logits = logits_of(inputs.hidden, inputs.weight, inputs.bias, options.get("softcap"))
        z = torch.where(inputs.target != options.get("ignore_index", -100), logits.logsumexp(-1).square(), 0.0)
        z_loss = options.get("z_loss", 0.0) * z.sum()
        z_loss = z_loss / z.count_nonzero() if reduction == "mean" else z_loss
        close(got.aux["z_loss"], z_loss, tolerance, "z part")
    else:
        with torch.no_grad():
            hidden, matrix, vector = inputs.leaves()
            loss = linear_cross_entropy(hidden, matrix, inputs.target, bias=vector, reduction=reduction, **options)
        close(loss, expected.loss, tolerance, "loss")
        assert not loss.requires_grad


@pytest.mark.parametrize("sizes", [(2, 2, 8, 8), (9, 7, 41, 41)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_liger_functional_and_module(sizes: tuple[int, ...], dtype: torch.dtype, weighted: bool, bias: bool) -> None:
    """The module is the function; class weights of either sign, as theirs are drawn."""
    options: dict[str, Any] = {"z_loss": 1e-4, "label_smoothing": 0.1, "softcap": 30.0, "accum_dtype": torch.float32}
    inputs = liger_inputs(sizes, dtype, bias, -100)
    weight = normal((sizes[3],), torch.float32, 6) if weighted else None
    results = []
    for call in (linear_cross_entropy, LinearCrossEntropyLoss(**options)):
        hidden = inputs.hidden.clone().requires_grad_()
        own = options if call is linear_cross_entropy else {}
        output = call(
            hidden, inputs.weight, inputs.target, bias=inputs.bias, class_weight=weight, aux=("z_loss",), **own
        )
        output.loss.backward(torch.tensor(0.7))
        results.append((output.loss.detach(), output.z_loss, hidden.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_liger_accuracy_and_predictions(dtype: torch.dtype, bias: bool, ignore_index: int) -> None:
    """A prediction's logit is the largest; ignored tokens have one too (Liger gives them -1)."""
    inputs = liger_inputs((4, 47, 31, 123), dtype, bias, ignore_index)
    inputs.weight = normal((123, 31), dtype, 7)
    got = run(None, inputs, ignore_index=ignore_index, aux=("accuracy", "predictions"))
    logits, predictions = logits_of(inputs.hidden, inputs.weight, inputs.bias), got.aux["predictions"]
    assert predictions.dtype == torch.int64
    tolerance = {"atol": 5e-3, "rtol": 5e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 5e-4}
    close(logits.gather(1, predictions[:, None])[:, 0], logits.amax(-1), tolerance, "logit of the prediction")
    valid = inputs.target != ignore_index
    close(got.aux["accuracy"], (predictions == inputs.target)[valid].float().mean(), {}, "accuracy")


@pytest.mark.parametrize("cast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("accum_dtype", [None, torch.float32])
def test_liger_amp(cast_dtype: torch.dtype, bias: bool, accum_dtype: torch.dtype | None) -> None:
    """float32 parameters under autocast; backward inside of it too."""
    inputs = liger_inputs((4, 47, 31, 123), torch.float32, bias, -100)
    tolerance = {"atol": 5e-3, "rtol": 5e-2}
    with torch.autocast("cpu", dtype=cast_dtype):
        got = run(None, inputs, accum_dtype=accum_dtype)
        expected = plain(inputs)
    compare([got], expected, tolerance, tolerance)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignored", [False, True])
def test_liger_token_scaling(reduction: str, ignored: bool) -> None:
    inputs = Inputs(normal((8, 32), torch.float32, 1), normal((100, 32), torch.float32, 2), ids(100, (8,), 3))
    inputs.bias = normal((100,), torch.float32, 4)
    if ignored:
        inputs.target = ignore_some(inputs.target, -100, 0.4)
    expected = plain(inputs, token_scaling=True, reduction=reduction)
    compare(
        [run(None, inputs, token_scaling=True, reduction=reduction)],
        expected,
        {"atol": 1e-5, "rtol": 1e-5},
        {"atol": 1e-5, "rtol": 1e-5},
    )


@pytest.mark.parametrize("aux", [(), ("z_loss",), ("accuracy",), ("z_loss", "accuracy")], ids=str)
def test_liger_structured_output(aux: tuple[str, ...]) -> None:
    hidden = torch.tensor([[0.2, -0.1, 0.3], [0.4, 0.1, -0.2], [-0.3, 0.5, 0.2]])
    weight = torch.tensor([[0.3, -0.2, 0.1], [0.1, 0.4, -0.3], [-0.2, 0.2, 0.5]])
    bias, target = torch.tensor([0.1, -0.2, 0.05]), torch.tensor([0, 1, 2])
    output = linear_cross_entropy(hidden, weight, target, bias=bias, aux=aux)
    assert isinstance(output, LossOutput) == bool(aux)
    expected = F.cross_entropy(hidden @ weight.T + bias, target)
    torch.testing.assert_close(output.loss if isinstance(output, LossOutput) else output, expected)
    if isinstance(output, LossOutput):
        assert (output.z_loss is not None, output.accuracy is not None) == ("z_loss" in aux, "accuracy" in aux)


@pytest.mark.parametrize("sizes", [(2, 16, 32, 64), (1, 32, 64, 128)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_liger_none_takes_an_upstream_gradient_for_each_token(sizes: tuple[int, ...], bias: bool) -> None:
    inputs = liger_inputs(sizes, torch.float32, bias, -100)
    upstream = uniform(tuple(inputs.target.shape), 0.5, 1.5, torch.float32, 8)
    tolerance = {"atol": 1e-4, "rtol": 1e-4}
    compare(
        [run(None, inputs, upstream, reduction="none")], plain(inputs, upstream, reduction="none"), tolerance, tolerance
    )


def test_liger_scaled_cross_entropy() -> None:
    """Temperature and per-token upstream gradients; the entropy's value (ours has no gradient)."""
    inputs = Inputs(normal((521, 7), torch.float32, 1), normal((13, 7), torch.float32, 2), ids(13, (521,), 3))
    inputs.target[::11] = -100
    upstream = uniform((521,), 0.0, 1.0, torch.float32, 4)
    got = run(None, inputs, upstream, reduction="none", logit_scale=1 / 0.7, aux=("entropy",))
    compare([got], plain(inputs, upstream, reduction="none", logit_scale=1 / 0.7), grad={"atol": 2e-5, "rtol": 2e-5})
    log_prob = logits_of(inputs.hidden, inputs.weight, None, logit_scale=1 / 0.7).log_softmax(-1)
    valid = inputs.target != -100
    close(got.aux["entropy"][valid], -(log_prob.exp() * log_prob).sum(-1)[valid], {}, "entropy")


# Cut Cross Entropy

CCE_AXES: dict[str, Any] = {
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "softcap": [None, 20.0],
    "bias": [False, True],
    "shift": [0, 1, 2],
    "invalids": [False, True],
    "reduction": ["none", "mean", "sum"],
    "z_loss": [False, True],
    "shape": [(256, 512, 128), (252, 507, 128), (252, 507, 123)],
}
CCE_TOLERANCE = {torch.float32: (1e-5, 5e-4), torch.float16: (1e-3, 1e-3), torch.bfloat16: (1e-2, 1e-2)}


def cce_inputs(row: dict[str, Any]) -> Inputs:
    """Half of the head's rows are hidden states, so that some tokens have a confident prediction."""
    num_tokens, vocab_size, hidden_size = row["shape"]
    dtype, shift = row["dtype"], row["shift"]
    hidden = normal((num_tokens, hidden_size), dtype, 1) / hidden_size**0.5
    weight = normal((vocab_size, hidden_size), dtype, 2)
    weight[: min(num_tokens, vocab_size) // 2] = hidden[: min(num_tokens, vocab_size) // 2]
    target = ids(vocab_size, (num_tokens,), 3)
    target = ignore_some(target, -100, 0.2) if row["invalids"] else target
    hidden, target = hidden.view(4, -1, hidden_size), target.view(4, -1)
    if shift:
        hidden, target = hidden[:, :-shift], target[:, shift:]
    return Inputs(hidden, weight, target, normal((vocab_size,), dtype, 4) * 0.02 if row["bias"] else None)


def cce_check(row: dict[str, Any]) -> None:
    """Elementwise: no further from float32 than eager in the inputs' dtype, plus the suite's tolerance. Its objective
    is the mean over all tokens for `none`, and that of lse squared over the valid ones is added. Some
    gradients are smaller than its tolerance, so they are held to their own size too."""
    inputs, reduction = cce_inputs(row), row["reduction"]
    valid, total = int((inputs.target != -100).sum()), inputs.target.numel()
    upstream = {"none": 1 / total, "sum": 1 / valid, "mean": 1.0}[reduction]
    z_loss = {"none": total / valid, "sum": 1.0, "mean": 1.0}[reduction] if row["z_loss"] else 0.0
    options = {"reduction": reduction, "softcap": row["softcap"], "z_loss": z_loss}
    exact, eager = (plain(inputs, upstream, dtype, **options) for dtype in (torch.float32, None))
    got = run(None, inputs, upstream, **options)
    loss_tolerance, grad_tolerance = CCE_TOLERANCE[row["dtype"]]
    # Theirs are losses of single tokens, about 10 at most: sums and squares are held to it relative to their size.
    no_worse(got.loss, exact.loss, eager.loss, loss_tolerance * max(1.0, exact.loss.abs().max().item() / 10), "loss")
    for name in ("hidden", "weight", "bias"):
        grads = [getattr(outcome, name) for outcome in (got, exact, eager)]
        no_worse(*grads, grad_tolerance, f"{name} gradient")
        close_in_norm(*grads[:2], f"{name} gradient")


def no_worse(actual: Tensor | None, exact: Tensor | None, eager: Tensor | None, tolerance: float, what: str) -> None:
    if actual is None or exact is None or eager is None:
        assert actual is exact is eager is None, what
        return
    excess = (actual.double() - exact.double()).abs() - (eager.double() - exact.double()).abs()
    assert excess.max() <= tolerance, f"{what}: {excess.max():.3g} further off than eager"


@pytest.mark.parametrize("row", all_pairs(CCE_AXES), ids=case_id)
def test_cce_loss_and_gradients(row: dict[str, Any]) -> None:
    cce_check(row)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", CCE_AXES["dtype"], ids=str)
@pytest.mark.parametrize("reduction", CCE_AXES["reduction"])
def test_cce_loss_and_gradients_everywhere(dtype: torch.dtype, reduction: str) -> None:
    for row in product(CCE_AXES | {"dtype": [dtype], "reduction": [reduction]}):
        cce_check(row)


@pytest.mark.parametrize("trained", [("hidden", "bias"), ("weight",), ("bias",)], ids=str)
def test_cce_partials(trained: tuple[str, ...]) -> None:
    row = {"dtype": torch.bfloat16, "bias": True, "shift": 0, "invalids": False, "shape": (256, 512, 128)}
    inputs = cce_inputs(row)
    leaves = dict(zip(("hidden", "weight", "bias"), inputs.leaves(), strict=True))
    for name, leaf in leaves.items():
        assert leaf is not None
        leaf.requires_grad_(name in trained)
    linear_cross_entropy(leaves["hidden"], leaves["weight"], inputs.target, bias=leaves["bias"]).backward()
    assert [name for name, leaf in leaves.items() if leaf is not None and leaf.grad is not None] == list(trained)


@pytest.mark.parametrize("dtype", CCE_AXES["dtype"], ids=str)
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(256, 512, 128), (255, 507, 128), (255, 507, 123)], ids=str)
def test_cce_lse(dtype: torch.dtype, softcap: float | None, bias: bool, shape: tuple[int, int, int]) -> None:
    """Log-sum-exp, and with it the target's logit (`test_indexed_dot`), no further from float32 than eager, + 1e-5."""
    num_tokens, vocab_size, hidden_size = shape
    hidden = normal((num_tokens, hidden_size), dtype, 1) / hidden_size**0.5
    weight = normal((vocab_size, hidden_size), dtype, 2)
    weight[: num_tokens // 2] = hidden[: num_tokens // 2]
    inputs = Inputs(hidden, weight, ids(vocab_size, (num_tokens,), 3))
    inputs.bias = normal((vocab_size,), dtype, 4) * 0.02 if bias else None
    got = run(None, inputs, softcap=softcap, reduction="none", aux=("lse",))
    exact = logits_of(hidden.float(), weight.float(), None if inputs.bias is None else inputs.bias.float(), softcap)
    eager = logits_of(hidden, weight, inputs.bias, softcap)
    no_worse(got.aux["lse"], exact.logsumexp(-1), eager.logsumexp(-1), 1e-5, "lse")
    of_target = [t.gather(1, inputs.target[:, None])[:, 0] for t in (exact, eager)]
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    no_worse(got.aux["lse"] - got.loss, *of_target, tolerance, "target's logit")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("invalids", [False, True])
def test_cce_z_loss_of_known_numbers(reduction: str, invalids: bool) -> None:
    """Ten tokens whose log-sum-exp is 1 to 10, with two valid ones or all."""
    lse = torch.arange(1, 11, dtype=torch.float64)
    target = torch.zeros(10, dtype=torch.int64)
    if invalids:
        target = torch.full((10,), -100)
        target[[3, 5]] = 0
    inputs = Inputs(lse[:, None], torch.ones(1, 1, dtype=torch.float64), target)
    got = run(None, inputs, reduction=reduction, z_loss=1.0, aux=("z_loss",))
    assert got.loss.shape == ((10,) if reduction == "none" else ())
    total = got.aux["z_loss"].sum() * (int((target != -100).sum()) if reduction == "mean" else 1)
    assert total.item() == pytest.approx(4**2 + 6**2 if invalids else sum(i**2 for i in range(1, 11)), rel=1e-12)


# fla

FLA = [{}, {"softcap": 30.0}, {"logit_scale": 0.5}]


def fla_check(inputs: Inputs, options: dict[str, Any], got: Outcome, upstream: float) -> None:
    """Root mean square errors of at most 1e-2 of what they are compared with."""
    reference = plain(inputs, upstream, **options)
    for name in ("loss", "hidden", "weight", "bias"):
        assert relative_error(getattr(got, name), getattr(reference, name)) <= 1e-2, name


@pytest.mark.parametrize("length", [64, 128])
@pytest.mark.parametrize("hidden_size", [32, 64])
@pytest.mark.parametrize("vocab_size", [320, 1000])
@pytest.mark.parametrize("options", FLA, ids=str)
@pytest.mark.parametrize("accum_dtype", [None, torch.float32])
def test_fla_fused_linear_cross_entropy(
    length: int, hidden_size: int, vocab_size: int, options: dict[str, Any], accum_dtype: torch.dtype | None
) -> None:
    """The last token of each sequence is ignored, as after a shift; sizes a hundredth of theirs (gpu tests: theirs)."""
    inputs = fla_inputs(length, hidden_size, vocab_size)
    got = run(None, inputs, -1.3, accum_dtype=accum_dtype, **options)
    fla_check(inputs, options, got, -1.3)


def fla_inputs(length: int, hidden_size: int, vocab_size: int) -> Inputs:
    target = ids(vocab_size, (2, length), 3).roll(-1, 1)
    target[:, -1] = -100
    return Inputs(
        normal((2 * length, hidden_size), torch.bfloat16, 1),
        normal((vocab_size, hidden_size), torch.bfloat16, 2),
        target.flatten(),
        normal((vocab_size,), torch.bfloat16, 4),
    )


@pytest.mark.parametrize("options", FLA, ids=str)
def test_fla_fused_cross_entropy_of_logits(options: dict[str, Any]) -> None:
    inputs = fla_inputs(128, 200, 200)
    inputs = Inputs(inputs.hidden, torch.eye(200, dtype=torch.bfloat16), inputs.target, torch.zeros(200).bfloat16())
    fla_check(inputs, options, run(None, inputs, 0.7, **options), 0.7)


# Transformer Engine

TE_TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1.3e-6, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5},
}
TE_CASES = [
    *itertools.product([torch.float32, torch.bfloat16], ["mean", "none"], [0.0], [0.0, 1e-3], [False, True]),
    *itertools.product([torch.float32], ["mean", "none"], [0.1], [0.0, 1e-3], [False, True]),
]


@pytest.mark.parametrize(("dtype", "reduction", "smoothing", "z_loss", "ignored"), TE_CASES, ids=str)
@pytest.mark.parametrize("lead", [(64, 2), (2, 128), (1, 64)], ids=str)
def test_transformer_engine(
    dtype: torch.dtype, reduction: str, smoothing: float, z_loss: float, ignored: bool, lead: tuple[int, int]
) -> None:
    """Logits in [0, 1), either order of the leading dimensions, and the square of the loss as the objective."""
    logits, target = uniform((*lead, 640), 0.0, 1.0, dtype, 1), ids(640, lead, 2)
    if ignored:
        target = ignore_some(target, -100, 0.05)
    inputs = Inputs(logits, torch.eye(640, dtype=dtype), target)
    options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
    upstream = 2 * plain(inputs, **options).loss
    got = run(None, inputs, upstream, aux=("lse",), **options)
    expected = plain(inputs, upstream, **options)
    close(got.loss, expected.loss, TE_TOLERANCE[dtype], "loss")
    close(got.hidden, expected.hidden, TE_TOLERANCE[dtype], "gradient")
    valid = target != -100
    close(got.aux["lse"][valid], logits.float().logsumexp(-1)[valid], {"atol": 1e-5, "rtol": 1e-5}, "lse")


def test_transformer_engine_transposed_logits() -> None:
    logits, target = torch.randn(4, 2, 8), torch.randint(8, (2, 4))
    transposed = logits.transpose(0, 1)
    losses = [linear_cross_entropy(t, torch.eye(8), target) for t in (transposed, transposed.contiguous())]
    assert torch.equal(*losses)
