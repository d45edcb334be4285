"""Cases of the kit on a device, worker processes with one GPU each, and what several of these tests ask of CUDA."""

import gc
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit import workers
from tests.kit.cases import Case, Result, local_tokens, loss_arguments, make_inputs
from tests.kit.workers import Context, Pool

NUM_WORKERS = 2
GPU_BACKEND = "cpu:gloo,cuda:nccl"
NEEDS_TWO_DEVICES = "needs two CUDA devices: run `pytest -m gpu` on a machine with them"


def device_arguments(
    case: Case, device: torch.device, ctx: Context | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """`cases.loss_arguments` on a device."""
    rank, group = (0, None) if ctx is None or case.world == 1 else (ctx.rank, ctx.group)
    (hidden, weight, target), keywords = loss_arguments(case, rank, group)
    keywords = {name: to_device(value, device) for name, value in keywords.items()}
    return (to_device(hidden, device), to_device(weight, device), target.to(device)), keywords


def extra_peak(step: Callable[[], object], *leaves: Tensor) -> int:
    """Bytes above its inputs that a step takes at its peak; its first call allocates the workspaces of libraries."""
    step()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor on the device; a leaf that requires grad stays one."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def run_on(device: torch.device, case: Case, ctx: Context | None = None) -> Result:
    """`cases.run_case` on a device; the result is on the CPU, where it can be judged."""
    import flce_dist

    (hidden, weight, target), keywords = device_arguments(case, device, ctx)
    output = flce_dist.linear_cross_entropy(hidden, weight, target, **keywords)
    loss = output.loss if case.aux else output
    upstream = make_inputs(case).upstream
    if case.reduction == "none":
        upstream = upstream[local_tokens(case, 0 if ctx is None else ctx.rank)]
    loss.backward(upstream.to(loss))
    bias = keywords.get("bias")
    aux = {name: getattr(output, name).detach().cpu() for name in case.aux}

    def grad(leaf: Tensor | None) -> Tensor | None:
        return None if leaf is None or leaf.grad is None else leaf.grad.cpu()

    return Result(loss.detach().cpu(), grad(hidden), grad(weight), grad(bias), aux)


@contextmanager
def no_host_synchronisation() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(step: Callable[[], Any], warm_up_calls: int = 3) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `step`, captured after some calls on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up_calls):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread asks for the state of events meanwhile, which a capture of all threads would forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


def free_memory() -> None:
    """Returns what other tests left in the caching allocator, before memory is measured."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def kernel_names(step: Callable[[], Any]) -> list[str]:
    """Names of the kernels that one call of `step` launches, in order of time."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    cuda = [e for e in found.events() if e.device_type == on_gpu and not e.is_user_annotation]
    return [event.name for event in sorted(cuda, key=lambda event: event.time_range.start)]


class DevicePool(Pool):
    """The kit's pool with ranks that have a GPU each and talk over NCCL, and over gloo about tensors that are offloaded
    to the CPU; with backend "gloo" it is one of the CPU."""

    def __init__(
        self, backend: str = GPU_BACKEND, env: Mapping[str, str] | None = None, size: int = NUM_WORKERS
    ) -> None:
        super().__init__(env, size)
        self._backend = backend

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        context = workers.multiprocessing.get_context("spawn")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._size, self._folder.name, self._backend, self._env, theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(self._size, _work, time.monotonic() + workers.START_TIMEOUT_S, "start", {})


def _work(rank: int, size: int, folder: str, backend: str, env: Mapping[str, str], connection: Any) -> None:
    os.environ.update(env, GLOO_SOCKET_IFNAME="lo")
    workers._exit_when_orphaned()
    stack = open(workers._stack_path(folder, rank), "w")  # noqa: SIM115
    workers.faulthandler.register(workers.signal.SIGUSR1, file=stack, all_threads=False)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == GPU_BACKEND else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, device_id=device if device.type == "cuda" else None
    )
    ranks = tuple(range(size))
    groups = {ranks: dist.new_group(list(ranks))}
    connection.send_bytes(pickle.dumps(True))
    while True:
        try:
            number, world, fn, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            # As in the kit's workers: no destructors of process groups.
            os._exit(0)
        context = Context(rank, world, groups[ranks], groups, device)
        connection.send_bytes(workers._outcome(fn, context, args))
        connection.send_bytes(pickle.dumps(_in_step(number, context)))


def _in_step(number: int, ctx: Context) -> bool:
    probe = torch.tensor([number], device=ctx.device)
    dist.all_reduce(probe, group=ctx.group)
    return bool(probe.item() == number * ctx.world)
