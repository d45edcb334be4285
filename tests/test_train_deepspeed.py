"""The trainer through DeepSpeed engines: each of our configurations trains as one process does, resumes, exports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.skips import needs

pytest.importorskip("transformers", reason=needs("train"))
pytest.importorskip("deepspeed", reason=needs("deepspeed"))

import train
from flce_dist.integrations.deepspeed import read_section
from tests.kit.engines import deepspeed_ready
from tests.kit.processes import ROOT, Processes
from tests.kit.runs import (
    TRAIN,
    Workplace,
    assert_same_curve,
    curve,
    held_out_loss,
    resumable_copy,
    run_trainer,
)
from tests.kit.workers import Context, Pool
from trainer.parallel import Ranks, SetupError
from trainer.setup import prepare

pytestmark = pytest.mark.timeout(600)

STEPS = 12
COMMON = (f"train.steps={STEPS}", "train.batch_size=8", "train.eval_every=6")
CONFIGS = sorted(path.stem for path in (ROOT / "configs" / "deepspeed").glob("*.json") if path.suffixes == [".json"])
Engines = Callable[[int], Pool]


def run(ctx: Context, arguments: list[str]) -> None:
    with deepspeed_ready(ctx):
        run_trainer(ctx, arguments).setup.mode.engine.destroy()  # type: ignore[attr-defined]


def file_of(name: str) -> tuple[str, ...]:
    return "parallel.mode=deepspeed", f"parallel.deepspeed={ROOT / 'configs' / 'deepspeed' / f'{name}.json'}"


class Runs:
    """Runs on two ranks, each made once for all tests."""

    def __init__(self, place: Workplace, engines: Engines):
        self.place, self.engines = place, engines

    def train(self, name: str, *overrides: str, ranks: int = 2) -> Path:
        self.engines(ranks).run(ranks, run, self.place.arguments(name, *COMMON, *overrides), timeout=300)
        return self.place.folder / name

    def full(self, config: str) -> Path:
        """With accumulation, checkpoints and an export."""
        folder = self.place.folder / config
        if not folder.exists():
            self.train(config, *file_of(config), "train.accumulation=2", "checkpoint.every=6", "output.export=true")
        return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture(scope="module")
def runs(place: Workplace, engine_workers: Engines) -> Runs:
    return Runs(place, engine_workers)


@pytest.fixture(scope="module")
def one_rank(place: Workplace) -> Path:
    return place.here("one_rank", *COMMON)


def test_there_are_configurations() -> None:
    assert CONFIGS == ["autotp", "zero1", "zero2", "zero3", "zero3_never_gathered", "zero3_offload"]


@pytest.mark.parametrize("config", CONFIGS)
def test_trains_as_one_process_does(config: str, runs: Runs, one_rank: Path) -> None:
    assert_same_curve(runs.full(config), one_rank, 1e-5, steps=STEPS)
    losses = curve(one_rank)
    assert losses[STEPS] < losses[1] - 0.03


@pytest.mark.parametrize("config", CONFIGS)
def test_resumes_exactly(config: str, runs: Runs) -> None:
    before, name = runs.full(config), f"{config}_again"
    after = resumable_copy(before, runs.place.folder / name, STEPS)
    runs.train(name, *file_of(config), "train.accumulation=2", "checkpoint.resume=true")
    assert_same_curve(after, before, 0.0, steps=STEPS)


def test_resumes_with_another_stage_that_gathers_no_weights(runs: Runs) -> None:
    before = runs.full("zero1")
    after = resumable_copy(before, runs.place.folder / "zero1_to_zero2", STEPS)
    runs.train("zero1_to_zero2", *file_of("zero2"), "train.accumulation=2", "checkpoint.resume=true")
    assert_same_curve(after, before, 1e-5, steps=STEPS)


FSDP = ("parallel.mode=fsdp", "parallel.head=sharded")


@pytest.mark.parametrize(
    ("before", "after", "ranks", "message"),
    [
        ("zero3", FSDP, 2, "was written by parallel.mode deepspeed, which alone reads it"),
        ("fsdp", file_of("zero3"), 2, "was not written by parallel.mode deepspeed (it has no layout.json)"),
        ("zero3", file_of("zero3"), 4, "was written with number of ranks 2, not 4"),
        ("zero1", file_of("zero3"), 2, "was written with zero_optimization.stage 1 or 2, not 3"),
        ("autotp", file_of("zero1"), 2, "was written with tensor_parallel.autotp_size 2, not 1"),
        ("zero3", file_of("zero3_never_gathered"), 2, "was written with vocab_parallel other than data, not data"),
    ],
    ids=["to FSDP", "from FSDP", "ranks", "stage", "autotp_size", "vocab_parallel"],
)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_before_training(
    before: str, after: tuple[str, ...], ranks: int, message: str, runs: Runs
) -> None:
    if before in CONFIGS:
        folder = runs.full(before)
    elif not (folder := runs.place.folder / before).exists():
        runs.place.ranks(2, before, *COMMON, *FSDP, "checkpoint.every=6")
    arguments = runs.place.arguments(before, *COMMON, *after, "checkpoint.resume=true")
    for outcome in runs.engines(ranks).outcomes(ranks, _refused, arguments):
        assert outcome.error is not None
        assert SetupError.__name__ in outcome.error.classes
        checkpoint = folder / "checkpoints" / f"step-{STEPS:08d}"
        assert outcome.error.message == f"checkpoint.resume: {checkpoint} {message}"


def test_the_trainer_leaves_with_the_line_of_a_refused_checkpoint(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.full("zero3")
    capsys.readouterr()
    assert train.main(runs.place.arguments("zero3", *COMMON, "checkpoint.resume=true")) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("train.py: checkpoint.resume: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("config", CONFIGS)
def test_the_export_holds_the_trained_model(config: str, runs: Runs, one_rank: Path) -> None:
    from transformers import AutoModelForCausalLM

    run_folder = runs.full(config)
    model = AutoModelForCausalLM.from_pretrained(run_folder / "model")
    assert held_out_loss(run_folder, model) == pytest.approx(curve(run_folder, "eval_loss")[STEPS], abs=1e-5)


def test_full_logits_through_the_engine(runs: Runs, one_rank: Path) -> None:
    """`loss: torch` wins over the section, however that is spelt; numbers in strings are those DeepSpeed takes."""
    file = runs.place.folder / "alias.json"
    values = {"zero_optimization": {"stage": "3"}}
    file.write_text(json.dumps(values | {"loss": {"type": "flce_dist", "z_loss": 0.1}}))
    where = ("parallel.mode=deepspeed", f"parallel.deepspeed={file}")
    run_folder = runs.train("torch", *where, "loss=torch", "train.accumulation=2")
    assert_same_curve(run_folder, one_rank, 1e-5, steps=STEPS)


def test_full_logits_are_divided_once(runs: Runs, one_rank: Path) -> None:
    """Also where the engine has no loss of ours, and divides the gradient of its output by itself."""
    file = runs.place.folder / "float32_sums.json"
    values = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    file.write_text(json.dumps(values))
    where = ("parallel.mode=deepspeed", f"parallel.deepspeed={file}")
    run_folder = runs.train("float32_sums", *where, "loss=torch", "train.accumulation=2")
    assert curve(run_folder, "grad_norm")[1] == pytest.approx(curve(one_rank, "grad_norm")[1], rel=0.02)


@pytest.mark.parametrize(
    "values",
    [{}, {"flce_dist": {"label_smoothing": 0.1}}, {"loss": {"type": "flce_dist", "label_smoothing": 0.1}}],
    ids=["none", "flce_dist", "loss"],
)
def test_options_beside_a_section_of_either_spelling(values: dict[str, Any], runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}} | values))
    where = ("parallel.mode=deepspeed", f"parallel.deepspeed={path}")
    arguments = runs.place.arguments("options", *COMMON, *where, "loss.z_loss=0.2", "output.overwrite=true")
    given = runs.engines(2).run(2, _options, arguments)[0]
    expected = {"z_loss": 0.2} | ({"label_smoothing": 0.1} if values else {})
    assert {name: given.get(name) for name in expected} == expected


def test_four_ranks_two_of_them_tensor_parallel(runs: Runs, one_rank: Path) -> None:
    assert_same_curve(runs.train("autotp_four", *file_of("autotp"), ranks=4), one_rank, 1e-5, steps=STEPS)


@pytest.mark.parametrize("config", ["zero2", "zero3_never_gathered"])
def test_bfloat16_stays_near_one_process(config: str, runs: Runs, one_rank: Path) -> None:
    losses = curve(runs.train(f"{config}_bf16", *file_of(config), "train.dtype=bfloat16"))
    assert all(abs(losses[step] - loss) < 0.02 for step, loss in curve(one_rank).items())


def _options(ctx: Context, arguments: list[str]) -> dict[str, Any]:
    """The options of the section that the engine is made with."""
    with deepspeed_ready(ctx):
        setup = prepare(arguments[1], arguments[2:], Ranks(ctx.rank, ctx.world, ctx.rank, ctx.world))
        section = read_section(setup.mode.values)  # type: ignore[attr-defined]
        assert section is not None
        return section.options


def _refused(ctx: Context, arguments: list[str]) -> None:
    with deepspeed_ready(ctx):
        prepare(arguments[1], arguments[2:], Ranks(ctx.rank, ctx.world, ctx.rank, ctx.world))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"flce_dist": {"smoothing": 1}}, "flce_dist.smoothing: unknown key"),
        ({"flce_dist": {"vocab_parallel": "data"}, "zero_optimization": {"stage": 1}}, "flce_dist.vocab_parallel: "),
        ({"train_batch_size": 16}, "train_batch_size: 16, but 8 by train.batch_size"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer: the trainer has it"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage: 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm: the trainer reports the norm",
        ),
        ({"flce_dist": {"vocab_parallel": "data"}, "zero_optimization": True}, "flce_dist.vocab_parallel: "),
        ({"tensor_parallel": {"autotp_size": 3}}, "tensor_parallel.autotp_size 3 does not divide 2 ranks"),
        ({"tensor_parallel": {"autotp_size": "2"}}, "tensor_parallel.autotp_size: expected an integer, got '2'"),
        ({"tensor_parallel": 2}, "tensor_parallel: expected an object"),
        ({"bf16": True}, 'bf16: expected an object such as {"enabled": true}, got True'),
        ({"loss": {"type": "other"}}, 'loss: expected {"type": "flce_dist", ...}, got'),
        ({"flce_dist": {"z_loss": 0.1}}, "flce_dist.z_loss: loss.z_loss of the trainer's configuration gives it too"),
        ({"loss": {"type": "flce_dist", "z_loss": 0.1}}, "loss.z_loss: loss.z_loss of the trainer's configuration"),
        ({"flce_dist": {"head": "lm_head"}}, "flce_dist.head: the trainer's models have one head"),
        ({"flce_dist": {"ignore_index": 0}}, "flce_dist.ignore_index: the trainer counts by loss.ignore_index"),
        ({"flce_dist": {}, "loss": {"type": "flce_dist"}}, "flce_dist: the configuration has the section twice"),
    ],
    ids=str,
)
def test_refused_before_training(values: dict[str, Any], message: str, runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}} | values))
    where = ("parallel.mode=deepspeed", f"parallel.deepspeed={path}")
    arguments = runs.place.arguments("refused", *COMMON, *where, "loss.z_loss=0.2")
    for outcome in runs.engines(2).outcomes(2, _refused, arguments):
        assert outcome.error is not None
        assert SetupError.__name__ in outcome.error.classes
        assert outcome.error.message.startswith(f"parallel.deepspeed: {path}: {message}")
    assert not (runs.place.folder / "refused").exists()


def test_mode_and_file_go_together(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    for override in ("parallel.mode=deepspeed", "parallel.deepspeed=zero3.json"):
        assert train.main(place.arguments("refused", override)) == 2
        assert capsys.readouterr().err.startswith("train.py: parallel.deepspeed: a DeepSpeed configuration goes with")
    assert train.main([*place.arguments("refused"), "--deepspeed", "gone.json", "train.steps=1"]) == 2
    assert "parallel.deepspeed: gone.json: Expected a string path to an existing" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_launchers(launcher: str, place: Workplace, one_rank: Path) -> None:
    name = f"by_{launcher}"
    arguments = [TRAIN, "--deepspeed", str(ROOT / "configs/deepspeed/zero3.json"), *place.arguments(name, *COMMON)]
    command = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29533"],
    }[launcher]
    code, output = Processes(place.folder, [*command, *map(str, arguments)], [{"DS_ACCELERATOR": "cpu"}]).finish()
    assert code == 0, output
    assert_same_curve(place.folder / name, one_rank, 1e-5, steps=STEPS)
    assert output.count("is deprecated") < 5
