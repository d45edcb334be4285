"""apply(): loss and gradients of a causal LM are the stock ones, logits are made when asked, the rest is refused."""

import copy
import inspect
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.kit.skips import needs
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import assert_all_raise

transformers = pytest.importorskip("transformers", reason=needs("hf"))

from flce_dist import VocabParallelHead, VocabShard  # noqa: E402
from flce_dist.attach import attach_loss  # noqa: E402
from flce_dist.integrations.transformers import UnsupportedForward, apply  # noqa: E402
from tests.kit.causal_lm import LABELS, TEXT, VOCAB, assert_same, load_sharded, loss_and_grads, tiny  # noqa: E402

SHIFTED = nn.functional.pad(LABELS, (0, 1), value=-100)[:, 1:].contiguous()
KINDS = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "bias": ("Phi", {}),
    "softcap": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 0.5}),
    "logit_scale": ("Cohere", {"logit_scale": 0.25}),
    "logits_scaling": ("Granite", {"logits_scaling": 4.0}),
    "moe": ("Mixtral", {"output_router_logits": True, "num_local_experts": 4}),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_all_gradients_are_the_stock_ones(kind: str, training: bool) -> None:
    name, config = KINDS[kind]
    model = tiny(name, **config).train(training)
    calls: list[dict[str, Any]] = [
        {},
        {"num_items_in_batch": torch.tensor(5)},
        {"num_items_in_batch": 5},
        {"shift_labels": SHIFTED.roll(1, 1)},
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]] * 2), "attention_mask": None},
    ]
    expected = [loss_and_grads(model, **call) for call in calls]
    apply(model, chunk_rows=5)
    for call, stock in zip(calls, expected, strict=True):
        assert_same(loss_and_grads(model, **call), stock)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_shift_labels_alone_are_never_shifted_again(training: bool) -> None:
    """Field reports B21 and B33. The stock model gives no loss then."""
    model = tiny().train(training)
    expected = loss_and_grads(model, shift_labels=SHIFTED)
    apply(model)
    assert_same(loss_and_grads(model, labels=None, shift_labels=SHIFTED), expected)


def test_nothing_else_of_the_model_changes() -> None:
    model = tiny()
    stock = copy.deepcopy(model)
    handle = apply(model)
    assert torch.equal(model(TEXT).logits, stock(TEXT).logits)
    ids = TEXT[:1]
    assert torch.equal(model.generate(ids, max_new_tokens=4), stock.generate(ids, max_new_tokens=4))
    assert list(model.state_dict()) == list(stock.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    handle.remove()
    assert set(vars(model)) == set(vars(stock))
    assert set(vars(model.lm_head)) == set(vars(stock.lm_head))
    assert not model.lm_head._forward_hooks
    assert torch.equal(model(TEXT, labels=LABELS).logits, stock(TEXT, labels=LABELS).logits)


def test_an_image_and_text() -> None:
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    text = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=100)
    model = transformers.LlavaForConditionalGeneration(config)
    ids = torch.cat([torch.full((2, 4), 100), TEXT], 1)  # an image is four tokens
    values = {
        "input_ids": ids,
        "labels": torch.where(ids == 100, -100, ids),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    expected = loss_and_grads(model, **values)
    assert any("vision" in name for name in expected[1])
    apply(model)
    assert_same(loss_and_grads(model, **values), expected)


@pytest.mark.parametrize("early", [True, False], ids=["before", "behind"])
def test_hooks_of_a_device_map(early: bool) -> None:
    """accelerate puts its own forward into each module."""
    accelerate = pytest.importorskip("accelerate", reason=needs("hf"))
    model = tiny()
    expected = loss_and_grads(model)
    if early:
        apply(model)
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)
    if not early:
        apply(model)
    assert_same(loss_and_grads(model), expected)
    assert "no logits were made" in repr(model(input_ids=TEXT, labels=LABELS).logits)


def test_an_offloaded_head_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate", reason=needs("hf"))
    model = tiny()
    accelerate.cpu_offload(model.lm_head, torch.device("cpu"))
    apply(model)
    with pytest.raises(UnsupportedForward, match="offloaded"):
        model(input_ids=TEXT, labels=LABELS)


def test_torch_compile() -> None:
    """One graph without a break, in training and in evaluation, that later steps use again."""
    graphs = CompileCounter()
    torch.compiler.reset()
    model = tiny()
    expected = loss_and_grads(model)
    apply(model)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for _ in range(4):
        result = loss_and_grads(compiled)
        assert_same((result[0], {name.removeprefix("_orig_mod."): g for name, g in result[1].items()}), expected)
    assert graphs.frame_count == 1
    model.eval()
    for _ in range(2):
        torch.testing.assert_close(compiled(input_ids=TEXT, labels=LABELS).loss, expected[0])
    assert graphs.frame_count == 2


def test_an_undeclared_change_in_what_is_compiled_is_refused() -> None:
    model = tiny()
    _change_logits(model, lambda logits: logits * 1.03)
    apply(model)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError, match="another way than was declared"):
        compiled(input_ids=TEXT, labels=LABELS)


def test_nothing_is_imported_before_it_is_used() -> None:
    """Field report B35."""
    names = ("transformers", "peft", "trl", "accelerate", "deepspeed", "triton")
    code = f"import sys, flce_dist.integrations.transformers; print([n for n in {names} if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert run.stdout.strip() == "[]"


def test_positional_labels_and_tuples() -> None:
    model = tiny()
    expected = model(input_ids=TEXT, labels=LABELS).loss
    apply(model)
    outputs = model(TEXT, labels=LABELS, return_dict=False)
    torch.testing.assert_close(outputs[0], expected)
    assert "no logits were made" in repr(outputs[1])
    experts = tiny("Mixtral", num_local_experts=4, output_router_logits=True)
    stock = experts(TEXT, labels=LABELS, return_dict=False)
    apply(experts)
    outputs = experts(TEXT, labels=LABELS, return_dict=False)
    torch.testing.assert_close(outputs[:2], stock[:2])
    assert "no logits were made" in repr(outputs[2])


def test_logits_are_made_on_demand_only() -> None:
    model = tiny("Gemma2", head_dim=8, final_logit_softcapping=0.5)
    stock = model(input_ids=TEXT, labels=LABELS)
    handle = apply(model)
    outputs = model(input_ids=TEXT, labels=LABELS)
    for use in (lambda x: x.argmax(-1), lambda x: x[0], torch.argmax):
        with pytest.raises(AttributeError, match="eval_logits"):
            use(outputs.logits)
    kept = model(input_ids=TEXT, labels=LABELS, logits_to_keep=2)
    torch.testing.assert_close(kept.loss, stock.loss)
    torch.testing.assert_close(kept.logits, stock.logits[:, -2:])
    assert not kept.logits.requires_grad
    handle.remove()
    apply(model, eval_logits=True)
    assert torch.equal(model.eval()(input_ids=TEXT, labels=LABELS).logits, stock.logits)
    assert "no logits were made" in repr(model.train()(input_ids=TEXT, labels=LABELS).logits)


def test_further_outputs_are_left_in_the_handle() -> None:
    model = tiny()
    logits = model(TEXT).logits
    handle = apply(model, aux=("accuracy", "predictions", "num_valid"))
    model(input_ids=TEXT, labels=LABELS)
    assert handle.output is not None
    assert torch.equal(handle.output.predictions, logits.argmax(-1))
    valid = SHIFTED != -100
    assert handle.output.num_valid == valid.sum()
    assert handle.output.accuracy == (logits.argmax(-1) == SHIFTED)[valid].float().mean()


def test_a_head_that_is_there_already_gets_what_the_config_says() -> None:
    model = tiny("Gemma2", head_dim=8, final_logit_softcapping=0.05, tie_word_embeddings=False)
    expected = loss_and_grads(model)
    model.lm_head = VocabParallelHead.from_linear(model.lm_head)
    logits = model(TEXT).logits
    handle = apply(model, z_loss=0.0)
    assert_same(loss_and_grads(model), expected)
    handle.remove()
    assert model.lm_head.options.softcap is None
    assert torch.equal(model(TEXT).logits, logits)


@pytest.mark.parametrize(
    "argument",
    [{"vocab_size": 7}, {"vocab_shard": VocabShard(VOCAB, 0, 7)}, {"hidden_layout": "sharded"},
     {"hidden_layout": "nonsense"}, {"hidden_grad_scale": 100.0}],
    ids=lambda argument: "-".join(map(str, argument.values())),
)  # fmt: skip
def test_what_a_head_that_is_there_already_would_ignore_is_refused(argument: dict[str, Any]) -> None:
    model = tiny(tie_word_embeddings=False)
    model.lm_head = VocabParallelHead.from_linear(model.lm_head)
    with pytest.raises(ValueError, match=f"^{next(iter(argument))}: the head is a VocabParallelHead that was made"):
        apply(model, **argument)
    assert "forward" not in vars(model)
    apply(model, vocab_size=VOCAB, hidden_layout="replicated", hidden_grad_scale=1.0)


def _another_group(ctx: Context) -> None:
    model = tiny(tie_word_embeddings=False)
    model.lm_head = VocabParallelHead.from_linear(model.lm_head)
    with pytest.raises(ValueError, match=r"^group: the head is a VocabParallelHead that was made with None"):
        apply(model, ctx.group)
    model.lm_head = VocabParallelHead.from_linear(tiny().lm_head, ctx.group)
    apply(model, ctx.group)


def test_a_group_is_that_of_a_head_that_is_there_already(workers: Pool) -> None:
    workers.run(2, _another_group)


def test_a_head_that_is_there_already_keeps_its_options() -> None:
    model = tiny(tie_word_embeddings=False)
    model.lm_head = VocabParallelHead.from_linear(model.lm_head, ignore_index=3, z_loss=0.1)
    expected = model.lm_head(model.model(TEXT).last_hidden_state, SHIFTED.masked_fill(SHIFTED == -100, 3))
    apply(model)
    torch.testing.assert_close(model(input_ids=TEXT, labels=LABELS.masked_fill(LABELS == -100, 3)).loss, expected)


def test_options_of_a_head_that_is_there_already_are_checked_as_those_given() -> None:
    model = tiny(tie_word_embeddings=False)
    model.lm_head = VocabParallelHead.from_linear(model.lm_head, softcap=5.0)
    apply(model)
    with pytest.raises(UnsupportedForward, match=r"another way than was declared \(logit_scale=1, softcap=5.0\)"):
        model(input_ids=TEXT, labels=LABELS)
    model = tiny(tie_word_embeddings=False)
    model.lm_head = VocabParallelHead.from_linear(model.lm_head, reduction="sum")
    with pytest.raises(ValueError, match='reduction must be "mean"'):
        apply(model)


def _attached_before(ctx: Context) -> None:
    model = tiny(tie_word_embeddings=False)
    attach_loss(model.lm_head, z_loss=0.1)
    for group in (None, ctx.group):
        with pytest.raises(ValueError, match="has a loss already, from attach_loss"):
            apply(model, group)


def test_a_head_with_an_attached_loss_is_refused(workers: Pool) -> None:
    workers.run(2, _attached_before)


def test_a_copy_is_a_model_of_its_own() -> None:
    model = tiny()
    apply(model)
    clone = copy.deepcopy(model)
    before = model(input_ids=TEXT, labels=LABELS).loss
    with torch.no_grad():
        clone.lm_head.weight.zero_()
    assert model(input_ids=TEXT, labels=LABELS).loss == before
    torch.testing.assert_close(clone(input_ids=TEXT, labels=LABELS).loss, torch.tensor(VOCAB).log())


def test_options_change_the_loss() -> None:
    model = tiny()
    logits = model(TEXT).logits
    apply(model, label_smoothing=0.1)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), SHIFTED.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(model(input_ids=TEXT, labels=LABELS).loss, expected)


def _change_logits(model: Any, change: Any) -> None:
    """As if the model's own forward changed what its head returned."""
    _wrap_loss(model, lambda inner: lambda logits, labels, **kwargs: inner(change(logits), labels, **kwargs))


def _change_loss(model: Any, change: Any) -> None:
    """As if the model's own forward did more with its loss function: change(loss function, logits, labels)."""
    _wrap_loss(model, lambda inner: lambda logits, labels, **kwargs: change(inner, logits, labels))


def _wrap_loss(model: Any, wrap: Any) -> None:
    """What takes the stock loss function's place is called by way of `wrap` of it."""
    plain = type(model).loss_function.fget(model)

    class Changed(type(model)):
        @property
        def loss_function(self) -> Any:
            inner = self.__dict__.get("_loss_function", plain)
            return plain if inner is plain else wrap(inner)

        @loss_function.setter
        def loss_function(self, value: Any) -> None:
            self._loss_function = value

    model.__class__ = Changed


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits * 1.01,
        lambda logits: 30 * torch.tanh(logits / 30),
        lambda logits: 5000 * torch.tanh(logits / 5000),
        lambda logits: logits + 1,
        lambda logits: logits + torch.zeros(VOCAB),
    ],
    ids=["factor", "softcap", "wide softcap", "offset", "bias"],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_undeclared_change_of_the_logits_is_refused_in_the_first_step(change: Any, training: bool) -> None:
    model = tiny().train(training)
    _change_logits(model, change)
    apply(model)
    with pytest.raises(UnsupportedForward, match="another way than was declared"):
        model(input_ids=TEXT, labels=LABELS)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: nn.functional.leaky_relu(logits, 0.1),
        lambda logits: logits.clamp(max=5),
        lambda logits: logits.abs(),
        lambda logits: logits.bfloat16() * 1.03,
    ],
    ids=["leaky relu", "clamp", "abs", "factor in bf16"],
)
def test_a_change_of_one_sign_is_refused_in_the_second_step_at_the_latest(change: Any) -> None:
    model = tiny()
    _change_logits(model, change)
    apply(model)

    def two_steps() -> None:
        for _ in range(2):
            model(input_ids=TEXT, labels=LABELS)

    with pytest.raises(UnsupportedForward, match="another way than was declared"):
        two_steps()


def test_what_begins_after_the_first_steps_is_refused_then() -> None:
    model, factor = tiny(), 1.0
    _change_logits(model, lambda logits: logits * factor)
    apply(model)
    for _ in range(8):
        model(input_ids=TEXT, labels=LABELS)
    factor = 1.001  # a temperature that is learned, say
    with pytest.raises(UnsupportedForward, match="another way than was declared"):
        model(input_ids=TEXT, labels=LABELS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, x, y: f(x, y) + f(x, y.roll(-1, 1)), "twice"),
        (lambda f, x, y: f(x, y.roll(1, 1)), "other labels"),
        (lambda f, x, y: f(x, y, shift_labels=y), "other labels"),
        (lambda f, x, y: f(x, y, num_items_in_batch=3), "another num_items_in_batch"),
        (lambda f, x, y: f(x, y[:, 1:]), "other labels"),
        (lambda f, x, y: f(x, y, ignore_index=-1), "ignore_index=-1 was passed, but -100 to apply"),
        (lambda f, x, y: f(torch.zeros(()), y), "something else than what its head returned"),
        (lambda f, x, y: f(x.max(-1)[0], y), "another way than was declared, by max"),
    ],
    ids=[
        "two losses",
        "other labels",
        "shifted otherwise",
        "another count",
        "fewer labels",
        "another ignored label",
        "other logits",
        "a part of the logits",
    ],
)
def test_more_than_one_loss_of_the_labels_is_refused(change: Any, message: str) -> None:
    model = tiny()
    _change_loss(model, change)
    apply(model)
    with pytest.raises(UnsupportedForward, match=message):
        model(input_ids=TEXT, labels=LABELS)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.pow(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


USES = {
    "penalty": lambda f, x, y: f(x, y) + 1e-4 * x.logsumexp(-1).pow(2).mean(),
    "penalty before": lambda f, x, y: 1e-4 * x.logsumexp(-1).pow(2).mean() + f(x, y),
    "entropy": lambda f, x, y: f(x, y) - 1e-2 * -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "of a copy": lambda f, x, y: f(x.to(torch.float64), y) + 1e-4 * x.square().mean(),
    "of float()": lambda f, x, y: f(x.float(), y) + 1e-4 * x.square().mean(),
    "detached": lambda f, x, y: f(x, y) * (1 + 0.1 * x.detach().std()),
    "without gradient": torch.no_grad()(lambda f, x, y: f(x, y) + x.var()),
    "number": lambda f, x, y: f(x, y) * (1 if x.max().item() < 3 else 2),
    "in Python": lambda f, x, y: f(x, y) * (1 if float(x) < 3 else 2),
    "in numpy": lambda f, x, y: f(x, y) * float(x.detach().numpy() * 0 + 1),
    "own function": lambda f, x, y: f(x, y) + _Square.apply(x).mean(),
    "data": lambda f, x, y: f(x, y) + x.data.mean(),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("use", USES)
def test_any_other_use_of_the_logits_is_refused_in_whichever_step_it_begins(use: str, training: bool) -> None:
    model, begun = tiny().train(training), False
    _change_loss(model, lambda f, x, y: USES[use](f, x, y) if begun else f(x, y))
    apply(model)
    for _ in range(6):
        model(input_ids=TEXT, labels=LABELS)
    begun = True
    with pytest.raises(
        UnsupportedForward, match=r"uses its logits (twice, by .* and by|in another way .*, by logsumexp)"
    ):
        model(input_ids=TEXT, labels=LABELS)
    begun = False
    assert type(model(input_ids=TEXT, labels=LABELS).loss) is torch.Tensor


@pytest.mark.parametrize(
    "change",
    [
        lambda f, x, y: f(x.to(x.device, x.dtype).contiguous().float(), y),
        lambda f, x, y: f(x, y.to(x.device)) if x.shape == x.size() and x.ndim == 0 and repr(x) else None,
    ],
    ids=["moved", "asked for its form"],
)
def test_what_leaves_logits_as_they_are_is_no_use_of_them(change: Any) -> None:
    model = tiny()
    expected = loss_and_grads(model)
    _change_loss(model, change)
    apply(model)
    assert_same(loss_and_grads(model), expected)


def test_a_count_that_the_model_keeps_for_itself_is_refused() -> None:
    model = tiny()
    _change_loss(model, lambda f, x, y: f(x, y))
    apply(model)
    with pytest.raises(UnsupportedForward, match="does not hand it to its loss function"):
        model(input_ids=TEXT, labels=LABELS, num_items_in_batch=5)


def test_a_head_that_does_not_see_every_token_is_refused() -> None:
    model = tiny()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0][:, 1:],))
    apply(model)
    with pytest.raises(UnsupportedForward, match=r"hidden states \(2, 8, 32\) for labels \(2, 9\)"):
        model(input_ids=TEXT, labels=LABELS)


def test_labels_that_a_model_changes_in_some_batches_are_refused() -> None:
    model, masked = tiny(), False
    _change_loss(model, lambda f, x, y: f(x, y.masked_fill(y == y[0, 1], -100) if masked else y))
    apply(model)
    for _ in range(6):
        model(input_ids=TEXT, labels=LABELS)
    masked = True
    with pytest.raises(UnsupportedForward, match="other labels"):
        model(input_ids=TEXT, labels=LABELS)


def test_labels_that_a_model_writes_to_are_refused() -> None:
    model = tiny()
    _change_loss(model, lambda f, x, y: f(x, y.masked_fill_(y == y[0, 1], -100)))
    apply(model)
    with pytest.raises(UnsupportedForward, match="in place"):
        model(input_ids=TEXT, labels=LABELS.clone())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_learned_temperature_is_refused_while_it_is_1(frozen: bool) -> None:
    model, temperature = tiny(), torch.ones((), requires_grad=True)
    model.requires_grad_(not frozen)
    _change_logits(model, lambda logits: logits * temperature)
    apply(model)
    with pytest.raises(UnsupportedForward, match="trained parameter"):
        model(input_ids=TEXT, labels=LABELS)
    with torch.no_grad():
        assert model(input_ids=TEXT, labels=LABELS).loss.dim() == 0


def test_models_do_not_share_a_signature() -> None:
    model = tiny()
    signature = inspect.signature(model.forward)
    apply(model)
    apply(tiny("Mamba", state_size=4))
    assert inspect.signature(model.forward) == signature


def test_a_pickled_model_is_refused_when_it_is_saved(tmp_path: Any) -> None:
    model = tiny()
    apply(model)
    with pytest.raises(TypeError, match="state dict"):
        torch.save(model, tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Llama", {"softcap": 30.0}), ("Granite", {"logit_scale": 3.0}), ("Gemma2", {"softcap": 20.0})],
)
def test_a_declaration_that_the_model_does_not_keep_is_refused(kind: str, options: dict[str, float]) -> None:
    model = tiny(kind, **({"head_dim": 8} if kind == "Gemma2" else {}))
    apply(model, **options)
    with pytest.raises(RuntimeError, match="another way than was declared"):
        model(input_ids=TEXT, labels=LABELS)


def test_a_declared_change_is_honoured() -> None:
    model = tiny()
    _change_logits(model, lambda logits: 3 * torch.tanh(logits * 2 / 3))
    logits = model(TEXT).logits
    apply(model, logit_scale=2.0, softcap=3.0)
    expected = nn.functional.cross_entropy((3 * torch.tanh(logits * 2 / 3)).flatten(0, 1), SHIFTED.flatten())
    torch.testing.assert_close(model(input_ids=TEXT, labels=LABELS).loss, expected)


def test_a_head_that_is_called_twice_is_refused() -> None:
    model = tiny()
    apply(model)
    head = model.lm_head
    model.model.register_forward_hook(lambda module, args, output: [head(output.last_hidden_state)].clear())
    with pytest.raises(RuntimeError, match="twice"):
        model(input_ids=TEXT, labels=LABELS)


def test_a_head_that_is_not_called_is_refused() -> None:
    model = tiny()
    apply(model)
    model.resize_token_embeddings(VOCAB + 3)
    with pytest.raises(UnsupportedForward, match="replaced since"):
        model(input_ids=TEXT, labels=LABELS)


def test_refusals_at_set_up() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="reduction"):
        apply(model, reduction="sum")
    with pytest.raises(TypeError, match="smoothing"):
        apply(model, smoothing=0.1)
    with pytest.raises(TypeError, match="'label_smothing'; did you mean 'label_smoothing'"):
        apply(model, label_smothing=0.1)
    with pytest.raises(TypeError, match="'eval_logit'; did you mean 'eval_logits'"):
        apply(model, eval_logit=True)
    with pytest.raises(TypeError, match="LlamaModel has no output embedding"):
        apply(model.model)
    for wrapped, message in (
        (torch.compile(model), "before torch.compile, or on its ._orig_mod"),
        (nn.DataParallel(model), "before the wrapper, or on its .module"),
    ):
        with pytest.raises(TypeError, match=message):
            apply(wrapped)
    handle = apply(model)
    with pytest.raises(ValueError, match="remove"):
        apply(model)
    handle.remove()
    with pytest.raises(ValueError, match="removed already"):
        handle.remove()
    for aux in ("accuracy", ("nope",)):
        with pytest.raises(ValueError, match="aux must be"):
            apply(model, aux=aux)
    with pytest.raises(TypeError, match="Linear"):
        apply(nn.Linear(2, 2))

    model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    with pytest.raises(ValueError, match="only ForCausalLMLoss"):
        apply(model)
    model = tiny()
    model.lm_head.weight = nn.Parameter(torch.ones(VOCAB, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match="quantized"):
        apply(model)

    class NormalizedHead(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(hidden, nn.functional.normalize(self.weight))

    model.lm_head = NormalizedHead(32, VOCAB, bias=False)
    with pytest.raises(TypeError, match="NormalizedHead"):
        apply(model)
    with pytest.raises(ValueError, match="computes its loss itself"):
        apply(tiny("Bart", d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                   decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32))  # fmt: skip


def _sharded(ctx: Context, kind: str, config: dict[str, Any]) -> Any:
    model = tiny(kind, **config)
    stock = copy.deepcopy(model)
    handle = apply(model, ctx.group)
    assert isinstance(model.lm_head, VocabParallelHead)
    result = loss_and_grads(model)
    torch.testing.assert_close(model(TEXT).logits, stock(TEXT).logits)
    torch.testing.assert_close(
        model(input_ids=TEXT, labels=LABELS, logits_to_keep=3).logits, stock(TEXT).logits[:, -3:]
    )
    assert torch.equal(model.generate(TEXT, max_new_tokens=3), stock.generate(TEXT, max_new_tokens=3))
    handle.remove()
    assert torch.equal(model.lm_head.weight, stock.lm_head.weight)
    assert_same(loss_and_grads(model), loss_and_grads(stock))
    return result


@pytest.mark.parametrize(("world", "kind"), [(2, "softcap"), (3, "llama")])
def test_a_group_shares_the_vocabulary(world: int, kind: str, workers: Pool) -> None:
    name, config = KINDS[kind]
    expected = loss_and_grads(tiny(name, **config, tie_word_embeddings=False))
    for result in workers.run(world, _sharded, name, {**config, "tie_word_embeddings": False}):
        assert_same(result, expected)


def _accuracy(ctx: Context) -> Any:
    model = tiny(vocab_size=100)
    with torch.no_grad():
        model.lm_head.weight[50:] = model.lm_head.weight[:50]  # each arg-max is a tie between two shards
    ids = TEXT % 100
    expected = model(ids).logits.argmax(-1) % 50
    handle = apply(model, ctx.group, aux=("accuracy", "predictions"))
    model(input_ids=ids, shift_labels=torch.where(ids % 2 == 0, expected, -100))
    assert handle.output is not None
    return handle.output.accuracy, handle.output.predictions, expected


def test_token_accuracy_is_over_the_global_vocabulary(workers: Pool) -> None:
    """Field report B37: ties go to the lowest id; ignored tokens are left out."""
    for accuracy, predictions, expected in workers.run(2, _accuracy):
        assert torch.equal(predictions, expected)
        assert accuracy == 1.0


def _tied(ctx: Context, to: str) -> None:
    model: Any = tiny(tie_word_embeddings=to == "embedding")
    if to == "another head":
        model.second_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
        model.second_head.weight = model.lm_head.weight
    apply(model, ctx.group)


@pytest.mark.parametrize("to", ["embedding", "another head"])
def test_a_tied_head_cannot_be_sharded(to: str, workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _tied, to), "ValueError", "the head's weight is tied (", "lm_head.weight")


def _trained_copy(ctx: Context) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    apply(peft.get_peft_model(tiny(), config), ctx.group)


def test_a_head_with_a_trained_copy_cannot_be_sharded(workers: Pool) -> None:
    pytest.importorskip("peft", reason=needs("hf"))
    assert_all_raise(workers.outcomes(2, _trained_copy), "TypeError", "modules_to_save")


def _native(ctx: Context, folder: str, sizes: dict[str, int]) -> Any:
    model = load_sharded(folder, sizes)
    apply(model)
    return loss_and_grads(model)


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "sizes",
    [{"tp_size": 4}, {"tp_size": 2, "fsdp_size": 2}, pytest.param({"fsdp_size": 4}, marks=EXHAUSTIVE)],
    ids=str,
)
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=EXHAUSTIVE), "tied", "softcap"])
def test_transformers_own_tensor_parallelism_and_fsdp(kind: str, sizes: dict[str, int], workers: Pool) -> None:
    name, config = KINDS[kind]
    model = tiny(name, **{**config, "num_key_value_heads": 4})
    expected = loss_and_grads(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for result in workers.run(4, _native, folder, sizes):
            assert_same(result, expected)


def test_the_head_takes_its_input_by_name() -> None:
    model = tiny()
    hidden = torch.randn(2, 3, model.config.hidden_size)
    expected = model.lm_head(input=hidden)
    apply(model)
    assert torch.equal(model.lm_head(input=hidden), expected)
