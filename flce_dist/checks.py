"""Checks of the arguments of one rank; `agreement` has those of the ranks of a group."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .options import HiddenLayout, LossOptions, is_finite, to_int
from .shard import VocabShard

if TYPE_CHECKING:
    from .arguments import Given


_REMEDY = "compute the loss inside the forward of the module that owns it, as VocabParallelHead and attach_loss do"
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Shapes, dtypes and devices of the main tensors of one rank.

    Raises:
        TypeError, ValueError: with what was expected and what came.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight), ("target", target), ("bias", bias)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name != "bias"):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor is not None:
            _check_dense(name, tensor)
    if hidden.dim() < 1:
        raise ValueError("hidden must be [..., H], got a 0-d tensor")
    if hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., H] with H > 0, got {tuple(hidden.shape)}")
    if hidden.dtype not in _FLOATING:
        raise TypeError(f"hidden must be float64, float32, bfloat16 or float16, got {hidden.dtype}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(
            f"target must hold class ids (int64 or int32; soft targets are not supported), got {target.dtype}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int64 or int32, got {target.dtype}")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must have the leading dimensions of hidden, {tuple(hidden.shape[:-1])}, got {tuple(target.shape)}"
        )
    check_weight(weight, hidden.shape[-1])
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype}: cast one of them, or call "
            "under torch.autocast"
        )
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be this rank's slice, ({weight.shape[0]},), got {tuple(bias.shape)}")
        if bias.dtype != weight.dtype:
            raise TypeError(f"bias and weight must have one dtype, got {bias.dtype} and {weight.dtype}")
    devices = {t.device for t in (hidden, weight, target, bias) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"hidden, weight, target and bias must be on one device, got {sorted(map(str, devices))}")


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")


def checked_layout(hidden_layout: HiddenLayout) -> HiddenLayout:
    """
    Raises:
        ValueError: not a layout.
    """
    if hidden_layout not in get_args(HiddenLayout):
        raise ValueError(f'hidden_layout must be "replicated" or "sharded", got {hidden_layout!r}')
    return hidden_layout


def checked_count(name: str, value: object, least: int) -> int:
    """A size, numpy's too, as Python's.

    Raises:
        TypeError, ValueError: not an int, or less than `least`.
    """
    count = to_int(name, value)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    return count


def check_plain_autograd(given: Given | None) -> None:
    """
    Args:
        given: None in a compiled graph, whose tensors do not tell their tangents.

    Raises:
        NotImplementedError: under `torch.jit.trace`; a `torch.func` transform is on; or a tensor, which is named, has a
            tangent of forward-mode differentiation, and in a graph may have one.
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            "linear_cross_entropy does not work under torch.jit.trace, which would keep sizes and options of this one "
            "call as constants: use torch.compile or torch.export"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError("linear_cross_entropy does not work under torch.func transforms: use autograd")
    if forward_ad._current_level < 0:  # asking each tensor would be felt in small calls
        return
    if given is None:
        raise NotImplementedError(
            "a compiled linear_cross_entropy may not be called in a dual level of forward-mode differentiation, of "
            "which it has no derivative: leave the level, or do not compile it"
        )
    for name, tensor in given._asdict().items():
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name} is a dual tensor: linear_cross_entropy has no forward-mode derivative; take the gradients by "
                "backward or torch.autograd.grad, whose product with the tangents is the directional derivative"
            )


def check_weight(weight: Tensor, hidden_size: int) -> None:
    """
    Raises:
        ValueError: not `[rows, H]`, or freed; a weight as FSDP and ZeRO-3 leave it is named as such.
    """
    check_not_freed(weight)  # first: such a weight may have another shape too
    if weight.dim() != 2 or weight.shape[1] != hidden_size:
        raise ValueError(f"weight must be [rows, {hidden_size}], got {tuple(weight.shape)}{_left_by(weight)}")


def check_vocab_shard(vocab_shard: object) -> None:
    """
    Raises:
        TypeError: neither a `VocabShard` nor None.
    """
    if vocab_shard is not None and not isinstance(vocab_shard, VocabShard):
        raise TypeError(f"vocab_shard must be a VocabShard, got {vocab_shard!r}")


def check_own_memory(name: str, tensor: Tensor | None) -> None:
    """
    Raises:
        TypeError: a subclass that wraps other tensors, where a Triton kernel reads a tensor's memory itself.
    """
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, a wrapper without memory that the Triton kernels could read: pass "
            'the plain tensor in it, or backend="torch"'
        )


def check_not_freed(weight: Tensor) -> None:
    """
    Raises:
        ValueError: FSDP has freed the weight's memory, which its shape does not tell: it may be so in any call.
    """
    if is_freed(weight):
        raise ValueError(f"weight {tuple(weight.shape)} has no memory: FSDP has freed it; {_REMEDY}")


def is_freed(weight: Tensor) -> bool:
    """Whether its memory is gone, as FSDP frees a weight outside of the module that owns it."""
    return weight.numel() > 0 and weight.untyped_storage().nbytes() == 0


def _left_by(weight: Tensor) -> str:
    """The framework that leaves such a weight outside of the module that owns it, and the remedy."""
    if hasattr(weight, "ds_id") or hasattr(weight, "ds_shape"):
        return f": DeepSpeed ZeRO-3 has partitioned it; {_REMEDY}, or gather it around forward and backward"
    if getattr(weight, "_fsdp_flattened", False):  # FSDP1 marks the original parameters
        return f": FSDP1 has flattened and sharded it; {_REMEDY}"
    if weight.dim() == 1 or weight.numel() == 0:
        return f": a flat or empty weight is what FSDP and DeepSpeed ZeRO-3 leave behind; {_REMEDY}"
    return ""


def check_own_forward(head: nn.Module, name: str) -> None:
    """
    Raises:
        TypeError: a head that is to be replaced, or to get another forward, has one that is not its class's.
    """
    if "forward" in vars(head):
        raise TypeError(
            f"{name} has another forward than its class, set on the instance (by attach_loss?), which would be lost: "
            "take it off (detach_loss, del head.forward), and give its options here"
        )


def check_full_linear(linear: nn.Linear) -> None:
    """
    Raises:
        TypeError: not a plain `nn.Linear`, or its forward was replaced.
        ValueError: its weight is sharded or freed.
    """
    if type(linear) is not nn.Linear:
        raise TypeError(f"expected an nn.Linear, got {type(linear).__name__}: what else it computes would be left out")
    check_own_forward(linear, "the linear layer")
    check_weight(linear.weight, linear.in_features)


def tied_names(model: nn.Module, parameter: object) -> list[str]:
    """Names under which a model holds a parameter; with more than one it is tied, which a shard in one place undoes."""
    return [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]


def check_shard(weight: Tensor, shard: VocabShard, rank: int, world_size: int, explicit: bool) -> None:
    """The weight has the rows of its shard.

    Raises:
        ValueError: comparing the rows.
    """
    rows = weight.shape[0]
    if rows == shard.num_rows:
        return
    if explicit:
        raise ValueError(f"weight has {rows} rows, but vocab_shard {shard} has {shard.num_rows}{_left_by(weight)}")
    message = (
        f"weight has {rows} rows, but rank {rank} of {world_size} holds {shard.num_rows} of vocab_size="
        f"{shard.vocab_size} (rows [{shard.start}, {shard.stop}))"
    )
    if rows == shard.vocab_size:
        message += f": this is the full weight, whose {world_size} copies have {rows * world_size} rows; pass the shard"
    elif rows == 0:
        message += _left_by(weight)
    else:
        message += "; pass vocab_shard=VocabShard(vocab_size, start, stop) for another split or for padded rows"
    raise ValueError(message)


def check_not_empty(weight: Tensor) -> None:
    """
    Raises:
        ValueError: an unsharded weight without rows.
    """
    if weight.shape[0] == 0:
        raise ValueError(f"weight has no rows, {tuple(weight.shape)}{_left_by(weight)}")


def check_vector(name: str, value: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """A float tensor of known shape on the right device that does not require grad (class_weight, token_weight).

    Raises:
        TypeError, ValueError: naming it.
    """
    if isinstance(value, DTensor):
        raise TypeError(f"{name} must be a plain tensor, the whole of it on every rank, got a DTensor")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {getattr(value, 'dtype', type(value).__name__)}")
    _check_dense(name, value)
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")
    check_no_grad(name, value)


def check_no_grad(name: str, value: object) -> None:
    """
    Raises:
        ValueError: a tensor that requires grad and gets none.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        raise no_grad_error(name)


def no_grad_error(name: str) -> ValueError:
    return ValueError(f"{name} may not require grad: no gradient for it is computed; pass {name}.detach()")


def check_normalizer(value: Tensor | float, device: torch.device) -> None:
    """
    Raises:
        TypeError, ValueError: not a number or plain 0-d tensor on the inputs' device or the CPU; a bool, or a tensor of
            bool or 16 bits; a number that is negative or not finite. A tensor's value is not read, wherever it is.
    """
    if isinstance(value, DTensor):
        raise TypeError("normalizer must be a number or a plain 0-d tensor, got a DTensor")
    if isinstance(value, Tensor):
        check_no_grad("normalizer", value)
        if value.dtype == torch.bool:
            raise TypeError("normalizer must be a number or a 0-d tensor, got a bool tensor")
        if value.dim() != 0 or value.is_complex():
            raise ValueError(
                f"normalizer must be a number or a real 0-d tensor, got {value.dtype} of shape {tuple(value.shape)}"
            )
        if value.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"normalizer must not be a {value.dtype} tensor, which cannot count tokens: a mixed-precision wrapper "
                "casts the floating-point arguments of a module's forward; pass an int64 tensor (as count_valid_tokens "
                "gives it) or a Python number"
            )
        if value.device.type not in (device.type, "cpu"):
            raise ValueError(f"normalizer must be on {device} or the CPU, got {value.device}")
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"normalizer must be a number or a 0-d tensor, got {value!r}")
    elif not is_finite(value) or value < 0:
        raise ValueError(f"normalizer must be finite in float32 and not negative, got {value}")


def check_dtypes(options: LossOptions, dtype: torch.dtype) -> None:
    """The dtypes of intermediate results are those of the tensors, or float32 for 16-bit tensors.

    Raises:
        ValueError: naming the option.
    """
    allowed = (dtype, torch.float32) if dtype in (torch.bfloat16, torch.float16) else (dtype,)
    for name in ("accum_dtype", "logits_dtype", "hidden_grad_reduce_dtype"):
        value = getattr(options, name)
        if value is not None and value not in allowed:
            expected = " or ".join(str(d) for d in dict.fromkeys(allowed))
            raise ValueError(f"{name} must be None or {expected} for {dtype} tensors, got {value}")
