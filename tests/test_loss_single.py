"""Loss and gradients without a group against the float64 oracle."""

from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from tests.kit import compare
from tests.kit.cases import Case, all_pairs, case_id, judge, make_inputs, product, reference_of, run_case
from tests.kit.workers import Pool

AXES: dict[str, Any] = {
    "lead": [(13,), (1,), (2, 7), (0,), (3, 1, 5)],
    "hidden_size": [1, 8, 17],
    "vocab_size": [1, 2, 21, 129],
    "dtype": [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    "reduction": ["mean", "sum", "none"],
    "bias": [False, True],
    "ignored": ["some", "none", "all"],
    "chunk_rows": [None, 1, 4, 100],
}
# The interpreter needs 1 to 2 ms for each row and block, and truncates where it stores 16-bit floats.
TRITON_AXES = AXES | {"lead": [(7,), (1,), (2, 3), (0,)], "dtype": [torch.float32, torch.float64]}


def resolvable(row: dict[str, Any]) -> bool:
    """16-bit rounding is held to a norm, which means little for a handful of numbers."""
    if row["dtype"] in (torch.bfloat16, torch.float16):
        return row["lead"] != (1,) and row["hidden_size"] >= 8 and row["vocab_size"] >= 21
    return True


@pytest.mark.parametrize("row", all_pairs(AXES, resolvable), ids=case_id)
def test_torch_backend(row: dict[str, Any]) -> None:
    case = Case(**row)
    judge(case, [run_case(None, case)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", AXES["dtype"], ids=str)
def test_torch_backend_everywhere(dtype: torch.dtype) -> None:
    for row in product(AXES | {"dtype": [dtype]}, resolvable):
        case = Case(**row)
        judge(case, [run_case(None, case)], conditioned=True)


@pytest.mark.parametrize("row", all_pairs(TRITON_AXES), ids=case_id)
def test_interpreted_triton_backend(row: dict[str, Any], interpreted_workers: Pool) -> None:
    case = Case(**row, backend="triton")
    judge(case, interpreted_workers.run(1, run_case, case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("vocab_size", TRITON_AXES["vocab_size"])
def test_interpreted_triton_backend_everywhere(vocab_size: int, interpreted_workers: Pool) -> None:
    for row in product(TRITON_AXES | {"vocab_size": [vocab_size]}):
        case = Case(**row, backend="triton")
        judge(case, interpreted_workers.run(1, run_case, case), conditioned=True)


def test_group_of_one_rank_is_not_sharded(workers: Pool) -> None:
    case = Case(reduction="mean", bias=True)
    alone = run_case(None, case)
    (result,) = workers.run(1, _run_with_group, case)
    compare.assert_same_bits([alone.loss, result.loss], "loss")
    compare.assert_same_bits([alone.weight_grad, result.weight_grad], "weight gradient")


def _run_with_group(ctx: Any, case: Case) -> Any:
    return run_case(ctx, Case(**{**case.__dict__, "options": (("vocab_size", case.vocab_size), ("group", ctx.group))}))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunk_rows_do_not_change_the_result(reduction: str) -> None:
    results = [run_case(None, Case(lead=(29,), reduction=reduction, chunk_rows=rows)) for rows in (1, 3, 28, 29, 1000)]
    for other in results[1:]:
        compare.assert_close(other.loss, results[0].loss, 1e-6, "loss")
        compare.assert_close(other.hidden_grad, results[0].hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(other.weight_grad, results[0].weight_grad, 1e-5, "weight gradient")


@pytest.mark.parametrize("budget", ["512MiB", 4096, "1KiB", 1])
def test_logits_budget_does_not_change_the_result(budget: str | int) -> None:
    case = Case(lead=(29,), options=(("logits_budget", budget),))
    judge(case, [run_case(None, case)])


def test_repeated_calls_give_the_same_bits() -> None:
    case = Case(lead=(40,), chunk_rows=16, bias=True)
    one, two = run_case(None, case), run_case(None, case)
    for name in ("loss", "hidden_grad", "weight_grad", "bias_grad"):
        compare.assert_same_bits([getattr(one, name), getattr(two, name)], name)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ignore_index", [-100, -1, 5, 10**6])
def test_target_dtypes_and_ignore_index(dtype: torch.dtype, ignore_index: int) -> None:
    case = Case(ignore_index=ignore_index)
    full = make_inputs(case)
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
    linear_cross_entropy(hidden, weight, full.target.to(dtype), ignore_index=ignore_index).backward(full.upstream)
    expected = reference_of(case)
    compare.assert_close(hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
    compare.assert_close(weight.grad, expected.weight_grad, 1e-5, "weight gradient")


def test_default_reduction_is_the_mean_over_valid_tokens() -> None:
    full = make_inputs(Case())
    loss = linear_cross_entropy(full.hidden, full.weight, full.target)
    compare.assert_loss(loss, reference_of(Case()).loss, 1e-5)
    assert loss.shape == ()
    assert loss.dtype == torch.float32


def test_large_logits_with_a_common_offset_lose_nothing() -> None:
    """fp32 logits near 1e4: the maximum and the log of the sum are kept apart until the end."""
    for offset in (1e4, -1e4):
        logits = torch.randn(9, 33, dtype=torch.float64).float()
        shifted = logits + offset
        weight = torch.eye(33)
        target = torch.arange(9)
        loss = linear_cross_entropy(shifted, weight, target, reduction="none")
        exact = torch.nn.functional.cross_entropy(shifted.double(), target, reduction="none")
        assert (loss - exact).abs().max() < 2e-6


@pytest.mark.parametrize("gap", [80.0, 200.0, 1e4])
def test_wide_gaps_stay_finite(gap: float) -> None:
    hidden = torch.tensor([[gap, 0.0, 0.0, 0.0], [-gap, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.eye(4), torch.tensor([1, 0]), reduction="none")
    loss.sum().backward()
    compare.assert_loss(loss, torch.tensor([gap, gap + torch.tensor(3.0).log()], dtype=torch.float64), 1e-6)
    assert torch.isfinite(hidden.grad).all()
