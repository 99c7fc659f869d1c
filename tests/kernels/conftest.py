from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from octavo.kernels import cpu, reference
from tests.support.triton_kernels import TritonKernels


class Ops(NamedTuple):
    """An implementation: its ops by name, its own name, and the kernels if they are Triton's; all take CPU tensors."""

    of: Callable[[str], Callable[..., Any]]
    name: str
    kernels: TritonKernels | None = None


def ops_of(kernels: TritonKernels) -> Ops:
    """Triton's."""
    return Ops(lambda op: getattr(kernels, op), "Triton", kernels)


@pytest.fixture(params=["reference", "cpu", pytest.param("Triton", marks=pytest.mark.gpu)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "Triton":
        return ops_of(request.getfixturevalue("kernels"))
    return Ops({"reference": reference, "cpu": cpu}[request.param].KERNELS.__getitem__, request.param)
