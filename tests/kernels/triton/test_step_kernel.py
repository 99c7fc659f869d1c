"""The resolution's sums in a step's launch."""

import pytest
import torch

from octavo import PerBlock, PerTensor
from octavo.kernels.reference.optimizer_state import Fp8Weight
from octavo.kernels.reference.optimizer_step import WeightUpdate
from octavo.kernels.reference.optimizer_step import optimizer_step as reference
from octavo.tensor.stored_weight import StoredWeight
from tests.support.optimizer_both import ADAM, MASTERS, OTHER, SCHEMES, SGD, Both, mixed, update_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


def compare(both: Both, steps: int = 2) -> None:
    """The resolution's sums in the launch against the reference's: the order of additions is another."""
    device = both.kernels.device
    ours, theirs = (torch.zeros(2, dtype=torch.float64, device=device) for _ in range(2))
    for _ in range(steps):
        both.new_gradients()
        reference(both.theirs, both.groups, None, None, theirs)
        both.module.optimizer_step(both.ours, both.groups, None, None, both.plans, ours)
    assert (theirs > 0).all()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    both.module.optimizer_step(
        both.ours, both.groups, torch.ones((), device=device), None, both.plans, ours
    )  # a skipped step adds nothing
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)


def half_measured(updates: list[WeightUpdate]) -> list[WeightUpdate]:
    return [update._replace(measured=index % 2 == 0) for index, update in enumerate(updates)]


@pytest.mark.parametrize(
    "scheme", ["fp8", "two stages", *(pytest.param(one, marks=pytest.mark.full) for one in ("fp32", "previous"))]
)
def test_the_resolution_of_adam(scheme: str, kernels: TritonKernels, small: None) -> None:
    compare(Both(kernels, half_measured(mixed(SCHEMES[scheme], MASTERS, 1, 1)), [ADAM, OTHER]))


def test_the_resolution_of_sgd(kernels: TritonKernels, small: None) -> None:
    updates = mixed(SCHEMES["fp8"][:1], MASTERS[:4], 1, 1)
    compare(Both(kernels, half_measured(updates), [SGD, SGD._replace(nesterov=True)]))


@pytest.mark.parametrize("small", [128], indirect=True)
@pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(128, 128)], ids=str)
def test_the_resolution_of_weights_in_fp8(
    granularity: PerTensor | PerBlock, kernels: TritonKernels, small: None
) -> None:
    updates = []
    for number, shape in enumerate([(130, 140), (7, 16)]):
        values = torch.randn(shape) * torch.logspace(-6, 0, shape[1])
        stored = StoredWeight.cast(values, granularity)
        amax = values.abs().amax().reshape(1, 1).expand_as(stored.scale_inv).clone()
        master = Fp8Weight(stored.qdata.view(torch.uint8), "fp8_stochastic", stored.scale_inv, None, amax)
        plain = update_of(shape, SCHEMES["fp8"], number=number)
        updates.append(plain._replace(master=master, measured=True))
    compare(Both(kernels, updates, [ADAM, OTHER]))
