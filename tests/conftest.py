"""Fixtures of the whole suite and the two markers."""

from collections.abc import Callable, Iterator

import pytest
import torch

from flce_dist.backend import why_no_interpreter
from tests.kit.workers import Pool

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `exhaustive` tests unless -m names the marker; skip `gpu` tests where there is no device."""
    if "exhaustive" not in config.getoption("-m"):
        dropped = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
    for item in items:
        if item.get_closest_marker("exhaustive") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))  # thousands of cases in one test
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device: run `pytest -m gpu` on a machine with one")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def workers() -> Iterator[Pool]:
    """Up to 4 gloo ranks that use the torch backend."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def interpreted_workers() -> Iterator[Pool]:
    """Up to 4 gloo ranks in whose processes Triton kernels are interpreted."""
    reason = why_no_interpreter()
    if reason is not None:
        pytest.skip(reason)
    pool = Pool({"TRITON_INTERPRET": "1"})
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def engine_workers() -> Iterator[Callable[[int], Pool]]:
    """engine_workers(size) is a pool whose default group has exactly so many ranks, for engines that use all of it."""
    pools: dict[int, Pool] = {}
    yield lambda size: pools.setdefault(size, Pool(size=size, timeout=240))  # the first job imports DeepSpeed
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool_for(request: pytest.FixtureRequest):
    """pool_for(backend) is the pool for that backend; the interpreter's one is started on first use."""

    def choose(backend: str) -> Pool:
        return request.getfixturevalue("interpreted_workers" if backend == "triton" else "workers")

    return choose
