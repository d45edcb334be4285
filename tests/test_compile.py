"""torch.compile of the loss: one graph, right values, few recompilations over varying token counts."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad

from flce_dist import LinearCrossEntropyLoss, VocabParallelHead, linear_cross_entropy, op
from flce_dist.attach import attach_loss
from tests.kit import compare, oracle
from tests.kit.cases import Case, Inputs, Result, judge, local_tokens, loss_arguments, make_inputs, reference_of
from tests.kit.workers import Context, Pool

BACKEND = "aot_eager"  # traces as inductor does and needs no C++ compiler


def _compiled(ctx: Context | None, case: Case) -> Result:
    """The compiled loss and gradients; `aux` is asked for inside of the graph."""
    torch._dynamo.reset()
    rank, group = (0, None) if ctx is None or case.world == 1 else (ctx.rank, ctx.group)
    (hidden, weight, target), keywords = loss_arguments(case, rank, group)

    def loss_of(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
        output = linear_cross_entropy(hidden, weight, target, **keywords)
        return output if case.aux else (output * 1.0,)

    output = torch.compile(loss_of, fullgraph=True, backend=BACKEND)(hidden, weight, target)
    upstream = make_inputs(case).upstream
    upstream = upstream[local_tokens(case, rank)] if case.reduction == "none" else upstream
    output[0].backward(upstream.to(output[0].dtype))
    bias = keywords.get("bias")
    aux = {name: getattr(output, name) for name in case.aux}
    return Result(output[0].detach(), hidden.grad, weight.grad, None if bias is None else bias.grad, aux)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ({}, ()),
        ({"bias": True, "class_weight": True, "token_weight": True}, (("label_smoothing", 0.1), ("z_loss", 1e-2))),
        ({"chunk_rows": 3}, (("softcap", 5.0), ("logit_scale", 0.5))),
    ],
    ids=["plain", "weights", "softcap"],
)
def test_fullgraph(reduction: str, extra: dict[str, Any], options: Any) -> None:
    case = Case(reduction=reduction, options=options, **extra)
    judge(case, [_compiled(None, case)])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "extra",
    [
        {"split": "uneven"},
        {"split": "padded", "aux": ("lse", "accuracy", "predictions", "num_valid", "entropy", "z_loss")},
        {"tokens": (3, 10), "lead": (13,)},
        {"options": (("skip_ignored", True), ("backward", "recompute"))},
    ],
    ids=["uneven", "aux", "token sharded", "skip"],
)
def test_fullgraph_sharded(reduction: str, extra: dict[str, Any], workers: Pool) -> None:
    case = Case(world=2, reduction=reduction, **extra)
    judge(case, workers.run(2, _compiled, case))


def _wrong_on_one_rank(ctx: Context, layout: str, reduction: str, argument: tuple[str, Any]) -> None:
    torch._dynamo.reset()
    arguments: dict[str, Any] = {"reduction": reduction, "class_weight": torch.ones(8)}
    if ctx.rank == 1:
        arguments[argument[0]] = argument[1]

    def loss_of(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        output = linear_cross_entropy(
            hidden, weight, target, group=ctx.group, vocab_size=8, hidden_layout=layout, **arguments
        )
        return (output if isinstance(output, Tensor) else output.loss).sum()

    hidden, weight = torch.ones(6, 5, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    target = torch.zeros(6, dtype=torch.int64)
    torch.compile(loss_of, fullgraph=True, backend=BACKEND)(hidden, weight, target)


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "argument",
    [
        ("softcap", -3.0),
        ("chunk_rows", 1.5),
        ("reduction", "avg"),
        ("nonsense", 3),
        ("aux", ("lse", "loss")),
        ("aux", "lse"),
        ("class_weight", torch.ones(8, requires_grad=True)),
        ("class_weight", torch.ones(8, device="meta")),
        ("normalizer", -2.0),
        ("normalizer", 10**400),
        ("normalizer", True),
        ("vocab_shard", (8, 4, 8)),
        ("hidden_grad_scale", torch.float32),
        ("max_tokens", torch.device("cpu")),
        ("reduce_hidden_grad", slice(1)),
    ],
    ids=lambda argument: "-".join(map(str, argument)),
)
def test_an_argument_that_is_wrong_on_one_rank_is_raised_on_all(
    argument: tuple[str, Any], reduction: str, layout: str, workers: Pool
) -> None:
    outcomes = workers.outcomes(2, _wrong_on_one_rank, layout, reduction, argument, timeout=40.0)
    for outcome in outcomes:
        assert outcome.error is not None
        assert argument[0] in outcome.error.message
    assert "rank 1 of the group failed its checks" in str(outcomes[0].error)


def _used_on_one_rank(ctx: Context, backward: bool) -> float:
    torch._dynamo.reset()

    def loss_of(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss = linear_cross_entropy(hidden, weight, target, group=ctx.group, vocab_size=8)
        return loss if ctx.rank == 0 else hidden.sum()

    hidden, weight = torch.ones(6, 5, requires_grad=backward), torch.ones(4, 5)
    loss = torch.compile(loss_of, fullgraph=True, backend=BACKEND)(hidden, weight, torch.zeros(6, dtype=torch.int64))
    return loss.item()


@pytest.mark.parametrize("backward", [False, True])
def test_a_loss_that_one_rank_alone_uses_runs_on_all(backward: bool, workers: Pool) -> None:
    assert workers.run(2, _used_on_one_rank, backward, timeout=40.0) == [pytest.approx(math.log(8)), 30.0]


@pytest.mark.parametrize("name", ["hidden", "weight", "target", "bias", "class_weight", "token_weight", "normalizer"])
def test_a_tensor_without_values_in_a_graph_is_an_error(name: str) -> None:
    """Torch would run the operator's fake, which makes numbers of what is in memory."""
    torch._dynamo.reset()
    full = make_inputs(Case(ignored="none"))
    tensors = {
        "hidden": full.hidden,
        "weight": full.weight,
        "target": full.target,
        "bias": torch.ones(21),
        "class_weight": torch.ones(21),
        "token_weight": torch.ones(13),
        "normalizer": torch.tensor(5.0),
    }
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=BACKEND)
    compiled(**tensors)
    with pytest.raises(Exception, match=f"{name} must be on cpu, got meta"):
        compiled(**tensors | {name: tensors[name].to("meta")})


def _compiled_head(ctx: Context) -> Tensor:
    """Three steps of a compiled model that ends in the head; the full weight afterwards."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    body = torch.nn.Linear(8, 8)
    head = VocabParallelHead(8, 21, ctx.group)

    def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
        return head(torch.tanh(body(hidden)), target)

    step = torch.compile(loss_of, backend=BACKEND)
    optimizer = torch.optim.SGD([*body.parameters()], lr=0.1)
    head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for seed in range(3):
        full = make_inputs(Case(seed=seed))
        step(full.hidden, full.target).backward()
        for o in (optimizer, head_optimizer):
            o.step()
            o.zero_grad()
    weight = head.weight.detach()
    return weight.full_tensor() if ctx.world > 1 else weight


def test_a_compiled_model_trains_as_an_eager_one(workers: Pool) -> None:
    one = workers.run(1, _compiled_head)[0]
    for weight in workers.run(2, _compiled_head):
        compare.assert_close(weight, one.double(), 1e-5, "weight after 3 steps")


def test_at_most_3_recompilations_over_10_token_counts() -> None:
    torch._dynamo.reset()
    graphs = CompileCounter()
    weight = torch.randn(21, 8, requires_grad=True)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=graphs)
    for num_tokens in (5, 8, 13, 21, 34, 55, 89, 3, 2, 144):
        hidden = torch.randn(num_tokens, 8, requires_grad=True)
        target = torch.arange(num_tokens) % 21
        loss = compiled(hidden, weight, target)
        loss.backward()
        expected = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
        torch.testing.assert_close(loss, expected)
    assert graphs.frame_count <= 1 + 3


def _changing(name: str, values: Sequence[Any], dynamic: bool | None) -> int:
    """Graphs of calls with one value of `name` after the other; each equals the call that is not compiled."""
    graphs = CompileCounter()

    def loss(full: Inputs, value: Any) -> Tensor:
        return linear_cross_entropy(full.hidden, full.weight, full.target, **{name: value})

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=graphs)
    for value in values:
        full = make_inputs(Case(ignored="none"))
        torch.testing.assert_close(compiled(full, value), loss(full, value))
    return graphs.frame_count


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("z_loss", (0.1, 0.2, 0.3)),
        ("label_smoothing", (0.1, 0.2)),
        ("hidden_grad_scale", (1.0, 2.0)),
        ("chunk_rows", (3, 4, 5)),
        ("ignore_index", (-100, 2)),
        ("skip_ignored", (False, True)),
    ],
)
def test_other_options_are_other_graphs(name: str, values: Sequence[Any], dynamic: bool | None) -> None:
    assert _changing(name, values, dynamic) == len(values)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("step", [1, 0.5])
def test_a_number_as_normalizer_may_change_in_each_call(step: float, dynamic: bool | None) -> None:
    assert _changing("normalizer", [7 + step * i for i in range(12)], dynamic) <= 2


def test_sizes_that_change_may_be_arguments() -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, normalizer=hidden.shape[0], vocab_size=weight.shape[0])

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    full = make_inputs(Case())
    for tokens in (13, 7, 5):
        given = full.hidden[:tokens], full.weight, full.target[:tokens]
        torch.testing.assert_close(compiled(*given), loss(*given))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_of_a_graph_are_an_error(reduction: str) -> None:
    """A gradient penalty would be dropped without a word; backends with a backward graph of their own raise by
    themselves."""
    full = make_inputs(Case())
    hidden = full.hidden.requires_grad_()

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, full.weight, full.target, reduction=reduction).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.autograd.grad(compiled(hidden), hidden)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(compiled(hidden), hidden, create_graph=True)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_forward_mode_through_a_graph_is_an_error(compiled_before: bool) -> None:
    """Not a result without a tangent, which would stand for a derivative of 0."""
    torch.compiler.reset()
    full = make_inputs(Case())
    compiled = torch.compile(
        lambda hidden: linear_cross_entropy(hidden, full.weight, full.target), fullgraph=True, backend=BACKEND
    )
    if compiled_before:
        compiled(full.hidden)
    with forward_ad.dual_level(), pytest.raises(Exception, match="dual level of forward-mode"):
        compiled(forward_ad.make_dual(full.hidden, full.hidden))
    assert compiled(full.hidden).isfinite()


@pytest.mark.parametrize("transform", ["jvp", "grad"])
def test_a_transform_in_a_graph_is_an_error(transform: str) -> None:
    torch.compiler.reset()
    full = make_inputs(Case())

    def loss(hidden: Tensor) -> Any:
        return linear_cross_entropy(hidden, full.weight, full.target)

    def jvp(hidden: Tensor) -> Any:
        return torch.func.jvp(loss, (hidden,), (hidden,))

    compiled = torch.compile(jvp if transform == "jvp" else torch.func.grad(loss), fullgraph=True, backend=BACKEND)
    with pytest.raises(Exception, match=r"torch\.func transforms"):
        compiled(full.hidden)


@pytest.mark.parametrize("kind", ["a head", "an attached loss", "a loss"])
def test_modules_whose_options_are_numpys(kind: str) -> None:
    """Arguments that are numpy's are arrays to a graph; those of a module were made Python's with it."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"softcap": np.float32(3), "label_smoothing": np.float64(0.25), "chunk_rows": np.int64(4)}
    options["hidden_grad_scale"] = np.float32(0.5)
    full = make_inputs(Case())
    module: nn.Module = VocabParallelHead(full.hidden.shape[-1], full.weight.shape[0], **options)
    arguments = [full.hidden, full.target]
    if kind == "an attached loss":
        module = nn.Linear(full.hidden.shape[-1], full.weight.shape[0])
        attach_loss(module, **options)
    elif kind == "a loss":
        module = LinearCrossEntropyLoss(**options)
        arguments.insert(1, full.weight)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend=BACKEND)(*arguments)
        assert torch.equal(compiled, module(*arguments))


def test_an_output_that_is_asked_for_twice_in_a_graph() -> None:
    torch._dynamo.reset()
    full = make_inputs(Case())
    twice = partial(linear_cross_entropy, aux=("lse", "num_valid", "lse"))
    output = torch.compile(twice, fullgraph=True, backend=BACKEND)(full.hidden, full.weight, full.target)
    expected = twice(full.hidden, full.weight, full.target)
    torch.testing.assert_close(tuple(output[i] for i in (0, 2, 6)), tuple(expected[i] for i in (0, 2, 6)))


def test_evaluation_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no gradient, though its tensors require grad."""
    torch._dynamo.reset()
    made: list[op.Gradients] = []
    whole = op.run_chunks

    def run_chunks(*arguments: Any) -> tuple[Tensor, op.Gradients]:
        stats, gradients = whole(*arguments)
        made.append(gradients)
        return stats, gradients

    monkeypatch.setattr(op, "run_chunks", run_chunks)
    full = make_inputs(Case())
    tensors = full.hidden.requires_grad_(), full.weight.requires_grad_(), full.target
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=BACKEND)
    with torch.no_grad():
        loss = compiled(*tensors)
    compare.assert_loss(loss, reference_of(Case()).loss, 1e-5)
    assert made == [(None, None, None)]
    compiled(*tensors)
    assert made[1].hidden is not None
    assert made[1].weight is not None


def test_a_negative_normalizer_in_a_graph_is_an_error() -> None:
    """A number is a tensor inside of the graph, whose value is not checked."""
    torch._dynamo.reset()
    full = make_inputs(Case())
    compiled = torch.compile(partial(linear_cross_entropy, normalizer=-1.0), fullgraph=True, backend=BACKEND)
    with pytest.raises(Exception, match="normalizer must be finite in float32 and not negative, got -1"):
        compiled(full.hidden, full.weight, full.target)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward_of_a_compiled_graph(reduction: str) -> None:
    torch._dynamo.reset()
    full = make_inputs(Case(reduction=reduction))
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
    loss = torch.compile(
        lambda h, w: linear_cross_entropy(h, w, full.target, reduction=reduction), fullgraph=True, backend=BACKEND
    )(hidden, weight)
    expected = reference_of(Case(reduction=reduction))
    first = torch.autograd.grad(loss, (hidden, weight), full.upstream, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (hidden, weight), full.upstream)
    for grads in (kept, first, second):
        compare.assert_close(grads[0], expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(grads[1], expected.weight_grad, 1e-5, "weight gradient")


def test_a_bad_target_in_a_graph_is_an_error() -> None:
    torch._dynamo.reset()
    full = make_inputs(Case())
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=BACKEND)
    compiled(full.hidden, full.weight, full.target)
    target = full.target.clone()
    target[5] = 21
    with pytest.raises(IndexError, match="21"):
        compiled(full.hidden, full.weight, target)


@pytest.mark.parametrize("made_in_the_graph", [False, True])
@pytest.mark.parametrize("name", ["class_weight", "token_weight", "normalizer"])
def test_arguments_without_a_gradient_are_refused_in_a_graph(name: str, made_in_the_graph: bool) -> None:
    """They would get none without a word: the operator's tensors do not say that they require grad."""
    torch.compiler.reset()
    full = make_inputs(Case(ignored="none"))
    leaf = {"class_weight": torch.ones(21), "token_weight": torch.ones(13), "normalizer": torch.tensor(5.0)}[name]
    leaf.requires_grad_()

    def loss_of(hidden: Tensor, leaf: Tensor) -> Any:
        keywords: dict[str, Any] = {name: leaf * 2 if made_in_the_graph else leaf}
        return linear_cross_entropy(hidden, full.weight, full.target, **keywords)

    with pytest.raises(Exception, match=rf"{name} may not require grad.*pass {name}\.detach\(\)"):
        torch.compile(loss_of, fullgraph=True, backend=BACKEND)(full.hidden.requires_grad_(), leaf)


def test_gradients_under_autocast_in_a_graph() -> None:
    torch._dynamo.reset()
    full = make_inputs(Case(lead=(40,), hidden_size=16, vocab_size=64))
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(hidden, weight, full.target)

    torch.compile(loss_of, fullgraph=True, backend=BACKEND)(hidden, weight).backward()
    expected = oracle.reference(hidden.bfloat16(), weight.bfloat16(), full.target)
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    compare.assert_close(hidden.grad, expected.hidden_grad, compare.TOL16.grad, "hidden gradient")
    compare.assert_close(weight.grad, expected.weight_grad, compare.TOL16.grad, "weight gradient")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_of_a_graph_under_autocast(reduction: str) -> None:
    """Autocast that is on in backward alone changes no operand of the operator that makes the logits again."""
    torch._dynamo.reset()
    full = make_inputs(Case(reduction=reduction))
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
    loss_of = partial(linear_cross_entropy, reduction=reduction)
    loss = torch.compile(loss_of, fullgraph=True, backend=BACKEND)(hidden, weight, full.target)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward(full.upstream)
    expected = reference_of(Case(reduction=reduction))
    compare.assert_close(hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(weight.grad, expected.weight_grad, 1e-5, "weight gradient")


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inductor(reduction: str) -> None:
    """The default backend; it needs a C++ compiler on a CPU."""
    torch._dynamo.reset()
    full = make_inputs(Case(reduction=reduction))
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
    compiled = torch.compile(lambda h, w: linear_cross_entropy(h * 1.0, w, full.target, reduction=reduction) * 1.0)
    compiled(hidden, weight).backward(full.upstream)
    expected = reference_of(Case(reduction=reduction))
    compare.assert_close(hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(weight.grad, expected.weight_grad, 1e-5, "weight gradient")
