"""From a YAML file and `key=value` overrides to a `Config`; every refusal names the dotted key."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from flce_dist.options import LossOptions, suggestion

from .schema import Config, ConfigError


class _Loader(yaml.SafeLoader):
    """YAML with the floats of YAML 1.2 (`3e-4` is a number, not a string) and no duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$|[-+]?[0-9][0-9_]*\.[0-9_]*$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a list or mapping as a key
        raise ConfigError(where, f"not valid YAML: {error}") from error


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `a.b=value` overrides (values are YAML) and check every key.

    Raises:
        ConfigError: an unreadable file, or a key that is unknown, of the wrong type or out of bounds.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"cannot read {path}: {error}") from error
    raw = parse_yaml(text, path)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError("--config", f"{path} must hold a mapping, got {type(raw).__name__}")
    for override in overrides:
        apply_override(raw, override)
    return from_mapping(raw)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one dotted key of the raw mapping, making the sections on its way."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(override, "an override is written key=value, such as train.steps=200")
    *sections, last = key.split(".")
    node = raw
    for depth, name in enumerate(sections):
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            dotted = ".".join(sections[: depth + 1])
            raise ConfigError(key, f"{dotted} is set to {node!r}, which has no keys of its own")
    node[last] = parse_yaml(text, key)


def from_mapping(raw: Mapping[str, Any]) -> Config:
    """Build and check the configuration. Raises ConfigError."""
    if "loss" in raw and raw["loss"] != "torch" and not isinstance(raw["loss"], Mapping):
        raise ConfigError("loss", f"expects torch or a mapping {{type: flce, ...}}, got {raw['loss']!r}")
    config = _section(Config, raw, "")
    if isinstance(config.loss, Mapping):
        loss_options(config.loss)
    return config


def loss_options(loss: Mapping[str, Any]) -> LossOptions:
    """The options of a `loss: {type: flce, ...}` section. Raises ConfigError."""
    fields = dict(loss)
    kind = fields.pop("type", None)
    if kind != "flce":
        raise ConfigError("loss.type", f"expects flce (or `loss: torch` for full logits), got {kind!r}")
    try:
        options = LossOptions.from_dict(fields, where="loss")
    except (TypeError, ValueError) as error:
        key, problem = re.fullmatch(r"(loss[.\w]*):?\s*(.*)", str(error), re.DOTALL).groups()  # type: ignore[union-attr]
        raise ConfigError(key, problem) from error
    if options.reduction != "mean":
        raise ConfigError("loss.reduction", f"the trainer divides by the valid tokens: mean, not {options.reduction!r}")
    return options


def ignore_index(config: Config) -> int:
    """The target id that does not count."""
    return loss_options(config.loss).ignore_index if isinstance(config.loss, Mapping) else LossOptions.ignore_index


def to_mapping(config: Config) -> dict[str, Any]:
    """Plain dicts, lists and scalars: what `from_mapping` reads back."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _section(cls: Any, raw: Any, where: str) -> Any:
    if not isinstance(raw, Mapping):
        raise ConfigError(where, f"expects a mapping of {_names(cls)}, got {raw!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in raw:
        if key not in fields:
            raise ConfigError(_join(where, key), f"unknown key; {suggestion(key, fields, 'known here')}")
    values = {}
    for name, field in fields.items():
        key = _join(where, name)
        if name in raw:
            values[name] = _convert(raw[name], hints[name], key)
            _check_bounds(values[name], field.metadata, key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(key, "is required")
    section = cls(**values)
    if hasattr(section, "check"):
        section.check(where)
    return section


def _convert(value: Any, hint: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        # The only unions are `X | None` and the loss: a literal or a mapping.
        choices = [choice for choice in arguments if choice is not type(None)]
        if len(choices) > 1:
            choices = [choice for choice in choices if isinstance(value, Mapping) == (_is_mapping(choice))]
        return _convert(value, choices[0], key)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise ConfigError(key, f"expects {' or '.join(map(str, arguments))}, got {value!r}")
        return value
    if _is_mapping(hint):
        return dict(value)
    if origin is tuple:
        return _convert_list(value, arguments, key)
    if dataclasses.is_dataclass(hint):
        return _section(hint, value, key)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(key, "must be finite, got an integer beyond float64") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(key, f"expects {_type_name(hint)}, got {value!r} ({type(value).__name__})")
    if hint is float and not math.isfinite(value):
        raise ConfigError(key, f"must be finite, got {value}")
    return value


def _convert_list(value: Any, arguments: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    if arguments[0] is str and isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(key, f"expects a list, got {value!r} ({type(value).__name__})")
    length = None if arguments[-1] is Ellipsis else len(arguments)
    if length is not None and len(value) != length:
        raise ConfigError(key, f"expects {length} values, got {len(value)}")
    return tuple(_convert(item, arguments[0], f"{key}[{index}]") for index, item in enumerate(value))


def _check_bounds(value: Any, bounds: Mapping[str, Any], key: str) -> None:
    if value is None:
        return
    if bounds.get("least") is not None and value < bounds["least"]:
        raise ConfigError(key, f"must be at least {bounds['least']}, got {value}")
    if bounds.get("above") is not None and value <= bounds["above"]:
        raise ConfigError(key, f"must be greater than {bounds['above']}, got {value}")
    if bounds.get("most") is not None and value > bounds["most"]:
        raise ConfigError(key, f"must be at most {bounds['most']}, got {value}")


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


def _type_name(hint: Any) -> str:
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def _names(cls: Any) -> str:
    return ", ".join(field.name for field in dataclasses.fields(cls))


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)
