"""The Triton row kernels compile for GPUs of both warp sizes, on a machine that has none of them."""

from pathlib import Path
from typing import Any

import pytest

from flce_dist.kernels.spec import RowSpec
from tests.kit.skips import NO_TRITON

triton = pytest.importorskip("triton", reason=NO_TRITON)
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter is on: run without TRITON_INTERPRET", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flce_dist.kernels import triton_rows  # noqa: E402

TARGETS = {"sm90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
TYPES = {
    **dict.fromkeys(("logits", "grad", "a", "b"), "*bf16"),
    **dict.fromkeys(("target", "ids"), "*i64"),
    **dict.fromkeys(("valid", "all_owned"), "*i1"),
    **dict.fromkeys(("host_factor_a", "host_factor_b"), "fp32"),
    "ignore_index": "i64",
}
FLOATS = ("stats", "out", "target_coef", "target_coefs", "share", "loss", "factor")
OPTIONAL = ("uniform_coef", "uniform_coefs", "square_coef", "square_coefs", "column_weight", "residual")
ROW_KERNELS = {
    "_row_stats_kernel": triton_rows._STATS_TILES,
    "_row_grad_kernel": triton_rows._GRAD_TILES,
    "_row_stats_grad_kernel": triton_rows._STATS_GRAD_TILES,
}


def compile_for(target: GPUTarget, name: str, flags: dict[str, Any], optional: bool, num_warps: int) -> dict[str, Any]:
    """Compiles a kernel with rows that start at 16 bytes, and with or without its optional pointers."""
    kernel = getattr(triton_rows, name)
    signature, constants, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in flags or (argument in OPTIONAL and not optional):
            signature[argument] = "constexpr"
            constants[(i,)] = flags.get(argument)
        elif argument in FLOATS or argument in OPTIONAL:
            signature[argument] = "*fp32"
        else:
            signature[argument] = TYPES.get(argument, "i32")
        if argument in ("logits", "grad", "logits_stride", "grad_stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    assert all(name in kernel.arg_names for name in flags), f"{set(flags) - set(kernel.arg_names)} are no arguments"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return dict(triton.compile(source, target=target, options={"num_warps": num_warps}).asm)


def flags_of(name: str, spec: RowSpec, block: int) -> dict[str, Any]:
    known = {"MEAN": True, "NUM_STATS": spec.num_stats, "SOFTCAP": spec.softcap, "TOKEN_SCALING": spec.token_scaling}
    known |= {"IN_PLACE": True, "BLOCK": block, **spec.stat_rows}
    return {key: value for key, value in known.items() if key in getattr(triton_rows, name).arg_names}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "columns"), [(name, min(most, 128256)) for name, tiles in ROW_KERNELS.items() for most, _ in tiles]
)
def test_row_kernels_compile(name: str, columns: int, target: str) -> None:
    spec, settings = RowSpec(), triton_rows._launch_settings(ROW_KERNELS[name], columns)
    assert settings["num_warps"] * TARGETS[target].warp_size <= 1024, "more threads than a block may have"
    compiled = compile_for(TARGETS[target], name, flags_of(name, spec, settings["BLOCK"]), False, settings["num_warps"])
    assert {"cubin", "hsaco"} & set(compiled)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in vars(triton_rows) if name.endswith("_kernel")])
def test_all_kernels_compile_with_all_features(name: str, target: str) -> None:
    spec = RowSpec(softcap=15.0, uniform=True, argmax=True, entropy=True, token_scaling=True)
    assert {"cubin", "hsaco"} & set(compile_for(TARGETS[target], name, flags_of(name, spec, 8192), True, 16))
