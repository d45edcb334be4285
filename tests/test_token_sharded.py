"""hidden_layout="sharded": each rank has its own tokens and its own rows of the vocabulary; one loss for the group."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from tests.kit import compare, oracle
from tests.kit.cases import (
    Case,
    all_pairs,
    case_id,
    check,
    judge,
    loss_arguments,
    make_inputs,
    reference_of,
    run_case,
    takes_normalizer,
)
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import assert_all_raise

# Tokens of each rank: equal, different, none on one, none on any, all on one.
TOKENS: dict[int, list[tuple[int, ...]]] = {
    2: [(6, 6), (3, 9), (0, 12), (12, 0), (0, 0), (1, 0)],
    3: [(4, 4, 4), (1, 7, 4), (0, 5, 7), (12, 0, 0)],
    4: [(3, 3, 3, 3), (5, 0, 1, 6)],
}
AXES: dict[str, Any] = {
    "tokens": [tokens for world in TOKENS.values() for tokens in world],
    "split": ["even", "uneven", "empty", "padded"],
    "dtype": [torch.float32, torch.float64],
    "reduction": ["mean", "sum", "none"],
    "backward": ["auto", "recompute"],
    "bias": [False, True],
    "class_weight": [False, True],
    "token_weight": [False, True],
    "normalizer": [None, 7.5],
    "ignored": ["some", "none", "all"],
    "chunk_rows": [None, 1, 4],
    "z_loss": [0.0, 1e-2],
    "label_smoothing": [0.0, 0.1],
    "skip_ignored": [False, True],
}


def make_case(row: dict[str, Any], **more: Any) -> Case:
    fields = {name: value for name, value in row.items() if name in Case.__dataclass_fields__}
    options = tuple((name, value) for name, value in row.items() if name not in fields)
    tokens = row["tokens"]
    return Case(**{"lead": (sum(tokens),), "world": len(tokens), **fields, "options": options, **more})


@pytest.mark.parametrize("row", all_pairs(AXES, takes_normalizer), ids=case_id)
def test_against_the_oracle(row: dict[str, Any], workers: Pool) -> None:
    check(make_case(row), workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 9))
def test_against_the_oracle_with_other_companions(seed: int, workers: Pool) -> None:
    for row in all_pairs(AXES, takes_normalizer, seed=seed):
        check(make_case(row, seed=seed), workers)


@pytest.mark.parametrize("tokens", [(3, 4), (0, 6), (2, 3, 1)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_interpreted_triton(tokens: tuple[int, ...], reduction: str, interpreted_workers: Pool) -> None:
    case = make_case({"tokens": tokens, "reduction": reduction, "split": "uneven", "z_loss": 1e-2}, backend="triton")
    check(case, interpreted_workers)


@pytest.mark.parametrize("tokens", TOKENS[2] + TOKENS[3])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_max_tokens_changes_nothing_but_the_synchronisation(
    tokens: tuple[int, ...], reduction: str, workers: Pool
) -> None:
    row = {"tokens": tokens, "reduction": reduction, "max_tokens": max(*tokens, 1) + 2, "chunk_rows": 4}
    check(make_case(row), workers)


@pytest.mark.parametrize("aux", ["z_loss", "lse", "accuracy", "predictions", "entropy", "num_valid"])
@pytest.mark.parametrize("tokens", [(6, 6), (0, 12), (1, 7, 4)])
def test_aux_scalars_are_the_groups_and_vectors_the_local_slice(
    aux: str, tokens: tuple[int, ...], workers: Pool
) -> None:
    for reduction in ("mean", "none"):
        check(make_case({"tokens": tokens, "reduction": reduction, "z_loss": 1e-2}, aux=(aux,)), workers)


def _leading_dimensions(ctx: Context, case: Case, lead: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    shaped = hidden.detach().reshape(*lead, -1).requires_grad_()
    loss = linear_cross_entropy(shaped, weight, target.reshape(lead), **keywords)
    loss.sum().backward()
    assert loss.shape == (lead if case.reduction == "none" else ())
    assert shaped.grad is not None
    return loss.detach(), shaped.grad.reshape(-1, case.hidden_size)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_leading_dimensions(reduction: str, workers: Pool) -> None:
    case = make_case({"tokens": (6, 6), "reduction": reduction})
    flat = workers.run(2, _leading_dimensions, case, (6,))
    for lead in ((2, 3), (3, 1, 2)):
        for (loss, grad), (flat_loss, flat_grad) in zip(
            workers.run(2, _leading_dimensions, case, lead), flat, strict=True
        ):
            compare.assert_close(loss.reshape(-1), flat_loss.double().reshape(-1), 1e-6, "loss")
            compare.assert_close(grad, flat_grad.double(), 1e-6, "hidden gradient")


def _scaled_in_place(ctx: Context) -> Tensor:
    hidden, weight = torch.ones(3, 4, requires_grad=True), torch.zeros(4, 4)
    loss = linear_cross_entropy(
        hidden, weight, torch.arange(3), group=ctx.group, vocab_size=8, hidden_layout="sharded", reduction="none"
    )
    return loss.mul_(2.0).detach()


def test_losses_can_be_written_to(workers: Pool) -> None:
    for loss in workers.run(2, _scaled_in_place):
        torch.testing.assert_close(loss, torch.full((3,), 2 * math.log(8)))


@pytest.mark.parametrize("scale", [2.0, 3, 0.5])
@pytest.mark.parametrize(("reduction", "backward"), [("mean", "auto"), ("mean", "recompute"), ("none", "auto")])
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_hidden_grad_scale(scale: float, reduction: str, backward: str, layout: str, workers: Pool) -> None:
    """dX times the scale; the loss and dW as they were: what a framework that averages over ranks needs."""
    row: dict[str, Any] = {"reduction": reduction, "backward": backward, "hidden_grad_scale": scale}
    case = make_case({"tokens": (4, 8), **row})
    if layout == "replicated":
        case = Case(world=2, reduction=reduction, options=(("backward", backward), ("hidden_grad_scale", scale)))
    results = workers.run(2, run_case, case)
    for result in results:
        assert result.hidden_grad is not None
        result.hidden_grad /= scale
    judge(case, results)


def _events(ctx: Context, case: Case, check_ranks: str) -> tuple[list[str], list[str], list[str]]:
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    with Trace() as forward:
        loss = linear_cross_entropy(hidden, weight, target, check_ranks=check_ranks, **keywords)
    with Trace() as backward:
        loss.backward(torch.ones_like(loss))
    products = [e.name for e in forward.events if e.name in ("mm", "addmm", "addmm_", "reduce_scatter")]
    return forward.collectives, backward.collectives, products


@pytest.mark.parametrize("tokens", [(8, 8), (1, 15), (0, 16), (16, 0)])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_same_collectives_on_all_ranks_whatever_the_data(
    tokens: tuple[int, ...], ignored: str, reduction: str, workers: Pool
) -> None:
    row = {"tokens": tokens, "ignored": ignored, "reduction": reduction, "max_tokens": 16, "chunk_rows": 8}
    results = workers.run(2, _events, make_case(row), "never")
    assert results[0][:2] == results[1][:2]
    reference = workers.run(2, _events, make_case(row | {"tokens": (8, 8), "ignored": "none"}), "never")
    assert results[0][:2] == reference[0][:2]


@pytest.mark.parametrize("max_tokens", [None, 8])
@pytest.mark.parametrize("token_weight", [False, True])
@pytest.mark.parametrize(("reduction", "grads_in"), [("mean", "forward"), ("none", "backward")])
def test_collectives_of_a_step(
    max_tokens: int | None, token_weight: bool, reduction: str, grads_in: str, workers: Pool
) -> None:
    """At first what all rows need: the largest number of tokens unless it is given, targets, token weights. Then a
    chunk's hidden states, its statistics, and its gradient, which is reduced before the weight's is made."""
    row = {"tokens": (8, 8), "max_tokens": max_tokens, "chunk_rows": 4, "reduction": reduction}
    case = make_case(row | {"token_weight": token_weight})
    largest = ["all_reduce"] if max_tokens is None else []
    # Targets and weights are gathered when the loop first asks, when it has the hidden states of the first chunk.
    first = ["all_gather"] * (2 if token_weight else 1)
    for forward, backward, products in workers.run(2, _events, case, "never"):
        if grads_in == "forward":
            assert forward == [*largest, *first, *["all_gather", "all_gather", "reduce_scatter"] * 4]
            assert backward == []
            # logits, dX, its reduction, dW
            assert products == ["mm", "mm", "reduce_scatter", "mm", *["mm", "mm", "reduce_scatter", "addmm"] * 3]
        else:
            assert forward == [*largest, *first, *["all_gather"] * 8]
            assert backward == ["all_gather", *["all_gather", "reduce_scatter"] * 4], "the upstream gradients first"


def _dtypes_of_reductions(ctx: Context, case: Case) -> set[torch.dtype]:
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    with Trace() as trace:
        linear_cross_entropy(hidden, weight, target, **keywords).backward()
    reductions = [event for event in trace.events if event.name in ("reduce_scatter", "all_reduce")]
    # Without the largest number of tokens, which is an int64.
    return {dtype for event in reductions for dtype in event.dtypes} - {torch.int64}


@pytest.mark.parametrize("tokens", [(6, 6), None], ids=["token-sharded", "replicated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", [None, torch.float32, "own"], ids=str)
def test_the_dtype_in_which_the_hidden_gradient_is_summed(
    tokens: tuple[int, ...] | None, dtype: torch.dtype, chosen: Any, workers: Pool
) -> None:
    """float32 unless the inputs' own is asked for."""
    chosen = dtype if chosen == "own" else chosen
    options = (("hidden_grad_reduce_dtype", chosen),)
    case = Case(lead=(12,), world=2, tokens=tokens, dtype=dtype, options=options, chunk_rows=4)
    assert workers.run(2, _dtypes_of_reductions, case) == [{chosen or torch.float32}] * 2


def _ranks_with_own_option(ctx: Context, case: Case, change: dict[int, dict[str, Any]]) -> Tensor:
    arguments, keywords = loss_arguments(case, ctx.rank, ctx.group)
    return linear_cross_entropy(*arguments, **{**keywords, **change.get(ctx.rank, {})})


def test_max_tokens_too_small_on_one_rank_raises_on_all(workers: Pool) -> None:
    case = make_case({"tokens": (3, 9)})
    same = {rank: {"max_tokens": 4} for rank in range(2)}
    found = workers.outcomes(2, _ranks_with_own_option, case, same)
    assert_all_raise(found, "ValueError", "this rank has 9 tokens, more than max_tokens=4")
    differ = {0: {"max_tokens": 10}, 1: {"max_tokens": 12}}
    found = workers.outcomes(2, _ranks_with_own_option, case, differ)
    assert_all_raise(found, "ValueError", "about max_tokens, got rank 0: 10, rank 1: 12")


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float16), (torch.float64, torch.float32)], ids=str)
def test_token_weights_travel_in_one_dtype(dtypes: tuple[torch.dtype, ...], workers: Pool) -> None:
    """Whatever each rank gives: their bytes would be taken for those of another number."""
    case = make_case({"tokens": (6, 6)})
    for rank_dtypes in (dtypes, dtypes[::-1]):
        weights = {
            rank: {"token_weight": torch.linspace(0.5, 3.0, 6).to(dtype)} for rank, dtype in enumerate(rank_dtypes)
        }
        same = {rank: {"token_weight": given["token_weight"].float()} for rank, given in weights.items()}
        for got, expected in zip(
            workers.run(2, _ranks_with_own_option, case, weights),
            workers.run(2, _ranks_with_own_option, case, same),
            strict=True,
        ):
            assert torch.equal(got, expected)


def _trainable_on_one_rank(ctx: Context, body: bool, reduction: str) -> None:
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(ctx.rank)).requires_grad_(body)
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(9)).requires_grad_(ctx.rank == 0)
    loss = linear_cross_entropy(
        hidden, weight, torch.tensor([0, 9, 4]), group=ctx.group, vocab_size=10, hidden_layout="sharded",
        reduction=reduction,
    )  # fmt: skip
    if loss.requires_grad:
        loss.sum().backward()
    if ctx.rank:
        assert weight.grad is None
        return
    hidden = torch.cat([torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2)])
    upstream = torch.ones(6 if reduction == "none" else ())
    both = weight.detach().repeat(2, 1)  # that of rank 1 has the same numbers
    expected = oracle.reference(hidden, both, torch.tensor([0, 9, 4] * 2), reduction=reduction, upstream=upstream)
    compare.assert_close(weight.grad, expected.weight_grad[:5], 1e-5, "weight gradient")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_weight_trainable_on_one_rank(reduction: str, workers: Pool) -> None:
    """A backward that gathers must run on all ranks: with a frozen body it would run on one, and wait for ever."""
    workers.run(2, _trainable_on_one_rank, True, reduction)
    if reduction == "mean":
        workers.run(2, _trainable_on_one_rank, False, reduction)
        return
    for outcome in workers.outcomes(2, _trainable_on_one_rank, False, reduction):
        assert_all_raise([outcome], "ValueError", "about whether weight or bias requires grad")


def _twice_on_some_ranks(ctx: Context, trained: tuple[bool, ...], check_ranks: str) -> str | None:
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(ctx.rank))
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(9)).requires_grad_(trained[ctx.rank])
    loss_of = partial(
        linear_cross_entropy, hidden, weight, torch.tensor([0, 9, 4]), group=ctx.group, vocab_size=10,
        hidden_layout="sharded",
    )  # fmt: skip
    with torch.no_grad():  # all ranks want no gradient here, and say so
        loss_of(check_ranks="always")
    loss = loss_of(check_ranks=check_ranks)
    if not loss.requires_grad:
        return None
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    try:
        (second,) = torch.autograd.grad(loss, weight)
    except RuntimeError as error:
        return str(error)
    compare.assert_close(second, first.double(), 1e-5, "second gradient")
    return "equal"


@pytest.mark.parametrize("check_ranks", ["always", "first"])
@pytest.mark.parametrize("trained", [(True, False), (False, True), (True, True), (False, False)])
def test_a_second_backward_on_some_ranks_is_an_error_and_no_hang(
    trained: tuple[bool, bool], check_ranks: str, workers: Pool
) -> None:
    """A frozen body, and a weight that trains on one rank, which would gather alone. On all ranks it is right, where
    they have said so: of a call that is not checked nobody knows."""
    answers = workers.run(2, _twice_on_some_ranks, trained, check_ranks, timeout=20)
    for answer, trains in zip(answers, trained, strict=True):
        assert (answer is not None) == trains
        if trains and all(trained) and check_ranks == "always":
            assert answer == "equal"
        elif trains:
            assert answer is not None
            assert "second backward" in answer
            assert "recompute" in answer


def _twice_with_a_body(ctx: Context) -> None:
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(ctx.rank)).requires_grad_()
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(9))
    for _ in range(2):  # the second call is not checked
        loss = linear_cross_entropy(
            hidden, weight, torch.tensor([0, 9, 4]), group=ctx.group, vocab_size=10, hidden_layout="sharded",
            check_ranks="first",
        )  # fmt: skip
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    compare.assert_close(second, first.double(), 1e-5, "second gradient")


def test_a_second_backward_of_a_call_that_is_not_checked(workers: Pool) -> None:
    """Whether the hidden states need a gradient is alike on all ranks, so this backward runs on all."""
    workers.run(2, _twice_with_a_body)


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("max_tokens", [None, 8])
def test_a_bad_target_on_one_rank_raises_on_all(bad_rank: int, max_tokens: int | None, workers: Pool) -> None:
    outcomes = workers.outcomes(2, _with_bad_target, bad_rank, max_tokens)
    assert_all_raise([outcomes[bad_rank]], "IndexError", "target 99 of token 3 is outside [0, 21)")
    assert_all_raise([outcomes[1 - bad_rank]], "IndexError", "target 99 of a token of another rank is outside [0, 21)")


def _with_bad_target(ctx: Context, bad_rank: int, max_tokens: int | None) -> Tensor:
    case = make_case({"tokens": (5, 7), "chunk_rows": 2, "max_tokens": max_tokens})
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    target = target.clone()
    if ctx.rank == bad_rank:
        target[3] = 99
    return linear_cross_entropy(hidden, weight, target, **keywords)


def test_data_parallel_averaging_with_hidden_grad_scale_is_one_process(workers: Pool) -> None:
    """A body whose gradients a framework averages over W ranks, and one shared head that is never averaged."""
    case = make_case({"tokens": (4, 8)})
    full = make_inputs(case)
    body = torch.linspace(-1, 1, 64).reshape(8, 8)
    results = workers.run(2, _averaged_body, case, body)
    reference_body = body.double().requires_grad_()
    weight = full.weight.double().requires_grad_()
    logits = (full.hidden.double() @ reference_body) @ weight.T
    torch.nn.functional.cross_entropy(logits, full.target).backward()
    for rank, (body_grad, weight_grad) in enumerate(results):
        compare.assert_close(body_grad, reference_body.grad, 1e-5, "body gradient")
        compare.assert_close(weight_grad, weight.grad[slice(*case.bounds()[rank])], 1e-5, "weight gradient")


def _averaged_body(ctx: Context, case: Case, body: Tensor) -> tuple[Tensor, Tensor]:
    import torch.distributed as dist

    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    body.requires_grad_()
    loss = linear_cross_entropy(hidden.detach() @ body, weight, target, hidden_grad_scale=float(ctx.world), **keywords)
    loss.backward()
    assert body.grad is not None
    dist.all_reduce(body.grad, group=ctx.group)
    return body.grad / ctx.world, weight.grad


def test_without_a_group_token_sharding_is_the_plain_loss() -> None:
    full = make_inputs(Case())
    expected = reference_of(Case())
    loss = linear_cross_entropy(full.hidden, full.weight, full.target, hidden_layout="sharded")
    compare.assert_loss(loss, expected.loss, 1e-5)


SMALL = {"lead": (40,), "hidden_size": 16, "vocab_size": 64, "chunk_rows": 16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [(20, 20), (3, 37), (0, 40)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("names", [(), ("hidden_grad_reduce_dtype",), ("accum_dtype", "logits_dtype")], ids=str)
def test_16_bit(
    dtype: torch.dtype, tokens: tuple[int, ...], reduction: str, names: tuple[str, ...], workers: Pool
) -> None:
    options = tuple((name, torch.float32) for name in names)
    check(Case(world=2, tokens=tokens, dtype=dtype, reduction=reduction, options=options, **SMALL), workers)


@pytest.mark.parametrize("tokens", [(6, 6), (0, 12), (2, 10)])
@pytest.mark.parametrize("max_tokens", [12, 20])
@pytest.mark.parametrize("ignored", ["some", "all"])
def test_skipped_tokens_with_max_tokens(tokens: tuple[int, ...], max_tokens: int, ignored: str, workers: Pool) -> None:
    row = {"tokens": tokens, "max_tokens": max_tokens, "skip_ignored": True, "ignored": ignored, "token_weight": True}
    for reduction in ("mean", "none"):
        check(make_case(row | {"reduction": reduction}), workers)


def _rows_of_logits(ctx: Context, case: Case) -> int:
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    with torch.no_grad(), Trace() as trace:
        linear_cross_entropy(hidden, weight, target, **keywords)
    return sum(product.shapes[0][0] for product in trace.matrix_products)


@pytest.mark.parametrize("max_tokens", [None, 10])
@pytest.mark.parametrize("ignored", ["some", "all"])
def test_skipped_tokens_save_the_products_of_their_rows(max_tokens: int | None, ignored: str, workers: Pool) -> None:
    """Also where `max_tokens` is given: of each rank as many rows as the one with most valid tokens has."""
    row = {"tokens": (10, 10), "max_tokens": max_tokens, "skip_ignored": True, "ignored": ignored}
    case = make_case(row, seed=2)
    target = make_inputs(case).target.reshape(2, 10)
    most = int((target != -100).sum(1).max())
    assert most < 10
    assert workers.run(2, _rows_of_logits, case) == [2 * most] * 2
