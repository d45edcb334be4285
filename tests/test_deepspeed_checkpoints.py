"""Checkpoints of engines with the loss: resuming, universal ones on another number of ranks, exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit.skips import needs

pytest.importorskip("deepspeed", reason=needs("deepspeed"))

from flce_dist.integrations.deepspeed import initialize
from tests.kit.engines import (
    Cell,
    H,
    Trained,
    batches,
    deepspeed_ready,
    engine_of,
    gathered,
    joined,
    make_model,
    steps,
)
from tests.kit.workers import Context, Pool

Engines = Callable[[int], Pool]
DATA = {"vocab_parallel": "data"}
AUTOTP = {"tensor_parallel": {"autotp_size": 2}}


def _resume(ctx: Context, cell: Cell, folder: str) -> None:
    """Three steps, a checkpoint, three more; and a new engine that does the last three from the checkpoint."""
    with deepspeed_ready(ctx):
        results = []
        for resumed in (False, True):
            torch.manual_seed(7)
            engine = engine_of(cell, torch_model(cell, 0.5 if resumed else 1.0))
            trained = Trained([], [], {})
            if resumed:
                path, _ = engine.load_checkpoint(folder)
                assert path is not None
            else:
                steps(engine, cell, trained)
                engine.save_checkpoint(folder)
            steps(engine, cell, trained)
            results.append((trained.losses[-3:], trained.norms[-3:], gathered(engine)))
            engine.destroy()
            from deepspeed.utils import groups

            groups._release_process_group_references()
        (losses, norms, parameters), (again, norms_again, parameters_again) = results
        assert losses == again
        assert norms == norms_again
        for name, value in parameters.items():
            assert torch.equal(value, parameters_again[name]), name


def _parameters_only(ctx: Context, cell: Cell, folder: str) -> None:
    """The parameters of the checkpoint, and an optimizer that starts anew: without momentum and at step 0."""
    with deepspeed_ready(ctx):
        engine = engine_of(cell)
        trained = Trained([], [], {})
        steps(engine, cell, trained)
        engine.save_checkpoint(folder)
        saved = gathered(engine)
        engine.destroy()

        engine = engine_of(cell, torch_model(cell, 0.5))
        with pytest.raises(ValueError, match=r"^load_module_only: .* use load_optimizer_states=False"):
            engine.load_checkpoint(folder, load_module_only=True)
        path, _ = engine.load_checkpoint(folder, load_optimizer_states=False)
        assert path is not None
        for name, value in gathered(engine).items():
            assert torch.equal(value, saved[name]), name
        assert engine.global_steps == len(trained.losses)
        assert all("momentum_buffer" not in state for state in engine.optimizer.optimizer.state.values())
        engine.load_checkpoint(folder)
        assert any("momentum_buffer" in state for state in engine.optimizer.optimizer.state.values())
        engine.destroy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_without_optimizer_states(dtype: str, engine_workers: Engines, tmp_path: Path) -> None:
    engine_workers(2).run(2, _parameters_only, Cell(3, dtype, bias=True, section=DATA), str(tmp_path))


def torch_model(cell: Cell, scale: float) -> Any:
    """Other values than the checkpoint's, so that loading is seen to happen."""
    model = make_model(cell)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


@pytest.mark.parametrize(
    "cell",
    [Cell(0), Cell(2, clip=0.3), Cell(3, clip=0.3), Cell(3, clip=0.3, section=DATA), Cell(3, "bfloat16", section=DATA)],
    ids=lambda cell: cell.id,
)
def test_resume_is_exact(cell: Cell, engine_workers: Engines, tmp_path: Path) -> None:
    engine_workers(2).run(2, _resume, cell, str(tmp_path))


def _save(ctx: Context, cell: Cell, folder: str) -> dict[str, Tensor]:
    with deepspeed_ready(ctx):
        engine = engine_of(cell)
        steps(engine, cell, Trained([], [], {}))
        engine.save_checkpoint(folder)
        parameters = gathered(engine)
        engine.destroy()
    return parameters


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_to_fp32_has_the_head(stage: int, engine_workers: Engines, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    expected = engine_workers(2).run(2, _save, Cell(stage, "bfloat16"), str(tmp_path))[0]
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert torch.equal(state["lm_head.weight"], expected["lm_head.weight"])
    assert state["lm_head.weight"].shape == (37, H)


def test_zero_to_fp32_refuses_a_sharded_head(engine_workers: Engines, tmp_path: Path) -> None:
    """It knows one partitioning for all parameters. The way out is `full_head`."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine_workers(2).run(2, _save, Cell(3, section=DATA), str(tmp_path))
    with pytest.raises(ValueError, match="something is wrong"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))


def _save_16bit(ctx: Context, cell: Cell, folder: str) -> Tensor:
    with deepspeed_ready(ctx):
        engine = engine_of(cell, zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": True})
        steps(engine, cell, Trained([], [], {}))
        assert engine.save_16bit_model(folder, "model.bin")
        head = joined(gathered(engine), engine.module.lm_head, cell)["lm_head.weight"]
        engine.destroy()
    return head


@pytest.mark.parametrize(
    "cell", [Cell(3), Cell(3, section=DATA), Cell(3, "bfloat16", section=DATA)], ids=lambda c: c.id
)
def test_save_16bit_model_has_the_whole_head(cell: Cell, engine_workers: Engines, tmp_path: Path) -> None:
    head = engine_workers(2).run(2, _save_16bit, cell, str(tmp_path))[0]
    saved = torch.load(tmp_path / "model.bin")
    assert list(saved) == list(make_model(cell).state_dict())
    assert torch.equal(saved["lm_head.weight"], head.to(saved["lm_head.weight"].dtype))


def _save_16bit_without_frozen(ctx: Context, cell: Cell, folder: str) -> None:
    with deepspeed_ready(ctx):
        model = make_model(cell)
        model.lm_head.requires_grad_(False)
        gather = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
        engine = engine_of(cell, model, zero_optimization=gather)
        assert engine.save_16bit_model(folder, "model.bin", exclude_frozen_parameters=True)
        engine.destroy()


def test_save_16bit_model_leaves_a_frozen_head_out_when_asked(engine_workers: Engines, tmp_path: Path) -> None:
    cell = Cell(3, section=DATA)
    engine_workers(2).run(2, _save_16bit_without_frozen, cell, str(tmp_path))
    whole = list(make_model(cell).state_dict())
    assert list(torch.load(tmp_path / "model.bin")) == [name for name in whole if not name.startswith("lm_head")]


ROWS_IN_ALL = 4


def _universal(ctx: Context, cell: Cell, folder: str, load: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two steps of Adam from the checkpoint's parameters: those that it has, and the new ones. What is not loaded is
    trained for two steps before, and saved."""
    rows = ROWS_IN_ALL * tensor_ranks(cell) // ctx.world
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": rows}
    if load:
        config["checkpoint"] = {"load_universal": True}

    def two_steps(engine: Any) -> None:
        mine = slice(rows * dist.get_rank(engine.data_parallel_group), None)
        for step in batches(cell, 2)[:2]:
            for ids, labels in ((ids[mine][:rows], labels[mine][:rows]) for ids, labels in step):
                engine.backward(engine(input_ids=ids, labels=labels).loss if cell.llama else engine(ids, labels))
                engine.step()

    with deepspeed_ready(ctx):
        model = torch_model(cell, 0.5 if load else 1.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        engine = initialize(model=model, optimizer=optimizer, config=cell.config() | config)[0]
        if load:
            engine.load_checkpoint(folder, tag="universal")
        else:
            two_steps(engine)
            engine.save_checkpoint(folder, tag="saved")
        at_checkpoint = joined(gathered(engine), engine.module.lm_head, cell)
        two_steps(engine)
        after = joined(gathered(engine), engine.module.lm_head, cell)
        engine.destroy()
    return at_checkpoint, after


def tensor_ranks(cell: Cell) -> int:
    return cell.extra.get("tensor_parallel", {}).get("autotp_size", 1)


def to_universal(folder: Path) -> None:
    """As `ds_to_universal.py` does it."""
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        SimpleNamespace(
            input_folder=str(folder / "saved"),
            output_folder=str(folder / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


@pytest.mark.parametrize(
    ("saved", "loaded", "worlds"),
    [
        (Cell(1), Cell(1), (2, 4)),
        (Cell(3), Cell(3), (2, 4)),
        (Cell(3, bias=True, section=DATA), Cell(3, bias=True, section=DATA), (2, 4)),
        (Cell(3, "bfloat16", section=DATA), Cell(3, "bfloat16", section=DATA), (4, 2)),
        (Cell(3), Cell(3, section=DATA), (2, 4)),
        (Cell(3, llama=True, extra=AUTOTP), Cell(3, llama=True), (4, 2)),
        (Cell(1, llama=True, extra=AUTOTP), Cell(1, llama=True, extra=AUTOTP), (4, 2)),
    ],
    ids=[
        "zero1",
        "zero3",
        "never gathered",
        "never gathered, bfloat16",
        "whole to never gathered",
        "AutoTP to none",
        "AutoTP",
    ],
)
def test_universal_checkpoints_resume_on_another_number_of_ranks(
    saved: Cell, loaded: Cell, worlds: tuple[int, int], engine_workers: Engines, tmp_path: Path
) -> None:
    before, expected = engine_workers(worlds[0]).run(worlds[0], _universal, saved, str(tmp_path), False)[0]
    to_universal(tmp_path)
    for start, after in engine_workers(worlds[1]).run(worlds[1], _universal, loaded, str(tmp_path), True):
        for name, value in before.items():
            assert torch.equal(start[name], value), name
            moved = (expected[name] - value).norm()
            error = (after[name] - expected[name]).norm()
            assert error <= (1e-5 if saved.dtype == "float32" else 2e-2) * moved, f"{name}: {error} of {moved}"


def test_a_universal_checkpoint_with_padding_is_refused_by_an_engine_with_a_whole_head(
    engine_workers: Engines, tmp_path: Path
) -> None:
    """37 ids on 2 ranks are 38 rows, of which DeepSpeed does not know that the last is none."""
    engine_workers(2).run(2, _universal, Cell(3, section=DATA), str(tmp_path), False)
    to_universal(tmp_path)
    for outcome in engine_workers(2).outcomes(2, _universal, Cell(3), str(tmp_path), True):
        assert outcome.error is not None
        assert "exceeds dimension size" in outcome.error.message
