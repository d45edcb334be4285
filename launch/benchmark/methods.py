"""The ways to compute the loss that can be measured, by name. Each imports what it needs when it is built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flce_dist
from flce_dist.collectives import SumGradient
from flce_dist.options import LossOptions

from .workload import IGNORE_INDEX, Problem, make_class_weight


class Unavailable(Exception):
    """A method is not installed, or does not do what is asked; the message says which."""


@dataclass
class Program:
    """A method made ready for a problem.

    Args:
        loss: the differentiable mean loss over the valid tokens of all ranks.
        hidden, weight: leaves whose gradients a backward makes.
        tokens: which tokens of the problem `hidden` holds.
        around: what forward and backward run in.
    """

    loss: Callable[[], Tensor]
    hidden: Tensor
    weight: Tensor
    tokens: slice = field(default_factory=lambda: slice(None))
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def run(self, forward_only: bool) -> Tensor:
        """Forward and backward as a training step does them; gradients are left in `.grad`."""
        self.hidden.grad = self.weight.grad = None
        with self.around():
            if forward_only:
                with torch.no_grad():
                    return self.loss()
            loss = self.loss()
            loss.backward()
            return loss.detach()


@dataclass(frozen=True)
class Method:
    """
    Args:
        build: makes it ready, given the options; raises `Unavailable` when it is not installed.
        sharded: works on a vocabulary that is sharded over ranks.
        single: works on one rank.
        on_one_rank: name of the method that does there what this one does on several, if it is not `single`.
        chunked: takes the benchmark's chunk rows and budgets, and can be captured: this package.
        options: of how it computes.
        loss: of what it computes, where that is not plain cross entropy; `accuracy.reference` takes them too.
    """

    name: str
    build: Callable[..., Program]
    sharded: bool = False
    single: bool = True
    on_one_rank: str = ""
    chunked: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)

    def cutting_options(self, dtype: torch.dtype, chunking: Mapping[str, Any]) -> LossOptions:
        """Those that decide how the tokens are cut, for inputs of a dtype."""
        chosen: dict[str, Any] = {name: self.options.get(name) for name in ("accum_dtype", "logits_dtype")}
        chosen = {name: dtype if value == INPUT_DTYPE else value for name, value in chosen.items()}
        return LossOptions(**chosen, **chunking)


def build(method: Method, problem: Problem, chunking: dict[str, Any], skip_ignored: bool) -> Program:
    """
    Raises:
        Unavailable: with the reason.
    """
    if problem.num_ranks > 1 and not method.sharded:
        raise Unavailable("works on one rank only")
    if problem.num_ranks == 1 and not method.single:
        raise Unavailable("works on several ranks only (start with torchrun)")
    try:
        if method.chunked:
            return method.build(problem, **method.options, **method.loss, **chunking, skip_ignored=skip_ignored)
        return method.build(problem, **method.options)
    except ImportError as error:
        raise Unavailable(f"not installed: {error}") from error


INPUT_DTYPE = "that of the inputs"


def _flce(problem: Problem, sharded_tokens: bool = False, class_weight: bool = False, **options: Any) -> Program:
    hidden, target, tokens = problem.hidden, problem.target, slice(None)
    options = {name: hidden.dtype if value == INPUT_DTYPE else value for name, value in options.items()}
    keywords: dict[str, Any] = {}
    if problem.group is not None:
        keywords = {"group": problem.group, "vocab_size": problem.shape.vocab_size}
    if options.get("aux") and options.get("skip_ignored"):
        raise Unavailable("values of ignored tokens are not computed with --skip-ignored")
    if class_weight:
        keywords["class_weight"] = make_class_weight(problem.shape.vocab_size, problem.device)
    if sharded_tokens:
        rank, per_rank = dist.get_rank(problem.group), -(-problem.shape.num_tokens // problem.num_ranks)
        tokens = slice(rank * per_rank, min((rank + 1) * per_rank, problem.shape.num_tokens))
        hidden, target = hidden.detach()[tokens].clone().requires_grad_(), target[tokens]
        keywords.update(hidden_layout="sharded", max_tokens=per_rank)

    def loss() -> Tensor:
        output = flce_dist.linear_cross_entropy(hidden, problem.weight, target, **keywords, **options)
        losses = output.loss if isinstance(output, flce_dist.LossOutput) else output
        return _mean_over_valid(losses, target) if losses.dim() else losses

    return Program(loss, hidden, problem.weight, tokens)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _eager_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(_at_least_float32(F.linear(hidden, weight)), target, ignore_index=IGNORE_INDEX)


def _eager(problem: Problem) -> Program:
    return Program(partial(_eager_loss, problem.hidden, problem.weight, problem.target), problem.hidden, problem.weight)


def _compile(problem: Problem) -> Program:
    torch._dynamo.reset()
    compiled = torch.compile(_eager_loss, dynamic=False)
    return Program(partial(compiled, problem.hidden, problem.weight, problem.target), problem.hidden, problem.weight)


def _torch(problem: Problem) -> Program:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    # Without options it makes all logits; with the default ones it works in chunks.
    options = torch.nn.LinearCrossEntropyOptions() if hasattr(torch.nn, "LinearCrossEntropyOptions") else None
    loss = partial(
        F.linear_cross_entropy, problem.hidden, problem.weight, problem.target, ignore_index=IGNORE_INDEX,
        options=options,
    )  # fmt: skip
    return Program(loss, problem.hidden, problem.weight)


def _liger(problem: Problem, **options: Any) -> Program:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def loss() -> Tensor:
        result = liger_fused_linear_cross_entropy(
            problem.hidden, problem.weight, problem.target, ignore_index=IGNORE_INDEX, **options
        )
        return result[0] if isinstance(result, tuple) else result

    return Program(loss, problem.hidden, problem.weight)


def _cce(problem: Problem, **options: Any) -> Program:
    from cut_cross_entropy import linear_cross_entropy

    keywords: dict[str, Any] = {"ignore_index": IGNORE_INDEX, **options}
    if problem.group is not None:
        try:
            from cut_cross_entropy.vocab_parallel import VocabParallelOptions
        except ImportError as error:
            raise Unavailable("this version of cut_cross_entropy has no vocabulary-parallel loss") from error
        keywords["vocab_parallel_options"] = VocabParallelOptions(
            problem.shard.start, problem.shard.stop, problem.group
        )
    loss = partial(linear_cross_entropy, problem.hidden, problem.weight, problem.target, **keywords)
    return Program(loss, problem.hidden, problem.weight)


def _fla(problem: Problem, **options: Any) -> Program:
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    if problem.group is not None and problem.shape.vocab_size % problem.num_ranks:
        raise Unavailable("needs equal shards of the vocabulary")
    loss = partial(
        fused_linear_cross_entropy_loss, problem.hidden, problem.target, problem.weight, ignore_index=IGNORE_INDEX,
        process_group=problem.group, **options,
    )  # fmt: skip
    return Program(loss, problem.hidden, problem.weight)


def _mean_over_valid(losses: Tensor, target: Tensor) -> Tensor:
    valid = target != IGNORE_INDEX
    return torch.where(valid, losses, 0.0).sum() / valid.sum()


def _megatron(problem: Problem) -> Program:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    if problem.shape.vocab_size % problem.num_ranks:
        raise Unavailable("needs equal shards of the vocabulary")

    def loss() -> Tensor:
        hidden = SumGradient.apply(problem.hidden, problem.group)
        logits = F.linear(hidden, problem.weight)[:, None]
        losses = fused_vocab_parallel_cross_entropy(logits, problem.target[:, None], problem.group)
        return _mean_over_valid(losses[:, 0], problem.target)

    return Program(loss, problem.hidden, problem.weight)


def _verl(problem: Problem) -> Program:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def loss() -> Tensor:
        hidden = problem.hidden if problem.group is None else SumGradient.apply(problem.hidden, problem.group)
        log_probs, _ = linear_cross_entropy(hidden, problem.weight, problem.target, 1.0, "none", problem.group)
        return _mean_over_valid(-log_probs, problem.target)

    return Program(loss, problem.hidden, problem.weight)


def _loss_parallel(problem: Problem) -> Program:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    if problem.shape.vocab_size % problem.num_ranks:
        raise Unavailable("needs equal shards of the vocabulary")
    assert problem.group is not None
    mesh = DeviceMesh.from_group(problem.group, problem.device.type)

    def loss() -> Tensor:
        hidden = DTensor.from_local(problem.hidden, mesh, [Replicate()], run_check=False)
        weight = DTensor.from_local(problem.weight, mesh, [Shard(0)], run_check=False)
        logits = _at_least_float32(F.linear(hidden, weight))
        result = F.cross_entropy(logits, problem.target, ignore_index=IGNORE_INDEX)
        return result.to_local() if isinstance(result, DTensor) else result

    return Program(loss, problem.hidden, problem.weight, around=loss_parallel)


FP32 = torch.float32


def _flce_method(name: str, on_one_rank: str = "", loss: Mapping[str, Any] | None = None, **options: Any) -> Method:
    single = not on_one_rank
    return Method(name, _flce, True, single, on_one_rank, chunked=True, options=options, loss=loss or {})


METHODS = {
    method.name: method
    for method in (
        _flce_method("flce"),
        _flce_method("flce-narrow", accum_dtype=INPUT_DTYPE, hidden_grad_reduce_dtype=INPUT_DTYPE),
        _flce_method("flce-fp32-accum", accum_dtype=FP32),
        _flce_method("flce-fp32-logits", logits_dtype=FP32),
        _flce_method("flce-narrow-reduce", on_one_rank="flce", hidden_grad_reduce_dtype=INPUT_DTYPE),
        _flce_method(
            "flce-fp32-logits-narrow-reduce",
            on_one_rank="flce-fp32-logits",
            logits_dtype=FP32,
            hidden_grad_reduce_dtype=INPUT_DTYPE,
        ),
        _flce_method("flce-recompute", backward="recompute"),
        _flce_method("flce-torch-rows", backend="torch"),
        _flce_method("flce-sharded-tokens", on_one_rank="flce", sharded_tokens=True),
        _flce_method("flce-none", reduction="none"),
        _flce_method("flce-entropy", aux=("entropy",)),
        _flce_method("flce-predictions", aux=("predictions",)),
        _flce_method("flce-softcap", loss={"softcap": 30.0}),
        _flce_method("flce-smoothing", loss={"label_smoothing": 0.1}),
        _flce_method("flce-z-loss", loss={"z_loss": 1e-4}),
        _flce_method("flce-token-scaling", loss={"token_scaling": True}),
        _flce_method("flce-class-weight", loss={"class_weight": True}),
        _flce_method("flce-smoothing-class-weight", loss={"label_smoothing": 0.1, "class_weight": True}),
        Method("eager", _eager),
        Method("compile", _compile),
        Method("torch", _torch),
        Method("liger", _liger),
        Method("liger-chunk16", _liger, options={"chunk_mem_const": 16}),
        Method("cce", _cce, sharded=True),
        Method("cce-exact", _cce, sharded=True, options={"filter_eps": None}),
        Method("fla", _fla, sharded=True),
        Method("fla-bf16-accum", _fla, sharded=True, options={"accumulate_grad_in_fp32": False}),
        Method("megatron", _megatron, sharded=True, single=False),
        Method("verl", _verl, sharded=True),
        Method("loss_parallel", _loss_parallel, sharded=True, single=False),
    )
}


def parse_methods(text: str) -> list[Method]:
    """Methods from names separated by commas; "all" is every one.

    Raises:
        ValueError: an unknown name, or none at all; the message lists the names.
    """
    names = list(METHODS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METHODS]
    if not names:
        raise ValueError(f"methods must be names separated by commas, got {text!r}; known: {', '.join(METHODS)}")
    if unknown:
        raise ValueError(f"unknown methods {', '.join(unknown)}; known: {', '.join(METHODS)}")
    return [METHODS[name] for name in names]
