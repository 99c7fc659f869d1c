"""A step's numbers on the device beside those that the reference computes in Python's float64."""

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels.step_numbers import adam_max_update, key_of, power, random_bits, ratio_of
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


def test_sgds(kernels: TritonKernels) -> None:
    for nesterov, maximize in ((0.0, 1.0), (1.0, 0.0)):
        group = [LR, 0.9, 0.25, DECAY, nesterov, maximize]
        found = on_device("sgd_numbers_kernel", 7, group, None, kernels)
        rest = [-LR, 0.9, 0.75, DECAY, nesterov, maximize]
        assert torch.equal(found, float32([[*rest, float(step == 1)] for step in STEPS]))


def test_a_learning_rate_from_a_tensor(kernels: TritonKernels) -> None:
    rate = torch.tensor(0.7, device=kernels.device)
    group = [LR, 0.9, 0.99, EPS, DECAY, 0.0, 0.9 * 0.9 / 0.99]
    found = on_device("adam_numbers_kernel", 12, group, rate, kernels)
    assert torch.equal(found, float32([adams(float(rate), DECAY, 0.9, 0.99, False, step) for step in STEPS]))
    found = on_device("sgd_numbers_kernel", 7, [LR, 0.9, 0.0, 0.0, 0.0, 0.0], rate, kernels)
    assert found[:, 0].tolist() == [-float(rate)] * len(STEPS)


BLOCK = 256
KEYS = [0, 1, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF]


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("start", [0, 1, (1 << 31) - 100, (1 << 32) - 100, 3 << 32, (1 << 40) - 7])
def test_bits_are_the_references(start: int, wide: bool, kernels: TritonKernels) -> None:
    offsets = torch.arange(BLOCK) * 5 % 300  # not in a row
    given = offsets.to(torch.int64 if wide else torch.int32).to(kernels.device)
    for key in KEYS:
        expected = random_bits(key, torch.cat([start + offsets, torch.tensor([start + 300])]))[:-1]
        expected = expected.to(torch.int64) & 0xFFFFFFFF
        for large in (False, True):
            if start + 300 > 1 << 32 and not large:
                continue
            out = torch.empty(3, BLOCK, dtype=torch.int64, device=kernels.device)
            kernels.launch("random_bits_kernel", 1, given, key, start, out, large, BLOCK)
            assert torch.equal(out.cpu(), torch.stack([expected, expected & 0xFFFF, expected >> 16]))


@pytest.mark.parametrize(
    "numbers", [[0], [1], [-1], [1 << 32], [7, 3], [(1 << 63) - 1, 5, 1 << 31], [0xFFFFFFFF, 0]], ids=str
)
def test_a_key_is_of_its_numbers(numbers: list[int], kernels: TritonKernels) -> None:
    key = torch.tensor([0x243F6A88], device=kernels.device)
    kernels.launch("key_kernel", 1, key, torch.tensor(numbers, device=kernels.device), len(numbers))
    assert int(key) == key_of(*numbers)
