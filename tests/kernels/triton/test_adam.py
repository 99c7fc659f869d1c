"""Adam's arithmetic beside torch's own operations."""

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels.step_numbers import adam_max_update, power
from tests.support.correct_roots import correct_roots
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

BLOCK = 1024


@pytest.mark.parametrize("weight", [0.0, 0.001, 0.1, 0.4999, 0.5, 0.9, 1.0])
def test_lerp_is_torchs(weight: float, kernels: TritonKernels) -> None:
    a, b = torch.randn(BLOCK), torch.randn(BLOCK) * torch.randn(BLOCK).exp()
    out = torch.empty(BLOCK, device=kernels.device)
    given = [x.to(kernels.device) for x in (a, b, torch.tensor(weight))]
    for is_small in {False, weight < 0.5}:
        kernels.launch("lerp_kernel", 1, *given, out, is_small, BLOCK)
        assert torch.equal(out.cpu(), a.lerp(b, weight))


def updated(w: Tensor, m: Tensor, v: Tensor, step: int, decoupled: bool, clip: bool) -> Tensor:
    """Of lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1."""
    lr, correction1, correction2 = 0.01, 1 - power(0.9, step), math.sqrt(1 - power(0.99, step))
    w = w * (1 - lr * 0.1) if decoupled else w.clone()
    if not clip:
        return w.addcdiv_(m, v.sqrt().div(correction2).add(1e-6), value=-lr / correction1)
    limit = adam_max_update(step, 0.9, 0.99) * correction1
    u = torch.div(m, v.sqrt().mul(1 / correction2).add(1e-6)).clamp(-limit, limit)
    assert step == 1 or 0.05 < (u.abs() == torch.tensor(limit)).float().mean() < 0.95  # both are seen
    return w.add_(u, alpha=-lr / correction1)


@pytest.mark.parametrize("step", [1, 2, 50])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_weights_update(decoupled: bool, clip: bool, step: int, kernels: TritonKernels) -> None:
    w, m, v = torch.randn(BLOCK), torch.randn(BLOCK), torch.randn(BLOCK).square()
    if clip and step > 1:
        m *= 1 - power(0.9, step)
    v[3], m[7] = 0.0, math.nan
    with correct_roots():
        expected = updated(w, m, v, step, decoupled, clip)
    group = torch.tensor([0.01, 0.9, 0.99, 1e-6, 0.1, 0, 0.9 * 0.9 / 0.99, 0], dtype=torch.float64)
    found, *given = (x.to(kernels.device, copy=True) for x in (w, m, v, group, torch.tensor(step)))
    kernels.launch("adam_weight_kernel", 1, found, *given, decoupled, clip, BLOCK)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
