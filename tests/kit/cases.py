"""One case of the loss as data: inputs, job for a worker, judgement; and a selector that covers all pairs of values."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kit import compare, heads, oracle
from tests.kit.workers import Context, Pool

# Those of `options` that change the mathematics; the oracle knows them by the same names.
ORACLE_OPTIONS = ("label_smoothing", "z_loss", "token_scaling", "softcap", "logit_scale")


@dataclass(frozen=True)
class Case:
    """Sizes, layout and options of one call. Every rank derives the same full inputs from it."""

    lead: tuple[int, ...] = (13,)
    hidden_size: int = 8
    vocab_size: int = 21
    world: int = 1
    split: str = "even"  # even | uneven | empty | padded
    dtype: torch.dtype = torch.float32
    backend: str = "torch"
    reduction: str = "mean"
    bias: bool = False
    class_weight: bool = False
    token_weight: bool = False
    normalizer: float | None = None
    ignored: str = "some"  # none | some | all
    ignore_index: int = -100
    chunk_rows: int | None = None
    tokens: tuple[int, ...] | None = None  # with hidden_layout="sharded": the tokens of each rank, which sum to lead[0]
    options: tuple[tuple[str, Any], ...] = ()
    aux: tuple[str, ...] = ()
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return torch.Size(self.lead).numel()

    def bounds(self) -> list[tuple[int, int]]:
        """Rows (start, stop) of each rank; rows past vocab_size are padding."""
        return shard_bounds(self.vocab_size, self.world, self.split)


def shard_bounds(vocab_size: int, world: int, split: str) -> list[tuple[int, int]]:
    if split == "even":
        rows = -(-vocab_size // world)
        cuts = [min(rank * rows, vocab_size) for rank in range(world + 1)]
    elif split == "uneven":
        cuts = [round(vocab_size * (rank / world) ** 2) for rank in range(world + 1)]
    elif split == "empty":
        # The first rank has no rows, the others share them.
        rows = -(-vocab_size // max(world - 1, 1))
        cuts = [0] + [min(rank * rows, vocab_size) for rank in range(world)] if world > 1 else [0, vocab_size]
    elif split == "padded":
        # As Megatron pads: equal shards of a multiple of 8 rows, the last ones beyond the vocabulary.
        rows = -(-vocab_size // (8 * world)) * 8
        cuts = [rank * rows for rank in range(world + 1)]
    else:
        raise ValueError(split)
    return list(itertools.pairwise(cuts))


@dataclass
class Inputs:
    """Full, unsharded inputs; `upstream` is the gradient that arrives at the loss."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    upstream: Tensor


def make_inputs(case: Case) -> Inputs:
    hidden, weight, target = heads.random_head(case.num_tokens, case.hidden_size, case.vocab_size, case.seed)
    generator = torch.Generator().manual_seed(case.seed + 1)
    weight = weight * 2.0
    if case.ignored == "all":
        target = torch.full_like(target, case.ignore_index)
    elif case.ignored == "some":
        # The first token is always among them: implementations that take upstream[0] for all tokens are caught.
        drop = torch.rand(case.num_tokens, generator=generator) < 0.3
        drop[:1] = True
        target = torch.where(drop, case.ignore_index, target)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    per_token = case.reduction == "none"
    return Inputs(
        hidden.to(case.dtype).reshape(*case.lead, case.hidden_size),
        weight.to(case.dtype),
        target.reshape(case.lead),
        draw(case.vocab_size).to(case.dtype) if case.bias else None,
        (draw(case.vocab_size).abs() + 0.1) if case.class_weight else None,
        (draw(*case.lead).abs()) if case.token_weight else None,
        draw(*case.lead) if per_token else draw(()) + 2.0,
    )


def local_rows(full: Tensor, start: int, stop: int, padding: float = 7.0) -> Tensor:
    """Rows start..stop of `full`; rows beyond its end are `padding`, which must not matter."""
    rows = full[start : min(stop, len(full))]
    missing = (stop - start) - len(rows)
    return torch.cat([rows, rows.new_full((missing, *full.shape[1:]), padding)]) if missing else rows.clone()


def local_tokens(case: Case, rank: int) -> slice:
    if case.tokens is None:
        return slice(None)
    start = sum(case.tokens[:rank])
    return slice(start, start + case.tokens[rank])


def loss_arguments(case: Case, rank: int, group: Any) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Arguments of linear_cross_entropy on `rank`; hidden, weight and bias are leaves that require grad."""
    import flce_dist

    full = make_inputs(case)
    start, stop = case.bounds()[rank]
    at = local_tokens(case, rank)
    keywords: dict[str, Any] = dict(case.options, reduction=case.reduction, backend=case.backend, aux=case.aux)
    keywords.update(ignore_index=case.ignore_index, chunk_rows=case.chunk_rows, group=group)
    if case.normalizer is not None:
        keywords["normalizer"] = case.normalizer
    if case.tokens is not None:
        keywords["hidden_layout"] = "sharded"
    if case.world > 1 and case.split == "even":
        keywords["vocab_size"] = case.vocab_size
    elif case.world > 1 or case.split == "padded":
        keywords["vocab_shard"] = flce_dist.VocabShard(case.vocab_size, start, stop)
    if full.bias is not None:
        keywords["bias"] = local_rows(full.bias, start, stop).requires_grad_()
    if full.class_weight is not None:
        keywords["class_weight"] = full.class_weight
    if full.token_weight is not None:
        keywords["token_weight"] = full.token_weight[at]
    hidden = full.hidden[at].clone().requires_grad_()
    weight = local_rows(full.weight, start, stop).requires_grad_()
    return (hidden, weight, full.target[at]), keywords


@dataclass
class Result:
    """What one rank got."""

    loss: Tensor
    hidden_grad: Tensor | None
    weight_grad: Tensor | None
    bias_grad: Tensor | None
    aux: dict[str, Tensor]


def run_case(ctx: Context | None, case: Case) -> Result:
    """The job: one forward and one backward with the case's upstream gradient. Without a context, unsharded."""
    import flce_dist

    rank, group = (0, None) if ctx is None or case.world == 1 else (ctx.rank, ctx.group)
    (hidden, weight, target), keywords = loss_arguments(case, rank, group)
    output = flce_dist.linear_cross_entropy(hidden, weight, target, **keywords)
    loss = output.loss if case.aux else output
    upstream = make_inputs(case).upstream
    upstream = upstream[local_tokens(case, rank)] if case.reduction == "none" else upstream
    loss.backward(upstream.to(loss.dtype))
    bias = keywords.get("bias")
    aux = {name: getattr(output, name).detach() for name in case.aux}
    return Result(loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad, aux)


def oracle_options(case: Case) -> dict[str, Any]:
    """What the oracle takes beside tensors."""
    options = {name: value for name, value in case.options if name in ORACLE_OPTIONS}
    return options | {name: getattr(case, name) for name in ("normalizer", "reduction", "ignore_index")}


def reference_of(case: Case) -> oracle.Reference:
    full = make_inputs(case)
    return oracle.reference(
        full.hidden,
        full.weight,
        full.target,
        upstream=full.upstream,
        bias=full.bias,
        class_weight=full.class_weight,
        token_weight=full.token_weight,
        **oracle_options(case),
    )


def eager_gradients(case: Case) -> dict[str, Tensor]:
    """Gradients of weight and bias by a linear layer in the case's dtype and the loss in float32 (float64)."""
    full = make_inputs(case)
    leaves = {"weight": full.weight.requires_grad_()}
    if full.bias is not None:
        leaves["bias"] = full.bias.requires_grad_()
    products = torch.nn.functional.linear(full.hidden.reshape(-1, case.hidden_size), **leaves)
    loss, _ = oracle.loss_and_aux(
        products.to(torch.promote_types(case.dtype, torch.float32)),
        full.target.reshape(-1),
        class_weight=full.class_weight,
        token_weight=None if full.token_weight is None else full.token_weight.reshape(-1),
        **oracle_options(case),
    )
    loss.backward(full.upstream.reshape(loss.shape).to(loss.dtype))
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def judge(case: Case, results: Sequence[Result], conditioned: bool = False) -> None:
    """Loss, all gradients and aux of every rank against the oracle; what is replicated must be so bit for bit.

    `conditioned` adds a few units of the working precision of the terms that a gradient is made of: for random cases
    whose terms cancel.
    """
    tolerance = compare.BY_DTYPE[case.dtype]
    expected = reference_of(case)
    loss_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    replicated_tokens = case.tokens is None
    if case.reduction != "none" or replicated_tokens:
        compare.assert_same_bits([r.loss for r in results], "loss over the ranks")
    if replicated_tokens:
        compare.assert_same_bits([r.hidden_grad for r in results], "hidden gradient over the ranks")
    for rank, result in enumerate(results):
        at = local_tokens(case, rank)
        assert result.loss.dtype == loss_dtype, f"loss has dtype {result.loss.dtype}"
        want = expected.loss[at] if case.reduction == "none" else expected.loss
        compare.assert_loss(result.loss, want, tolerance.loss, f"loss of rank {rank}")
        judge_gradients(case, rank, result, expected, tolerance, 4.0 if conditioned else 0.0)
        judge_aux(case, rank, result, expected, tolerance)


def judge_gradients(
    case: Case, rank: int, result: Result, expected: oracle.Reference, tolerance: compare.Tolerance, units: float
) -> None:
    start, stop = case.bounds()[rank]
    true_rows = max(0, min(stop, case.vocab_size) - start)
    eps = units * torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    for name, actual, full, terms in (
        ("weight", result.weight_grad, expected.weight_grad, expected.weight_terms),
        ("bias", result.bias_grad, expected.bias_grad, expected.bias_terms),
    ):
        if full is None:
            assert actual is None, f"{name} gradient without a {name}"
            continue
        assert actual is not None, f"{name} gradient of rank {rank} is None"
        assert actual.dtype == case.dtype
        assert actual.shape[0] == stop - start
        own = slice(start, start + true_rows)
        difference = (actual[:true_rows].double() - full[own]).norm()
        assert torch.isfinite(difference), f"{name} gradient of rank {rank} is not finite"
        bound = tolerance.grad * full[own].norm() + eps * terms
        if difference > bound:  # the gradients of rare tokens can be a few roundings, of eager as well
            bound = max(bound, 1.5 * (eager_gradients(case)[name][own].double() - full[own]).norm())
        assert difference <= bound, f"{name} gradient of rank {rank}: error {difference:.3g} > {bound:.3g}"
        compare.assert_exactly_zero(actual[true_rows:], f"{name} gradient of padding rows of rank {rank}")
    assert result.hidden_grad is not None
    assert result.hidden_grad.dtype == case.dtype
    at = local_tokens(case, rank)
    whole = expected.hidden_grad
    assert result.hidden_grad.shape == whole[at].shape
    difference = (result.hidden_grad.double() - whole[at]).norm()
    assert torch.isfinite(difference), f"hidden gradient of rank {rank} is not finite"
    bound = tolerance.grad * whole.norm().item() + eps * expected.hidden_terms
    assert difference <= bound, f"hidden gradient of rank {rank}: error {difference:.3g} > {bound:.3g}"


def judge_aux(case: Case, rank: int, result: Result, expected: oracle.Reference, tolerance: compare.Tolerance) -> None:
    at = local_tokens(case, rank)
    target = make_inputs(case).target[at]
    for name in case.aux:
        actual, want = result.aux[name], expected.aux[name]
        assert not actual.requires_grad
        if name in ("num_valid", "predictions"):
            assert actual.dtype == torch.int64, f"{name} has dtype {actual.dtype}"
            assert torch.equal(actual, want[at] if want.ndim else want), f"{name} of rank {rank}"
        elif name in ("lse", "entropy"):
            # What an ignored token's lse and entropy are is left open.
            keep = target != case.ignore_index
            compare.assert_loss(actual[keep], want[at][keep], tolerance.loss, f"{name} of rank {rank}")
        else:
            compare.assert_loss(actual, want[at] if want.ndim else want, tolerance.loss, f"{name} of rank {rank}")


def check(case: Case, pool: Pool) -> list[Result]:
    """Run a case on the pool and judge it."""
    results = pool.run(case.world, run_case, case)
    judge(case, results)
    return results


def all_pairs(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda _: True, seed: int = 0
) -> list[dict[str, Any]]:
    """A small list of assignments in which every allowed pair of values of two axes occurs together.

    Greedy: of some random completions of a pair that is still missing, the one that covers most missing pairs is taken.
    """
    rng = random.Random(seed)
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    rows: list[dict[str, Any]] = []
    while missing:
        (a, i), (b, j) = min(missing, key=str)
        best: tuple[int, dict[str, int]] | None = None
        for _ in range(60):
            draw = {name: rng.randrange(len(axes[name])) for name in names} | {a: i, b: j}
            if allowed({name: axes[name][at] for name, at in draw.items()}):
                gain = len(missing & _pairs_of(draw, names))
                best = (gain, draw) if best is None or gain > best[0] else best
        missing.discard(((a, i), (b, j)))
        if best is not None:
            missing -= _pairs_of(best[1], names)
            rows.append({name: axes[name][at] for name, at in best[1].items()})
    return rows


def _pairs_of(draw: Mapping[str, int], names: Sequence[str]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return {((a, draw[a]), (b, draw[b])) for a, b in itertools.combinations(names, 2)}


def product(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda _: True
) -> Iterator[dict[str, Any]]:
    """The full cross product of the axes."""
    for values in itertools.product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        if allowed(row):
            yield row


def takes_normalizer(row: Mapping[str, Any]) -> bool:
    """What a row of options may be: only a mean is divided by something."""
    return row["normalizer"] is None or row["reduction"] == "mean"


def case_id(row: Mapping[str, Any]) -> str:
    return "-".join(f"{value}" for value in row.values()).replace(" ", "").replace("torch.", "")
