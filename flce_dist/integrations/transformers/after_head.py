"""What a model does with the logits after its head: read from its config, and checked against what it really does."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_MULTIPLIES_BY_LOGITS_SCALING = ("hyperclovax",)
_SCALES_BEFORE_THE_HEAD = ("minicpm3",)
"""`logits_scaling` divides the logits, in all model types but these."""


@dataclass(frozen=True)
class AfterHead:
    """`softcap * tanh(scale * logits / softcap)`, or `scale * logits`."""

    scale: float
    softcap: float | None

    @property
    def probe(self) -> float:
        """A value at which another scale or softcap would show: where tanh bends, or large."""
        return 1024.0 if self.softcap is None else self.softcap / (2 * self.scale)

    def __call__(self, value: float) -> float:
        scaled = self.scale * value
        return scaled if self.softcap is None else self.softcap * math.tanh(scaled / self.softcap)

    def on_logits(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def declare(config: Any, options: MutableMapping[str, Any]) -> AfterHead:
    """What `config` says, entered into the options `logit_scale` and `softcap` where these are not given."""
    text = config.get_text_config(decoder=True)
    scale = 1.0
    for name in _FACTORS:
        value = getattr(text, name, None)
        if isinstance(value, int | float):
            scale *= value
    divisor = getattr(text, "logits_scaling", None)
    if divisor is not None and text.model_type not in _SCALES_BEFORE_THE_HEAD:
        multiplies = text.model_type.startswith(_MULTIPLIES_BY_LOGITS_SCALING)
        scale = scale * divisor if multiplies else scale / divisor
    softcap = next((value for value in (getattr(text, name, None) for name in _SOFTCAPS) if value), None)
    options.setdefault("logit_scale", scale)
    options.setdefault("softcap", softcap)
    return AfterHead(options["logit_scale"], options["softcap"])
