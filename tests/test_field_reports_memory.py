"""Faults that people reported of losses of this kind: install, memory and speed (B35, B41, B42, B43).

The numbers are those of docs/field-reports.md.
The chunk-size function of B41 is tested in test_plan.py, imports of B35 in test_public_api.py.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy
from tests.kit import heads
from tests.kit.cases import Case, loss_arguments
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool


class TestB35WithoutGpu:
    """Metadata asks for too much. (In the interpreter the loss is always 0, by a dummy pointer that aliases the output:
    test_loss_single.py.)"""

    def test_triton_is_required_on_linux_only(self) -> None:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
        triton = [d for d in project["dependencies"] if d.startswith("triton")]
        assert len(triton) == 1
        assert "Linux" in triton[0].partition(";")[2]
        assert project["requires-python"].startswith(">=3.11")

    def test_auto_backend_on_a_cpu_needs_no_triton(self, workers: Pool) -> None:
        assert workers.run(1, _imported_triton_kernels)[0] is False


def _imported_triton_kernels(_: Context) -> bool:
    import sys

    hidden, weight, target = heads.random_head(4, 2, 3, 0)
    linear_cross_entropy(hidden.requires_grad_(), weight, target, backend="auto").backward()
    return "flce_dist.kernels.triton_rows" in sys.modules


def _chunks(ctx: Context, case: Case, grad: bool) -> int:
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    with torch.set_grad_enabled(grad), Trace() as trace:
        linear_cross_entropy(hidden, weight, target, check_ranks="never", **keywords)
    return trace.collectives.count("all_gather")


class TestB41ChunkSizeOfAUser:
    """A user's chunk size is ignored in one of the paths, or ranks choose differently."""

    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize(("chunk_rows", "chunks"), [(1, 12), (5, 3), (12, 1), (100, 1)])
    def test_honoured_in_training_and_evaluation(
        self, grad: bool, reduction: str, chunk_rows: int, chunks: int, workers: Pool
    ) -> None:
        case = Case(lead=(12,), world=2, reduction=reduction, chunk_rows=chunk_rows)
        assert workers.run(2, _chunks, case, grad) == [chunks, chunks]

    @pytest.mark.parametrize("split", ["even", "uneven", "empty", "padded"])
    @pytest.mark.parametrize("check_ranks", ["never", "always"])
    def test_ranks_with_different_shards_agree_on_a_budget(self, split: str, check_ranks: str, workers: Pool) -> None:
        """Unequal chunk counts would be unequal collectives, which the pool notices as a hang."""
        options = (("logits_budget", 400),)
        case = Case(lead=(40,), vocab_size=50, world=3, split=split, options=options)
        counts = workers.run(3, _chunks_with, case, check_ranks)
        assert len(set(counts)) == 1
        assert counts[0] > 1


def _chunks_with(ctx: Context, case: Case, check_ranks: str) -> int:
    (hidden, weight, target), keywords = loss_arguments(case, ctx.rank, ctx.group)
    with Trace() as trace:
        linear_cross_entropy(hidden, weight, target, check_ranks=check_ranks, **keywords)
    return trace.collectives.count("all_reduce")


@pytest.mark.gpu
class TestB42Fragmentation:
    """An fp32 copy of the logits. What stays reserved over many steps is tested in gpu/test_memory.py."""

    def test_no_float32_copy_of_a_chunk(self) -> None:
        num_tokens, hidden_size, vocab_size = 4096, 1024, 65536
        weight = torch.randn(vocab_size, hidden_size, device="cuda", dtype=torch.bfloat16) / 32
        hidden = torch.randn(num_tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
        target = torch.randint(vocab_size, (num_tokens,), device="cuda")
        chunk = 512 * vocab_size * 2
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, target, chunk_rows=512)  # the GEMMs' workspace is allocated once
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, target, chunk_rows=512)
        assert torch.cuda.max_memory_allocated() - before <= 1.1 * chunk


@pytest.mark.gpu
class TestB43LaunchBound:
    """Slower than linear + cross entropy at short inputs; float32 GEMMs in backward; index kernels in the loop."""

    @pytest.mark.timing
    @pytest.mark.parametrize("num_tokens", [1, 16, 128, 1024, 8192])
    @pytest.mark.parametrize("vocab_size", [16032, 128256])
    def test_against_linear_and_cross_entropy(self, num_tokens: int, vocab_size: int) -> None:
        hidden = torch.randn(num_tokens, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocab_size, 4096, device="cuda", dtype=torch.bfloat16) / 64
        weight.requires_grad_()
        target = torch.randint(vocab_size, (num_tokens,), device="cuda")

        def eager() -> None:
            logits = torch.nn.functional.linear(hidden, weight)
            torch.nn.functional.cross_entropy(logits.float(), target).backward()

        def ours() -> None:
            linear_cross_entropy(hidden, weight, target).backward()

        ratios = []
        for _ in range(4):
            ratios.append(self.milliseconds(ours, hidden, weight) / self.milliseconds(eager, hidden, weight))
        ratio = sorted(ratios)[len(ratios) // 2]
        assert ratio <= 3.5, ratios
        goal = 1 / 0.9 if num_tokens >= 1024 else 1.5
        if ratio > goal and (num_tokens == 16 or (vocab_size == 16032 and num_tokens <= 1024)):
            # Where the host is slower than the GPU (docs/performance.md).
            pytest.xfail(f"{ratio:.2f} times linear and cross entropy, more than the goal of {goal:.2f}")
        assert ratio <= goal, ratios

    @staticmethod
    def milliseconds(step: Any, *leaves: torch.Tensor) -> float:
        def once() -> None:
            for leaf in leaves:
                leaf.grad = None
            step()

        for _ in range(3):
            once()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            once()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 10

    @pytest.mark.parametrize("num_tokens", [128, 1024])
    def test_kernels(self, num_tokens: int) -> None:
        """Short inputs are one chunk, and nothing selects or indexes in the loop."""
        hidden = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(32000, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(32000, (num_tokens,), device="cuda")
        linear_cross_entropy(hidden, weight, target).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            linear_cross_entropy(hidden, weight, target).backward()
            torch.cuda.synchronize()
        names = [event.key.lower() for event in profile.key_averages()]
        assert not [name for name in names if "nonzero" in name or "masked_select" in name]
        gemms = [name for name in names if "gemm" in name or "cutlass" in name or "nvjet" in name]
        assert gemms
        assert not [name for name in gemms if "sgemm" in name or "simt" in name]
