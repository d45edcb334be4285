"""The loss of apply() beside the stock one for the architectures of the installed transformers."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit.skips import needs

transformers = pytest.importorskip("transformers", reason=needs("hf"))

from tests.kit.architectures import architectures, compare  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architectures.md"
TABLE = dict(re.findall(r"^\| (\w+) \| (equal|refused|wrong|not built) \|", PAGE.read_text(), flags=re.MULTILINE))
CLASSES = {model_class.__name__: model_class for classes in architectures().values() for model_class in classes}
# One of each kind: plain, tied with a factor, learned positions, ALiBi, head bias, mixture of experts, latent
# attention, state space, hybrid, softcap, a factor that multiplies, image and text, an ignored softcap.
DOZEN = (
    "Qwen3ForCausalLM",
    "CohereForCausalLM",
    "GPT2LMHeadModel",
    "BloomForCausalLM",
    "PhiForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
    "MambaForCausalLM",
    "Zamba2ForCausalLM",
    "Gemma2ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
)


def check(model_class: Any) -> None:
    row = compare(model_class)
    if row.result == "not built" and row.note.startswith(("ImportError", "ModuleNotFoundError")):
        pytest.skip(f"needs a package: {row.note}")
    assert row.result == TABLE[row.name], row


@pytest.mark.parametrize("name", DOZEN)
def test_one_of_each_kind(name: str) -> None:
    assert TABLE[name] == "equal"
    check(CLASSES[name])


@pytest.mark.parametrize("name", ["BartForCausalLM", "DoryForCausalLM", "InklingForCausalLM"])
def test_what_is_refused_says_why(name: str) -> None:
    assert compare(CLASSES[name]).result == "refused"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_architecture_is_as_the_table_says(name: str) -> None:
    check(CLASSES[name])


def test_the_table_has_enough_and_nothing_wrong() -> None:
    results = list(TABLE.values())
    assert results.count("equal") >= 225
    assert results.count("not built") <= 1
    assert "wrong" not in results
    causal = [model_class.__name__ for model_class in architectures()["AutoModelForCausalLM"]]
    assert sum(TABLE[name] == "equal" for name in causal) >= 120
