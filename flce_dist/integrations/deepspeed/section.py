"""The section "flce_dist" of a DeepSpeed configuration: read, checked, and described as a JSON Schema."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...options import DTYPES, UNITS, LossOptions, suggestion

SECTION = "flce_dist"
ALIAS = "loss"
VocabParallel = Literal["none", "tensor", "data"]
_OWN_KEYS = {
    "vocab_parallel": 'How the head is sharded: "none", "tensor" (over the tensor-parallel ranks) or "data" (over the '
    "data-parallel ranks, never gathered; ZeRO stage 3). Left out: as the model's head is.",
    "head": "The head's dotted name in the model. Left out: its output embeddings, or its lm_head or embed_out.",
}
_UNSUPPORTED_WITH_DATA = {
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
}
"""ZeRO-3 options, with the value that switches them off, under which a parameter has no partition group of its own."""
_BOUNDS: dict[str, dict[str, Any]] = {
    "ignore_index": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "label_smoothing": {"minimum": 0, "maximum": 1},
    "z_loss": {"minimum": 0},
    "softcap": {"exclusiveMinimum": 0},
    "logits_budget": {
        "minimum": 1,
        "pattern": rf"^\s*(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?\s*({'|'.join(UNITS)})\s*$",
    },
    "chunk_rows": {"minimum": 1},
}
"""What `LossOptions` checks of a value beyond its type, in JSON Schema's words."""


class SectionWarning(UserWarning):
    """The configuration has no section of ours, perhaps because of a spelling."""


@dataclass(frozen=True)
class Section:
    """A checked section."""

    where: str
    """Its path in the configuration, for messages."""
    options: dict[str, Any]
    """The fields of `LossOptions` that it gives, and no others: a model's own softcap stays where it gives none."""
    vocab_parallel: VocabParallel | None
    head: str | None


def load_config(config: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """The configuration as a mapping; a path (JSON or hjson) or base64 string is read as DeepSpeed reads it."""
    if isinstance(config, Mapping):
        return config
    import deepspeed

    return deepspeed.load_ds_config(str(config))


def read_section(config: Mapping[str, Any]) -> Section | None:
    """The section of a configuration, None when it has none.

    Raises:
        TypeError, ValueError: unknown key, wrong type or value, "auto", a combination that cannot work, or both
            spellings of the section at once; the message starts with the key's path.

    Warns:
        SectionWarning: a key that looks like a misspelt section.
    """
    found = _find(config)
    if found is None:
        return None
    where, values = found
    for key, value in values.items():
        if value == "auto":
            raise ValueError(
                f'{where}.{key}: "auto" is no value here, since accelerate and the transformers Trainer replace it; '
                "leave the key out for the default"
            )
    values = dict(values)
    own = {key: values.pop(key, None) for key in _OWN_KEYS}
    choices = typing.get_args(VocabParallel)
    if own["vocab_parallel"] is not None and own["vocab_parallel"] not in choices:
        raise ValueError(f"{where}.vocab_parallel: expected one of {', '.join(choices)}, got {own['vocab_parallel']!r}")
    if own["head"] is not None and (not isinstance(own["head"], str) or not own["head"]):
        raise TypeError(f"{where}.head: expected a module's dotted name, got {own['head']!r}")
    known = [*_OWN_KEYS, *(field.name for field in dataclasses.fields(LossOptions))]
    for key in values:
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown key; {suggestion(key, known, 'known keys')}")
    options = LossOptions.from_dict(values, where=where)
    section = Section(where, {key: getattr(options, key) for key in values}, own["vocab_parallel"], own["head"])
    _check_combination(section, config)
    return section


def section_or_warning(config: Mapping[str, Any]) -> Section | None:
    """`read_section`, with a SectionWarning at the caller's caller when there is none."""
    section = read_section(config)
    if section is None:
        warnings.warn(
            f'the DeepSpeed configuration has no section "{SECTION}": the model keeps its own loss',
            SectionWarning,
            stacklevel=3,
        )
    return section


def _find(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    alias = config.get(ALIAS)
    has_alias = isinstance(alias, Mapping) and alias.get("type") == SECTION
    _warn_of_misspelt(config, has_alias)
    if SECTION in config and has_alias:
        raise ValueError(f'{SECTION}: the configuration has the section twice, as "{SECTION}" and as "{ALIAS}"')
    if SECTION in config:
        values = config[SECTION]
        if not isinstance(values, Mapping):
            raise TypeError(f"{SECTION}: expected an object such as {{}}, got {values!r}")
        return SECTION, values
    if has_alias:
        assert isinstance(alias, Mapping)
        return ALIAS, {key: value for key, value in alias.items() if key != "type"}
    return None


def _warn_of_misspelt(config: Mapping[str, Any], has_alias: bool) -> None:
    looks_like = [key for key in config if key != SECTION and _looks_like_ours(key)]
    alias = config.get(ALIAS)
    kind = alias.get("type") if isinstance(alias, Mapping) else alias
    if not has_alias and _looks_like_ours(kind):
        looks_like.append(f"{ALIAS}={kind}" if kind is alias else f"{ALIAS}.type={kind}")
    for name in looks_like:
        warnings.warn(
            f'{name} is not read by anything; did you mean the section "{SECTION}" (or '
            f'{{"{ALIAS}": {{"type": "{SECTION}"}}}})?',
            SectionWarning,
            stacklevel=4,
        )


def _looks_like_ours(name: object) -> bool:
    letters = re.sub(r"[^a-z]", "", str(name).lower())
    return letters.startswith("flce") or bool(difflib.get_close_matches(letters, ["flcedist"], n=1, cutoff=0.75))


def _check_combination(section: Section, config: Mapping[str, Any]) -> None:
    """What cannot work whatever the model is."""
    where = f"{section.where}.vocab_parallel"
    if section.vocab_parallel != "data":
        return
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else zero
    if not isinstance(zero, Mapping) or integer("zero_optimization.stage", stage) != 3:
        raise ValueError(
            f'{where}: "data" needs zero_optimization.stage 3, got {stage!r}: only there a parameter has a partition '
            "group of its own; the other stages keep, broadcast and average one copy of it for all data-parallel "
            "ranks"
        )
    if (ranks := tensor_ranks(config)) > 1:
        raise ValueError(
            f'{where}: "data" with tensor_parallel.autotp_size {ranks}: tensor parallelism shards the head already; '
            'use "tensor"'
        )
    if integer("sequence_parallel_size", config.get("sequence_parallel_size")) > 1:
        raise ValueError(
            f'{where}: "data" with sequence_parallel_size {config["sequence_parallel_size"]}: not supported'
        )
    for key, off in _UNSUPPORTED_WITH_DATA.items():
        if zero.get(key, off) != off:
            raise ValueError(
                f'{where}: "data" with zero_optimization.{key}={zero[key]}: it partitions parameters over other '
                "groups than the head's; switch one of the two off"
            )


def integer(path: str, value: Any) -> int:
    """A count as DeepSpeed takes it, digits in a string included; 0 when absent."""
    try:
        return int(value or 0)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{path}: expected a number, got {value!r}") from error


def tensor_ranks(config: Mapping[str, Any]) -> int:
    """Ranks of AutoTP, 1 without. Raises TypeError for what DeepSpeed fails to compare: digits in a string, too."""
    values = config.get("tensor_parallel") or {}
    if not isinstance(values, Mapping):
        raise TypeError(f'tensor_parallel: expected an object such as {{"autotp_size": 2}}, got {values!r}')
    ranks = values.get("autotp_size", 0)
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise TypeError(f"tensor_parallel.autotp_size: expected an integer, got {ranks!r}")
    return max(ranks, 1)


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of a DeepSpeed configuration that describes our section and accepts all else."""
    hints = typing.get_type_hints(LossOptions)
    descriptions = _descriptions()
    properties: dict[str, Any] = {
        "vocab_parallel": {"enum": [*typing.get_args(VocabParallel), None], "description": _OWN_KEYS["vocab_parallel"]},
        "head": {
            "type": ["string", "null"],
            "minLength": 1,
            "not": {"const": "auto"},
            "description": _OWN_KEYS["head"],
        },
    }
    for field in dataclasses.fields(LossOptions):
        schema = _schema_of(hints[field.name]) | _BOUNDS.get(field.name, {})
        schema["description"] = descriptions[field.name]
        if field.default != "auto":
            schema["default"] = field.default
        properties[field.name] = schema
    section = {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **_if_then({"backward": {"const": "forward"}}, {"properties": {"reduction": {"not": {"const": "none"}}}}),
    }
    alias = section | {
        "required": ["type"],
        "properties": {"type": {"const": SECTION}, **{key: {"$ref": f"#/properties/{SECTION}/properties/{key}"}
                                                      for key in properties}},
    }  # fmt: skip
    is_ours = {"type": {"const": SECTION}}
    stage_3 = {"type": "object", "properties": {"stage": {"enum": [3, "3"]}}, "required": ["stage"]}
    data = {"type": "object", "properties": {"vocab_parallel": {"const": "data"}}, "required": ["vocab_parallel"]}
    ours = {"type": "object", "properties": is_ours, "required": ["type"]}
    needs_stage_3 = {"properties": {"zero_optimization": stage_3}, "required": ["zero_optimization"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A DeepSpeed configuration with the section of flce_dist",
        "type": "object",
        "properties": {
            SECTION: {"description": "The loss of flce_dist: fields of LossOptions, and its head.", **section},
            ALIAS: {"if": ours, "then": alias},
        },
        "allOf": [
            _if_then({SECTION: data}, needs_stage_3),
            _if_then({ALIAS: {"allOf": [ours, data]}}, needs_stage_3),
            {"not": {"properties": {ALIAS: ours}, "required": [SECTION, ALIAS]}},
        ],
    }


def _if_then(condition: dict[str, Any], consequence: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": condition, "required": list(condition)}, "then": consequence}


def _descriptions() -> dict[str, str]:
    """The options' lines in the docstring of `LossOptions`."""
    text = (LossOptions.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
    return {
        name: " ".join(line.split()) for name, line in re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, re.MULTILINE)
    }


def _schema_of(hint: Any) -> dict[str, Any]:
    nullable, choices = False, (hint,)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        choices = typing.get_args(hint)
        nullable = type(None) in choices
        choices = tuple(choice for choice in choices if choice is not type(None))
    if typing.get_origin(choices[0]) is Literal:
        return {"enum": [value for value in typing.get_args(choices[0]) if value != "auto"]}
    if choices[0] is torch.dtype:
        return {"enum": [*DTYPES, None]}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    kinds = [names[choice] for choice in choices] + ["null"] * nullable
    return {"type": kinds if len(kinds) > 1 else kinds[0]}
