"""Faults that people reported of losses of this kind: autograd (B17, B21, B22).

The numbers are those of docs/field-reports.md. Kinds are widened.
"""

from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from tests.kit import compare, oracle
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool


def _weighted(ctx: Context, chunk_rows: int | None, lead: tuple[int, ...], how: str) -> tuple[Any, ...]:
    hidden, weight, bias, target, w = _weighted_inputs(lead)
    rows = -(-15 // ctx.world)
    at = slice(ctx.rank * rows, (ctx.rank + 1) * rows)
    hidden.requires_grad_()
    weight, bias = weight[at].clone().requires_grad_(), bias[at].clone().requires_grad_()
    keywords = {"bias": bias, "chunk_rows": chunk_rows, "group": ctx.group, "vocab_size": 15}
    if how == "upstream":
        loss = linear_cross_entropy(hidden, weight, target, reduction="none", **keywords)
        assert loss.shape == lead
        compare.assert_exactly_zero(loss[target == -100], "loss of ignored tokens")
        (w * loss).sum().backward()
    else:
        linear_cross_entropy(hidden, weight, target, reduction="sum", token_weight=w, **keywords).backward()
    return hidden.grad, weight.grad, bias.grad


def _weighted_inputs(lead: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*lead, 10, generator=generator)
    weight = torch.randn(15, 10, generator=generator)
    bias = torch.randn(15, generator=generator)
    target = torch.randint(15, lead, generator=generator)
    target.view(-1)[[0, 5]] = -100
    return hidden, weight, bias, target, (torch.arange(8.0) / 7).reshape(lead)


class TestB17NoneWithPerTokenWeights:
    """Gradients summed over tokens in forward and scaled by upstream[0]: wrong, or all zero."""

    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("chunk_rows", [None, 1, 3, 8])
    @pytest.mark.parametrize("lead", [(2, 4), (8,)])
    @pytest.mark.parametrize("how", ["upstream", "token_weight"])
    def test_weighted_sum(
        self, world: int, chunk_rows: int | None, lead: tuple[int, ...], how: str, workers: Pool
    ) -> None:
        hidden, weight, bias, target, w = _weighted_inputs(lead)
        expected = oracle.reference(hidden, weight, target, bias=bias, upstream=w, reduction="none")
        assert expected.bias_grad is not None
        rows = -(-15 // world)
        for rank, (hidden_grad, weight_grad, bias_grad) in enumerate(
            workers.run(world, _weighted, chunk_rows, lead, how)
        ):
            at = slice(rank * rows, (rank + 1) * rows)
            compare.assert_close(hidden_grad, expected.hidden_grad, 1e-5, "hidden gradient")
            compare.assert_close(weight_grad, expected.weight_grad[at], 1e-5, "weight gradient")
            compare.assert_close(bias_grad, expected.bias_grad[at], 1e-5, "bias gradient")

    def test_policy_gradient_style_weights_of_both_signs(self) -> None:
        hidden, weight, bias, target, _ = _weighted_inputs((8,))
        advantage = torch.tensor([0.0, -1.0, 2.0, 0.0, -3.0, 1.0, 0.5, -0.5])
        hidden.requires_grad_()
        loss = linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none")
        (advantage * loss).sum().backward()
        expected = oracle.reference(hidden, weight, target, bias=bias, upstream=advantage, reduction="none")
        compare.assert_close(hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_exactly_zero(hidden.grad[[0, 3]], "gradient of tokens of weight 0")


class TestB21FrozenAndEvaluation:
    """A frozen head still pays for V x H of gradient; validation spikes."""

    SIZES = (64, 32, 512)  # tokens, hidden, vocabulary

    def peak(self, needs: tuple[bool, bool], grad: bool) -> tuple[int, torch.Tensor]:
        tokens, hidden_size, vocab_size = self.SIZES
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_(needs[0])
        weight = torch.randn(vocab_size, hidden_size, generator=generator).requires_grad_(needs[1])
        target = torch.randint(vocab_size, (tokens,), generator=generator)
        with torch.set_grad_enabled(grad), Trace() as trace:
            loss = linear_cross_entropy(hidden, weight, target, chunk_rows=8)
            if grad and any(needs):
                loss.backward()
        assert hidden.grad is None or (grad and needs[0])
        assert weight.grad is None or (grad and needs[1])
        return len(trace.allocations_of(weight.nbytes)), loss.detach()

    def test_frozen_tensors_allocate_no_gradient_and_the_loss_keeps_its_bits(self) -> None:
        both, loss = self.peak((True, True), True)
        assert both >= 1
        for needs, grad in (((True, False), True), ((False, False), True), ((True, True), False)):
            count, other = self.peak(needs, grad)
            assert count == 0
            compare.assert_same_bits([loss, other], "loss")

    @pytest.mark.gpu
    def test_cuda_peak_is_lower_by_the_weight(self) -> None:
        peaks = {}
        for needs in ((True, True), (True, False)):
            hidden = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16).requires_grad_(needs[0])
            weight = torch.randn(65536, 256, device="cuda", dtype=torch.bfloat16).requires_grad_(needs[1])
            target = torch.randint(65536, (512,), device="cuda")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            linear_cross_entropy(hidden, weight, target, chunk_rows=128).backward()
            peaks[needs] = torch.cuda.max_memory_allocated() - before
            del hidden, weight, target
        assert peaks[(True, True)] - peaks[(True, False)] >= 65536 * 256 * 2


@pytest.mark.gpu
class TestB22AutocastOnCuda:
    """The CPU half of this report is test_autocast.py."""

    @pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16, None], ids=str)
    @pytest.mark.parametrize(
        "dtypes",
        [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)],
        ids=str,
    )
    def test_pairs(self, dtypes: tuple[torch.dtype, torch.dtype], autocast: torch.dtype | None) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(40, 16, generator=generator).to(dtypes[0]).cuda().requires_grad_()
        weight = (torch.randn(64, 16, generator=generator) / 4).to(dtypes[1]).cuda().requires_grad_()
        target = torch.randint(64, (40,), generator=generator).cuda()
        if autocast is None:
            if dtypes[0] != dtypes[1]:
                with pytest.raises(TypeError, match=r"must have one dtype.*bfloat16"):
                    linear_cross_entropy(hidden, weight, target)
            return
        with torch.autocast("cuda", autocast):
            loss = linear_cross_entropy(hidden, weight, target)
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert (hidden.grad.dtype, weight.grad.dtype) == dtypes
        expected = oracle.reference(hidden.to(autocast).cpu(), weight.to(autocast).cpu(), target.cpu())
        compare.assert_loss(loss.cpu(), expected.loss, 2e-3)
        compare.assert_close(hidden.grad, expected.hidden_grad, 1e-2, "hidden gradient")
        compare.assert_close(weight.grad, expected.weight_grad, 1e-2, "weight gradient")
