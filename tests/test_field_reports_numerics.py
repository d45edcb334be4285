"""Faults that people reported of losses of this kind: numerics (B01, B06, B07, B08).

The numbers are those of docs/field-reports.md. Kinds are widened.
"""

import math
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from tests.kit import compare
from tests.kit.cases import Case, check, make_inputs, reference_of, run_case
from tests.kit.workers import Context, Pool

BACKENDS = ["torch", "triton"]
REDUCTIONS = ["mean", "sum", "none"]


def _fixed(ctx: Context, logits: torch.Tensor, target: torch.Tensor, cuts: list[int], keywords: dict[str, Any]) -> Any:
    """The loss of given logits (weight = identity), columns cut at `cuts`; returns it and its gradients."""
    from flce_dist import VocabShard

    vocab_size = logits.shape[1]
    start, stop = cuts[ctx.rank], cuts[ctx.rank + 1]
    hidden = logits.clone().requires_grad_()
    weight = torch.eye(vocab_size)[start:stop].clone().requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, target, group=ctx.group, vocab_shard=VocabShard(vocab_size, start, stop), **keywords
    )
    loss.sum().backward()
    return loss.detach(), hidden.grad, weight.grad


class TestB01LabelSmoothingUnderSharding:
    """Another loss on every rank: the local width as the class count; the log taken after exp and normalise."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        ("vocab_size", "world", "split"),
        [(8, 2, "even"), (8, 4, "even"), (10, 4, "even"), (10, 4, "uneven"), (11, 3, "empty"), (13, 2, "padded")],
    )
    @pytest.mark.parametrize("smoothing", [0.1, 0.5])
    def test_smoothing_is_over_the_global_vocabulary(
        self, vocab_size: int, world: int, split: str, smoothing: float, backend: str, pool_for: Any
    ) -> None:
        for weighted in (False, True):
            case = Case(
                lead=(6,),
                hidden_size=5,
                vocab_size=vocab_size,
                world=world,
                split=split,
                class_weight=weighted,
                backend=backend,
                options=(("label_smoothing", smoothing),),
            )
            check(case, pool_for(backend))

    def test_split_3_3_3_1(self, workers: Pool) -> None:
        logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
        target = torch.tensor([0, 3, 4, 7, -100, 2])
        expected = torch.nn.functional.cross_entropy(logits.double(), target, label_smoothing=0.1)
        for loss, _, _ in workers.run(4, _fixed, logits, target, [0, 3, 6, 9, 10], {"label_smoothing": 0.1}):
            compare.assert_loss(loss, expected, 1e-6)

    @pytest.mark.parametrize("gap", [200.0, 1e4])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_wide_gap_is_finite(self, gap: float, backend: str, pool_for: Any) -> None:
        logits = torch.tensor([[gap, 0.0, 0.0, 0.0]])
        keywords = {"label_smoothing": 0.1, "backend": backend}
        for world, cuts in ((1, [0, 4]), (2, [0, 2, 4]), (4, [0, 1, 2, 3, 4])):
            for loss, hidden_grad, _ in pool_for(backend).run(world, _fixed, logits, torch.tensor([0]), cuts, keywords):
                assert loss.item() == pytest.approx(0.1 * gap * 3 / 4, rel=1e-6)
                assert torch.isfinite(hidden_grad).all()


class TestB06EveryTargetIgnored:
    """A masked micro-batch gives nan by a division by 0, and the run is lost. Here: loss 0, gradients exactly 0."""

    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        "options",
        [
            (),
            (("normalizer", 0),),
            (("z_loss", 1e-2), ("label_smoothing", 0.1)),
            (("skip_ignored", True),),
            (("token_scaling", True), ("softcap", 3.0)),
        ],
        ids=str,
    )
    def test_zero_and_exact_zero_gradients(
        self, world: int, reduction: str, backend: str, options: Any, pool_for: Any
    ) -> None:
        if dict(options).get("normalizer") == 0 and reduction != "mean":
            options = ()
        case = Case(
            lead=(6,),
            hidden_size=5,
            vocab_size=8,
            world=world,
            reduction=reduction,
            backend=backend,
            ignored="all",
            bias=True,
            class_weight=True,
            options=options,
        )
        for result in pool_for(backend).run(world, run_case, case):
            compare.assert_exactly_zero(result.loss, "loss")
            compare.assert_exactly_zero(result.hidden_grad, "hidden gradient")
            compare.assert_exactly_zero(result.weight_grad, "weight gradient")
            compare.assert_exactly_zero(result.bias_grad, "bias gradient")

    def test_zero_normalizer_as_a_tensor(self) -> None:
        full = make_inputs(Case(ignored="all"))
        hidden = full.hidden.requires_grad_()
        loss = linear_cross_entropy(hidden, full.weight, full.target, normalizer=torch.tensor(0))
        loss.backward()
        compare.assert_exactly_zero(loss, "loss")
        compare.assert_exactly_zero(hidden.grad, "hidden gradient")

    @pytest.mark.parametrize("masked", range(4))
    def test_one_masked_micro_batch_of_four(self, masked: int) -> None:
        """Accumulated with the token count of all as the normaliser: the batch of 4 x 6 tokens in one go."""
        full = make_inputs(Case(lead=(24,)))
        target = full.target.clone()
        target[masked * 6 : masked * 6 + 6] = -100
        count = (target != -100).sum()
        hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
        for at in range(0, 24, 6):
            batch = slice(at, at + 6)
            linear_cross_entropy(hidden[batch], weight, target[batch], normalizer=count).backward()
        grads = weight.grad, hidden.grad
        double_hidden, double_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
        torch.nn.functional.cross_entropy(double_hidden @ double_weight.T, target).backward()
        compare.assert_close(grads[0], double_weight.grad, 1e-5, "weight gradient")
        compare.assert_close(grads[1], double_hidden.grad, 1e-5, "hidden gradient")


class TestB07Bias:
    """Losses far too low, even negative, once the head has a bias."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(("world", "split"), [(1, "even"), (2, "even"), (3, "uneven"), (2, "empty")])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_large_bias(self, world: int, split: str, reduction: str, backend: str, pool_for: Any) -> None:
        lead = (32,) if backend == "torch" else (9,)
        case = Case(lead, 16, 50, world, split, backend=backend, reduction=reduction, bias=True, seed=3)
        for result in check(case, pool_for(backend)):
            assert (result.loss >= 0).all()

    @pytest.mark.parametrize("size", [3.0, 30.0])
    def test_bias_of_standard_deviation(self, size: float) -> None:
        full = make_inputs(Case(lead=(32,), hidden_size=16, vocab_size=50))
        bias = torch.randn(50, generator=torch.Generator().manual_seed(1)) * size
        loss = linear_cross_entropy(full.hidden, full.weight, full.target, bias=bias)
        logits = full.hidden.double() @ full.weight.double().T + bias.double()
        compare.assert_loss(loss, torch.nn.functional.cross_entropy(logits, full.target), 1e-5)
        assert loss >= 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_none_equals_zeros_bit_for_bit(self, dtype: torch.dtype, reduction: str) -> None:
        full = make_inputs(Case(lead=(32,), hidden_size=16, vocab_size=50, dtype=dtype))
        hidden, weight = full.hidden.requires_grad_(), full.weight.requires_grad_()
        grads = []
        for bias in (None, torch.zeros(50, dtype=dtype)):
            loss = linear_cross_entropy(hidden, weight, full.target, bias=bias, reduction=reduction)
            grads.append((loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, weight))))
        for one, two in zip(*grads, strict=True):
            compare.assert_same_bits([one, two], "with no bias and with zeros")


class TestB08ZLossUnderSharding:
    """The z part from a local log-sum-exp; or summed up and not to be read out."""

    TARGET = torch.tensor([0, 5, 6, -100, 11])

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(("world", "cuts"), [(2, [0, 6, 12]), (3, [0, 4, 8, 12]), (3, [0, 0, 11, 12])])
    def test_gradient_and_value_of_given_logits(self, world: int, cuts: list[int], backend: str, pool_for: Any) -> None:
        logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(2))
        p, lse = logits.double().softmax(-1), logits.double().logsumexp(-1)
        valid = self.TARGET != -100
        one_hot = torch.nn.functional.one_hot(self.TARGET.clamp(min=0), 12)
        grad = (p * (1 + 2e-2 * lse[:, None]) - one_hot) / 4 * valid[:, None]
        value = torch.nn.functional.cross_entropy(logits.double(), self.TARGET) + 1e-2 * lse[valid].square().mean()
        keywords = {"z_loss": 1e-2, "backend": backend}
        for loss, hidden_grad, _ in pool_for(backend).run(world, _fixed, logits, self.TARGET, cuts, keywords):
            compare.assert_loss(loss, value, 1e-6)
            compare.assert_close(hidden_grad, grad, 1e-5, "gradient of the logits")
            compare.assert_exactly_zero(hidden_grad[3], "gradient of the ignored row")

    @pytest.mark.parametrize("world", [1, 2, 3])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("extra", [(), (("label_smoothing", 0.1), ("softcap", 5.0))], ids=str)
    def test_z_part_is_returned_and_equal_on_all_ranks(
        self, world: int, reduction: str, extra: Any, workers: Pool
    ) -> None:
        case = Case(
            lead=(5,),
            hidden_size=6,
            vocab_size=12,
            world=world,
            reduction=reduction,
            aux=("z_loss",),
            token_weight=True,
            class_weight=True,
            options=(("z_loss", 1e-2), *extra),
        )
        results = check(case, workers)
        compare.assert_same_bits([r.aux["z_loss"] for r in results], "z part")
        plain = reference_of(Case(**{**case.__dict__, "options": extra})).loss
        for result in results:
            compare.assert_loss(result.loss - result.aux["z_loss"], plain, 2e-5, "loss without its z part")

    def test_coefficient_0_is_off_bit_for_bit(self, workers: Pool) -> None:
        off = workers.run(2, run_case, Case(world=2))
        zero = workers.run(2, run_case, Case(world=2, options=(("z_loss", 0.0),)))
        for one, two in zip(off, zero, strict=True):
            compare.assert_same_bits([one.loss, two.loss], "loss")
            compare.assert_same_bits([one.hidden_grad, two.hidden_grad], "hidden gradient")
            compare.assert_same_bits([one.weight_grad, two.weight_grad], "weight gradient")


def test_a_loss_is_never_below_zero_for_confident_models() -> None:
    """lse - z_y in one subtraction of large numbers can come out negative."""
    for size in (10.0, 100.0, 1000.0):
        logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(4)) * size
        target = logits.argmax(-1)
        loss = linear_cross_entropy(logits, torch.eye(16), target, reduction="none")
        assert (loss >= 0).all()
        assert math.isfinite(loss.sum())
