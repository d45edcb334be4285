"""Every option of the loss in pairwise combination with every other, sharded and not, against the float64 oracle."""

from typing import Any

import numpy as np
import pytest
import torch

from flce_dist import linear_cross_entropy
from tests.kit import compare
from tests.kit.cases import Case, all_pairs, case_id, check, judge, product, run_case, takes_normalizer
from tests.kit.workers import Pool
from tests.test_checks_ranks import assert_all_raise

FEATURES: dict[str, Any] = {
    "reduction": ["mean", "sum", "none"],
    "label_smoothing": [0.0, 0.1, 1.0],
    "class_weight": [False, True],
    "z_loss": [0.0, 1e-2],
    "softcap": [None, 5.0],
    "logit_scale": [1.0, 0.3],
    "bias": [False, True],
    "token_weight": [False, True],
    "token_scaling": [False, True],
    "normalizer": [None, 7.5],
    "backward": ["auto", "recompute"],
    "ignored": ["some", "all"],
    "chunk_rows": [None, 4],
}
AXES = FEATURES | {"world": [1, 2, 3], "split": ["even", "uneven", "empty", "padded"], "dtype": [torch.float32]}
AUX = ("z_loss", "lse", "accuracy", "predictions", "entropy", "num_valid")


def make_case(row: dict[str, Any], **more: Any) -> Case:
    fields = {name: value for name, value in row.items() if name in Case.__dataclass_fields__}
    options = tuple((name, value) for name, value in row.items() if name not in fields)
    return Case(**{"lead": (11,), **fields, "options": options, **more})


@pytest.mark.parametrize("row", all_pairs(AXES, takes_normalizer), ids=case_id)
def test_features_in_pairs(row: dict[str, Any], workers: Pool) -> None:
    check(make_case(row), workers)


@pytest.mark.parametrize("row", all_pairs(AXES, takes_normalizer, seed=1)[:16], ids=case_id)
def test_features_in_pairs_interpreted_triton(row: dict[str, Any], interpreted_workers: Pool) -> None:
    check(make_case(row, backend="triton", lead=(6,)), interpreted_workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 12))
def test_features_in_pairs_with_other_companions(seed: int, pool_for: Any) -> None:
    for row in all_pairs(AXES | {"dtype": [torch.float32, torch.float64]}, takes_normalizer, seed=seed):
        check(make_case(row, seed=seed), pool_for("torch"))
        check(make_case(row, seed=seed, backend="triton", lead=(5,)), pool_for("triton"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", FEATURES["reduction"])
@pytest.mark.parametrize("backward", FEATURES["backward"])
def test_full_product_of_features_unsharded(reduction: str, backward: str) -> None:
    for row in product(FEATURES | {"reduction": [reduction], "backward": [backward]}, takes_normalizer):
        case = make_case(row)
        judge(case, [run_case(None, case)])


@pytest.mark.parametrize(
    "row", all_pairs(AXES | {"dtype": [torch.float64]}, takes_normalizer, seed=3)[:12], ids=case_id
)
def test_features_in_float64(row: dict[str, Any], workers: Pool) -> None:
    check(make_case(row), workers)


BF16_AXES = AXES | {"dtype": [torch.bfloat16], "chunk_rows": [None, 64]}


@pytest.mark.parametrize("row", all_pairs(BF16_AXES, takes_normalizer, seed=4)[:12], ids=case_id)
def test_features_in_bfloat16(row: dict[str, Any], workers: Pool) -> None:
    """Tokens enough that the rounding of single logits, 4e-3 of each, averages out of the loss."""
    check(make_case(row, lead=(480,), hidden_size=16, vocab_size=64), workers)


@pytest.mark.parametrize("aux", [*((name,) for name in AUX), AUX, AUX[::-1]], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_aux_outputs(aux: tuple[str, ...], world: int, reduction: str, workers: Pool) -> None:
    options = (("z_loss", 1e-2), ("softcap", 5.0))
    case = Case(lead=(3, 5), world=world, split="uneven", reduction=reduction, aux=aux, options=options, chunk_rows=4)
    results = check(case, workers)
    for name in aux:
        compare.assert_same_bits([r.aux[name] for r in results], name)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("ignored", ["some", "all"])
def test_aux_outputs_interpreted_triton(world: int, ignored: str, interpreted_workers: Pool) -> None:
    case = Case(
        lead=(7,), world=world, split="empty", ignored=ignored, aux=AUX, options=(("z_loss", 1e-2),), backend="triton"
    )
    check(case, interpreted_workers)


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
@pytest.mark.parametrize("world", [1, 2])
def test_aux_outputs_of_no_tokens(lead: tuple[int, ...], world: int, workers: Pool) -> None:
    for reduction in ("mean", "none"):
        check(Case(lead=lead, world=world, aux=AUX, reduction=reduction), workers)


def test_aux_of_features_that_change_the_logits(workers: Pool) -> None:
    """They are those of the capped, scaled, biased logits; the z part is scaled and weighted as the loss is."""
    options = (
        ("softcap", 2.0), ("logit_scale", 3.0), ("label_smoothing", 0.2), ("token_scaling", True), ("z_loss", 1e-2),
    )  # fmt: skip
    check(Case(world=2, bias=True, aux=AUX, options=options, token_weight=True, class_weight=True), workers)


@pytest.mark.parametrize("bias", [[0.0, torch.inf, 0.0], [-torch.inf] * 3, [0.0, -torch.inf, 1.0]])
def test_lse_of_infinite_logits(bias: list[float]) -> None:
    hidden, weight, target = torch.zeros(2, 2), torch.zeros(3, 2), torch.tensor([0, -100])
    output: Any = linear_cross_entropy(hidden, weight, target, bias=torch.tensor(bias), aux=("lse",))
    torch.testing.assert_close(output.lse, torch.logsumexp(torch.tensor(bias), 0).expand(2))


def test_aux_not_asked_for_is_none() -> None:
    import flce_dist

    x, w, t = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 1, 2, 3])
    output = flce_dist.linear_cross_entropy(x, w, t, aux=("lse",))
    assert isinstance(output, flce_dist.LossOutput)
    assert [name for name, value in output._asdict().items() if value is None] == [
        name for name in output._fields if name not in ("loss", "lse")
    ]
    assert isinstance(flce_dist.linear_cross_entropy(x, w, t), torch.Tensor)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_predictions_break_ties_to_the_lowest_id(world: int, backend: str, pool_for: Any) -> None:
    for result in pool_for(backend).run(world, _tied_predictions, backend):
        assert result.tolist() == [0, 1, 2, 0, 0]


def _tied_predictions(ctx: Any, backend: str) -> torch.Tensor:
    import flce_dist

    logits = torch.zeros(5, 9)
    logits[1, [1, 5, 8]] = 2.0  # the same maximum in each of three shards
    logits[2, [2, 3]] = 1.0
    logits[3] = -3.0
    logits[4, 1:] = -1e4
    rows = 9 // ctx.world + (9 % ctx.world > 0)
    weight = torch.eye(9)[ctx.rank * rows : (ctx.rank + 1) * rows]
    target = torch.tensor([0, 5, -100, 8, 1])
    return flce_dist.linear_cross_entropy(
        logits, weight, target, aux=("predictions",), backend=backend, group=ctx.group, vocab_size=9
    ).predictions


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.0},
        {"z_loss": 0.0},
        {"logit_scale": 1.0},
        {"softcap": None},
        {"class_weight": None},
        {"token_weight": None},
        {"token_scaling": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_switched_off_feature_changes_no_bit(options: dict[str, Any], reduction: str) -> None:
    from flce_dist import linear_cross_entropy
    from tests.kit.cases import make_inputs

    full = make_inputs(Case())
    leaves = full.hidden.requires_grad_(), full.weight.requires_grad_()
    results = []
    for keywords in ({}, options):
        loss = linear_cross_entropy(*leaves, full.target, reduction=reduction, **keywords)
        results.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
    for name, *both in zip(("loss", "hidden gradient", "weight gradient"), *results, strict=True):
        compare.assert_same_bits(both, name)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("lead", [(11,), (3, 4), (0,)])
def test_skip_ignored(world: int, reduction: str, ignored: str, lead: tuple[int, ...], workers: Pool) -> None:
    """The same values and shapes; gradients of ignored tokens are zeros."""
    case = Case(
        lead=lead,
        world=world,
        reduction=reduction,
        ignored=ignored,
        token_weight=True,
        options=(("skip_ignored", True), ("z_loss", 1e-2)),
        chunk_rows=3,
    )
    check(case, workers)


def test_skip_ignored_saves_the_products_of_ignored_rows() -> None:
    from flce_dist import linear_cross_entropy
    from tests.kit.trace import Trace

    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    target = torch.full((64,), -100)
    target[::4] = 3
    with Trace() as trace:
        linear_cross_entropy(hidden, weight, target, skip_ignored=True).backward()
    rows = [max(shape[0] for shape in e.shapes if len(shape) == 2) for e in trace.matrix_products]
    assert len(rows) == 3
    assert max(rows) <= 32, "a product still has all 64 rows"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["predictions", "lse", "entropy"])
def test_outputs_of_ignored_tokens_are_refused_where_they_are_skipped(name: str, world: int, workers: Pool) -> None:
    """They are promised for ignored tokens too; skipping those may not return something else silently."""
    case = Case(world=world, aux=(name,), options=(("skip_ignored", True),))
    words = f"aux '{name}' is given for ignored tokens too, which skip_ignored=True never computes"
    assert_all_raise(workers.outcomes(world, run_case, case), "ValueError", words)


@pytest.mark.parametrize("kind", ["int", "float", "tensor", "int tensor", "numpy"])
@pytest.mark.parametrize("world", [1, 2])
def test_normalizer_may_be_a_number_or_a_tensor(kind: str, world: int, workers: Pool) -> None:
    values: dict[str, Any] = {
        "int": 5,
        "float": 5.0,
        "tensor": torch.tensor(5.0),
        "int tensor": torch.tensor(5),
        "numpy": np.int32(5),
    }
    value = values[kind]
    results = workers.run(world, run_case, Case(world=world, options=(("normalizer", value), ("z_loss", 1e-2))))
    judge(Case(world=world, normalizer=5.0, options=(("z_loss", 1e-2),)), results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["accum_dtype", "logits_dtype", "hidden_grad_reduce_dtype"])
@pytest.mark.parametrize("world", [1, 2])
def test_dtype_options_leave_full_precision_inputs_right(
    dtype: torch.dtype, name: str, world: int, workers: Pool
) -> None:
    case = Case(world=world, dtype=dtype, options=((name, dtype),), chunk_rows=3)
    check(case, workers)


@pytest.mark.parametrize("names", [("accum_dtype",), ("logits_dtype",), ("accum_dtype", "logits_dtype")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fp32_inside_keeps_the_gradients_dtype(
    names: tuple[str, ...], dtype: torch.dtype, world: int, reduction: str, workers: Pool
) -> None:
    sizes: dict[str, Any] = {"lead": (40,), "hidden_size": 16, "vocab_size": 64}
    options = tuple((name, torch.float32) for name in names)
    check(Case(world=world, dtype=dtype, reduction=reduction, options=options, chunk_rows=16, **sizes), workers)
