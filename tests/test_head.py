"""VocabParallelHead, LinearCrossEntropyLoss and count_valid_tokens."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flce_dist
from flce_dist import LinearCrossEntropyLoss, LossOptions, VocabParallelHead, VocabShard, count_valid_tokens
from flce_dist.attach import attach_loss
from tests.kit import compare, oracle
from tests.kit.cases import Case, make_inputs, reference_of
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import assert_all_raise

H, V = 8, 21


def full_of(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def local_of(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _initial(ctx: Context, vocab_size: int, bias: bool, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    head = VocabParallelHead(H, vocab_size, ctx.group, bias)
    after = torch.rand(1).item()
    return {
        "weight": full_of(head.weight),
        "bias": full_of(head.bias) if bias else head.bias,
        "rows": local_of(head.weight).shape[0],
        "shard": head.shard,
        "after": after,
    }


@pytest.mark.parametrize("vocab_size", [V, 3, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_initial_full_weight_is_the_same_for_a_seed_at_any_world(vocab_size: int, bias: bool, workers: Pool) -> None:
    torch.manual_seed(5)
    alone = VocabParallelHead(H, vocab_size, bias=bias)
    after = torch.rand(1).item()
    assert isinstance(alone.weight, nn.Parameter)
    assert alone.weight.shape == (vocab_size, H)
    assert alone.weight.std() > 0
    for world in (1, 2, 3, 4):
        for rank, got in enumerate(workers.run(world, _initial, vocab_size, bias, 5)):
            assert torch.equal(got["weight"], alone.weight)
            assert (got["bias"] is None) if not bias else torch.equal(got["bias"], alone.bias)
            assert got["shard"] == VocabShard.even(vocab_size, rank, world)
            assert got["rows"] == got["shard"].num_rows
            assert got["after"] == after, "ranks draw different random numbers after making the head"
    assert not torch.equal(workers.run(2, _initial, vocab_size, bias, 6)[0]["weight"], alone.weight)


def _logits_upstream(case: Case) -> Tensor:
    return torch.randn(*case.lead, case.vocab_size, generator=torch.Generator().manual_seed(case.seed))


def _forward(ctx: Context, case: Case, options: dict[str, Any], how: str) -> dict[str, Any]:
    full = make_inputs(case)
    linear = nn.Linear(case.hidden_size, case.vocab_size, bias=case.bias)
    with torch.no_grad():
        linear.weight.copy_(full.weight)
        if full.bias is not None:
            linear.bias.copy_(full.bias)
    group = ctx.group if how == "group" else None
    head = VocabParallelHead.from_linear(linear, group, **options)
    hidden = full.hidden.requires_grad_()

    def gradients_of(output: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        output.backward(upstream)
        grads = [hidden.grad, *(full_of(parameter.grad) for parameter in head.parameters())]
        hidden.grad = None
        head.zero_grad()
        return tuple(grads)

    loss = head(hidden, full.target)
    loss_grads = gradients_of(loss, full.upstream)
    with torch.no_grad():
        evaluated = head.eval()(hidden, full.target)
    logits = head(hidden)
    columns = slice(head.shard.start, head.shard.start + head.shard.num_columns)
    logits_grads = gradients_of(logits, _logits_upstream(case)[..., columns])
    return {
        "loss": loss.detach(),
        "evaluated": evaluated,
        "logits": logits.detach(),
        "loss_grads": loss_grads,
        "logits_grads": logits_grads,
        "columns": columns,
        "same_parameter": head.weight is linear.weight,
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 4.0, "z_loss": 1e-2},
        {"label_smoothing": 0.1, "chunk_rows": 3},
        {"logit_scale": 0.3},
        {"logit_scale": 0.3, "softcap": 2.0},
    ],
)
def test_loss_gradients_and_logits(world: int, bias: bool, options: dict[str, Any], workers: Pool) -> None:
    """And the gradients of the logits."""
    oracle_options = tuple((k, v) for k, v in options.items() if k != "chunk_rows")
    case = Case(lead=(2, 5), world=world, bias=bias, options=oracle_options)
    expected = reference_of(case)
    full = make_inputs(case)
    leaves = [t.double().requires_grad_() for t in (full.hidden, full.weight, full.bias) if t is not None]
    logits = oracle.scaled_logits(
        leaves[0] @ leaves[1].T, leaves[2] if bias else None, options.get("softcap"), options.get("logit_scale", 1.0)
    )
    logits.backward(_logits_upstream(case).double())
    names = ["hidden", "weight", "bias"][: len(leaves)]
    results = workers.run(world, _forward, case, options, "group")
    compare.assert_same_bits([r["loss"] for r in results], "loss")
    for result in results:
        compare.assert_loss(result["loss"], expected.loss, 1e-5)
        compare.assert_same_bits([result["loss"], result["evaluated"]], "loss in evaluation")
        local = logits[..., result["columns"]]
        assert result["logits"].shape == local.shape
        compare.assert_close(result["logits"], local, 1e-5, "local logits")
        for at, name in enumerate(names):
            compare.assert_close(result["loss_grads"][at], getattr(expected, f"{name}_grad"), 1e-5, f"{name} gradient")
            compare.assert_close(result["logits_grads"][at], leaves[at].grad, 1e-5, f"{name} gradient of the logits")


def test_from_linear_without_a_group_keeps_the_parameter(workers: Pool) -> None:
    """So that ties survive; also with a group of one rank. The mode stays too."""
    embedding = nn.Embedding(V, H)
    linear = nn.Linear(H, V, bias=False)
    linear.weight = embedding.weight
    head = VocabParallelHead.from_linear(linear)
    assert head.weight is embedding.weight
    assert [VocabParallelHead.from_linear(linear.train(mode)).training for mode in (True, False)] == [True, False]
    (result,) = workers.run(1, _forward, Case(), {}, "group")
    assert result["same_parameter"]


def _trains(ctx: Context, steps: int, group_of: str) -> tuple[list[float], Tensor]:
    torch.manual_seed(1)
    head = VocabParallelHead(H, V, ctx.group if group_of == "group" else None)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        full = make_inputs(Case(seed=step))
        loss = head(full.hidden, full.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_of(head.weight)


def test_training_with_adamw_is_that_of_a_linear_layer_at_any_world(workers: Pool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(H, V, bias=False)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        full = make_inputs(Case(seed=step))
        loss = nn.functional.cross_entropy(linear(full.hidden).flatten(0, -2), full.target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for world, group_of in ((1, "none"), (1, "group"), (2, "group"), (3, "group"), (4, "group")):
        for found, weight in workers.run(world, _trains, 6, group_of):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=0)
            compare.assert_close(weight, linear.weight, 1e-4, "weight after 6 steps")


def _checkpoint(ctx: Context, folder: str, load: bool, save: bool, bias: bool) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.manual_seed(0 if save and not load else 99)
    head = VocabParallelHead(H, V, ctx.group, bias)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    if not load:
        full = make_inputs(Case())
        head(full.hidden, full.target).backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(head, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if load:
        dcp.load(state, checkpoint_id=f"{folder}/{load}", process_group=ctx.group)
        set_state_dict(head, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if save:
        dcp.save(state, checkpoint_id=f"{folder}/{save}", process_group=ctx.group)
    found = {"weight": full_of(head.weight)}
    for name, value in optimizer.state[head.weight].items():
        found[name] = full_of(value)
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_checkpoints_reshard_weight_and_adamw_state(bias: bool, workers: Pool, tmp_path: Any) -> None:
    """2 ranks save, 3 load and save, 1 loads: the same full weight and moments."""
    folder = str(tmp_path)
    saved = workers.run(2, _checkpoint, folder, 0, 1, bias)[0]
    assert {"exp_avg", "exp_avg_sq", "step", "weight"} <= set(saved)
    assert saved["exp_avg"].abs().sum() > 0
    for world, load, save in ((3, 1, 2), (1, 2, 3), (4, 3, 0)):
        for found in workers.run(world, _checkpoint, folder, load, save, bias):
            assert set(found) == set(saved)
            for name in saved:
                assert torch.equal(found[name], saved[name]), name


def _state_dict_keys(ctx: Context) -> tuple[list[str], torch.Size, int]:
    head = VocabParallelHead(H, V, ctx.group, bias=True)
    return sorted(head.state_dict()), head.weight.shape, sum(p.numel() for p in head.parameters())


def test_state_names_and_shapes_are_those_of_a_linear(workers: Pool) -> None:
    keys = sorted(nn.Linear(H, V).state_dict())
    for world in (1, 2, 4):
        for names, shape, numel in workers.run(world, _state_dict_keys):
            assert names == keys
            assert shape == (V, H)
            assert numel == V * H + V


def test_aux_normalizer_and_token_weight_reach_the_loss() -> None:
    full = make_inputs(Case(token_weight=True))
    head = VocabParallelHead.from_linear(_linear(full.weight))
    out = head(full.hidden, full.target, normalizer=7.5, token_weight=full.token_weight, aux=("num_valid", "lse"))
    assert isinstance(out, flce_dist.LossOutput)
    expected = reference_of(Case(token_weight=True, normalizer=7.5))
    compare.assert_loss(out.loss, expected.loss, 1e-5)
    assert out.num_valid.item() == (full.target != -100).sum().item()
    assert out.lse.shape == full.target.shape


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return linear


def test_head_is_made_in_the_dtype_and_on_the_device_asked_for() -> None:
    head = VocabParallelHead(H, V, dtype=torch.bfloat16, bias=True)
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert VocabParallelHead(H, V, device="meta").weight.device.type == "meta"


@pytest.mark.parametrize("vocab_size", [0, -1])
def test_the_vocabulary_is_not_empty(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        VocabParallelHead(H, vocab_size)


def test_head_refuses_unknown_options() -> None:
    with pytest.raises(TypeError, match="label_smothing"):
        VocabParallelHead(H, V, label_smothing=0.1)
    with pytest.raises(ValueError, match="reduction"):
        VocabParallelHead(H, V, reduction="avg")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy_loss_module(reduction: str) -> None:
    case = Case(reduction=reduction, options=(("label_smoothing", 0.1),))
    full = make_inputs(case)
    module = LinearCrossEntropyLoss(reduction=reduction, label_smoothing=0.1)
    assert list(module.parameters()) == []
    hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
    loss = module(hidden, weight, full.target)
    loss.backward(full.upstream)
    expected = reference_of(case)
    compare.assert_loss(loss, expected.loss, 1e-5)
    compare.assert_close(hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
    with pytest.raises(ValueError, match="reduction"):
        LinearCrossEntropyLoss(reduction="avg")


def _loss_module(ctx: Context, case: Case) -> Tensor:
    full = make_inputs(case)
    start, stop = case.bounds()[ctx.rank]
    module = LinearCrossEntropyLoss(group=ctx.group, vocab_size=case.vocab_size)
    return module(full.hidden, full.weight[start:stop], full.target)


def test_linear_cross_entropy_loss_module_sharded(workers: Pool) -> None:
    case = Case(world=2)
    for loss in workers.run(2, _loss_module, case):
        compare.assert_loss(loss, reference_of(case).loss, 1e-5)


def test_sizes_may_be_numpys() -> None:
    head = VocabParallelHead(np.int64(H), np.int32(V))
    assert (type(head.hidden_size), type(head.vocab_size)) == (int, int)
    assert head.weight.shape == (V, H)


@pytest.mark.parametrize(
    ("hidden_size", "vocab_size", "error", "words"),
    [
        (0, 5, ValueError, "hidden_size must be at least 1, got 0"),
        (-1, 5, ValueError, "hidden_size must be at least 1, got -1"),
        (5, 0, ValueError, "vocab_size must be at least 1, got 0"),
        (5, 11.0, TypeError, r"vocab_size must be an int, got 11\.0"),
        (5, None, TypeError, "vocab_size must be an int, got None"),
        ("5", 11, TypeError, "hidden_size must be an int, got '5'"),
    ],
)
def test_sizes_that_are_none(hidden_size: Any, vocab_size: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        VocabParallelHead(hidden_size, vocab_size)


@pytest.mark.parametrize("compiled", [False, True])
def test_options_that_are_set_later(compiled: bool) -> None:
    """They change the loss as well as the logits."""
    torch.compiler.reset()
    full = make_inputs(Case(lead=(5,)))
    options: dict[str, Any] = {"reduction": "sum", "softcap": 2.0, "label_smoothing": 0.1}
    head = VocabParallelHead(H, V, reduction="mean", label_smoothing=0.2, z_loss=0.1)
    expected = VocabParallelHead(H, V, **options)
    expected.load_state_dict(head.state_dict())
    loss = LinearCrossEntropyLoss(z_loss=0.1)
    before = head(full.hidden, full.target)
    for module in (head, loss):
        module.options = LossOptions(**options)
    called = torch.compile(head, fullgraph=True, backend="aot_eager") if compiled else head
    assert torch.equal(called(full.hidden, full.target), expected(full.hidden, full.target))
    assert not torch.equal(called(full.hidden, full.target), before)
    assert torch.equal(called(full.hidden), expected(full.hidden))
    assert torch.equal(loss(full.hidden, head.weight, full.target), expected(full.hidden, full.target))
    assert head.options == loss.options == expected.options
    wrong: Any = options
    with pytest.raises(TypeError, match="options must be LossOptions, got"):
        head.options = wrong


def _count(ctx: Context, ignore_index: int, grouped: bool) -> Tensor:
    target = torch.tensor([[0, -100, 3], [5, 5, -100]]) if ctx.rank == 0 else torch.full((ctx.rank,), 5)
    return count_valid_tokens(target, ignore_index, group=ctx.group if grouped else None)


@pytest.mark.parametrize(("ignore_index", "expected"), [(-100, [4, 1, 2]), (5, [4, 0, 0])])
def test_count_valid_tokens(ignore_index: int, expected: list[int], workers: Pool) -> None:
    for grouped in (False, True):
        counts = workers.run(3, _count, ignore_index, grouped)
        assert [c.item() for c in counts] == ([sum(expected)] * 3 if grouped else expected)
        assert all(c.shape == () and c.dtype == torch.int64 for c in counts)


def test_count_valid_tokens_of_none() -> None:
    assert count_valid_tokens(torch.empty(0, dtype=torch.int64)).item() == 0
    assert count_valid_tokens(torch.tensor([1, -100], dtype=torch.int32)).item() == 1


def _copies(ctx: Context) -> None:
    import copy

    hidden, target = torch.randn(4, H, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 20, 7])
    head = VocabParallelHead(H, V, ctx.group)
    twin = copy.deepcopy(head)
    assert twin.group is head.group
    assert local_of(twin.weight).data_ptr() != local_of(head.weight).data_ptr() or local_of(head.weight).numel() == 0
    assert torch.equal(twin(hidden, target), head(hidden, target))
    loss = copy.deepcopy(LinearCrossEntropyLoss(ctx.group, vocab_size=V))
    assert torch.equal(loss(hidden, local_of(head.weight), target), head(hidden, target))


def test_modules_can_be_copied(workers: Pool) -> None:
    """An exponential moving average of the weights does so; a process group cannot be copied."""
    workers.run(2, _copies)


def _on_a_mesh(ctx: Context) -> None:
    mesh = ctx.mesh(ctx.world // 2, 2, names=("data", "tensor"))
    tensor = mesh["tensor"]
    head = VocabParallelHead(H, V, tensor)
    assert head.weight.device_mesh is tensor
    assert head.shard == VocabShard.even(V, tensor.get_local_rank(), 2)
    assert copy.deepcopy(head).group is head.group
    with pytest.raises(ValueError, match="1-D"):
        VocabParallelHead(H, V, mesh)


def test_a_dimension_of_a_mesh_is_a_group(workers: Pool) -> None:
    workers.run(4, _on_a_mesh)


class _Adapter(nn.Linear):
    """As adapters are: a linear layer that computes more than one."""


@pytest.mark.parametrize("linear", [_Adapter(H, V), nn.Embedding(V, H), nn.Sequential(nn.Linear(H, V))], ids=str)
def test_from_linear_takes_plain_linear_layers_only(linear: Any) -> None:
    with pytest.raises(TypeError, match=f"expected an nn.Linear, got {type(linear).__name__}"):
        VocabParallelHead.from_linear(linear)


def test_from_linear_refuses_a_forward_that_would_be_lost() -> None:
    linear = nn.Linear(H, V)
    attach_loss(linear, z_loss=0.1)
    with pytest.raises(TypeError, match="the linear layer has another forward than its class"):
        VocabParallelHead.from_linear(linear)


def _logits_of_own_tokens(ctx: Context) -> None:
    VocabParallelHead(H, V, ctx.group, hidden_layout="sharded")(torch.randn(3, H))


def test_logits_of_token_sharded_hidden_states_are_refused(workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _logits_of_own_tokens), "NotImplementedError", "other ranks' tokens", "gather")


MAKE_MODULE: dict[str, Any] = {
    "a head": lambda **options: VocabParallelHead(4, 7, **options),
    "a loss": lambda **options: LinearCrossEntropyLoss(**options),
    "an attached loss": lambda **options: attach_loss(nn.Linear(4, 7), **options),
}


@pytest.mark.parametrize("kind", MAKE_MODULE)
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("hidden_layout", "x", ValueError), ("hidden_grad_scale", "x", TypeError), ("softcap", -1.0, ValueError)],
)
def test_what_no_tensor_decides_is_checked_when_a_module_is_made(
    kind: str, name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"{name} must be"):
        MAKE_MODULE[kind](**{name: value})


def test_what_is_printed_says_what_is_computed() -> None:
    assert repr(LinearCrossEntropyLoss(z_loss=0.1)) == "LinearCrossEntropyLoss(z_loss=0.1)"
    head = VocabParallelHead(4, 7, bias=True, label_smoothing=0.1)
    assert repr(head) == "VocabParallelHead(hidden_size=4, vocab_size=7, ids=[0, 7), bias=True, label_smoothing=0.1)"
