"""Fixtures for every test, pools of gloo ranks, started by the first test that asks for one; seconds per test file."""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit_tests.harness.file_times import FileTimes
from tests.unit_tests.harness.rank_pool import RankPool, import_paths, setup_mcore

# Before torch is imported: for models this small a second thread costs more than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [path for path in import_paths() if path not in sys.path]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of `FileTimes`."""
    group = parser.getgroup("seconds per file")
    group.addoption("--seconds-per-file", type=int, default=0, metavar="N", help="show the N slowest test files")
    group.addoption("--write-seconds-per-file", type=Path, metavar="PAGE", help="write them to a Markdown page, too")


def pytest_configure(config: pytest.Config) -> None:
    """Times files if that was asked for."""
    count, page = config.getoption("--seconds-per-file"), config.getoption("--write-seconds-per-file")
    if count or page:
        command = shlex.join(["python", "-m", "pytest", *map(str, config.invocation_params.args)])
        config.pluginmanager.register(FileTimes(count or 20, page, command), "seconds-per-file")


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Pools by world size, for tests that are parametrized over it."""
    pools = {size: RankPool(size) for size in (1, 2, 3, 4, 8)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks1(rank_pools: dict[int, RankPool]) -> RankPool:
    """One rank."""
    return rank_pools[1]


@pytest.fixture(scope="session")
def ranks2(rank_pools: dict[int, RankPool]) -> RankPool:
    """Two ranks."""
    return rank_pools[2]


@pytest.fixture(scope="session")
def ranks3(rank_pools: dict[int, RankPool]) -> RankPool:
    """Three ranks: nothing divides evenly."""
    return rank_pools[3]


@pytest.fixture(scope="session")
def ranks4(rank_pools: dict[int, RankPool]) -> RankPool:
    """Four ranks, for 2 x 2 meshes."""
    return rank_pools[4]


@pytest.fixture(scope="session")
def mcore_ranks2() -> Iterator[RankPool]:
    """Two ranks with megatron-core imported and made to run on CPU."""
    pool = RankPool(2, setup=setup_mcore)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def mcore_ranks4() -> Iterator[RankPool]:
    """Four ranks with megatron-core."""
    pool = RankPool(4, setup=setup_mcore)
    yield pool
    pool.close()
