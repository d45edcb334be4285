"""A head that data-parallel ranks share and that is never gathered, beside a body under FSDP or DDP.

Over the S ranks of the mesh's last dimension each owns V/S rows of weight, gradient and optimizer state. Hidden states
are gathered chunk by chunk instead, and their gradient comes back by reduce-scatter. docs/never_gathered.md says when
that pays and how to use it.

The body's framework averages gradients over all R x S data-parallel ranks (R replicas, 1 without a replicating
dimension). The loss of a replica is one number for the tokens of its S ranks; the mean of the R losses is what is
trained. So each rank's hidden gradient must be that of S times its replica's loss, while a shard's gradient is already
complete in its replica and only averaged over the R replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .. import collectives
from ..api import scale_gradient
from ..checks import check_full_linear, check_own_forward, tied_names
from ..head import VocabParallelHead
from ..options import LossOptionsDict
from ..outputs import LossOutput


class NeverGatheredHead(VocabParallelHead):
    """A `VocabParallelHead` over data-parallel ranks: each brings its own tokens (any number of them).

    Parameters are DTensors on `mesh`, as those of FSDP2 are: `torch.nn.utils.clip_grad_norm_` and distributed
    checkpoints take them as they are. They are used in the hidden states' dtype and keep their own: fp32 parameters
    get fp32 gradients from a bf16 body.

    All ranks of `mesh` must call it together, in evaluation too. Collectives of a call: those of
    `linear_cross_entropy` with token-sharded hidden states; of a backward pass, where `mesh` has two dimensions: one
    all-reduce of the shard's gradient over the replicas (`set_requires_gradient_sync`).

    Args:
        hidden_size, vocab_size, bias, device, dtype: as in `VocabParallelHead`.
        mesh: the mesh that FSDP shards over: `(shard)`, or `(replicate, shard)` for hybrid sharding.
        options: the fields of `LossOptions`.

    Raises:
        TypeError, ValueError: `mesh` is no device mesh, or has more than two dimensions.
    """

    _max_mesh_dims = 2
    _requires_gradient_sync = True

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        mesh: DeviceMesh,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[LossOptionsDict],
    ) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"expected the device mesh that FSDP shards over, got {type(mesh).__name__}")
        super().__init__(
            hidden_size, vocab_size, mesh, bias, hidden_layout="sharded", hidden_grad_scale=mesh.size(mesh.ndim - 1),
            device=device, dtype=dtype, **options,
        )  # fmt: skip

    @classmethod
    def from_linear(  # type: ignore[override]
        cls, linear: nn.Linear, mesh: DeviceMesh, **options: Unpack[LossOptionsDict]
    ) -> NeverGatheredHead:
        """The head of a full `nn.Linear` that has the same values on all ranks: this rank's rows are copied.
        `shard_head` puts one in a model, where a wrapper leaves it alone.

        Raises:
            TypeError, ValueError: as `VocabParallelHead.from_linear`, and as the class.
        """
        check_full_linear(linear)
        return cls._of_full(linear, mesh, **options)

    def forward(self, hidden: Tensor, target: Tensor | None = None, **arguments: Any) -> Tensor | LossOutput:
        """As `VocabParallelHead`. With `reduction="none"` the losses are those of this rank's tokens, and gradients
        those of the mean over the ranks of what each makes of them, as with a whole head under FSDP."""
        output = super().forward(hidden, target, **arguments)
        if target is None or self.options.reduction != "none":
            return output
        return scale_gradient(output, 1 / self.hidden_grad_scale)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether a backward pass averages the gradient over the replicas; call it as FSDP2's method of this name.

        With accumulation, switching it off for all passes but the last spares their all-reduces. It changes nothing
        else: the average is that of the accumulated gradient, and what was averaged before keeps its value.
        """
        self._requires_gradient_sync = requires_gradient_sync

    @property
    def _replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same rows."""
        assert self._mesh is not None
        return self._mesh.get_group(0) if self._mesh.ndim == 2 and self._mesh.size(0) > 1 else None

    def _operands(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, bias = _local(self.weight), None if self.bias is None else _local(self.bias)
        if self._replicas is not None:
            if weight.requires_grad:
                weight = _after_backward(weight, self._average_gradients)
            elif bias is not None and bias.requires_grad:
                bias = _after_backward(bias, self._average_gradients)
        return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Over the replicas, in place; of gradients that are equal already it changes nothing."""
        replicas = self._replicas
        if replicas is None or not self._requires_gradient_sync:
            return
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor):
                grad = parameter.grad.to_local()
                collectives.all_reduce_sum(grad.div_(dist.get_world_size(replicas)), replicas)

    def _parameter(self, local: Tensor, requires_grad: bool = True) -> nn.Parameter:
        assert self._mesh is not None
        return self._sharded_parameter(local, self._mesh, requires_grad)

    def _from_full(self, full: Tensor) -> nn.Parameter:
        return self._parameter(full.detach()[self.shard.start : self.shard.stop].clone(), full.requires_grad)


def _local(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        raise TypeError(
            f"the never-gathered head's parameter has become a {type(parameter).__name__} {tuple(parameter.shape)}: it "
            "cannot be tied to an embedding or replaced, and whatever wraps the model must leave it alone "
            "(ignored_params, ignored_modules)"
        )
    return parameter.to_local()


class _AfterBackward(torch.autograd.Function):
    """Identity in front of a parameter. Its backward has `callback` called once the whole pass is through, when all
    gradients are accumulated. A hook on the parameter itself would do so too, but is lost silently when the module is
    moved to another dtype or device, or copied."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.callback)
        return grad, None


@torch.compiler.disable(reason="what is called after the backward pass is no part of a graph")
def _after_backward(tensor: Tensor, callback: Callable[[], None]) -> Tensor:
    return _AfterBackward.apply(tensor, callback)


def shard_head(model: nn.Module, name: str, mesh: DeviceMesh, **options: Unpack[LossOptionsDict]) -> NeverGatheredHead:
    """Replaces the linear head `name` ("lm_head") of `model` by a `NeverGatheredHead`, and returns it.

    Call it before the model is wrapped, with the same weight on all ranks, and compute the loss as
    `model.lm_head(hidden, target)` in the model's forward. Then tell the wrapper to leave the head alone:
    `fully_shard(model, mesh=mesh, ignored_params=set(head.parameters()))`, or
    `FullyShardedDataParallel(model, ignored_modules=[head], ...)`. DDP around `model` itself needs nothing.

    Args:
        model: holds the head.
        name: the head's name in it; an `nn.Linear`, or an unsharded `VocabParallelHead`, whose options stay.
        mesh: as in `NeverGatheredHead`.
        options: the fields of `LossOptions`.

    Raises:
        TypeError: the head is neither, or has another forward than its class (a loss of `attach_loss`, for one).
        ValueError: its weight is shared with another module (tied embeddings), or it has a `hidden_grad_scale`.
    """
    linear: Any = model.get_submodule(name)
    if type(linear) is not nn.Linear and (type(linear) is not VocabParallelHead or linear.group is not None):
        raise TypeError(
            f"expected {name} to be an nn.Linear or an unsharded VocabParallelHead, got {type(linear).__name__}: what "
            "else it computes, or how it is sharded, would be lost"
        )
    check_own_forward(linear, name)
    if getattr(linear, "hidden_grad_scale", 1.0) != 1.0:
        raise ValueError(
            f"{name} has hidden_grad_scale={linear.hidden_grad_scale}: a head that is never gathered scales the hidden "
            "states' gradient by the number of ranks, and knows no other factor"
        )
    tied = tied_names(model, linear.weight)
    if len(tied) > 1:
        raise ValueError(
            f"the head's weight is tied ({' is '.join(tied)}): an embedding needs all rows on every rank, so a head "
            "that is never gathered cannot share its weight. Untie them (tie_word_embeddings=False), or let FSDP "
            "gather the head"
        )
    head = NeverGatheredHead._of_full(linear, mesh, **options)
    if isinstance(linear, VocabParallelHead):
        head.options = dataclasses.replace(linear.options, **options)
        head.raw_logits = linear.raw_logits
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, head)
    ignored = {f"{name}.{parameter}" for parameter, _ in head.named_parameters()}
    ignored |= set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return head
