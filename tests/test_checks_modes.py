"""When the ranks of a group compare their arguments (`check_ranks`), and what each mode finds."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flce_dist import VocabShard, linear_cross_entropy
from tests.kit import compare
from tests.kit.workers import MAX_WORLD, Context, Pool, fresh_group
from tests.test_checks_ranks import H, N, V, arguments, assert_all_raise, outcomes


def _second_call_disagrees(ctx: Context, mode: str) -> list[str | None] | None:
    """Errors of three calls on one fresh group: agreeing, disagreeing about a coefficient, agreeing."""
    group = fresh_group(ctx, [0, 1])
    if group is None:
        return None
    errors: list[str | None] = []
    for softcap in (None, 30.0 if ctx.rank else 20.0, None):
        try:
            linear_cross_entropy(**arguments(ctx.rank, 2), group=group, softcap=softcap, check_ranks=mode)
            errors.append(None)
        except ValueError as error:
            errors.append(type(error).__name__)
    return errors


def _modes_differ(ctx: Context) -> list[str]:
    """Errors of a fresh group's first call, while no rank of it knows another."""
    group = fresh_group(ctx, [0, 1])
    if group is None:
        return []
    errors = []
    for modes in (("first", "always"), ("auto", "first"), ("always", "auto")):
        try:
            linear_cross_entropy(**arguments(ctx.rank, 2), group=group, check_ranks=modes[ctx.rank])
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_check_in_different_modes_learn_it(workers: Pool) -> None:
    for errors in workers.run(MAX_WORLD, _modes_differ, timeout=20)[:2]:
        assert len(errors) == 3
        assert all("check_ranks" in error for error in errors)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("always", [None, "ValueError", None]), ("first", [None, None, None]), ("never", [None, None, None])],
)
def test_what_each_mode_of_checking_catches(mode: str, expected: list[str | None], workers: Pool) -> None:
    assert workers.run(MAX_WORLD, _second_call_disagrees, mode)[:2] == [expected] * 2


def _error_on_the_first_call_for_a_vocabulary(ctx: Context, how: str) -> str | None:
    """A fresh group that knows one vocabulary size gets another, and one rank has a wrong option."""
    group = fresh_group(ctx, [0, 1])
    if group is None:
        return None
    linear_cross_entropy(**arguments(ctx.rank, 2), group=group, check_ranks="first")
    keywords = arguments(ctx.rank, 2) | {"vocab_size": 7}
    rows = slice(0, 4 - ctx.rank)
    keywords["weight"] = keywords["weight"].detach()[rows]
    keywords["target"] = keywords["target"].clamp(max=6)
    if how == "vocab_shard":
        keywords |= {"vocab_size": None, "vocab_shard": VocabShard(7, 4 * ctx.rank, 4 + 3 * ctx.rank)}
    if how == "DTensor":
        mesh = DeviceMesh.from_group(group, "cpu")
        weight = DTensor.from_local(keywords["weight"], mesh, [Shard(0)], shape=torch.Size((7, H)), stride=(H, 1))
        keywords |= {"vocab_size": None, "weight": weight}
    try:
        linear_cross_entropy(**keywords, group=group, check_ranks="first", label_smoothing=2.0 if ctx.rank else 0.0)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("how", ["vocab_size", "vocab_shard", "DTensor"])
def test_a_local_error_on_the_first_call_for_a_vocabulary(how: str, workers: Pool) -> None:
    """The rank with the error must know, as the other one does, that this call is checked."""
    messages = workers.run(MAX_WORLD, _error_on_the_first_call_for_a_vocabulary, how, timeout=20)
    assert "label_smoothing" in messages[1]
    assert "rank 1" in messages[0]
    assert messages[1] in messages[0]


@pytest.mark.parametrize("check_ranks", ["never", "first"])
def test_an_error_that_all_ranks_find_needs_no_exchange(check_ranks: str, workers: Pool) -> None:
    """Also once the group is known and no call is checked any more."""
    assert all(outcome.error is None for outcome in outcomes(workers, 2, {}, check_ranks="first"))
    found = outcomes(workers, 2, {}, check_ranks=check_ranks, class_weight=torch.ones(V + 1))
    assert_all_raise(found, "ValueError", "class_weight", str(V + 1))


def _in_two_groups(ctx: Context) -> list[torch.Tensor]:
    """The same call in one group after the other; rank 1 is the second rank of the one and the first of the other."""
    losses = []
    for ranks in ([0, 1], [1, 2]):
        group = fresh_group(ctx, ranks)
        if group is not None:
            keywords = arguments(ranks.index(ctx.rank), 2)
            losses.append(linear_cross_entropy(**keywords, group=group, check_ranks="never").detach())
    return losses


def test_a_rank_that_has_two_places_in_two_groups(workers: Pool) -> None:
    """What was checked of a call, the rank's place in the vocabulary with it, is remembered for its group alone."""
    alone = linear_cross_entropy(**arguments(0, 1)).detach()
    losses = [loss for found in workers.run(MAX_WORLD, _in_two_groups) for loss in found]
    assert len(losses) == 4
    for loss in losses:
        compare.assert_loss(loss, alone.double(), 1e-5)


def test_a_tensor_on_another_device_on_one_rank_of_a_known_group(workers: Pool) -> None:
    """Which device a rank's tensors are on must not decide alone whether it meets the others."""
    assert all(outcome.error is None for outcome in outcomes(workers, 2, {}))
    found = outcomes(workers, 2, {1: {"hidden": torch.empty(N, H, device="meta")}})
    assert_all_raise(found, "ValueError", "device")


def test_ranks_whose_tensors_are_all_on_another_kind_of_device(workers: Pool) -> None:
    """Fine alone; the ranks' collectives would not meet."""
    on_meta = {name: t.to("meta") for name, t in arguments(1, 2).items() if isinstance(t, torch.Tensor)}
    found = outcomes(workers, 2, {1: on_meta}, hidden_layout="sharded", max_tokens=N)
    assert_all_raise(found, "ValueError", "agree about the kind of device, got rank 0: cpu, rank 1: meta")
