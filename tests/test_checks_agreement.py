"""What the comparison of ranks accepts and refuses beyond single arguments: DTensors, nan, compiled backward passes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.agreement import _close, sketch
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import N, V, arguments, assert_all_raise

# Rows of a tensor in another order.
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "swap": lambda t: t[torch.tensor([1, 0, *range(2, len(t))])],
    "distant swap": lambda t: t[torch.tensor([len(t) - 1, *range(1, len(t) - 1), 0])],
    "reversed": lambda t: t.flip(0),
    "halves": lambda t: t.roll(len(t) // 2, 0),
    **{f"roll {by}": lambda t, by=by: t.roll(by, 0) for by in (1, 2, 4, 8, 64, 144, 987, -4)},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rows_of(num_rows: int, dtype: torch.dtype, common: float) -> Tensor:
    """Hidden states whose rows share a component, as those of trained bodies do."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, 24, generator=generator) + common * torch.randn(24, generator=generator)
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [4, 13, 16, 64, 512, 1000, 4096, 16384])
@pytest.mark.parametrize("common", [0.0, 2.0])
def test_the_sketch_depends_on_the_order_of_rows(dtype: torch.dtype, num_rows: int, common: float) -> None:
    """The swap of two rows among very many is as small as the noise that has to pass."""
    rows = rows_of(num_rows, dtype, common)
    for name, reorder in ORDERS.items():
        other = reorder(rows)
        if not torch.equal(other, rows) and not ("swap" in name and num_rows > 16):
            assert not _close(sketch(rows), sketch(other)), name
            assert not _close(sketch(rows[:, 0]), sketch(other[:, 0])), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 512, 16384])
@pytest.mark.parametrize("common", [0.0, 2.0])
def test_the_sketch_passes_rounding(dtype: torch.dtype, num_rows: int, common: float) -> None:
    """A last bit of bfloat16, and a scale that is off by one in ten thousand."""
    rows = rows_of(num_rows, torch.float64, common)
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for other in (rows * (1 + 2**-8 * noise), rows * (1 + 1e-4)):
        assert _close(sketch(rows.to(dtype)), sketch(other.to(dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = sketch(rows.to(dtype))
    assert under_autocast == sketch(rows.to(dtype))


def test_sketches_of_nothing_and_of_infinities() -> None:
    assert sketch(torch.zeros(0, 3)) == [0.0] * 5
    assert _close(sketch(torch.full((4, 3), torch.inf)), sketch(torch.full((4, 3), torch.nan)))


def _reordered(ctx: Context, name: str, order: str) -> None:
    given = arguments(ctx.rank, 2) | {"token_weight": torch.linspace(0.1, 1.0, N)}
    given["target"] = torch.zeros(N, dtype=torch.int64)
    if ctx.rank == 1:
        given[name] = ORDERS[order](given[name].detach()).requires_grad_(name == "hidden")
    linear_cross_entropy(**given, group=ctx.group)


@pytest.mark.parametrize("name", ["hidden", "token_weight"])
@pytest.mark.parametrize("order", ["swap", "distant swap", "reversed", "halves", "roll 4", "roll 8"])
def test_replicated_tensors_in_another_order(name: str, order: str, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _reordered, name, order), "ValueError", name)


def _with_dtensor(ctx: Context, name: str, kind: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    given = torch.ones(V) if name == "class_weight" else torch.ones(())
    if kind == "all" or ctx.rank == 0:
        given = distribute_tensor(given, DeviceMesh.from_group(ctx.group, "cpu"), [Replicate()], src_data_rank=None)
    linear_cross_entropy(**arguments(ctx.rank, 2), group=ctx.group, **{name: given})


@pytest.mark.parametrize("name", ["class_weight", "normalizer"])
@pytest.mark.parametrize("kind", ["all", "one"])
def test_replicated_values_are_plain_tensors(name: str, kind: str, workers: Pool) -> None:
    first, second = workers.outcomes(2, _with_dtensor, name, kind)
    assert_all_raise([first], "TypeError", f"{name} must be", "got a DTensor")
    assert_all_raise([second], "TypeError" if kind == "all" else "ValueError", f"{name} must be", "got a DTensor")


def _nan_normalizer(ctx: Context) -> Tensor:
    return linear_cross_entropy(**arguments(ctx.rank, 2), group=ctx.group, normalizer=torch.tensor(torch.nan))


def test_a_nan_that_all_ranks_share_is_no_disagreement(workers: Pool) -> None:
    assert all(loss.isnan() for loss in workers.run(2, _nan_normalizer))


def _compiled_on_one_rank(ctx: Context) -> None:
    torch._dynamo.reset()
    given = arguments(ctx.rank, 2)
    weight = given.pop("weight").detach().requires_grad_(ctx.rank == 0)
    hidden = given.pop("hidden").detach()

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, **given, group=ctx.group, backward="recompute")

    torch.compile(loss_of, fullgraph=True, backend="aot_eager")(hidden, weight)


def test_a_compiled_backward_that_would_run_on_one_rank_is_refused(workers: Pool) -> None:
    assert_all_raise(
        workers.outcomes(2, _compiled_on_one_rank), "ValueError", "about whether weight or bias requires grad"
    )
