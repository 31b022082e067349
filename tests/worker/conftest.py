"""What tests of the worker begin with: a gang of two over a storage of the module's own."""
import pytest

from gang import Gang


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {"out": tmp_path_factory.mktemp("out")}


@pytest.fixture(scope="module")
def gang(roots):
    with Gang(2, roots) as g:
        yield g
