"""The row functions of both backends against their specification, written out in float64 and Python loops.

All functions run in the interpreter's worker, so that both see the same inputs.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit import rows as fresh
from tests.kit.cases import all_pairs, case_id
from tests.kit.workers import Context, Pool

FLAGS: dict[str, Any] = {
    "columns": [1, 15, 16, 17, 130, 600, 2100],
    "softcap": [None, 2.0],
    "uniform": [False, True],
    "argmax": [False, True],
    "entropy": [False, True],
    "token_scaling": [False, True],
    "column_weight": [False, True],
    "square": [False, True],
    "dtype": [torch.float32, torch.float64],
    "special": ["none", "large", "-inf", "all -inf", "ties"],
}


SATURATED: dict[str, Any] = dict.fromkeys(
    ("uniform", "argmax", "entropy", "token_scaling", "column_weight", "square"), False
)
SATURATED |= {"columns": 600, "softcap": 2.0, "dtype": torch.float64, "special": "saturated"}
"""Capped logits at which exp(-2 * logit / softcap) is subnormal, which only float64 tells from 0."""


def allowed(row: dict[str, Any]) -> bool:
    return row["uniform"] or not row["column_weight"]


def _inputs(row: dict[str, Any]) -> dict[str, Any]:
    from flce_dist.buffers import logits_buffer
    from flce_dist.kernels.spec import RowCoefficients, RowSpec, stats_dtype

    generator = torch.Generator().manual_seed(row["columns"])
    rows, columns, dtype = 4, row["columns"], row["dtype"]
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 3
    if row["special"] == "large":
        values += 1e4
    elif row["special"] == "-inf":
        values[:, ::3] = -math.inf
    elif row["special"] == "all -inf":
        values[1] = -math.inf
    elif row["special"] == "ties":
        values = values.sign()
    elif row["special"] == "saturated":
        values = values.sign() * torch.linspace(650.0, 800.0, columns, dtype=torch.float64)
    logits = logits_buffer(rows, columns, dtype, torch.device("cpu"))
    # What lies behind the columns must not matter.
    whole = torch.as_strided(logits, (rows, logits.stride(0)), logits.stride())
    whole.fill_(1e30)
    logits.copy_(values)
    spec = RowSpec(row["softcap"], row["uniform"], row["argmax"], row["entropy"], row["token_scaling"])
    acc = stats_dtype(dtype)
    coefficient = torch.tensor([0.25, 0.0, 0.5, -1.0], dtype=acc)
    return {
        "logits": logits,
        "target": torch.tensor([columns - 1, 0, -1, columns + 3]),
        "spec": spec,
        "column_weight": torch.rand(columns, generator=generator, dtype=acc) + 0.5 if row["column_weight"] else None,
        "coefficients": RowCoefficients(
            coefficient, coefficient * 0.1 if row["uniform"] else None, coefficient * 0.01 if row["square"] else None
        ),
    }


def _specified_stats(i: dict[str, Any], first_column: int) -> Tensor:
    """Statistics in float64, straight from the words of the contract."""
    spec, logits = i["spec"], i["logits"].double()
    z = logits if spec.softcap is None else spec.softcap * torch.tanh(logits / spec.softcap)
    rows, columns = z.shape
    out = torch.zeros(spec.num_stats, rows, dtype=torch.float64)
    for r in range(rows):
        m = z[r].max().item()
        shift = 0.0 if m == -math.inf else m
        e = torch.exp(z[r] - shift)
        t = int(i["target"][r])
        others = torch.arange(columns) != t
        out[0, r], out[1, r] = m, e[others].sum()
        if 0 <= t < columns:
            out[2, r], out[3, r] = z[r, t], 1.0
        c = torch.ones(columns, dtype=torch.float64) if i["column_weight"] is None else i["column_weight"].double()
        if spec.uniform:
            out[spec.weighted_sum_row, r] = (c * (z[r] - shift)).sum()
            out[spec.weight_sum_row, r] = c.sum()
        if spec.argmax:
            out[spec.argmax_row, r] = first_column + min(j for j in range(columns) if z[r, j] == m)
        if spec.entropy:
            out[spec.entropy_row, r] = sum(
                ((v - shift) * math.exp(v - shift)) for v in z[r, others].tolist() if v > -math.inf
            )
    return out


def _specified_grad(i: dict[str, Any], stats: Tensor) -> Tensor:
    spec, logits = i["spec"], i["logits"].double()
    z = logits if spec.softcap is None else spec.softcap * torch.tanh(logits / spec.softcap)
    grad = torch.zeros_like(z)
    for r, b in enumerate(i["coefficients"].target.double()):
        if b == 0:
            continue
        m, s = stats[0, r].double(), stats[1, r].double()
        target_exp = torch.exp(stats[2, r].double() - m) if stats[3, r] else 0.0
        s = s + target_exp
        c = torch.ones(z.shape[1], dtype=torch.float64)
        if i["column_weight"] is not None:
            c = i["column_weight"].double()
        uniform = 0.0 if i["coefficients"].uniform is None else i["coefficients"].uniform[r].double()
        square = 0.0 if i["coefficients"].square is None else i["coefficients"].square[r].double()
        weight_sum = stats[spec.weight_sum_row, r].double() if spec.uniform else 0.0
        a = b + uniform * weight_sum + 2 * square * (m + s.log())
        one_hot = torch.zeros(z.shape[1], dtype=torch.float64)
        if 0 <= i["target"][r] < z.shape[1]:
            one_hot[i["target"][r]] = 1.0
        g = a * torch.exp(z[r] - m) / s - b * one_hot - uniform * c
        if spec.token_scaling:
            g = g * target_exp / s
        grad[r] = g if spec.softcap is None else g * (1 - (z[r] / spec.softcap) ** 2)
    return grad


def _run(_: Context, row: dict[str, Any]) -> dict[str, Any]:
    from flce_dist.kernels import torch_rows, triton_rows

    results: dict[str, Any] = {}
    for name, rows in (("torch", torch_rows), ("triton", triton_rows)):
        i = _inputs(row)
        grad = i["logits"]
        stats = fresh.row_stats(rows, i["logits"], i["target"], i["spec"], i["column_weight"], 100)
        results[f"{name} stats"] = stats
        known = fresh.row_stats(torch_rows, _inputs(row)["logits"], i["target"], i["spec"], i["column_weight"])
        results[f"{name} given stats"] = known
        rows.row_grad_(i["logits"], grad, i["target"], known, i["coefficients"], i["spec"], i["column_weight"])
        results[f"{name} grad"] = grad.clone()
        i = _inputs(row)  # logits that row_stats has not seen, as when they are computed again
        rows.row_grad_(i["logits"], i["logits"], i["target"], known, i["coefficients"], i["spec"], i["column_weight"])
        results[f"{name} grad alone"] = i["logits"].clone()
        i = _inputs(row)
        fused = fresh.row_stats_grad_(
            rows, i["logits"], i["logits"], i["target"], i["coefficients"], i["spec"], i["column_weight"]
        )
        results[f"{name} fused stats"], results[f"{name} fused grad"] = fused, i["logits"].clone()
    return results


@pytest.mark.parametrize("row", [*all_pairs(FLAGS, allowed), SATURATED], ids=case_id)
def test_statistics_and_gradients(row: dict[str, Any], interpreted_workers: Pool) -> None:
    got = interpreted_workers.run(1, _run, row)[0]
    i = _inputs(row)
    bound = 1e-12 if row["dtype"] == torch.float64 else 2e-6
    for name in ("torch", "triton"):
        for kind, first in (("stats", 100), ("fused stats", 0)):
            stats = got[f"{name} {kind}"]
            assert stats.dtype == row["dtype"]
            expected = _specified_stats(i, first)
            spread = expected[1].nan_to_num().abs().max() + row["columns"]
            for k in range(len(expected)):
                scale = spread if k in (i["spec"].weighted_sum_row, i["spec"].entropy_row) else 1.0
                torch.testing.assert_close(
                    stats[k].double(), expected[k], rtol=bound * 4, atol=bound * float(scale) * 8, msg=f"{name} {k}"
                )
        for kind in ("grad", "grad alone", "fused grad"):
            source = got[f"{name} fused stats" if kind == "fused grad" else f"{name} given stats"]
            grad, expected = got[f"{name} {kind}"].double(), _specified_grad(i, source)
            torch.testing.assert_close(grad, expected, rtol=bound * 20, atol=bound * 4, msg=f"{name} {kind}")
            assert (grad[1] == 0).all(), "a row with coefficients 0 has gradient 0 whatever its logits hold"


def _combine(_: Context, cuts: list[int], special: str) -> dict[str, Tensor]:
    from flce_dist.kernels import torch_rows, triton_rows
    from flce_dist.kernels.spec import RowSpec

    spec = RowSpec(uniform=True, argmax=True, entropy=True)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, generator=generator) * 4
    if special == "-inf":
        logits[0, :10] = -math.inf
        logits[1, 10:] = -math.inf
    elif special == "ties":
        logits = logits.sign()
    elif special == "large":
        logits += 1e4 * torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])[:, None]
    target = torch.tensor([0, 39, 20, -7, 12])
    weight = torch.rand(40, generator=generator) + 0.5
    parts = [
        fresh.row_stats(
            torch_rows, logits[:, a:b].contiguous(), torch.where(target >= 0, target - a, -1), spec, weight[a:b], a
        )
        for a, b in itertools.pairwise(cuts)
    ]
    whole = fresh.row_stats(torch_rows, logits, target, spec, weight)
    stacked = torch.stack(parts)
    kept = stacked.clone()
    results = {
        "whole": whole,
        "torch": fresh.combine(torch_rows, stacked, spec),
        "triton": fresh.combine(triton_rows, stacked, spec),
    }
    assert torch.equal(stacked, kept)
    return results


@pytest.mark.parametrize("cuts", [[0, 40], [0, 20, 40], [0, 0, 13, 40], [0, 10, 10, 39, 40], [0, 1, 2, 3, 40]])
@pytest.mark.parametrize("special", ["none", "-inf", "ties", "large"])
def test_combined_parts_are_the_whole(cuts: list[int], special: str, interpreted_workers: Pool) -> None:
    got = interpreted_workers.run(1, _combine, cuts, special)[0]
    for name in ("torch", "triton"):
        # The weighted sum is a difference of large numbers where the parts' maxima are far apart.
        torch.testing.assert_close(got[name], got["whole"], rtol=2e-5, atol=2e-3 if special == "large" else 2e-4)
        assert torch.equal(got[name][[0, 3, 6]], got["whole"][[0, 3, 6]]), "max, owner count and arg-max are exact"


def _loss_sum(_: Context, dtype: torch.dtype, num_rows: int, flags: dict[str, bool], bad: int | None) -> dict[str, Any]:
    from flce_dist.kernels import torch_rows, triton_rows
    from flce_dist.kernels.spec import MAX, OTHERS, OWNED, TARGET, RowCoefficients, RowSpec

    generator = torch.Generator().manual_seed(num_rows)
    spec = RowSpec(uniform=flags["uniform"], token_scaling=flags["token_scaling"])
    stats = torch.rand(spec.num_stats, num_rows, generator=generator, dtype=dtype)
    stats[MAX] = 1e4 + stats[MAX]
    stats[TARGET] = stats[MAX] - stats[TARGET]
    stats[OTHERS] = 1 + stats[OTHERS]
    stats[OWNED] = 1
    valid = torch.rand(num_rows, generator=generator) > 0.3
    stats[:, ~valid] = torch.nan
    if bad is not None:
        valid[bad] = True
        stats[:, bad] = 1.0
        stats[OWNED, bad] = 2.0
    column = torch.rand(3, num_rows, generator=generator, dtype=dtype)
    coefficients = RowCoefficients(column[0], column[1] if flags["uniform"] else None, column[2] * 1e-8)
    kept = stats.clone()
    results = {name: rows.loss_sum(stats, coefficients, valid, spec) for name, rows in
               (("torch", torch_rows), ("triton", triton_rows))}  # fmt: skip
    torch.testing.assert_close(stats, kept, rtol=0, atol=0, equal_nan=True)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 1024, 2500])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("token_scaling", [False, True])
def test_loss_sum(
    dtype: torch.dtype, num_rows: int, uniform: bool, token_scaling: bool, interpreted_workers: Pool
) -> None:
    flags = {"uniform": uniform, "token_scaling": token_scaling}
    got = interpreted_workers.run(1, _loss_sum, dtype, num_rows, flags, None)[0]
    (expected, owned), (actual, also_owned) = got["torch"], got["triton"]
    assert owned.item() is also_owned.item() is True
    torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize("bad", [0, 1023, 1024])
def test_loss_sum_sees_a_target_on_two_ranks(bad: int, interpreted_workers: Pool) -> None:
    flags = {"uniform": False, "token_scaling": False}
    got = interpreted_workers.run(1, _loss_sum, torch.float32, 1025, flags, bad)[0]
    assert not got["torch"][1].item()
    assert not got["triton"][1].item()


def _token_shares(_: Context, ids: Tensor, ignore_index: int, mean: bool, dtype: torch.dtype) -> dict[str, Any]:
    from flce_dist.kernels import torch_rows, triton_rows

    return {name: rows.token_shares(ids, ignore_index, mean, dtype) for name, rows in
            (("torch", torch_rows), ("triton", triton_rows))}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 0, 2**33, -(2**63)])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 2048, 4099])
def test_token_shares(
    num_rows: int, ignore_index: int, mean: bool, dtype: torch.dtype, interpreted_workers: Pool
) -> None:
    # Ids that are equal to ignore_index in their lower 32 bits alone are valid.
    choices = torch.tensor([ignore_index, 7, ignore_index % 2**32, 2**40])
    ids = choices[torch.randint(4, (num_rows + 1,), generator=torch.Generator().manual_seed(num_rows))][1:]
    got = interpreted_workers.run(1, _token_shares, ids, ignore_index, mean, dtype)[0]
    kept = [int(i) != ignore_index for i in ids]
    share = 1 / max(1, sum(kept)) if mean else 1.0
    for name, (valid, shares) in got.items():
        assert valid.dtype == torch.bool, name
        assert valid.tolist() == kept, name
        assert shares.dtype == dtype, name
        expected = torch.tensor([share if k else 0.0 for k in kept], dtype=dtype)
        torch.testing.assert_close(shares, expected, rtol=0 if not mean else 1e-7, atol=0, msg=name)


def test_token_shares_of_ignored_tokens(interpreted_workers: Pool) -> None:
    got = interpreted_workers.run(1, _token_shares, torch.full((3,), -100), -100, True, torch.float32)[0]
    for name, (valid, shares) in got.items():
        assert not valid.any(), name
        assert shares.tolist() == [0.0, 0.0, 0.0], name


def _scale(_: Context, dtype: torch.dtype, factor: float, host_factor: float) -> dict[str, Tensor]:
    from flce_dist.kernels import torch_rows, triton_rows

    results = {}
    for name, rows in (("torch", torch_rows), ("triton", triton_rows)):
        tensor = torch.arange(-7.0, 14.0, dtype=dtype).reshape(3, 7)
        rows.scale_([(tensor, host_factor)], torch.tensor(factor, dtype=torch.float32))
        results[name] = tensor
        rows.scale_([(torch.empty(0, 7, dtype=dtype), host_factor)], torch.tensor(factor))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("factor", "host_factor"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.5), (-3.0, 0.25), (0.0, 1.0)])
def test_scale(dtype: torch.dtype, factor: float, host_factor: float, interpreted_workers: Pool) -> None:
    got = interpreted_workers.run(1, _scale, dtype, factor, host_factor)[0]
    expected = torch.arange(-7.0, 14.0, dtype=dtype).reshape(3, 7) * (factor * host_factor)
    for name in ("torch", "triton"):
        assert torch.equal(got[name], expected), name


def _widths(_: Context, columns: int) -> list[Tensor]:
    """float32 logits whose gradient is written in place as 16-bit numbers."""
    from flce_dist.buffers import logits_buffer
    from flce_dist.kernels import torch_rows
    from flce_dist.kernels.spec import RowCoefficients, RowSpec

    results = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_buffer(6, columns, torch.float32, torch.device("cpu"))
        logits.copy_(torch.randn(6, columns, generator=torch.Generator().manual_seed(1)) * 3)
        grad = logits if dtype == torch.float32 else logits.view(dtype)[:, :columns]
        coefficients = RowCoefficients(torch.ones(6), None, None)
        fresh.row_stats_grad_(torch_rows, logits, grad, torch.arange(6) % columns, coefficients, RowSpec())
        results.append(grad.float())
    return results


@pytest.mark.parametrize("columns", [1, 16, 33, 600])
def test_a_narrower_gradient_over_wider_logits(columns: int, workers: Pool) -> None:
    wide, narrow = workers.run(1, _widths, columns)[0]
    assert torch.equal(narrow, wide.bfloat16().float())


def _residuals(_: Context, columns: int, smoothing: bool) -> list[Tensor]:
    """Of each way to a narrow gradient: its sum of roundings, and what that should be."""
    from flce_dist.buffers import logits_buffer
    from flce_dist.kernels import torch_rows, triton_rows
    from flce_dist.kernels.spec import RowCoefficients, RowSpec

    spec = RowSpec(uniform=smoothing)
    target = torch.tensor([columns - 1, 0, -1, columns + 3])
    coefficient = torch.tensor([0.25, 0.0, 0.5, 1.0])
    coefficients = RowCoefficients(coefficient, coefficient * 0.1 if smoothing else None, None)

    def make() -> Tensor:
        logits = logits_buffer(4, columns, torch.float32, torch.device("cpu"))
        torch.as_strided(logits, (4, logits.stride(0)), logits.stride()).fill_(torch.nan)
        return logits.copy_(torch.randn(4, columns, generator=torch.Generator().manual_seed(columns)) * 3)

    exact = make()
    stats = fresh.row_stats_grad_(torch_rows, exact, exact, target, coefficients, spec)
    results = []
    for rows in (torch_rows, triton_rows):
        for way in ("grad alone", "stats first", "fused"):
            logits = make()
            grad = logits.view(torch.float16)[:, :columns]
            residual = torch.full((4,), torch.nan)
            if way == "fused":
                fresh.row_stats_grad_(rows, logits, grad, target, coefficients, spec, None, residual)
            else:
                if way == "stats first":
                    rows.row_stats(logits, target, stats.clone(), spec)
                rows.row_grad_(logits, grad, target, stats, coefficients, spec, None, residual)
            results.append(torch.stack([residual, (grad.double() - exact.double()).sum(1).float()]))
    return results


@pytest.mark.parametrize("columns", [1, 16, 33, 2100])
@pytest.mark.parametrize("smoothing", [False, True])
def test_the_sum_of_what_rounding_added(columns: int, smoothing: bool, interpreted_workers: Pool) -> None:
    for residual, expected in interpreted_workers.run(1, _residuals, columns, smoothing)[0]:
        torch.testing.assert_close(residual, expected, rtol=1e-2, atol=5e-7)
        assert columns < 33 or expected[0].abs() > 5e-6, "nothing was rounded"
