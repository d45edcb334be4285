"""attach_loss and detach_loss: a head that a framework owns computes the loss in its own forward."""

import copy
import re
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flce_dist import LinearCrossEntropyLoss, LossOptions, VocabParallelHead, VocabShard
from flce_dist.attach import attach_loss, detach_loss
from tests.kit.workers import Context, Pool

N, H, V = 12, 8, 21


def _data(bias: bool = True) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, dtype=torch.float64)
    hidden = torch.randn(3, N // 3, H, dtype=torch.float64, requires_grad=True)
    return head, hidden, torch.randint(0, V, (3, N // 3))


def _reference(head: nn.Module, hidden: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    logits = nn.functional.linear(hidden, head.weight, head.bias)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    return [loss, *torch.autograd.grad(loss, [hidden, *head.parameters()])]


@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_plain_head(bias: bool) -> None:
    head, hidden, target = _data(bias)
    expected = _reference(head, hidden, target)
    logits = head(hidden)
    names = list(head.state_dict())
    attach_loss(head, chunk_rows=5)
    loss = head(hidden, target)
    torch.testing.assert_close([loss, *torch.autograd.grad(loss, [hidden, *head.parameters()])], expected)
    assert torch.equal(head(hidden), logits)
    assert torch.equal(head(input=hidden), logits)
    assert torch.equal(head(hidden=hidden, target=target), loss)
    with pytest.raises(TypeError, match="takes hidden"):
        head(input=hidden, target=target)
    assert list(head.state_dict()) == names
    detach_loss(head)
    with pytest.raises(TypeError, match="positional arguments"):
        head(hidden, target)
    assert "forward" not in vars(head)


def test_a_copy_uses_its_own_parameters() -> None:
    head, hidden, target = _data()
    attach_loss(head)
    clone = copy.deepcopy(head)
    with torch.no_grad():
        head.weight.zero_()
    assert not clone(hidden).eq(head(hidden)).all()
    torch.testing.assert_close(clone(hidden, target), _reference(clone, hidden, target)[0])


def test_a_head_is_refused_when_it_is_pickled_and_can_be_without_its_loss(tmp_path: Path) -> None:
    head, hidden, _ = _data()
    attach_loss(head)
    with pytest.raises(TypeError, match=re.escape("cannot be pickled: save the model's state dict, or detach_loss")):
        torch.save(nn.Sequential(head), tmp_path / "model.pt")
    detach_loss(head)
    torch.save(head, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(hidden), head(hidden))


def test_a_forward_that_a_framework_replaced_comes_back() -> None:
    head, hidden, target = _data()
    head.forward = types.MethodType(lambda self, hidden: hidden @ self.weight.T, head)
    replaced = head(hidden)
    attach_loss(head)
    assert head(hidden, target).dim() == 0
    assert torch.equal(head(hidden), replaced)
    detach_loss(head)
    assert torch.equal(head(hidden), replaced)


def test_refusals() -> None:
    head, *_ = _data()
    with pytest.raises(ValueError, match="label_smoothing"):
        attach_loss(head, label_smoothing=2.0)
    attach_loss(head)
    with pytest.raises(ValueError, match="detach_loss"):
        attach_loss(head)
    with pytest.raises(TypeError, match="weight"):
        attach_loss(nn.Identity())
    adapter = nn.Linear(H, V)
    adapter.register_parameter("lora", nn.Parameter(torch.zeros(1)))
    with pytest.raises(TypeError, match="lora"):
        attach_loss(adapter)


def test_a_head_with_a_loss_of_its_own_keeps_its_options() -> None:
    head = VocabParallelHead(H, V, z_loss=1.0, softcap=5.0)
    with pytest.raises(TypeError, match=r"computes a loss of its own options.*head\.options = LossOptions"):
        attach_loss(head)
    assert head.options == LossOptions(z_loss=1.0, softcap=5.0)
    assert "forward" not in vars(head)


class _Scaled(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


class _Renamed(nn.Linear):
    pass


def test_a_linear_layer_whose_class_computes_more_is_refused(workers: Pool) -> None:
    with pytest.raises(TypeError, match=r"_Scaled, an nn\.Linear with a forward of its own"):
        attach_loss(_Scaled(H, V))
    attach_loss(_Renamed(H, V))
    workers.run(2, _frameworks_layer)


def _frameworks_layer(ctx: Context) -> None:
    """One that gathers its logits, say: with a group the caller knows what the layer is."""
    attach_loss(_Scaled(H, V), ctx.group, vocab_size=2 * V)


def _sharded(ctx: Context) -> list[Any]:
    full, hidden, target = _data()
    shard = VocabShard.even(V, ctx.rank, ctx.world)
    head = nn.Linear(H, shard.num_rows, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(full.weight[shard.start : shard.stop])
        head.bias.copy_(full.bias[shard.start : shard.stop])
    attach_loss(head, ctx.group, vocab_shard=shard)
    loss = head(hidden, target)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, *head.parameters()])]


@pytest.mark.parametrize("world", [2, 3])
def test_a_plain_shard_in_a_group(world: int, workers: Pool) -> None:
    expected = _reference(*_data())
    results = workers.run(world, _sharded)
    for loss, hidden_grad, _, _ in results:
        torch.testing.assert_close([loss, hidden_grad], expected[:2])
    for index in (2, 3):
        torch.testing.assert_close(torch.cat([result[index] for result in results]), expected[index])


WRONG = {
    "vocab_size": (0, "vocab_size must be at least 1, got 0"),
    "vocab_shard": (3, "vocab_shard must be a VocabShard, got 3"),
    "hidden_layout": ("shard", "hidden_layout must be"),
    "hidden_grad_scale": ("1", "hidden_grad_scale must be a number"),
    "group": ("tp", "group must be a process group or None, got str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_depends_on_no_tensor_is_refused_at_once(name: str) -> None:
    value, message = WRONG[name]
    for bind in (partial(attach_loss, nn.Linear(H, V)), LinearCrossEntropyLoss):
        with pytest.raises((TypeError, ValueError), match=message):
            bind(**{name: value})
