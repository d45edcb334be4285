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

from .spec import MAX, OWNED, SUM, TARGET, RowSpec, RowWeights, stats_dtype

_MAX, _SUM, _TARGET, _OWNED = (tl.constexpr(row) for row in (MAX, SUM, TARGET, OWNED))
_ALIGN = tl.constexpr(16)
_LOWEST_ID_START = tl.constexpr(2**30)


@triton.jit
def _tanh(x):
    # No tanh that both the GPU and the interpreter know. Near 0 the exponential forms lose digits.
    u = tl.exp(-2.0 * tl.abs(x))
    if x.dtype == tl.float64:
        # expm1(y) = (u - 1) * y / log(u) with u = exp(y), where rounding errors of u cancel (Kahan).
        near = (u - 1.0) * (-2.0 * tl.abs(x)) / tl.log(tl.where((u == 1.0) | (u == 0.0), 0.5, u))
        expm1 = tl.where(u == 1.0, -2.0 * tl.abs(x), tl.where(u == 0.0, -1.0, near))
        magnitude = -expm1 / (2.0 + expm1)
        return tl.where(x < 0.0, -magnitude, magnitude)
    else:
        y = x * x
        series = 1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.05396825 + y * 0.02186949)))
        far = (1.0 - u) / (1.0 + u)
        return tl.where(tl.abs(x) < 0.3, x * series, tl.where(x < 0.0, -far, far))


@triton.jit
def _load_tile(row, columns, num_columns, padded, SOFTCAP: tl.constexpr, ACC: tl.constexpr):
    z = tl.load(row + columns, mask=columns < padded, other=0.0).to(ACC)
    if SOFTCAP is not None:
        z = SOFTCAP * _tanh(z / SOFTCAP)
    return tl.where(columns < num_columns, z, float("-inf"))


@triton.jit
def _scan_row(
    row, out, out_stride, target, column_weight, num_columns, first_column,
    SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of one row to `out`; returns its max, sum, target logit and sum of column weights."""
    m = tl.full((), float("-inf"), ACC)
    s = tl.full((), 0.0, ACC)
    weighted_sum = tl.full((), 0.0, ACC)
    weight_sum = tl.full((), 0.0, ACC)
    entropy = tl.full((), 0.0, ACC)
    best = tl.full((), _LOWEST_ID_START, tl.int32)
    padded = tl.cdiv(num_columns, _ALIGN) * _ALIGN
    for start in range(0, padded, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = _load_tile(row, columns, num_columns, padded, SOFTCAP, ACC)
        tile_max = tl.max(z, 0)
        if ARGMAX >= 0:
            tile_best = tl.min(tl.where((z == tile_max) & (columns < num_columns), columns, _LOWEST_ID_START), 0)
            best = tl.where((tile_max > m) | (best == _LOWEST_ID_START), tile_best, best)
        new_m = tl.maximum(m, tile_max)
        # A row of nothing but -inf so far keeps max -inf and sum 0: shifting it by -inf would make nan.
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        rescale = tl.where(m == float("-inf"), 0.0, m - shift)
        e = tl.exp(z - shift)
        if ENTROPY >= 0:
            entropy = (entropy + rescale * s) * tl.exp(rescale) + tl.sum(tl.where(e > 0.0, (z - shift) * e, 0.0), 0)
        if WEIGHTED >= 0:
            weighted_sum += rescale * weight_sum
            if column_weight is None:
                weighted_sum += tl.sum(tl.where(columns < num_columns, z - shift, 0.0), 0)
                weight_sum += tl.sum((columns < num_columns).to(ACC), 0)
            else:
                c = tl.load(column_weight + columns, mask=columns < num_columns, other=0.0).to(ACC)
                weighted_sum += tl.sum(tl.where(columns < num_columns, c * (z - shift), 0.0), 0)
                weight_sum += tl.sum(c, 0)
        s = s * tl.exp(rescale) + tl.sum(e, 0)
        m = new_m
    owned = (target >= 0) & (target < num_columns)
    at_target = tl.load(row + target, mask=owned, other=0.0).to(ACC)
    if SOFTCAP is not None:
        at_target = SOFTCAP * _tanh(at_target / SOFTCAP)
    tl.store(out + _MAX * out_stride, m)
    tl.store(out + _SUM * out_stride, s)
    tl.store(out + _TARGET * out_stride, at_target)
    tl.store(out + _OWNED * out_stride, owned.to(ACC))
    if WEIGHTED >= 0:
        tl.store(out + WEIGHTED * out_stride, weighted_sum)
        tl.store(out + WEIGHT * out_stride, weight_sum)
    if ARGMAX >= 0:
        tl.store(out + ARGMAX * out_stride, tl.where(num_columns > 0, (best + first_column).to(ACC), float("inf")))
    if ENTROPY >= 0:
        tl.store(out + ENTROPY * out_stride, entropy)
    return m, s, at_target, weight_sum


@triton.jit
def _grad_row(
    row, grad, target, m, s, at_target, weight_sum, target_weight, uniform_weight, square_weight, column_weight,
    num_columns, SOFTCAP: tl.constexpr, TOKEN_SCALING: tl.constexpr, IN_PLACE: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of one row; `*_weight` are this row's coefficients, or None."""
    b = target_weight
    a = b
    active = b != 0.0
    if uniform_weight is not None:
        active = active | (uniform_weight != 0.0)
        a += uniform_weight * weight_sum
    if square_weight is not None:
        active = active | (square_weight != 0.0)
        a += 2.0 * square_weight * (m + tl.log(s))
    if TOKEN_SCALING:
        target_prob = tl.exp(at_target - m) / s
        a *= target_prob
        b *= target_prob
    a = a / s
    padded = tl.cdiv(num_columns, _ALIGN) * _ALIGN
    if active:
        for start in range(0, padded, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            z = _load_tile(row, columns, num_columns, padded, SOFTCAP, ACC)
            g = a * tl.exp(z - m)
            g = tl.where(columns == target, g - b, g)
            if uniform_weight is not None:
                u = uniform_weight
                if TOKEN_SCALING:
                    u *= target_prob
                if column_weight is None:
                    g -= u
                else:
                    g -= u * tl.load(column_weight + columns, mask=columns < num_columns, other=0.0).to(ACC)
            if SOFTCAP is not None:
                g *= 1.0 - (z / SOFTCAP) * (z / SOFTCAP)
            g = tl.where(columns < num_columns, g, 0.0)
            if not IN_PLACE:
                # A narrower gradient lies over logits of this tile that other threads may not have read yet.
                tl.debug_barrier()
            tl.store(grad + columns, g.to(grad.dtype.element_ty), mask=columns < padded)
            if not IN_PLACE:
                tl.debug_barrier()
    else:
        for start in range(0, padded, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(grad + columns, tl.zeros((BLOCK,), grad.dtype.element_ty), mask=columns < padded)


_PER_CALL = ["stats_stride", "num_columns", "first_column"]
_UNALIGNED = ["stats", "target", "target_weight", "uniform_weight", "square_weight", "column_weight"]


@triton.jit(do_not_specialize=_PER_CALL, do_not_specialize_on_alignment=_UNALIGNED)
def _row_stats_kernel(
    logits, logits_stride, stats, stats_stride, target, column_weight, num_columns, first_column,
    SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    _scan_row(
        logits + i * logits_stride, stats + i, stats_stride, tl.load(target + i), column_weight, num_columns,
        first_column, SOFTCAP, WEIGHTED, WEIGHT, ARGMAX, ENTROPY, ACC, BLOCK,
    )  # fmt: skip


@triton.jit
def _load_or_none(pointer, i):
    if pointer is None:
        return None
    else:
        return tl.load(pointer + i)


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
    _grad_row(
        logits + i * logits_stride, grad + i * grad_stride, tl.load(target + i),
        tl.load(stats + _MAX * stats_stride), tl.load(stats + _SUM * stats_stride),
        tl.load(stats + _TARGET * stats_stride), weight_sum, tl.load(target_weight + i),
        _load_or_none(uniform_weight, i), _load_or_none(square_weight, i), column_weight, num_columns,
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
    m, s, at_target, weight_sum = _scan_row(
        row, stats + i, stats_stride, t, column_weight, num_columns, 0,
        SOFTCAP, WEIGHTED, WEIGHT, ARGMAX, ENTROPY, ACC, BLOCK,
    )  # fmt: skip
    # The target's logit is read by every thread above and overwritten below.
    tl.debug_barrier()
    _grad_row(
        row, grad + i * grad_stride, t, m, s, at_target, weight_sum, tl.load(target_weight + i),
        _load_or_none(uniform_weight, i), _load_or_none(square_weight, i), column_weight, num_columns,
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
        m = tl.maximum(m, tl.load(stats + (rank * NUM_STATS + _MAX) * num_rows + i, mask=mask, other=0.0))
    s = tl.zeros((BLOCK,), ACC)
    at_target = tl.zeros((BLOCK,), ACC)
    owned = tl.zeros((BLOCK,), ACC)
    weighted_sum = tl.zeros((BLOCK,), ACC)
    weight_sum = tl.zeros((BLOCK,), ACC)
    entropy = tl.zeros((BLOCK,), ACC)
    best = tl.full((BLOCK,), float("inf"), ACC)
    for rank in range(num_ranks):
        base = stats + rank * NUM_STATS * num_rows + i
        rank_m = tl.load(base + _MAX * num_rows, mask=mask, other=0.0)
        rank_s = tl.load(base + _SUM * num_rows, mask=mask, other=0.0)
        # Equal maxima differ by 0 even when both are -inf; a rank without columns has -inf and shifts to -inf.
        shift = tl.where(rank_m == m, 0.0, rank_m - m)
        s += rank_s * tl.exp(shift)
        at_target += tl.load(base + _TARGET * num_rows, mask=mask, other=0.0)
        owned += tl.load(base + _OWNED * num_rows, mask=mask, other=0.0)
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
    tl.store(out + _MAX * num_rows, m, mask=mask)
    tl.store(out + _SUM * num_rows, s, mask=mask)
    tl.store(out + _TARGET * num_rows, at_target, mask=mask)
    tl.store(out + _OWNED * num_rows, owned, mask=mask)
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
    """Tile and warps from the number of columns: one of three tiles, 8 columns or more a thread of any warp size."""
    if num_columns <= 512:
        return {"BLOCK": 512, "num_warps": 1}
    if num_columns <= 4096:
        return {"BLOCK": 2048, "num_warps": 4}
    return {"BLOCK": 8192, "num_warps": 8}


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
