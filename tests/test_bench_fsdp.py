"""launch/bench_fsdp.py on the CPU."""

from typing import Any

import pytest
import torch

import bench_fsdp
import bench_fsdp_head
from tests.kit.workers import Context, Pool

TINY = [
    "--device",
    "cpu",
    "--hidden",
    "16",
    "--layers",
    "1",
    "--vocab",
    "51",
    "--length",
    "6",
    "--curve",
    "3",
    "--rounds",
    "2",
    "--round-seconds",
    "0.001",
]


def _run(ctx: Context) -> list[bench_fsdp.TrainingRow]:
    return bench_fsdp.run(bench_fsdp.parse_arguments(TINY), ctx.group, torch.device("cpu"))


def test_all_methods_train_alike(workers: Pool) -> None:
    rows = workers.run(2, _run)[0]
    assert [f"{row.setup}:{row.method}" for row in rows] == list(bench_fsdp.METHODS)
    for row in rows:
        assert row.ms > 0
        assert row.extra_peak_bytes > 0
        assert len(row.losses) == 3
        assert row.curve_difference < 1e-5
    assert bench_fsdp.table(rows).count("\n") == len(rows) + 1


def test_a_setup_brings_its_baseline() -> None:
    args = bench_fsdp.parse_arguments(["--methods", "tensor:flce"])
    assert args.methods == ["tensor:logits", "tensor:flce"]


@pytest.mark.parametrize("main", [bench_fsdp.main, bench_fsdp_head.main])
def test_one_process_is_told_to_start_two(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--device", "cpu"])
    assert stop.value.code == 2
    assert "torchrun" in capsys.readouterr().err
