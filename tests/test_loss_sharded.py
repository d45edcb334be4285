"""Loss and gradients with the vocabulary sharded over 1 to 4 ranks against the float64 oracle."""

from typing import Any

import pytest
import torch

from tests.kit import compare
from tests.kit.cases import Case, all_pairs, case_id, check, judge, product, run_case
from tests.kit.workers import Context, Pool

AXES: dict[str, Any] = {
    "world": [2, 3, 4],
    "split": ["even", "uneven", "empty", "padded"],
    "lead": [(13,), (2, 7), (1,), (0,)],
    "hidden_size": [8, 17],
    "vocab_size": [3, 21, 130],
    "dtype": [torch.float32, torch.float64, torch.bfloat16],
    "reduction": ["mean", "sum", "none"],
    "bias": [False, True],
    "ignored": ["some", "none", "all"],
    "chunk_rows": [None, 1, 5],
}
TRITON_AXES = AXES | {"lead": [(7,), (2, 3), (0,)], "dtype": [torch.float32], "vocab_size": [3, 21, 70]}


def resolvable(row: dict[str, Any]) -> bool:
    """16-bit rounding is held to a norm, which means little for a handful of numbers."""
    if row["dtype"] == torch.bfloat16:
        return row["lead"] not in ((1,),) and row["vocab_size"] >= 21
    return True


@pytest.mark.parametrize("row", all_pairs(AXES, resolvable), ids=case_id)
def test_torch_backend(row: dict[str, Any], workers: Pool) -> None:
    check(Case(**row), workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", AXES["world"])
@pytest.mark.parametrize("split", AXES["split"])
@pytest.mark.parametrize("dtype", AXES["dtype"], ids=str)
def test_torch_backend_everywhere(world: int, split: str, dtype: torch.dtype, workers: Pool) -> None:
    for row in product(AXES | {"world": [world], "split": [split], "dtype": [dtype]}, resolvable):
        check(Case(**row), workers)


@pytest.mark.parametrize("row", all_pairs(TRITON_AXES), ids=case_id)
def test_interpreted_triton_backend(row: dict[str, Any], interpreted_workers: Pool) -> None:
    check(Case(**row, backend="triton"), interpreted_workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", TRITON_AXES["world"])
@pytest.mark.parametrize("split", TRITON_AXES["split"])
def test_interpreted_triton_backend_everywhere(world: int, split: str, interpreted_workers: Pool) -> None:
    for row in all_pairs(TRITON_AXES | {"world": [world], "split": [split]}, seed=1):
        check(Case(**row, backend="triton"), interpreted_workers)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_chunk_rows_do_not_change_the_result(world: int, workers: Pool) -> None:
    results = [workers.run(world, run_case, Case(lead=(29,), world=world, chunk_rows=n)) for n in (1, 3, 28, 1000)]
    for other in results[1:]:
        for rank in range(world):
            compare.assert_close(other[rank].loss, results[0][rank].loss, 1e-6, "loss")
            compare.assert_close(other[rank].hidden_grad, results[0][rank].hidden_grad, 1e-5, "hidden gradient")
            compare.assert_close(other[rank].weight_grad, results[0][rank].weight_grad, 1e-5, "weight gradient")


@pytest.mark.parametrize("seed", range(4))
def test_ranks_agree_bit_for_bit_on_long_inputs(seed: int, workers: Pool) -> None:
    case = Case(lead=(257,), vocab_size=1001, hidden_size=16, world=4, split="uneven", chunk_rows=64, seed=seed)
    judge(case, workers.run(4, run_case, case))


def _dtensor_case(ctx: Context, case: Case, vocab_size: int | None) -> Any:
    """The weight as a DTensor Shard(0) of all its rows: shard and group's size are read off it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from flce_dist import linear_cross_entropy
    from tests.kit.cases import local_rows, make_inputs

    full = make_inputs(case)
    rows = case.vocab_size if vocab_size is None else case.vocab_size + 3
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    padded = local_rows(full.weight, 0, rows)
    weight = distribute_tensor(padded, mesh, [Shard(0)]).requires_grad_()
    hidden = full.hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, full.target, group=ctx.group, vocab_size=vocab_size)
    loss.backward(full.upstream)
    assert weight.grad is not None
    assert weight.grad.placements == weight.placements
    return loss.detach(), hidden.grad, weight.grad.full_tensor()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("vocab_size", [21, 3])
def test_dtensor_weight(world: int, padded: bool, vocab_size: int, workers: Pool) -> None:
    from tests.kit.cases import reference_of

    case = Case(world=world, vocab_size=vocab_size)
    expected = reference_of(case)
    results = workers.run(world, _dtensor_case, case, vocab_size if padded else None)
    compare.assert_same_bits([loss for loss, _, _ in results], "loss")
    for loss, hidden_grad, weight_grad in results:
        compare.assert_loss(loss, expected.loss, compare.TOL32.loss)
        compare.assert_close(hidden_grad, expected.hidden_grad, compare.TOL32.grad, "hidden gradient")
        compare.assert_close(weight_grad[:vocab_size], expected.weight_grad, compare.TOL32.grad, "weight gradient")
        compare.assert_exactly_zero(weight_grad[vocab_size:], "gradient of padding rows")


def _partial_hidden_grad(ctx: Context, case: Case) -> Any:
    return run_case(ctx, case).hidden_grad


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_partial_hidden_grads_sum_to_the_whole(world: int, reduction: str, workers: Pool) -> None:
    from tests.kit.cases import reference_of

    case = Case(world=world, reduction=reduction, options=(("reduce_hidden_grad", False),))
    partials = workers.run(world, _partial_hidden_grad, case)
    expected = reference_of(case)
    compare.assert_close(sum(partials), expected.hidden_grad, compare.TOL32.grad, "sum of partial hidden gradients")
    assert compare.relative_error(partials[0], expected.hidden_grad) > 0.1
