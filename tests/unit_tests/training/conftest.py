"""Fixtures for training runs."""

from collections.abc import Iterator

import pytest

from tests.unit_tests.harness.rank_pool import RankPool, setup_mcore


@pytest.fixture(scope="session")
def mcore_ranks1() -> Iterator[RankPool]:
    """One rank with megatron-core imported and made to run on CPU."""
    pool = RankPool(1, setup=setup_mcore)
    yield pool
    pool.close()
