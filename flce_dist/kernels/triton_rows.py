"""The row kernels in Triton: one program a row, which passes over the row's tiles. The contract is in `spec`.

Rows of the logits start at multiples of `buffers.ROW_ALIGNMENT` elements, so tiles are loaded up to the padded end of
the row with wide loads, and columns past `num_columns` are masked by value. Scalars that differ between calls are not
specialised on: over all shapes a kernel is compiled once for each of the few tile sizes of `_launch_settings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import torch_rows
from .launch import launch
from .spec import RowCoefficients, RowSpec
from .triton_primitives import (
    MAX_ROW,
    OTHERS_ROW,
    OWNED_ROW,
    TARGET_ROW,
    exp_of_target,
    grad_row,
    load_column,
    log1p,
    scan_row,
)

_PER_CALL = ["stats_stride", "num_columns", "first_column"]
_UNALIGNED = [
    "stats",
    "target",
    "target_coef",
    "uniform_coef",
    "square_coef",
    "column_weight",
    "residual",
]


@triton.jit(do_not_specialize=_PER_CALL, do_not_specialize_on_alignment=_UNALIGNED)
def _row_stats_kernel(
    logits, logits_stride, stats, stats_stride, target, column_weight, num_columns, first_column,
    SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    scan_row(
        logits + i * logits_stride, stats + i, stats_stride, load_column(target + i, num_columns), column_weight,
        num_columns, first_column, SOFTCAP, WEIGHTED, WEIGHT, ARGMAX, ENTROPY, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_PER_CALL, do_not_specialize_on_alignment=_UNALIGNED)
def _row_grad_kernel(
    logits, logits_stride, grad, grad_stride, stats, stats_stride, target, target_coef, uniform_coef,
    square_coef, column_weight, residual, num_columns, SOFTCAP: tl.constexpr, WEIGHT: tl.constexpr,
    TOKEN_SCALING: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    stats += i
    weight_sum = 0.0
    if WEIGHT >= 0:
        weight_sum = tl.load(stats + WEIGHT * stats_stride)
    grad_row(
        logits + i * logits_stride, grad + i * grad_stride, load_column(target + i, num_columns),
        tl.load(stats + MAX_ROW * stats_stride), tl.load(stats + OTHERS_ROW * stats_stride),
        tl.load(stats + TARGET_ROW * stats_stride), tl.load(stats + OWNED_ROW * stats_stride), weight_sum,
        tl.load(target_coef + i), uniform_coef, square_coef, i, column_weight, residual, num_columns,
        SOFTCAP, TOKEN_SCALING, IN_PLACE, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_PER_CALL, do_not_specialize_on_alignment=_UNALIGNED)
def _row_stats_grad_kernel(
    logits, logits_stride, grad, grad_stride, stats, stats_stride, target, target_coef, uniform_coef,
    square_coef, column_weight, residual, num_columns, SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr,
    WEIGHT: tl.constexpr, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, TOKEN_SCALING: tl.constexpr,
    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * logits_stride
    t = load_column(target + i, num_columns)
    m, others, at_target, owned, weight_sum = scan_row(
        row, stats + i, stats_stride, t, column_weight, num_columns, 0,
        SOFTCAP, WEIGHTED, WEIGHT, ARGMAX, ENTROPY, BLOCK,
    )  # fmt: skip
    # Every thread has read the target's logit above; where the row has no marks, it is overwritten below.
    tl.debug_barrier()
    grad_row(
        row, grad + i * grad_stride, t, m, others, at_target, owned, weight_sum, tl.load(target_coef + i),
        uniform_coef, square_coef, i, column_weight, residual, num_columns,
        SOFTCAP, TOKEN_SCALING, IN_PLACE, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["out_stride", "num_ranks", "num_rows"], do_not_specialize_on_alignment=["out"])
def _combine_kernel(
    stats, out, out_stride, num_ranks, num_rows, NUM_STATS: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = stats.dtype.element_ty
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
        rank_s = tl.load(base + OTHERS_ROW * num_rows, mask=mask, other=0.0)
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
    tl.store(out + MAX_ROW * out_stride, m, mask=mask)
    tl.store(out + OTHERS_ROW * out_stride, s, mask=mask)
    tl.store(out + TARGET_ROW * out_stride, at_target, mask=mask)
    tl.store(out + OWNED_ROW * out_stride, owned, mask=mask)
    if WEIGHTED >= 0:
        tl.store(out + WEIGHTED * out_stride, weighted_sum, mask=mask)
        tl.store(out + WEIGHT * out_stride, weight_sum, mask=mask)
    if ARGMAX >= 0:
        tl.store(out + ARGMAX * out_stride, best, mask=mask)
    if ENTROPY >= 0:
        tl.store(out + ENTROPY * out_stride, entropy, mask=mask)


@triton.jit(do_not_specialize=["ignore_index", "num_rows"], do_not_specialize_on_alignment=["ids"])
def _token_shares_kernel(ids, ignore_index, valid, share, num_rows, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """By one program, like the sum of the losses."""
    factor = tl.full((), 1.0, share.dtype.element_ty)
    if MEAN:
        num_valid = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_rows, BLOCK):
            i = start + tl.arange(0, BLOCK)
            num_valid += (tl.load(ids + i, mask=i < num_rows, other=ignore_index) != ignore_index).to(tl.int32)
        factor = factor / tl.maximum(tl.sum(num_valid, 0), 1).to(share.dtype.element_ty)
    for start in range(0, num_rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < num_rows
        is_valid = tl.load(ids + i, mask=mask, other=ignore_index) != ignore_index
        tl.store(valid + i, is_valid, mask=mask)
        tl.store(share + i, tl.where(is_valid, factor, 0.0), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _loss_sum_kernel(
    stats, target_coefs, uniform_coefs, square_coefs, valid, loss, all_owned, num_rows, WEIGHTED: tl.constexpr,
    WEIGHT: tl.constexpr, TOKEN_SCALING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`row_math.row_losses`, summed by one program: N numbers are few, and so the order of the sum is fixed."""
    ACC: tl.constexpr = stats.dtype.element_ty
    total = tl.zeros((BLOCK,), ACC)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < num_rows
        row = stats + i
        m = tl.load(row + MAX_ROW * num_rows, mask=mask, other=0.0)
        others = tl.load(row + OTHERS_ROW * num_rows, mask=mask, other=1.0)
        at_target = tl.load(row + TARGET_ROW * num_rows, mask=mask, other=0.0)
        owned = tl.load(row + OWNED_ROW * num_rows, mask=mask, other=1.0)
        log_sum = log1p(others + (exp_of_target(m, at_target, owned) - 1.0))
        negative_log_prob = (m - at_target) + log_sum
        value = tl.load(target_coefs + i, mask=mask, other=0.0) * negative_log_prob
        if uniform_coefs is not None:
            weight_sum = tl.load(row + WEIGHT * num_rows, mask=mask, other=0.0)
            weighted_sum = tl.load(row + WEIGHTED * num_rows, mask=mask, other=0.0)
            value += tl.load(uniform_coefs + i, mask=mask, other=0.0) * (weight_sum * log_sum - weighted_sum)
        if square_coefs is not None:
            value += tl.load(square_coefs + i, mask=mask, other=0.0) * (m + log_sum) * (m + log_sum)
        if TOKEN_SCALING:
            value *= tl.exp(-negative_log_prob)
        is_valid = tl.load(valid + i, mask=mask, other=False)
        total += tl.where(is_valid, value, 0.0)
        bad += (is_valid & (owned != 1.0)).to(tl.int32)
    tl.store(loss, tl.sum(total, 0))
    tl.store(all_owned, tl.sum(bad, 0) == 0)


@triton.jit
def _scale(x, factor, num_elements, num_programs, BLOCK: tl.constexpr):
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_elements, num_programs.to(tl.int64) * BLOCK):
            i = start + tl.arange(0, BLOCK)
            value = tl.load(x + i, mask=i < num_elements).to(tl.float32) * factor
            tl.store(x + i, value.to(x.dtype.element_ty), mask=i < num_elements)


@triton.jit(do_not_specialize=["num_a", "num_b", "num_programs"], do_not_specialize_on_alignment=["factor"])
def _scale_kernel(a, host_factor_a, num_a, b, host_factor_b, num_b, factor, num_programs, BLOCK: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    _scale(a, f * host_factor_a, num_a, num_programs, BLOCK)
    if b is not None:
        _scale(b, f * host_factor_b, num_b, num_programs, BLOCK)


Tiles = tuple[tuple[float, int], ...]
"""`(most columns, tile)`, in order: which tile is for how many columns."""

_STATS_TILES: Tiles = ((2**10, 512), (math.inf, 2048))
_GRAD_TILES: Tiles = ((2**15, 512), (math.inf, 8192))
_STATS_GRAD_TILES: Tiles = ((2**10, 512), (2**13, 2048), (2**15, 4096), (math.inf, 8192))
"""Of nine settings, from 500 to 128256 columns, these are the fastest between the GEMMs of a step on an H200, or within
5 % of it (bfloat16 logits). The tiles of a row wait for its target's id and logit first: a small tile leaves room for
other rows meanwhile, a large one finds more of a long row in the cache when it reads it again."""


def _launch_settings(tiles: Tiles, num_columns: int) -> dict[str, int]:
    """A tile, and warps for 16 columns a thread (fewer on 64-wide warps): a pure function of the number of columns."""
    block = next(block for most, block in tiles if num_columns <= most)
    return {"BLOCK": block, "num_warps": block // 512}


def row_stats(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    spec: RowSpec,
    column_weight: Tensor | None = None,
    first_column: int = 0,
) -> None:
    num_rows, num_columns = logits.shape
    launch(
        _row_stats_kernel, num_rows, logits, logits.stride(0), stats, stats.stride(0), target, column_weight,
        num_columns, first_column, SOFTCAP=spec.softcap, **spec.stat_rows,
        **_launch_settings(_STATS_TILES, num_columns),
    )  # fmt: skip


def combine(gathered: Tensor, stats: Tensor, spec: RowSpec) -> None:
    num_ranks, num_stats, num_rows = gathered.shape
    launch(
        _combine_kernel, -(-num_rows // 128), gathered, stats, stats.stride(0), num_ranks, num_rows,
        NUM_STATS=num_stats, **spec.stat_rows, BLOCK=128, num_warps=2,
    )  # fmt: skip


def row_grad_(
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    stats: Tensor,
    coefficients: RowCoefficients,
    spec: RowSpec,
    column_weight: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    num_rows, num_columns = logits.shape
    launch(
        _row_grad_kernel, num_rows, logits, logits.stride(0), grad, grad.stride(0), stats, stats.stride(0), target,
        *coefficients, column_weight, residual, num_columns, SOFTCAP=spec.softcap, WEIGHT=spec.weight_sum_row,
        TOKEN_SCALING=spec.token_scaling, IN_PLACE=grad.dtype == logits.dtype,
        **_launch_settings(_GRAD_TILES, num_columns),
    )  # fmt: skip


def row_stats_grad_(
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    stats: Tensor,
    coefficients: RowCoefficients,
    spec: RowSpec,
    column_weight: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    num_rows, num_columns = logits.shape
    launch(
        _row_stats_grad_kernel, num_rows, logits, logits.stride(0), grad, grad.stride(0), stats, stats.stride(0),
        target, *coefficients, column_weight, residual, num_columns, SOFTCAP=spec.softcap, **spec.stat_rows,
        TOKEN_SCALING=spec.token_scaling, IN_PLACE=grad.dtype == logits.dtype,
        **_launch_settings(_STATS_GRAD_TILES, num_columns),
    )  # fmt: skip


def token_shares(ids: Tensor, ignore_index: int, mean: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    valid = torch.empty(ids.shape, dtype=torch.bool, device=ids.device)
    share = torch.empty(ids.shape, dtype=dtype, device=ids.device)
    launch(
        _token_shares_kernel, 1, ids, ignore_index, valid, share, ids.shape[0],
        MEAN=mean, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return valid, share


def loss_sum(stats: Tensor, coefficients: RowCoefficients, valid: Tensor, spec: RowSpec) -> tuple[Tensor, Tensor]:
    loss = stats.new_empty(())
    all_owned = torch.empty((), dtype=torch.bool, device=stats.device)
    launch(
        _loss_sum_kernel, 1, stats, *coefficients, valid, loss, all_owned, stats.shape[1],
        WEIGHTED=spec.weighted_sum_row, WEIGHT=spec.weight_sum_row, TOKEN_SCALING=spec.token_scaling,
        BLOCK=1024, num_warps=8,
    )  # fmt: skip
    return loss, all_owned


def scale_(gradients: Sequence[tuple[Tensor, float]], factor: Tensor) -> None:
    """Makes no pass over a gradient whose factor is 1. Two gradients share a launch."""
    if any(gradient.dtype == torch.float64 for gradient, _ in gradients):
        torch_rows.scale_(gradients, factor)  # numbers reach a kernel in float32
        return
    some = [pair for pair in gradients if pair[0].numel()]
    for (a, factor_a), (b, factor_b) in zip_longest(some[::2], some[1::2], fillvalue=(None, 1.0)):
        assert a is not None
        num_a, num_b = a.numel(), 0 if b is None else b.numel()
        num_programs = min(-(-max(num_a, num_b) // 8192), 2048)
        launch(
            _scale_kernel, num_programs, a, factor_a, num_a, b, factor_b, num_b, factor, num_programs,
            BLOCK=8192, num_warps=8,
        )  # fmt: skip
