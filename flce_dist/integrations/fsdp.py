"""A tensor-parallel head by `parallelize_module`, alone or below FSDP2.

Under FSDP itself no code is needed: `VocabParallelHead` and a head with `attach_loss` compute the loss in their own
forward, where FSDP has gathered the weight, and FSDP's hooks see the gradient.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..attach import attach_loss
from ..checks import check_own_forward, checked_count
from ..collectives import sharding_group
from ..head import VocabParallelHead
from ..options import HiddenLayout, LossOptionsDict, options_of
from ..shard import VocabShard

_PER_TOKEN = ("target", "token_weight")


class FlceParallel(ParallelStyle):
    """Shards a head over the vocabulary and lets it compute the loss: `head(hidden, target)`.

    For the plan of `torch.distributed.tensor.parallel.parallelize_module`, as `{"lm_head": FlceParallel()}`. Weight and
    bias become DTensors `Shard(0)` on the mesh, with the values of its first rank, as the stock styles make them.
    Shards may be uneven, and empty unless `fully_shard` follows, which does not reduce an empty gradient: pad the head
    and give `vocab_size`. A tie with the embedding is broken, as by the stock styles: assign the embedding's weight to
    the head again after `parallelize_module`.

    `target [B, S]` (and `token_weight`) is the whole of it on all ranks of the mesh, whatever the layout of `hidden`.
    With sequence-parallel hidden states each rank takes the entries of its own tokens, and the hidden states are
    gathered a chunk at a time inside the loss, not at once before it: no rank holds all of them, their gradient is
    summed in `hidden_grad_reduce_dtype`, and both run under the matrix products of the chunk loop. Per-token outputs
    (`reduction="none"`, `aux`) are then those of the rank's own tokens.

    Args:
        input_layouts: of `hidden [B, S, H]` over the mesh: `Replicate()`, or `Shard(dim)` of a token dimension. A
            DTensor must have this layout; plain tensors are taken to have it.
        vocab_size: true size of the vocabulary, where the head's rows are padded.
        options: the fields of `LossOptions`; not for a `VocabParallelHead`, which has its own.

    Collectives of a call: those of `linear_cross_entropy` with replicated or token-sharded hidden states. The head of
    an `nn.Linear` without target returns the logits as a DTensor `Shard(-1)`, as `ColwiseParallel` with
    `use_local_output=False` does, and gathers sequence-parallel hidden states for it (one all-gather).

    Raises:
        TypeError: when applied, the module is neither an `nn.Linear` nor a `VocabParallelHead`, or an `nn.Linear` whose
            forward was replaced.
        ValueError: an option or layout that does not fit; in a call, hidden states of another layout.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        vocab_size: int | None = None,
        **options: Unpack[LossOptionsDict],
    ) -> None:
        super().__init__()
        options_of(options)
        self.input_layouts = Replicate() if input_layouts is None else input_layouts
        if not isinstance(self.input_layouts, Replicate | Shard) or getattr(self.input_layouts, "dim", 0) < 0:
            raise ValueError(f"input_layouts must be Replicate() or Shard(dim) with dim >= 0, got {input_layouts}")
        self.vocab_size = None if vocab_size is None else checked_count("vocab_size", vocab_size, 1)
        self.options = options

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) not in (nn.Linear, VocabParallelHead):
            raise TypeError(f"FlceParallel is for an nn.Linear or a VocabParallelHead, got {type(module).__name__}")
        if isinstance(module, VocabParallelHead) and (self.options or self.vocab_size is not None):
            raise ValueError("a VocabParallelHead has its own options and vocab_size: give them to the head")
        if type(module) is nn.Linear:
            check_own_forward(module, "the head")
        if device_mesh.ndim != 1:
            raise ValueError(f"FlceParallel needs a 1-D mesh, got {device_mesh}: name one dimension")
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
        group = device_mesh.get_group()
        layout: HiddenLayout = "sharded" if self.input_layouts.is_shard() else "replicated"
        if isinstance(module, VocabParallelHead):
            module.group = sharding_group(group)
            module.shard = VocabShard.even(module.vocab_size, device_mesh.get_local_rank(), device_mesh.size())
            module.hidden_layout = layout
        else:
            module.forward = types.MethodType(_logits(device_mesh, self.input_layouts), module)
            attach_loss(module, group, vocab_size=self.vocab_size, hidden_layout=layout, **self.options)
        module.register_forward_pre_hook(_local_arguments(device_mesh, self.input_layouts), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(input_layouts={self.input_layouts})"


def _local_arguments(mesh: DeviceMesh, layout: Placement) -> Callable[..., Any]:
    """A pre-forward hook of the head: hidden states as the loss takes them, and the targets of the same tokens."""
    dim = layout.dim if isinstance(layout, Shard) else None

    def hook(head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]] | None:
        call = dict(zip(("hidden", "target"), args, strict=False)) | kwargs
        if len(args) > 2 or "hidden" not in call:
            return None  # the forward says what it takes
        hidden, target = call["hidden"], call.get("target")
        if isinstance(hidden, DTensor) and hidden.placements != (layout,):
            raise ValueError(
                f"hidden is a DTensor {hidden.placements}, but the head has FlceParallel(input_layouts={layout}): give "
                "the layout in which the module before the head leaves it, Replicate() or Shard of the sequence"
            )
        if target is None:
            if isinstance(head, VocabParallelHead) and isinstance(hidden, DTensor):
                call["hidden"] = hidden.to_local()
        elif dim is not None:
            if dim >= target.dim():
                raise ValueError(
                    f"input_layouts={layout} needs a target of more than {dim} dimensions, got {target.dim()}"
                )
            longest = target.numel() // max(target.shape[dim], 1) * -(-target.shape[dim] // mesh.size())
            # A graph with dynamic shapes has to know this number: the loss takes it as a constant.
            call["max_tokens"] = operator.index(longest)
            for name in _PER_TOKEN:
                if isinstance(call.get(name), Tensor):
                    call[name] = _part(call[name], mesh, layout)
            call["hidden"] = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        return (), call

    return hook


def _part(whole: Tensor, mesh: DeviceMesh, layout: Placement) -> Tensor:
    """This rank's part of a tensor that all ranks hold, or of a DTensor."""
    if not isinstance(whole, DTensor):
        whole = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[layout]).to_local()


def _logits(mesh: DeviceMesh, layout: Placement) -> Callable[..., Tensor]:
    """The forward of a linear layer whose weight is a DTensor; hidden states may be plain."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:  # the name that nn.Linear gives it
        hidden = input
        if not isinstance(hidden, DTensor):
            if isinstance(layout, Shard):
                raise NotImplementedError(
                    "logits need sequence-parallel hidden states as a DTensor, which knows the length of the sequence: "
                    "leave use_local_output=False where they are made"
                )
        else:
            hidden = hidden.full_tensor()
        # Contiguous: DTensor's linear layer makes a view of it in torch 2.11.
        hidden = DTensor.from_local(hidden.contiguous(), mesh, [Replicate()], run_check=False)
        return nn.functional.linear(hidden, self.weight, self.bias)

    return forward
