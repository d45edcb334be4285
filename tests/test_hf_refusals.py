"""What happens to logits or to their gradient around a head is refused by apply(), or by the first step that has it."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit.skips import needs

transformers = pytest.importorskip("transformers", reason=needs("hf"))

from flce_dist.integrations.transformers import UnsupportedForward, apply  # noqa: E402
from tests.kit.causal_lm import LABELS, TEXT, assert_same, loss_and_grads, tiny  # noqa: E402
from tests.test_hf_apply import SHIFTED, _change_logits, _change_loss  # noqa: E402


def _penalty(model: Any) -> torch.Tensor:
    return 1e-4 * model.kept.float().logsumexp(-1).pow(2).mean()


def _keep(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: setattr(model, "kept", output))


@pytest.mark.parametrize("early", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_what_a_hook_of_the_head_keeps_cannot_be_used(early: bool, training: bool) -> None:
    model = tiny().train(training)
    if early:
        _keep(model)
    apply(model)
    if not early:
        _keep(model)
    loss = model(input_ids=TEXT, labels=LABELS).loss
    with pytest.raises(UnsupportedForward, match="twice, by its loss function and by logsumexp"):
        loss + _penalty(model)


@pytest.mark.parametrize(
    "hook",
    [
        lambda module, args, output: [output.float().pow(2).mean()].clear(),
        lambda module, args, output: [output.detach().mul(2)].clear(),
        lambda module, args, output: output.cumsum(-1),
    ],
    ids=["penalty", "detached", "changed"],
)
def test_what_a_hook_of_the_head_computes_is_a_use(hook: Any) -> None:
    model = tiny()
    model.lm_head.register_forward_hook(hook)
    apply(model)
    with pytest.raises(UnsupportedForward, match="uses its logits"):
        model(input_ids=TEXT, labels=LABELS)


def test_a_hook_that_only_looks_at_its_form_is_fine() -> None:
    model, seen = tiny(), []
    expected = loss_and_grads(model)
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append((output.shape, output.dtype)))
    apply(model)
    assert_same(loss_and_grads(model), expected)
    assert seen == [(torch.Size(()), torch.float32)]


def _doubled(head: Any) -> None:
    plain = head.forward
    head.forward = lambda hidden: 2 * plain(hidden)


def _bound(head: Any) -> None:
    head.forward = types.MethodType(lambda self, hidden: 2 * nn.functional.linear(hidden, self.weight), head)


@pytest.mark.parametrize("patch", [_doubled, _bound])
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "below accelerate"])
def test_a_forward_that_was_set_on_the_head_is_refused(patch: Callable[[Any], None], hooked: bool) -> None:
    model = tiny()
    patch(model.lm_head)
    if hooked:
        hooks = pytest.importorskip("accelerate.hooks", reason=needs("hf"))
        hooks.add_hook_to_module(model.lm_head, hooks.ModelHook())
    with pytest.raises(TypeError, match=r"another forward than its class, set on the instance: .*lambda"):
        apply(model)
    assert "loss_function" not in vars(model)


def test_the_classes_own_forward_set_on_the_head_is_fine() -> None:
    """As accelerate leaves it behind, when its hooks are taken off."""
    model = tiny()
    expected = loss_and_grads(model)
    model.lm_head.forward = model.lm_head.forward
    apply(model)
    assert_same(loss_and_grads(model), expected)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class _ReverseView(_Reverse):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.view_as(logits)


class _ReverseItself(_Reverse):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits


def _clip(logits: torch.Tensor) -> torch.Tensor:
    logits.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return logits


ON_THE_GRADIENT = {
    "hook": (_clip, "by register_hook"),
    "detach": (lambda x: x.detach(), "by detach"),
    "detach in a copy": (lambda x: torch.no_grad()(torch.clone)(x), "without their gradient"),
    "function": (_Reverse.apply, "the autograd function _Reverse"),
    "function of a view": (_ReverseView.apply, "by view_as"),
    "function without operation": (_ReverseItself.apply, "something else than what its head returned|by "),
}


@pytest.mark.parametrize("change", ON_THE_GRADIENT)
def test_what_acts_on_the_gradient_of_the_logits_is_refused(change: str) -> None:
    model = tiny()
    _change_logits(model, ON_THE_GRADIENT[change][0])
    apply(model)
    with pytest.raises(UnsupportedForward, match=ON_THE_GRADIENT[change][1]):
        model(input_ids=TEXT, labels=LABELS)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("early", [True, False], ids=["before", "behind"])
def test_backward_hooks_of_the_head_are_refused(kind: str, early: bool) -> None:
    model = tiny()

    def halve(module: Any, *grads: Any) -> Any:
        return tuple(grad / 2 for grad in grads[0])

    handle = getattr(model.lm_head, kind)(halve) if early else None
    apply(model)
    handle = handle or getattr(model.lm_head, kind)(halve)
    with pytest.raises(UnsupportedForward, match=r"backward hook .*halve"):
        model(input_ids=TEXT, labels=LABELS)
    handle.remove()
    model(input_ids=TEXT, labels=LABELS).loss.backward()


def test_backward_hooks_of_all_modules_are_refused() -> None:
    model = tiny()
    apply(model)
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, inputs, outputs: None)
    try:
        with pytest.raises(UnsupportedForward, match="another way than was declared, by view_as"):
            model(input_ids=TEXT, labels=LABELS)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.cumsum(-1),
        lambda x: x.flip(-1),
        lambda x: x.roll(1),
        lambda x: x.amax(-1, keepdim=True),
        lambda x: x.logcumsumexp(-1),
        lambda x: nn.functional.dropout(x, 0.5, training=False),
        lambda x: x.clamp(-1e6, 1e6),
        lambda x: x.data,
        lambda x: x.mul_(1.0),
    ],
    ids=["cumsum", "flip", "roll", "amax", "logcumsumexp", "dropout", "clamp", "data", "in place"],
)
def test_what_leaves_a_single_number_as_it_is_is_refused(change: Any) -> None:
    model = tiny()
    _change_logits(model, change)
    apply(model)
    with pytest.raises(UnsupportedForward, match="uses its logits in another way than was declared, by"):
        model(input_ids=TEXT, labels=LABELS)


def test_what_models_do_with_logits_is_honoured() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        capped = torch.tanh(x.float().contiguous() * 2 / 3)[...].clone().view(x.shape)
        return 3 * (capped.reshape(x.shape).mul(0.5).div(0.25) / 2) + 0.0

    model = tiny()
    logits = change(model(TEXT).logits)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), SHIFTED.flatten())
    expected.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    _change_logits(model, change)
    apply(model, logit_scale=2.0, softcap=3.0)
    assert_same(loss_and_grads(model), (expected.detach(), grads))


def test_shift_labels_that_a_model_writes_to_are_refused() -> None:
    model, given = tiny(), SHIFTED.clone()
    _change_loss(model, lambda f, x, y: f(x, y, shift_labels=given.masked_fill_(given % 2 == 0, -100)))
    apply(model)
    with pytest.raises(UnsupportedForward, match="in place"):
        model(input_ids=TEXT, labels=LABELS, shift_labels=given)


def test_shift_labels_that_a_model_keeps_for_itself_are_refused() -> None:
    model = tiny()
    _change_loss(model, lambda f, x, y: f(x, y))
    apply(model)
    with pytest.raises(UnsupportedForward, match="shift_labels, but does not hand them"):
        model(input_ids=TEXT, labels=LABELS, shift_labels=SHIFTED)
