"""Random cases over shapes, options, shards and dtypes against the oracle."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.cases import Case, judge, run_case
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
        vocab_size=draw(st.integers(1, 70)),
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


@QUICK
@given(case=cases())
def test_unsharded(case: Case) -> None:
    judge(case, [run_case(None, case)], conditioned=True)


@OVER_PROCESSES
@given(case=cases(worlds=(2, 3, 4)))
def test_sharded(workers: Pool, case: Case) -> None:
    judge(case, workers.run(case.world, run_case, case), conditioned=True)


@OVER_PROCESSES
@given(case=cases(worlds=(2, 3, 4), sharded_tokens=True))
def test_token_sharded(workers: Pool, case: Case) -> None:
    judge(case, workers.run(case.world, run_case, case), conditioned=True)


@pytest.mark.exhaustive
@settings(OVER_PROCESSES, max_examples=3000, derandomize=False)
@given(case=st.one_of(cases(worlds=(1, 2, 3, 4)), cases(worlds=(2, 3, 4), sharded_tokens=True)))
def test_many(workers: Pool, case: Case) -> None:
    judge(case, workers.run(case.world, run_case, case), conditioned=True)


@pytest.mark.exhaustive
@settings(OVER_PROCESSES, max_examples=300, derandomize=False)
@given(case=cases(worlds=(1, 2, 3, 4)))
def test_many_with_interpreted_triton(interpreted_workers: Pool, case: Case) -> None:
    case = dataclasses.replace(case, backend="triton", lead=case.lead[:1])
    judge(case, interpreted_workers.run(case.world, run_case, case), conditioned=True)
