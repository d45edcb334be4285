"""What the comparison of ranks accepts and refuses beyond single arguments: DTensors, nan, compiled backward passes."""

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import V, arguments, assert_all_raise


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
    assert_all_raise(workers.outcomes(2, _with_dtensor, name, kind), ("TypeError", "ValueError"), name, "DTensor")


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
    assert_all_raise(workers.outcomes(2, _compiled_on_one_rank), ("ValueError", "RuntimeError"), "requires grad")
