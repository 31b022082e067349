"""The ranks that all interop tests share."""
import pytest

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()
