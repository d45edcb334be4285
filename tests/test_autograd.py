"""What autograd asks of the loss: needs, grad modes, repeated backward passes, layouts of inputs."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flce_dist import linear_cross_entropy
from tests.kit import compare, oracle
from tests.kit.cases import Case, Inputs, Result, judge, local_tokens, loss_arguments, make_inputs, reference_of
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool

REDUCTIONS = ["mean", "sum", "none"]
BACKWARDS = [("mean", "forward"), ("mean", "recompute"), ("sum", "auto"), ("none", "auto")]


def leaves(case: Case) -> Inputs:
    full = make_inputs(case)
    full.hidden.requires_grad_()
    full.weight.requires_grad_()
    if full.bias is not None:
        full.bias.requires_grad_()
    return full


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_rows", [None, 2])
def test_gradcheck(reduction: str, softcap: float | None, chunk_rows: int | None) -> None:
    case = Case(lead=(5,), hidden_size=3, vocab_size=7, dtype=torch.float64, bias=True, reduction=reduction)
    full = leaves(case)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"reduction": reduction, "softcap": softcap, "chunk_rows": chunk_rows}
        return linear_cross_entropy(hidden, weight, full.target, bias=bias, z_loss=0.1, label_smoothing=0.2, **options)

    # The same buffers may not be handed out twice, which gradcheck's repeated calls would show.
    assert torch.autograd.gradcheck(loss, (full.hidden, full.weight, full.bias))


def _needs(ctx: Context | None, case: Case, needs: tuple[bool, bool, bool]) -> tuple[Any, ...]:
    rank, group = (0, None) if ctx is None else (ctx.rank, ctx.group)
    (hidden, weight, target), keywords = loss_arguments(case, rank, group)
    for tensor, need in zip((hidden, weight, keywords["bias"]), needs, strict=True):
        tensor.requires_grad_(need)
    loss = linear_cross_entropy(hidden, weight, target, **keywords)
    assert loss.requires_grad == any(needs)
    if any(needs):
        upstream = make_inputs(case).upstream
        loss.backward(upstream.to(loss.dtype))
    return loss.detach(), hidden.grad, weight.grad, keywords["bias"].grad


ALL_NEEDS = [(h, w, b) for h in (False, True) for w in (False, True) for b in (False, True)]


@pytest.mark.parametrize("needs", ALL_NEEDS, ids=str)
@pytest.mark.parametrize(("reduction", "backward"), BACKWARDS)
def test_only_what_is_needed_gets_a_gradient(needs: tuple[bool, bool, bool], reduction: str, backward: str) -> None:
    case = Case(bias=True, reduction=reduction, chunk_rows=4, options=(("backward", backward),))
    expected = reference_of(case)
    loss, *grads = _needs(None, case, needs)
    compare.assert_loss(loss, expected.loss, compare.TOL32.loss)
    full = (expected.hidden_grad, expected.weight_grad, expected.bias_grad)
    for name, need, grad, want in zip(("hidden", "weight", "bias"), needs, grads, full, strict=True):
        if need:
            compare.assert_close(grad, want, compare.TOL32.grad, f"{name} gradient")
        else:
            assert grad is None


@pytest.mark.parametrize("needs", ALL_NEEDS, ids=str)
@pytest.mark.parametrize(("reduction", "backward"), [("mean", "auto"), ("none", "auto")])
def test_only_what_is_needed_gets_a_gradient_sharded(
    needs: tuple[bool, bool, bool], reduction: str, backward: str, workers: Pool
) -> None:
    case = Case(world=2, bias=True, reduction=reduction, chunk_rows=4, options=(("backward", backward),))
    expected = reference_of(case)
    for rank, (loss, *grads) in enumerate(workers.run(2, _needs, case, needs)):
        start, stop = case.bounds()[rank]
        compare.assert_loss(loss, expected.loss, compare.TOL32.loss)
        assert expected.bias_grad is not None
        full = (expected.hidden_grad, expected.weight_grad[start:stop], expected.bias_grad[start:stop])
        for name, need, grad, want in zip(("hidden", "weight", "bias"), needs, grads, full, strict=True):
            if need:
                compare.assert_close(grad, want, 2 * compare.TOL32.grad, f"{name} gradient")
            else:
                assert grad is None


def _weight_trains_on_rank_0_only(ctx: Context, case: Case, hidden_needs: bool) -> tuple[Any, ...]:
    return _needs(ctx, case, (hidden_needs, ctx.rank == 0, ctx.rank == 0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("hidden_needs", [True, False])
def test_weight_may_train_on_some_ranks_only(reduction: str, hidden_needs: bool, workers: Pool) -> None:
    case = Case(world=2, bias=True, reduction=reduction, chunk_rows=4)
    expected = reference_of(case)
    results = workers.run(2, _weight_trains_on_rank_0_only, case, hidden_needs)
    for rank, (loss, hidden_grad, weight_grad, _) in enumerate(results):
        compare.assert_loss(loss, expected.loss, compare.TOL32.loss)
        if hidden_needs:
            compare.assert_close(hidden_grad, expected.hidden_grad, compare.TOL32.grad, "hidden gradient")
        if rank == 0:
            rows = slice(*case.bounds()[0])
            compare.assert_close(weight_grad, expected.weight_grad[rows], 2 * compare.TOL32.grad, "weight gradient")
        else:
            assert weight_grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_gradient_work_without_grad_mode(mode: Any, reduction: str) -> None:
    case = Case(lead=(32,), vocab_size=256, hidden_size=16, reduction=reduction, chunk_rows=8)
    full = leaves(case)
    loss = linear_cross_entropy(full.hidden, full.weight, full.target, reduction=reduction, chunk_rows=8)
    with mode(), Trace() as trace:
        evaluated = linear_cross_entropy(full.hidden, full.weight, full.target, reduction=reduction, chunk_rows=8)
    assert not evaluated.requires_grad
    compare.assert_same_bits([loss, evaluated], "loss")
    assert len(trace.matrix_products) == 4, "one logits product a chunk"
    assert trace.allocations_of(full.weight.nbytes) == []


@pytest.mark.parametrize(("reduction", "backward"), BACKWARDS)
def test_number_of_matrix_products(reduction: str, backward: str) -> None:
    """3 a chunk where gradients are made in forward, 4 where backward makes the logits again."""
    case = Case(lead=(32,), reduction=reduction, chunk_rows=8)
    full = leaves(case)
    with Trace() as forward:
        loss = linear_cross_entropy(
            full.hidden, full.weight, full.target, reduction=reduction, backward=backward, chunk_rows=8
        )
    with Trace() as trace:
        loss.backward(full.upstream)
    recompute = backward == "recompute" or reduction == "none"
    assert len(forward.matrix_products) == 4 * (1 if recompute else 3)
    assert len(trace.matrix_products) == 4 * (3 if recompute else 0)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_a_frozen_side_costs_no_matrix_product(needs: tuple[bool, bool]) -> None:
    case = Case(lead=(32,), vocab_size=256, hidden_size=16, chunk_rows=8)
    full = make_inputs(case)
    full.hidden.requires_grad_(needs[0])
    full.weight.requires_grad_(needs[1])
    with Trace() as trace:
        linear_cross_entropy(full.hidden, full.weight, full.target, chunk_rows=8).backward()
    assert len(trace.matrix_products) == 4 * 2
    if not needs[1]:
        assert trace.allocations_of(full.weight.nbytes) == []


def _backward_twice(ctx: Context | None, case: Case) -> tuple[Tensor, ...]:
    rank, group = (0, None) if ctx is None else (ctx.rank, ctx.group)
    (hidden, weight, target), keywords = loss_arguments(case, rank, group)
    loss = linear_cross_entropy(hidden, weight, target, **keywords)
    upstream = make_inputs(case).upstream.to(loss.dtype)
    first = torch.autograd.grad(loss, (hidden, weight), upstream, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (hidden, weight), -2 * upstream, retain_graph=True)
    third = torch.autograd.grad(loss, (hidden, weight), upstream)
    compare.assert_same_bits([kept[0], first[0]], "first hidden gradient after a second backward")
    compare.assert_same_bits([kept[1], first[1]], "first weight gradient after a second backward")
    return (*first, *second, *third)


@pytest.mark.parametrize(("reduction", "backward"), BACKWARDS)
@pytest.mark.parametrize("world", [1, 2])
def test_second_backward_with_a_retained_graph(reduction: str, backward: str, world: int, workers: Pool) -> None:
    case = Case(world=world, reduction=reduction, chunk_rows=4, options=(("backward", backward),))
    expected = reference_of(case)
    results = [_backward_twice(None, case)] if world == 1 else workers.run(world, _backward_twice, case)
    for rank, grads in enumerate(results):
        rows = slice(*case.bounds()[rank])
        for at, factor in ((0, 1), (2, -2), (4, 1)):
            compare.assert_close(grads[at], factor * expected.hidden_grad, 1e-5, f"hidden gradient {at}")
            compare.assert_close(grads[at + 1], factor * expected.weight_grad[rows], 2e-5, f"weight gradient {at}")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_accumulation_into_grad_is_not_aliased(reduction: str) -> None:
    """Two losses accumulate into .grad; a buffer handed out twice, or kept and written again, would show."""
    case = Case(reduction=reduction)
    full = leaves(case)
    for _ in range(3):
        linear_cross_entropy(full.hidden, full.weight, full.target, reduction=reduction).backward(full.upstream)
    expected = reference_of(case)
    compare.assert_close(full.hidden.grad, 3 * expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(full.weight.grad, 3 * expected.weight_grad, 1e-5, "weight gradient")


@pytest.mark.parametrize("name", ["weight", "target", "class_weight"])
@pytest.mark.parametrize("options", [{"reduction": "none"}, {"backward": "recompute"}, {}], ids=str)
def test_a_backward_that_needs_its_inputs_again_notices_a_changed_one(name: str, options: dict[str, Any]) -> None:
    """The first one does not where forward has made the gradients."""
    full = leaves(Case(class_weight=True))
    loss = linear_cross_entropy(
        full.hidden, full.weight, full.target, class_weight=full.class_weight, label_smoothing=0.1, **options
    ).sum()
    with torch.no_grad():
        getattr(full, name).mul_(2)
    if not options:
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place)"):
        loss.backward()


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"backward": "recompute"}, {}], ids=str)
def test_targets_and_class_weights_made_in_inference_mode(options: dict[str, Any]) -> None:
    """Torch counts no writes to those: they cannot be noticed, and are no reason to fail."""
    case = Case(class_weight=True, reduction=options.get("reduction", "mean"), options=(("label_smoothing", 0.1),))
    full = leaves(case)
    with torch.inference_mode():
        given = make_inputs(case)
    assert given.target.is_inference()
    linear_cross_entropy(
        full.hidden, full.weight, given.target, class_weight=given.class_weight, label_smoothing=0.1, **options
    ).backward(full.upstream)
    expected = reference_of(case)
    compare.assert_close(full.hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(full.weight.grad, expected.weight_grad, 1e-5, "weight gradient")


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
def test_an_expanded_weight(options: dict[str, Any]) -> None:
    """Its storage is smaller than its shape, and was not freed."""
    case = Case(reduction=options.get("reduction", "mean"))
    full = make_inputs(case)
    column = full.weight[:, :1].clone().requires_grad_()
    weight = column.expand(-1, case.hidden_size)
    linear_cross_entropy(full.hidden, weight, full.target, **options).backward(full.upstream)
    expected = oracle.reference(full.hidden, weight.detach(), full.target, upstream=full.upstream, **options)
    compare.assert_close(column.grad, expected.weight_grad.sum(1, keepdim=True), 1e-5, "weight gradient")


def _gradient_penalty(case: Case, backward: str) -> None:
    """Trains on the size of the gradient: without second derivatives this would silently train on the loss alone."""
    full = leaves(case)
    loss = linear_cross_entropy(full.hidden, full.weight, full.target, reduction=case.reduction, backward=backward)
    (grad,) = torch.autograd.grad(loss.sum(), full.hidden, create_graph=True)
    (loss.sum() + grad.square().sum()).backward()


@pytest.mark.parametrize(("reduction", "backward"), BACKWARDS)
def test_double_backward_is_a_clear_error(reduction: str, backward: str) -> None:
    with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph"):
        _gradient_penalty(Case(reduction=reduction), backward)


def test_a_jit_trace_is_a_clear_error() -> None:
    full = make_inputs(Case())
    with pytest.raises(NotImplementedError, match=r"torch\.compile or torch\.export"):
        torch.jit.trace(lambda hidden: linear_cross_entropy(hidden, full.weight, full.target), (full.hidden,))
    assert linear_cross_entropy(full.hidden, full.weight, full.target).isfinite(), "the next call is none of a trace"


def test_torch_func_is_a_clear_error() -> None:
    full = make_inputs(Case())
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms: use autograd"):
        torch.func.grad(lambda x: linear_cross_entropy(x, full.weight, full.target))(full.hidden)


@pytest.mark.parametrize(("reduction", "backward"), BACKWARDS)
def test_a_batch_of_upstream_gradients_is_a_clear_error(reduction: str, backward: str) -> None:
    full = leaves(Case())
    loss = linear_cross_entropy(full.hidden, full.weight, full.target, reduction=reduction, backward=backward)
    batch = torch.randn(3, *loss.shape)
    with pytest.raises(NotImplementedError, match="one upstream gradient"):
        torch.autograd.grad(loss, full.hidden, batch, is_grads_batched=True, retain_graph=True)
    # The graph is as it was.
    (grad,) = torch.autograd.grad(loss, full.hidden, batch[0])
    again = linear_cross_entropy(full.hidden, full.weight, full.target, reduction=reduction, backward=backward)
    torch.testing.assert_close(grad, torch.autograd.grad(again, full.hidden, batch[0])[0])


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "class_weight", "token_weight", "normalizer"])
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_a_clear_error(name: str, grad: bool) -> None:
    """Not a result without a tangent, which would stand for a derivative of 0."""
    full = make_inputs(Case(bias=True, class_weight=True, token_weight=True))
    given = {key: value for key, value in vars(full).items() if key != "upstream"} | {"normalizer": torch.tensor(7.0)}
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        plain = linear_cross_entropy(**given)
        given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(NotImplementedError, match=rf"{name}.*forward-mode.*autograd\.grad"):
            linear_cross_entropy(**given)
    compare.assert_loss(
        plain, reference_of(Case(bias=True, class_weight=True, token_weight=True, normalizer=7.0)).loss, 1e-5
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpointed_gradients_are_equal_and_not_doubled(use_reentrant: bool, reduction: str) -> None:
    case = Case(reduction=reduction)
    full = leaves(case)

    def block(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, full.weight, full.target, reduction=reduction)

    loss = checkpoint(block, full.hidden, use_reentrant=use_reentrant)
    loss.backward(full.upstream)
    expected = reference_of(case)
    compare.assert_close(full.hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(full.weight.grad, expected.weight_grad, 1e-5, "weight gradient")


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in op.name() else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("backward", ["auto", "recompute"])
@pytest.mark.parametrize("chunk_rows", [7, None])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpointed_by_a_policy_that_keeps_products(reduction: str, chunk_rows: int | None, backward: str) -> None:
    """Products into the loop's buffer are written over: no recomputation may be handed them as they are by then."""
    case = Case(reduction=reduction)
    full = leaves(case)

    def block(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, full.weight, full.target, reduction=reduction, chunk_rows=chunk_rows, backward=backward
        )

    contexts = partial(create_selective_checkpoint_contexts, keep_products, allow_cache_entry_mutation=True)
    checkpoint(block, full.hidden, use_reentrant=False, context_fn=contexts).backward(full.upstream)
    expected = reference_of(case)
    compare.assert_close(full.hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(full.weight.grad, expected.weight_grad, 1e-5, "weight gradient")


def keep_what_is_communicated(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "c10d" in op.name() else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(ctx: Context, case: Case) -> Result:
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)

    def block(hidden: Tensor) -> Tensor:
        loss = linear_cross_entropy(hidden, weight, target, **keywords)
        assert isinstance(loss, Tensor)
        return loss

    contexts = partial(create_selective_checkpoint_contexts, keep_what_is_communicated)
    loss = checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
    upstream = make_inputs(case).upstream
    loss.backward(upstream[local_tokens(case, ctx.rank)] if case.reduction == "none" else upstream)
    return Result(loss.detach(), hidden.grad, weight.grad, None, {})


@pytest.mark.parametrize("tokens", [None, (6, 7)])
@pytest.mark.parametrize(("reduction", "backward"), [("none", "auto"), ("sum", "recompute"), ("mean", "auto")])
def test_checkpointed_by_a_policy_that_keeps_what_is_communicated(
    reduction: str, backward: str, tokens: tuple[int, int] | None, workers: Pool
) -> None:
    """Collectives write where they are told to: left out in the recomputation, it would read unwritten memory."""
    case = Case(world=2, reduction=reduction, tokens=tokens, chunk_rows=4, options=(("backward", backward),))
    judge(case, workers.run(2, _checkpointed, case))


LAYOUTS = ("transposed", "sliced", "expanded", "strided", "negative_bit", "column", "last", "one column", "one value")


def _layout(name: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(4, 5, 8, generator=generator)
    weight = torch.randn(21, 8, generator=generator)
    target = torch.randint(21, (4, 5), generator=generator)
    table = torch.randint(21, (4, 5, 3), generator=generator)
    if name == "transposed":
        hidden = torch.randn(5, 4, 8, generator=generator).transpose(0, 1)
        weight = torch.randn(8, 21, generator=generator).T
        target = torch.randint(21, (5, 4), generator=generator).T
    elif name == "sliced":
        hidden = torch.randn(4, 6, 8, generator=generator)[:, :-1]
        target = torch.randint(21, (4, 6), generator=generator)[:, 1:]
    elif name == "expanded":
        hidden = torch.randn(1, 5, 8, generator=generator).expand(4, 5, 8)
        target = torch.randint(21, (1, 5), generator=generator).expand(4, 5)
    elif name == "strided":
        hidden = torch.randn(4, 5, 16, generator=generator)[..., ::2]
        weight = torch.randn(42, 16, generator=generator)[::2, 1::2]
    elif name == "negative_bit":
        hidden = torch.complex(hidden, hidden).conj().imag
    elif name == "column":  # flattening makes a view with a stride
        target = table[..., 1]
    elif name == "last":
        hidden, target = hidden[:, -1:], target[:, -1:]
    elif name == "one column":
        hidden, target = hidden[0], table[0, :, 1]
    else:
        hidden, target = hidden[0], torch.tensor([3]).expand(5)
    return hidden, weight, target


def _any_layout(_: Context | None, name: str, reduction: str, backend: Any) -> None:
    hidden, weight, target = _layout(name)
    upstream = torch.tensor(0.7)
    if reduction == "none":
        upstream = torch.randn(*target.shape, 2, generator=torch.Generator().manual_seed(4))[..., 1]
    elif name == "negative_bit":
        upstream = torch.complex(torch.tensor(0.1), torch.tensor(0.7)).conj().imag
    base_hidden, base_weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    before = [t.clone() for t in (hidden, weight, target, upstream)]
    loss = linear_cross_entropy(base_hidden, base_weight, target, reduction=reduction, chunk_rows=3, backend=backend)
    loss.backward(upstream)
    expected = oracle.reference(hidden, weight, target, upstream=upstream, reduction=reduction)
    compare.assert_loss(loss, expected.loss, 1e-5)
    compare.assert_close(base_hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(base_weight.grad, expected.weight_grad, 1e-5, "weight gradient")
    for tensor, kept in zip((hidden, weight, target, upstream), before, strict=True):
        assert torch.equal(tensor, kept), "an input was written to"


def _values_in_bits(_: Context | None, backend: Any) -> None:
    """What is no parameter, with its values negated by a bit, or 0 by one that says so and without memory."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(21, 8, generator=generator)
    target, magnitudes = torch.randint(21, (6,), generator=generator), torch.rand(21, generator=generator) + 0.1
    zeros = partial(torch._efficientzerotensor, dtype=torch.float32)
    for class_weight, upstream in (
        (torch._neg_view(-magnitudes), torch.tensor(0.7)),
        (zeros((21,)), torch.tensor(0.7)),
        (magnitudes, zeros(())),
    ):
        leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
        keywords: dict[str, Any] = {"label_smoothing": 0.2, "reduction": "sum"}
        loss = linear_cross_entropy(*leaves, target, class_weight=class_weight, backend=backend, **keywords)
        loss.backward(upstream)
        expected = oracle.reference(
            hidden, weight, target, upstream=upstream.clone(), class_weight=class_weight.clone(), **keywords
        )
        compare.assert_loss(loss, expected.loss, 1e-5)
        compare.assert_close(leaves[0].grad, expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(leaves[1].grad, expected.weight_grad, 1e-5, "weight gradient")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_values_that_are_not_in_memory(backend: str, pool_for: Any) -> None:
    pool_for(backend).run(1, _values_in_bits, backend)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_inputs(layout: str, reduction: str) -> None:
    _any_layout(None, layout, reduction, "torch")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_inputs_interpreted(layout: str, reduction: str, interpreted_workers: Pool) -> None:
    """Kernels see memory, not strides."""
    interpreted_workers.run(1, _any_layout, layout, reduction, "triton")


@pytest.mark.parametrize(("layout", "copies"), [("transposed", 0), ("strided", 1)])
def test_a_weight_is_copied_where_no_product_takes_it_and_once(layout: str, copies: int) -> None:
    """A GEMM takes a matrix with a stride of 1; any other it would copy for itself, in each chunk."""
    hidden, weight, target = _layout(layout)
    with Trace() as trace:
        linear_cross_entropy(hidden, weight, target, chunk_rows=3)
    assert len([what for _, what in trace.allocated if what.startswith("clone -> (21, 8)")]) == copies


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"backward": "recompute"}, {"reduction": "none"}], ids=str)
def test_a_loss_keeps_no_hidden_states_after_backward(options: Any, autocast: bool) -> None:
    """Who logs the loss would hold the hidden states of a step, and autocast's copy of the weight, through the next."""

    def copies() -> int:
        gc.collect()
        return sum(type(t) is Tensor and t.dtype == torch.bfloat16 for t in gc.get_objects())

    full, before = leaves(Case()), copies()
    hidden = full.hidden * 1.0
    kept = weakref.ref(hidden)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(hidden, full.weight, full.target, **options)
    del hidden
    loss.sum().backward()
    assert copies() == before
    assert kept() is None


def test_expanded_upstream_gradient() -> None:
    """loss.sum() hands down a 0-stride gradient, which must not be scaled in place."""
    full = leaves(Case(reduction="none"))
    linear_cross_entropy(full.hidden, full.weight, full.target, reduction="none").sum().backward()
    expected = reference_of(Case(reduction="sum"))
    compare.assert_close(
        full.hidden.grad, expected.hidden_grad / make_inputs(Case(reduction="sum")).upstream, 1e-5, "hidden gradient"
    )


def _inputs_before_and_after(ctx: Context | None, case: Case) -> list[tuple[Tensor, Tensor]]:
    rank, group = (0, None) if ctx is None else (ctx.rank, ctx.group)
    (hidden, weight, target), keywords = loss_arguments(case, rank, group)
    upstream = make_inputs(case).upstream
    tensors = [hidden, weight, target, upstream, *(v for v in keywords.values() if isinstance(v, Tensor))]
    before = [t.detach().clone() for t in tensors]
    loss = linear_cross_entropy(hidden, weight, target, **keywords)
    loss.backward(upstream.to(loss.dtype))
    return list(zip([t.detach() for t in tensors], before, strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_inputs_are_never_written(reduction: str, dtype: torch.dtype, world: int, workers: Pool) -> None:
    extras: dict[str, Any] = {"bias": True, "class_weight": True, "token_weight": True, "split": "padded"}
    case = Case(world=world, reduction=reduction, dtype=dtype, **extras)
    results = workers.run(world, _inputs_before_and_after, case)
    for pairs in results:
        for now, before in pairs:
            compare.assert_same_bits([before, now], "an input")


def test_hidden_that_is_no_leaf_and_a_weight_used_twice() -> None:
    """Tied weights: the embedding's and the head's gradients add up."""
    full = leaves(Case())
    ids = torch.arange(13) % 21
    loss = linear_cross_entropy(full.weight[ids] * 0.5 + full.hidden, full.weight, full.target)
    loss.backward()
    weight = full.weight.detach().double().requires_grad_()
    hidden = weight[ids] * 0.5 + full.hidden.detach().double()
    torch.nn.functional.cross_entropy(hidden @ weight.T, full.target).backward()
    compare.assert_close(full.weight.grad, weight.grad, 1e-5, "weight gradient")


@pytest.mark.parametrize("scale", [0.0, 1.0, -3.0, 65536.0])
@pytest.mark.parametrize(("reduction", "backward"), [("mean", "auto"), ("sum", "recompute")])
def test_scalar_upstream_gradients(scale: float, reduction: str, backward: str) -> None:
    case = Case(reduction=reduction)
    full = leaves(case)
    loss = linear_cross_entropy(full.hidden, full.weight, full.target, reduction=reduction, backward=backward)
    (loss * scale).backward()
    expected = reference_of(case)
    factor = scale / full.upstream.double()
    compare.assert_close(full.hidden.grad, factor * expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(full.weight.grad, factor * expected.weight_grad, 1e-5, "weight gradient")
