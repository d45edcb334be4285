"""Scripts on several processes: what torchrun starts, without torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(size: int, script: Path, arguments: list[str], folder: Path) -> Processes:
    """The processes that torchrun would start, without torchrun: they can be killed for sure, and start faster."""
    command = [sys.executable, str(script), *arguments]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return Processes(folder, command, [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(size)])


class Processes:
    """One command in several environments, with their output in one file."""

    def __init__(self, folder: Path, command: list[str], environments: list[dict[str, object]]):
        common = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "launch")]),
            "OMP_NUM_THREADS": "1",
        }
        descriptor, self.output = tempfile.mkstemp(dir=folder, suffix=".log")
        with os.fdopen(descriptor, "w") as file:
            self.processes = [
                subprocess.Popen(
                    command,
                    env=common | {name: str(value) for name, value in environment.items()},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                for environment in environments
            ]

    def finish(self, seconds: float = 250) -> tuple[int, str]:
        """The largest exit code and the output. When one fails the others are ended; none outlives `seconds`."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            late = time.monotonic() > deadline
            if late or any(process.poll() for process in self.processes):
                time.sleep(0 if late else 1)  # let the others say why they end
                self.end(signal.SIGTERM)
                if late:
                    pytest.fail(f"no end after {seconds} s:\n{self.text()}")
            time.sleep(0.02)
        return max(abs(process.returncode) for process in self.processes), self.text()

    def end(self, how: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(how)
        for process in self.processes:
            process.wait(timeout=60)

    def text(self) -> str:
        return Path(self.output).read_text()
