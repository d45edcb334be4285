"""`apply_to_trainer`: the fused loss in a `Trainer`, whose settings are checked, and in TRL's `SFTTrainer`."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ...head import VocabParallelHead
from ...options import LossOptionsDict
from .fused import ATTRIBUTE, FusedLoss, base_model
from .install import apply
from .verify import UnsupportedForward

if TYPE_CHECKING:
    from transformers import Trainer


def apply_to_trainer(
    trainer: Trainer,
    *,
    aux: Sequence[str] = (),
    eval_logits: bool = False,
    **options: Unpack[LossOptionsDict],
) -> FusedLoss:
    """`apply` to the trainer's model, once nothing that the trainer was told needs logits. Call it before `train`.

    TRL's `SFTTrainer` computes a loss from the head's weight on its own; it gets this one instead, and its metrics.

    Args:
        trainer: with its model, wrapped by PEFT or not.
        aux, eval_logits, options: as in `apply`; an `SFTTrainer` makes the logits that its metrics need without being
            asked. There is no group: a Trainer gives each rank tokens of its own. For a
            head that they share see `integrations.never_gathered.shard_head`.

    Raises:
        TypeError: a group is given.
        ValueError: a setting needs logits, or gives the loss to someone else, or a DeepSpeed configuration has a
            section of this package, in either spelling; the message says what to do.
    """
    from ..deepspeed.section import read_section  # imports no DeepSpeed

    if "group" in options:
        raise TypeError("apply_to_trainer takes no group: a Trainer gives each rank tokens of its own")
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    section = None if plugin is None else read_section(plugin.deepspeed_config)
    if section is not None:
        # Not delegated: there is no handle before train() has made the engine.
        raise ValueError(
            f'the DeepSpeed configuration describes the loss in its section "{section.where}", which this would '
            "ignore: call attach_to_trainer(trainer) of flce_dist.integrations.deepspeed instead, or take the section "
            "out"
        )
    return apply_checked(trainer, aux, eval_logits, options)


def apply_checked(trainer: Trainer, aux: Sequence[str], eval_logits: bool, options: LossOptionsDict) -> FusedLoss:
    """`apply_to_trainer`, wherever the options come from."""
    sharded = any(isinstance(m, VocabParallelHead) and m.hidden_layout == "sharded" for m in trainer.model.modules())
    check_settings(trainer, eval_logits=eval_logits, shared_head=sharded)
    if has_own_loss(trainer):
        handle = _apply_to_sft(trainer, aux, options)
    else:
        handle = apply(trainer.model, aux=aux, eval_logits=eval_logits, **options)
    handle.on_remove += [count_exactly(trainer), _check_use(trainer, handle)]
    return handle


def has_own_loss(trainer: Trainer) -> bool:
    """Whether it is TRL's `SFTTrainer`, by its `SFTConfig`."""
    return hasattr(trainer.args, "loss_type") and hasattr(trainer.args, "assistant_only_loss")


def check_settings(trainer: Trainer, *, eval_logits: bool = False, shared_head: bool = False) -> None:
    """Raises ValueError for what `apply_to_trainer` refuses, whatever the options of the loss. A `shared_head` is one
    that data-parallel ranks share."""
    if trainer.model_init is not None:
        raise ValueError("model_init makes a new model in train(), without this loss: give the Trainer a model")
    args: Any = trainer.args
    metrics = trainer.compute_metrics is not None or trainer.preprocess_logits_for_metrics is not None
    if metrics and not eval_logits and not has_own_loss(trainer):
        raise ValueError(
            "compute_metrics and preprocess_logits_for_metrics need logits in evaluation: pass eval_logits=True to "
            'make them there, or read accuracy and the like from the handle\'s output (aux=("accuracy",))'
        )
    if args.label_smoothing_factor:
        raise ValueError(
            "label_smoothing_factor is computed by the Trainer from logits: set it to 0 and pass "
            f"label_smoothing={args.label_smoothing_factor} here"
        )
    if trainer.compute_loss_func is not None:
        raise ValueError("compute_loss_func is given logits to compute the loss from: leave one of the two out")
    if args.use_liger_kernel:
        raise ValueError("use_liger_kernel replaces the model's forward and loss: set it to False")
    if shared_head and args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False divides by each rank's own tokens, but a head that the ranks share "
            "gives one loss: leave it True"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"the Trainer would use nn.DataParallel over {args.n_gpu} GPUs, whose replicas share one forward: start "
            "one process a GPU with torchrun or accelerate launch"
        )


def count_exactly(trainer: Any) -> Callable[[], None]:
    """The Trainer divides its count of tokens and hands it to the model as a float, which FSDP2 would cast to 16 bits
    with the model's other inputs. An integer it leaves alone. Returns what undoes it."""
    count = trainer._get_num_items_in_batch

    def exact(*args: Any, **kwargs: Any) -> Any:
        number = count(*args, **kwargs)
        return number.round().to(torch.int64) if isinstance(number, torch.Tensor) else number

    trainer._get_num_items_in_batch = exact
    return lambda: delattr(trainer, "_get_num_items_in_batch")


def _check_use(trainer: Any, handle: FusedLoss) -> Callable[[], None]:
    """Raises when a training step made its loss without the model's, which only the step can tell: a trainer may have
    a `compute_loss` of its own that still asks the model for it. Returns what undoes it."""
    step = trainer.training_step

    @wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        before = handle.output
        result = step(*args, **kwargs)
        if handle.output is before:
            raise UnsupportedForward(
                f"{type(trainer).__name__} computed a loss of its own in a training step, in which the model was not "
                "called with labels: let its compute_loss return model(**inputs).loss, or leave this loss out"
            )
        return result

    trainer.training_step = checked
    return lambda: delattr(trainer, "training_step")


def _apply_to_sft(trainer: Any, aux: Sequence[str], options: LossOptionsDict) -> FusedLoss:
    """In the place of TRL's own fused head, which `SFTTrainer` calls by `model(..., fused_lm_head=True)`. Logits for
    metrics it makes itself, by a call without labels."""
    if trainer.args.loss_type != "nll":
        raise ValueError(
            f'loss_type={trainer.args.loss_type!r} weights tokens in the trainer; "dft" is loss_type="nll" with '
            "token_scaling=True passed here"
        )
    model = base_model(trainer.model)
    if hasattr(model, ATTRIBUTE) or "forward" not in vars(model):
        raise ValueError(
            "apply() came before the SFTTrainer was made, which has put its own forward in its place: make the trainer "
            "from a model without it, and call apply_to_trainer alone"
        )
    # Per-token outputs are those of all tokens, which skip_ignored does not visit.
    wanted = ("num_valid", "accuracy") if options.get("skip_ignored") else ("num_valid", "entropy", "predictions")
    trl_forward = vars(model).pop("forward")
    try:
        handle = apply(trainer.model, aux=tuple(dict.fromkeys([*aux, *wanted])), **options)
    except Exception:
        model.forward = trl_forward
        raise
    fused_forward = model.forward

    @wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        outputs = fused_forward(*args, **kwargs)
        return _sft_output(getattr(self, ATTRIBUTE), outputs) if fused_lm_head else outputs

    model.forward = types.MethodType(forward, model)
    handle.on_remove.append(lambda: setattr(model, "forward", trl_forward))
    return handle


def _sft_output(shared: FusedLoss, outputs: Any) -> Any:
    """What `SFTTrainer` reads: sums over the tokens of these. `log_probs` is minus the mean loss at each valid token,
    whose sum is right; `entropy` is nan with `skip_ignored`."""
    from trl.trainer.utils import FusedCausalLMOutput

    result: Any = shared.output
    target: Any = shared.target
    mask = target != shared.ignore_index
    loss, aux_loss = outputs.loss, getattr(outputs, "aux_loss", None)
    if aux_loss is not None:  # the trainer adds it itself
        loss = loss - shared.model.config.get_text_config().router_aux_loss_coef * aux_loss
    per_token = result.predictions is not None
    return FusedCausalLMOutput(
        loss=outputs.loss,
        log_probs=-loss * mask,
        entropy=result.entropy * mask if per_token else torch.full_like(result.loss, torch.nan),
        is_top1=(result.predictions == target) & mask if per_token else result.accuracy * result.num_valid,
        label_mask=mask,
        aux_loss=aux_loss,
    )
