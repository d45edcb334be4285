"""What stands in a model's outputs in the place of logits that were not made."""

from __future__ import annotations

from typing import Any

from .stand_in import StandIn

_WAY_OUT = (
    "no logits were made, the loss was computed without them; ask for them with apply(model, eval_logits=True) in "
    "evaluation or model(..., logits_to_keep=n), or call the model without labels"
)


class _Named(type):
    """Libraries that refuse an object name its type."""

    def __repr__(cls) -> str:
        return f"{cls.__name__}: {_WAY_OUT}"


class NoLogits(metaclass=_Named):
    """Says that there are no logits when they are used."""

    def __repr__(self) -> str:
        return f"<{_WAY_OUT}>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"logits.{name}: {_WAY_OUT}")

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__("__getitem__")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NO_LOGITS.__getattr__(getattr(func, "__name__", str(func)))


NO_LOGITS = NoLogits()


def with_logits(outputs: Any, former: Any, logits: Any) -> Any:
    """The model's outputs with other logits: of a ModelOutput by name, of a tuple by the former ones, and in the
    outputs of an inner model that are handed on among them."""
    if not isinstance(outputs, tuple):
        outputs["logits"] = logits
    return _replaced(outputs, former, logits)


def _replaced(value: Any, former: Any, logits: Any) -> Any:
    if value is former or isinstance(value, StandIn):
        return logits
    if type(value) is tuple:
        return tuple(_replaced(each, former, logits) for each in value)
    if isinstance(value, dict):
        for name, each in value.items():
            value[name] = _replaced(each, former, logits)
    return value
