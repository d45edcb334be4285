"""The cases of losses with a sharded vocabulary: Cut Cross Entropy, Liger, Megatron-LM, DeepSpeed, flash-attention,
torchtitan, verl. Group sizes are theirs."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import VocabShard, linear_cross_entropy
from tests.kit.workers import Context, Pool
from tests.neighbours.support import (
    FLOAT32_LOGITS,
    Inputs,
    Outcome,
    close,
    compare,
    ids,
    ignore_some,
    logits_of,
    normal,
    plain,
    run,
    run_on,
    uniform,
)

Engines = Callable[[int], Pool]
REDUCTIONS = ["mean", "sum", "none"]


def pool_of(world: int, workers: Pool, engine_workers: Engines) -> Pool:
    return workers if world <= 4 else engine_workers(world)


# Cut Cross Entropy


def even_to_one(vocab_size: int, world: int) -> list[int]:
    """Its partition: shards differ by at most one row, the larger ones first."""
    cuts = [0]
    for rank in range(world):
        cuts.append(cuts[-1] + vocab_size // world + (rank < vocab_size % world))
    return cuts


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("invalids", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1.0])
def test_cce_vocab_parallel(dtype: torch.dtype, tolerance: float, invalids: bool, z_loss: float, workers: Pool) -> None:
    """Four ranks, 507 columns; the reference is our own unsharded call, as theirs is theirs."""
    hidden, target = normal((252, 123), dtype, 1) / 123**0.5, ids(507, (252,), 3)
    target = ignore_some(target, -100, 0.2) if invalids else target
    inputs = Inputs(hidden.view(4, 63, 123), normal((507, 123), dtype, 2), target.view(4, 63))
    atol = {"atol": tolerance, "rtol": 1e-5}
    outcomes = run_on(workers, 4, inputs, z_loss=z_loss, cuts=even_to_one(507, 4))
    compare(outcomes, run(None, inputs, z_loss=z_loss), atol, atol)
    compare(outcomes, plain(inputs, z_loss=z_loss), {"atol": 2e-2, "rtol": 1e-3}, {"atol": tolerance, "rtol": 1e-2})


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 5e-2)], ids=str
)
@pytest.mark.parametrize("invalids", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cce_tokens_of_data_parallel_ranks(
    dtype: torch.dtype, tolerance: float, invalids: bool, reduction: str, workers: Pool
) -> None:
    """Each of four ranks brings its own tokens and holds its rows: one loss over all of them. Sums are compared
    relative to their size."""
    target = ids(508, (256,), 3)
    inputs = Inputs(normal((256, 64), dtype, 1) / 8, normal((508, 64), dtype, 2), target)
    inputs.target = ignore_some(target, -100, 0.2) if invalids else target
    size = 1.0 if reduction == "mean" else 256.0
    bound = {"atol": tolerance * size, "rtol": 1e-5}
    outcomes = run_on(workers, 4, inputs, reduction=reduction, sharded_tokens=True)
    compare(outcomes, plain(inputs, reduction=reduction), bound, bound, sharded_tokens=True)


@pytest.mark.parametrize("size", [1023, 2048])
@pytest.mark.parametrize("world", [7, 8])
def test_cce_partition(size: int, world: int) -> None:
    """Any partition can be passed; `VocabShard.even` is torch's, with ceil(V / W) rows each."""
    cuts = even_to_one(size, world)
    assert sum(VocabShard(size, a, b).num_rows for a, b in itertools.pairwise(cuts)) == size
    shards = [VocabShard.even(size, rank, world) for rank in range(world)]
    assert [s.stop - s.start for s in shards] == [len(part) for part in torch.arange(size).chunk(world)]


# Liger


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("lead", "vocab_size"), [((8, 2), 128), ((16, 1), 4096)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_liger_vocab_parallel(
    world: int, lead: tuple[int, int], vocab_size: int, smoothing: float, workers: Pool, engine_workers: Engines
) -> None:
    """Its torch formula over the global vocabulary; Megatron's smoothing by alpha V / (V - 1) is the same loss."""
    if vocab_size == 128:  # logits through an identity weight; the wide case has a linear layer
        logits = normal((*lead, vocab_size), torch.float32, 1) * 0.5
        inputs = Inputs(logits, torch.eye(vocab_size), ids(vocab_size, lead, 2))
    else:
        hidden, weight = normal((*lead, 16), torch.float32, 1) * 0.5, normal((vocab_size, 16), torch.float32, 3) / 4
        inputs = Inputs(hidden, weight, ids(vocab_size, lead, 2))
    tolerance = {"atol": 1e-4, "rtol": 1e-3}
    for alpha in (smoothing, smoothing * vocab_size / (vocab_size - 1)):
        options = {"reduction": "none", "label_smoothing": alpha}
        outcomes = run_on(pool_of(world, workers, engine_workers), world, inputs, **options)
        compare(outcomes, plain(inputs, **options), tolerance, tolerance)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("scalar", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lead", "ignore_index", "smoothing"), [((16, 1), 1, 0.1), ((5, 3), -300, 0.05)], ids=str)
def test_liger_sweeps(
    world: int,
    scalar: float,
    dtype: torch.dtype,
    lead: tuple[int, int],
    ignore_index: int,
    smoothing: float,
    workers: Pool,
) -> None:
    """Large logits, ignored ids of either sign with smoothing, and a factor behind the loss."""
    logits = normal((*lead, 123), dtype, 1) * scalar
    target = ignore_some(ids(123, lead, 2), ignore_index, 0.3)
    inputs = Inputs(logits, torch.eye(123, dtype=dtype), target)
    upstream = 3.0 * uniform(lead, 0.0, 1.0, torch.float32, 3)
    options = {"reduction": "none", "ignore_index": ignore_index}
    tolerance = {"atol": 1e-2, "rtol": 5e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-4}
    for more in ({}, {"label_smoothing": smoothing}):
        outcomes = run_on(workers, world, inputs, upstream, **options, **more)
        compare(outcomes, plain(inputs, upstream, **options, **more), tolerance, tolerance)


def test_liger_out_of_bounds_targets_are_an_error_here() -> None:
    with pytest.raises(IndexError, match="69"):
        linear_cross_entropy(torch.randn(4, 64), torch.eye(64), torch.tensor([0, 69, 1, 69]))


# Megatron-LM

MEGATRON: list[tuple[tuple[int, ...], int, int]] = [((80,), 125, 64), ((1, 80), 126, 64), ((2, 40), 126, 64)]


def megatron_inputs(problem: tuple[tuple[int, ...], int, int], world: int, dtype: torch.dtype) -> Inputs:
    """Its problems name the vocabulary of one rank."""
    lead, columns, hidden_size = problem
    return Inputs(
        uniform((*lead, hidden_size), -0.1, 0.1, dtype, 1),
        uniform((columns * world, hidden_size), -0.1, 0.1, dtype, 2),
        ids(columns * world, lead, 3),
    )


def megatron_check(
    pool: Pool, world: int, inputs: Inputs, reduction: str, sharded_tokens: bool = False, ignore_index: int = -100
) -> None:
    upstream = uniform(tuple(inputs.target.shape) if reduction == "none" else (), -0.1, 0.1, torch.float32, 4)
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": ignore_index}
    outcomes = run_on(pool, world, inputs, upstream, sharded_tokens=sharded_tokens, **options, **FLOAT32_LOGITS)
    expected = plain(inputs, upstream, torch.float32, **options)
    compare(outcomes, expected, {}, {"atol": 1e-3, "rtol": 1e-3}, sharded_tokens=sharded_tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", MEGATRON, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-100, 4])
def test_megatron_data_parallel(
    dtype: torch.dtype, problem: tuple[tuple[int, ...], int, int], reduction: str, ignore_index: int, workers: Pool
) -> None:
    """Float32 losses of 16-bit operands to 1.3e-6, with ignored tokens at the end of each sequence."""
    inputs = megatron_inputs(problem, 1, dtype)
    if ignore_index == 4:
        inputs.target = torch.nn.functional.pad(inputs.target, (0, 1), value=4)[..., 1:].contiguous()
    megatron_check(workers, 1, inputs, reduction, ignore_index=ignore_index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", MEGATRON, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron_tensor_and_sequence_parallel(
    dtype: torch.dtype,
    problem: tuple[tuple[int, ...], int, int],
    reduction: str,
    sequence_parallel: bool,
    workers: Pool,
) -> None:
    """Sequence-parallel ranks hold the lead's tokens each; ours pass their own targets, theirs all of them."""
    lead, columns, hidden_size = problem
    lead = (lead[0] * 2, *lead[1:]) if sequence_parallel else lead
    megatron_check(workers, 2, megatron_inputs((lead, columns, hidden_size), 2, dtype), reduction, sequence_parallel)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron_wide_vocabulary(dtype: torch.dtype, reduction: str, sequence_parallel: bool, workers: Pool) -> None:
    lead = (160,) if sequence_parallel else (80,)
    megatron_check(workers, 2, megatron_inputs((lead, 152064, 64), 2, dtype), reduction, sequence_parallel)


def test_megatron_known_losses(workers: Pool) -> None:
    """Logits 0..7 on each of four ranks, targets 0, 2, 4, ...: log(4 sum_k e^k) - target mod 8."""
    logits = torch.arange(8.0).repeat(16, 4)
    inputs = Inputs(logits, torch.eye(32), torch.arange(0, 32, 2))
    expected = (4 * torch.arange(8.0).exp().sum()).log() - torch.arange(0, 32, 2) % 8
    for outcome in run_on(workers, 4, inputs, reduction="none"):
        close(outcome.loss, expected, {}, "loss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_megatron_the_gradient_has_the_logits_dtype(dtype: torch.dtype, world: int, workers: Pool) -> None:
    inputs = Inputs(normal((4, 2, 8), dtype, 1), torch.eye(8, dtype=dtype), ids(8, (4, 2), 2))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    outcomes = run_on(workers, world, inputs, reduction="none")
    assert {o.hidden.dtype for o in outcomes if o.hidden is not None} == {dtype}
    compare(outcomes, plain(inputs, dtype=torch.float32, reduction="none"), tolerance, tolerance)


@pytest.mark.parametrize("world", [1, 2])
def test_megatron_lite_chunks_and_temperature(world: int, workers: Pool) -> None:
    inputs = Inputs(normal((6, 1, 4), torch.bfloat16, 1), normal((10, 4), torch.bfloat16, 2), ids(10, (6, 1), 3))
    options = {"reduction": "none", "logit_scale": 1 / 1.25}
    for sharded_tokens in (False, True):
        outcomes = run_on(workers, world, inputs, chunk_rows=2, sharded_tokens=sharded_tokens, **options)
        tolerance = {"rtol": 3e-2, "atol": 3e-3}
        # Eager scales its rounded logits, ours are rounded once, after the scale: the loss is held to that rounding.
        compare(
            outcomes,
            plain(inputs, dtype=torch.float32, **options),
            {"rtol": 1.6e-2, "atol": 2e-2},
            tolerance | {"atol": 2e-2},
            sharded_tokens=sharded_tokens,
        )


# DeepSpeed


def deepspeed_inputs(dtype: torch.dtype = torch.float32, bias: bool = True) -> Inputs:
    target = ids(17, (2, 5), 3)
    target[0, 1] = target[1, 4] = -100
    return Inputs(
        normal((2, 5, 8), dtype, 1), normal((17, 8), dtype, 2), target, normal((17,), dtype, 4) if bias else None
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_rows", [None, 1, 3])
def test_deepspeed_matches_linear_then_cross_entropy(reduction: str, bias: bool, chunk_rows: int | None) -> None:
    inputs = deepspeed_inputs(bias=bias)
    upstream = uniform((2, 5) if reduction == "none" else (), 0.5, 1.5, torch.float32, 5)
    got = run(None, inputs, upstream, reduction=reduction, chunk_rows=chunk_rows)
    compare([got], plain(inputs, upstream, reduction=reduction))


@pytest.mark.parametrize("chunk_rows", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deepspeed_uneven_shards(dtype: torch.dtype, chunk_rows: int | None, workers: Pool) -> None:
    inputs = deepspeed_inputs(dtype)
    tolerance = {} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    outcomes = run_on(workers, 2, inputs, cuts=[0, 9, 17], chunk_rows=chunk_rows, **FLOAT32_LOGITS)
    compare(outcomes, plain(inputs, dtype=torch.float32), tolerance, tolerance)


@pytest.mark.parametrize("vocab_size", [34, 35])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_deepspeed_logits_of_size_20(vocab_size: int, dtype: torch.dtype, reduction: str, workers: Pool) -> None:
    logits = normal((2, 3, vocab_size), torch.float32, 1).mul(20).to(dtype)
    target = torch.tensor([[0, -100, vocab_size - 1], [1, 17, 8]])
    inputs = Inputs(logits, torch.eye(vocab_size, dtype=dtype), target)
    outcomes = run_on(workers, 2, inputs, reduction=reduction, cuts=[0, vocab_size // 2, vocab_size])
    expected = plain(inputs, dtype=torch.float32, reduction=reduction)
    for outcome in outcomes:
        close(outcome.loss, expected.loss, {"atol": 2e-5, "rtol": 2e-5}, "loss")
        # Each rank's part of this gradient is rounded to 16 bits, as theirs is: half a unit in the last place.
        rtol = max(2e-3, torch.finfo(dtype).eps)
        close(outcome.hidden, expected.hidden, {"atol": 2e-5, "rtol": rtol}, "gradient")


def test_deepspeed_all_ignored_is_zero() -> None:
    inputs = deepspeed_inputs(bias=False)
    inputs.target.fill_(-100)
    got = run(None, inputs)
    assert got.loss == 0
    assert not got.hidden.any()
    assert not got.weight.any()


def test_deepspeed_frozen_weight() -> None:
    inputs = deepspeed_inputs(bias=False)
    hidden = inputs.hidden.clone().requires_grad_()
    linear_cross_entropy(hidden, inputs.weight, inputs.target).backward()
    close(hidden.grad, plain(inputs).hidden, {}, "hidden gradient")
    assert inputs.weight.grad is None


def test_deepspeed_fp16_loss_scale_does_not_overflow() -> None:
    """A factor of 65536 is no fp16 number; the gradients that it scales are."""
    half = torch.float16
    inputs = Inputs(
        torch.ones(4, 1, dtype=half),
        torch.zeros(2, 1, dtype=half),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(2, dtype=half),
    )
    compare([run(None, inputs, 65536.0)], plain(inputs, 65536.0, torch.float32))


@pytest.mark.parametrize("options", [{}, FLOAT32_LOGITS], ids=str)
def test_deepspeed_fp16_product_cancelled_by_the_bias(options: dict[str, Any]) -> None:
    """256 x 256 is no fp16 number either; with the bias the logit is 32, as in `F.linear`."""
    half = torch.float16
    inputs = Inputs(
        torch.full((1, 1), 256.0, dtype=half),
        torch.full((2, 1), 256.0, dtype=half),
        torch.tensor([0]),
        torch.full((2,), -65504.0, dtype=half),
    )
    compare([run(None, inputs, **options)], plain(inputs))


def test_deepspeed_many_chunks_accumulate_the_weight_gradient_exactly() -> None:
    inputs = Inputs(
        torch.ones(1024, 1).bfloat16(),
        torch.zeros(2, 1).bfloat16(),
        torch.zeros(1024, dtype=torch.int64),
        torch.zeros(2).bfloat16(),
    )
    got, expected = run(None, inputs, chunk_rows=1), plain(inputs, dtype=torch.float32)
    close(got.weight, expected.weight, {}, "weight gradient")
    close(got.bias, expected.bias, {}, "bias gradient")


def test_deepspeed_the_hidden_gradient_sums_many_columns_exactly() -> None:
    weight = torch.ones(1024, 1).bfloat16()
    weight[0] = 0
    inputs = Inputs(torch.zeros(1024, 1).bfloat16(), weight, torch.zeros(1024, dtype=torch.int64))
    got = run(None, inputs, reduction="sum", chunk_rows=1)
    close(got.hidden, plain(inputs, dtype=torch.float32, reduction="sum").hidden, {}, "hidden gradient")


def test_deepspeed_autocast_with_float32_parameters() -> None:
    inputs = deepspeed_inputs()
    inputs.hidden = inputs.hidden.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = run(None, inputs), plain(inputs)
    tolerance = {"atol": 2e-2, "rtol": 2e-2}
    assert (got.hidden.dtype, got.weight.dtype) == (torch.bfloat16, torch.float32)
    compare([got], expected, tolerance, tolerance)


# flash-attention


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.9])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_flash_attention(
    dtype: torch.dtype, smoothing: float, world: int, workers: Pool, engine_workers: Engines
) -> None:
    """1024 tokens with logits of size 10, 10 ignored, an upstream gradient for each; 504 columns stand for 50264."""
    target = ignore_some(ids(504, (1024,), 2), -100, 10 / 1024)
    inputs = Inputs(normal((1024, 504), dtype, 1) * 10, torch.eye(504, dtype=dtype), target)
    upstream = normal((1024,), torch.float32, 3)
    options = {"reduction": "none", "label_smoothing": smoothing}
    rtol, atol = {torch.float32: (1e-5, 1e-6), torch.float16: (1e-3, 1e-4), torch.bfloat16: (1e-2, 3e-3)}[dtype]
    outcomes = run_on(pool_of(world, workers, engine_workers), world, inputs, upstream, **options)
    expected = plain(inputs, upstream, **options)
    for outcome in outcomes:
        close(outcome.loss, expected.loss, {"rtol": 1e-5, "atol": 1e-6}, "loss")
        close(outcome.hidden, expected.hidden, {"rtol": rtol, "atol": atol}, "gradient")


# torchtitan


@pytest.mark.parametrize(("vocab_size", "ignored"), [(32000, False), (32003, False), (32000, True)], ids=str)
def test_torchtitan_loss_parallel(vocab_size: int, ignored: bool, workers: Pool) -> None:
    """Four ranks with even and uneven shards (theirs is compared bit for bit with torch's loss_parallel)."""
    target = ids(vocab_size, (4, 32), 2)
    inputs = Inputs(normal((4, 32, 16), torch.float32, 1), normal((vocab_size, 16), torch.float32, 3) / 4, target)
    inputs.target = ignore_some(target, -100, 0.3) if ignored else target
    compare(run_on(workers, 4, inputs, reduction="sum"), plain(inputs, reduction="sum"))


@pytest.mark.parametrize("vocab_size", [320, 323])
def test_torchtitan_two_by_two_ranks(vocab_size: int, workers: Pool) -> None:
    """Data-parallel rows of the mesh with tensor-parallel columns: each pair of ranks has its own batch and loss."""
    target = ignore_some(ids(vocab_size, (4, 32), 2), -100, 0.3)
    inputs = Inputs(normal((4, 32, 16), torch.float32, 1), normal((vocab_size, 16), torch.float32, 3), target)
    outcomes = workers.run(4, _pair_of_a_mesh, inputs)
    for batch in range(2):
        half = Inputs(inputs.hidden.chunk(2)[batch], inputs.weight, inputs.target.chunk(2)[batch])
        compare(outcomes[2 * batch : 2 * batch + 2], plain(half, reduction="sum"))


def _pair_of_a_mesh(ctx: Context, inputs: Inputs) -> Outcome:
    batch, rank = divmod(ctx.rank, 2)
    pair = Context(rank, 2, ctx.groups[(2 * batch, 2 * batch + 1)], {})
    half = Inputs(inputs.hidden.chunk(2)[batch], inputs.weight, inputs.target.chunk(2)[batch])
    return run(pair, half, reduction="sum")


def test_torchtitan_microbatches_with_one_divisor() -> None:
    """Sums over the tokens of all microbatches are the mean over all: `normalizer` says so at once."""
    batches = [ids(100, (2, 4), seed) for seed in range(3)]
    batches[1][:, ::2] = -100
    batches[2][:, 1:] = -100
    hidden, weight = normal((3, 2, 4, 100), torch.float32, 4), torch.eye(100)
    total = sum(int((target != -100).sum()) for target in batches)
    parts = [linear_cross_entropy(h, weight, t, normalizer=total) for h, t in zip(hidden, batches, strict=True)]
    together = linear_cross_entropy(hidden, weight, torch.stack(batches))
    close(torch.stack(parts).sum(), together, {}, "loss")


# verl


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("num_tokens", "hidden_size", "vocab_size"), [(121, 112, 4752), (96, 64, 1008)], ids=str)
def test_verl_log_probabilities_and_entropy(
    world: int, num_tokens: int, hidden_size: int, vocab_size: int, workers: Pool
) -> None:
    """Temperature 1.5, uniform values up to 0.5, bfloat16; sizes a 32nd of two of theirs. The entropy has no gradient
    here, so that of the log probabilities alone is compared."""
    dtype = torch.bfloat16
    inputs = Inputs(
        uniform((1, num_tokens, hidden_size), -0.5, 0.5, dtype, 1),
        uniform((vocab_size, hidden_size), -0.5, 0.5, dtype, 2),
        ids(vocab_size, (1, num_tokens), 3),
    )
    upstream = uniform((1, num_tokens), -1.0, 1.0, torch.float32, 4)
    options = {"reduction": "none", "logit_scale": 1 / 1.5}
    outcomes = run_on(workers, world, inputs, upstream, aux=("entropy",), **options, **FLOAT32_LOGITS)
    expected = plain(inputs, upstream, torch.float32, **options)
    compare(outcomes, expected, {"atol": 1e-4, "rtol": 1e-4}, {"atol": 1e-2, "rtol": 1e-4})
    log_prob: Tensor = logits_of(inputs.hidden.float(), inputs.weight.float(), None, logit_scale=1 / 1.5).log_softmax(
        -1
    )
    entropy = -(log_prob.exp() * log_prob).sum(-1).reshape(1, num_tokens)
    for outcome in outcomes:
        close(outcome.aux["entropy"], entropy, {"atol": 1e-4, "rtol": 1e-4}, "entropy")
