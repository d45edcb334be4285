"""What ran: the operations of a block in order, its collectives, and the storages it allocated.

Collectives are dispatcher operations (namespace c10d), so they are seen whatever Python name called them, and their
place among the matrix products is known.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "barrier": "barrier",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
}
MATRIX_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul")


@dataclass(frozen=True)
class Event:
    """One operation: its name without namespace (collectives by their usual name) and its tensor arguments."""

    name: str
    is_collective: bool
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


class Trace(TorchDispatchMode):
    """Records operations inside `with Trace() as trace:`, backward passes on the CPU included."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.allocated: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        namespace, _, name = func._schema.name.partition("::")
        is_collective = namespace == "c10d"
        self.events.append(
            Event(
                COLLECTIVES[name] if is_collective else name,
                is_collective,
                tuple(tuple(t.shape) for t in tensors),
                tuple(t.dtype for t in tensors),
            )
        )
        known = {t.untyped_storage()._cdata for t in tensors}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                self.allocated.append((leaf.untyped_storage().nbytes(), f"{name} -> {tuple(leaf.shape)} {leaf.dtype}"))
        return result

    @property
    def collectives(self) -> list[str]:
        return [e.name for e in self.events if e.is_collective]

    @property
    def matrix_products(self) -> list[Event]:
        return [e for e in self.events if e.name in MATRIX_PRODUCTS]

    @property
    def largest_allocation(self) -> tuple[int, str]:
        """Bytes of the largest new storage, and the operation that made it."""
        return max(self.allocated, default=(0, "nothing"))

    def allocations_of(self, num_bytes: int) -> list[str]:
        """The operations that allocated at least `num_bytes` in one storage."""
        return [what for size, what in self.allocated if size >= num_bytes]
