"""Launches find the compiled variant that Triton itself would choose, without asking it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit.skips import NO_TRITON

triton = pytest.importorskip("triton", reason=NO_TRITON)
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing: run without TRITON_INTERPRET", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from flce_dist.kernels import launch, triton_rows  # noqa: E402

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
FLOATS = torch.zeros(64)
LONG = torch.empty(2**29, device="meta")
ARGUMENTS: dict[str, list[Any]] = {
    "pointer": [FLOATS, FLOATS[16:], FLOATS[1:], FLOATS.double(), FLOATS.bfloat16(), LONG, LONG[:-1].clone(), None],
    "number": [0, 1, 2, 16, 17, 48, -16, -100, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**40],
    "host_factor": [1.0, 0.5, 0.0],
}
POINTERS = (
    "logits", "grad", "stats", "out", "target", "target_coef", "uniform_coef", "square_coef", "column_weight",
    "residual", "target_coefs", "uniform_coefs", "square_coefs", "ids", "valid", "share", "loss", "all_owned",
    "a", "b", "factor",
)  # fmt: skip
KERNELS = [name for name in vars(triton_rows) if name.endswith("_kernel")]


def kind_of(parameter: str) -> str:
    return "pointer" if parameter in POINTERS else "host_factor" if "factor" in parameter else "number"


class Recorder:
    """Stands for a kernel's compiled variants and for the way to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> "Recorder":
            self.lookups.append((kernel, grid, args, constants))
            return self

        monkeypatch.setattr(JITFunction, "run", run)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.launches.append((grid, args))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    launch._variants.clear()
    yield Recorder(monkeypatch)
    launch._variants.clear()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_what_triton_compiles_anew_is_another_variant(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each parameter of each kernel: where two values make Triton compile twice, they are told apart here."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if target == "hip" else None)
    kernel = getattr(triton_rows, name)
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGETS[target]))
    plain = {p.name: None if p.is_constexpr else ARGUMENTS[kind_of(p.name)][0] for p in kernel.params}
    for parameter in kernel.params:
        if parameter.is_constexpr:
            continue
        chosen: dict[Any, Any] = {}
        for value in ARGUMENTS[kind_of(parameter.name)]:
            specialization = binder(**{**plain, parameter.name: value})[1]
            known = chosen.setdefault(tuple(launch.passed([value])[1]), specialization)
            assert known == specialization, (parameter.name, value)


def test_a_known_variant_is_launched_without_a_lookup(recorder: Recorder) -> None:
    for _ in range(3):
        triton_rows.token_shares(torch.arange(5), -100, True, torch.float32)
    assert len(recorder.lookups) == 1
    assert len(recorder.launches) == 2
    kernel, grid, args, constants = recorder.lookups[0]
    assert kernel is triton_rows._token_shares_kernel
    again, values = recorder.launches[0]
    assert again == (*grid, 1, 1)
    # The variant is given all parameters in the kernel's order.
    assert [*constants][:-1] == kernel.arg_names[len(args) :]
    assert values[len(args) :] == tuple(constants.values())[:-1]
    assert len(values) == len(kernel.arg_names)
    assert [isinstance(value, int) for value in values[: len(args)]] == [True] * len(args), "tensors are addresses"


@pytest.mark.parametrize(
    "other",
    [
        {"ids": torch.arange(5, dtype=torch.int32)},
        {"ids": torch.arange(9)[1:6]},
        {"ignore_index": 2**40},
        {"mean": False},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_another_kind_of_call_is_looked_up(recorder: Recorder, other: dict[str, Any]) -> None:
    call: dict[str, Any] = {"ids": torch.arange(5), "ignore_index": -100, "mean": True, "dtype": torch.float32}
    triton_rows.token_shares(**call)
    triton_rows.token_shares(**call | other)
    assert len(recorder.lookups) == 2
    triton_rows.token_shares(**call)
    assert len(recorder.lookups) == 2


def test_constants_must_be_in_the_kernels_order(recorder: Recorder) -> None:
    ids: Tensor = torch.arange(5)
    with pytest.raises(AssertionError):
        launch.launch(triton_rows._token_shares_kernel, 1, ids, -100, ids, ids, 5, BLOCK=8, MEAN=True, num_warps=1)
