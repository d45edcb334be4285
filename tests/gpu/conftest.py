"""Fixtures of the tests that need CUDA."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.support import GPU_BACKEND, NEEDS_TWO_DEVICES, NUM_WORKERS, DevicePool

DEVICE = "cuda"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def two_gpus() -> Iterator[DevicePool]:
    """Two processes with a GPU each, over NCCL."""
    if DEVICE == "cuda" and torch.cuda.device_count() < NUM_WORKERS:
        pytest.skip(NEEDS_TWO_DEVICES)
    pool = DevicePool(GPU_BACKEND if DEVICE == "cuda" else "gloo")
    yield pool
    pool.close()
