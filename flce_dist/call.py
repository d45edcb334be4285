"""From checked arguments to one call of the chunk loop, and from its results to those of the arguments' shapes.

What a call is on its way to the loop and back:

    Given       the arguments as they came                                                    `arguments`
    Arguments   checked: local tensors, tokens flattened; `needs` says which gradients        `arguments`
      Setting   what follows from them without the contents of tensors, remembered            `arguments`
    Call        what the loop asks: how tokens lie and are cut, options, kernels              `op`
      RowInputs each row's target and coefficients, made once the first GEMM is launched      `op`
    Computed    loss, row statistics, gradients                                               `op`
    LossOutput  the loss and what `aux` names                                                 `outputs`
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import collectives, row_math
from .agreement import Agreed
from .arguments import Arguments, Setting
from .buffers import in_memory
from .kernels.spec import stats_dtype
from .op import Call, RowInputs
from .options import recomputes
from .outputs import aux_value, is_per_token
from .plan import rows_of_call
from .shard import VocabShard
from .tokens import ReplicatedTokens, ShardedTokens, TokenLayout
from .unpack import under_autocast


class Prepared(NamedTuple):
    """A call, its hidden states `[n, H]`, and which of the arguments' tokens these are (None: all)."""

    call: Call
    hidden: Tensor
    kept: Tensor | None


def prepare(args: Arguments, agreed: Agreed | None) -> Prepared:
    """Collectives: one maximum of the token counts, for token-sharded hidden states without `max_tokens`, or with
    `skip_ignored`."""
    setting, needs = args.setting, args.needs
    options = setting.options
    hidden, target, token_weight, kept = args.hidden, args.target, args.token_weight, None
    if options.skip_ignored:
        kept = (target != options.ignore_index).nonzero()[:, 0]
        hidden, target = hidden.index_select(0, kept), target[kept]
        token_weight = None if token_weight is None else token_weight[kept]
    tokens = _token_layout(args, hidden, None if agreed is None else agreed.max_columns)
    # The call lives as long as the loss: it must not keep the hidden states and a cast weight alive after backward.
    make_inputs = partial(
        _row_inputs,
        setting,
        tokens,
        target,
        token_weight,
        args.class_weight,
        args.normalizer,
        stats_dtype(hidden.dtype),
    )
    call = Call(
        options=options,
        shard=setting.shard,
        tokens=tokens,
        kernels=setting.kernels,
        spec=setting.spec,
        needs=needs,
        repeatable=isinstance(tokens, ReplicatedTokens)
        or needs.hidden  # alike on all ranks
        or agreed is None
        or agreed.differentiate_alike
        or recomputes(options, hidden.dtype),
        reduce_hidden_grad=setting.reduce_hidden_grad,
        hidden_grad_scale=setting.hidden_grad_scale,
        make_inputs=make_inputs,
    )
    return Prepared(call, hidden, kept)


def _row_inputs(
    setting: Setting,
    tokens: TokenLayout,
    target: Tensor,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    normalizer: Tensor | float | None,
    dtype: torch.dtype,
) -> RowInputs:
    options, shard = setting.options, setting.shard
    ids = tokens.to_loop(target, fill=options.ignore_index)
    mean = options.reduction == "mean" and normalizer is None
    valid, share = setting.kernels.token_shares(ids, options.ignore_index, mean, dtype)
    weight_of_row = None if token_weight is None else tokens.to_loop(token_weight.to(dtype), fill=0.0)
    column_weight: Tensor | None = None
    column_weight_sum: Tensor | int = shard.vocab_size
    if class_weight is not None and options.label_smoothing:
        column_weight = in_memory(shard.take(class_weight).to(dtype).contiguous())
        column_weight_sum = class_weight.abs().sum(dtype=dtype)
    coefficients = row_math.row_coefficients(
        options, ids, valid, share, shard.vocab_size, class_weight, weight_of_row, normalizer
    )
    return RowInputs(ids, shard.local_ids(ids), valid, coefficients, column_weight, column_weight_sum)


def _token_layout(args: Arguments, hidden: Tensor, max_columns: int | None) -> TokenLayout:
    """Chunks from what all ranks know: without the largest shard's columns, those of an even split."""
    setting, group, num_ranks = args.setting, args.group, collectives.world_size(args.group)
    options, (num_tokens, hidden_size) = setting.options, hidden.shape
    if max_columns is None:
        max_columns = VocabShard.even(setting.shard.vocab_size, 0, num_ranks).num_columns

    def rows_of(all_tokens: int, sharded: bool) -> int:
        return rows_of_call(
            options, all_tokens, hidden_size, max_columns, hidden.dtype, num_ranks, sharded, args.needs.weight
        )

    if group is None or setting.hidden_layout == "replicated":
        return ReplicatedTokens(num_tokens, rows_of(num_tokens, False), group)
    max_tokens = setting.max_tokens
    if max_tokens is None or options.skip_ignored:
        max_tokens = collectives.max_over_ranks(num_tokens, hidden.device, group)
    return ShardedTokens(num_tokens, max_tokens, rows_of(max_tokens * num_ranks, True) // num_ranks, group)


def loss_and_aux(
    args: Arguments, prepared: Prepared, loss: Tensor, stats: Tensor, owned: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """What follows a run of the call, `op.Computed` of it given: the loss in the arguments' shape, and `aux`.

    Raises:
        IndexError: as `_check_targets`.
    """
    _check_targets(args, prepared, stats, owned)
    call, reduction = prepared.call, prepared.call.options.reduction
    if reduction == "none":
        loss = _to_arguments(args, loss, prepared.kept)
    aux = {name: aux_value(name, call, stats) for name in args.setting.aux}
    for name, value in aux.items():
        if is_per_token(name, reduction):
            aux[name] = _to_arguments(args, call.tokens.to_local(value), prepared.kept)
    return loss, aux


def _check_targets(args: Arguments, prepared: Prepared, stats: Tensor, owned: Tensor) -> None:
    """
    Raises:
        IndexError: on all ranks, with value and place of a target that is on no rank or on two (`owned` is false); on a
            GPU a device-side assertion, so that the host does not wait.
    """
    vocab_size, ignore_index = args.setting.shard.vocab_size, args.setting.options.ignore_index
    expected = f"outside [0, {vocab_size}) and not ignore_index={ignore_index}"
    if owned.device.type != "cpu" or isinstance(owned, FakeTensor):
        torch._assert_async(owned, f"flce_dist: a target is {expected}")
    elif not owned:
        inputs, tokens = prepared.call.inputs, prepared.call.tokens
        bad = row_math.badly_owned(stats, inputs.valid)
        mine = tokens.to_local(bad).nonzero()[:, 0]
        if len(mine) == 0:
            raise IndexError(f"target {int(inputs.ids[bad][0])} of a token of another rank is {expected}")
        position = mine[0] if prepared.kept is None else prepared.kept[mine[0]]
        raise IndexError(f"target {int(args.target[position])} of token {int(position)} is {expected}")


def _to_arguments(args: Arguments, per_token: Tensor, kept: Tensor | None) -> Tensor:
    """Values `[n]` of the kept tokens in the target's shape; 0 for the others."""
    if kept is not None:
        per_token = per_token.new_zeros(args.target.shape).index_copy(0, kept, per_token)
    return per_token.reshape(args.setting.target_shape)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels and collectives go to the tensors' GPU, which need not be the current one; autocast does not reach in."""
    is_elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    if not is_elsewhere and not under_autocast(device):
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if under_autocast(device):
        stack.enter_context(torch.autocast(device.type, enabled=False))
    if is_elsewhere:
        stack.enter_context(torch.cuda.device(device))
    return stack
