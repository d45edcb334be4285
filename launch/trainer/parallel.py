"""Process start and stop, errors that all ranks agree on, and what a parallel mode decides.

A mode answers four questions, in one class: over which ranks is the vocabulary sharded, which part of the batch does
this rank see, what is its loss divided by, and how is the model wrapped. The modes without FSDP are here, those with it
in `fsdp.py`, and their names in `modes.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flce_dist import count_valid_tokens
from flce_dist.clip import clip_grad_norm_

from .optim import make_optimizer
from .schema import Config, ConfigError

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .model import LanguageModel


class SetupError(RuntimeError):
    """What went wrong before training, on whichever rank; the same on all ranks."""


@dataclass(frozen=True)
class Ranks:
    """The processes of this run."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def start(cls) -> Ranks:
        """Join the processes that a launcher started; one started by plain python is alone and needs no group.

        CPU tensors go through gloo and, where there are GPUs, CUDA tensors through NCCL, so that messages between
        the hosts (errors, file names) never need a device.
        """
        if "RANK" not in os.environ:
            return cls(0, 1, 0, 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        local_rank, local_size = (
            int(os.environ["LOCAL_RANK"]),
            int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["LOCAL_SIZE"]),
        )
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, local_size)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, by rank: one all-gather of pickled objects through gloo. Also a barrier."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def agree(self) -> Iterator[None]:
        """Run a part of the setup on all ranks; when it fails on one, raise SetupError on all of them.

        The body must not communicate: a rank that fails halfway would leave the others waiting.
        """
        problem: str | None = None
        cause: Exception | None = None
        try:
            yield
        except ConfigError as error:
            problem, cause = str(error), error
        except Exception as error:
            problem, cause = traceback.format_exc(), error
        failed = {rank: text for rank, text in enumerate(self.gather(problem)) if text is not None}
        if failed:
            first = min(failed)
            on = "" if len(failed) == self.size else f" (on rank {', '.join(map(str, failed))} of {self.size})"
            raise SetupError(f"{failed[first]}{on}") from cause

    def same_everywhere(self, name: str, values: dict[str, Any]) -> None:
        """Raise SetupError on all ranks, naming the keys, unless all hold the same values."""
        all_values = self.gather(values)
        keys = sorted({key for each in all_values for key in each})
        differing = [key for key in keys if any(each.get(key) != all_values[0].get(key) for each in all_values)]
        if differing:
            shown = "; ".join(f"{key}: {[each.get(key) for each in all_values]}" for key in differing)
            raise SetupError(f"{name}: the ranks disagree about {shown} (by rank)")


def pick_device(config: Config, ranks: Ranks) -> torch.device:
    """This rank's device. Raises ConfigError when there are too few GPUs."""
    wanted = config.parallel.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() < ranks.local_size:
        raise ConfigError(
            "parallel.device", f"{ranks.local_size} processes on this machine, but {torch.cuda.device_count()} GPUs"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


class ParallelMode:
    """What a mode decides. The defaults: the vocabulary on every rank, the same batch on all, DDP around the model."""

    def __init__(self, ranks: Ranks, config: Config):
        """Raises ConfigError: a setting that the mode cannot use."""
        self.ranks, self.config = ranks, config
        self.check()

    def check(self) -> None:
        """Raises ConfigError: a setting that the mode cannot use."""
        for key in ("tensor_size", "head"):
            if getattr(self.config.parallel, key) is not None:
                raise ConfigError(
                    f"parallel.{key}", f"is not for parallel.mode {self.config.parallel.mode}: set it to null"
                )

    def connect(self, device: torch.device) -> None:
        """Makes the mode's groups of ranks. All ranks call it together, before anything else of the mode."""

    @property
    def head_group(self) -> dist.ProcessGroup | DeviceMesh | None:
        """The ranks that share the vocabulary and see the same tokens; None when each holds all of it."""
        return None

    def place_head(self, model: LanguageModel) -> None:
        """What else is done to the head of a model that was just built. Raises ConfigError."""

    @property
    def data_rank(self) -> int:
        """Which part of the batch this rank sees, of `data_ranks`."""
        return 0

    @property
    def data_ranks(self) -> int:
        return 1

    def normalizer(self, targets: Tensor, ignore_index: int) -> Tensor:
        """What this rank's loss is divided by, for `targets` of ALL micro-steps of one optimizer step; 0-d fp32."""
        raise NotImplementedError

    def mean_loss(self, losses: Tensor) -> Tensor:
        """The loss of the whole batch from this rank's, elementwise. Of sums and of `normalizer`s alike: their ratio is
        that of all ranks' sums and counts."""
        return losses

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose forward and backward keep the ranks in step."""
        return _ddp(model) if self.ranks.size > 1 else model

    def micro_step(self, wrapped: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of one micro-step: gradients are averaged once, in the last."""
        if last or not isinstance(wrapped, DistributedDataParallel):
            return contextlib.nullcontext()
        return wrapped.no_sync()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the wrapped model."""
        return make_optimizer(model, self.config.optimizer)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-step."""
        loss.backward()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        """One optimizer step, after the backward passes of all micro-steps. Returns the norm of the gradients, 0-d."""
        most = self.config.optimizer.max_grad_norm
        norm = clip_grad_norm_(model, math.inf if most is None else most)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def whole_state(self, model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model's state dict, whole, one after the other (one all-gather for each sharded one).
        Rank 0 gets them all."""
        for name, tensor in model.causal_lm.state_dict().items():
            # A copy: with uneven shards the whole is a view of a larger buffer, which safetensors refuses to write.
            yield name, tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor

    def check_resumable(self, path: Path) -> None:
        """Raises ConfigError: a checkpoint that the mode cannot continue from."""
        from .checkpoint import DEEPSPEED_LAST  # which imports Ranks from here

        if (path / DEEPSPEED_LAST).is_file():
            raise ConfigError(
                "checkpoint.resume", f"{path} was written by parallel.mode deepspeed, which alone reads it"
            )

    def make_checkpoints(self, folder: Path) -> Checkpoints:
        from .checkpoint import Checkpoints

        return Checkpoints(folder, self.config.checkpoint.keep, self.ranks)


class TensorParallel(ParallelMode):
    """The vocabulary is sharded over all ranks; all see the same batch and hold the same body.

    The head all-reduces the gradient of the hidden states, so each rank's body gradient is already complete. DDP
    averages those equal gradients: that changes nothing but keeps the replicas bit-equal when a kernel is not
    deterministic. The sharded head is left out of it.
    """

    @property
    def head_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.ranks.size > 1 else None

    def normalizer(self, targets: Tensor, ignore_index: int) -> Tensor:
        return count_valid_tokens(targets, ignore_index).float()


class DataParallel(ParallelMode):
    """Each rank has its own part of the batch and the whole head.

    The loss is the mean over the valid tokens of all ranks and micro-steps. DDP divides the sum of the ranks'
    gradients by their number, so the normalizer is divided by it as well.
    """

    @property
    def data_rank(self) -> int:
        return self.ranks.rank

    @property
    def data_ranks(self) -> int:
        return self.ranks.size

    def normalizer(self, targets: Tensor, ignore_index: int) -> Tensor:
        return count_valid_tokens(targets, ignore_index, group=dist.group.WORLD) / self.ranks.size

    def mean_loss(self, losses: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return losses
        losses = losses.clone()
        dist.all_reduce(losses)
        return losses / self.ranks.size


def _ddp(model: nn.Module) -> DistributedDataParallel:
    """DDP over all plain parameters. Buffers (rotary frequencies) are constants: nothing to broadcast."""
    left_out = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    left_out += [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_out)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)
