"""The trainer's FSDP modes: equal to one process, exact to resume, and what they write is read by any other mode.

The runs use the session's workers, whose default group has four ranks; starting processes would take longer than the
runs.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from tests.kit.skips import needs

pytest.importorskip("transformers", reason=needs("train"))

import torch

import train
from tests.kit.processes import ROOT
from tests.kit.runs import TRAIN, Workplace, assert_same_curve, curve, held_out_loss, resumable_copy, run_trainer
from tests.kit.workers import Context, Pool

pytestmark = pytest.mark.timeout(600)

STEPS = 12
COMMON = (f"train.steps={STEPS}", "train.batch_size=8", "train.eval_every=6")
thorough = pytest.mark.exhaustive
MODES = {
    "fsdp": ("parallel.mode=fsdp",),
    "never_gathered": ("parallel.mode=fsdp", "parallel.head=sharded"),
    "fsdp_tensor": ("parallel.mode=fsdp+tensor", "parallel.tensor_size=2"),
}


def run(ctx: Context, arguments: list[str]) -> str:
    trainer = run_trainer(ctx, arguments)
    return train.describe(trainer.setup, trainer.ranks)


class FourRanks:
    """Runs on four ranks, each made once for all tests."""

    def __init__(self, place: Workplace, workers: Pool):
        self.place, self.workers = place, workers

    def train(self, name: str, *overrides: str) -> Path:
        self.workers.run(4, run, self.place.arguments(name, *COMMON, *overrides), timeout=300)
        return self.place.folder / name

    def full(self, mode: str) -> Path:
        """With accumulation, checkpoints and an export."""
        folder = self.place.folder / mode
        if not folder.exists():
            more = ("train.accumulation=2", "checkpoint.every=6", "output.export=true")
            self.train(mode, *MODES[mode], *more)
        return folder

    def resumed(self, before: str, name: str) -> Path:
        return resumable_copy(self.full(before), self.place.folder / name, STEPS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def four(place: Workplace, workers: Pool) -> FourRanks:
    return FourRanks(place, workers)


@pytest.fixture(scope="module")
def one_rank(place: Workplace) -> Path:
    return place.here("one_rank", *COMMON)


@pytest.mark.parametrize("mode", MODES)
def test_trains_as_one_process_does(mode: str, four: FourRanks, one_rank: Path) -> None:
    assert_same_curve(four.full(mode), one_rank, 1e-5, steps=STEPS)
    losses = curve(one_rank)
    assert losses[STEPS] < losses[1] - 0.03


@pytest.mark.parametrize("mode", MODES)
def test_resumes_exactly(mode: str, four: FourRanks) -> None:
    before = four.full(mode)
    after = four.resumed(mode, f"{mode}_again")
    four.train(f"{mode}_again", *MODES[mode], "train.accumulation=2", "checkpoint.resume=true")
    assert_same_curve(after, before, 0.0, steps=STEPS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("never_gathered", "fsdp_tensor"),
        pytest.param("fsdp", "never_gathered", marks=thorough),
        pytest.param("fsdp_tensor", "fsdp", marks=thorough),
    ],
)
def test_resumes_in_another_mode(before: str, after: str, four: FourRanks) -> None:
    name = f"{before}_as_{after}"
    folder = four.resumed(before, name)
    four.train(name, *MODES[after], "train.accumulation=2", "checkpoint.resume=true")
    assert_same_curve(folder, four.full(before), 1e-5, steps=STEPS)
    moved = [
        step for step, norm in curve(folder, "grad_norm").items() if norm != curve(four.full(before), "grad_norm")[step]
    ]
    assert moved, "equal bits throughout would mean that nothing was trained again"
    assert min(moved) > STEPS // 2


@pytest.mark.parametrize("mode", MODES)
def test_resumes_in_one_process(mode: str, four: FourRanks, place: Workplace) -> None:
    folder = four.resumed(mode, f"{mode}_alone")
    place.here(f"{mode}_alone", *COMMON, "checkpoint.resume=true")
    assert_same_curve(folder, four.full(mode), 1e-5, steps=STEPS)


@pytest.mark.parametrize("mode", MODES)
def test_export_holds_the_trained_model(mode: str, four: FourRanks) -> None:
    from transformers import AutoModelForCausalLM

    run = four.full(mode)
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert held_out_loss(run, model) == pytest.approx(curve(run, "eval_loss")[STEPS], abs=1e-5)


@pytest.mark.parametrize("mode", [pytest.param(m, marks=() if m == "never_gathered" else thorough) for m in MODES])
def test_bfloat16_stays_near_one_process(mode: str, four: FourRanks, place: Workplace) -> None:
    if not (place.folder / "one_rank_bf16").exists():
        place.here("one_rank_bf16", *COMMON, "train.dtype=bfloat16")
    run = four.train(f"{mode}_bf16", *MODES[mode], "train.dtype=bfloat16")
    assert_same_curve(run, place.folder / "one_rank_bf16", 1e-2, steps=STEPS)


@thorough
@pytest.mark.parametrize("size", [1, 4])
def test_all_ranks_or_none_share_the_vocabulary(size: int, four: FourRanks, one_rank: Path) -> None:
    overrides = ("parallel.mode=fsdp+tensor", f"parallel.tensor_size={size}", "output.export=true")
    assert_same_curve(four.train(f"tensor_size_{size}", *overrides), one_rank, 1e-5, steps=STEPS)


@pytest.mark.parametrize("mode", ["fsdp", pytest.param("fsdp_tensor", marks=thorough)])
def test_full_logits_train_as_in_one_process(mode: str, four: FourRanks, one_rank: Path) -> None:
    assert_same_curve(four.train(f"{mode}_full", *MODES[mode], "loss=torch"), one_rank, 1e-5, steps=STEPS)


def test_tied_embeddings_train_as_in_one_process(four: FourRanks, place: Workplace) -> None:
    tied = "model.config.tie_word_embeddings=true"
    one = place.here("tied_one", *COMMON, tied)
    assert_same_curve(four.train("tied", *MODES["fsdp"], tied), one, 1e-5, steps=STEPS)


@pytest.mark.parametrize(
    ("mode", "key"), [("never_gathered", "parallel.head"), ("fsdp_tensor", "model.config.tie_word_embeddings")]
)
def test_tied_embeddings_are_refused_with_a_sharded_head(mode: str, key: str, four: FourRanks) -> None:
    arguments = four.place.arguments("refused", *COMMON, *MODES[mode], "model.config.tie_word_embeddings=true")
    for outcome in four.workers.outcomes(4, run, arguments, timeout=300):
        assert outcome.error is not None
        assert outcome.error.classes[0] == "SetupError"
        assert outcome.error.message.startswith(f"{key}: ")


@pytest.mark.parametrize("name", ["fsdp", "fsdp_tensor", "never_gathered"])
def test_shipped_configs_run(name: str, four: FourRanks, tmp_path: Path) -> None:
    config = str(ROOT / "configs" / f"{name}.yaml")
    small = ("data.max_bytes=200_000", "tokenizer.vocab_size=509", "train.steps=2", "train.eval_every=0")
    folders = (f"output.dir={tmp_path / 'run'}", f"data.cache_dir={four.place.folder / 'cache'}", "parallel.device=cpu")
    said = four.workers.run(4, run, ["--config", config, *small, *folders], timeout=300)
    assert f"4 x cpu, {'fsdp+tensor' if name == 'fsdp_tensor' else 'fsdp'} parallel, loss flce" in said[0]
    assert curve(tmp_path / "run")[1] == pytest.approx(math.log(509), abs=0.3)


def test_torchrun_starts_it(place: Workplace, one_rank: Path) -> None:
    arguments = place.arguments("torchrun", *COMMON, *MODES["never_gathered"], "output.plot=true")
    code, output = place.torchrun(2, TRAIN, arguments).finish()
    assert code == 0, output
    assert_same_curve(place.folder / "torchrun", one_rank, 1e-5, steps=STEPS)
    assert "12 chunks of 32 tokens x 255 local entries" in output


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "dtype"), [*((mode, "float32") for mode in MODES), ("never_gathered", "bfloat16")])
def test_gpus_train_as_the_cpu_does(mode: str, dtype: str, place: Workplace) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices: `pytest -m gpu` on a machine that has them runs it")
    name = f"cpu_{dtype}"
    if not (place.folder / name).exists():
        place.here(name, *COMMON, f"train.dtype={dtype}")
    overrides = (*COMMON, *MODES[mode], f"train.dtype={dtype}", "parallel.device=cuda", "checkpoint.every=6")
    run = place.ranks(2, f"gpu_{mode}_{dtype}", *overrides, "output.export=true")
    bound = 1e-4 if dtype == "float32" else 1e-2
    assert_same_curve(run, place.folder / name, bound, steps=STEPS)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    place.ranks(2, run.name, *overrides, "checkpoint.resume=true")
    assert_same_curve(run, place.folder / name, bound, steps=STEPS)
