"""Process groups of a run, and its end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from leave import exit_process

from .workload import Place

TIMEOUT = timedelta(minutes=3)
"""After which ranks that wait for one that failed alone give up."""


@dataclass(frozen=True)
class BenchRanks:
    """This process among those of a run. `groups` holds the group of the first n ranks by n, for ranks in it."""

    rank: int
    size: int
    device: torch.device
    groups: dict[int, dist.ProcessGroup]

    @classmethod
    def start(cls, device_type: str) -> BenchRanks:
        """Joins the others when started by torchrun; collective."""
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        device = torch.device("cpu")
        if device_type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        groups: dict[int, dist.ProcessGroup] = {}
        if size > 1:
            backend = "nccl" if device_type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT, device_id=device if device_type == "cuda" else None)
            for n in (n for n in range(2, size + 1) if size % n == 0):
                group = dist.new_group(list(range(n)))
                if rank < n:
                    groups[n] = group
        return cls(rank, size, device, groups)

    @classmethod
    def start_several(cls, device_type: str) -> BenchRanks:
        """`start`; a process that is alone is ended with code 2."""
        ranks = cls.start(device_type)
        if ranks.size == 1:
            print("start it with torchrun on two ranks or more", file=sys.stderr)
            raise SystemExit(2)
        return ranks

    @property
    def place(self) -> Place:
        """That of all ranks."""
        return Place(self.device, self.first(self.size))

    def first(self, num_ranks: int) -> dist.ProcessGroup | None:
        """The group of the first ranks; None for one."""
        return self.groups.get(num_ranks)

    def say(self, text: str) -> None:
        """Prints it, on the first rank."""
        if self.rank == 0:
            print(text, flush=True)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def run_and_exit(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> None:
    """Runs main and ends the process with its code, several ranks by `exit_process`."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(main(arguments))
    try:
        code = main(arguments)
        if dist.is_initialized():
            dist.barrier()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_process(code)
