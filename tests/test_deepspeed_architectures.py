"""Models of transformers under ZeRO-3, whose hooks are given what every module returns: a step beside stock's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit.skips import needs

pytest.importorskip("deepspeed", reason=needs("deepspeed"))
pytest.importorskip("transformers", reason=needs("hf"))

from flce_dist.integrations.deepspeed import initialize
from tests.kit.architectures import build, given, largest_error
from tests.kit.causal_lm import tiny
from tests.kit.engines import LR, Cell, deepspeed_ready, gathered
from tests.kit.workers import Context, Pool
from tests.test_hf_architectures import CLASSES, TABLE

Engines = Callable[[int], Pool]
# Their heads are inside other modules: lm_head.decoder, cls.predictions.decoder, language_model.lm_head. The last one's
# outputs have an inner model's outputs among them.
INSIDE = (
    "BertGenerationDecoder",
    "RemBertForCausalLM",
    "XmodForCausalLM",
    "LlavaForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
)


def _train(start: Callable[..., Any], model: Any, section: dict[str, Any]) -> Any:
    """The losses before and after a step, with the same dropout each time, and the parameters' changes."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    config = Cell(3, llama=True).config() | {"flce_dist": section}
    batch = given(model)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = start(model=model, optimizer=optimizer, config=config)[0]

    def loss() -> Tensor:
        torch.manual_seed(1)
        return engine(**batch, use_cache=False).loss

    before = loss()
    engine.backward(before)
    engine.step()
    changes = {name: value - initial[name] for name, value in gathered(engine).items()}
    losses = torch.stack([before.detach(), loss().detach()])
    engine.destroy()
    return losses, changes


def _assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=2e-5)
    # The last digit of a norm's weight of 1 is up to 4e-5 of its change.
    assert largest_error(found[1], expected[1]) <= 1e-4


def _beside_stock(ctx: Context, name: str) -> str | None:
    """Why stock's loss cannot be had, if so."""
    with deepspeed_ready(ctx) as deepspeed:
        try:
            expected = _train(deepspeed.initialize, build(CLASSES[name]), None)
        except (ImportError, TypeError) as error:
            return repr(error)[:200]
        found = _train(initialize, build(CLASSES[name]), {})
    _assert_same(found, expected)
    return None


@pytest.mark.parametrize("name", INSIDE)
def test_heads_inside_other_modules(name: str, engine_workers: Engines) -> None:
    assert engine_workers(1).run(1, _beside_stock, name) == [None]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, result in TABLE.items() if result == "equal"])
def test_every_architecture(name: str, engine_workers: Engines) -> None:
    (problem,) = engine_workers(1).run(1, _beside_stock, name)
    if problem is not None:
        pytest.skip(f"needs a model that runs under ZeRO-3 with its own loss: {problem}")


def _trained_copy(ctx: Context) -> None:
    import peft

    def model() -> Any:
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
        return peft.get_peft_model(tiny(), config)

    with deepspeed_ready(ctx) as deepspeed:
        expected = _train(deepspeed.initialize, model(), None)
        _assert_same(_train(initialize, model(), {}), expected)


def test_a_head_that_is_trained_beside_an_adapter(engine_workers: Engines) -> None:
    pytest.importorskip("peft", reason=needs("hf"))
    engine_workers(2).run(2, _trained_copy)
