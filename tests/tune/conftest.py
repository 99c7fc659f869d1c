from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.triton_kernels import TritonKernels


@pytest.fixture
def tuner(kernels: TritonKernels) -> Iterator[ModuleType]:
    """octavo.tune.tuner, by whose kernels its cases run; in Triton's interpreter where there is no GPU."""
    import triton

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = kernels.gpu.type == "cpu"
        yield kernels.module("octavo.tune.tuner")
