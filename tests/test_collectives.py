"""Which collectives run, how many, in what order, and that their number never depends on data."""

from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from tests.kit.cases import Case, loss_arguments, make_inputs
from tests.kit.trace import Event, Trace
from tests.kit.workers import MAX_WORLD, Context, Pool, fresh_group

CHUNKS = 4
CASE = Case(lead=(16,), chunk_rows=4, world=2, ignored="none")
Traced = tuple[list[Event], list[Event]]


def _trace(ctx: Context, case: Case, check_ranks: str = "never", grad: bool = True) -> Traced:
    group = ctx.group
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, group)
    with torch.set_grad_enabled(grad):
        with Trace() as forward:
            loss = linear_cross_entropy(hidden, weight, target, check_ranks=check_ranks, **keywords)
        with Trace() as backward:
            if grad:
                upstream = make_inputs(case).upstream
                loss.backward(upstream.to(loss.dtype))
    return forward.events, backward.events


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events if event.is_collective]


def traced(pool: Pool, case: Case, *args: Any) -> tuple[list[str], list[str]]:
    """The collectives of forward and backward, which must be the same on all ranks."""
    results = pool.run(case.world, _trace, case, *args)
    first = tuple(names(events) for events in results[0])
    for other in results[1:]:
        assert tuple(names(events) for events in other) == first
    return first  # type: ignore[return-value]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("split", ["even", "uneven", "empty"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_in_forward(world: int, split: str, reduction: str, workers: Pool) -> None:
    """Per chunk one packed all-gather of statistics and one all-reduce of dX; backward calls none."""
    case = Case(lead=(16,), chunk_rows=4, world=world, split=split, reduction=reduction, ignored="none")
    forward, backward = traced(workers, case)
    assert forward == ["all_gather", "all_reduce"] * CHUNKS
    assert backward == []


@pytest.mark.parametrize(("reduction", "how"), [("none", "auto"), ("mean", "recompute")])
def test_gradients_in_backward(reduction: str, how: str, workers: Pool) -> None:
    """Forward exchanges statistics only; backward has the global lse and only reduces dX."""
    case = Case(lead=(16,), chunk_rows=4, world=2, reduction=reduction, options=(("backward", how),))
    forward, backward = traced(workers, case)
    assert forward == ["all_gather"] * CHUNKS
    assert backward == ["all_reduce"] * CHUNKS


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize(
    "options",
    [
        (),
        (("label_smoothing", 0.1),),
        (("z_loss", 1e-2), ("softcap", 5.0)),
        (("token_scaling", True), ("logit_scale", 0.5)),
    ],
    ids=str,
)
def test_no_option_adds_a_collective(options: Any, bias: bool, ignored: str, workers: Pool) -> None:
    case = Case(lead=(16,), chunk_rows=4, world=2, bias=bias, ignored=ignored, class_weight=bias, options=options)
    forward, backward = traced(workers, case)
    assert forward == ["all_gather", "all_reduce"] * CHUNKS
    assert backward == []


def test_evaluation_only_exchanges_statistics(workers: Pool) -> None:
    forward, backward = traced(workers, CASE, "never", False)
    assert forward == ["all_gather"] * CHUNKS
    assert backward == []


def test_partial_hidden_grad_is_not_reduced(workers: Pool) -> None:
    case = Case(lead=(16,), chunk_rows=4, world=2, options=(("reduce_hidden_grad", False),))
    forward, backward = traced(workers, case)
    assert forward == ["all_gather"] * CHUNKS
    assert backward == []


@pytest.mark.parametrize(("reduction", "how"), [("mean", "auto"), ("none", "auto")])
def test_hidden_grad_reduction_starts_before_the_weight_gradient(reduction: str, how: str, workers: Pool) -> None:
    case = Case(lead=(16,), chunk_rows=4, world=2, reduction=reduction, options=(("backward", how),))
    for forward, backward in workers.run(2, _trace, case):
        events = backward if reduction == "none" else forward
        order = [e.name for e in events if e.name in ("all_reduce", "mm", "addmm", "addmm_")]
        per_chunk = len(order) // CHUNKS
        for chunk in range(CHUNKS):
            # logits, dX, its reduction, dW
            assert order[chunk * per_chunk : (chunk + 1) * per_chunk].index("all_reduce") == 2, order
            assert per_chunk == 4, order


def test_statistics_travel_in_one_small_packet(workers: Pool) -> None:
    """A chunk's packet holds 4 numbers a row, not columns."""
    for forward, _ in workers.run(2, _trace, CASE):
        for event in forward:
            if event.name == "all_gather":
                sizes = [torch.Size(shape).numel() for shape in event.shapes]
                assert sorted(sizes) == [4 * 4, 2 * 4 * 4], event
                assert set(event.dtypes) == {torch.float32}


@pytest.mark.parametrize("grouped", [False, True])
def test_one_rank_calls_no_collective(grouped: bool, workers: Pool) -> None:
    for check_ranks in ("never", "first", "always"):
        for reduction in ("mean", "none"):
            case = Case(lead=(16,), chunk_rows=4, world=1, reduction=reduction)
            ((forward, backward),) = workers.run(1, _trace_alone, case, grouped, check_ranks)
            assert forward == backward == []


def _trace_alone(ctx: Context, case: Case, grouped: bool, check_ranks: str) -> Any:
    full = make_inputs(case)
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
    with Trace() as forward:
        loss = linear_cross_entropy(
            hidden,
            weight,
            full.target,
            reduction=case.reduction,
            group=ctx.group if grouped else None,
            check_ranks=check_ranks,
        )
    with Trace() as backward:
        loss.backward(full.upstream)
    return names(forward.events), names(backward.events)


def _checks_of_two_calls(ctx: Context, case: Case, mode: str | None) -> list[int] | None:
    """Collectives beyond those of the loop, in the first and the second call on a fresh group of ranks 0 and 1."""
    group = fresh_group(ctx, [0, 1])
    if group is None:
        return None
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, group)
    counts = []
    for _ in range(2):
        with Trace() as trace:
            linear_cross_entropy(hidden, weight, target, **keywords, **({} if mode is None else {"check_ranks": mode}))
        counts.append(len(trace.collectives) - 2 * CHUNKS)
    return counts


@pytest.mark.parametrize(
    ("mode", "expected"), [("never", (0, 0)), ("first", (1, 0)), ("always", (1, 1)), ("auto", (1, 1)), (None, (1, 1))]
)
def test_when_ranks_are_compared(mode: str | None, expected: tuple[int, int], workers: Pool) -> None:
    for counts in workers.run(MAX_WORLD, _checks_of_two_calls, CASE, mode)[:2]:
        assert [min(count, 1) for count in counts] == list(expected), counts
        assert max(counts) <= 2, "a comparison takes at most two collectives"


def test_all_collectives_use_the_group_given(workers: Pool) -> None:
    """A strided subgroup works while the other ranks do nothing at all."""
    for result in workers.run(4, _on_strided_group, CASE):
        if result is not None:
            assert result == ["all_gather", "all_reduce"] * CHUNKS


def _on_strided_group(ctx: Context, case: Case) -> list[str] | None:
    if ctx.rank not in (1, 3):
        return None
    group = ctx.groups[(1, 3)]
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank // 2, group)
    with Trace() as trace:
        linear_cross_entropy(hidden, weight, target, check_ranks="never", **keywords)
    return trace.collectives
