"""LossOptions: its checks, the TypedDict that mirrors it, and options from a dict."""

import dataclasses
import json
import typing
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import flce_dist
from flce_dist import LossOptions
from flce_dist.options import LossOptionsDict

DEFAULTS = {
    "reduction": "mean",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "token_scaling": False,
    "softcap": None,
    "logit_scale": 1.0,
    "accum_dtype": None,
    "logits_dtype": None,
    "hidden_grad_reduce_dtype": None,
    "logits_budget": None,
    "chunk_rows": None,
    "skip_ignored": False,
    "backward": "auto",
    "backend": "auto",
    "check_ranks": "auto",
}

BAD = [
    ("reduction", "avg", ValueError),
    ("reduction", None, ValueError),
    ("backward", "later", ValueError),
    ("backend", "cuda", ValueError),
    ("check_ranks", "sometimes", ValueError),
    ("check_ranks", True, ValueError),
    ("ignore_index", -100.0, TypeError),
    ("ignore_index", True, TypeError),
    ("label_smoothing", -0.1, ValueError),
    ("label_smoothing", 1.1, ValueError),
    ("label_smoothing", "0.1", TypeError),
    ("label_smoothing", float("nan"), ValueError),
    ("z_loss", -1e-4, ValueError),
    ("z_loss", float("inf"), ValueError),
    ("z_loss", None, TypeError),
    ("token_scaling", 1, TypeError),
    ("skip_ignored", "yes", TypeError),
    ("softcap", 0.0, ValueError),
    ("softcap", -30.0, ValueError),
    ("softcap", 1e-46, ValueError),
    ("softcap", 1e-40, ValueError),
    ("softcap", "30", TypeError),
    ("softcap", float("nan"), ValueError),
    ("logit_scale", float("nan"), ValueError),
    ("logit_scale", None, TypeError),
    ("accum_dtype", "float32", TypeError),
    ("accum_dtype", torch.int32, TypeError),
    ("logits_dtype", float, TypeError),
    ("hidden_grad_reduce_dtype", torch.bool, TypeError),
    ("chunk_rows", 0, ValueError),
    ("chunk_rows", -5, ValueError),
    ("chunk_rows", 128.0, TypeError),
    ("chunk_rows", True, TypeError),
    ("logits_budget", 0, ValueError),
    ("logits_budget", "0MiB", ValueError),
    ("logits_budget", "many", ValueError),
    ("logits_budget", "9" * 400 + "GiB", ValueError),
    ("logits_budget", "512 parsecs", ValueError),
    ("logits_budget", 1.5, TypeError),
]


def test_fields_and_defaults_are_pinned() -> None:
    assert {f.name: f.default for f in dataclasses.fields(LossOptions)} == DEFAULTS


def test_typed_dict_mirrors_the_dataclass() -> None:
    assert typing.get_type_hints(LossOptionsDict) == typing.get_type_hints(LossOptions)
    assert LossOptionsDict.__required_keys__ == frozenset()


def test_options_are_frozen_and_hashable() -> None:
    options = LossOptions(softcap=30.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.softcap = 1.0  # type: ignore[misc]
    assert hash(options) == hash(LossOptions(softcap=30.0))


@pytest.mark.parametrize(("name", "value", "error"), BAD, ids=str)
def test_wrong_values_are_named(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        LossOptions(**{name: value})


@pytest.mark.parametrize(("name", "value", "error"), BAD, ids=str)
def test_from_dict_names_section_and_key(name: str, value: Any, error: type[Exception]) -> None:
    if name == "accum_dtype" and value == "float32":
        pytest.skip("a string is a dtype in a dict; test_from_dict_reads_dtypes runs it")
    with pytest.raises(error, match=rf"head\.loss\.{name}"):
        LossOptions.from_dict({name: value}, where="head.loss")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("label_smoothing", np.float32(0.25), 0.25),
        ("label_smoothing", np.int64(1), 1.0),
        ("z_loss", np.float64(1e-4), 1e-4),
        ("softcap", np.float16(30), 30.0),
        ("softcap", 30, 30.0),
        ("logit_scale", Fraction(1, 4), 0.25),
        ("ignore_index", np.int64(-100), -100),
        ("chunk_rows", np.uint8(4), 4),
        ("logits_budget", np.int32(4096), 4096),
    ],
    ids=str,
)
def test_numbers_of_other_libraries_become_pythons(name: str, value: Any, expected: float) -> None:
    """What a configuration made with numpy holds is computed with, compared and written to JSON like any other."""
    options = LossOptions(**{name: value})
    found = getattr(options, name)
    assert (found, type(found)) == (expected, type(expected))
    assert options == LossOptions(**{name: expected})
    json.dumps(dataclasses.asdict(options))
    hidden, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    loss = flce_dist.linear_cross_entropy(hidden, weight, target, **{name: value})
    assert torch.equal(loss, flce_dist.linear_cross_entropy(hidden, weight, target, **{name: expected}))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("label_smoothing", np.bool_(True), TypeError),
        ("label_smoothing", np.array(0.1), TypeError),
        ("softcap", np.float16("inf"), ValueError),
        ("z_loss", torch.tensor(0.1), TypeError),
        ("z_loss", 10**400, ValueError),
        ("ignore_index", np.float64(-100), TypeError),
        ("chunk_rows", np.int64(0), ValueError),
        ("chunk_rows", np.bool_(True), TypeError),
        ("logits_budget", np.float32(4096), TypeError),
        ("skip_ignored", np.bool_(True), TypeError),
    ],
    ids=str,
)
def test_numbers_of_other_libraries_are_checked(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{name} must be "):
        LossOptions(**{name: value})


def test_none_with_gradients_in_forward_is_refused() -> None:
    with pytest.raises(ValueError, match="backward"):
        LossOptions(reduction="none", backward="forward")


@pytest.mark.parametrize("key", ["label_smothing", "chunk", "Reduction", "", "group"])
def test_from_dict_refuses_unknown_keys(key: str) -> None:
    with pytest.raises(ValueError, match=rf"flce_dist\.{key}"):
        LossOptions.from_dict({key: 1}, where="flce_dist")


def test_from_dict_refuses_keys_that_are_no_strings() -> None:
    with pytest.raises(ValueError, match=r"loss\.3"):
        LossOptions.from_dict({3: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "float64"])
def test_from_dict_reads_dtypes(text: str) -> None:
    expected = getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(text, text))
    options = LossOptions.from_dict({"accum_dtype": text, "hidden_grad_reduce_dtype": text})
    assert options.accum_dtype == options.hidden_grad_reduce_dtype == expected


@pytest.mark.parametrize("text", ["int32", "float", "torch.float32", "auto", ""])
def test_from_dict_refuses_other_dtypes(text: str) -> None:
    with pytest.raises(ValueError, match=r"loss\.accum_dtype"):
        LossOptions.from_dict({"accum_dtype": text})


def test_from_dict_of_the_defaults_is_the_default() -> None:
    assert LossOptions.from_dict(DEFAULTS) == LossOptions()
    assert LossOptions.from_dict({}) == LossOptions()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512MiB", 2**29), ("1GiB", 2**30), ("4KiB", 4096), ("100", 100), ("1.5MiB", 3 * 2**19), ("2 GB", 2 * 10**9)],
)
def test_budgets_are_read(text: str, num_bytes: int) -> None:
    assert LossOptions(logits_budget=text).budget_bytes == num_bytes
    assert LossOptions(logits_budget=num_bytes).budget_bytes == num_bytes


def test_an_unknown_option_names_its_nearest() -> None:
    hidden, weight, target = torch.randn(2, 4), torch.randn(3, 4), torch.tensor([0, 1])
    with pytest.raises(TypeError, match="unknown option 'zloss'; did you mean 'z_loss'"):
        flce_dist.linear_cross_entropy(hidden, weight, target, zloss=1.0)
    with pytest.raises(TypeError, match="unknown option 'foo'; known: reduction, "):
        flce_dist.VocabParallelHead(4, 3, foo=1)
