from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from octavo.kernels import cpu, reference
from tests.support.triton_kernels import TritonKernels


class Ops(NamedTuple):
    """An implementation: its ops by name, where its tensors lie, its own name, and the kernels if they are Triton's."""

    of: Callable[[str], Callable[..., Any]]
    device: torch.device
    name: str
    kernels: TritonKernels | None = None


def ops_of(kernels: TritonKernels) -> Ops:
    """Triton's."""
    return Ops(lambda op: getattr(kernels, op), kernels.device, "Triton", kernels)


@pytest.fixture(params=["reference", "cpu", pytest.param("Triton", marks=pytest.mark.gpu)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "Triton":
        return ops_of(request.getfixturevalue("kernels"))
    module = {"reference": reference, "cpu": cpu}[request.param]
    return Ops(module.KERNELS.__getitem__, torch.device("cpu"), request.param)
