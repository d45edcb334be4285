"""Launching a Triton kernel with little host time.

`kernel[grid](...)` looks for the compiled variant anew in each launch, which takes the host three to five times as long
as launching a variant that is known (26 to 45 µs and 9 µs on machines with an H200, Triton 3.6). What is changed of
Triton's own settings after a variant's first launch is not seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

_variants: dict[Hashable, Any] = {}


def launch(kernel: Any, num_programs: int, *args: Tensor | float | None, num_warps: int, **constants: Any) -> None:
    """Launches `num_programs` programs of a `triton.jit` kernel on the current stream of the first argument's device,
    which is the current one.

    Args:
        args: the kernel's parameters, but for those that are `tl.constexpr`: `constants`, which come last there.
    """
    first = args[0]
    assert isinstance(first, Tensor)
    values, kinds = passed(args)
    key = (kernel.fn, first.device, num_warps, *constants.values(), *kinds)
    variant = _variants.get(key)
    if variant is not None:
        variant[(num_programs, 1, 1)](*values, *constants.values())
        return
    assert list(constants) == kernel.arg_names[len(args) :]
    variant = kernel[(num_programs,)](*args, **constants, num_warps=num_warps)
    if isinstance(kernel, triton.JITFunction):  # the interpreter compiles nothing
        _variants[key] = variant


def passed(args: Sequence[Tensor | float | None]) -> tuple[list[float | None], list[Hashable]]:
    """Arguments as a known variant takes them, and all of them that Triton may compile another variant for.

    A tensor's address spares Triton to ask for it, and then the driver whether it is one.
    """
    values: list[float | None] = []
    kinds: list[Hashable] = []
    on_amd = torch.version.hip is not None
    for arg in args:
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            values.append(address)
            kinds += (arg.dtype, address % 16)
            if on_amd:  # its compiler addresses what takes less than 2 GiB with 32 bits
                kinds.append(arg.untyped_storage().nbytes() < 2**31)
            continue
        values.append(arg)
        if isinstance(arg, int):
            kinds += (arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31)
        else:
            kinds.append(None if arg is None else float)
    return values, kinds
