"""One tile of SGD beside the reference's."""

import pytest
import torch

from octavo.formats import E4M3
from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_state import MomentTensors
from octavo.kernels.reference.random_bits import key_of
from octavo.kernels.reference.sgd import SgdStep, sgd_update
from tests.support.triton_cases import row_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

SHAPE = (3, 100)
AT = {"START": 500, "KEY": key_of(7)}  # of the weight's fifth row


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("step", [1, 5])
def test_a_tile(step: int, nesterov: bool, momentum: float, kernels: TritonKernels) -> None:
    weight, grad = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE)
    codes, inv = torch.randint(0, 0x7E, SHAPE, dtype=torch.uint8), torch.rand(3, 1)
    ours = [x.to(kernels.device, copy=True) for x in (weight, grad, codes, inv)]
    row = row_of(kernels, WEIGHT_COLUMN=ours[0], FIRST=ours[2], FIRST_plus_1=ours[3], ROWS=3, COLS=100, **AT)
    group = torch.tensor([0.1, momentum, 0.25, 0.01, nesterov, 0, 0, 0], dtype=torch.float64, device=kernels.device)
    address = torch.tensor([ours[1].data_ptr()], device=kernels.device)
    number, found = torch.tensor([step], device=kernels.device), torch.full((1,), -1.0, device=kernels.device)
    stored = MomentTensors(codes.clone(), E4M3, inv.clone(), stochastic=True) if momentum else None
    state, master = kernels.module("optimizer_state"), MasterWeight(weight.clone(), "stochastic")
    moments = state.moment_class(stored), state.moment_class(None)
    of = state.TensorClass(state.DTYPES[grad.dtype], state.master_class(master), *moments, False, False, False)
    kernel = kernels.module("tests.support.optimizer_tile_kernels").sgd_tile_kernel
    before = [x.clone() for x in ours]
    kernel[(1,)](row, address, group, number, found, of, True, enable_fp_fusion=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))  # it only looked
    h = SgdStep(0.1, momentum, 0.25, 0.01, nesterov, False, step, 7)
    if momentum:
        exact = MomentTensors(codes.view(torch.float8_e4m3fn).float() * inv)
        sgd_update(master, grad, exact, h, 5)
        assert float(found) == float(exact.data.abs().max())
    kernel[(1,)](row, address, group, number, found, of, False, enable_fp_fusion=False)
    sgd_update(MasterWeight(weight, "stochastic"), grad, stored, h, 5)
    assert torch.equal(ours[0].cpu(), weight)
    if stored is not None:
        assert torch.equal(ours[2].cpu(), stored.data) and torch.equal(ours[3].cpu(), stored.scale_inv)
