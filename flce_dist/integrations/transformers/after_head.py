"""What a model does with the logits after its head: read from its config, and checked against what it really does."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

from ...options import LossOptionsDict

_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
_DIVIDES = "logits_scaling"
_MULTIPLIES_BY_IT = ("hyperclovax",)
_SCALES_BEFORE_THE_HEAD = ("minicpm3",)
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class AfterHead:
    """`softcap * tanh(scale * logits / softcap)`, or `scale * logits`."""

    scale: float
    softcap: float | None

    def probe(self, sign: int) -> float:
        """A value at which another scale or softcap would show: where tanh bends, or large."""
        return sign * (1024.0 if self.softcap is None else self.softcap / (2 * self.scale))

    def __call__(self, value: float) -> float:
        scaled = self.scale * value
        return scaled if self.softcap is None else self.softcap * math.tanh(scaled / self.softcap)


def from_config(model: Any) -> LossOptionsDict:
    """The options `logit_scale` and `softcap` that the model's config says.

    A field of the config counts when the model's forward mentions it: image-text models around a text model that has
    one do not all apply it.
    """
    text = model.config.get_text_config(decoder=True)
    mentioned = inspect.unwrap(type(model).forward).__code__.co_names
    scale = 1.0
    for name in _FACTORS:
        value = getattr(text, name, None)
        if name not in mentioned or not isinstance(value, int | float) or text.model_type in _SCALES_BEFORE_THE_HEAD:
            continue
        divides = name == _DIVIDES and not text.model_type.startswith(_MULTIPLIES_BY_IT)
        scale = scale / value if divides else scale * value
    softcaps = [getattr(text, name, None) for name in _SOFTCAPS if name in mentioned]
    softcap = next((value for value in softcaps if value), None)
    return {"logit_scale": scale, "softcap": softcap}
