"""DeepSpeed engines on GPUs: fp16, bf16 and fp32, ZeRO 0 to 3, on one GPU and on two.

A machine without DeepSpeed and without a package index takes wheels that were fetched elsewhere, here for Python 3.12;
none of them needs a compiler, and torch stays the one that is there:

    pip wheel --no-deps deepspeed==0.19.8 --wheel-dir wheels
    pip download --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 --no-deps --dest wheels \
      einops hjson msgpack ninja psutil py-cpuinfo pydantic==2.14.4 pydantic-core==2.50.5 annotated-types \
      typing-inspection tqdm packaging
    pip install --no-index --no-deps wheels/*.whl

    python -m pytest -m gpu tests/gpu/test_deepspeed.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.kit.skips import needs

pytest.importorskip(
    "deepspeed", reason="needs DeepSpeed: pip install deepspeed, or the wheels that this file's docstring names"
)

from tests.gpu.conftest import DEVICE
from tests.gpu.support import GPU_BACKEND, DevicePool
from tests.kit.engines import Cell, judge, train_engine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DTYPES = ("float32", "bfloat16", "float16")
DATA = {"vocab_parallel": "data"}
Engines = Callable[[int], DevicePool]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """engines(n) are n processes with a GPU each, over NCCL."""
    pools: dict[int, DevicePool] = {}

    def choose(size: int) -> DevicePool:
        if DEVICE == "cuda" and torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} CUDA devices: run `pytest -m gpu` on a machine with them")
        return pools.setdefault(size, DevicePool(GPU_BACKEND if DEVICE == "cuda" else "gloo", size=size))

    yield choose
    for pool in pools.values():
        pool.close()


def run(engines: Engines, size: int, cell: Cell, data_ranks: int | None = None) -> None:
    judge(cell, engines(size).run(size, train_engine, cell, timeout=200), data_ranks or size)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2])
def test_zero_stages(size: int, dtype: str, stage: int, engines: Engines) -> None:
    run(engines, size, Cell(stage, dtype, accumulation=2, clip=0.3, bias=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [37, 1025])
def test_the_head_that_is_never_gathered(dtype: str, vocab_size: int, engines: Engines) -> None:
    cell = Cell(3, dtype, accumulation=2, clip=0.3, bias=True, vocab_size=vocab_size, section=DATA)
    run(engines, 2, cell)
    run(engines, 2, replace(cell, clip=0.0, zero={"offload_optimizer": {"device": "cpu"}}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [1, 3])
def test_autotp(stage: int, dtype: str, engines: Engines) -> None:
    pytest.importorskip("transformers", reason=needs("hf"))
    cell = Cell(stage, dtype, 2, 0.3, llama=True, extra={"tensor_parallel": {"autotp_size": 2}})
    run(engines, 2, cell, data_ranks=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{"backward": "recompute"}, {"chunk_rows": 5, "accum_dtype": "float32"}], ids=str)
def test_options(dtype: str, options: dict[str, object], engines: Engines) -> None:
    run(engines, 2, Cell(3, dtype, accumulation=2, clip=0.3, section=options))
