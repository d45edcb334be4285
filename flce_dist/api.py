"""`linear_cross_entropy`: from checked arguments to the chunk loop and its outputs. Imports no Triton."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks, collectives, row_math
from .arguments import Arguments, group_of, resolve, summarize
from .backend import row_kernels
from .kernels.spec import RowSpec, stats_dtype
from .op import Call, LinearCrossEntropy, Needs
from .options import LossOptions, LossOptionsDict
from .plan import chunk_rows
from .shard import VocabShard
from .tokens import ReplicatedTokens, ShardedTokens, TokenLayout


class LossOutput(NamedTuple):
    """The loss and what `aux` asked for (None otherwise). All but `loss` carry no gradient.

    Scalars are equal on all ranks of the group; per-token tensors have the shape of `target` on this rank.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    """The z-loss part of `loss`, reduced like it."""
    lse: Tensor | None = None
    """Per token: log-sum-exp over the global vocabulary, in nats."""
    accuracy: Tensor | None = None
    """Share of valid tokens whose arg-max is the target; 0 when there is none. 0-d."""
    predictions: Tensor | None = None
    """Per token: arg-max over the global vocabulary (int64), the lowest id of equals; given for ignored tokens too."""
    entropy: Tensor | None = None
    """Per token: entropy of the softmax over the global vocabulary, in nats."""
    num_valid: Tensor | None = None
    """Valid tokens of the group. 0-d int64."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_shard: VocabShard | None = None,
    hidden_layout: str = "replicated",
    max_tokens: int | None = None,
    reduce_hidden_grad: bool = True,
    hidden_grad_scale: float = 1.0,
    aux: Sequence[str] = (),
    **options: Unpack[LossOptionsDict],
) -> Tensor | LossOutput:
    """Cross entropy of `logit_scale * (hidden @ weight.T + bias)`, the vocabulary sharded over `group`; the logits of
    all tokens are never stored. `row_math` has the formula, `op` the loop and its collectives.

    Args:
        hidden: `[..., H]`, float. The same on all ranks, or this rank's tokens (`hidden_layout`).
        weight: this rank's rows `[L, H]`, of `hidden`'s dtype: plain, or a DTensor `Shard(0)` on the group's mesh.
        target: `[...]`, int64 or int32 GLOBAL ids. Not shifted here.
        bias: this rank's `[L]`.
        class_weight: `[vocab_size]`, the whole of it on all ranks; as in `F.cross_entropy`.
        token_weight: `[...]`, multiplies each token's whole loss and is not in the divisor.
        normalizer: replaces the mean's divisors; 0 gives loss 0.
        group: ranks that share the vocabulary. None: not sharded (never the default group).
        vocab_size: entries of the global vocabulary. With a plain shard it is split as `torch.chunk` does; rows of a
            DTensor or an unsharded weight beyond it are padding.
        vocab_shard: this rank's place in the vocabulary, for other splits.
        hidden_layout: "replicated", or "sharded" over tokens: one loss for the tokens of all ranks.
        max_tokens: the largest number of tokens of a rank, for "sharded": spares the host synchronisation that learns
            it.
        reduce_hidden_grad: False leaves the gradient of replicated `hidden` a partial sum on each rank.
        hidden_grad_scale: factor on the gradient of `hidden` alone.
        aux: names of further outputs (the fields of `LossOutput`).
        options: the fields of `LossOptions`.

    Returns:
        The loss: 0-d, or `[...]` with `reduction="none"`; float32, and float64 for float64 inputs; the same bits on all
        ranks. With `aux` a `LossOutput`. Where no token is valid the loss and its gradients are 0, while
        `F.cross_entropy` gives nan for the mean.

    Raises:
        TypeError, ValueError: on all ranks of the group, when the call is checked (`LossOptions.check_ranks`).
        IndexError: on all ranks, a target is outside `[0, vocab_size)` and not `ignore_index`, on CPU. On a GPU it is a
            device-side assertion.
    """
    arguments, error = None, None
    try:
        arguments = resolve(
            hidden, weight, target, bias, class_weight, token_weight, normalizer, group, vocab_size, vocab_shard,
            hidden_layout, max_tokens, reduce_hidden_grad, hidden_grad_scale, tuple(aux), LossOptions(**options),
        )  # fmt: skip
    except (TypeError, ValueError) as caught:
        error = caught
    group = group_of(weight, group)
    most_columns = None
    if group is not None:
        most_columns = checks.agree(
            group,
            str(options.get("check_ranks", "auto")),
            hidden.device,
            vocab_size if arguments is None else arguments.shard.vocab_size,
            error,
            lambda: summarize(_present(arguments)),
        )
    elif error is not None:
        raise error
    with _on_device(hidden.device):
        return _compute(_present(arguments), most_columns)


def count_valid_tokens(target: Tensor, ignore_index: int = -100, group: dist.ProcessGroup | None = None) -> Tensor:
    """Tokens of `target` that are not `ignore_index`, summed over the ranks of `group` when given (one all-reduce).

    Returns:
        0-d int64 on `target`'s device, which can be passed as `normalizer` without reading it.
    """
    count = (target != ignore_index).sum()
    return count if group is None else collectives.all_reduce_sum(count, group)


def _compute(args: Arguments, most_columns: int | None) -> Tensor | LossOutput:
    options = args.options
    hidden, target, token_weight, kept = args.hidden, args.target, args.token_weight, None
    if options.skip_ignored:
        kept = (target != options.ignore_index).nonzero()[:, 0]
        hidden, target = hidden.index_select(0, kept), target[kept]
        token_weight = None if token_weight is None else token_weight[kept]
    tokens = _token_layout(args, hidden, most_columns)
    dtype = stats_dtype(hidden.dtype)
    target = tokens.to_loop(target, fill=options.ignore_index)
    token_weight = None if token_weight is None else tokens.to_loop(token_weight, fill=0.0)
    valid = target != options.ignore_index
    column_weight = None
    if args.class_weight is not None and options.label_smoothing:
        column_weight = args.shard.take(args.class_weight).to(dtype).contiguous()
    grad = torch.is_grad_enabled()
    call = Call(
        options=options,
        shard=args.shard,
        tokens=tokens,
        rows=row_kernels(options.backend, hidden.device),
        spec=RowSpec(
            softcap=None if options.softcap is None else float(options.softcap),
            uniform=options.label_smoothing > 0,
            argmax="predictions" in args.aux or "accuracy" in args.aux,
            entropy="entropy" in args.aux,
            token_scaling=options.token_scaling,
        ),
        needs=Needs(
            hidden=grad and hidden.requires_grad,
            weight=grad and args.weight.requires_grad,
            bias=grad and args.bias is not None and args.bias.requires_grad,
        ),
        reduce_hidden_grad=args.reduce_hidden_grad,
        hidden_grad_scale=args.hidden_grad_scale,
        target=args.shard.local_ids(target, valid),
        valid=valid,
        weights=row_math.row_weights(
            options, target, valid, args.shard.vocab_size, dtype, args.class_weight, token_weight, args.normalizer
        ),
        column_weight=column_weight,
    )
    loss, stats = LinearCrossEntropy.apply(call, hidden, args.weight, args.bias)
    _check_targets(target, row_math.badly_owned(stats, valid), args)
    if options.reduction == "none":
        loss = loss if kept is None else loss.new_zeros(args.target.shape).index_copy(0, kept, loss)
        loss = loss.reshape(args.shape)
    return LossOutput(loss, **_aux(args, call, stats, target, kept)) if args.aux else loss


def _token_layout(args: Arguments, hidden: Tensor, most_columns: int | None) -> TokenLayout:
    """Chunks from what all ranks know: without the largest shard's columns, those of an even split."""
    if most_columns is None:
        most_columns = -(-args.shard.vocab_size // collectives.world_size(args.group))
    itemsize = (args.options.logits_dtype or hidden.dtype).itemsize
    num_tokens = hidden.shape[0]
    num_ranks = 1
    if args.group is not None and args.hidden_layout == "sharded":
        num_ranks = collectives.world_size(args.group)
        max_tokens = args.max_tokens
        if max_tokens is None or args.options.skip_ignored:
            max_tokens = collectives.max_over_ranks(num_tokens, hidden.device, args.group)
        num_tokens = max_tokens * num_ranks
    rows = chunk_rows(num_tokens, most_columns, itemsize, args.options.budget_bytes, args.options.chunk_rows)
    if args.group is not None and args.hidden_layout == "sharded":
        return ShardedTokens(hidden.shape[0], num_tokens // num_ranks, max(1, rows // num_ranks), args.group)
    return ReplicatedTokens(num_tokens, rows, args.group)


def _check_targets(target: Tensor, bad: Tensor, args: Arguments) -> None:
    vocab_size = args.shard.vocab_size
    if target.device.type != "cpu":
        torch._assert_async(
            ~bad.any(),
            f"flce_dist: a target is outside [0, {vocab_size}) and not ignore_index={args.options.ignore_index}",
        )
    elif bad.any():
        position = int(bad.nonzero()[0])
        raise IndexError(
            f"target {int(target[position])} at token {position} of the group is outside [0, {vocab_size}) and not "
            f"ignore_index={args.options.ignore_index}"
        )


def _aux(args: Arguments, call: Call, stats: Tensor, target: Tensor, kept: Tensor | None) -> dict[str, Tensor]:
    spec, valid, tokens = call.spec, call.valid, call.tokens

    def per_token(values: Tensor) -> Tensor:
        local = tokens.to_local(values)
        if kept is not None:
            local = local.new_zeros(args.target.shape).index_copy(0, kept, local)
        return local.reshape(args.shape)

    found: dict[str, Tensor] = {}
    for name in args.aux:
        if name == "num_valid":
            found[name] = valid.sum()
        elif name == "z_loss":
            losses = row_math.z_losses(stats, call.weights, valid, spec)
            found[name] = per_token(losses) if call.options.reduction == "none" else losses.sum()
        elif name == "lse":
            found[name] = per_token(row_math.log_sum_exp(stats))
        elif name == "entropy":
            found[name] = per_token(row_math.entropies(stats, spec))
        elif name == "predictions":
            found[name] = per_token(row_math.predictions(stats, spec))
        else:
            hits = (valid & (row_math.predictions(stats, spec) == target)).sum()
            found[name] = hits.to(stats.dtype) / valid.sum().clamp(min=1)
    return found


def _present(arguments: Arguments | None) -> Arguments:
    assert arguments is not None
    return arguments


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    """Kernels and collectives go to the tensors' GPU, which need not be the current one; autocast does not reach in."""
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield
