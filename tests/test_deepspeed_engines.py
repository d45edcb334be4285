"""Real DeepSpeed engines with the loss section: three SGD steps equal a single process with full logits."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kit.skips import needs

pytest.importorskip("deepspeed", reason=needs("deepspeed"))

from flce_dist.integrations.deepspeed import initialize, step_normalizer
from tests.kit.engines import (
    LR,
    ROWS,
    Cell,
    batches,
    deepspeed_ready,
    gathered,
    joined,
    judge,
    make_model,
    train_engine,
)
from tests.kit.workers import Context, Pool

Engines = Callable[[int], Pool]


def run(engines: Engines, world: int, cell: Cell, data_ranks: int | None = None) -> None:
    judge(cell, engines(world).run(world, train_engine, cell), data_ranks or world)


def cells(*choices: Any, **common: Any) -> list[Any]:
    """The product of stages, dtypes, accumulation steps, clipping and ties; those that change several things at once
    or nothing are always run, the others with `make test-all`."""
    found = []
    for stage, dtype, accumulation, clip, tied in itertools.product(*choices):
        cell = Cell(stage, dtype, accumulation, clip, tied, **common)
        marks = () if (accumulation > 1) == (clip > 0) else (pytest.mark.exhaustive,)
        found.append(pytest.param(cell, id=cell.id, marks=marks))
    return found


DTYPES = ("float32", "bfloat16")
MATRIX = cells(range(4), DTYPES, (1, 2), (0.0, 0.3), (False, True))
DATA = {"vocab_parallel": "data"}


@pytest.mark.parametrize("cell", MATRIX)
def test_zero_stages_on_two_ranks(cell: Cell, engine_workers: Engines) -> None:
    run(engine_workers, 2, cell)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("cell", cells([3], DTYPES, (1, 2), (0.0, 0.3), [False], section=DATA))
def test_the_head_that_is_never_gathered(cell: Cell, bias: bool, engine_workers: Engines) -> None:
    run(engine_workers, 2, replace(cell, bias=bias))


@pytest.mark.parametrize("vocab_size", [37, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_that_is_never_gathered_on_four_ranks(dtype: str, vocab_size: int, engine_workers: Engines) -> None:
    """Also with a rank that has nothing but padding."""
    run(engine_workers, 4, Cell(3, dtype, 2, 0.3, bias=True, vocab_size=vocab_size, section=DATA))


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
VARIANTS = [
    Cell(2, accumulation=2, clip=0.3, zero=OFFLOAD),
    Cell(3, accumulation=2, clip=0.3, zero=OFFLOAD | {"offload_param": {"device": "cpu"}}),
    Cell(3, accumulation=2, clip=0.3, zero=OFFLOAD | {"offload_param": {"device": "cpu"}}, section=DATA),
    Cell(3, "bfloat16", accumulation=2, clip=0.3, zero=OFFLOAD, section=DATA),
    Cell(3, accumulation=2, clip=0.3, zero={"stage3_param_persistence_threshold": 10**5}),
    Cell(3, accumulation=2, clip=0.3, zero={"stage3_param_persistence_threshold": 10**5}, section=DATA),
    Cell(3, accumulation=2, clip=0.3, zero={"reduce_scatter": False}, section=DATA),
    Cell(3, accumulation=2, clip=0.3, zero={"contiguous_gradients": False}, section=DATA),
    Cell(3, accumulation=2, clip=0.3, zero={"reduce_bucket_size": 100, "sub_group_size": 300}, section=DATA),
    Cell(3, accumulation=2, clip=0.3, zero_init=True),
    Cell(3, accumulation=2, clip=0.3, zero_init=True, section=DATA),
    Cell(3, clip=0.3, section={"chunk_rows": 5, "backward": "recompute", "check_ranks": "never"}),
    Cell(3, clip=0.3, section=DATA | {"chunk_rows": 5, "backward": "recompute", "skip_ignored": True}),
    Cell(1, clip=0.3, section={"head": "lm_head", "vocab_parallel": "none"}),
]


@pytest.mark.parametrize("cell", VARIANTS, ids=lambda cell: cell.id)
def test_variants_on_two_ranks(cell: Cell, engine_workers: Engines) -> None:
    run(engine_workers, 2, cell)


FLOAT32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
NORMALIZED = [
    *[Cell(stage, dtype, 2) for stage in range(4) for dtype in DTYPES],
    Cell(1, "bfloat16", 2, extra=FLOAT32_SUMS),  # another optimizer of DeepSpeed's
    Cell(0, accumulation=2, llama=True),
    Cell(3, accumulation=2, section=DATA),
]


@pytest.mark.parametrize("cell", [replace(cell, normalized=True) for cell in NORMALIZED], ids=lambda cell: cell.id)
def test_the_caller_divides_by_the_normalizer_of_a_step(cell: Cell, engine_workers: Engines) -> None:
    """The loss is the engine's own output, no clipping hides another scale of the gradients, and nor does SGD."""
    run(engine_workers, 2, cell)


AUTOTP = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [{"patterns": [r".*lm_head\.weight$"], "partition_type": "column"}],
        },
    }
}
MPU = {"mpu": True, "section": {"vocab_parallel": "tensor"}}
# Without ZeRO, DeepSpeed 0.19.8 clips 16-bit gradients by the norm of the first tensor-parallel rank's
# (FP16_UnfusedOptimizer flattens them and with it loses the marks of the parameters), whatever the head.
TENSOR = [
    Cell(stage, dtype, accumulation, clip, bias=bias, **how)
    for stage, dtype, (accumulation, clip, bias), how in itertools.product(
        range(4), DTYPES, ((1, 0.0, False), (2, 0.3, True)), ({"extra": AUTOTP}, MPU)
    )
    if (stage, dtype) != (0, "bfloat16") or clip == 0
]


@pytest.mark.parametrize("cell", TENSOR, ids=lambda cell: cell.id)
def test_tensor_parallel_heads_on_two_by_two_ranks(cell: Cell, engine_workers: Engines) -> None:
    run(engine_workers, 4, cell, data_ranks=2)


def autotp(**options: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": 2, **options}}


LLAMA = [
    *[Cell(stage, "float32", 2, 0.3, tied, llama=True) for stage in range(4) for tied in (False, True)],
    Cell(2, "bfloat16", llama=True),
    Cell(3, "bfloat16", 2, 0.3, llama=True),
    Cell(3, "float32", 2, 0.3, llama=True, section=DATA),
    Cell(3, "bfloat16", 2, 0.3, llama=True, section=DATA),
]
HEADS: list[tuple[str, bool, dict[str, Any]]] = [
    ("gathered", False, {}),
    ("gathered by choice", False, {"vocab_parallel_lm_head": False}),
    ("sharded logits", False, {"vocab_parallel_lm_head": True}),
    ("tied", True, {}),
]
LLAMA_AUTOTP = [
    pytest.param(
        # The clipping of ZeRO stage 0 in 16 bits is that of TENSOR.
        Cell(stage, dtype, 2, 0.3 if stage or dtype == "float32" else 0.0, tied, llama=True, extra=autotp(**options)),
        id=f"zero{stage}-{dtype}-{name}",
        marks=(pytest.mark.exhaustive,) if dtype == "bfloat16" and stage in (0, 2) else (),
    )
    for stage, dtype, (name, tied, options) in itertools.product(range(4), DTYPES, HEADS)
]


@pytest.mark.parametrize("cell", LLAMA, ids=lambda cell: cell.id)
def test_a_transformers_model_with_labels(cell: Cell, engine_workers: Engines) -> None:
    run(engine_workers, 2, cell)


@pytest.mark.parametrize("cell", LLAMA_AUTOTP)
def test_a_transformers_model_under_autotp(cell: Cell, engine_workers: Engines) -> None:
    run(engine_workers, 4, cell, data_ranks=2)


def _a_loss_a_token(ctx: Context, section: dict[str, Any], normalized: bool) -> dict[str, Tensor]:
    """One step of SGD from `reduction="none"`, the rank's losses divided by its own count or the step's normalizer."""
    cell = Cell(3, bias=True, section=section | {"reduction": "none"})
    with deepspeed_ready(ctx):
        model = make_model(cell)
        engine = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), LR), config=cell.config())[0]
        ids, labels = uneven(cell, ctx.rank, ctx.world)
        divisor = step_normalizer(engine, labels) if normalized else (labels != -100).sum()
        losses = engine(ids, labels)
        assert losses.shape == labels.shape
        engine.backward(losses.sum() / divisor)
        engine.step()
        trained = joined(gathered(engine), engine.module.lm_head, cell)
        engine.destroy()
    return trained


def uneven(cell: Cell, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Rank 0 has fewer valid labels than the others."""
    ids, labels = (tensor[rank * ROWS : (rank + 1) * ROWS].clone() for tensor in batches(cell, world)[0][0])
    if rank == 0:
        labels[0] = -100
    return ids, labels


@pytest.mark.parametrize("normalized", [False, True], ids=["mean of the ranks' means", "mean of all tokens"])
@pytest.mark.parametrize("section", [{}, DATA], ids=["gathered", "never gathered"])
def test_losses_of_tokens_are_averaged_over_ranks(
    section: dict[str, Any], normalized: bool, engine_workers: Engines
) -> None:
    """DeepSpeed's mean over ranks, whichever head."""
    cell, world = Cell(3, bias=True), 2
    model = make_model(cell).double()
    parts = [uneven(cell, rank, world) for rank in range(world)]
    counts = [int((labels != -100).sum()) for _, labels in parts]
    for (ids, labels), own in zip(parts, counts, strict=True):
        logits = model.lm_head(model.hidden(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / (sum(counts) if normalized else own * world)).backward()
    for trained in engine_workers(world).run(world, _a_loss_a_token, section, normalized):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            moved = (trained[name].double() - make_model(cell).state_dict()[name].double()) / -LR
            torch.testing.assert_close(moved, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
