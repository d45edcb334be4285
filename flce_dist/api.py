"""`linear_cross_entropy`: from checked arguments to the chunk loop and its outputs. Imports no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import collectives
from .arguments import Given, checked_arguments
from .call import loss_and_aux, on_device, prepare
from .op import LinearCrossEntropy
from .options import HiddenLayout, LossOptions, LossOptionsDict
from .outputs import LossOutput
from .shard import VocabShard


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
    hidden_layout: HiddenLayout = "replicated",
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
        weight: this rank's rows `[L, H]`, of `hidden`'s dtype: plain, or a DTensor `Shard(0)` on the group's 1-D mesh.
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
        NotImplementedError: under a `torch.func` transform or `torch.jit.trace`, or a tensor carries a tangent of
            forward-mode differentiation; in backward for a batch of upstream gradients.
        RuntimeError: in backward, with `create_graph`, or where it needs inputs again that were freed or written to.
    """
    given = Given(
        hidden, weight, target, bias, class_weight, token_weight, normalizer, group, vocab_size, vocab_shard,
        hidden_layout, max_tokens, reduce_hidden_grad, hidden_grad_scale, aux, options,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        from . import compiled  # it loads the compiler, and with it Triton

        loss, found = compiled.linear_cross_entropy(given)
        return LossOutput(loss, **found) if aux else loss
    args, agreed = checked_arguments(given)
    with on_device(args.hidden.device):
        prepared = prepare(args, agreed)
        ran = LinearCrossEntropy.apply(prepared.call, prepared.hidden, args.weight, args.bias)
        loss, found = loss_and_aux(args, prepared, *ran)
        return LossOutput(loss, **found) if aux else loss


def scale_gradient(output: Tensor | LossOutput, factor: float) -> Tensor | LossOutput:
    """`output` with the gradients of its loss times `factor`."""
    loss = output.loss if isinstance(output, LossOutput) else output
    scaled: Tensor = _ScaledGradient.apply(loss, factor)
    return output._replace(loss=scaled) if isinstance(output, LossOutput) else scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def count_valid_tokens(
    target: Tensor, ignore_index: int = LossOptions.ignore_index, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Tokens of `target` that are not `ignore_index`, summed over the ranks of `group` when given (one all-reduce).

    Returns:
        0-d int64 on `target`'s device, which can be passed as `normalizer` without reading it.

    Raises:
        TypeError, ValueError: `target` is a DTensor; `group` is no process group, or this rank is not in it.
    """
    group = collectives.sharding_group(group)
    if isinstance(target, DTensor):
        raise TypeError(
            "target is a DTensor: pass target.to_local(), and where each rank has tokens of its own the group to sum "
            "over"
        )
    count = (target != ignore_index).sum()
    return count if group is None else collectives.all_reduce_sum(count, group)
