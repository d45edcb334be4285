"""Every causal LM architecture of the installed transformers: the loss of `apply` beside the stock one.

    python -m tests.kit.architectures docs/architectures.md

builds each from a tiny random config, compares the loss and the gradients of all parameters, and writes the table.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from flce_dist.integrations.transformers import apply
from tests.kit.tiny_configs import further_inputs, inputs, tiny_config

TOLERANCE = 1e-5
LARGEST = 20_000_000
"""Parameters of a model that is still built."""


@dataclass(frozen=True)
class Row:
    """How an architecture fared: "equal", "refused", "wrong" or "not built"."""

    name: str
    result: str
    loss_error: float = 0.0
    grad_error: float = 0.0
    note: str = ""


def architectures() -> dict[str, list[type]]:
    """Model classes by the auto class that makes them, each once."""
    found: dict[str, list[type]] = {}
    seen: set[type] = set()
    for auto, mapping in (
        ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING),
        ("AutoModelForImageTextToText", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    ):
        found[auto] = []
        for entry in mapping.values():
            for model_class in entry if isinstance(entry, tuple) else (entry,):
                if model_class not in seen:
                    seen.add(model_class)
                    found[auto].append(model_class)
        found[auto].sort(key=lambda model_class: model_class.__name__)
    return found


def given(model: Any) -> dict[str, Tensor]:
    return {"input_ids": inputs(), "labels": inputs(), **further_inputs(type(model).__name__)}


def loss_and_grads(model: Any) -> tuple[float, dict[str, Tensor]]:
    """In training mode, as the Trainer calls it, with the same dropout each time."""
    torch.manual_seed(1)
    model.zero_grad()
    outputs = model(**given(model), use_cache=False, num_items_in_batch=torch.tensor(17))
    outputs.loss.backward()
    return outputs.loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def evaluation_loss(model: Any) -> float:
    """In evaluation mode, as `Trainer.evaluate` calls it."""
    outputs = model.eval()(**given(model), use_cache=False)
    model.train()
    return outputs.loss.item()


def build(model_class: Any) -> Any:
    """The model with random weights, in fp32.

    Raises:
        MemoryError: it is too large even so.
    """
    config = tiny_config(model_class.config_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise MemoryError(f"{size:,} parameters even in the tiny config")
    torch.manual_seed(0)
    return model_class(config).float().train()


def compare(model_class: Any) -> Row:
    name = model_class.__name__
    try:
        model = build(model_class)
    except Exception as error:
        return Row(name, "not built", note=first_line(error))
    stock_error = None
    try:
        loss, grads = loss_and_grads(model)
    except Exception as error:
        stock_error = error
    try:
        apply(model)
        if stock_error is not None:
            return Row(name, "not built", note=f"stock forward: {first_line(stock_error)}")
        fused_loss, fused_grads = loss_and_grads(model)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        ours = "flce_dist" in traceback.extract_tb(error.__traceback__)[-1].filename
        reason = f"{notes[0]} ({first_line(error)})" if notes else str(error)
        return Row(name, "refused" if ours or notes else "wrong", note=reason.removeprefix("flce_dist: "))
    evaluation_error, note = in_evaluation(model, model_class)
    loss_error = max(abs(fused_loss - loss) / abs(loss), evaluation_error)
    grad_error = largest_error(fused_grads, grads)
    equal = loss_error <= TOLERANCE and grad_error <= TOLERANCE
    return Row(name, "equal" if equal else "wrong", loss_error, grad_error, note)


def in_evaluation(model: Any, model_class: Any) -> tuple[float, str]:
    """The relative error of the loss beside a stock model's, and why there is none, if so."""
    try:
        expected = evaluation_loss(build(model_class))
    except Exception as error:
        return 0.0, f"in evaluation the stock model fails: {first_line(error)}"
    try:
        return abs(evaluation_loss(model) - expected) / abs(expected), ""
    except Exception as error:
        return 0.0, f"in evaluation refused: {first_line(error)}"


def largest_error(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient, by norm. Gradients that are zero but for rounding (of the
    bias of attention's keys, for one) have no digits to compare: a thousandth of the whole gradient's norm is added to
    what is divided by."""
    if grads.keys() != expected.keys():
        return float("inf")
    total = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in expected.values()]))
    return max(
        float((grads[name] - grad).norm() / (grad.norm() + 1e-3 * total))
        if torch.isfinite(grad).all()
        else float("inf")
        for name, grad in expected.items()
    )


def first_line(error: Exception) -> str:
    if isinstance(error.__cause__, ValueError):  # of a config's validation
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def table() -> Iterator[Row]:
    for classes in architectures().values():
        for model_class in classes:
            yield compare(model_class)


def page(rows: list[Row]) -> str:
    """docs/architectures.md."""
    count = {result: sum(row.result == result for row in rows) for result in ("equal", "refused", "wrong", "not built")}
    largest = max((max(row.loss_error, row.grad_error) for row in rows), default=0.0)
    lines = [
        "# Model architectures",
        "",
        "Made by `python -m tests.kit.architectures docs/architectures.md` with transformers "
        f"{transformers.__version__} and torch {torch.__version__}.",
        "",
        "Every class that `AutoModelForCausalLM` and `AutoModelForImageTextToText` make, built from a tiny random "
        "config in fp32, in training mode, called as the `Trainer` calls it (`num_items_in_batch`): the loss and the "
        "gradients of all parameters after [`apply`](transformers.md) beside the stock ones; then the loss in "
        "evaluation mode. Inputs are text alone, and an image where the forward asks for one. FastVlm, Gemma3n and "
        "PerceptionLM need the package timm, Inkling scipy.",
        "",
        f"- **equal** ({count['equal']}): loss and all gradients agree to {TOLERANCE:g}; the largest error is "
        f"{largest:.0e}. Gradients are compared parameter by parameter, by norm.",
        f"- **refused** ({count['refused']}): `apply`, or the first step, raises an error that says why.",
        f"- **wrong** ({count['wrong']})",
        f"- **not built** ({count['not built']}): the stock model fails, or needs a package that was not installed. "
        "Such a model is checked in its first step, as every model is.",
        "",
        "| model | | largest error, or reason |",
        "|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.name.lower()):
        error = f"{max(row.loss_error, row.grad_error):.0e}"
        compared = error if row.result in ("equal", "wrong") else ""
        note = "; ".join(filter(None, (compared, row.note.replace("|", "/"))))
        lines.append(f"| {row.name} | {row.result} | {note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    Path(sys.argv[1]).write_text(page(list(table())))
