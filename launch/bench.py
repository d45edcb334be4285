"""Time, memory and error of the loss, beside other implementations and the bare matrix products.

    python launch/bench.py --shapes llama3-8k small --methods flce,eager,compile,liger
    torchrun --nproc-per-node 2 launch/bench.py --methods flce,fla,megatron
    python launch/bench.py --device cpu

`docs/benchmarking.md` explains the figures and the options. The parts are in `launch/benchmark/`. The exit code is 1
when a method failed; one that is not installed is shown as such and does not count.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmark import accuracy, floor, kernel_table, measure, methods, plots, report, scaling, workload
from benchmark.arguments import parse_arguments
from benchmark.ranks import BenchRanks, run_and_exit
from benchmark.report import Row
from flce_dist.options import DTYPES, parse_bytes
from flce_dist.plan import rows_of_call
from flce_dist.shard import VocabShard

SWEEP_FACTORS = {"tokens": (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2), "vocab": (1 / 8, 1 / 4, 1 / 2, 1, 2)}
SWEEP_BUDGETS = ("64MiB", "128MiB", "256MiB", "512MiB", "1024MiB", "2048MiB")


@dataclass
class Entry:
    """A row and the step that is measured for it; without a step it could not be made ready.

    Args:
        is_floor: whether others are compared with it; a replay of the floor is not.
        method: what it measures; None for the floor and its replay.
    """

    row: Row
    step: Callable[[], object] | None = None
    is_floor: bool = False
    method: methods.Method | None = None
    program: methods.Program | None = field(default=None, repr=False)


def main(arguments: Sequence[str]) -> int:
    args = parse_arguments(arguments)
    ranks = BenchRanks.start(args.device)
    rows: list[Row] = []
    facts = report.environment(ranks.device, ["bench.py", *sys.argv[1:]])
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        for shape, num_ranks, budgets in cases(args, ranks):
            if ranks.rank < num_ranks:
                try:
                    measured = measure_shape(args, shape, ranks.first(num_ranks), budgets, ranks.device, ranks.say)
                except Exception as error:
                    # A shape that does not fit must not lose the others.
                    traceback.print_exc()
                    measured = [Row.of(shape, num_ranks, "all methods", status="failed", reason=_reason(error))]
                    measure.free_memory(ranks.device)
                rows += measured
                if ranks.rank == 0:
                    write(args, rows, facts)  # now: what hangs later may be killed
            ranks.wait()
    finally:
        if ranks.rank == 0 and rows:
            finish(args, rows, facts)
        signal.signal(signal.SIGTERM, before)
    return int(any(row.status == "failed" for row in rows))


def cases(args: argparse.Namespace, ranks: BenchRanks) -> list[tuple[workload.Shape, int, list[str]]]:
    """Shape, ranks and budgets of each measurement."""
    base = args.shapes[0]
    if args.sweep == "tokens":
        sizes = [max(1, round(base.num_tokens * factor)) for factor in SWEEP_FACTORS["tokens"]]
        return [(base.resized(num_tokens=size), ranks.size, args.budgets) for size in sizes]
    if args.sweep == "vocab":
        sizes = [max(1, round(base.vocab_size * factor)) for factor in SWEEP_FACTORS["vocab"]]
        return [(base.resized(vocab_size=size), ranks.size, args.budgets) for size in sizes]
    if args.sweep == "budget":
        return [(base, ranks.size, args.budgets or list(SWEEP_BUDGETS))]
    if args.sweep == "ranks":
        sizes = [size for size in range(1, ranks.size + 1) if ranks.size % size == 0]
        return [(shape, size, args.budgets) for shape in args.shapes for size in sizes]
    return [(shape, ranks.size, args.budgets) for shape in args.shapes]


def measure_shape(
    args: argparse.Namespace,
    shape: workload.Shape,
    group: dist.ProcessGroup | None,
    budgets: list[str],
    device: torch.device,
    say: Callable[[str], None],
) -> list[Row]:
    """All rows of a shape, the floor's first."""
    say(f"# {shape}")
    inputs = workload.make_inputs(shape, DTYPES[args.dtype], device, args.data, args.ignored, args.seed)
    if group is not None:
        for tensor in inputs:  # torch.multinomial draws other targets on another GPU
            dist.broadcast(tensor, group_src=0, group=group)
    problem = workload.make_problem(shape, inputs, group)
    references = None if args.no_errors else accuracy.References(problem, inputs[1])
    del inputs
    entries = prepare(args, problem, budgets)
    for entry in entries:
        _guarded(entry, group, partial(_check, entry, problem, references))
        say(f"  {entry.row.label}: {entry.row.status} {entry.row.reason}")
    del references
    if args.graph:
        entries += _graphs(entries, problem)
    _time(args, entries, problem)
    if args.profile:
        for entry in entries:
            _guarded(entry, group, partial(_profile, entry, device))
            if entry.row.kernels:
                say(f"\n{entry.row.label}\n{kernel_table.format_kernel_table(entry.row.kernels)}")
    rows = [entry.row for entry in entries]
    del entries, problem
    measure.free_memory(device)
    return rows


def prepare(args: argparse.Namespace, problem: workload.Problem, budgets: list[str]) -> list[Entry]:
    """The floor, whole and cut as the chunked methods are, then the methods."""
    shape, forward_only = problem.shape, args.forward_only

    row = partial(Row.of, shape, problem.num_ranks)

    name = "floor: logits GEMM" if forward_only else "floor: 3 GEMMs"
    entries = [Entry(row(name), floor.gemms(problem, None, forward_only), is_floor=True)]
    settings: list[tuple[str, dict[str, Any]]] = [(f"rows={n}", {"chunk_rows": n}) for n in args.chunk_rows]
    settings += [(f"budget={_mebibytes(text)}", {"logits_budget": text}) for text in budgets]
    settings = settings or [("", {})]
    by_method = []
    for method in args.methods:
        for setting, chunking in settings if method.chunked else [("", {})]:
            rows, options = None, method.cutting_options(problem.hidden.dtype, chunking)
            if method.chunked and not args.skip_ignored:  # which leaves fewer rows than these to be cut
                columns = VocabShard.even(shape.vocab_size, 0, problem.num_ranks).num_columns
                rows = rows_of_call(
                    options, shape.num_tokens, shape.hidden_size, columns, problem.hidden.dtype, problem.num_ranks,
                    bool(method.options.get("sharded_tokens")), not forward_only,
                )  # fmt: skip
            entry = Entry(row(method.name, setting, rows, budget_bytes=options.budget_bytes), method=method)
            by_method.append(entry)
            _guarded(entry, problem.group, partial(_build, entry, problem, chunking, args))
    for n in sorted({entry.row.chunk_rows for entry in by_method if entry.row.chunk_rows is not None}):
        if n < shape.num_tokens:
            cut = floor.gemms(problem, n, forward_only)
            entries.append(Entry(row(f"{name}, cut", f"rows={n}", n), cut, is_floor=True))
    return entries + by_method


def _build(entry: Entry, problem: workload.Problem, chunking: dict[str, Any], args: argparse.Namespace) -> None:
    assert entry.method is not None
    entry.program = methods.build(entry.method, problem, chunking, args.skip_ignored)
    entry.step = partial(entry.program.run, args.forward_only)


def _check(entry: Entry, problem: workload.Problem, references: accuracy.References | None) -> None:
    """The first calls: errors, then the extra peak once everything is compiled."""
    assert entry.step is not None
    expected = None if references is None or entry.method is None else references.of(entry.method)
    result = entry.step()
    if entry.program is not None:
        assert isinstance(result, torch.Tensor)
        if expected is not None:
            entry.row.errors = accuracy.errors(result, entry.program, expected, problem.group)
        entry.step()
        entry.program.hidden.grad = entry.program.weight.grad = None
        del result
    entry.row.extra_peak_bytes = measure.extra_peak(entry.step, problem.place)
    if entry.program is not None:
        entry.program.hidden.grad = entry.program.weight.grad = None


def _guarded(entry: Entry, group: dist.ProcessGroup | None, work: Callable[[], None]) -> None:
    """One method that fails must not lose the others: what it raised becomes its row. All ranks drop it together."""
    if entry.row.status != "ok":
        return
    status, reason = "ok", ""
    try:
        work()
    except methods.Unavailable as error:
        status, reason = "unavailable", str(error)
    except Exception as error:
        traceback.print_exc()
        status, reason = "failed", _reason(error)
    outcomes: list[tuple[str, str]] = [(status, reason)]
    if group is not None:
        outcomes = [("", "")] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (status, reason), group=group)
    worst = next((o for o in outcomes if o[0] == "failed"), next((o for o in outcomes if o[0] != "ok"), None))
    if worst is not None:
        entry.row.status, entry.row.reason = worst
        if entry.program is not None:
            entry.program.hidden.grad = entry.program.weight.grad = None
        entry.step = entry.program = None
        gc.collect()


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _profile(entry: Entry, device: torch.device) -> None:
    if entry.step is not None:
        entry.row.kernels, entry.row.shares = kernel_table.profile_step(entry.step, device)


def _graphs(entries: list[Entry], problem: workload.Problem) -> list[Entry]:
    """CUDA-graph replays of the floor and of the package's methods."""
    graphs = []
    for entry in entries:
        if entry.step is None or entry.row.status != "ok" or (entry.method is not None and not entry.method.chunked):
            continue
        source = entry.row
        row = Row(**{**vars(source), "method": f"{source.method} (graph)", "extra_peak_bytes": None, "errors": {}})
        graph = Entry(row)
        _guarded(graph, problem.group, partial(_capture, graph, entry.step, problem))
        graphs.append(graph)
    return graphs


def _capture(graph: Entry, step: Callable[[], object], problem: workload.Problem) -> None:
    graph.step = measure.captured(step, problem.place)
    graph.step()
    measure.synchronize(problem.device)


def _time(args: argparse.Namespace, entries: list[Entry], problem: workload.Problem) -> None:
    ready = [entry for entry in entries if entry.step is not None and entry.row.status == "ok"]
    steps = [entry.step for entry in ready if entry.step is not None]
    times = measure.time_rounds(steps, problem.place, args.rounds, args.round_seconds)
    for entry, seconds in zip(ready, times, strict=True):
        entry.row.seconds = seconds
    whole = entries[0].row
    cut = {entry.row.chunk_rows: entry.row for entry in ready if entry.is_floor}
    cut[problem.shape.num_tokens] = whole
    for entry in ready:
        if whole.seconds:
            entry.row.to_floor = report.median_ratio(entry.row.seconds, whole.seconds)
        same_cut = cut.get(entry.row.chunk_rows) if entry.row.chunk_rows is not None else None
        if same_cut is not None and same_cut.seconds:
            entry.row.to_cut_floor = report.median_ratio(entry.row.seconds, same_cut.seconds)


def _stop(signal_number: int, _: object) -> None:
    """So that what was measured is shown."""
    raise SystemExit(128 + signal_number)


def write(args: argparse.Namespace, rows: list[Row], facts: dict[str, Any]) -> None:
    scaling.set_efficiencies(rows)
    settings = vars(args) | {
        "methods": [method.name for method in args.methods],
        "shapes": [asdict(shape) for shape in args.shapes],
        "out": str(args.out),
    }
    facts["float32_matmul"] = torch.get_float32_matmul_precision()  # which a package may set when it is imported
    report.write_json(args.out / "results.json", rows, facts, settings)


def finish(args: argparse.Namespace, rows: list[Row], facts: dict[str, Any]) -> None:
    write(args, rows, facts)
    print("\n" + report.table(rows) + scaling.table(rows))
    shown = {key: value for key, value in facts.items() if key not in ("command", "date") and value is not None}
    print("\n" + ", ".join(f"{key} {value}" for key, value in shown.items()))
    print("MiB: extra peak above the inputs, " + ("caching allocator" if args.device == "cuda" else "CPU allocator"))
    print(f"wrote {args.out / 'results.json'}")
    if args.sweep:
        title = f"{_sizes(args)}\n{args.dtype}, {facts['device']}, torch {facts['torch']}"
        for written in plots.plot_sweep(args.sweep, rows, title, args.out, args.forward_only):
            print(f"wrote {written}")


def _sizes(args: argparse.Namespace) -> str:
    """Those that do not vary."""
    if args.sweep == "ranks" and len(args.shapes) > 1:
        return ", ".join(shape.name for shape in args.shapes)
    shape = args.shapes[0]
    sizes = {"tokens": f"N {shape.num_tokens}", "hidden": f"H {shape.hidden_size}", "vocab": f"V {shape.vocab_size}"}
    return " ".join(size for name, size in sizes.items() if name != args.sweep)


def _mebibytes(text: str) -> str:
    return f"{parse_bytes('budget', text) / 2**20:g}MiB"


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
