"""Faults that people reported of losses of this kind: indexing (B09, B10, B12, B16).

The numbers are those of docs/field-reports.md. Kinds are widened.
"""

from typing import Any

import pytest
import torch

from flce_dist import VocabShard, linear_cross_entropy
from tests.kit import compare, oracle
from tests.kit.cases import Case, check
from tests.kit.workers import Context, Pool

BACKENDS = ["torch", "triton"]
REDUCTIONS = ["mean", "sum", "none"]


class TestB10VocabularyIsNoMultipleOfTheBlock:
    """Tail lanes of the last block enter the log-sum-exp as zeros; a bias of -60 makes them win."""

    @pytest.mark.parametrize("vocab_size", [1, 3, 127, 129, 1000, 1025, 129920])
    @pytest.mark.parametrize("world", [1, 2])
    def test_torch_backend(self, vocab_size: int, world: int, workers: Pool) -> None:
        self.check(workers, vocab_size, world, "torch", 17, 32)

    @pytest.mark.parametrize("vocab_size", [1, 3, 127, 129, 1000, 1025])
    @pytest.mark.parametrize("world", [1, 2])
    def test_interpreted_triton_backend(self, vocab_size: int, world: int, interpreted_workers: Pool) -> None:
        self.check(interpreted_workers, vocab_size, world, "triton", 5, 8)

    @pytest.mark.gpu
    @pytest.mark.parametrize("vocab_size", [1, 3, 127, 129, 1000, 1025, 129920])
    def test_cuda(self, vocab_size: int) -> None:
        hidden, weight, bias, target = (t.cuda() for t in self.inputs(vocab_size, 17, 32))
        for tensor in (hidden, weight, bias):
            tensor.requires_grad_()
        loss = linear_cross_entropy(hidden, weight, target, bias=bias)
        loss.backward()
        expected = oracle.reference(hidden.cpu(), weight.cpu(), target.cpu(), bias=bias.cpu())
        compare.assert_loss(loss.cpu(), expected.loss, 1e-5)
        compare.assert_close(hidden.grad, expected.hidden_grad, 1e-5, "hidden gradient")
        compare.assert_close(weight.grad, expected.weight_grad, 1e-5, "weight gradient")

    @staticmethod
    def inputs(vocab_size: int, num_tokens: int, hidden_size: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(vocab_size)
        hidden = torch.randn(num_tokens, hidden_size, generator=generator)
        weight = torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5
        target = torch.randint(vocab_size, (num_tokens,), generator=generator)
        return hidden, weight, torch.full((vocab_size,), -60.0), target

    def check(self, pool: Pool, vocab_size: int, world: int, backend: str, num_tokens: int, hidden_size: int) -> None:
        hidden, weight, bias, target = self.inputs(vocab_size, num_tokens, hidden_size)
        expected = oracle.reference(hidden, weight, target, bias=bias)
        results = pool.run(world, _biased, backend, vocab_size, num_tokens, hidden_size)
        rows = -(-vocab_size // world)
        for rank, (loss, lse, hidden_grad, weight_grad, bias_grad) in enumerate(results):
            at = slice(rank * rows, (rank + 1) * rows)
            assert loss >= 0
            compare.assert_loss(loss, expected.loss, 1e-5)
            compare.assert_close(lse, expected.aux["lse"], 1e-6, "lse")
            if vocab_size > 1:
                compare.assert_close(hidden_grad, expected.hidden_grad, 1e-5, "hidden gradient")
                compare.assert_close(weight_grad, expected.weight_grad[at], 2e-5, "weight gradient")
                assert expected.bias_grad is not None
                compare.assert_close(bias_grad, expected.bias_grad[at], 2e-5, "bias gradient")
            else:
                compare.assert_exactly_zero(hidden_grad, "hidden gradient")


def _biased(ctx: Context, backend: str, vocab_size: int, num_tokens: int, hidden_size: int) -> tuple[Any, ...]:
    hidden, weight, bias, target = TestB10VocabularyIsNoMultipleOfTheBlock.inputs(vocab_size, num_tokens, hidden_size)
    rows = -(-vocab_size // ctx.world)
    at = slice(ctx.rank * rows, (ctx.rank + 1) * rows)
    hidden.requires_grad_()
    weight, bias = weight[at].clone().requires_grad_(), bias[at].clone().requires_grad_()
    output = linear_cross_entropy(
        hidden, weight, target, bias=bias, group=ctx.group, vocab_size=vocab_size, backend=backend, aux=("lse",)
    )
    output.loss.backward()
    return output.loss.detach(), output.lse, hidden.grad, weight.grad, bias.grad


def _each_token_once(ctx: Context, vocab_size: int, backend: str, cut: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(vocab_size, 8, generator=generator)
    weight = torch.randn(vocab_size, 8, generator=generator)
    bounds = [0, cut, vocab_size]
    start, stop = bounds[ctx.rank], bounds[ctx.rank + 1]
    shard = VocabShard(vocab_size, start, stop)
    target = torch.arange(vocab_size)
    return linear_cross_entropy(
        hidden, weight[start:stop], target, group=ctx.group, vocab_shard=shard, reduction="none", backend=backend
    )


class TestB12OutOfShardSentinel:
    """The index that means "not mine" hits a padded lane of the last tile and the loss becomes inf."""

    @pytest.mark.parametrize("vocab_size", [1000, 1026, 1001])
    def test_every_token_is_a_target_once(self, vocab_size: int, workers: Pool) -> None:
        for cut in (vocab_size // 2, 1, vocab_size - 1, 0):
            self.check(workers, vocab_size, "torch", cut)

    @pytest.mark.parametrize("vocab_size", [5, 33])
    def test_every_token_is_a_target_once_interpreted(self, vocab_size: int, interpreted_workers: Pool) -> None:
        for cut in (vocab_size // 2, 1, 0):
            self.check(interpreted_workers, vocab_size, "triton", cut)

    def check(self, pool: Pool, vocab_size: int, backend: str, cut: int) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(vocab_size, 8, generator=generator).double()
        weight = torch.randn(vocab_size, 8, generator=generator).double()
        expected = torch.nn.functional.cross_entropy(hidden @ weight.T, torch.arange(vocab_size), reduction="none")
        for loss in pool.run(2, _each_token_once, vocab_size, backend, cut):
            assert torch.isfinite(loss).all()
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.gpu
    @pytest.mark.parametrize("vocab_size", [1000, 1026, 500, 513])
    def test_cuda(self, vocab_size: int) -> None:
        hidden, weight = torch.randn(vocab_size, 8, device="cuda"), torch.randn(vocab_size, 8, device="cuda")
        target = torch.arange(vocab_size, device="cuda")
        loss = linear_cross_entropy(hidden, weight, target, reduction="none")
        expected = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, target, reduction="none")
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


class TestB16ZeroTokens:
    """A rank that holds only padding: division by 0, a grid of size 0, a chunk heuristic that divides by 0."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("lead", [(0,), (0, 4), (4, 0), (2, 0, 3)])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("world", [1, 2])
    def test_no_tokens(self, lead: tuple[int, ...], reduction: str, world: int, backend: str, pool_for: Any) -> None:
        case = Case(lead=lead, reduction=reduction, world=world, backend=backend, bias=True)
        for result in check(case, pool_for(backend)):
            assert result.loss.shape == (lead if reduction == "none" else ())
            assert result.hidden_grad is not None
            assert result.hidden_grad.shape == (*lead, 8)
            compare.assert_exactly_zero(result.weight_grad, "weight gradient")

    @pytest.mark.parametrize("tokens", [(5, 0), (0, 5), (0, 0)])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_no_tokens_on_one_rank(self, tokens: tuple[int, ...], reduction: str, workers: Pool) -> None:
        check(Case(lead=(sum(tokens),), tokens=tokens, world=2, reduction=reduction, ignored="none"), workers)

    @pytest.mark.gpu
    @pytest.mark.parametrize("lead", [(0,), (0, 4)])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_cuda(self, lead: tuple[int, ...], reduction: str) -> None:
        hidden = torch.randn(*lead, 8, device="cuda", requires_grad=True)
        weight = torch.randn(21, 8, device="cuda", requires_grad=True)
        target = torch.empty(lead, dtype=torch.int64, device="cuda")
        linear_cross_entropy(hidden, weight, target, reduction=reduction).sum().backward()
        compare.assert_exactly_zero(weight.grad, "weight gradient")
        assert hidden.grad is not None
        assert hidden.grad.shape == hidden.shape


@pytest.mark.gpu
class TestB09MoreThan2To31Elements:
    """Past 2^31 elements a row offset in int32 wraps: an illegal access, or rows that are silently zero or garbage."""

    @pytest.mark.parametrize("chunk_rows", [65552, None])
    def test_logits(self, chunk_rows: int | None) -> None:
        tokens, vocab_size, width = 65552, 32800, 64
        generator = torch.Generator("cuda").manual_seed(0)
        hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        weight = torch.randn(vocab_size, width, device="cuda", dtype=torch.bfloat16, generator=generator) / 8
        weight.requires_grad_()
        target = torch.randint(vocab_size, (tokens,), device="cuda", generator=generator)
        target[-8:] = torch.arange(vocab_size - 8, vocab_size, device="cuda")
        keywords: dict[str, Any] = {"chunk_rows": chunk_rows, "reduction": "sum"}
        linear_cross_entropy(hidden, weight, target, **keywords).backward()
        last = hidden.detach()[-16:].clone().requires_grad_()
        loss = linear_cross_entropy(last, weight.detach(), target[-16:], reduction="none")
        loss.sum().backward()
        with torch.no_grad():
            per_token = linear_cross_entropy(hidden, weight, target, chunk_rows=chunk_rows, reduction="none")
        compare.assert_loss(per_token[-16:].cpu(), loss.cpu().double(), 2e-3)
        compare.assert_close(hidden.grad[-16:], last.grad, 1e-2, "hidden gradient of the last tokens")
        assert weight.grad is not None
        logits = hidden.detach().float() @ weight.detach()[-8:].float().T
        lse = torch.cat([(h.float() @ weight.detach().float().T).logsumexp(-1) for h in hidden.detach().split(4096)])
        hits = target[:, None] == torch.arange(vocab_size - 8, vocab_size, device="cuda")
        p = (logits - lse[:, None]).exp() - hits.float()
        compare.assert_close(weight.grad[-8:], p.T @ hidden.detach().float(), 2e-2, "weight gradient of the last rows")

    @pytest.mark.parametrize("chunk_rows", [64, None])
    def test_weight(self, chunk_rows: int | None) -> None:
        tokens, vocab_size, width = 64, 131080, 16384
        generator = torch.Generator("cuda").manual_seed(0)
        hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        weight = torch.randn(vocab_size, width, device="cuda", dtype=torch.bfloat16, generator=generator) / 128
        weight.requires_grad_()
        target = torch.arange(vocab_size - tokens, vocab_size, device="cuda")
        loss = linear_cross_entropy(hidden, weight, target, chunk_rows=chunk_rows, reduction="sum")
        loss.backward()
        logits = (hidden.detach() @ weight.detach().T).float()
        hits = target[:, None] == torch.arange(vocab_size - 8, vocab_size, device="cuda")
        p = logits.softmax(-1)[:, -8:] - hits.float()
        assert weight.grad is not None
        compare.assert_close(weight.grad[-8:], p.T @ hidden.detach().float(), 2e-2, "weight gradient of the last rows")
        expected = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        compare.assert_loss(loss.cpu(), expected.cpu().double(), 2e-3)
