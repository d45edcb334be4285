"""`initialize` and `attach`: an engine whose head computes the loss that its configuration describes."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...api import count_valid_tokens
from ...attach import attach_loss, has_loss
from ...head import VocabParallelHead
from ...options import LossOptions
from .checkpoints import export_whole_head, load_own_rows, load_without_optimizer_states
from .heads import find_head, layout_of, mark_tensor_parallel, shard_head_by_section
from .section import Section, SectionWarning, integer, load_config, read_section, section_or_warning

if TYPE_CHECKING:
    from ..transformers import FusedLoss

_SECTION = "_flce_section"


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, with its arguments and results, and then `attach(engine)`. The section is checked first.

    Without a section this is `deepspeed.initialize` and a warning.

    Raises:
        TypeError, ValueError: the section is wrong, or does not fit the model; the message starts with the key's path.
            On all ranks alike.
    """
    import deepspeed

    call = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    config = _config_of(call)
    section = None if config is None else read_section(config)
    model = call.get("model")  # without one DeepSpeed says so
    if config is not None and section is not None and model is not None:
        if isinstance(model, deepspeed.DeepSpeedEngine):
            raise TypeError(f"model: expected the module itself, got the {type(model).__name__} around it")
        head = find_head(model, section)
        _check_no_loss(model, head, section)
        _check_sequence_parallel(config, call.get("mpu"))
        if section.vocab_parallel == "tensor" and call.get("mpu") is not None:
            mark_tensor_parallel(head)  # before, because the optimizers in 16 bits copy the mark
        if section.vocab_parallel == "data":
            _check_data_parallel(section, head, call)
            deepspeed.init_distributed(
                dist_backend=deepspeed.get_accelerator().communication_backend_name(),
                dist_init_required=call.get("dist_init_required"),
                **({"distributed_port": call["distributed_port"]} if "distributed_port" in call else {}),
            )
            shard_head_by_section(model, config)
    results = deepspeed.initialize(*args, **kwargs)
    attach(results[0])
    return results


def attach(engine: Any) -> nn.Module | None:
    """Gives the head of the engine's model the loss that its configuration describes, and returns the head: call
    `head(hidden, target)` for the loss. For a transformers model, `engine(input_ids, labels=...)` uses it by itself.

    Call it on all ranks, after the engine was made, since DeepSpeed replaces heads while it makes one. Without a
    section there is a warning, and None comes back.

    Raises:
        TypeError, ValueError: as `initialize`.

    Warns:
        SectionWarning: there is no section; and in the engine's first step, when nothing has called the head with a
            target, or the model of transformers with labels: another loss is computed.
    """
    section = section_or_warning(engine.config)
    if section is None:
        return None
    model = engine.module
    if hasattr(engine, _SECTION):
        raise ValueError(
            f"{section.where}: this engine has its loss already. initialize attaches it; attach is for engines that "
            "deepspeed.initialize made, and is called once"
        )
    head = find_head(model, section)
    _check_no_loss(model, head, section)
    _check_sequence_parallel(engine.config, engine.mpu)
    layout = layout_of(head, section, engine)
    arguments = {
        "vocab_shard": layout.vocab_shard,
        "hidden_layout": layout.hidden_layout,
        "hidden_grad_scale": 1.0,  # shard_head_by_section scales the gradients of hidden states and weight alike
        **section.options,
    }
    if section.head is None and _is_causal_lm(model):
        handle = _apply_to_causal_lm(model, section, layout.group, arguments)
        remedy = f"nothing called the {type(model).__name__} with labels: pass them, and use its loss"
        _warn_in_first_step(engine, section, lambda: handle.output is not None, remedy)
    else:
        attach_loss(head, layout.group, **arguments)
        remedy = (
            "nothing called the head with targets: call it as head(hidden, target), such as "
            f"self.lm_head(hidden, labels) in the {type(model).__name__}'s forward"
        )
        _warn_in_first_step(engine, section, _calls_with_target(head), remedy)
    _leave_gradients_undivided(engine)
    if section.vocab_parallel == "data":
        export_whole_head(engine)
        load_own_rows(engine, head)
        load_without_optimizer_states(engine)
    setattr(engine, _SECTION, section)
    return head


def step_normalizer(engine: Any, target: Tensor) -> Tensor:
    """The `normalizer` of the head, and `num_items_in_batch` of a transformers model, with which a step has the
    gradient of the mean over all valid tokens: those of data- and sequence-parallel ranks, and of all micro-steps.
    Accumulate with `engine.backward(loss, scale_wrt_gas=False)`.

    DeepSpeed averages gradients over data-parallel ranks. Over those that share a sequence it sums them, but ZeRO-3
    averages them as well (0.19.8).

    Args:
        target: this rank's targets of all micro-steps of the step, of any shape; `labels[..., 1:]` for a transformers
            model that shifts them itself.

    Returns:
        0-d float32, the same on all ranks; one all-reduce of a number over them.

    Raises:
        ValueError: the engine has no loss of this package, or sequence-parallel ranks without `reduce_scatter` in
            ZeRO-3, where 0.19.8 sums the gradients of small parameters and averages those of large ones.
    """
    section: Section | None = getattr(engine, _SECTION, None)
    if section is None:
        raise ValueError("this engine has no loss of a section: make it by initialize, or attach(engine) first")
    ignore_index = section.options.get("ignore_index", LossOptions.ignore_index)
    count = count_valid_tokens(target, ignore_index, engine.seq_data_parallel_group)
    one_loss = section.vocab_parallel == "data" and section.options.get("reduction") != "none"
    if one_loss and not (section.head is None and _is_causal_lm(engine.module)):
        return count.float()  # such a head's loss is that of all ranks; a model divides it by their number again
    averaged = engine.seq_dp_world_size / engine.sequence_parallel_size
    if engine.zero_optimization_stage() == 3 and engine.sequence_parallel_size > 1:
        if not engine.zero_reduce_scatter():
            raise ValueError(
                "zero_optimization.reduce_scatter: with sequence parallelism in stage 3 it must be true: without it "
                "DeepSpeed sums the gradients of small parameters over a sequence's ranks and averages those of large "
                "ones"
            )
        averaged = engine.seq_dp_world_size
    return count / averaged


def _leave_gradients_undivided(engine: Any) -> None:
    """Lets `backward(loss, scale_wrt_gas=False)` divide nothing when `loss` is what the engine returned.

    A hook on the engine's outputs divides their gradients by the accumulation steps, unless another, which `backward`
    puts on its loss, has run before. DeepSpeed 0.19.8 puts both on one tensor where it scales no loss (ZeRO stage 0,
    and 16 bits with float32 accumulation): the dividing one runs first. A view of the loss has the other's to itself.
    """
    backward = engine.backward

    @functools.wraps(backward)
    def backward_of_a_view(loss: Any, *args: Any, **keywords: Any) -> Any:
        return backward(loss.view_as(loss) if isinstance(loss, Tensor) else loss, *args, **keywords)

    engine.backward = backward_of_a_view


def _warn_in_first_step(engine: Any, section: Section, computed: Callable[[], bool], remedy: str) -> None:
    """Warns in the first step unless the loss was `computed` until then: the model computes one of its own."""
    step = engine.step

    def first_step(*args: Any, **keywords: Any) -> Any:
        del engine.step  # of the instance: the next is the engine's own
        if not computed():
            warnings.warn(
                f"{section.where}: no loss of this section was computed before the first step, because {remedy}, in "
                "place of a loss from its logits",
                SectionWarning,
                stacklevel=2,
            )
        return step(*args, **keywords)

    engine.step = first_step


def _calls_with_target(head: nn.Module) -> Callable[[], bool]:
    """Whether the head was called with a target since; to be asked once."""
    calls = 0

    def count(_module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], _output: Any) -> None:
        nonlocal calls
        calls += len(args) > 1 or keywords.get("target") is not None

    hook = head.register_forward_hook(count, with_kwargs=True)

    def asked() -> bool:
        hook.remove()
        return calls > 0

    return asked


def _check_no_loss(model: nn.Module, head: nn.Module, section: Section) -> None:
    if isinstance(head, VocabParallelHead):
        raise TypeError(
            f"{section.where}: the head is a {type(head).__name__}, which computes a loss of its own options and not "
            "that of the section: give the model an nn.Linear, or take the section out"
        )
    if has_loss(head):
        raise ValueError(
            f"{section.where}: the {type(model).__name__} has a loss already, from apply, attach_loss or an earlier "
            "engine. Leave apply and attach_loss to the section, and make a new model for a new engine, or call "
            "remove() on what apply returned, detach_loss(head) otherwise"
        )


def _check_sequence_parallel(config: Mapping[str, Any], mpu: Any) -> None:
    ranks = integer("sequence_parallel_size", config.get("sequence_parallel_size"))
    if ranks > 1 and mpu is None:
        raise ValueError(
            f"sequence_parallel_size: {ranks} without an mpu: DeepSpeed 0.19.8 then reduces no gradients over a "
            "sequence's ranks in stages 0 to 2. Leave the sizes out and pass mpu, as "
            "UlyssesSPAttentionHF.register_with_transformers returns it"
        )


def _is_causal_lm(model: Any) -> bool:
    """Whether it is a model of transformers, perhaps in PEFT's wrapper."""
    transformers = sys.modules.get("transformers")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return transformers is not None and isinstance(base, transformers.PreTrainedModel)


def _apply_to_causal_lm(
    model: Any, section: Section, group: dist.ProcessGroup | None, arguments: Mapping[str, Any]
) -> FusedLoss:
    from ..transformers import apply

    if section.options.get("reduction", "mean") != "mean":
        raise ValueError(
            f'{section.where}.reduction: a {type(model).__name__} returns one loss, the "mean"; got '
            f"{section.options['reduction']!r}"
        )
    if hasattr(model, "_deepspeed_original_loss_function"):  # AutoTP has put its loss on sharded logits in its place
        model.loss_function = model._deepspeed_original_loss_function
    return apply(model, group, **arguments)


def _config_of(call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration, from whichever argument it comes; None: DeepSpeed says what it expects."""
    given = call.get("config") or call.get("config_params") or getattr(call.get("args"), "deepspeed_config", None)
    return None if given is None else load_config(given)


def _check_data_parallel(section: Section, head: nn.Module, call: Mapping[str, Any]) -> None:
    where = f"{section.where}.vocab_parallel"
    if call.get("mpu") is not None:
        raise ValueError(f'{where}: "data" shards the head over all ranks, and mpu splits them otherwise; use "tensor"')
    holds = "optimizer" if isinstance(call.get("optimizer"), Optimizer) else "model_parameters"
    if hasattr(head.weight, "ds_id") and call.get(holds) is not None:
        raise ValueError(
            f'{where}: "data" replaces the head\'s parameter of a model built under zero.Init, and {holds} holds the '
            "old one: call shard_head_by_section before making it, or leave it out and describe the optimizer in the "
            "configuration"
        )
