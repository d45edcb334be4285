"""Random cases over shapes, options, shards and dtypes against the oracle."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit import compare
from tests.kit.cases import Case, judge, make_inputs, run_case
from tests.kit.workers import Pool

QUICK = settings(max_examples=400, deadline=None, derandomize=True)
OVER_PROCESSES = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def cases(draw: Any, worlds: tuple[int, ...] = (1,), sharded_tokens: bool = False) -> Case:
    world = draw(st.sampled_from(worlds))
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    options: dict[str, Any] = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 0.7, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 0.0, 1e-3, 0.5])),
        "softcap": draw(st.sampled_from([None, None, 1.5, 30.0])),
        "logit_scale": draw(st.sampled_from([1.0, 1.0, -0.5, 0.1, 2.5])),
        "token_scaling": draw(st.booleans()),
        "skip_ignored": draw(st.booleans()),
        "backward": draw(st.sampled_from(["auto", "recompute"])),
        "hidden_layout": "replicated",
    }
    lead: tuple[int, ...] = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    tokens = None
    if sharded_tokens:
        tokens = tuple(draw(st.lists(st.integers(0, 7), min_size=world, max_size=world)))
        lead = (sum(tokens),)
        options.pop("hidden_layout")
    return Case(
        lead=lead,
        hidden_size=draw(st.integers(1, 12)),
        vocab_size=draw(st.integers(2, 70)),
        world=world,
        split=draw(st.sampled_from(["even", "uneven", "empty", "padded"])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        reduction=reduction,
        bias=draw(st.booleans()),
        class_weight=draw(st.booleans()),
        token_weight=draw(st.booleans()),
        normalizer=draw(st.sampled_from([None, 0.5, 12.0])) if reduction == "mean" else None,
        ignored=draw(st.sampled_from(["some", "none", "all"])),
        ignore_index=draw(st.sampled_from([-100, -1, 0])),
        chunk_rows=draw(st.sampled_from([None, 1, 2, 3, 7])),
        tokens=tokens,
        options=tuple(options.items()),
        aux=() if options["skip_ignored"] else tuple(draw(st.sets(st.sampled_from(["lse", "entropy", "z_loss"])))),
        seed=draw(st.integers(0, 10**6)),
    )


def tolerance(case: Case) -> compare.Tolerance:
    """Wider than elsewhere: some random gradients are sums whose terms nearly cancel (a vocabulary of 2, smoothing)."""
    return compare.Tolerance(3e-5, 1e-4) if case.dtype == torch.float32 else compare.Tolerance(1e-11, 1e-10)


@QUICK
@given(case=cases())
def test_unsharded(case: Case) -> None:
    judge(case, [run_case(None, case)], tolerance(case))


@QUICK
@given(case=cases())
def test_a_vocabulary_of_one(case: Case) -> None:
    """All terms but the z part cancel: what is left is rounding, which is held against the largest term."""
    options = {**dict(case.options), "z_loss": 0.0}
    case = dataclasses.replace(case, vocab_size=1, options=tuple(options.items()), ignore_index=-100, split="even")
    result, full = run_case(None, case), make_inputs(case)
    eps = torch.finfo(case.dtype).eps
    assert result.hidden_grad is not None
    assert result.weight_grad is not None
    # Class and token weights and the upstream gradient are of size 10 at most, so is the logit's scale.
    largest = 100 * max(full.upstream.abs().max().item() if full.upstream.numel() else 0.0, 1.0)
    assert result.hidden_grad.abs().sum() <= eps * largest * full.weight.abs().sum() * max(case.num_tokens, 1)
    assert result.weight_grad.abs().sum() <= eps * largest * full.hidden.abs().sum() + 0.0
    assert result.loss.abs().sum() <= eps * largest * max(case.num_tokens, 1)


@OVER_PROCESSES
@given(case=cases(worlds=(2, 3, 4)))
def test_sharded(workers: Pool, case: Case) -> None:
    judge(case, workers.run(case.world, run_case, case), tolerance(case))


@OVER_PROCESSES
@given(case=cases(worlds=(2, 3, 4), sharded_tokens=True))
def test_token_sharded(workers: Pool, case: Case) -> None:
    judge(case, workers.run(case.world, run_case, case), tolerance(case))


@pytest.mark.exhaustive
@settings(OVER_PROCESSES, max_examples=3000, derandomize=False)
@given(case=st.one_of(cases(worlds=(1, 2, 3, 4)), cases(worlds=(2, 3, 4), sharded_tokens=True)))
def test_many(workers: Pool, case: Case) -> None:
    judge(case, workers.run(case.world, run_case, case), tolerance(case))


@pytest.mark.exhaustive
@settings(OVER_PROCESSES, max_examples=300, derandomize=False)
@given(case=cases(worlds=(1, 2, 3, 4)))
def test_many_with_interpreted_triton(interpreted_workers: Pool, case: Case) -> None:
    case = dataclasses.replace(case, backend="triton", lead=case.lead[:1])
    judge(case, interpreted_workers.run(case.world, run_case, case), tolerance(case))
