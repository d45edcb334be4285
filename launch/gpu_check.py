"""Checks the loss on the GPUs of this machine: the `gpu` tests and a short benchmark, then one table.

    python launch/gpu_check.py

Exit code 0: all tests passed and no measured method failed; 1: something failed; 2: no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent
COLLECT_TIMEOUT_S = 120
TESTS_TIMEOUT_S = 420
BENCH_TIMEOUT_S = 240
GRACE_S = 60
"""torchrun waits 30 s for its workers."""
CORES_PER_RUN = 2
PASSED = (0, 5)  # pytest's codes: all passed, and none selected
BAD = ("failure", "error")


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    result: str
    detail: str = ""
    failed: bool = False


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder of logs and results")
    parser.add_argument("--no-tests", action="store_true", help="only the benchmark")
    parser.add_argument("--no-bench", action="store_true", help="only the tests")
    parser.add_argument("--shapes", nargs="+", default=["llama3-8k", "small"])
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what pytest is given")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device here; run it on a machine with an NVIDIA (or AMD, ROCm) GPU", file=sys.stderr)
        return 2
    # The commands run in the repository's root.
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    num_gpus = torch.cuda.device_count()
    lines = [Line("GPUs", f"{num_gpus} x {torch.cuda.get_device_name(0)}", f"torch {torch.__version__}")]
    if not args.no_tests:
        lines += tests(args)
    if not args.no_bench:
        lines += benchmark(args, 1)
        if num_gpus > 1:
            lines += benchmark(args, 2)
    width = max(len(line.what) for line in lines)
    print("\n" + "\n".join(f"{line.what:<{width}}  {line.result:<22}  {line.detail}".rstrip() for line in lines))
    return int(any(line.failed for line in lines))


def tests(args: argparse.Namespace) -> list[Line]:
    """The `gpu` tests; those of several GPUs start their own processes and are skipped on one.

    Most of their time is the host's, so each file is a run of its own beside the others; what measures time follows.
    """
    began = time.monotonic()
    runs = max(1, (os.cpu_count() or 1) // CORES_PER_RUN)
    with ThreadPoolExecutor(runs) as pool:
        files = _test_files(args.tests)
        reports = list(pool.map(partial(_file_report, args.out), files))
    reports.append(test_report(args.out, "gpu and timing", "timing", *args.tests))
    seconds = time.monotonic() - began
    counts = Counter[str]()
    lines = []
    for log, code, report in reports:
        if report is None:
            lines.append(Line("tests", "FAILED", f"pytest ended with code {code} and no report: {log}", True))
            continue
        for suite in report.iter("testsuite"):
            counts.update({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
        bad_tests = [_bad_test(case, kind) for case in report.iter("testcase") for kind in case if kind.tag in BAD]
        lines += bad_tests
        if code not in PASSED and not bad_tests:
            lines.append(Line("tests", "FAILED", f"pytest ended with code {code}: {log}", True))
    bad = counts["failures"] + counts["errors"]
    passed = counts["tests"] - bad - counts["skipped"]
    detail = f"{counts['skipped']} skipped or known to miss their goal, {bad} failed, {seconds:.0f} s"
    return [Line("tests", f"{passed} passed", detail, bool(bad)), *lines]


def _test_files(paths: Sequence[str]) -> list[str]:
    """Files with `gpu` tests."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *paths]
    try:
        found = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=COLLECT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"gpu_check: collecting the tests took more than {COLLECT_TIMEOUT_S} s") from None
    files = sorted({line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line})
    if found.returncode not in PASSED or not files:
        raise SystemExit(f"gpu_check: cannot collect the tests\n{found.stdout}{found.stderr}")
    return files


def _file_report(out: Path, file: str) -> tuple[Path, int, ElementTree.Element | None]:
    return test_report(out, "gpu and not timing", Path(file).stem, file)


def test_report(out: Path, marks: str, name: str, *paths: str) -> tuple[Path, int, ElementTree.Element | None]:
    """Runs pytest; its log, exit code and report."""
    log, report = out / f"{name}.log", out / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", marks, "-q", f"--junitxml={report}", "--durations=15", *paths]
    code = _run(command, log, TESTS_TIMEOUT_S, quiet=True)
    print(f"{name}: {log.read_text().splitlines()[-1:]}", flush=True)
    return log, code, ElementTree.parse(report).getroot() if report.exists() else None


def _bad_test(case: ElementTree.Element, kind: ElementTree.Element) -> Line:
    message = (kind.get("message") or "").splitlines()
    name = f"{case.get('classname', '')}::{case.get('name')}"
    return Line(f"  {name[-90:]}", kind.tag.upper(), message[0][:160] if message else "", True)


def benchmark(args: argparse.Namespace, num_ranks: int) -> list[Line]:
    """The package beside the bare matrix products, and what else is installed."""
    out = args.out / f"bench-{num_ranks}"
    methods = (
        "flce,flce-narrow,flce-fp32-accum,flce-fp32-logits,eager,compile"
        if num_ranks == 1
        else "flce,flce-narrow,flce-fp32-logits"
    )
    options = ["--shapes", *args.shapes, "--methods", methods, "--rounds", "8", "--graph", "--out", str(out)]
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    results = out / "results.json"
    results.unlink(missing_ok=True)
    code = _run(
        [*start, str(ROOT / "launch" / "bench.py"), *options], args.out / f"bench-{num_ranks}.log", BENCH_TIMEOUT_S
    )
    name = f"benchmark, {num_ranks} GPU{'s' if num_ranks > 1 else ''}"
    if not results.exists():
        return [
            Line(name, "FAILED", f"ended with code {code} and no results: {args.out / f'bench-{num_ranks}.log'}", True)
        ]
    rows = json.loads(results.read_text())["rows"]
    lines = [
        Line(name, "ok" if code == 0 else "FAILED", "time, ratio to the floor, extra peak, error of dX", code != 0)
    ]
    return lines + [_bench_line(row) for row in rows]


def _bench_line(row: dict[str, Any]) -> Line:
    what = f"  {row['shape']}: {row['label']}"
    if row["status"] != "ok":
        return Line(what, row["status"].upper(), row["reason"], row["status"] == "failed")
    detail = "no floor" if row["to_floor"] is None else f"{row['to_floor']:.3f} x floor"
    if row["extra_peak_bytes"] is not None:
        detail += f", {row['extra_peak_bytes'] / 2**20:.0f} MiB"
    if "hidden_error" in row["errors"]:
        detail += f", {row['errors']['hidden_error']:.1e}"
    return Line(what, f"{row['ms']:.3f} ms", detail)


def _environment() -> dict[str, str]:
    """With the packages of a checkout that is not installed, in the children too."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _run(command: list[str], log: Path, timeout: int, quiet: bool = False) -> int:
    """Exit code of the command, whose output goes to `log`, and to this terminal unless `quiet`; it is ended after
    `timeout` s."""
    expired = threading.Event()
    print("$", " ".join(command), flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        timer = threading.Timer(timeout, _end, [process, expired])
        timer.start()
        try:
            for line in process.stdout:
                if not quiet:
                    print(line, end="", flush=True)
                file.write(line)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if expired.is_set():
        print(f"{log.stem}: ended after {timeout} s", flush=True)
    elif code < 0:
        print(f"{log.stem}: ended by signal {-code}", flush=True)
    return code


def _end(process: subprocess.Popen[str], expired: threading.Event) -> None:
    """With SIGTERM: torchrun ends its workers then, those of the tests end when their parent is gone, and a benchmark
    writes what it has. What hangs in a call of the driver does not hear it."""
    expired.set()
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
