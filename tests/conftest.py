from collections.abc import Iterator

import pytest
import torch

from tests.support import triton_kernels
from tests.support.pool import Pool

torch.set_num_threads(1)  # a worker a core; and small tensors gain nothing by two


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def kernels() -> Iterator[triton_kernels.TritonKernels]:
    """The Triton kernels, each by its op's name, and the device whose tensors they take; for tests marked ``gpu``."""
    with triton_kernels.running() as found:
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run on several ranks share one pool of processes, so one worker runs them all."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("pool"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks; see tests/support/pool.py."""
    found = Pool()
    yield found
    found.stop()
