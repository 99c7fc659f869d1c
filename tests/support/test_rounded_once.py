"""The sums that are rounded once are those of torch's own kernels, on a CPU whose instructions do so."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.rounded_once import RoundedOnce, rounded_once

OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda x, y, z: x.add_(y, alpha=-0.3),
    "addcmul": lambda x, y, z: x.addcmul_(y, z, value=0.001),
    "near": lambda x, y, z: x.lerp(y, 0.1),
    "far": lambda x, y, z: x.lerp_(y, 0.95),
}


@pytest.mark.parametrize("name", OPS)
def test_it_is_what_a_cpu_with_fma_computes(name: str) -> None:
    operands = torch.randn(3, 20_000).exp() * torch.randn(3, 20_000).sign()
    operands[:, :4] = torch.tensor([torch.inf, torch.nan, 0.0, 3e38])
    with rounded_once():
        native = OPS[name](*operands.clone())
    with RoundedOnce():
        replaced = OPS[name](*operands.clone())
    torch.testing.assert_close(replaced, native, rtol=0, atol=0, equal_nan=True)
