"""Errors over several ranks: whatever is wrong on one of them, ALL ranks raise, at the same call, and none hangs."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flce_dist import VocabParallelHead, VocabShard, count_valid_tokens, linear_cross_entropy
from tests.kit.workers import Context, Outcome, Pool

N, H, V = 6, 8, 8


def assert_all_raise(outcomes: list[Outcome], error: str | tuple[str, ...], *words: str) -> None:
    """Every rank raised a class of `error` with all `words` in its message."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, f"rank {rank} returned {outcome.value}; others: {outcomes}"
        wanted = (error,) if isinstance(error, str) else error
        assert set(wanted) & set(outcome.error.classes), f"rank {rank}\n{outcome.error.traceback}"
        for word in words:
            assert word in outcome.error.message, f"rank {rank}: no {word!r} in: {outcome.error.message}"


def arguments(rank: int, world: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=generator), torch.randn(V, H, generator=generator)
    rows = -(-V // world)
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight[rank * rows : (rank + 1) * rows].clone().requires_grad_(),
        "target": torch.tensor([0, 3, 4, 7, -100, 2]),
        "vocab_size": V,
    }


def _call(ctx: Context, change: dict[int, dict[str, Any]], common: dict[str, Any]) -> float:
    keywords = {**arguments(ctx.rank, ctx.world), **common, **change.get(ctx.rank, {})}
    if keywords.get("vocab_size", 0) is None:
        del keywords["vocab_size"]
    loss = linear_cross_entropy(**keywords, group=ctx.group)
    loss.sum().backward()
    return loss.sum().item()


def outcomes(pool: Pool, world: int, change: dict[int, dict[str, Any]], **common: Any) -> list[Outcome]:
    return pool.outcomes(world, _call, change, common, timeout=30)


def test_the_unchanged_call_is_right(workers: Pool) -> None:
    expected = torch.nn.functional.cross_entropy(
        arguments(0, 1)["hidden"] @ arguments(0, 1)["weight"].T, arguments(0, 1)["target"]
    )
    for world in (1, 2, 4):
        for outcome in outcomes(workers, world, {}):
            assert outcome.error is None, outcome.error
            assert abs(outcome.value - expected.item()) < 1e-5


# One rank alone has something wrong with its own arguments.
LOCAL = {
    "hidden width": ({"hidden": torch.randn(N, H + 1)}, "ValueError"),
    "target shape": ({"target": torch.zeros(N - 1, dtype=torch.int64)}, "ValueError"),
    "target dtype": ({"target": torch.zeros(N)}, "TypeError"),
    "bias length": ({"bias": torch.zeros(V)}, "ValueError"),
    "class weight length": ({"class_weight": torch.ones(V // 2)}, "ValueError"),
    "token weight grad": ({"token_weight": torch.ones(N, requires_grad=True)}, "ValueError"),
    "option value": ({"label_smoothing": 2.0}, "ValueError"),
    "option name": ({"smoothing": 0.1}, "TypeError"),
    "aux name": ({"aux": ("probabilities",)}, "ValueError"),
    "empty weight": ({"weight": torch.empty(0)}, "ValueError"),
    "flat weight": ({"weight": torch.randn(V * H // 2)}, "ValueError"),
    "no tensor": ({"hidden": None}, "TypeError"),
    "sparse weight": ({"weight": torch.eye(V // 2, H).to_sparse()}, "TypeError"),
    "normalizer elsewhere": ({"normalizer": torch.ones((), device="meta")}, "ValueError"),
    "normalizer too large": ({"normalizer": 10**400}, "ValueError"),
    "scale too large": ({"logit_scale": 10**400}, "ValueError"),
    "ignore_index too large": ({"ignore_index": 2**70}, "ValueError"),
    "triton on a CPU": ({"backend": "triton"}, "ValueError"),
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_local_error_on_one_rank_is_raised_on_all(name: str, bad_rank: int, workers: Pool) -> None:
    change, error = LOCAL[name]
    results = outcomes(workers, 2, {bad_rank: change})
    assert_all_raise([results[bad_rank]], error)
    # The rank that was fine learns which one was not, and what it said.
    own = results[bad_rank].error
    assert own is not None
    assert_all_raise([results[1 - bad_rank]], "ValueError", f"rank {bad_rank}", own.message)


STRANGE = [None, "text", 3.5, -1, True, [1, 2], {"a": 1}, torch.zeros(2, 3, 4), torch.tensor(7), object]
# What each argument takes of these.
WELCOME: dict[str, list[Any]] = {
    "bias": [None],
    "class_weight": [None],
    "token_weight": [None],
    "normalizer": [None, 3.5, torch.tensor(7)],
    "vocab_shard": [None],
    "max_tokens": [None],
    "reduce_hidden_grad": [True],
    "hidden_grad_scale": [3.5, -1],
    "softcap": [None, 3.5],
    "logit_scale": [3.5, -1],
    "ignore_index": [-1],
    "chunk_rows": [None],
    "skip_ignored": [True],
    "accum_dtype": [None],
    "z_loss": [3.5],
}
ARGUMENTS = ["hidden", "weight", "target", *WELCOME, "vocab_size", "aux", "hidden_layout", "reduction", "check_ranks"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_strange_values_on_one_rank_are_raised_on_all(name: str, workers: Pool) -> None:
    """A TypeError or ValueError that names the argument, not whatever the first use of the value happens to raise."""
    welcome = {repr(value) for value in WELCOME.get(name, [])}
    for at, value in enumerate(STRANGE):
        if repr(value) in welcome:
            continue
        results = workers.outcomes(2, _strange, name, at, timeout=10)
        assert_all_raise([results[1]], ("TypeError", "ValueError"), name)
        assert_all_raise([results[0]], "ValueError", "rank 1")


def _strange(ctx: Context, name: str, at: int) -> None:
    keywords = arguments(ctx.rank, ctx.world)
    if ctx.rank == 1:
        keywords[name] = object() if STRANGE[at] is object else STRANGE[at]
    linear_cross_entropy(**keywords, group=ctx.group)


@pytest.mark.parametrize("transformed", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("by", ["torch.func", "torch.jit.trace"])
def test_a_transform_is_refused_on_all_ranks(by: str, transformed: tuple[int, ...], workers: Pool) -> None:
    results = workers.outcomes(2, _transformed, by, transformed, timeout=10)
    for rank, outcome in enumerate(results):
        assert_all_raise([outcome], "NotImplementedError" if rank in transformed else "ValueError", by)


def _transformed(ctx: Context, by: str, transformed: tuple[int, ...]) -> Any:
    keywords = arguments(ctx.rank, ctx.world)
    hidden = keywords.pop("hidden")

    def loss(hidden: Tensor) -> Any:
        return linear_cross_entropy(hidden, **keywords, group=ctx.group)

    if ctx.rank not in transformed:
        return loss(hidden)
    return torch.func.grad(loss)(hidden) if by == "torch.func" else torch.jit.trace(loss, (hidden,))


@pytest.mark.parametrize("check_ranks", ["first", "always"])
@pytest.mark.parametrize("how", ["plain", "DTensor"])
def test_a_size_may_be_numpys_on_one_rank(how: str, check_ranks: str, workers: Pool) -> None:
    first, second = workers.run(2, _with_size, how, check_ranks, {1: np.int64(V)}, timeout=20)
    assert torch.equal(first, second)


@pytest.mark.parametrize(("size", "error"), [("8", "TypeError"), (8.0, "TypeError"), (0, "ValueError")])
@pytest.mark.parametrize("how", ["plain", "DTensor"])
def test_a_size_that_is_none(how: str, size: Any, error: str, workers: Pool) -> None:
    found = workers.outcomes(2, _with_size, how, "always", {0: size, 1: size})
    assert_all_raise(found, error, f"vocab_size must be {'at least 1' if size == 0 else 'an int'}, got {size!r}")
    assert all(outcome.error.message.startswith("vocab_size") for outcome in found)


def _with_size(ctx: Context, how: str, check_ranks: str, sizes: dict[int, Any]) -> Any:
    keywords = arguments(ctx.rank, ctx.world)
    keywords["vocab_size"] = sizes.get(ctx.rank, V)
    if how != "plain":
        mesh = DeviceMesh.from_group(ctx.group, "cpu")
        keywords["weight"] = DTensor.from_local(keywords["weight"].detach(), mesh, [Shard(0)])
    return linear_cross_entropy(**keywords, group=ctx.group, check_ranks=check_ranks)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("logits_budget", "1KiB", 1024), ("aux", ("lse", "entropy"), ("entropy", "lse", "entropy"))],
)
def test_what_means_the_same_is_no_disagreement(name: str, first: Any, second: Any, workers: Pool) -> None:
    workers.run(2, _written, [{name: first}, {name: second}])


def _written(ctx: Context, written: list[dict[str, Any]]) -> None:
    keywords: dict[str, Any] = arguments(ctx.rank, ctx.world) | written[ctx.rank]
    linear_cross_entropy(**keywords, group=ctx.group, check_ranks="always")


@pytest.mark.parametrize("bad_rank", [0, 2, 3])
def test_a_local_error_on_one_of_four_ranks(bad_rank: int, workers: Pool) -> None:
    results = outcomes(workers, 4, {bad_rank: {"target": torch.zeros(N - 1, dtype=torch.int64)}})
    assert_all_raise(results, "ValueError", f"{N - 1}")


def test_the_same_local_error_on_all_ranks(workers: Pool) -> None:
    assert_all_raise(outcomes(workers, 2, {}, label_smoothing=2.0), "ValueError", "label_smoothing")


# The ranks are each fine alone and disagree, about what the message says.
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "number of tokens": (
        {"hidden": torch.randn(4, H, requires_grad=True), "target": torch.tensor([0, 1, 2, 3])},
        "about the number of tokens, got rank 0: 6, rank 1: 4",
    ),
    "hidden size": ({"hidden": torch.randn(N, 3), "weight": torch.randn(V // 2, 3)}, "about the hidden size"),
    "dtype": (
        {"hidden": torch.randn(N, H).bfloat16(), "weight": torch.randn(V // 2, H).bfloat16()},
        "about the dtype",
    ),
    "target data": ({"target": torch.tensor([0, 3, 4, 7, -100, 3])}, "about the targets"),
    "ignored data": ({"target": torch.tensor([0, 3, 4, 7, 2, -100])}, "about the targets"),
    "hidden data": (
        {"hidden": torch.randn(N, H, generator=torch.Generator().manual_seed(5)).requires_grad_()},
        "must have the same hidden",
    ),
    "requires_grad of hidden": ({"hidden": arguments(0, 1)["hidden"].detach()}, "about whether hidden requires grad"),
    "vocabulary size": ({"vocab_size": None, "vocab_shard": VocabShard(9, 4, 8)}, "about vocab_size"),
    "reduction": ({"reduction": "sum"}, "'reduction': 'sum'"),
    "reduction none": ({"reduction": "none"}, "'reduction': 'none'"),
    "label smoothing": ({"label_smoothing": 0.1}, "'label_smoothing': '0.1'"),
    "z-loss": ({"z_loss": 1e-3}, "'z_loss': '0.001'"),
    "softcap": ({"softcap": 30.0}, "'softcap': '30.0'"),
    "logit scale": ({"logit_scale": 2.0}, "'logit_scale': '2.0'"),
    "ignore index": ({"ignore_index": -1}, "'ignore_index': '-1'"),
    "chunk rows": ({"chunk_rows": 2}, "'chunk_rows': '2'"),
    "budget": ({"logits_budget": 64}, "'logits_budget': '64'"),
    "backward": ({"backward": "recompute"}, "'backward': 'recompute'"),
    "token scaling": ({"token_scaling": True}, "'token_scaling': 'True'"),
    "reduction of hidden grad": ({"reduce_hidden_grad": False}, "about reduce_hidden_grad"),
    "normaliser": ({"normalizer": 3.0}, "rank 0: [], rank 1: ['normalizer']"),
    "aux": ({"aux": ("entropy",)}, "about aux"),
    "scale of hidden grad": ({"hidden_grad_scale": 2.0}, "about hidden_grad_scale"),
    "bias on one rank": ({"bias": torch.zeros(V // 2)}, "rank 0: [], rank 1: ['bias']"),
    "token weight on one rank": ({"token_weight": torch.ones(N)}, "rank 0: [], rank 1: ['token_weight']"),
    "class weight on one rank": ({"class_weight": torch.ones(V)}, "rank 0: [], rank 1: ['class_weight']"),
    "layout": ({"hidden_layout": "sharded"}, "about the hidden layout"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise(name: str, workers: Pool) -> None:
    change, words = DISAGREEMENTS[name]
    assert_all_raise(outcomes(workers, 2, {1: change}), "ValueError", words)


@pytest.mark.parametrize("value", [4.0, torch.tensor(4.0)], ids=["number", "tensor"])
def test_ranks_that_disagree_about_the_value_of_a_normalizer(value: Any, workers: Pool) -> None:
    found = outcomes(workers, 2, {1: {"normalizer": value}}, normalizer=torch.tensor(3.0))
    assert_all_raise(found, "ValueError", "about normalizer, got rank 0: 3.0, rank 1: 4.0")


@pytest.mark.parametrize("name", ["class_weight", "token_weight"])
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_ranks_that_disagree_about_the_data_of_weights(name: str, layout: str, workers: Pool) -> None:
    """Each is fine alone; together they are a loss that no weighting gives. Sharded tokens have their own weights."""
    values = torch.linspace(0.5, 2.0, V if name == "class_weight" else N)
    results = outcomes(workers, 2, {1: {name: values.flip(0)}}, **{name: values, "hidden_layout": layout})
    if name == "token_weight" and layout == "sharded":
        assert all(o.error is None for o in results)
    else:
        assert_all_raise(results, "ValueError", name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number of tokens", "rank 1: 6, rank 2: 4, rank 3: 6"),
        ("softcap", "rank 2: {'softcap': '30.0'}"),
        ("target data", "about the targets"),
        ("hidden data", "must have the same hidden, but rank 2 has another than rank 0"),
        ("bias on one rank", "rank 2: ['bias']"),
    ],
)
def test_one_of_four_ranks_that_disagrees(name: str, words: str, workers: Pool) -> None:
    change, _ = DISAGREEMENTS[name]
    if "bias" in change:
        change = {"bias": torch.zeros(V // 4)}
    assert_all_raise(outcomes(workers, 4, {2: change}), "ValueError", words)


# Shards that do not partition the vocabulary, as (start, stop) of each rank, and what is wrong.
PARTITIONS = {
    "overlap": ([(0, 5), (4, 8)], "shards overlap at id 4"),
    "gap": ([(0, 3), (4, 8)], "ids [3, 4) of 8 are on no rank"),
    "short": ([(0, 4), (4, 7)], "ids [7, 8) are on no rank"),
    "both full": ([(0, 8), (0, 8)], "shards overlap at id 0"),
    "same shard": ([(0, 4), (0, 4)], "shards overlap at id 0"),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_shards_that_overlap_or_leave_gaps(name: str, workers: Pool) -> None:
    full = arguments(0, 1)["weight"].detach()
    shards, words = PARTITIONS[name]
    change = {
        rank: {"weight": full[start:stop].clone(), "vocab_size": None, "vocab_shard": VocabShard(V, start, stop)}
        for rank, (start, stop) in enumerate(shards)
    }
    assert_all_raise(outcomes(workers, 2, change), "ValueError", "must hold each id once", words)


@pytest.mark.parametrize("world", [2, 4])
def test_full_weight_where_a_shard_is_meant(world: int, workers: Pool) -> None:
    full = arguments(0, 1)["weight"].detach()
    assert_all_raise(outcomes(workers, world, {}, weight=full), "ValueError", "this is the full weight")


def test_a_shard_of_the_wrong_size(workers: Pool) -> None:
    assert_all_raise(outcomes(workers, 2, {1: {"weight": torch.randn(3, H)}}), "ValueError", "weight has 3 rows")


def test_vocab_size_is_required_with_a_plain_weight(workers: Pool) -> None:
    assert_all_raise(outcomes(workers, 2, {}, vocab_size=None), "ValueError", "needs vocab_size", "vocab_shard")


@pytest.mark.parametrize("call", ["loss", "head", "count", "graph"])
def test_a_group_that_the_rank_is_not_in(call: str, workers: Pool) -> None:
    """A count of this rank's tokens alone would be another normalizer than the other ranks have."""
    results = workers.outcomes(2, _call_with_foreign_group, call)
    words = "this rank is not in the group that was passed"
    assert_all_raise([results[0]], "Unsupported" if call == "graph" else "ValueError", words)


def _call_with_foreign_group(ctx: Context, call: str) -> None:
    if ctx.rank == 0:
        _call_with_group(call, dist.GroupMember.NON_GROUP_MEMBER)


def _call_with_group(call: str, group: Any) -> None:
    keywords = arguments(0, 1) | {"group": group}
    if call == "head":
        VocabParallelHead(H, V, group)
    elif call == "count":
        count_valid_tokens(keywords["target"], group=group)
    elif call == "graph":
        torch.compiler.reset()
        torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")(**keywords)
    else:
        linear_cross_entropy(**keywords)


@pytest.mark.parametrize("call", ["loss", "count", "graph"])
def test_a_mesh_as_group(call: str, workers: Pool) -> None:
    words = "group must be a process group or None", "DeviceMesh((2,)", "pass mesh.get_group()"
    assert_all_raise(workers.outcomes(2, _call_with_mesh, call), ("TypeError", "Unsupported"), *words)


def _call_with_mesh(ctx: Context, call: str) -> None:
    _call_with_group(call, DeviceMesh.from_group(ctx.group, "cpu"))


@pytest.mark.parametrize("call", ["loss", "head", "count"])
@pytest.mark.parametrize("group", ["tp", [0, 1], 0], ids=str)
def test_what_is_no_group(group: Any, call: str) -> None:
    kind = type(group).__name__
    with pytest.raises(TypeError, match=f"group must be a process group or None, got {kind}"):
        _call_with_group(call, group)


@pytest.mark.parametrize("bad", [V, -1, 10**6])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("check_ranks", ["always", "never"])
def test_bad_targets_raise_on_all_ranks(bad: int, reduction: str, world: int, check_ranks: str, workers: Pool) -> None:
    """Found by the owner count of the exchange, at the same chunk everywhere."""
    target = torch.tensor([0, 3, 4, bad, -100, 2])
    results = outcomes(
        workers, world, {}, target=target, reduction=reduction, check_ranks=check_ranks, chunk_rows=2, vocab_size=V
    )
    assert_all_raise(results, "IndexError", f"target {bad} of token 3 is outside [0, 8)")


def test_bad_targets_of_the_padding_rows(workers: Pool) -> None:
    """V = 7 in shards of 4: row 7 is padding, on rank 1."""
    change = {r: {"vocab_size": None, "vocab_shard": VocabShard(7, 4 * r, 4 * r + 4)} for r in range(2)}
    assert_all_raise(outcomes(workers, 2, change), "IndexError", "target 7 of token 3 is outside [0, 7)")


def test_ranks_work_on_after_errors(workers: Pool) -> None:
    bad = outcomes(workers, 2, {}, target=torch.tensor([0, 3, 4, 99, -100, 2]), chunk_rows=1)
    assert_all_raise(bad, "IndexError", "target 99 of token 3")
    test_the_unchanged_call_is_right(workers)


def _raw_fsdp2_weight(ctx: Context, group: str) -> None:
    """A weight that FSDP2 sharded over the same ranks as data, passed as if it were a tensor-parallel shard."""
    base = arguments(0, 1)
    data_mesh = DeviceMesh.from_group(ctx.groups[(0, 1)], "cpu", mesh_dim_names=("dp",))
    weight = distribute_tensor(base["weight"].detach(), data_mesh, [Shard(0)])
    # Each data-parallel rank has its own batch.
    hidden = torch.randn(N, H, generator=torch.Generator().manual_seed(ctx.rank))
    linear_cross_entropy(hidden, weight, base["target"], group=ctx.group if group == "given" else None)


@pytest.mark.parametrize(("group", "words"), [("given", "must have the same hidden"), ("none", "group=None means")])
def test_raw_fsdp2_weight_as_a_shard(group: str, words: str, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _raw_fsdp2_weight, group), "ValueError", words, "FSDP2")


def _dtensor_with_a_wrong_placement(ctx: Context, kind: str) -> float:
    base = arguments(0, 1)
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    placement = {"columns": Shard(1), "replicated": Replicate(), "rows": Shard(0)}[kind]
    weight = distribute_tensor(base["weight"].detach(), mesh, [placement])
    group = None if kind == "rows" else ctx.group
    return linear_cross_entropy(base["hidden"], weight, base["target"], group=group).item()


@pytest.mark.parametrize("kind", ["columns", "replicated"])
def test_dtensor_with_a_wrong_placement(kind: str, workers: Pool) -> None:
    results = workers.outcomes(2, _dtensor_with_a_wrong_placement, kind)
    assert_all_raise(results, "ValueError", "weight must be a plain tensor or a DTensor Shard(0)")


def test_dtensor_shard_without_a_group_is_refused(workers: Pool) -> None:
    """Never the loss of the local rows alone."""
    results = workers.outcomes(2, _dtensor_with_a_wrong_placement, "rows")
    assert_all_raise(results, "ValueError", "group=None means that the vocabulary is not sharded")
