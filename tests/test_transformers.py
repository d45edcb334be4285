"""replace_head on causal LMs of transformers (field report B37: trainers without logits)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import VocabParallelHead
from flce_dist.integrations.transformers import replace_head
from tests.kit import compare
from tests.kit.workers import Context, Pool
from tests.test_checks_ranks import assert_all_raise

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install flce_dist[train]")
TEXT = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(0))


def tiny(kind: str = "llama", tied: bool = False, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        **config,
    }
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    if kind == "gemma2":
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, head_dim=8)).eval()
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes)).eval()


def loss_and_grads(model: Any, head: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss with the caller's shift, and the gradients of head and input embedding."""
    hidden = model.model(input_ids=TEXT).last_hidden_state
    loss = head(hidden[:, :-1], TEXT[:, 1:])
    loss.backward()
    weight = head.weight.grad
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return loss.detach(), full, model.get_input_embeddings().weight.grad


def stock(kind: str, tied: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    model = tiny(kind, tied)
    loss = model(input_ids=TEXT, labels=TEXT).loss
    loss.backward()
    return loss.detach(), model.get_output_embeddings().weight.grad, model.get_input_embeddings().weight.grad


def _replaced(ctx: Context, kind: str, tied: bool) -> Any:
    model = tiny(kind, tied)
    head = replace_head(model, ctx.group)
    assert model.get_output_embeddings() is head
    assert isinstance(head, VocabParallelHead)
    return loss_and_grads(model, head)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_loss_and_gradients_are_those_of_the_stock_model(world: int, kind: str, workers: Pool) -> None:
    """Gemma 2 has a soft cap after the head, which the config tells."""
    expected = stock(kind)
    results = workers.run(world, _replaced, kind, False)
    compare.assert_same_bits([loss for loss, _, _ in results], "loss")
    for loss, head_grad, embedding_grad in results:
        compare.assert_loss(loss, expected[0], 1e-5)
        compare.assert_close(head_grad, expected[1], 1e-4, "head gradient")
        compare.assert_close(embedding_grad, expected[2], 1e-4, "embedding gradient")


def test_a_tie_survives_without_a_group() -> None:
    expected = stock("llama", tied=True)
    model = tiny("llama", tied=True)
    head = replace_head(model)
    assert head.weight is model.get_input_embeddings().weight
    loss, grad, _ = loss_and_grads(model, head)
    compare.assert_loss(loss, expected[0], 1e-5)
    compare.assert_close(grad, expected[1], 1e-4, "gradient of the tied weight")


def _tied(ctx: Context) -> None:
    replace_head(tiny(tied=True), ctx.group)


def test_a_tie_is_refused_when_sharded(workers: Pool) -> None:
    assert_all_raise(workers.outcomes(2, _tied), "ValueError", "tie")


def _own_loss(ctx: Context) -> None:
    model = tiny()
    replace_head(model, ctx.group)
    model(input_ids=TEXT, labels=TEXT)


def test_the_models_own_loss_on_local_logits_is_an_error(workers: Pool) -> None:
    """Logits of one shard in the stock loss would be a wrong number without an error."""
    assert_all_raise(workers.outcomes(2, _own_loss), "RuntimeError", "sharded")


def test_a_model_that_caps_after_its_head_caps_its_logits_once() -> None:
    model = tiny("gemma2", final_logit_softcapping=3.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(50)  # far into the cap, where capping twice shows
        before = model(input_ids=TEXT).logits
        replace_head(model)
        after = model(input_ids=TEXT).logits
    torch.testing.assert_close(after, before)


def test_without_a_group_the_stock_loss_and_generation_still_work() -> None:
    expected = stock("llama")[0]
    model = tiny()
    before = model.generate(TEXT[:1], max_new_tokens=4, do_sample=False)
    replace_head(model)
    compare.assert_loss(model(input_ids=TEXT, labels=TEXT).loss.detach(), expected, 1e-6)
    assert torch.equal(model.generate(TEXT[:1], max_new_tokens=4, do_sample=False), before)


def test_unknown_transforms_after_the_head_are_refused() -> None:
    model = tiny("granite", logits_scaling=4.0)
    with pytest.raises(ValueError, match="logits_scaling"):
        replace_head(model)
    expected = tiny("granite", logits_scaling=4.0)(input_ids=TEXT, labels=TEXT).loss.detach()
    head = replace_head(model, logit_scale=0.25)
    compare.assert_loss(loss_and_grads(model, head)[0], expected, 1e-5)


def test_options_reach_the_head_and_wrong_ones_are_refused() -> None:
    assert replace_head(tiny(), label_smoothing=0.1, chunk_rows=3).options.label_smoothing == 0.1
    with pytest.raises(TypeError, match="smoothing"):
        replace_head(tiny(), smoothing=0.1)


def test_an_adapter_around_the_head_is_refused() -> None:
    model = tiny()

    class Adapted(torch.nn.Linear):
        pass

    model.lm_head = Adapted(32, 100, bias=False)
    with pytest.raises(TypeError, match="Adapted"):
        replace_head(model)


def _accuracy(ctx: Context) -> Any:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[50:] = model.lm_head.weight[:50]  # each arg-max is a tie between two shards
    hidden = model.model(input_ids=TEXT).last_hidden_state
    expected = model.lm_head(hidden).argmax(-1) % 50
    head = replace_head(model, ctx.group)
    target = torch.where(TEXT % 2 == 0, expected, -100)
    out = head(hidden, target, aux=("accuracy", "predictions"))
    return out.accuracy, out.predictions, expected


@pytest.mark.parametrize("world", [1, 2])
def test_token_accuracy_is_over_the_global_vocabulary(world: int, workers: Pool) -> None:
    """Ties go to the lowest id; ignored tokens are left out."""
    for accuracy, predictions, expected in workers.run(world, _accuracy):
        assert torch.equal(predictions, expected)
        assert accuracy == 1.0
