"""The options of the loss: one frozen dataclass, checked when it is made, also from a dict (JSON, YAML)."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, TypedDict, get_args

import torch

Reduction = Literal["mean", "sum", "none"]
Backward = Literal["auto", "forward", "recompute"]
Backend = Literal["auto", "triton", "torch"]
CheckRanks = Literal["auto", "first", "always", "never"]
HiddenLayout = Literal["replicated", "sharded"]

CHOICES = {
    "reduction": get_args(Reduction),
    "backward": get_args(Backward),
    "backend": get_args(Backend),
    "check_ranks": get_args(CheckRanks),
}
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
LARGEST = torch.finfo(torch.float32).max
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class LossOptions:
    """What the loss computes and how; the defaults are plain mean cross entropy.

    Numbers may be numpy's, and become Python's here; as arguments of a call in a compiled graph they must be Python's,
    for there numpy's are arrays.

    Args:
        reduction: "mean" over the valid tokens, "sum", or "none" (one loss a token).
        ignore_index: target id whose tokens have loss 0 and gradient 0.
        label_smoothing: share, in [0, 1], of the target spread evenly over the global vocabulary.
        z_loss: coefficient of the squared log-sum-exp that is added to each token's loss.
        token_scaling: multiply each token's loss by its own detached target probability.
        softcap: `softcap * tanh(logits / softcap)` instead of the logits.
        logit_scale: factor on the logits (bias included), before softcap.
        accum_dtype: dtype in which the weight gradient is accumulated over chunks; None: the weight's, but float32 for
            float16 weights and for bfloat16 ones over more than 2 chunks (`plan.accumulation_dtype`).
        logits_dtype: dtype in which logits are stored; None: the hidden states'. The only other choice is float32.
        hidden_grad_reduce_dtype: dtype in which the hidden gradient is summed over ranks; None: float32, and float64
            for float64.
        logits_budget: bytes of one chunk of logits on the largest shard, an int or a string like "512MiB"; None: 512
            MiB, more where a large vocabulary needs it for 2048 rows (`plan.default_budget`), and 2 chunks where they
            take no more memory than a float32 sum of a bfloat16 weight gradient (`plan.chunk_rows`).
        chunk_rows: rows of a chunk; wins over the budget.
        skip_ignored: drop ignored tokens before the first GEMM. Costs one host synchronisation to count them.
        backward: "forward" makes gradients in forward, where the logits are alive (3 GEMMs; "mean" and "sum");
            "recompute" keeps only row statistics and makes the logits again in backward (4 GEMMs); "auto" is
            "forward" unless `reduction="none"`, or token scaling meets float16.
        backend: row kernels, "triton" or "torch"; "auto" is "triton" on GPUs and "torch" on CPU.
        check_ranks: when the ranks of a group compare their arguments: on the group's "first" call for a vocabulary
            size, "always" or "never"; "auto" is "always" on CPU and "first" on GPUs. The same on all ranks: one that
            compares waits, until the group's timeout, for one that does not.

    Raises:
        TypeError, ValueError: an option has a wrong type or value; the message names it.
    """

    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    token_scaling: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0
    accum_dtype: torch.dtype | None = None
    logits_dtype: torch.dtype | None = None
    hidden_grad_reduce_dtype: torch.dtype | None = None
    logits_budget: int | str | None = None
    chunk_rows: int | None = None
    skip_ignored: bool = False
    backward: Backward = "auto"
    backend: Backend = "auto"
    check_ranks: CheckRanks = "auto"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("label_smoothing", "z_loss", "logit_scale", "softcap"):
            self._convert(name, to_float)
        for name in ("ignore_index", "chunk_rows"):
            self._convert(name, to_int)
        if not isinstance(self.logits_budget, str):
            self._convert("logits_budget", parse_bytes)
        for name in ("token_scaling", "skip_ignored"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("accum_dtype", "logits_dtype", "hidden_grad_reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES.values():
                raise TypeError(f"{name} must be a floating torch.dtype or None, got {value!r}")
        if not -(2**63) <= self.ignore_index < 2**63:
            raise ValueError(f"ignore_index must fit into 64 bits, got {self.ignore_index}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1], got {self.label_smoothing}")
        if self.z_loss < 0.0:
            raise ValueError(f"z_loss must not be negative, got {self.z_loss}")
        # The row kernels divide by it in float32, where a smaller number is 0 or has few digits.
        if self.softcap is not None and self.softcap < torch.finfo(torch.float32).tiny:
            raise ValueError(
                f"softcap must be positive, a normal number of float32 (None switches it off), got {self.softcap}"
            )
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, got {self.chunk_rows}")
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise ValueError(f"logits_budget must be at least one byte, got {self.logits_budget!r}")
        if self.backward == "forward" and self.reduction == "none":
            raise ValueError(
                'backward="forward" needs reduction "mean" or "sum": with "none" the upstream gradient of each token '
                "is not known in forward"
            )

    def _convert(self, name: str, convert: Callable[[str, Any], object]) -> None:
        value = getattr(self, name)
        if value is not None or getattr(LossOptions, name) is not None:  # None is a value where it is the default
            object.__setattr__(self, name, convert(name, value))

    @cached_property
    def budget_bytes(self) -> int | None:
        return None if self.logits_budget is None else parse_bytes("logits_budget", self.logits_budget)

    def changed(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value != getattr(LossOptions, name)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "loss") -> LossOptions:
        """Options from a mapping such as a section of a JSON or YAML file; dtypes may be strings ("float32", "bf16").

        Raises:
            TypeError, ValueError: unknown key, wrong type or value; the message starts with `where.key`.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        parsed: dict[str, Any] = {}
        for key, value in values.items():
            if key not in names:
                raise ValueError(f"{where}.{key}: unknown key; {suggestion(key, names, 'known keys')}")
            if key.endswith("_dtype") and isinstance(value, str):
                if value not in DTYPES:
                    raise ValueError(f"{where}.{key}: expected one of {', '.join(DTYPES)}, got {value!r}")
                value = DTYPES[value]
            parsed[key] = value
        try:
            return cls(**parsed)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}.{error}") from None


class LossOptionsDict(TypedDict, total=False):
    """The fields of `LossOptions` as keywords, for type checkers; a test keeps the two equal."""

    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    z_loss: float
    token_scaling: bool
    softcap: float | None
    logit_scale: float
    accum_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    hidden_grad_reduce_dtype: torch.dtype | None
    logits_budget: int | str | None
    chunk_rows: int | None
    skip_ignored: bool
    backward: Backward
    backend: Backend
    check_ranks: CheckRanks


def recomputes(options: LossOptions, dtype: torch.dtype) -> bool:
    """Whether backward makes the logits again. In fp16 with token scaling it must: a coefficient times a target's
    probability has no bound below, and only backward knows the loss scale that lifts it."""
    if options.backward == "auto" and options.token_scaling and dtype == torch.float16:
        return True
    return options.backward == "recompute" or options.reduction == "none"


_known_options = lru_cache(maxsize=256, typed=True)(LossOptions)


def options_of(values: Mapping[str, Any]) -> LossOptions:
    """`LossOptions(**values)`, checked once for equal values: each call of the loss asks anew.

    Raises:
        TypeError, ValueError: as `LossOptions`.
    """
    try:
        return _known_options(**values)
    except TypeError:  # no option, or a value of a wrong type, which may not be a key of the cache
        for name in values:
            if name not in LossOptionsDict.__annotations__:
                known = suggestion(name, LossOptionsDict.__annotations__)
                raise TypeError(f"unknown option {name!r}; {known}") from None
        return LossOptions(**values)


def suggestion(name: object, known: Iterable[str], listed: str = "known") -> str:
    """What to say of a name that is none of the known ones, which are else `listed`."""
    close = difflib.get_close_matches(str(name), known := list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"{listed}: {', '.join(known)}"


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes from an int or a string like "512MiB".

    Raises:
        TypeError, ValueError: naming `name`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | str):
        raise TypeError(f'{name} must be a number of bytes or a string like "512MiB", got {value!r}')
    if not isinstance(value, str):
        return int(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in UNITS:
        raise ValueError(f'{name} must look like "512MiB" (units: {", ".join(u for u in UNITS if u)}), got {value!r}')
    number = float(match[1]) * UNITS[match[2]]
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number of bytes, got {value!r}")
    return int(number)


def to_float(name: str, value: object) -> float:
    """A number, numpy's too, as Python's.

    Raises:
        TypeError, ValueError: naming `name`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not is_finite(value if isinstance(value, int) else float(value)):  # a large int is no float
        raise ValueError(f"{name} must be finite in float32, got {value!r}")
    return float(value)


def to_int(name: str, value: object) -> int:
    """An integer, numpy's too, as Python's.

    Raises:
        TypeError: naming `name`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return int(value)


def is_finite(value: int | float) -> bool:
    """Whether float32 can hold a number, in which losses are formed: 1e300 would be infinite there."""
    return abs(value) <= LARGEST
