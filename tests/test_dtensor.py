"""DTensor inputs: a sharded weight with a bias, and hidden states and targets that are replicated or token-sharded."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flce_dist import VocabShard, count_valid_tokens, linear_cross_entropy
from tests.kit import compare, oracle
from tests.kit.cases import Case, make_inputs, reference_of
from tests.kit.workers import Context, Pool, needs_unsorted
from tests.test_checks_ranks import assert_all_raise


def _run(ctx: Context, case: Case, layout: str, keywords: dict[str, Any]) -> dict[str, Any]:
    full = make_inputs(case)
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    tokens = Replicate() if layout == "replicated" else Shard(0)

    def place(tensor: Tensor, placement: Any) -> Tensor:
        return distribute_tensor(tensor.detach(), mesh, [placement])

    hidden = place(full.hidden, tokens).requires_grad_()
    weight = place(full.weight, Shard(0)).requires_grad_()
    bias = None if full.bias is None else place(full.bias, Shard(0)).requires_grad_()
    token_weight = None if full.token_weight is None else place(full.token_weight, tokens)
    loss = linear_cross_entropy(
        hidden,
        weight,
        place(full.target, tokens),
        bias=bias,
        token_weight=token_weight,
        group=ctx.group,
        hidden_layout=layout,
        **keywords,
    )
    loss.backward(full.upstream)
    found = {"loss": loss.detach(), "loss is plain": not isinstance(loss, DTensor)}
    for name, leaf in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if leaf is not None:
            assert isinstance(leaf.grad, DTensor)
            found[name] = leaf.grad.full_tensor()
            found[f"{name} placements"] = leaf.grad.placements
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_placements(world: int, layout: str, bias: bool, workers: Pool) -> None:
    case = Case(lead=(12,), world=world, bias=bias, token_weight=True)
    expected = reference_of(case)
    for found in workers.run(world, _run, case, layout, {}):
        assert found["loss is plain"]
        assert found["hidden placements"] == ((Replicate(),) if layout == "replicated" else (Shard(0),))
        assert found["weight placements"] == (Shard(0),)
        compare.assert_loss(found["loss"], expected.loss, 1e-5)
        compare.assert_close(found["hidden"], expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(found["weight"], expected.weight_grad, 1e-5, "weight gradient")
        if bias:
            assert found["bias placements"] == (Shard(0),)
            compare.assert_close(found["bias"], expected.bias_grad, 1e-5, "bias gradient")


@pytest.mark.parametrize("world", [2, 3])
def test_partial_hidden_gradient_of_a_replicated_dtensor(world: int, workers: Pool) -> None:
    """reduce_hidden_grad=False leaves partial sums, and the DTensor must say so."""
    case = Case(lead=(12,), world=world)
    expected = reference_of(case)
    for found in workers.run(world, _run, case, "replicated", {"reduce_hidden_grad": False}):
        assert found["hidden placements"] == (Partial(),)
        compare.assert_close(found["hidden"], expected.hidden_grad, 1e-5, "hidden gradient, summed")


def _wrong(ctx: Context, kind: str) -> None:
    full = make_inputs(Case(lead=(12,), bias=True))
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    weight = distribute_tensor(full.weight, mesh, [Shard(0)])
    hidden: Tensor = full.hidden
    bias: Tensor | None = None
    layout = "replicated"
    keywords: dict[str, Any] = {"group": ctx.group}
    if kind == "hidden sharded over tokens":
        hidden = distribute_tensor(full.hidden, mesh, [Shard(0)])
    elif kind == "hidden sharded over its width":
        hidden = distribute_tensor(full.hidden, mesh, [Shard(1)])
    elif kind == "hidden partial":
        hidden = DTensor.from_local(full.hidden, mesh, [Partial()])
    elif kind == "hidden replicated where sharded is said":
        hidden, layout = distribute_tensor(full.hidden, mesh, [Replicate()]), "sharded"
    elif kind == "plain bias":
        bias = full.bias
    elif kind == "bias sharded beside a plain weight":
        assert full.bias is not None
        weight, bias = weight.to_local(), distribute_tensor(full.bias, mesh, [Shard(0)])
    elif kind == "bias on another mesh":
        alone = DeviceMesh.from_group(ctx.groups[(ctx.rank,)], "cpu")
        bias = DTensor.from_local(weight.to_local()[:, 0], alone, [Shard(0)])
    elif kind == "a place beside a DTensor":
        keywords["vocab_shard"] = VocabShard.even(21, ctx.rank, ctx.world)
    elif kind == "another group":
        keywords["group"] = ctx.groups[(1, 0)]
    else:
        assert full.bias is not None
        bias = distribute_tensor(full.bias, mesh, [Replicate()])
    linear_cross_entropy(hidden, weight, full.target, bias=bias, hidden_layout=layout, **keywords)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("hidden sharded over tokens", "ValueError", "placements"),
        ("hidden sharded over its width", "ValueError", "placements"),
        ("hidden partial", "ValueError", "placements"),
        ("hidden replicated where sharded is said", "ValueError", "placements"),
        ("plain bias", "TypeError", "bias must be a DTensor sharded like weight"),
        ("replicated bias", "TypeError", "bias must be a DTensor sharded like weight"),
        ("bias on another mesh", "TypeError", "bias must be a DTensor sharded like weight"),
        ("bias sharded beside a plain weight", "TypeError", "bias is a DTensor"),
        ("a place beside a DTensor", "ValueError", "vocab_shard"),
        pytest.param("another group", "ValueError", "[1, 0]", marks=needs_unsorted),
    ],
)
def test_placements_that_do_not_fit(kind: str, error: str, words: str, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _wrong, kind), error, words)


def _on_another_mesh(ctx: Context, name: str) -> None:
    """The head and the group are "tp" of a (2, 2) mesh; the tensor `name` alone is a DTensor on "dp"."""
    mesh = ctx.mesh(2, 2, names=("dp", "tp"))
    full = make_inputs(Case(lead=(12,), token_weight=True))
    weight = distribute_tensor(full.weight, mesh["tp"], [Shard(0)])
    layout = "replicated" if name == "hidden" else "sharded"
    tokens = {"hidden": full.hidden, "target": full.target, "token_weight": full.token_weight}
    if layout == "sharded":
        tokens = {key: None if value is None else value[:6] for key, value in tokens.items()}
    placement = Replicate() if layout == "replicated" else Shard(0)
    tensor = tokens[name]
    assert tensor is not None
    tokens[name] = DTensor.from_local(tensor, mesh["dp"], [placement])
    arguments: dict[str, Any] = {**tokens, "weight": weight, "group": mesh.get_group("tp"), "hidden_layout": layout}
    linear_cross_entropy(**arguments)


@pytest.mark.parametrize("name", ["hidden", "target", "token_weight"])
def test_tokens_on_another_mesh_than_the_groups(name: str, workers: Pool) -> None:
    """Its tokens would be counted on ranks that do not hold them, or twice."""
    found = workers.outcomes(4, _on_another_mesh, name)
    for ranks, pair in (("[0, 1]", found[:2]), ("[2, 3]", found[2:])):
        assert_all_raise(pair, "ValueError", f"{name} is a DTensor on mesh", f"not that of ranks {ranks}, the group",
                         f"{name}.to_local()")  # fmt: skip


def _sharded_tokens_without_a_group(ctx: Context) -> None:
    full = make_inputs(Case(lead=(12,)))
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    hidden = distribute_tensor(full.hidden, mesh, [Shard(0)])
    target = distribute_tensor(full.target, mesh, [Shard(0)])
    linear_cross_entropy(hidden, full.weight, target, hidden_layout="sharded")


def test_sharded_tokens_without_a_group(workers: Pool) -> None:
    """Each rank would get the mean of its own tokens."""
    found = workers.outcomes(2, _sharded_tokens_without_a_group)
    assert_all_raise(found, "ValueError", "hidden is a DTensor", "group=hidden.device_mesh.get_group()")


def _replicated_tokens_without_a_group(ctx: Context, reduce_hidden_grad: bool) -> Tensor:
    full = make_inputs(Case(lead=(12,)))
    hidden = distribute_tensor(full.hidden, DeviceMesh.from_group(ctx.group, "cpu"), [Replicate()]).requires_grad_()
    linear_cross_entropy(hidden, full.weight, full.target, reduce_hidden_grad=reduce_hidden_grad).backward()
    assert isinstance(hidden.grad, DTensor)
    return hidden.grad.full_tensor()


@pytest.mark.parametrize("reduce_hidden_grad", [False, True])
def test_replicated_tokens_without_a_group(reduce_hidden_grad: bool, workers: Pool) -> None:
    """Each rank has the whole vocabulary, and so the whole gradient."""
    full = make_inputs(Case(lead=(12,)))
    expected = oracle.reference(full.hidden, full.weight, full.target)
    for gradient in workers.run(2, _replicated_tokens_without_a_group, reduce_hidden_grad):
        compare.assert_close(gradient, expected.hidden_grad, 1e-5, "hidden gradient")


def _two_dimensional(ctx: Context) -> Any:
    """FSDP2 x TP on a (2, 2) mesh, as the weight is inside of the module that FSDP2 unsharded: Shard(0) on "tp"."""
    mesh = ctx.mesh(2, 2, names=("dp", "tp"))
    full = make_inputs(Case(seed=ctx.rank // 2))
    weight = distribute_tensor(full.weight, mesh["tp"], [Shard(0)]).requires_grad_()
    hidden = full.hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, full.target, group=mesh.get_group("tp"))
    loss.backward(full.upstream)
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad.full_tensor()


def test_tensor_parallel_part_of_a_2_d_mesh(workers: Pool) -> None:
    for rank, (loss, hidden_grad, weight_grad) in enumerate(workers.run(4, _two_dimensional)):
        expected = reference_of(Case(seed=rank // 2))
        compare.assert_loss(loss, expected.loss, 1e-5)
        compare.assert_close(hidden_grad, expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(weight_grad, expected.weight_grad, 1e-5, "weight gradient")


def _count(ctx: Context) -> int:
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    target = distribute_tensor(torch.tensor([1, -100, 2, 3]), mesh, [Shard(0)])
    for group in (None, ctx.group):
        with pytest.raises(TypeError, match=r"target\.to_local\(\)"):
            count_valid_tokens(target, group=group)
    return int(count_valid_tokens(target.to_local(), group=ctx.group))


def test_valid_tokens_are_counted_in_local_tensors(workers: Pool) -> None:
    assert workers.run(2, _count) == [3, 3]
