"""Which implementation of the row kernels a call uses. Triton is imported here and only when it is chosen."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from types import ModuleType

import torch


@functools.cache
def row_kernels(backend: str, device: torch.device) -> ModuleType:
    """The module with the row kernels (contract: `kernels.spec`) for "auto", "triton" or "torch".

    Raises:
        ValueError: "triton" where it cannot run, with the reason.
    """
    if backend == "torch" or (backend == "auto" and device.type in ("cpu", "meta")):
        return importlib.import_module(".kernels.torch_rows", __package__)
    reason = _why_no_triton(device)
    if reason is None:
        return importlib.import_module(".kernels.triton_rows", __package__)
    if backend == "triton":
        raise ValueError(f'backend="triton" cannot run: {reason}')
    warnings.warn(f"flce_dist uses its torch row kernels, which are slower: {reason}", stacklevel=2)
    return importlib.import_module(".kernels.torch_rows", __package__)


def why_no_interpreter() -> str | None:
    """Why the installed Triton cannot interpret its kernels; None if it can."""
    import triton

    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs numpy, which is not installed"
    import numpy

    if _version(triton) < (3, 7) and _version(numpy) >= (2, 4):
        return "the interpreter of Triton 3.6 needs a numpy before 2.4: install that, or a newer triton"
    return None


def _version(package: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in package.__version__.split(".")[:2])


def _why_no_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    version = _version(triton)
    if version < (3, 6):
        return f"triton 3.6 or newer is needed, {triton.__version__} is installed"
    if device.type == "cpu":
        if not triton.knobs.runtime.interpret:
            return "tensors on CPU need Triton's interpreter (set TRITON_INTERPRET=1 before the first import of triton)"
        return why_no_interpreter()
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return f"the GPU's compute capability is {torch.cuda.get_device_capability(device)}, 7.0 is needed"
    return None
