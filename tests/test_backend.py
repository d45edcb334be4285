"""Which row kernels serve where, and what is said of versions and devices that cannot (field report B35)."""

import importlib.util
import re
import subprocess
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flce_dist import versions
from flce_dist.backend import row_kernels
from flce_dist.kernels import torch_rows
from tests.kit.skips import NO_TRITON, needs

ROOT = Path(__file__).parents[1]
GPU = torch.device("cuda", 0)
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def forgotten_choices() -> Iterator[None]:
    """The choice is made once a process; here it is made anew for each test, and for those that follow."""
    row_kernels.cache_clear()
    yield
    row_kernels.cache_clear()


def without(monkeypatch: Patch, package: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))


def old_gpu(monkeypatch: Patch) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)  # without it, that is the reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))


def old_triton(monkeypatch: Patch) -> None:
    triton = pytest.importorskip("triton", reason=NO_TRITON)
    monkeypatch.setattr(triton, "__version__", "3.5.1")


REASONS: dict[str, tuple[Any, str]] = {
    "no triton": (lambda monkeypatch: without(monkeypatch, "triton"), "triton is not installed"),
    "an old triton": (old_triton, "triton 3.6 or newer is needed, 3.5.1 is installed"),
    "an old GPU": (old_gpu, r"compute capability is (6, 1), 7.0 is needed"),
}


@pytest.mark.parametrize("name", REASONS)
def test_auto_falls_back_with_one_warning(name: str, monkeypatch: Patch) -> None:
    arrange, words = REASONS[name]
    arrange(monkeypatch)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert row_kernels("auto", GPU) is torch_rows
    assert len(seen) == 1
    assert words in str(seen[0].message)
    assert "slower" in str(seen[0].message)


@pytest.mark.parametrize("name", REASONS)
def test_triton_is_refused_with_the_reason(name: str, monkeypatch: Patch) -> None:
    arrange, words = REASONS[name]
    arrange(monkeypatch)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        row_kernels("triton", GPU)
    assert "\n" not in str(error.value)


def test_the_interpreter_without_numpy(monkeypatch: Patch) -> None:
    triton = pytest.importorskip("triton", reason=NO_TRITON)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    without(monkeypatch, "numpy")
    with pytest.raises(ValueError, match="interpreter needs numpy"):
        row_kernels("triton", torch.device("cpu"))


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "runs"),
    [("3.6.0", "2.4.6", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.4.6", True)],
)
def test_the_interpreter_of_an_older_triton_with_a_newer_numpy(
    triton_version: str, numpy_version: str, runs: bool, monkeypatch: Patch
) -> None:
    """numpy 2.4 makes no number of an array of one element, which Triton 3.6 asks it to."""
    triton, numpy = pytest.importorskip("triton", reason=NO_TRITON), pytest.importorskip("numpy", reason=needs("test"))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(numpy, "__version__", numpy_version)
    if runs:
        assert row_kernels("triton", torch.device("cpu")).__name__ == "flce_dist.kernels.triton_rows"
        return
    with pytest.raises(ValueError, match=r"needs a numpy before 2\.4"):
        row_kernels("triton", torch.device("cpu"))


def test_a_cpu_needs_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert row_kernels("auto", torch.device("cpu")) is torch_rows


@pytest.mark.parametrize("version", ["1.13.1", "2.4.0+cpu", "2.10.0.dev20260101+cu130"])
def test_an_old_torch_is_one_line_with_the_needed_version(version: str) -> None:
    """Raised before anything is imported that an old torch lacks: here it has nothing but a version."""
    code = f"""
        import sys, types
        sys.modules["torch"] = torch = types.ModuleType("torch")
        torch.__version__ = "{version}"
        try:
            import flce_dist
        except ImportError as error:
            print(error)
        """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert result.stdout == f"flce_dist needs torch 2.11 or newer, {version} is installed\n", result.stderr


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git1234567", "3.0.0"])
def test_a_torch_that_will_do(version: str) -> None:
    versions.check_torch(version)


def test_the_versions_of_the_metadata_are_those_that_are_checked() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, versions.OLDEST_TORCH))}" in dependencies
    assert any(dependency.startswith("triton>=3.6") for dependency in dependencies)
