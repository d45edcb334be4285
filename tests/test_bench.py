"""launch/bench.py and launch/gpu_check.py on the CPU: figures, rows of what failed or is missing, sharded runs."""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import bench
import bench_deepspeed
import bench_fsdp_head
import gpu_check
from benchmark import accuracy, floor, measure, methods, plots, report, scaling, workload
from benchmark.arguments import parse_arguments
from benchmark.kernel_table import Interval, time_shares
from benchmark.methods import Method, Program
from benchmark.ranks import BenchRanks
from benchmark.workload import Problem, Shape
from flce_dist import plan
from tests.kit import compare, oracle
from tests.kit.processes import ROOT, start_ranks
from tests.kit.skips import needs
from tests.kit.trace import Trace
from tests.kit.workers import Context, Pool

QUICK = ["--device", "cpu", "--rounds", "2", "--round-seconds", "0.001"]
TINY = Shape("tiny", 48, 16, 301)
CPU = torch.device("cpu")


def run(out: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and rows by label."""
    code = bench.main([*QUICK, "--out", str(out), *arguments])
    rows = json.loads((out / "results.json").read_text())["rows"]
    return code, {row["label"]: row for row in rows}


def problem(shape: Shape = TINY, dtype: torch.dtype = torch.float32, ignored: float = 0.0) -> Problem:
    return workload.make_problem(shape, workload.make_inputs(shape, dtype, CPU, "random", ignored, 0), None)


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = run(tmp_path, "--shapes", "48,16,301", "--methods", "flce,eager", "--chunk-rows", "16,48")
    assert code == 0
    assert list(rows) == ["floor: 3 GEMMs", "floor: 3 GEMMs, cut rows=16", "flce rows=16", "flce rows=48", "eager"]
    for row in rows.values():
        assert row["status"] == "ok"
        assert len(row["seconds"]) == 2
        assert row["ms"] > 0
        assert row["to_floor"] > 0
    for label in ("flce rows=16", "flce rows=48", "eager"):
        assert rows[label]["errors"]["hidden_error"] < 1e-5
        assert rows[label]["errors"]["weight_error"] < 1e-5
        # Both gradients are part of what a step allocates.
        assert rows[label]["extra_peak_bytes"] >= 4 * (48 * 16 + 301 * 16)
    assert rows["flce rows=16"]["extra_peak_bytes"] < rows["flce rows=48"]["extra_peak_bytes"]
    assert rows["flce rows=16"]["to_cut_floor"] > 0
    assert "flce rows=16" in capsys.readouterr().out


def test_the_results_say_how_to_repeat_them(tmp_path: Path) -> None:
    run(tmp_path, "--shapes", "8,4,20", "--methods", "flce", "--chunk-rows", "4", "--ignored", "0.25")
    found = json.loads((tmp_path / "results.json").read_text())
    expected = {
        "shapes": [{"name": "8,4,20", "num_tokens": 8, "hidden_size": 4, "vocab_size": 20}],
        "methods": ["flce"], "chunk_rows": [4], "budgets": [], "ignored": 0.25, "rounds": 2, "round_seconds": 0.001,
        "graph": False, "sweep": None, "seed": 0, "out": str(tmp_path),
    }  # fmt: skip
    assert {name: found["settings"][name] for name in expected} == expected
    facts = found["environment"]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", facts["flce_dist"])
    assert facts["world_size"] == 1
    assert facts["torch"] == torch.__version__
    assert facts["float32_matmul"] == "highest", "no TF32"


def test_the_commit_is_that_of_the_files_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(report, "PACKAGE", package)

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert report._commit() is None, "not tracked: an installed package beside somebody's checkout"
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "-am", "a tag is not a commit", "v1")
    assert report._commit() == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed = True")
    assert report._commit() == git("rev-parse", "HEAD") + "-dirty"


def test_forward_only_and_ignored_tokens(tmp_path: Path) -> None:
    code, rows = run(
        tmp_path, "--shapes", "48,16,301", "--methods", "flce,eager", "--forward-only", "--ignored", "0.75",
        "--skip-ignored", "--data", "trained",
    )  # fmt: skip
    assert code == 0
    assert "floor: logits GEMM" in rows
    assert rows["flce"]["errors"].keys() == {"loss_error"}
    assert rows["flce"]["errors"]["loss_error"] < 1e-5


def test_chunks_of_dropped_tokens_are_not_told(tmp_path: Path) -> None:
    """The loss cuts the tokens that are left, so the rows planned for all, and all of them cut, say nothing."""
    options = ["--shapes", "48,16,301", "--methods", "flce", "--budgets", "16KiB", "--ignored", "0.5"]
    _, rows = run(tmp_path, *options)
    assert rows["flce budget=0.015625MiB"]["chunk_rows"] == 13
    assert rows["flce budget=0.015625MiB"]["to_cut_floor"] > 0
    _, rows = run(tmp_path, *options, "--skip-ignored")
    assert list(rows) == ["floor: 3 GEMMs", "flce budget=0.015625MiB"]
    assert rows["flce budget=0.015625MiB"]["chunk_rows"] is None
    assert rows["flce budget=0.015625MiB"]["to_cut_floor"] is None


def test_what_is_measured_follows_from_a_methods_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from its name: logits of eight bytes halve the rows of a budget, and what is in chunks is captured."""
    wide = dataclasses.replace(methods.METHODS["flce"], name="wide", options={"logits_dtype": torch.float64})
    monkeypatch.setitem(methods.METHODS, "wide", wide)
    args = parse_arguments([*QUICK, "--methods", "flce,wide,eager"])
    entries = bench.prepare(args, problem(), ["16KiB"])
    assert [e.row.chunk_rows for e in entries if e.method is not None] == [13, 6, None]
    monkeypatch.setattr(bench, "_capture", lambda *_: None)
    graphs = [entry.row.method for entry in bench._graphs(entries, problem())]
    floors = [f"{entry.row.method} (graph)" for entry in entries if entry.is_floor]
    assert graphs == [*floors, "flce (graph)", "wide (graph)"]


@pytest.mark.parametrize(("more", "expected"), [([], [128, 32, 64]), (["--forward-only"], [32, 32, 32])], ids=str)
def test_rows_of_the_default_budget_are_those_of_the_loop(
    more: list[str], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 rows, but two chunks where they spare a float32 accumulator, and 64 rows beside one."""
    monkeypatch.setattr(plan, "default_budget", lambda *_: 32 * 256 * 2)
    monkeypatch.setattr(plan, "GROWN_MULTIPLE", 128)
    args = parse_arguments([*QUICK, *more, "--methods", "flce,flce-narrow,flce-fp32-accum"])
    entries = bench.prepare(args, problem(Shape("many", 256, 64, 256), torch.bfloat16), [])
    ours = [entry for entry in entries if entry.method is not None]
    assert [entry.row.chunk_rows for entry in ours] == expected
    for entry in ours:
        assert entry.step is not None
        with Trace() as trace:
            entry.step()
        shapes = [event.shapes for event in trace.matrix_products]
        assert {left[0] for left, right, *_ in shapes if right == (64, 256)} == {entry.row.chunk_rows}


def test_methods_are_different() -> None:
    """No name for what another one does already."""
    ours = [{**method.options, **method.loss} for method in methods.METHODS.values() if method.chunked]
    assert all(options not in ours[:i] for i, options in enumerate(ours))
    reduce_in_fp32 = {"hidden_grad_reduce_dtype": torch.float32}  # the default
    assert reduce_in_fp32 not in ours


def test_what_stands_for_a_method_on_one_rank_can_be_measured_there() -> None:
    assert all(methods.METHODS[other].single for other in scaling.ONE_RANK.values())


DOCS = Path(__file__).parent.parent / "docs" / "benchmarking.md"


@pytest.mark.parametrize(("heading", "names"), [("Shapes", workload.SHAPES), ("Methods", methods.METHODS)])
def test_the_docs_name_everything_that_can_be_measured(heading: str, names: dict[str, Any]) -> None:
    (section,) = re.findall(rf"^### {heading}\n(.*?)^#", DOCS.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert sorted(set(names) - set(re.findall(r"`([^`]+)`", section))) == []
    assert [name for name in re.findall(r"`(flce[\w-]*)`", section) if name not in names] == []


def test_the_docs_name_every_benchmark() -> None:
    scripts = {path.name for path in Path(bench.__file__).parent.glob("bench*.py")}
    assert scripts - set(re.findall(r"`launch/(\w+\.py)`", DOCS.read_text())) == set()


def test_what_is_not_installed_is_shown_and_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Problem) -> Program:
        import a_package_that_nobody_has  # type: ignore[import-not-found]

        return a_package_that_nobody_has.program()

    monkeypatch.setitem(methods.METHODS, "missing", Method("missing", missing))
    code, rows = run(tmp_path, "--shapes", "8,4,20", "--methods", "missing,megatron,flce")
    assert code == 0
    assert rows["missing"]["status"] == "unavailable"
    assert "a_package_that_nobody_has" in rows["missing"]["reason"]
    assert rows["megatron"]["status"] == "unavailable"
    assert "several ranks" in rows["megatron"]["reason"]
    assert rows["flce"]["status"] == "ok"


def test_a_method_that_fails_does_not_lose_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Problem) -> Program:
        raise RuntimeError("out of luck")

    def fails_in_backward(given: Problem) -> Program:
        return Program(lambda: given.hidden.detach().sum(), given.hidden, given.weight)

    monkeypatch.setitem(methods.METHODS, "fails", Method("fails", fails))
    monkeypatch.setitem(methods.METHODS, "late", Method("late", fails_in_backward))
    code, rows = run(tmp_path, "--shapes", "8,4,20", "--methods", "fails,late,flce")
    assert code == 1
    assert rows["fails"]["status"] == rows["late"]["status"] == "failed"
    assert "out of luck" in rows["fails"]["reason"]
    assert rows["flce"]["status"] == "ok"
    assert rows["flce"]["to_floor"] > 0


def test_a_shape_that_fails_does_not_lose_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = workload.make_inputs

    def some(shape: Shape, *rest: Any) -> Any:
        if shape.num_tokens == 9:
            raise MemoryError("too large")
        return make(shape, *rest)

    monkeypatch.setattr(workload, "make_inputs", some)
    code, rows = run(tmp_path, "--shapes", "9,4,20", "8,4,20", "--methods", "flce")
    assert code == 1
    assert "too large" in rows["all methods"]["reason"]
    assert rows["flce"]["status"] == "ok"


def _sweep_that_ends(out: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]) -> None:
    """A sweep over tokens that comes to its end at the second of its six sizes."""
    make = workload.make_inputs

    def some(shape: Shape, *rest: Any) -> Any:
        return end() if shape.num_tokens == 4 else make(shape, *rest)

    monkeypatch.setattr(workload, "make_inputs", some)
    bench.main([*QUICK, "--out", str(out), "--shapes", "32,4,20", "--methods", "flce", "--sweep", "tokens"])


def test_what_was_measured_survives_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        _sweep_that_ends(tmp_path, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stop.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["method"], row["num_tokens"]) for row in rows] == [("floor: 3 GEMMs", 2), ("flce", 2)]
    assert figures.keys() == {"tokens-time", "tokens-memory", "tokens-ratio"}
    assert "\nflce  " in capsys.readouterr().out


def test_what_was_measured_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nothing can handle: the results of a size are there before the next one starts."""
    found: list[Any] = []

    def read() -> None:
        found.extend(json.loads((tmp_path / "results.json").read_text())["rows"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _sweep_that_ends(tmp_path, monkeypatch, read)
    assert [(row["method"], row["num_tokens"]) for row in found] == [("floor: 3 GEMMs", 2), ("flce", 2)]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those that are drawn, by the name of their file."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason=needs("bench"))
    drawn: dict[str, Any] = {}
    save = pyplot.Figure.savefig

    def keep(figure: Any, path: Path, **options: Any) -> None:
        save(figure, path, **options)
        drawn[path.stem] = figure

    monkeypatch.setattr(pyplot.Figure, "savefig", keep)
    return drawn


def test_plots_say_what_they_show(tmp_path: Path, figures: dict[str, Any]) -> None:
    rows = [report.Row.of(TINY, 1, "flce", seconds=[0.001], to_floor=1.25)]
    plots.plot_sweep("tokens", rows, "title", tmp_path)
    assert figures["tokens-time"].axes[0].get_ylabel() == "forward + backward (ms)"
    assert figures["tokens-ratio"].axes[0].get_ylabel() == "forward + backward / three whole GEMMs"
    plots.plot_sweep("tokens", rows, "title", tmp_path, forward_only=True)
    assert figures["tokens-time"].axes[0].get_ylabel() == "forward (ms)"
    assert figures["tokens-ratio"].axes[0].get_ylabel() == "forward / the whole logits GEMM"


def test_budgets_are_drawn_beside_what_has_none(tmp_path: Path, figures: dict[str, Any]) -> None:
    """At the budget that was given, though the chunk of one budget may be that of another."""
    mib = 2**20
    rows = [
        report.Row.of(TINY, 1, "floor: 3 GEMMs", extra_peak_bytes=7 * mib),
        report.Row.of(TINY, 1, "floor: 3 GEMMs, cut", "rows=48", 48, extra_peak_bytes=6 * mib),
        report.Row.of(TINY, 1, "flce", "budget=1MiB", 48, budget_bytes=mib, extra_peak_bytes=4 * mib),
        report.Row.of(TINY, 1, "flce", "a label", 48, budget_bytes=2 * mib, extra_peak_bytes=5 * mib),
        report.Row.of(TINY, 1, "eager", extra_peak_bytes=9 * mib),
        report.Row.of(TINY, 1, "compile", status="failed"),
    ]
    plots.plot_sweep("budget", rows, "title", tmp_path)
    (axes,) = figures["budget-memory"].axes
    assert axes.get_xlabel() == "budget for the logits of a chunk (MiB)"
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["flce", "floor: 3 GEMMs", "eager"]
    assert lines["flce"].get_xydata().tolist() == [[1, 4], [2, 5]]
    assert set(lines["floor: 3 GEMMs"].get_ydata()) == {7}
    assert set(lines["eager"].get_ydata()) == {9}


def test_a_legend_covers_no_line(tmp_path: Path, figures: dict[str, Any]) -> None:
    names = [name for name, method in methods.METHODS.items() if not method.loss]
    rows = [
        report.Row.of(shape, 1, name, extra_peak_bytes=2**20 * (1 + len(name) * shape.num_tokens))
        for name in names
        for shape in (TINY, TINY.resized(num_tokens=96))
    ]
    plots.plot_sweep("tokens", rows, "title", tmp_path)
    figure = figures["tokens-memory"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    box, inside = legend.get_window_extent(), figure.axes[0].get_window_extent()
    assert box.y1 <= inside.y0
    assert inside.height > 0.5 * figure.bbox.height
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize(("sweep", "title"), [("tokens", "H 8 V 200\n"), ("budget", "N 32 H 8 V 200\n")])
def test_a_sweep_writes_its_plots(tmp_path: Path, sweep: str, title: str, figures: dict[str, Any]) -> None:
    budgets = ["--budgets", "4KiB,16KiB"] if sweep == "budget" else []
    code, _ = run(tmp_path, "--shapes", "32,8,200", "--methods", "flce,eager", "--sweep", sweep, *budgets)
    assert code == 0
    for name in ("time", "memory", "ratio"):
        assert (tmp_path / f"{sweep}-{name}.png").stat().st_size > 1000
        assert figures[f"{sweep}-{name}"].axes[0].get_title().startswith(title)


def test_a_profile_names_the_matrix_products(tmp_path: Path) -> None:
    _, rows = run(tmp_path, "--shapes", "32,8,200", "--methods", "flce", "--profile")
    assert "aten::mm" in [kernel["name"] for kernel in rows["flce"]["kernels"]]
    shares = rows["flce"]["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert 0 < shares["products"] < 1
    assert shares["collectives"] == 0


def test_what_is_not_hidden_under_a_product() -> None:
    """A collective counts only where nothing else runs, another kernel only where no product does."""
    found = time_shares(
        [
            Interval("nvjet_sm90_tst_128x256", 0, 4),
            Interval("sm90_xmma_gemm_bf16", 3, 5),
            Interval("_row_stats_kernel", 4, 6),
            Interval("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 7),
            Interval("void at::native::vectorized_elementwise_kernel", 9, 10),
        ]
    )
    assert found == pytest.approx({"products": 0.5, "kernels": 0.2, "collectives": 0.1, "idle": 0.2})


def test_efficiency_is_against_one_rank_of_the_same_run() -> None:
    def row(num_ranks: int, method: str, seconds: float, setting: str = "") -> report.Row:
        return report.Row.of(TINY, num_ranks, method, setting, seconds=[seconds])

    rows = [
        row(1, "flce", 8.0), row(1, "flce", 9.0, "rows=2"), row(4, "flce", 2.5), row(4, "flce-sharded-tokens", 4.0),
        row(4, "flce-narrow-reduce", 2.0),
    ]  # fmt: skip
    scaling.set_efficiencies([*rows, row(4, "megatron", 3.0)])
    assert [entry.efficiency for entry in rows] == [1.0, 1.0, *map(pytest.approx, (0.8, 0.5, 1.0))]
    assert "0.800" in scaling.table(rows)
    alone = [row(1, "flce", 8.0)]
    scaling.set_efficiencies(alone)
    assert alone[0].efficiency is None
    assert scaling.table(alone) == ""


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--methods", "flce,nothing", "known: flce, "),
        ("--methods", ",", "names separated by commas"),
        ("--methods", "", "names separated by commas"),
        ("--shapes", "tiny,3", "nor N,H,V"),
        ("--chunk-rows", "a", "whole number of at least 1"),
        ("--chunk-rows", "16,0", "whole number of at least 1"),
        ("--chunk-rows", "-5", "whole number of at least 1"),
        ("--budgets", "4apples", "must look like"),
        ("--budgets", "1MiB,0", "at least one byte"),
        ("--ignored", "1.5", "at least 0 and below 1"),
        ("--ignored", "nan", "at least 0 and below 1"),
        ("--ignored", "half", "a number"),
        ("--rounds", "0", "whole number of at least 1"),
        ("--rounds", "-1", "whole number of at least 1"),
        ("--round-seconds", "0", "positive number of seconds"),
        ("--round-seconds", "inf", "positive number of seconds"),
    ],
)
def test_wrong_arguments_are_refused(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was expected and what came, in the last line."""
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--device", "cpu", f"{option}={value}"])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert expected in said
    assert value.split(",")[-1] in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--device", "cuda"], "torch sees no CUDA device here"), (["--sweep", "ranks"], "torchrun --standalone")],
)
def test_what_this_run_cannot_do_is_refused(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as stop:
        parse_arguments(arguments)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


LOSSES = {name: dict(method.loss) for name, method in methods.METHODS.items() if method.loss}


@pytest.mark.parametrize("loss", [{}, *LOSSES.values()], ids=str)
def test_the_reference_is_the_oracle(loss: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHUNK_BYTES", 20 * 8 * TINY.vocab_size)  # three chunks
    given = problem(ignored=0.3)
    found = accuracy.reference(given, given.weight, **loss)
    options = loss | ({"class_weight": workload.make_class_weight(301, CPU)} if "class_weight" in loss else {})
    expected = oracle.reference(given.hidden, given.weight, given.target, **options)
    compare.assert_close(found.loss, expected.loss, 1e-12, "loss")
    compare.assert_close(found.hidden_grad, expected.hidden_grad, 1e-12, "hidden gradient")
    compare.assert_close(found.weight_grad, expected.weight_grad, 1e-12, "weight gradient")


def test_the_reference_holds_the_logits_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHUNK_BYTES", 4 * 8 * TINY.vocab_size)
    chunks: list[weakref.ref[Tensor]] = []
    alive = []
    whole = torch.autograd.grad

    def grad(loss: Tensor, logits: Tensor) -> Any:
        chunks.append(weakref.ref(logits))
        alive.append(sum(chunk() is not None for chunk in chunks))
        return whole(loss, logits)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    given = problem()
    accuracy.reference(given, given.weight)
    assert len(alive) > 3
    assert max(alive) == 1


def test_a_method_is_compared_with_its_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of this package that works on one rank; and another loss's reference would show."""
    names = [name for name, method in methods.METHODS.items() if method.chunked and method.single]
    arguments = ["--shapes", "48,16,301", "--ignored", "0.25", "--methods", ",".join(names)]
    code, rows = run(tmp_path, *arguments)
    assert code == 0
    assert set(names) < set(rows)
    for name in names:
        assert len(rows[name]["seconds"]) == 2
        assert rows[name]["to_floor"] > 0
        for error in ("loss_error", "hidden_error", "weight_error"):
            assert rows[name]["errors"][error] < 2e-6, name
    reference = accuracy.reference
    monkeypatch.setattr(accuracy, "reference", lambda given, weight, **_: reference(given, weight))
    _, rows = run(tmp_path, *arguments)
    assert {name for name in names if rows[name]["errors"]["hidden_error"] > 1e-5} == set(LOSSES)


def test_what_the_loss_refuses_is_unavailable(tmp_path: Path) -> None:
    options = ["--shapes", "48,16,301", "--methods", "flce-entropy,flce-softcap", "--ignored", "0.5", "--skip-ignored"]
    code, rows = run(tmp_path, *options)
    assert code == 0
    assert (rows["flce-entropy"]["status"], rows["flce-softcap"]["status"]) == ("unavailable", "ok")
    assert "--skip-ignored" in rows["flce-entropy"]["reason"]


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("fp16", 1e-5, 1e-3), ("bf16", 1e-4, 1e-2), ("fp32", 1e-8, 1e-6), ("fp64", 0.0, 1e-14)]
)
def test_methods_compute_in_the_dtype_that_was_asked_for(tmp_path: Path, dtype: str, least: float, most: float) -> None:
    names = ["flce", "flce-narrow", "eager"]
    code, rows = run(tmp_path, "--shapes", "48,16,301", "--dtype", dtype, "--methods", ",".join(names))
    assert code == 0
    for name in names:
        assert least <= rows[name]["errors"]["hidden_error"] <= most, name


def test_errors_are_those_that_were_made() -> None:
    given = problem()
    expected = accuracy.reference(given, given.weight)
    program = Program(lambda: given.hidden.sum(), given.hidden, given.weight)
    given.hidden.grad = (1.01 * expected.hidden_grad).float()
    given.weight.grad = (0.98 * expected.weight_grad).float()
    found = accuracy.errors(1.1 * expected.loss, program, expected, None)
    assert found["loss_error"] == pytest.approx(0.1, rel=1e-4)
    assert found["hidden_error"] == pytest.approx(0.01, rel=1e-3)
    assert found["hidden_row_error_p99"] == pytest.approx(0.01, rel=1e-3)
    assert found["weight_error"] == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("chunk_rows", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_floor_multiplies_what_the_loss_multiplies(chunk_rows: int | None, dtype: torch.dtype) -> None:
    from tests.kit.trace import Trace

    given = problem(dtype=dtype)
    with Trace() as bare:
        floor.gemms(given, chunk_rows, forward_only=False)()
    with Trace() as full:
        methods.build(methods.METHODS["flce-narrow"], given, {"chunk_rows": chunk_rows}, False).run(forward_only=False)
    assert bare.matrix_products == full.matrix_products
    assert {kind for product in bare.matrix_products for kind in product.dtypes} == {dtype}


def test_the_extra_peak_on_the_cpu_counts_what_is_alive_together() -> None:
    def step() -> None:
        for _ in range(3):
            a = torch.zeros(2**18)
            del a
        b, c = torch.zeros(2**17), torch.zeros(2**18)
        del b, c

    peak = measure.extra_peak(step, problem().place)
    assert 4 * (2**18 + 2**17) <= peak < 4 * (2**18 + 2**17) * 1.05


def test_ratios_are_taken_within_a_round() -> None:
    """A card that slows down by half in one round slows both."""
    assert report.median_ratio([1.1, 2.2, 1.2], [1.0, 2.0, 1.0]) == pytest.approx(1.1)


def test_columns_do_not_run_together() -> None:
    label = "flce-fp32-logits-narrow-reduce rows=131072 (graph)"
    row = report.Row.of(
        TINY, 1, label, chunk_rows=131072, seconds=[98765.4321], to_floor=294480.0, to_cut_floor=12345.0,
        extra_peak_bytes=2**60, errors={"loss_error": 1e-300, "hidden_error": 0.0, "weight_error": 1e300},
    )  # fmt: skip
    *_, header, line = report.table([row]).splitlines()
    assert line.removeprefix(label).split() == [
        "131072", "98765432.100", "294480.000", "12345.000", str(2**40), "1.0e-300", "0.0e+00", "-", "1.0e+300",
    ]  # fmt: skip
    assert header.split("  ")[0] == "method"


def test_trained_inputs_look_trained() -> None:
    shape = Shape("head", 1024, 64, 2000)
    hidden, weight, target = workload.make_inputs(shape, torch.float32, CPU, "trained", 0.0, 0)
    assert torch.nn.functional.cross_entropy(hidden @ weight.T, target).item() == pytest.approx(2.3, abs=0.1)
    share = weight.mean(0).norm() / weight.norm(dim=1).mean()
    assert share.item() == pytest.approx(workload.COMMON_SHARE, abs=0.03)


def _measure(ctx: Context, names: str) -> list[dict[str, Any]]:
    args = parse_arguments([*QUICK, "--methods", names])
    rows = bench.measure_shape(args, TINY, ctx.group, ["8KiB"], CPU, lambda _: None)
    return [dataclasses.asdict(row) for row in rows]


def test_sharded_methods_on_two_ranks(workers: Pool) -> None:
    ours = ["flce", "flce-narrow-reduce", "flce-sharded-tokens", "flce-none", "flce-entropy", *LOSSES]
    first, second = workers.run(2, _measure, ",".join([*ours, "eager", "loss_parallel"]))
    assert [row["seconds"] for row in first] == [row["seconds"] for row in second], "the slowest rank's time, on all"
    errors = [{row["method"]: row["errors"] for row in rows} for rows in (first, second)]
    assert errors[0] == errors[1], "those of all ranks' tokens, on all"
    found = {row["method"]: row for row in first}
    for name in ours:
        assert found[name]["status"] == "ok", found[name]["reason"]
        assert found[name]["errors"]["hidden_error"] < 1e-5
        assert found[name]["errors"]["weight_error"] < 1e-5
    assert found["eager"]["status"] == "unavailable"
    assert "equal shards" in found["loss_parallel"]["reason"]


def _sweep(ctx: Context, out: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(ctx.world))
        args = parse_arguments(
            [*QUICK, "--shapes", "48,16,301", "--methods", "flce,flce-sharded-tokens", "--sweep", "ranks", "--out", out]
        )
    ranks = BenchRanks(ctx.rank, ctx.world, CPU, {ctx.world: ctx.group})
    rows = []
    for shape, num_ranks, budgets in bench.cases(args, ranks):
        if ctx.rank < num_ranks:
            rows += bench.measure_shape(args, shape, ranks.first(num_ranks), budgets, CPU, lambda _: None)
    if ctx.rank == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            bench.finish(args, rows, report.environment(CPU, []))


def test_a_sweep_over_ranks_writes_efficiencies(tmp_path: Path, workers: Pool) -> None:
    pytest.importorskip("matplotlib", reason=needs("bench"))
    workers.run(2, _sweep, str(tmp_path))
    rows = {
        (row["num_ranks"], row["method"]): row for row in json.loads((tmp_path / "results.json").read_text())["rows"]
    }
    for method in ("flce", "flce-sharded-tokens"):
        expected = rows[1, "flce"]["ms"] / (2 * rows[2, method]["ms"])
        assert rows[2, method]["efficiency"] == pytest.approx(expected)
        assert rows[2, method]["errors"]["hidden_error"] < 1e-5
    assert (tmp_path / "ranks-efficiency.png").stat().st_size > 1000


def _fsdp_heads(ctx: Context) -> tuple[list[tuple[str, int]], str]:
    options = bench_fsdp_head.parse(["--rounds", "2", "--round-seconds", "0.01", "--device", "cpu"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        times = bench_fsdp_head.compare(options, BenchRanks(ctx.rank, ctx.world, CPU, {ctx.world: ctx.group}))
    return [(name, len(seconds)) for name, seconds in times.items()], said.getvalue()


def test_gathered_and_never_gathered_heads(workers: Pool) -> None:
    results = workers.run(4, _fsdp_heads)
    for found, said in results:
        assert found == [(name, 2) for name in bench_fsdp_head.VARIANTS]
        assert bool(said) == (said is results[0][1])
    assert "hidden states of 256 tokens travel instead of 1,001 rows of the weight (0.26 of them)" in results[0][1]
    assert re.search(r"^never gathered +[\d.]+ +[\d.]+ +- +\d+$", results[0][1], flags=re.MULTILINE)


@pytest.mark.timeout(300)
def test_deepspeed_variants(tmp_path: Path) -> None:
    """The command of the script's docstring, with shorter rounds."""
    pytest.importorskip("deepspeed", reason=needs("deepspeed"))
    script = ROOT / "launch" / "bench_deepspeed.py"
    assert f"torchrun --standalone --nproc-per-node 2 launch/{script.name} --device cpu --dtype float32" in (
        bench_deepspeed.__doc__ or ""
    )
    arguments = ["--device", "cpu", "--dtype", "float32", "--rounds", "2", "--round-seconds", "0.01"]
    code, said = start_ranks(2, script, arguments, tmp_path).finish()
    assert code == 0, said
    assert said.count("64 tokens a rank, H 32, V 1,001") == 1
    rows = re.findall(r"^(\w[\w ]*?) +([\d.]+) +([\d.]+) +- +\d+$", said, flags=re.MULTILINE)
    assert [name for name, *_ in rows] == list(bench_deepspeed.VARIANTS)
    assert all(float(milliseconds) > 0 for _, milliseconds, _ in rows)
    assert rows[0][2] == "1.000"


def test_gpu_check_lists_each_file_that_ended_badly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whose tests all passed and whose process then died, too, whatever others did."""
    case = "<testcase classname='c' name='{}'>{}</testcase>"
    passed, failed = case.format("good", ""), case.format("bad", "<failure message='wrong'/>")
    ends = {"one": (1, passed + failed), "two": (-11, passed), "three": (0, passed), "gpu and timing": (5, "")}

    def report_of(out: Path, marks: str, name: str, *_: str) -> Any:
        code, cases = ends[marks if marks in ends else name]
        return out / f"{name}.log", code, ElementTree.fromstring(f"<r><testsuite tests='1'>{cases}</testsuite></r>")

    monkeypatch.setattr(gpu_check, "_test_files", lambda _: ["one.py", "two.py", "three.py"])
    monkeypatch.setattr(gpu_check, "test_report", report_of)
    _, *lines = gpu_check.tests(gpu_check.parse_arguments(["--out", str(tmp_path)]))
    assert [(line.what.strip(), line.failed) for line in lines] == [("c::bad", True), ("tests", True)]
    assert "code -11" in lines[1].detail
    assert "two.log" in lines[1].detail


def test_gpu_check_shows_a_method_whose_floor_failed() -> None:
    row = {"shape": "small", "label": "flce", "status": "ok", "ms": 1.0, "to_floor": None, "extra_peak_bytes": 2**20}
    assert gpu_check._bench_line(row | {"errors": {}}).detail == "no floor, 1 MiB"


def test_gpu_check_waits_for_nothing_without_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "COLLECT_TIMEOUT_S", 0.01)
    with pytest.raises(SystemExit, match=r"collecting the tests took more than 0\.01 s"):
        gpu_check._test_files(["tests"])
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.1)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert gpu_check._run([sys.executable, "-c", deaf], tmp_path / "deaf.log", 1, quiet=True) == -signal.SIGKILL
    assert gpu_check._run(["sleep", "60"], tmp_path / "sleeper.log", 1, quiet=True) == -signal.SIGTERM
    said = capsys.readouterr().out
    assert "deaf: ended after 1 s" in said
    assert "sleeper: ended after 1 s" in said


def test_gpu_check_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: run `python launch/gpu_check.py`")
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
