"""Differences between a kernel's results and its reference's are named."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels.triton.agreement import difference, same_state, sqnr


def results() -> list[Tensor]:
    """Codes of 128 x 256 numbers, transposed ones, a scale for each 1x1 block, and column sums."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).clamp(min=0.1)
    codes = x.to(torch.float8_e4m3fn)
    return [codes, codes.t().contiguous(), torch.exp2(x.log2().floor()), x.sum(0).bfloat16()]


@pytest.mark.parametrize(
    ("output", "change", "exact", "beginning"),
    [
        (0, lambda q: None, True, ""),
        (0, lambda q: q.view(torch.uint8)[0, :32].add_(1), False, ""),
        (0, lambda q: q.view(torch.uint8)[0, :1].add_(1), True, "output 0: 1 of 32768 differ"),
        (1, lambda q: q.view(torch.uint8)[0, :33].add_(1), False, "output 1: 33 of 32768 codes differ"),
        (1, lambda q: q.view(torch.uint8)[0, :1].add_(2), False, "output 1: 1 of 32768 codes are further than one"),
        (2, lambda s: s[0].mul_(1 + 2e-6), False, ""),
        (2, lambda s: s[0, :3].mul_(2), False, ""),
        (2, lambda s: s[0, :4].mul_(2), False, "output 2: differs by 1 relative"),
        (2, lambda s: s[0].mul_(1 + 2e-5), False, "output 2: differs by 2e-05 relative"),
        (2, lambda s: s[0].mul_(1 + 2e-6), True, "output 2: 256 of 32768 differ"),
        (3, lambda sums: sums.mul_(1.02), True, "output 3: sums differ by"),
    ],
)
def test_results_that_differ(output: int, change: Callable[[Tensor], object], exact: bool, beginning: str) -> None:
    changed = results()
    change(changed[output])
    text = difference(changed, results(), exact, 128)
    assert text.startswith(beginning) and bool(text) == bool(beginning)


def test_state_that_agrees_and_that_does_not() -> None:
    ones = torch.ones(3)
    assert same_state([ones, 0], [ones * (1 + 2e-6), 0], False)
    assert not same_state([ones, 0], [ones * (1 + 2e-6), 0], True)
    assert not same_state([ones], [ones * (1 + 2e-5)], False)


def test_noise() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr(x * 1.1, x) == pytest.approx(20, abs=1e-5) and sqnr(x, x) == math.inf
