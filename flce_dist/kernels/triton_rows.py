"""The row kernels in Triton: one program a row, which passes over the row's tiles. The contract is in `spec`.

Rows of the logits start at multiples of `plan.ROW_ALIGNMENT` elements, so tiles are loaded up to the padded end of the
row with wide loads, and columns past `num_columns` are masked by value. Scalars that differ between calls are not
specialised on: over all shapes a kernel is compiled once for each of the few tile sizes of `_launch_settings`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .spec import RowSpec, RowWeights, stats_dtype
from .triton_primitives import MAX_ROW, OWNED_ROW, SUM_ROW, TARGET_ROW, grad_row, scan_row

_PER_CALL = ["stats_stride", "num_columns", "first_column"]
_UNALIGNED = ["stats", "target", "target_weight", "uniform_weight", "square_weight", "column_weight"]


@triton.jit(do_not_specialize=_PER_CALL, do_not_specialize_on_alignment=_UNALIGNED)
def _row_stats_kernel(
    logits, logits_stride, stats, stats_stride, target, column_weight, num_columns, first_column,
    SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    scan_row(
        logits + i * logits_stride, stats + i, stats_stride, tl.load(target + i), column_weight, num_columns,
        first_column, SOFTCAP, WEIGHTED, WEIGHT, ARGMAX, ENTROPY, ACC, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_PER_CALL, do_not_specialize_on_alignment=_UNALIGNED)
def _row_grad_kernel(
    logits, logits_stride, grad, grad_stride, stats, stats_stride, target, target_weight, uniform_weight,
    square_weight, column_weight, num_columns, SOFTCAP: tl.constexpr, WEIGHT: tl.constexpr,
    TOKEN_SCALING: tl.constexpr, IN_PLACE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    stats += i
    weight_sum = 0.0
    if WEIGHT >= 0:
        weight_sum = tl.load(stats + WEIGHT * stats_stride)
    grad_row(
        logits + i * logits_stride, grad + i * grad_stride, tl.load(target + i),
        tl.load(stats + MAX_ROW * stats_stride), tl.load(stats + SUM_ROW * stats_stride),
        tl.load(stats + TARGET_ROW * stats_stride), weight_sum, tl.load(target_weight + i),
        uniform_weight, square_weight, i, column_weight, num_columns,
        SOFTCAP, TOKEN_SCALING, IN_PLACE, ACC, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_PER_CALL, do_not_specialize_on_alignment=_UNALIGNED)
def _row_stats_grad_kernel(
    logits, logits_stride, grad, grad_stride, stats, stats_stride, target, target_weight, uniform_weight,
    square_weight, column_weight, num_columns, SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, TOKEN_SCALING: tl.constexpr, IN_PLACE: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * logits_stride
    t = tl.load(target + i)
    m, s, at_target, weight_sum = scan_row(
        row, stats + i, stats_stride, t, column_weight, num_columns, 0,
        SOFTCAP, WEIGHTED, WEIGHT, ARGMAX, ENTROPY, ACC, BLOCK,
    )  # fmt: skip
    # The target's logit is read by every thread above and overwritten below.
    tl.debug_barrier()
    grad_row(
        row, grad + i * grad_stride, t, m, s, at_target, weight_sum, tl.load(target_weight + i),
        uniform_weight, square_weight, i, column_weight, num_columns,
        SOFTCAP, TOKEN_SCALING, IN_PLACE, ACC, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_ranks", "num_rows"])
def _combine_kernel(
    stats, out, num_ranks, num_rows, NUM_STATS: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_rows
    m = tl.full((BLOCK,), float("-inf"), ACC)
    for rank in range(num_ranks):
        m = tl.maximum(m, tl.load(stats + (rank * NUM_STATS + MAX_ROW) * num_rows + i, mask=mask, other=0.0))
    s = tl.zeros((BLOCK,), ACC)
    at_target = tl.zeros((BLOCK,), ACC)
    owned = tl.zeros((BLOCK,), ACC)
    weighted_sum = tl.zeros((BLOCK,), ACC)
    weight_sum = tl.zeros((BLOCK,), ACC)
    entropy = tl.zeros((BLOCK,), ACC)
    best = tl.full((BLOCK,), float("inf"), ACC)
    for rank in range(num_ranks):
        base = stats + rank * NUM_STATS * num_rows + i
        rank_m = tl.load(base + MAX_ROW * num_rows, mask=mask, other=0.0)
        rank_s = tl.load(base + SUM_ROW * num_rows, mask=mask, other=0.0)
        # Equal maxima differ by 0 even when both are -inf; a rank without columns has -inf and shifts to -inf.
        shift = tl.where(rank_m == m, 0.0, rank_m - m)
        s += rank_s * tl.exp(shift)
        at_target += tl.load(base + TARGET_ROW * num_rows, mask=mask, other=0.0)
        owned += tl.load(base + OWNED_ROW * num_rows, mask=mask, other=0.0)
        if WEIGHTED >= 0:
            rank_weight = tl.load(base + WEIGHT * num_rows, mask=mask, other=0.0)
            weight_sum += rank_weight
            weighted_sum += tl.load(base + WEIGHTED * num_rows, mask=mask, other=0.0)
            weighted_sum += tl.where(rank_weight == 0.0, 0.0, rank_weight * shift)
        if ARGMAX >= 0:
            rank_best = tl.load(base + ARGMAX * num_rows, mask=mask, other=0.0)
            best = tl.where(rank_m == m, tl.minimum(best, rank_best), best)
        if ENTROPY >= 0:
            rank_entropy = tl.load(base + ENTROPY * num_rows, mask=mask, other=0.0)
            entropy += tl.where(rank_s == 0.0, 0.0, (rank_entropy + rank_s * shift) * tl.exp(shift))
    out += i
    tl.store(out + MAX_ROW * num_rows, m, mask=mask)
    tl.store(out + SUM_ROW * num_rows, s, mask=mask)
    tl.store(out + TARGET_ROW * num_rows, at_target, mask=mask)
    tl.store(out + OWNED_ROW * num_rows, owned, mask=mask)
    if WEIGHTED >= 0:
        tl.store(out + WEIGHTED * num_rows, weighted_sum, mask=mask)
        tl.store(out + WEIGHT * num_rows, weight_sum, mask=mask)
    if ARGMAX >= 0:
        tl.store(out + ARGMAX * num_rows, best, mask=mask)
    if ENTROPY >= 0:
        tl.store(out + ENTROPY * num_rows, entropy, mask=mask)


@triton.jit(do_not_specialize=["num_elements", "num_programs"])
def _scale_kernel(x, factor, host_factor, num_elements, num_programs, ACC: tl.constexpr, BLOCK: tl.constexpr):
    f = tl.load(factor).to(ACC) * host_factor
    if f != 1.0:
        step = num_programs.to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_elements, step):
            i = start + tl.arange(0, BLOCK)
            value = tl.load(x + i, mask=i < num_elements).to(ACC) * f
            tl.store(x + i, value.to(x.dtype.element_ty), mask=i < num_elements)


def _launch_settings(num_columns: int) -> dict[str, int]:
    """Tile and warps from the number of columns: one of three tiles, 8 columns a thread (fewer on 64-wide warps). On an
    H200 many warps with one wide load each beat few with more, in all three kernels and for all widths."""
    block = 512 if num_columns <= 512 else 2048 if num_columns <= 2048 else 4096
    return {"BLOCK": block, "num_warps": block // 256}


def _acc(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if stats_dtype(dtype) == torch.float64 else tl.float32


def _stat_rows(spec: RowSpec) -> dict[str, int]:
    return {
        "WEIGHTED": spec.weighted_sum_row,
        "WEIGHT": spec.weight_sum_row,
        "ARGMAX": spec.argmax_row,
        "ENTROPY": spec.entropy_row,
    }


def row_stats(
    logits: Tensor, target: Tensor, spec: RowSpec, column_weight: Tensor | None = None, first_column: int = 0
) -> Tensor:
    num_rows, num_columns = logits.shape
    stats = logits.new_empty(spec.num_stats, num_rows, dtype=stats_dtype(logits.dtype))
    _row_stats_kernel[(num_rows,)](
        logits, logits.stride(0), stats, num_rows, target, column_weight, num_columns, first_column,
        SOFTCAP=spec.softcap, ACC=_acc(logits.dtype), **_stat_rows(spec), **_launch_settings(num_columns),
    )  # fmt: skip
    return stats


def combine(stats: Tensor, spec: RowSpec) -> Tensor:
    num_ranks, num_stats, num_rows = stats.shape
    out = torch.empty_like(stats[0])
    _combine_kernel[(triton.cdiv(num_rows, 128),)](
        stats, out, num_ranks, num_rows, NUM_STATS=num_stats, ACC=_acc(stats.dtype), BLOCK=128, **_stat_rows(spec),
        num_warps=2,
    )  # fmt: skip
    return out


def row_grad_(
    logits: Tensor,
    grad: Tensor,
    stats: Tensor,
    target: Tensor,
    weights: RowWeights,
    spec: RowSpec,
    column_weight: Tensor | None = None,
) -> None:
    num_rows, num_columns = logits.shape
    _row_grad_kernel[(num_rows,)](
        logits, logits.stride(0), grad, grad.stride(0), stats, stats.stride(0), target, *weights, column_weight,
        num_columns, SOFTCAP=spec.softcap, WEIGHT=spec.weight_sum_row, TOKEN_SCALING=spec.token_scaling,
        IN_PLACE=grad.dtype == logits.dtype, ACC=_acc(logits.dtype), **_launch_settings(num_columns),
    )  # fmt: skip


def row_stats_grad_(
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    weights: RowWeights,
    spec: RowSpec,
    column_weight: Tensor | None = None,
) -> Tensor:
    num_rows, num_columns = logits.shape
    stats = logits.new_empty(spec.num_stats, num_rows, dtype=stats_dtype(logits.dtype))
    _row_stats_grad_kernel[(num_rows,)](
        logits, logits.stride(0), grad, grad.stride(0), stats, num_rows, target, *weights, column_weight, num_columns,
        SOFTCAP=spec.softcap, TOKEN_SCALING=spec.token_scaling, IN_PLACE=grad.dtype == logits.dtype,
        ACC=_acc(logits.dtype), **_stat_rows(spec), **_launch_settings(num_columns),
    )  # fmt: skip
    return stats


def scale_(tensor: Tensor, factor: Tensor, host_factor: float = 1.0) -> None:
    """`tensor *= factor * host_factor` without a read of `factor` by the host, and without a pass over `tensor` when
    the product is 1. `tensor` is contiguous."""
    num_elements = tensor.numel()
    if num_elements == 0:
        return
    num_programs = min(triton.cdiv(num_elements, 8192), 2048)
    _scale_kernel[(num_programs,)](
        tensor, factor, host_factor, num_elements, num_programs, ACC=_acc(tensor.dtype), BLOCK=8192, num_warps=8
    )
