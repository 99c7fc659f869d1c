from collections.abc import Iterator

import pytest
import torch

from tests import triton_kernels

torch.set_num_threads(1)  # a worker a core; and small tensors gain nothing by two


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def kernels() -> Iterator[triton_kernels.TritonKernels]:
    """The Triton kernels, each by its op's name, and the device whose tensors they take; for tests marked ``gpu``."""
    with triton_kernels.running() as found:
        yield found
