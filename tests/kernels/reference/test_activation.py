"""Activations and their gradients against float64; tests/kernels/test_cast.py casts them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference.activation import FUNCTIONS, produced
from tests.support.definitions import FLOAT32_MAX, same_bits
from tests.support.exact_activation import GATED, PLAIN, exact, exact_gradient

HALF_ULP, SMALLEST = 2.0**-24, 2.0**-149

# f = h s(u): u, and h u', which in a slope multiplies 1 - s and its rounding
SIGMOIDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (lambda h: h, lambda h: h),
    "quick_gelu": (lambda h: 1.702 * h, lambda h: 1.702 * h),
    "gelu_tanh": (
        lambda h: math.sqrt(8 / math.pi) * (h + 0.044715 * h**3),
        lambda h: math.sqrt(8 / math.pi) * (h + 3 * 0.044715 * h**3),
    ),
}

each_activation = pytest.mark.parametrize("activation", [*PLAIN, *GATED])


def slope_error(h: Tensor, function: str) -> Tensor:
    """Return the bound of a slope's error; s is 1 in float32 where h u' is 40."""
    steep = SIGMOIDS[function][1](h.double()).abs().clamp(max=40.0) if function in SIGMOIDS else torch.zeros_like(h)
    return HALF_ULP * (8 + steep)


def off(actual: Tensor, truth: Tensor) -> Tensor:
    """Return the difference beyond the rounding of ``truth`` itself."""
    return (actual.double() - truth).abs() - 2 * HALF_ULP * truth.abs() - 2 * SMALLEST


def is_too_steep(h: Tensor, activation: str) -> Tensor:
    """Whether the slope at each element of h is beyond float32: then a gradient is inf, or NaN where dy is 0."""
    dy = torch.ones(len(h), h.shape[1] // (1 + (activation in GATED)))
    return exact_gradient(dy, h, activation).abs() > FLOAT32_MAX


def grid() -> Tensor:
    """Return [n, 64]: every bfloat16 up to 1e38, float32 where the functions bend."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    h = torch.cat((every[every.abs() <= 1e38], torch.linspace(-20, 20, 10_001), 2 * torch.randn(10_000)))
    return h[: len(h) // 64 * 64].view(-1, 64)


def gates(activation: str) -> Tensor:
    """An input of this activation."""
    h = grid()
    return torch.cat((h, torch.rand_like(h) * 2 - 1), 1) if activation in GATED else h


@each_activation
def test_values_against_float64(activation: str) -> None:
    h = gates(activation)
    y, truth = produced(h, activation), exact(h.double(), activation)
    assert y.dtype == torch.float32 and y.is_contiguous()
    over = truth.abs() > FLOAT32_MAX
    assert bool((y[over] == math.inf).all())
    natural = (h[:, :64] * h[:, 64:] if activation in GATED else h).double().abs()
    assert bool((off(y, truth) <= 2 * HALF_ULP * natural)[~over].all())


@each_activation
def test_gradients_against_float64(activation: str) -> None:
    h = gates(activation)
    dy = torch.rand(len(h), 64) * 2 - 1
    dh, truth = produced(dy, activation, h), exact_gradient(dy, h, activation)
    assert dh.dtype == torch.float32 and dh.is_contiguous()
    gate, of_value = h[:, :64].double(), dy.double()
    if activation in GATED:
        of_value = of_value * h[:, 64:]
        assert bool((off(dh, truth)[:, 64:] <= 2 * HALF_ULP * (dy * gate).abs()).all())
    # relative to the gradient where a slope is beyond 1
    allowed = slope_error(gate, GATED.get(activation, activation)) * of_value.abs().maximum(truth[:, :64].abs())
    assert bool((off(dh, truth)[:, :64] <= allowed)[~is_too_steep(h, activation)[:, :64]].all())


@pytest.mark.parametrize("function", SIGMOIDS)
def test_tails_keep_their_digits(function: str) -> None:
    # where (1 + tanh) / 2 would have cancelled
    u_of, steepness = SIGMOIDS[function]
    h = -torch.linspace(0.1, 45, 10_000)
    u = u_of(h.double())
    h, u = h[u > -80], u[u > -80]
    truth = h.double() * F.sigmoid(u)
    assert bool((off(FUNCTIONS[function].in_float32(h), truth) <= HALF_ULP * (2 + 3 * u.abs()) * truth.abs()).all())
    s = F.sigmoid(u)
    inner = (1 - s) * steepness(h.double())
    allowed = HALF_ULP * s * (2 + 3 * u.abs()) * (1 + inner.abs())
    assert bool((off(FUNCTIONS[function].with_slope(h)[1], s * (1 + inner)) <= allowed).all())


def test_relu_is_exact() -> None:
    h = torch.cat((grid().view(-1), torch.tensor([FLOAT32_MAX, -FLOAT32_MAX])))
    assert same_bits(FUNCTIONS["relu"].in_float32(h), torch.where(h > 0, h, 0.0))
    assert same_bits(FUNCTIONS["squared_relu"].in_float32(h), torch.where(h > 0, h.double() ** 2, 0.0).float())
    assert same_bits(FUNCTIONS["relu"].with_slope(h)[1], (h > 0).float())
    assert same_bits(FUNCTIONS["squared_relu"].with_slope(h)[1], torch.where(h > 0, 2 * h.double(), 0.0).float())


@each_activation
def test_finite_inputs_have_finite_gradients(activation: str) -> None:
    sizes = (0.0, SMALLEST, 2.0**-126, 1.0, 88.8, 104.0, 127.9, 128.0, 1e4, 2.0**64, 1e38)
    h = torch.tensor([[s] for size in sizes for s in (size, -size)])
    if activation in GATED:
        h = torch.cat([torch.cat((h, torch.full_like(h, up)), 1) for up in (0.0, -1.0, 1e-30)])
    for small in (0.0, 1.0, -1e-3, 1e-38):
        gradients_in_range = produced(torch.full((len(h), 1), small), activation, h)[~is_too_steep(h, activation)]
        assert bool(gradients_in_range.isfinite().all())
        assert small or not gradients_in_range.any()
    # squares of 1e38 are beyond
    assert torch.equal(produced(h, activation).isfinite(), exact(h.double(), activation).abs() <= FLOAT32_MAX)


@each_activation
def test_a_nan_stays_and_stays_local(activation: str) -> None:
    for column in range(0, 40, 3) if activation in GATED else range(0, 20, 3):
        h, dy = torch.randn(3, 40 if activation in GATED else 20), torch.randn(3, 20)
        clean, clean_gradient = produced(h, activation), produced(dy, activation, h)
        h[1, column] = math.nan
        hit, gate = torch.zeros(3, 20, dtype=torch.bool), column < 20
        hit[1, column % 20] = True
        y, dh = produced(h, activation), produced(dy, activation, h)
        assert torch.equal(y.isnan(), hit) and torch.equal(y[~hit], clean[~hit])
        # dgate is of gate and up, dup of gate alone
        reached = torch.cat((hit, hit & gate), 1) if activation in GATED else hit
        assert torch.equal(dh.isnan(), reached) and torch.equal(dh[~reached], clean_gradient[~reached])
        dy[1, column % 20] = math.nan
        every = torch.cat((hit, hit), 1) if activation in GATED else hit
        assert torch.equal(produced(dy, activation, h).isnan(), every)


@pytest.mark.parametrize("function", PLAIN)
def test_zeros_and_infinities(function: str) -> None:
    zeros = torch.tensor([0.0, -0.0])
    # relu never returns -0; in infinities a fault stays one, as in torch: f(-inf) and slopes are inf times 0
    truth = exact(zeros.double(), function).float() + 0.0 if "relu" in function else exact(zeros.double(), function)
    assert same_bits(FUNCTIONS[function].in_float32(zeros), truth.float())
    for h in (zeros, torch.tensor([math.inf, -math.inf])):
        torch.testing.assert_close(
            FUNCTIONS[function].in_float32(h).double(), exact(h.double(), function), equal_nan=True
        )
        expected = exact_gradient(torch.ones(2), h, function)
        torch.testing.assert_close(FUNCTIONS[function].with_slope(h)[1].double(), expected, equal_nan=True)
