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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parent.parent
TESTS_TIMEOUT_S = 420
BENCH_TIMEOUT_S = 240


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
    """The `gpu` tests; those of several GPUs start their own processes and are skipped on one."""
    report = args.out / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}", "--durations=15", *args.tests]
    began = time.monotonic()
    code = _run(command, args.out / "tests.log", TESTS_TIMEOUT_S)
    seconds = time.monotonic() - began
    if not report.exists():
        return [Line("tests", "FAILED", f"pytest ended with code {code} and no report: {args.out / 'tests.log'}", True)]
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        counts = {name: count + int(suite.get(name, 0)) for name, count in counts.items()}
    bad = counts["failures"] + counts["errors"]
    passed = counts["tests"] - bad - counts["skipped"]
    detail = f"{counts['skipped']} skipped, {bad} failed, {seconds:.0f} s"
    lines = [Line("tests", f"{passed} passed", detail, code != 0)]
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is not None:
                message = (found.get("message") or "").splitlines()
                name = f"{case.get('classname', '')}::{case.get('name')}"
                lines.append(Line(f"  {name[-90:]}", kind.upper(), message[0][:160] if message else "", True))
    return lines


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
    detail = f"{row['to_floor']:.3f} x floor"
    if row["extra_peak_bytes"] is not None:
        detail += f", {row['extra_peak_bytes'] / 2**20:.0f} MiB"
    if "hidden_error" in row["errors"]:
        detail += f", {row['errors']['hidden_error']:.1e}"
    return Line(what, f"{row['ms']:.3f} ms", detail)


def _run(command: list[str], log: Path, timeout: int) -> int:
    """Exit code of the command, whose output goes to this terminal and to `log`; it is ended after `timeout` s."""
    # The packages of a checkout that is not installed, in the children too.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    print("$", " ".join(command), flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        # SIGTERM: torchrun ends its workers then, and those of the tests end when their parent is gone.
        timer = threading.Timer(timeout, process.terminate)
        timer.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if code < 0:
        print(f"ended by signal {-code}, perhaps after {timeout} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
