import pytest

from tests.distributed.pool import Pool


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/distributed/" in str(item.path):
            item.add_marker(pytest.mark.xdist_group("distributed"))  # one pool for all


@pytest.fixture(scope="session")
def pool():
    found = Pool()
    yield found
    found.stop()
