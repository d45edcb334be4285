"""Parallel modes whose body torch's FSDP2 (`fully_shard`) shards."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flce_dist.checks import tied_names
from flce_dist.integrations.never_gathered import NeverGatheredHead, shard_head
from flce_dist.options import DTYPES

from .model import LanguageModel
from .parallel import DataParallel
from .schema import ConfigError


class FullySharded(DataParallel):
    """Each rank has its own part of the batch and 1/W of every parameter, gradient and optimizer state.

    A block's parameters are gathered while it computes. The head is a unit of its own, whose weight stays gathered
    from its forward to its backward, which come one after the other; or it is never gathered (`parallel.head:
    sharded`). With one rank there is nothing to shard.
    """

    _mesh: DeviceMesh | None = None
    """All ranks, in one dimension."""

    def check(self) -> None:
        parallel = self.config.parallel
        if parallel.tensor_size is not None:
            raise ConfigError("parallel.tensor_size", "is for parallel.mode fsdp+tensor: set it to null")
        if parallel.head == "sharded" and self.config.loss == "torch":
            raise ConfigError("parallel.head", "sharded needs loss.type flce: full logits need the whole weight")

    def connect(self, device: torch.device) -> None:
        if self.ranks.size > 1:
            self._mesh = init_device_mesh(device.type, (self.ranks.size,), mesh_dim_names=("data",))

    @property
    def never_gathered(self) -> bool:
        return self.config.parallel.head == "sharded" and self.ranks.size > 1

    def place_head(self, model: LanguageModel) -> None:
        if not self.never_gathered:
            return
        assert self._mesh is not None
        name = next(name for name, module in model.named_modules() if module is model.head)
        try:
            shard_head(model, name, self._mesh)
        except ValueError as error:
            raise ConfigError("parallel.head", str(error)) from error

    def wrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, LanguageModel)
        if self._mesh is None:
            return model
        # Inputs stay as they are: a normalizer is a float too, and 16 bits do not hold a count of tokens.
        narrow = None if self.config.train.dtype == "float32" else DTYPES[self.config.train.dtype]
        reduce = None if narrow is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=reduce, cast_forward_inputs=False)
        blocks = set(model.causal_lm._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=self._mesh, mp_policy=policy)
        head = model.head
        left_out = set(head.parameters()) if isinstance(head, NeverGatheredHead) else set()
        tied = len(tied_names(model, head.get_parameter("weight"))) > 1
        if not left_out and not tied:  # parameters that are shared must be in one unit: the root's
            fully_shard(head, mesh=self.mesh_of(head), mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=self._mesh, mp_policy=policy, ignored_params=left_out)
        return model

    def mesh_of(self, head: nn.Module) -> DeviceMesh:
        """The ranks over which FSDP shards the head."""
        assert self._mesh is not None
        return self._mesh


class FullyShardedTensorParallel(FullySharded):
    """FSDP over all ranks for the body; the head's vocabulary is sharded over `parallel.tensor_size` ranks that see the
    same tokens, and FSDP shards those shards over the rest.

    The tensor ranks of a group compute the same body. Its parameters are sharded over them as well, since averaging
    equal gradients changes nothing, and each rank then holds 1/W of the body.
    """

    _both: DeviceMesh

    def check(self) -> None:
        parallel = self.config.parallel
        if parallel.head is not None:
            raise ConfigError("parallel.head", "is for parallel.mode fsdp: set it to null")
        if parallel.tensor_size is None:
            raise ConfigError(
                "parallel.tensor_size", "parallel.mode fsdp+tensor needs the number of ranks that share a vocabulary"
            )
        if self.ranks.size % parallel.tensor_size:
            raise ConfigError(
                "parallel.tensor_size", f"{parallel.tensor_size} does not divide the {self.ranks.size} processes"
            )

    @property
    def _tensor_size(self) -> int:
        size = self.config.parallel.tensor_size
        assert size is not None
        return size

    def connect(self, device: torch.device) -> None:
        if self.ranks.size > 1:
            sizes = (self.data_ranks, self._tensor_size)
            self._both = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "tensor"))
            self._mesh = self._both._flatten("all")

    @property
    def head_group(self) -> DeviceMesh | None:
        return self._both["tensor"] if self.ranks.size > 1 else None

    @property
    def data_rank(self) -> int:
        return self.ranks.rank // self._tensor_size

    @property
    def data_ranks(self) -> int:
        return self.ranks.size // self._tensor_size

    def mesh_of(self, head: nn.Module) -> DeviceMesh:
        sharded = isinstance(getattr(head, "weight", None), DTensor)
        return self._both["data"] if sharded else super().mesh_of(head)
