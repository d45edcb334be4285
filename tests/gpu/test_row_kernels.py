"""The Triton row kernels on a GPU against their specification, `torch_rows` in float64, on the same logits."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from flce_dist.buffers import logits_buffer, row_stride
from flce_dist.kernels import torch_rows
from flce_dist.kernels.spec import MAX, OTHERS, OWNED, RowCoefficients, RowSpec, stats_dtype
from tests.kit import rows as fresh

pytestmark = pytest.mark.gpu

COLUMNS = (1, 3, 127, 129, 1000, 1025, 32000, 128256)
ROWS = 37
ALL = RowSpec(softcap=15.0, uniform=True, argmax=True, entropy=True, token_scaling=True)
SPECS = {
    "plain": RowSpec(),
    "softcap": RowSpec(softcap=15.0),
    "uniform": RowSpec(uniform=True),
    "argmax-entropy": RowSpec(argmax=True, entropy=True),
    "token-scaling": RowSpec(token_scaling=True),
    "all": ALL,
}
LOGITS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Of each dtype the plainest and the fullest kernels; of the one that training uses, all.
CASES = [(dtype, name) for dtype in LOGITS for name in SPECS if name in ("plain", "all") or dtype == torch.bfloat16]
# Relative to the size of what is summed: float32 sums of up to 128256 terms, tile by tile.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5}
ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass
class Rows:
    logits: Tensor
    target: Tensor
    coefficients: RowCoefficients
    column_weight: Tensor | None


def make_rows(columns: int, dtype: torch.dtype, spec: RowSpec, device: torch.device, scale: float = 4.0) -> Rows:
    """Logits in a buffer whose padding holds nan; targets of this shard, of others and none; some rows inactive."""
    generator = torch.Generator(device).manual_seed(columns)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float64, generator=generator)

    logits = logits_buffer(ROWS, columns, dtype, device)
    logits.as_strided((ROWS, row_stride(columns)), (row_stride(columns), 1)).fill_(float("nan"))
    logits.copy_(scale * randn(ROWS, columns))
    target = torch.randint(-1, columns + 2, (ROWS,), device=device, generator=generator)
    target[:2] = torch.tensor([0, columns - 1], device=device)
    if spec.token_scaling:
        # The target's probability is known only where the target is.
        target.clamp_(0, columns - 1)
    acc = stats_dtype(dtype)
    active = (torch.arange(ROWS, device=device) % 5 != 3).to(acc)

    def row_weight() -> Tensor:
        return (randn(ROWS).abs() + 0.1).to(acc) * active

    coefficients = RowCoefficients(
        row_weight(), row_weight() / columns if spec.uniform else None, row_weight() if spec == ALL else None
    )
    column_weight = randn(columns).abs().to(acc) if spec == ALL else None
    return Rows(logits, target, coefficients, column_weight)


def wide(rows: Rows) -> Rows:
    """The same logits in float64, for the specification."""
    num_rows, num_columns = rows.logits.shape
    logits = logits_buffer(num_rows, num_columns, torch.float64, rows.logits.device)
    logits.copy_(rows.logits)
    coefficients = RowCoefficients(*(None if w is None else w.double() for w in rows.coefficients))
    column_weight = None if rows.column_weight is None else rows.column_weight.double()
    return Rows(logits, rows.target, coefficients, column_weight)


def assert_stats(actual: Tensor, expected: Tensor, spec: RowSpec, columns: int) -> None:
    bound = TOLERANCE[actual.dtype]
    actual = actual.double()
    assert torch.equal(actual[OWNED], expected[OWNED])
    # Sums of (z - max) reach the number of columns times the spread of the logits.
    sizes = torch.ones(spec.num_stats, 1, dtype=torch.float64, device=actual.device)
    if spec.uniform:
        sizes[spec.weighted_sum_row] = 10.0 * columns
    for k in range(spec.num_stats):
        if k == spec.argmax_row:
            # With softcap rounding may make neighbours equal; both must then be largest.
            continue
        close = (actual[k] - expected[k]).abs() <= bound * torch.maximum(expected[k].abs(), sizes[k])
        assert close.all(), f"statistic {k}: {actual[k][~close]} instead of {expected[k][~close]}"


def assert_argmax(stats: Tensor, rows: Rows, spec: RowSpec, first_column: int) -> None:
    """The id is that of a largest logit, the lowest of those whose capped values are equal."""
    z = rows.logits[:, : rows.logits.shape[1]].to(stats_dtype(rows.logits.dtype))
    found = stats[spec.argmax_row].long() - first_column
    largest = z.amax(1)
    at_found = z.gather(1, found[:, None])[:, 0]
    if spec.softcap is None:
        assert torch.equal(found, z.argmax(1))
    else:
        near = spec.softcap * (torch.tanh(largest / spec.softcap) - torch.tanh(at_found / spec.softcap))
        assert (near <= 1e-5 * spec.softcap).all()


def assert_grad(actual: Tensor, expected: Tensor, coefficients: RowCoefficients, dtype: torch.dtype) -> None:
    """Each element is right up to one rounding of its own and a little of the row's coefficient."""
    size = sum(w.double() for w in coefficients if w is not None)
    bound = ROUNDING[actual.dtype] * expected.abs() + 2e-6 * size[:, None] * (1e-6 if dtype == torch.float64 else 1.0)
    # float16 has subnormals only down to 6e-8.
    bound = bound + (6e-8 if actual.dtype == torch.float16 else 0.0)
    wrong = ~((actual.double() - expected).abs() <= bound)
    assert not wrong.any(), (
        f"{int(wrong.sum())} elements, the first at {wrong.nonzero()[0].tolist()}: "
        f"{actual[wrong][0].item()} instead of {expected[wrong][0].item()}"
    )


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=str)
def test_statistics_and_gradient(device: torch.device, dtype: torch.dtype, name: str) -> None:
    from flce_dist.kernels import triton_rows

    spec = SPECS[name]
    for columns in COLUMNS:
        rows = make_rows(columns, dtype, spec, device)
        reference = wide(rows)
        alone, together = (replace(rows, logits=_copy(rows.logits)) for _ in range(2))
        first = 12345
        stats = fresh.row_stats(triton_rows, rows.logits, rows.target, spec, rows.column_weight, first)
        expected = fresh.row_stats(torch_rows, reference.logits, rows.target, spec, reference.column_weight, first)
        assert_stats(stats, expected, spec, columns)
        if spec.argmax:
            assert_argmax(stats, rows, spec, first)

        torch_rows.row_grad_(
            reference.logits, reference.logits, rows.target, expected, reference.coefficients, spec,
            reference.column_weight,
        )  # fmt: skip
        # After row_stats, which may have changed the logits, and on logits that it has not seen.
        for logits in (rows.logits, alone.logits):
            triton_rows.row_grad_(logits, logits, rows.target, stats, rows.coefficients, spec, rows.column_weight)
            assert_grad(logits, reference.logits, rows.coefficients, dtype)
        fused = fresh.row_stats_grad_(
            triton_rows, together.logits, together.logits, rows.target, rows.coefficients, spec, rows.column_weight
        )
        assert_stats(fused, expected, spec, columns)
        assert_grad(together.logits, reference.logits, rows.coefficients, dtype)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_float32_logits_are_overwritten_by_a_16_bit_gradient(device: torch.device, narrow: torch.dtype) -> None:
    """Bytes of the new row lie over bytes of the old one that other threads have yet to read."""
    from flce_dist.kernels import triton_rows

    spec = RowSpec()
    for columns in COLUMNS:
        rows = make_rows(columns, torch.float32, spec, device)
        reference = wide(rows)
        expected = fresh.row_stats_grad_(
            torch_rows, reference.logits, reference.logits, rows.target, reference.coefficients, spec
        )
        first = None
        for _ in range(10):
            for split in (False, True):
                logits = _copy(rows.logits)
                grad = logits.view(narrow)[:, :columns]
                if split:
                    stats = fresh.row_stats(triton_rows, logits, rows.target, spec)
                    triton_rows.row_grad_(logits, grad, rows.target, stats, rows.coefficients, spec)
                else:
                    fresh.row_stats_grad_(triton_rows, logits, grad, rows.target, rows.coefficients, spec)
                assert_grad(grad, reference.logits, rows.coefficients, torch.float32)
                first = grad.clone() if first is None else first
                if not split:
                    assert torch.equal(grad, first), "the same rows gave other bits"
        assert torch.isfinite(expected).all()


def _copy(logits: Tensor) -> Tensor:
    num_rows, num_columns = logits.shape
    copy = logits_buffer(num_rows, num_columns, logits.dtype, logits.device)
    copy.as_strided((num_rows, copy.stride(0)), (copy.stride(0), 1)).fill_(float("nan"))
    return copy.copy_(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_minus_infinity_and_nan(device: torch.device, dtype: torch.dtype) -> None:
    """A row of nothing but -inf has max -inf and sum 0, never nan; an inactive row has gradient 0 whatever it holds."""
    from flce_dist.kernels import triton_rows

    for columns in (3, 1025, 32000):
        rows = make_rows(columns, dtype, RowSpec(), device)
        rows.logits[3], rows.logits[8] = float("-inf"), float("nan")
        rows.logits[0, 1:] = float("-inf")
        stats = fresh.row_stats(triton_rows, rows.logits, rows.target, RowSpec())
        assert stats[MAX, 3].item() == float("-inf")
        assert stats[OTHERS, 3].item() == 0.0
        assert stats[OTHERS, 0].item() == 0.0, "the only column is the target"
        assert rows.coefficients.target[3].item() == rows.coefficients.target[8].item() == 0.0
        triton_rows.row_grad_(rows.logits, rows.logits, rows.target, stats, rows.coefficients, RowSpec())
        assert torch.count_nonzero(rows.logits[3]) == 0
        assert torch.count_nonzero(rows.logits[8]) == 0
        assert torch.count_nonzero(rows.logits[0]) == 0, "one column with all the probability, and it is the target"


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_combination_of_shards_is_the_whole(device: torch.device, dtype: torch.dtype, name: str) -> None:
    from flce_dist.kernels import triton_rows

    spec = SPECS[name]
    columns, cuts = 1025, (0, 0, 400, 401, 1025)
    rows = make_rows(columns, dtype, spec, device)
    reference = wide(rows)
    whole = fresh.row_stats(torch_rows, reference.logits, rows.target, spec, reference.column_weight)
    parts = []
    for start, stop in itertools.pairwise(cuts):
        part = logits_buffer(ROWS, stop - start, dtype, device)
        part.copy_(rows.logits[:, start:stop])
        weight = None if rows.column_weight is None else rows.column_weight[start:stop].contiguous()
        parts.append(fresh.row_stats(triton_rows, part, rows.target - start, spec, weight, start))
    combined = fresh.combine(triton_rows, torch.stack(parts), spec)
    assert_stats(combined, whole, spec, columns)
    if spec.argmax:
        assert_argmax(combined, rows, spec, 0)


@pytest.mark.parametrize("dtype", LOGITS, ids=str)
@pytest.mark.parametrize("size", [1, 5, 8192, 100_003])
def test_scale(device: torch.device, dtype: torch.dtype, size: int) -> None:
    from flce_dist.kernels import triton_rows

    x = torch.randn(size, device=device, dtype=torch.float32).to(dtype)
    factor = torch.tensor(0.37, device=device)
    actual = x.clone()
    triton_rows.scale_([(actual, 2.0)], factor)
    expected = x.double() * (factor.double() * 2.0)
    assert (
        (actual.double() - expected).abs() <= 2 * ROUNDING[dtype] * expected.abs() + 1e-7 * (dtype.itemsize < 4)
    ).all()
    unchanged = x.clone()
    triton_rows.scale_([(unchanged, 2.0)], torch.tensor(0.5, device=device))
    assert torch.equal(unchanged, x)
