"""Modules: the loss without parameters, and a head that owns its shard of the vocabulary."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from . import collectives
from .api import linear_cross_entropy
from .checks import check_full_linear, check_vocab_shard, checked_count, checked_layout
from .options import HiddenLayout, LossOptions, LossOptionsDict, options_of, to_float
from .outputs import LossOutput
from .row_math import scaled_and_capped
from .shard import VocabShard

_INIT_ROWS = 4096


def bound_arguments(
    vocab_size: int | None, vocab_shard: VocabShard | None, hidden_layout: HiddenLayout, hidden_grad_scale: float
) -> dict[str, Any]:
    """What a module binds of a call besides group and options, checked as far as it depends on no tensor.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.
    """
    check_vocab_shard(vocab_shard)
    return {
        "vocab_size": None if vocab_size is None else checked_count("vocab_size", vocab_size, 1),
        "vocab_shard": vocab_shard,
        "hidden_layout": checked_layout(hidden_layout),
        "hidden_grad_scale": to_float("hidden_grad_scale", hidden_grad_scale),
    }


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


class _LossModule(nn.Module):
    """A module with the options of a loss; and with a process group or mesh, which are handles: a copy of the module
    communicates over the same."""

    group: dist.ProcessGroup | None
    _mesh: DeviceMesh | None = None

    @property
    def options(self) -> LossOptions:
        """What the module computes; may be set."""
        return self._loss_options

    @options.setter
    def options(self, options: LossOptions) -> None:
        if not isinstance(options, LossOptions):
            raise TypeError(f"options must be LossOptions, got {options!r}")
        self._loss_options = options
        # As keywords, which each call of the loss looks up anew: no more than it needs.
        self._options = options.changed()

    def extra_repr(self) -> str:
        return _listed(self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo |= {id(handle): handle for handle in (self.group, self._mesh)}
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return clone


class LinearCrossEntropyLoss(_LossModule):
    """`linear_cross_entropy` with its options bound. It has no parameters of its own, unlike torch's module of this
    name: the weight is an argument of each call.

    Args:
        group, vocab_size, vocab_shard, hidden_layout, hidden_grad_scale, options: as `linear_cross_entropy` takes them.

    Raises:
        TypeError, ValueError: an option, the layout or the scale has a wrong type or value.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        vocab_size: int | None = None,
        vocab_shard: VocabShard | None = None,
        hidden_layout: HiddenLayout = "replicated",
        hidden_grad_scale: float = 1.0,
        **options: Unpack[LossOptionsDict],
    ) -> None:
        super().__init__()
        self.options = options_of(options)
        collectives.sharding_group(group)  # checks it
        self.group = group
        self._arguments = bound_arguments(vocab_size, vocab_shard, hidden_layout, hidden_grad_scale)

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, **tensors: Any) -> Tensor | LossOutput:
        """The loss; `tensors` are the further arguments of `linear_cross_entropy` that change from call to call (bias,
        class_weight, token_weight, normalizer, max_tokens, reduce_hidden_grad, aux). Raises as it does, and calls its
        collectives."""
        return linear_cross_entropy(
            hidden, weight, target, group=self.group, **tensors, **self._arguments, **self._options
        )


class VocabParallelHead(_LossModule):
    """A language model's last linear layer and its loss, the vocabulary sharded over the ranks of `group`.

    `weight` (and `bias`) is a plain parameter `[V, H]` with one rank. With more it is a DTensor `Shard(0)` on the
    group's mesh: distributed checkpoints save and load it, and the optimizer's state for it, as the full tensor, from
    any number of ranks to any other. torch refuses DTensors and plain tensors in one foreach or fused call: give the
    head an optimizer parameter group of its own, and clip gradients by the norm over both.

    Initial values are those of `nn.Linear`; for a seed the full weight is the same at any number of ranks, whose random
    states stay equal.

    Args:
        hidden_size: H.
        vocab_size: V, of the global vocabulary; split as `torch.chunk` does.
        group: ranks that share the vocabulary, as a process group or a 1-D device mesh; None: not sharded. FSDP2 wants
            the mesh, a dimension of the one that it shards over.
        bias: whether the head has one.
        hidden_layout, hidden_grad_scale: as in `linear_cross_entropy`.
        device, dtype: of the parameters, as in `nn.Linear`.
        options: the fields of `LossOptions`.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or this rank is not in the group.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    raw_logits = False
    """Whether logits are returned before `logit_scale` and `softcap`: for a model that applies them after its head."""
    _max_mesh_dims = 1

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        bias: bool = False,
        *,
        hidden_layout: HiddenLayout = "replicated",
        hidden_grad_scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[LossOptionsDict],
    ) -> None:
        super().__init__()
        self.options = options_of(options)
        self.hidden_size = checked_count("hidden_size", hidden_size, 1)
        self.vocab_size = checked_count("vocab_size", vocab_size, 1)
        if isinstance(group, DeviceMesh) and group.ndim > self._max_mesh_dims:
            wanted = " or ".join(f"{n}-D" for n in range(1, self._max_mesh_dims + 1))
            raise ValueError(
                f"expected a process group or a {wanted} mesh, got a mesh of {group.ndim} dimensions: name one"
            )
        self._mesh = group if isinstance(group, DeviceMesh) else None
        process_group = group.get_group(group.ndim - 1) if isinstance(group, DeviceMesh) else group
        self.group = collectives.sharding_group(process_group)
        self.hidden_layout = checked_layout(hidden_layout)
        self.hidden_grad_scale = to_float("hidden_grad_scale", hidden_grad_scale)
        rank, num_ranks = collectives.rank_in(self.group), collectives.world_size(self.group)
        self.shard = VocabShard.even(self.vocab_size, rank, num_ranks)
        rows = self.shard.num_rows
        self.weight = self._parameter(torch.empty(rows, self.hidden_size, device=device, dtype=dtype))
        self.bias = self._parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        hidden_layout: HiddenLayout = "replicated",
        hidden_grad_scale: float = 1.0,
        **options: Unpack[LossOptionsDict],
    ) -> VocabParallelHead:
        """The head of a full `nn.Linear` that has the same values on all ranks. This rank's rows are copied; with one
        rank the head keeps the very Parameter, so that a tie with the embedding holds.

        Raises:
            TypeError: `linear` is no plain `nn.Linear`, for example an adapter around one, or its forward was replaced.
            ValueError: its weight is sharded or freed, as FSDP and ZeRO-3 leave it.
            TypeError, ValueError: as the class raises them.
        """
        check_full_linear(linear)
        return cls._of_full(linear, group, hidden_layout=hidden_layout, hidden_grad_scale=hidden_grad_scale, **options)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(H). The full weight's random numbers are drawn on every rank, some rows at a time."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in (self.weight, self.bias):
            if parameter is None or parameter.is_meta:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for start in range(0, self.vocab_size, _INIT_ROWS):
                stop = min(start + _INIT_ROWS, self.vocab_size)
                values = local.new_empty(stop - start, *local.shape[1:]).uniform_(-bound, bound)
                first, last = max(start, self.shard.start), min(stop, self.shard.stop)
                if first < last:
                    local[first - self.shard.start : last - self.shard.start] = values[first - start : last - start]

    def forward(
        self,
        hidden: Tensor,
        target: Tensor | None = None,
        *,
        class_weight: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: Tensor | float | None = None,
        max_tokens: int | None = None,
        aux: Sequence[str] = (),
    ) -> Tensor | LossOutput:
        """The loss of `hidden [..., H]` and `target [...]` (global ids, not shifted here); arguments, result, errors
        and collectives are those of `linear_cross_entropy`.

        Without `target`: the logits `[..., L]` of this rank's ids, in the dtype that `nn.Linear` gives them. Their
        backward sums the gradient of `hidden` over the ranks (one all-reduce of its size).
        """
        if target is None:
            return self._logits(hidden)
        weight, bias = self._operands(hidden)
        plain_shard = self.group is not None and not isinstance(weight, DTensor)
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            class_weight=class_weight,
            token_weight=token_weight,
            normalizer=normalizer,
            group=self.group,
            vocab_size=self.vocab_size,
            vocab_shard=self.shard if plain_shard else None,
            hidden_layout=self.hidden_layout,
            max_tokens=max_tokens,
            hidden_grad_scale=self.hidden_grad_scale,
            aux=aux,
            **self._options,
        )

    def extra_repr(self) -> str:
        ids = f"[{self.shard.start}, {self.shard.stop})"
        sizes = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size, "ids": ids}
        return _listed(sizes | {"bias": self.bias is not None} | self._options)

    def _operands(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as the loss takes them."""
        return self.weight, self.bias

    def _logits(self, hidden: Tensor) -> Tensor:
        weight, bias = self._operands(hidden)
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
        if self.group is not None:
            if self.hidden_layout == "sharded":
                raise NotImplementedError(
                    "logits of token-sharded hidden states would be of other ranks' tokens: gather them and use a head "
                    'with hidden_layout="replicated"'
                )
            hidden = collectives.SumGradient.apply(hidden, self.group)
        logits = nn.functional.linear(hidden, weight, bias)
        if self.raw_logits:
            return logits
        return scaled_and_capped(logits, self.options.logit_scale, self.options.softcap)

    def _parameter(self, local: Tensor, requires_grad: bool = True) -> nn.Parameter:
        if self.group is None:
            return nn.Parameter(local, requires_grad)
        mesh = self._mesh or DeviceMesh.from_group(self.group, "cpu" if local.is_meta else local.device.type)
        return self._sharded_parameter(local, mesh, requires_grad)

    def _sharded_parameter(self, local: Tensor, mesh: DeviceMesh, requires_grad: bool) -> nn.Parameter:
        """Sharded over the last dimension of `mesh`, replicated over one before it."""
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        shape = torch.Size((self.vocab_size, *local.shape[1:]))
        stride = (*shape[1:], 1)
        shard = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        return nn.Parameter(shard, requires_grad)

    @classmethod
    def _of_full(cls, full: nn.Linear | VocabParallelHead, place: Any, **arguments: Any) -> Self:
        """With this rank's rows of a full head, and its mode; `place` is the group or mesh."""
        vocab_size, hidden_size = full.weight.shape
        dtype, has_bias = full.weight.dtype, full.bias is not None
        head = cls(hidden_size, vocab_size, place, has_bias, device="meta", dtype=dtype, **arguments)
        head.weight = head._from_full(full.weight)
        head.bias = None if full.bias is None else head._from_full(full.bias)
        return head.train(full.training)

    def _from_full(self, full: Tensor) -> nn.Parameter:
        if self.group is None and isinstance(full, nn.Parameter):
            return full
        local = full.detach()[self.shard.start : self.shard.stop].clone()
        return self._parameter(local, full.requires_grad)
