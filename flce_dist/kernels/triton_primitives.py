"""What the Triton row kernels share: one row scanned for its statistics, one row overwritten by its gradient.

A row is read twice, the second time backwards from the end that the L2 cache still holds. The first read asks the cache
to keep it, the second and the write ask not to be kept. On an H200 with Triton 3.6 the hints make the fused kernel 4 to
5 % faster, the direction 3 to 6 % (bfloat16 rows of 128256 and 256000 columns).
"""

import triton
import triton.language as tl

from ..buffers import ROW_ALIGNMENT
from . import spec
from .spec import MAX, OTHERS, OWNED, TARGET

MAX_ROW, OTHERS_ROW, TARGET_ROW, OWNED_ROW = (tl.constexpr(row) for row in (MAX, OTHERS, TARGET, OWNED))
ALIGN = tl.constexpr(ROW_ALIGNMENT)
NO_ID = tl.constexpr(spec.NO_ID)


@triton.jit
def tanh(x):
    # No tanh that both the GPU and the interpreter know. Near 0 the exponential forms lose digits.
    u = tl.exp(-2.0 * tl.abs(x))
    if x.dtype == tl.float64:
        # expm1(y) = (u - 1) * y / log(u) with u = exp(y), where rounding errors of u cancel (Kahan), but not
        # those of a subnormal u, whose logarithm may have 3 right digits. Where 1 - u is 1, so is the result.
        gone = u < 1e-17
        near = (u - 1.0) * (-2.0 * tl.abs(x)) / tl.log(tl.where((u == 1.0) | gone, 0.5, u))
        expm1 = tl.where(u == 1.0, -2.0 * tl.abs(x), tl.where(gone, -1.0, near))
        magnitude = -expm1 / (2.0 + expm1)
        return tl.where(x < 0.0, -magnitude, magnitude)
    else:
        y = x * x
        series = 1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.05396825 + y * 0.02186949)))
        far = (1.0 - u) / (1.0 + u)
        return tl.where(tl.abs(x) < 0.3, x * series, tl.where(x < 0.0, -far, far))


@triton.jit
def log1p(x):
    # The rounding of 1 + x cancels (Kahan). Neither the GPU nor the interpreter has one in Triton itself.
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def exp_of_target(m, at_target, owned):
    """`exp(z_y - max)`; 0 where no rank has the target."""
    return tl.where(owned > 0, tl.exp(tl.where(owned > 0, at_target - m, 0.0)), 0.0)


@triton.jit
def load_column(target, num_columns):
    """A row's target; -1 where it is not among the columns. Ids have 64 bits, columns 32."""
    t = tl.load(target)
    return tl.where((t >= 0) & (t < num_columns), t, -1).to(tl.int32)


@triton.jit
def mark_row(row, target, owned, num_columns, padded):
    """Writes -inf where a row's tiles should not look: behind its columns, and at its target.

    Instead of two comparisons an element in each pass, which cost as much as the memory traffic when the GPU lowers its
    clock under the GEMMs.
    """
    behind = padded - ALIGN + tl.arange(0, ALIGN)
    tl.debug_barrier()  # the target's logit has been read by every thread
    tl.store(row + behind, float("-inf"), mask=behind >= num_columns)
    tl.store(row + target, float("-inf"), mask=owned)
    tl.debug_barrier()


@triton.jit
def load_tile(
    row, columns, num_columns, padded, SOFTCAP: tl.constexpr, MARKED: tl.constexpr, ACC: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    z = tl.load(row + columns, mask=columns < padded, other=float("-inf"), eviction_policy=EVICT).to(ACC)
    if SOFTCAP is not None:
        z = SOFTCAP * tanh(z / SOFTCAP)
    if not MARKED:
        z = tl.where(columns < num_columns, z, float("-inf"))
    return z


@triton.jit
def scan_row(
    row, out, out_stride, target, column_weight, num_columns, first_column,
    SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of one row to `out`; returns max, others, target's logit, whether it is here, and sum of
    column weights.

    A tile is folded into lanes of one wide load each, which stay in a thread: the threads meet once a row, not once a
    tile. The lanes are then combined as ranks are (`_combine_kernel`).
    """
    ACC: tl.constexpr = out.dtype.element_ty
    # These features look at the target's column too, or at what -inf would become.
    MARKED: tl.constexpr = SOFTCAP is None and WEIGHTED < 0 and ARGMAX < 0
    WIDTH: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = BLOCK // WIDTH
    m = tl.full((LANES,), float("-inf"), ACC)
    s = tl.zeros((LANES,), ACC)
    weighted_sum = tl.zeros((LANES,), ACC)
    weight_sum = tl.zeros((LANES,), ACC)
    entropy = tl.zeros((LANES,), ACC)
    best = tl.full((LANES,), NO_ID, tl.int32)
    padded = tl.cdiv(num_columns, ALIGN) * ALIGN
    owned = (target >= 0) & (target < num_columns)
    at_target = tl.load(row + target, mask=owned, other=0.0).to(ACC)
    if SOFTCAP is not None:
        at_target = SOFTCAP * tanh(at_target / SOFTCAP)
    if MARKED:
        mark_row(row, target, owned, num_columns, padded)
    if WEIGHTED >= 0:
        # Sums of z itself would lose the digits that logits have below a large common offset.
        reference = tl.max(load_tile(row, tl.arange(0, 16), num_columns, padded, SOFTCAP, MARKED, ACC, "evict_last"), 0)
        reference = tl.where(reference == float("-inf"), 0.0, reference)
    for start in range(0, padded, BLOCK):
        columns = start + tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        z = load_tile(row, columns, num_columns, padded, SOFTCAP, MARKED, ACC, "evict_last")
        lane_max = tl.max(z, 1)
        if ARGMAX >= 0:
            lane_best = tl.min(tl.where((z == lane_max[:, None]) & (columns < num_columns), columns, NO_ID), 1)
            best = tl.where((lane_max > m) | (best == NO_ID), lane_best, best)
        new_m = tl.maximum(m, lane_max)
        # A lane of nothing but -inf so far keeps max -inf and sum 0: shifting it by -inf would make nan.
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        rescale = tl.where(m == float("-inf"), 0.0, m - shift)
        shifted = z - shift[:, None]
        e = tl.exp(shifted)
        if not MARKED:
            e = tl.where(columns == target, 0.0, e)
        if ENTROPY >= 0:
            entropy = (entropy + rescale * s) * tl.exp(rescale) + tl.sum(tl.where(e > 0.0, shifted * e, 0.0), 1)
        if WEIGHTED >= 0:
            if column_weight is None:
                c = (columns < num_columns).to(ACC)
            else:
                c = tl.load(column_weight + columns, mask=columns < num_columns, other=0.0).to(ACC)
            weighted_sum += tl.sum(tl.where(columns < num_columns, c * (z - reference), 0.0), 1)
            weight_sum += tl.sum(c, 1)
        s = s * tl.exp(rescale) + tl.sum(e, 1)
        m = new_m

    row_m = tl.maximum(tl.max(m, 0), tl.where(owned, at_target, float("-inf")))
    # Equal maxima differ by 0 even when both are -inf.
    shift = tl.where(m == row_m, 0.0, m - row_m)
    row_others = tl.sum(s * tl.exp(shift), 0)
    row_weight = tl.sum(weight_sum, 0)
    tl.store(out + MAX_ROW * out_stride, row_m)
    tl.store(out + OTHERS_ROW * out_stride, row_others)
    tl.store(out + TARGET_ROW * out_stride, at_target)
    tl.store(out + OWNED_ROW * out_stride, owned.to(ACC))
    if WEIGHTED >= 0:
        offset = reference - tl.where(row_m == float("-inf"), 0.0, row_m)
        tl.store(out + WEIGHTED * out_stride, tl.sum(weighted_sum, 0) + row_weight * offset)
        tl.store(out + WEIGHT * out_stride, row_weight)
    if ARGMAX >= 0:
        row_best = tl.min(tl.where(m == row_m, best, NO_ID), 0)
        tl.store(out + ARGMAX * out_stride, tl.where(num_columns > 0, (row_best + first_column).to(ACC), float("inf")))
    if ENTROPY >= 0:
        shifted_entropy = tl.where(s == 0.0, 0.0, (entropy + s * shift) * tl.exp(shift))
        tl.store(out + ENTROPY * out_stride, tl.sum(shifted_entropy, 0))
    return row_m, row_others, at_target, owned.to(ACC), row_weight


@triton.jit
def grad_row(
    row, grad, target, m, others, at_target, owned, weight_sum, target_coef, uniform_coefs, square_coefs, i,
    column_weight, residual, num_columns, SOFTCAP: tl.constexpr, TOKEN_SCALING: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of row `i`; `uniform_coefs` and `square_coefs` point to all rows' coefficients, or are
    None, and so does `residual` to the sums of what rounding added."""
    ACC: tl.constexpr = others.dtype
    # No comparisons in the pass, whether `scan_row` has marked the row or not (arg-max, or logits made again): the
    # target's column is written once more at the end, and what lies behind the columns is read by nobody.
    MARKED: tl.constexpr = SOFTCAP is None and uniform_coefs is None
    target_exp = exp_of_target(m, at_target, owned)
    s = others + target_exp
    b = target_coef
    a = b
    active = b != 0.0
    if uniform_coefs is not None:
        uniform_coef = tl.load(uniform_coefs + i)
        active = active | (uniform_coef != 0.0)
        a += uniform_coef * weight_sum
    if square_coefs is not None:
        square_coef = tl.load(square_coefs + i)
        active = active | (square_coef != 0.0)
        a += 2.0 * square_coef * (m + log1p(others + (target_exp - 1.0)))
    if TOKEN_SCALING:
        target_prob = target_exp / s
        a *= target_prob
        b *= target_prob
    # A p - B with p = 1 - others / s, so that no digit of a small 1 - p is lost.
    of_target = ((a - b) * target_exp - b * others) / s
    a = a / s
    padded = tl.cdiv(num_columns, ALIGN) * ALIGN
    added = tl.zeros((BLOCK,), ACC)
    here = (target >= 0) & (target < num_columns)
    if MARKED and residual is not None:
        mark_row(row, target, here, num_columns, padded)  # again: the logits may be others than those of the statistics
    if active:
        last = (padded - 1) // BLOCK * BLOCK
        for offset in range(0, padded, BLOCK):
            # Backwards, from what the cache still holds; but narrower gradients overwrite the logits of columns before.
            start = last - offset if IN_PLACE else offset
            columns = start + tl.arange(0, BLOCK)
            z = load_tile(row, columns, num_columns, padded, SOFTCAP, MARKED, ACC, "evict_first")
            g = a * tl.exp(z - m)
            if not MARKED:
                g = tl.where(columns == target, of_target, g)
            if uniform_coefs is not None:
                u = uniform_coef
                if TOKEN_SCALING:
                    u *= target_prob
                if column_weight is None:
                    g -= u
                else:
                    g -= u * tl.load(column_weight + columns, mask=columns < num_columns, other=0.0).to(ACC)
            if SOFTCAP is not None:
                g *= 1.0 - (z / SOFTCAP) * (z / SOFTCAP)
            if not MARKED:
                g = tl.where(columns < num_columns, g, 0.0)
            if not IN_PLACE:
                # A narrower gradient lies over logits of this tile that other threads may not have read yet.
                tl.debug_barrier()
            rounded = g.to(grad.dtype.element_ty)
            tl.store(grad + columns, rounded, mask=columns < padded, eviction_policy="evict_first")
            if residual is not None:
                added += rounded.to(ACC) - g
            if not IN_PLACE:
                tl.debug_barrier()
    else:
        for start in range(0, padded, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(grad + columns, tl.zeros((BLOCK,), grad.dtype.element_ty), mask=columns < padded)
    added_to_row = tl.sum(added, 0)
    if MARKED and active:
        rounded_target = of_target.to(grad.dtype.element_ty)
        tl.debug_barrier()  # its tile has been written
        tl.store(grad + target, rounded_target, mask=here)
        added_to_row += tl.where(here, rounded_target.to(ACC) - of_target, 0.0)
    if residual is not None:
        tl.store(residual + i, added_to_row)
