"""Casts of activations and of their gradients, where halves, tails and codes are special; test_cast.py has any."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.casts import ALL, E4M3, Call, check, each_value
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.mark.covering(1)
@pytest.mark.usefixtures("tiles_of_any_size")
@pytest.mark.parametrize("cols", [9, 20, 57])
def test_padding_of_the_second_half(kernels: TritonKernels, cols: int) -> None:
    # after 20 it lies in the tiles that hold the half, after the others it ends beyond them
    dy, h = torch.randn(21, cols).bfloat16(), torch.randn(21, 2 * cols).bfloat16()
    for tile, transpose in itertools.product((ALL, (1, -1), (-1, 1), (16, 1)), (False, True)):
        check(kernels.cast, Call("cast", (dy, None, 0, E4M3, tile, False, 0, transpose, 16, True, "reglu", h)), True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("fault", [0.0, math.inf], ids=["", "inf"])
@pytest.mark.parametrize("zeros", [slice(0, 100), slice(100, 200)], ids=["gate", "up"])
def test_either_half_may_hold_the_amax(kernels: TritonKernels, zeros: slice, fault: float) -> None:
    dy, h = torch.randn(40, 100).bfloat16(), torch.randn(40, 200).bfloat16()
    h[:, zeros] = 0
    dy[7, 50] = fault
    for tile, state in ((ALL, None), (ALL, torch.full((3,), 0.5)), ((1, -1), None)):
        check(kernels.cast, Call("cast", (dy, state, 0, E4M3, tile, False, 0, False, 1, False, "swiglu", h)), False)


# as they don't cancel where (1 + tanh) / 2 and (1 + erf) / 2 do
TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda h: h * torch.sigmoid(h),
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "gelu": lambda h: h * torch.erfc(h * -math.sqrt(0.5)) / 2,
    "gelu_tanh": lambda h: h * torch.sigmoid(math.sqrt(8 / math.pi) * (h + 0.044715 * h**3)),
}


@pytest.mark.parametrize("function", TAILS)
def test_tails_keep_their_digits(kernels: TritonKernels, function: str) -> None:
    h = -torch.linspace(0.1, 45, 4096).view(64, 64)
    truth = TAILS[function](h.double())
    assert bool(((each_value(kernels.cast, h, function) - truth).abs() <= 2.0**-16 * truth.abs() + 2.0**-119).all())
