"""A step's numbers on the device beside those that the reference computes in Python's float64."""

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels.step_numbers import adam_max_update, power, ratio_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

STEPS = [1, 2, 3, 4, 7, 10, 63, 100, 1000, 4095, 123457, (1 << 24) - 1]
BETAS = [
    (0.9, 0.999),
    (0.9, 0.95),
    (0.0, 0.9),
    (0.0, 0.0),
    (0.9, 0.0),
    (0.5, 0.25),
    (0.9, 0.5),
    (0.95, 0.9),
    (0.99, 1 - 1e-7),
]
LR, EPS, DECAY = 3e-3, 1e-8, 0.1


def on_device(kernel: str, numbers: int, group: list[float], rate: Tensor | None, kernels: TritonKernels) -> Tensor:
    """[steps, numbers] float64."""
    out = torch.empty(len(STEPS), numbers, dtype=torch.float64, device=kernels.device)
    options = torch.tensor([*group, 0.0, 0.0][:8], dtype=torch.float64, device=kernels.device)
    lr = torch.tensor(0 if rate is None else rate.data_ptr(), device=kernels.device)
    steps = torch.tensor(STEPS, device=kernels.device)
    kernels.launch(kernel, 1, options, lr, steps, out, len(STEPS))
    return out.cpu()


def adams(lr: float, decay: float, beta1: float, beta2: float, maximize: bool, step: int) -> list[float]:
    """As reference/adam.py has them, in the order of AdamNumbers."""
    correction1, correction2 = 1 - power(beta1, step), math.sqrt(1 - power(beta2, step))
    most = adam_max_update(step, beta1, beta2)
    return [
        *(1 - beta1, beta2, 1 - beta2, EPS, decay, float(maximize), 1 - lr * decay, correction2, 1 / correction2),
        *(-lr / correction1, most * correction1, lr * most),
    ]


def float32(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).float().double()


@pytest.mark.parametrize("betas", BETAS, ids=str)
def test_adams(betas: tuple[float, float], kernels: TritonKernels) -> None:
    for lr, decay, maximize in ((LR, DECAY, False), (2.7, 0.37, True)):  # lr * decay is next to 1 too
        group = [lr, *betas, EPS, decay, float(maximize), ratio_of(*betas)]
        found = on_device("adam_numbers_kernel", 12, group, None, kernels)
        assert torch.equal(found, float32([adams(lr, decay, *betas, maximize, step) for step in STEPS]))


def test_a_learning_rate_from_a_tensor(kernels: TritonKernels) -> None:
    rate = torch.tensor(0.7, device=kernels.device)
    group = [LR, 0.9, 0.99, EPS, DECAY, 0.0, 0.9 * 0.9 / 0.99]
    found = on_device("adam_numbers_kernel", 12, group, rate, kernels)
    assert torch.equal(found, float32([adams(float(rate), DECAY, 0.9, 0.99, False, step) for step in STEPS]))
