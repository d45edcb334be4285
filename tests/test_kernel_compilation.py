"""The Triton row kernels compile for GPUs of both warp sizes, on a machine that has none of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flce_dist.kernels.spec import RowSpec

triton = pytest.importorskip("triton", reason="the kernels need triton, which has no build for this platform")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter is on: run without TRITON_INTERPRET", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flce_dist.kernels import triton_rows  # noqa: E402

TARGETS = {"sm90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
SPECS = {
    "plain": RowSpec(),
    "all": RowSpec(softcap=15.0, uniform=True, argmax=True, entropy=True, token_scaling=True),
}
TYPES = {
    **dict.fromkeys(("logits", "grad", "a", "b"), "*bf16"),
    **dict.fromkeys(("target", "ids"), "*i64"),
    **dict.fromkeys(("valid", "all_owned"), "*i1"),
    **dict.fromkeys(("host_factor_a", "host_factor_b"), "fp32"),
    "ignore_index": "i64",
}
FLOATS = ("stats", "out", "target_weight", "target_weights", "share", "loss", "factor")
OPTIONAL = ("uniform_weight", "uniform_weights", "square_weight", "square_weights", "column_weight", "residual")
ROW_KERNELS = ("_row_stats_kernel", "_row_grad_kernel", "_row_stats_grad_kernel")


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


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


@pytest.mark.parametrize("columns", [300, 1000, 128256])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROW_KERNELS)
@pytest.mark.parametrize("spec", SPECS)
def test_row_kernels_compile(spec: str, name: str, target: str, columns: int) -> None:
    if spec == "all" and columns != 128256:
        pytest.skip("the tile and the flags do not interact: the largest tile stands for all")
    row_spec, settings = SPECS[spec], triton_rows._launch_settings(columns)
    known = {
        "SOFTCAP": row_spec.softcap,
        "TOKEN_SCALING": row_spec.token_scaling,
        "IN_PLACE": True,
        "BLOCK": settings["BLOCK"],
        **row_spec.stat_rows,
    }
    flags = {key: value for key, value in known.items() if key in getattr(triton_rows, name).arg_names}
    assert settings["num_warps"] * TARGETS[target].warp_size <= 1024, "more threads than a block may have"
    compiled = compile_for(TARGETS[target], name, flags, spec == "all", settings["num_warps"])
    assert {"cubin", "hsaco"} & set(compiled)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in vars(triton_rows) if name.endswith("_kernel")])
def test_all_kernels_compile_with_all_features(name: str, target: str) -> None:
    spec = SPECS["all"]
    known = {"MEAN": True, "NUM_STATS": spec.num_stats, "SOFTCAP": spec.softcap, "TOKEN_SCALING": True}
    known |= {"IN_PLACE": False, "BLOCK": 512, **spec.stat_rows}
    flags = {key: value for key, value in known.items() if key in getattr(triton_rows, name).arg_names}
    assert {"cubin", "hsaco"} & set(compile_for(TARGETS[target], name, flags, True, 1))
