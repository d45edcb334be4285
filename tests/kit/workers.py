"""A pool of gloo worker processes that lives as long as the test session.

Starting processes and process groups costs seconds, a job on running ones costs milliseconds. A job is a top-level
function `fn(ctx, *args)`, pickled by name, that runs on ranks 0..world-1 with `ctx.group` a group of exactly those.
After every job the ranks compare a counter with one collective, so that a rank that issued one collective more or
fewer than its neighbours fails the test that did it and not a later one.
"""

import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MAX_WORLD = 4
JOB_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
# One group for each world size, and the subsets that the tests of process groups need. new_group is a collective of
# all workers, so they are all made once at the start.
RANK_SETS = ((0,), (1,), (2,), (3,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2), (1, 3), (2, 3), (1, 0))
UNSORTED: dict[str, Any] = {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
"""Without it torch sorts the ranks of a group."""
needs_unsorted = pytest.mark.skipif(not UNSORTED, reason="the ranks of a group have an order from torch 2.13 on")


@dataclass(frozen=True)
class Context:
    """What a job is told about where it runs."""

    rank: int
    world: int
    group: Any
    groups: Mapping[tuple[int, ...], Any] = field(repr=False)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def mesh(self, *shape: int, names: Sequence[str]) -> DeviceMesh:
        """A mesh of the job's ranks, of one or two dimensions, over the pool's groups. A gloo group that a test makes
        for itself wakes up a hundred times a second for the rest of the session."""
        if len(shape) == 1:
            return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=tuple(names))
        ranks = torch.arange(self.world).reshape(shape)
        place = [int(i) for i in (ranks == self.rank).nonzero()[0]]
        lines = (tuple(ranks[:, place[1]].tolist()), tuple(ranks[place[0]].tolist()))
        return DeviceMesh.from_group(
            [self.groups[line] for line in lines], self.device.type, mesh=ranks, mesh_dim_names=tuple(names)
        )


@dataclass(frozen=True)
class RemoteError:
    """An exception of a worker: the names of its classes (most derived first), its message and its traceback."""

    classes: tuple[str, ...]
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"{self.classes[0]}: {self.message}"


@dataclass(frozen=True)
class Outcome:
    value: Any
    error: RemoteError | None


class WorkerFailed(AssertionError):
    """A job raised on at least one rank; the message holds the tracebacks."""


class WorkerHung(AssertionError):
    """A job did not end in time on at least one rank; the message names the ranks and where they stood."""


class Pool:
    """`size` persistent ranks, whose default group has all of them. `env` is set in the workers before anything of the
    package is imported."""

    def __init__(
        self, env: Mapping[str, str] | None = None, size: int = MAX_WORLD, timeout: float = JOB_TIMEOUT_S
    ) -> None:
        self._env = dict(env or {})
        self._size = size
        self._timeout = timeout
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count(1)

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run fn(ctx, *args) on `world` ranks and return the results in rank order; raise if any rank raised."""
        outcomes = self.outcomes(world, fn, *args, timeout=timeout)
        failed = [f"--- rank {r}\n{o.error.traceback}" for r, o in enumerate(outcomes) if o.error is not None]
        if failed:
            raise WorkerFailed(f"{fn.__qualname__} failed on {len(failed)} of {world} ranks\n" + "\n".join(failed))
        return [o.value for o in outcomes]

    def outcomes(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Outcome]:
        """As `run`, but a rank's exception is its outcome: for tests of what ALL ranks raise."""
        if not self._processes:
            self._start()
        number = next(self._numbers)
        job = pickle.dumps((number, world, fn, args))
        for connection in self._connections[:world]:
            connection.send_bytes(job)
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        replies = self._collect(world, fn, deadline, "outcome", {})
        in_step = self._collect(world, fn, deadline, "in step", replies)
        outcomes = [replies[rank] for rank in range(world)]
        if not all(in_step.values()):
            self.close()
            errors = "; ".join(f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None)
            raise WorkerFailed(f"{fn.__qualname__}: the ranks issued different collectives. {errors}")
        return outcomes

    def _collect(
        self, world: int, fn: Callable[..., Any], deadline: float, what: str, outcomes: Mapping[int, Outcome]
    ) -> dict[int, Any]:
        rank_of = {self._connections[rank]: rank for rank in range(world)}
        replies: dict[int, Any] = {}
        while rank_of:
            ready = wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                message = self._describe_hang(fn, sorted(rank_of.values()), what, replies, outcomes)
                self.close()
                raise WorkerHung(message)
            for connection in ready:
                rank = rank_of.pop(connection)  # type: ignore[arg-type]
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self.close()
                    raise WorkerFailed(f"{fn.__qualname__}: the process of rank {rank} died") from None
        return replies

    def _describe_hang(
        self,
        fn: Callable[..., Any],
        hung: list[int],
        what: str,
        replies: Mapping[int, Any],
        outcomes: Mapping[int, Outcome],
    ) -> str:
        assert self._folder is not None
        lines = [f"{fn.__qualname__}: rank(s) {hung} gave no {what} in time"]
        known = {**outcomes, **{r: o for r, o in replies.items() if isinstance(o, Outcome)}}
        lines += [f"rank {rank} raised {o.error}" for rank, o in sorted(known.items()) if o.error is not None]
        for rank in hung:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        for rank in hung:
            with open(_stack_path(self._folder.name, rank)) as stack:
                lines.append(f"--- rank {rank}\n{stack.read()}")
        return "\n".join(lines)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        # The fork server has torch imported already: a worker starts in milliseconds, and it is forked from a process
        # that never ran an operation.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", __name__])
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._size, self._folder.name, self._env, theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(self._size, _work, time.monotonic() + START_TIMEOUT_S, "start", {})

    def close(self) -> None:
        """End the processes (also hung ones); the next job starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def fresh_group(ctx: Context, ranks: list[int]) -> Any:
    """A new group, for tests of what happens on a group's first call. A job on all MAX_WORLD ranks must call it on
    each; ranks outside of the group get None."""
    assert ctx.world == MAX_WORLD, "new_group is a collective of all workers"
    group = dist.new_group(ranks)
    return group if ctx.rank in ranks else None


def _stack_path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stack-{rank}")


def _exit_when_orphaned() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(rank: int, size: int, folder: str, env: Mapping[str, str], connection: Connection) -> None:
    os.environ.update(env, GLOO_SOCKET_IFNAME="lo")
    _exit_when_orphaned()
    faulthandler.register(signal.SIGUSR1, file=open(_stack_path(folder, rank), "w"), all_threads=False)  # noqa: SIM115
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups = {}
    for ranks in dict.fromkeys([*(ranks for ranks in RANK_SETS if max(ranks) < size), tuple(range(size))]):
        group = dist.new_group(list(ranks), **UNSORTED)
        if rank in ranks:
            groups[ranks] = group
    connection.send_bytes(pickle.dumps(True))
    while True:
        try:
            number, world, fn, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            # A gloo process that leaves by the ordinary way can abort in a destructor.
            os._exit(0)
        context = Context(rank, world, groups[tuple(range(world))], groups)
        known = len(dist.distributed_c10d._world.pg_map)
        outcome = _outcome(fn, context, args)
        if world < size and len(dist.distributed_c10d._world.pg_map) != known:
            message = f"{fn.__qualname__} made a group on some of the workers; the next on all of them would hang"
            outcome = pickle.dumps(Outcome(None, RemoteError(("AssertionError",), message, message)))
        connection.send_bytes(outcome)
        connection.send_bytes(pickle.dumps(_in_step(number, context)))


def _outcome(fn: Callable[..., Any], context: Context, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(Outcome(fn(context, *args), None))
    except Exception as error:
        classes = tuple(c.__name__ for c in type(error).__mro__)
        return pickle.dumps(Outcome(None, RemoteError(classes, str(error), traceback.format_exc())))


def _in_step(number: int, context: Context) -> bool:
    if context.world == 1:
        return True
    probe = torch.tensor([number])
    dist.all_reduce(probe, group=context.group)
    return probe.item() == number * context.world
