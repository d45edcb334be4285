"""The section "flce_dist" of a DeepSpeed configuration: what is read, refused and warned of. Needs no engine."""

import base64
import dataclasses
import json
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flce_dist import LossOptions
from flce_dist.integrations.deepspeed import Section, SectionWarning, json_schema, read_section
from flce_dist.integrations.deepspeed.section import VocabParallel, load_config
from flce_dist.options import CHOICES, DTYPES
from tests.kit.skips import needs

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "deepspeed"
ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}}
DATA: dict[str, Any] = {"flce_dist": {"vocab_parallel": "data"}}
SCHEMA = json_schema()


def test_options_are_only_those_that_are_given() -> None:
    section = read_section({"flce_dist": {"label_smoothing": 0.1, "accum_dtype": "fp32", "softcap": None}})
    assert section == Section(
        "flce_dist", {"label_smoothing": 0.1, "accum_dtype": torch.float32, "softcap": None}, None, None
    )


def test_numbers_as_deepspeed_takes_them() -> None:
    config = {**DATA, "zero_optimization": {"stage": "3"}, "sequence_parallel_size": None}
    assert read_section(config) == Section("flce_dist", {}, "data", None)


@pytest.mark.parametrize("config", [{"flce_dist": {}, "flce-dist": {}}, {"flce_dist": {}, "loss": {"type": "flce"}}])
def test_a_misspelt_section_beside_a_right_one_warns(config: dict[str, Any]) -> None:
    with pytest.warns(SectionWarning, match="is not read by anything"):
        assert read_section(config) is not None


def test_own_keys() -> None:
    section = read_section({"flce_dist": {"vocab_parallel": "data", "head": "model.out"}, **ZERO3})
    assert section == Section("flce_dist", {}, "data", "model.out")


def test_alias() -> None:
    assert read_section({"loss": {"type": "flce_dist", "z_loss": 1e-4}}) == Section(
        "loss", {"z_loss": 1e-4}, None, None
    )


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}, {"loss": {"type": "focal"}}, {"loss": "mse"}])
def test_no_section_is_none_without_a_word(config: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    assert read_section(config) is None
    assert not recwarn


@pytest.mark.parametrize(
    "config",
    [
        {"flce-dist": {}},
        {"flce": {}},
        {"FLCE_DIST": {}},
        {"flcedist": {}},
        {"fcle_dist": {}},
        {"loss": {"type": "flce"}},
        {"loss": {"type": "flce-dist", "z_loss": 0.1}},
    ],
    ids=str,
)
def test_a_misspelt_name_warns(config: dict[str, Any]) -> None:
    with pytest.warns(SectionWarning, match="did you mean the section"):
        assert read_section(config) is None


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"flce_dist": None}, TypeError, "flce_dist: expected an object"),
        ({"flce_dist": True}, TypeError, "flce_dist: expected an object"),
        ({"flce_dist": {}, "loss": {"type": "flce_dist"}}, ValueError, "flce_dist: the configuration has the section"),
        ({"flce_dist": {"smoothing": 0.1}}, ValueError, "flce_dist.smoothing: unknown key; did you mean"),
        ({"flce_dist": {"zloss": 0.1}}, ValueError, "flce_dist.zloss: unknown key; did you mean 'z_loss'"),
        ({"flce_dist": {"vocab_paralel": "data"}}, ValueError, "flce_dist.vocab_paralel: .*'vocab_parallel'"),
        ({"flce_dist": {"vocab_parallel": "fsdp"}}, ValueError, "flce_dist.vocab_parallel: expected one of none, tens"),
        ({"flce_dist": {"vocab_parallel": True}}, ValueError, "flce_dist.vocab_parallel: expected one of"),
        ({"flce_dist": {"vocab_parallel": ["data"]}}, ValueError, "flce_dist.vocab_parallel: expected one of"),
        ({"flce_dist": {"head": 3}}, TypeError, "flce_dist.head: expected a module's dotted name"),
        ({"flce_dist": {"head": ""}}, TypeError, "flce_dist.head: expected a module's dotted name"),
        ({"flce_dist": {"type": "flce_dist"}}, ValueError, "flce_dist.type: unknown key; known keys: vocab_parallel"),
        ({**DATA, "zero_optimization": True}, ValueError, "flce_dist.vocab_parallel: .*stage 3, got True"),
        ({**DATA, "zero_optimization": {"stage": "two"}}, TypeError, "zero_optimization.stage: expected a number"),
        (
            {**DATA, **ZERO3, "tensor_parallel": {"autotp_size": "2"}},
            TypeError,
            "tensor_parallel.autotp_size: expected",
        ),
        ({**DATA, **ZERO3, "tensor_parallel": 2}, TypeError, "tensor_parallel: expected an object"),
        ({"flce_dist": {"label_smoothing": 2}}, ValueError, "flce_dist.label_smoothing"),
        ({"flce_dist": {"chunk_rows": "many"}}, TypeError, "flce_dist.chunk_rows"),
        ({"flce_dist": {"accum_dtype": "half"}}, ValueError, "flce_dist.accum_dtype: expected one of"),
        ({"flce_dist": {"backward": "auto"}}, ValueError, 'flce_dist.backward: "auto" is no value here'),
        ({"flce_dist": {"softcap": "auto"}}, ValueError, 'flce_dist.softcap: "auto"'),
        ({"flce_dist": {"vocab_parallel": "auto"}}, ValueError, 'flce_dist.vocab_parallel: "auto"'),
        ({"flce_dist": {"backward": "forward", "reduction": "none"}}, ValueError, "flce_dist.backward"),
        ({"loss": {"type": "flce_dist", "z_loss": "a"}}, TypeError, "loss.z_loss"),
        ({"flce_dist": {1: 2}}, ValueError, "flce_dist.1: unknown key"),
    ],
    ids=str,
)
def test_refused_with_the_key(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        read_section(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [None, 0, 1, 2])
def test_data_needs_stage_3(stage: int | None) -> None:
    config: dict[str, Any] = {"flce_dist": {"vocab_parallel": "data"}}
    if stage is not None:
        config["zero_optimization"] = {"stage": stage}
    with pytest.raises(ValueError, match=r"flce_dist.vocab_parallel: .* needs zero_optimization.stage 3, got [012]"):
        read_section(config)


@pytest.mark.parametrize(
    ("zero", "rest", "named"),
    [
        ({"zero_hpz_partition_size": 2}, {}, "zero_hpz_partition_size=2"),
        ({"mics_shard_size": 4}, {}, "mics_shard_size=4"),
        ({"zero_quantized_weights": True}, {}, "zero_quantized_weights"),
        ({"zero_quantized_gradients": True}, {}, "zero_quantized_gradients"),
        ({}, {"tensor_parallel": {"autotp_size": 2}}, "autotp_size 2"),
        ({}, {"sequence_parallel_size": 2, "data_parallel_size": 1}, "sequence_parallel_size 2"),
    ],
)
def test_data_with_what_it_cannot_be_combined_with(zero: dict[str, Any], rest: dict[str, Any], named: str) -> None:
    config = {"flce_dist": {"vocab_parallel": "data"}, "zero_optimization": {"stage": 3, **zero}, **rest}
    with pytest.raises(ValueError, match=rf"flce_dist.vocab_parallel: .*{named}"):
        read_section(config)


class TestAsDeepSpeedReadsIt:
    """A path to JSON or hjson, or base64."""

    TEXT = '{\n  # a comment\n  "flce_dist": {"vocab_parallel": "none", z_loss: 0.001}\n  train_batch_size: 8\n}'

    @pytest.fixture(autouse=True)
    def _deepspeed(self) -> None:
        pytest.importorskip("deepspeed", reason=needs("deepspeed"))

    def test_path(self, tmp_path: Path) -> None:
        path = tmp_path / "config.hjson"
        path.write_text(self.TEXT)
        for source in (str(path), path):
            assert read_section(load_config(source)) == Section("flce_dist", {"z_loss": 0.001}, "none", None)

    def test_base64(self) -> None:
        encoded = base64.urlsafe_b64encode(json.dumps({"flce_dist": {"softcap": 30.0}}).encode()).decode()
        assert read_section(load_config(encoded)) == Section("flce_dist", {"softcap": 30.0}, None, None)

    def test_duplicate_key(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_text('{"flce_dist": {"z_loss": 0.1, "z_loss": 0.2}}')
        with pytest.raises(ValueError, match="z_loss"):
            load_config(str(path))

    def test_neither(self) -> None:
        with pytest.raises(ValueError, match="deepspeed config"):
            load_config("no/such/file.json")


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2) + "\n"


def test_the_schema_file_is_that_of_the_options() -> None:
    """To write it anew: python -c "from tests.test_deepspeed_section import *; write_schema()"."""
    assert (CONFIGS / "flce_dist.schema.json").read_text() == schema_text()


def write_schema() -> None:
    (CONFIGS / "flce_dist.schema.json").write_text(schema_text())


def test_the_schema_has_every_option_with_its_description_and_default() -> None:
    section = json_schema()["properties"]["flce_dist"]
    assert section["additionalProperties"] is False
    properties = section["properties"]
    assert set(properties) == {field.name for field in dataclasses.fields(LossOptions)} | {"vocab_parallel", "head"}
    assert all(property["description"] for property in properties.values())
    assert properties["label_smoothing"]["default"] == 0.0
    assert properties["label_smoothing"]["type"] == "number"
    assert properties["chunk_rows"]["type"] == ["integer", "null"]
    assert properties["logits_budget"]["type"] == ["integer", "string", "null"]
    assert properties["backward"]["enum"] == ["forward", "recompute"]
    assert "bfloat16" in properties["accum_dtype"]["enum"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_our_configurations_are_json_and_read_without_a_warning(path: Path, recwarn: pytest.WarningsRecorder) -> None:
    config = json.loads(path.read_text())
    if path.name != "flce_dist.schema.json":
        assert read_section(config) is not None
        assert config["$schema"] == "./flce_dist.schema.json"
    assert not recwarn


OWN = {"vocab_parallel": typing.get_args(VocabParallel), "head": ("lm_head", "model.out")}
NUMBERS = [0, 1, -1, 2, 30, 0.1, 1e-4, -0.5, 1.5, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1]
WORDS = [*CHOICES["reduction"], *CHOICES["backward"], *CHOICES["backend"], *CHOICES["check_ranks"], *DTYPES]
SIZES = [
    "512MiB",
    "1 GB",
    "  7 ",
    "0MiB",
    "0",
    "0.0B",
    "1.5KiB",
    ".5MB",
    "1.MB",
    "-1B",
    "3 bananas",
    "512mib",
    "7\n",
    "",
]
CORNERS = [None, True, False, [], {}, *NUMBERS, *WORDS, *SIZES, *OWN["vocab_parallel"], *OWN["head"]]
VALUES = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer()),
    st.sampled_from(CORNERS),
    st.text("abz_- ", max_size=4),
)
KEYS = [*(field.name for field in dataclasses.fields(LossOptions)), *OWN, "zloss", "type"]
SECTIONS = st.one_of(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2), VALUES)
CONFIGS_LIKE_OURS = st.fixed_dictionaries(
    {},
    optional={
        "flce_dist": SECTIONS,
        "loss": st.one_of(SECTIONS, SECTIONS.map(lambda s: s | {"type": "flce_dist"} if isinstance(s, dict) else s)),
        "zero_optimization": st.sampled_from([{}, {"stage": 2}, {"stage": 3}, {"stage": "3"}, True, None]),
    },
)


def accepted(config: dict[str, Any]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SectionWarning)
            read_section(config)
    except (TypeError, ValueError):
        return False
    return True


def no_float_holds_a_number_of(config: dict[str, Any]) -> bool:
    values = [
        *config.values(),
        *(value for part in config.values() if isinstance(part, dict) for value in part.values()),
    ]
    return any(isinstance(value, int) and abs(value) > sys.float_info.max for value in values)


def test_the_schema_accepts_each_value_of_each_key_that_the_parser_accepts() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason=needs("test"))
    is_valid = jsonschema.Draft202012Validator(SCHEMA).is_valid
    configs = [{"flce_dist": {key: value}, **ZERO3} for key in KEYS for value in CORNERS]
    differ = [config["flce_dist"] for config in configs if is_valid(config) != accepted(config)]
    assert differ == []
    assert len([config for config in configs if accepted(config)]) > 100


@settings(max_examples=500, deadline=None)
@given(CONFIGS_LIKE_OURS)
def test_the_schema_accepts_random_configurations_that_the_parser_accepts(config: dict[str, Any]) -> None:
    """What it cannot say is not drawn: 2.0 is an integer to JSON Schema, and "0.1B" is less than one byte."""
    jsonschema = pytest.importorskip("jsonschema", reason=needs("test"))
    valid = jsonschema.Draft202012Validator(SCHEMA).is_valid(config)
    assert valid == accepted(config) or no_float_holds_a_number_of(config)


@pytest.mark.parametrize(
    ("section", "valid"),
    [
        ({"label_smoothing": 1}, True),
        ({"label_smoothing": 1.01}, False),
        ({"z_loss": 0}, True),
        ({"z_loss": -1e-9}, False),
        ({"softcap": 0}, False),
        ({"softcap": 0.1}, True),
        ({"softcap": None}, True),
        ({"chunk_rows": 0}, False),
        ({"chunk_rows": 1}, True),
        ({"ignore_index": 2**63}, False),
        ({"logits_budget": 0}, False),
        ({"logits_budget": "0 MiB"}, False),
        ({"logits_budget": "0.25 GB"}, True),
        ({"logits_budget": "512 bananas"}, False),
        ({"head": ""}, False),
        ({"backward": "forward", "reduction": "none"}, False),
        ({"backward": "forward", "reduction": "sum"}, True),
        ({"vocab_parallel": "data"}, False),
        ({"vocab_parallel": "tensor"}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("spelling", ["flce_dist", "loss"])
def test_bounds_are_in_the_schema(section: dict[str, Any], valid: bool, spelling: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason=needs("test"))
    config = {spelling: section | ({"type": "flce_dist"} if spelling == "loss" else {})}
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(config) == valid == accepted(config)


def test_defaults_and_our_configurations_are_valid() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason=needs("test"))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    properties = SCHEMA["properties"]["flce_dist"]["properties"]
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    for config in [{"flce_dist": defaults}, *(json.loads(path.read_text()) for path in CONFIGS.glob("*.json"))]:
        jsonschema.validate(config, SCHEMA)
