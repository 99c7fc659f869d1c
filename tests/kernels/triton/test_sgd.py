"""SGD's arithmetic beside torch's own operations."""

import pytest
import torch

from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

BLOCK = 1024


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("step", [1, 5])
def test_a_weights_update(step: int, nesterov: bool, momentum: float, kernels: TritonKernels) -> None:
    w, average, g = torch.randn(3, BLOCK).unbind()
    options = [0.1, momentum, 0.25, 0.01, nesterov, 0, 0, 0]
    group = torch.tensor(options, dtype=torch.float64, device=kernels.device)
    ours = [x.to(kernels.device, copy=True) for x in (w, average, g)]
    number = torch.tensor(step, device=kernels.device)
    kernels.launch("sgd_kernel", 1, *ours, group, number, momentum > 0, BLOCK)
    new = g if step == 1 else average.mul(momentum).add(g, alpha=0.75)
    update = g.add(new, alpha=momentum) if nesterov else new
    assert torch.equal(ours[1].cpu(), new)
    assert torch.equal(ours[0].cpu(), w.add(update if momentum else g, alpha=-0.1))
