"""Whole runs of launch/train.py: single processes in this one, several by torchrun.

All runs train one tiny model on the same text, so that they can be compared with each other; those that several tests
look at are made once.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.kit.skips import needs

pytest.importorskip("transformers", reason=needs("train"))

import torch

import compare
import train
from tests.kit.processes import ROOT
from tests.kit.runs import STEPS, TRAIN, Workplace, assert_same_curve, curve, held_out_loss
from trainer.checkpoint import complete
from trainer.report import read_metrics

# Three to ten times what each test takes alone: whoever shares the cores must not fail them.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def full_logits(place: Workplace) -> Path:
    return place.here("full_logits", "loss=torch")


@pytest.fixture(scope="module")
def one_rank(place: Workplace) -> Path:
    return place.here("one_rank")


@pytest.fixture(scope="module")
def two_ranks(place: Workplace) -> Path:
    """The uninterrupted run on two ranks, with everything it can write."""
    wanted = ("output.tensorboard=true", "output.plot=true", "output.export=true", "checkpoint.every=30")
    code, output = place.torchrun(2, TRAIN, place.arguments("two_ranks", *wanted)).finish()
    assert code == 0, output
    return place.folder / "two_ranks"


def test_two_ranks_one_rank_and_full_logits_train_alike(two_ranks: Path, one_rank: Path, full_logits: Path) -> None:
    assert_same_curve(two_ranks, full_logits, 1e-4)
    assert_same_curve(one_rank, full_logits, 1e-4)
    losses = curve(two_ranks)
    assert losses[STEPS] < losses[1] - 0.5  # it did learn, so equal curves say something


@pytest.mark.parametrize("overrides", [("train.accumulation=4",), ("optimizer.max_grad_norm=null",)], ids=str)
def test_accumulation_and_clipping_on_one_rank(place: Workplace, full_logits: Path, overrides: tuple[str, ...]) -> None:
    name = overrides[0].partition("=")[0]
    run = place.here(name, "train.steps=10", "train.eval_every=0", *overrides)
    reference = place.here(f"{name}_full", "train.steps=10", "train.eval_every=0", "loss=torch", *overrides)
    assert_same_curve(run, reference, 1e-4, steps=10)
    if name == "train.accumulation":
        whole = place.here("whole_batch", "train.steps=10", "train.eval_every=0", "loss=torch")
        assert_same_curve(run, whole, 1e-4, steps=10)


@pytest.mark.parametrize("mode", ["data", "tensor"])
def test_two_ranks_with_accumulation_equal_the_whole_batch(place: Workplace, full_logits: Path, mode: str) -> None:
    # Documents are short, so ranks and micro-steps have different numbers of valid targets.
    run = place.ranks(2, f"{mode}_accumulated", f"parallel.mode={mode}", "train.accumulation=2")
    assert_same_curve(run, full_logits, 1e-4)


def test_compare_says_where_runs_differ_most(
    two_ranks: Path, full_logits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    records = read_metrics(full_logits / "metrics.jsonl")
    for record in records:
        if record["step"] == 17 and "loss" in record:
            record["loss"] += 0.25
    (other / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    picture = tmp_path / "out.png"
    assert compare.main([str(full_logits), str(two_ranks), str(other), "--output", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("two_ranks - full_logits: largest difference ")
    assert lines[1] == f"other - full_logits: largest difference 0.25 at step 17 ({STEPS} steps compared)"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert compare.main([str(full_logits), str(tmp_path)]) == 2


def test_run_leaves_what_the_docs_list(two_ranks: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert {path.name for path in two_ranks.iterdir()} == {
        "config.yaml",
        "tokens.json",
        "metrics.jsonl",
        "tensorboard",
        "loss.png",
        "checkpoints",
        "model",
    }
    assert [path.name for path in complete(two_ranks / "checkpoints")] == ["step-00000030", "step-00000060"]
    board = EventAccumulator(str(two_ranks / "tensorboard"))
    board.Reload()
    logged = {event.step: event.value for event in board.Scalars("loss")}
    assert logged == pytest.approx(curve(two_ranks))
    first = read_metrics(two_ranks / "metrics.jsonl")[0]
    assert first.keys() == {"step", "loss", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes"}
    assert first["loss"] == pytest.approx(math.log(509), abs=0.3)
    assert 2**26 < first["peak_memory_bytes"] < 2**34


def test_export_of_a_sharded_head_loads_in_transformers(place: Workplace, two_ranks: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(two_ranks / "model")
    tokenizer = AutoTokenizer.from_pretrained(two_ranks / "model")
    assert model.get_output_embeddings().weight.shape == (len(tokenizer), 64) == (509, 64)
    assert held_out_loss(two_ranks, model) == pytest.approx(curve(two_ranks, "eval_loss")[STEPS], abs=1e-5)


def test_resume_after_kill_repeats_the_curve_exactly(place: Workplace, two_ranks: Path) -> None:
    run = place.folder / "killed"
    arguments = place.arguments("killed", "checkpoint.every=10", "checkpoint.keep=1")
    processes = place.start(2, TRAIN, arguments)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step-00000020").exists():
        assert all(process.poll() is None for process in processes.processes), processes.text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    processes.end(signal.SIGKILL)
    before = curve(run)
    assert 20 <= max(before) < STEPS
    # What a kill may leave at worse moments: a line cut short, lines past the checkpoint, half a checkpoint.
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 99, "loss": 1.0}) + '\n{"step": 100, "lo')
    (run / "checkpoints" / "step-00000099.tmp").mkdir()
    (run / "checkpoints" / "step-00000098").mkdir()

    code, output = place.start(2, TRAIN, [*arguments, "checkpoint.resume=true"]).finish()
    assert code == 0, output
    assert "from " in output
    assert_same_curve(run, two_ranks, 0.0)
    assert [path.name for path in complete(run / "checkpoints")] == [f"step-{STEPS:08d}"]
    assert not list((run / "checkpoints").glob("*.tmp"))


def test_two_ranks_resume_as_one(place: Workplace, two_ranks: Path) -> None:
    run = place.folder / "resharded"
    shutil.copytree(two_ranks, run)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    place.here("resharded", "checkpoint.resume=true")
    assert_same_curve(run, two_ranks, 1e-5)
    moved = [step for step, loss in curve(run).items() if loss != curve(two_ranks)[step]]
    assert moved, "one rank sums in another order: equal bits throughout would mean that nothing was trained again"
    assert min(moved) > STEPS // 2


def test_earlier_run_is_neither_lost_nor_changed_silently(
    place: Workplace, two_ranks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*overrides: str) -> str:
        assert train.main(place.arguments("two_ranks", *overrides)) == 2
        return capsys.readouterr().err

    resume = "checkpoint.resume=true"
    before = (two_ranks / "metrics.jsonl").read_bytes()
    assert "output.dir: " in refused()
    assert "model.config.hidden_size: the run to resume has 64, not 32" in refused(
        resume, "model.config.hidden_size=32"
    )
    assert "train.batch_size: the run to resume has 4, not 8" in refused(resume, "train.batch_size=8")
    assert "train.steps: 59, but the run to resume has done 60" in refused(resume, "train.steps=59")
    assert (two_ranks / "metrics.jsonl").read_bytes() == before
    place.here("replaced", "train.steps=2", "train.eval_every=0", "checkpoint.every=1")
    place.here("replaced", "train.steps=1", "train.eval_every=0", "output.overwrite=true")
    assert list(curve(place.folder / "replaced")) == [1]
    assert not (place.folder / "replaced" / "checkpoints").exists()


def test_text_that_has_changed_is_not_resumed_on(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer gives other ids to the words that the model knows."""
    text = place.folder / "text.txt"
    short = (f"data.paths={text}", "data.holdout=0", "train.steps=2", "train.eval_every=0", "checkpoint.every=1")
    text.write_text((ROOT / "docs" / "design.md").read_text())
    place.here("changed", *short)
    resume = place.arguments("changed", *short, "checkpoint.resume=true", "train.steps=3")
    text.write_text(text.read_text() + "another line\n" * 200)
    assert train.main(resume) == 2
    assert "train.py: data.paths: the training tokens are not those of the run" in capsys.readouterr().err
    text.write_text((ROOT / "docs" / "design.md").read_text())
    assert train.main(resume) == 0
    assert list(curve(place.folder / "changed")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocab_size=400", "train.py: model.vocab_size: a vocabulary of 400 does not hold the data's id"),
        ("data.paths=gone.txt", "train.py: data.paths: no such file or folder: gone.txt"),
        ("train.accumulation=3", "train.py: train.batch_size: 4 sequences do not divide"),
        ("tokenizer.path=gone", "train.py: tokenizer.path: no such folder: gone"),
        ("output.dir=/dev/null/x", "train.py: output.dir: cannot write to"),
    ],
)
def test_refused_before_training(
    place: Workplace, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(place.arguments("refused", override)) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert "Traceback" not in error
    assert not (place.folder / "refused").exists()


def test_bad_key_is_refused_on_all_ranks_once(place: Workplace) -> None:
    code, output = place.torchrun(2, TRAIN, place.arguments("bad", "train.step=3")).finish(120)
    assert code != 0
    assert output.count("train.py: train.step: unknown key; did you mean 'steps'?") == 1
    assert "train.py FAILED" in output  # torchrun's own report, which counts the exit codes
    assert output.count("exitcode  : 2") == 2


def test_error_of_one_rank_ends_all(place: Workplace, tmp_path: Path) -> None:
    script = tmp_path / "one_fails.py"
    script.write_text(
        "from leave import exit_process\n"
        "from trainer.parallel import Ranks, SetupError\n"
        "from trainer.schema import ConfigError\n"
        "ranks = Ranks.start()\n"
        "for wrong in (ConfigError('data.paths', 'gone'), ZeroDivisionError('oops')):\n"
        "    try:\n"
        "        with ranks.agree():\n"
        "            if ranks.rank == 1:\n"
        "                raise wrong\n"
        "    except SetupError as error:\n"
        "        print(f'<{ranks.rank}: {error}>', flush=True)\n"
        "ranks.gather(None)\n"
        "exit_process(0)\n"
    )
    code, output = place.start(2, script, []).finish(120)
    assert code == 0, output
    for rank in (0, 1):
        assert f"<{rank}: data.paths: gone (on rank 1 of 2)>" in output
        assert f"<{rank}: Traceback" in output
    assert output.count("ZeroDivisionError: oops\n (on rank 1 of 2)>") == 2


def test_tied_embeddings_train_on_one_rank(place: Workplace) -> None:
    short = ("train.steps=10", "train.eval_every=0", "model.config.tie_word_embeddings=true")
    tied = place.here("tied", *short)
    assert_same_curve(tied, place.here("tied_full", "loss=torch", *short), 1e-4, steps=10)


def test_training_goes_on_from_an_export(place: Workplace, two_ranks: Path) -> None:
    overrides = ("model.config=null", f"model.path={two_ranks / 'model'}", "train.steps=1", "train.eval_every=1")
    run = place.here("from_export", *overrides, "optimizer.lr=1e-9")
    assert curve(run, "eval_loss")[1] == pytest.approx(curve(two_ranks, "eval_loss")[STEPS], abs=1e-5)


def test_bfloat16_stays_near_float32_and_keeps_fp32_weights(place: Workplace, one_rank: Path) -> None:
    from safetensors import safe_open

    run = place.here("bf16", "train.dtype=bfloat16", "train.steps=20", "train.eval_every=0", "output.export=true")
    losses, reference = curve(run), curve(one_rank)
    assert all(abs(losses[step] - reference[step]) < 0.05 for step in range(1, 11))
    with safe_open(run / "model" / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F32"}  # noqa: SIM118


def test_loss_that_is_not_finite_stops_the_run(place: Workplace) -> None:
    with pytest.raises(FloatingPointError, match="the loss of step "):
        place.here("diverged", "optimizer.lr=1e30", "optimizer.warmup_steps=0", "optimizer.max_grad_norm=null")


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "mode"), [(1, "tensor"), (2, "tensor"), (2, "data")])
def test_gpus_train_as_the_cpu_does(place: Workplace, full_logits: Path, size: int, mode: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices: `pytest -m gpu` on a machine that has them runs it")
    overrides = ("parallel.device=cuda", f"parallel.mode={mode}", "checkpoint.every=30", "output.export=true")
    run = place.ranks(size, f"gpu_{mode}_{size}", *overrides)
    assert_same_curve(run, full_logits, 1e-4)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    place.ranks(size, f"gpu_{mode}_{size}", *overrides, "checkpoint.resume=true")
    assert_same_curve(run, full_logits, 1e-4)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_quickstart_reaches_its_goals(tmp_path: Path, place: Workplace) -> None:
    arguments = ["--config", str(ROOT / "configs" / "quickstart.yaml"), f"output.dir={tmp_path}"]
    start = time.monotonic()
    code, output = place.torchrun(2, TRAIN, arguments).finish(500)
    assert code == 0, output
    assert time.monotonic() - start < 300
    losses = list(curve(tmp_path).values())
    assert len(losses) >= 60
    assert losses[-1] <= losses[0] * 2 / 3
    assert f"loss: first {losses[0]:.4f}, last {losses[-1]:.4f}" in output
    assert "6 chunks of 512 tokens x 4,096 local entries" in output
