import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from octavo.kernels.step_numbers import adam_max_update, bound_after, key_of, power, random_bits, ratio_of


@pytest.mark.parametrize("base", [0.0, 0.25, 0.5, 0.9, 0.95, 0.99, 0.999, 1 - 1e-7, 1.0, 1.01, 1.62])
def test_a_power_is_maths_to_rounding(base: float) -> None:
    for exponent in (1, 2, 3, 4, 5, 7, 8, 31, 64, 100, 1000):
        exact = Fraction(base) ** exponent
        if exact == 0 or not 1e-290 < exact < 1e290:
            continue
        error = abs(Fraction(power(base, exponent)) - exact) / exact
        assert error <= 2 * exponent * Fraction(1, 1 << 53)  # a square doubles what was wrong before
        assert power(base, exponent) == pytest.approx(math.pow(base, exponent), rel=exponent * 2.0**-52)


def test_a_ratio() -> None:
    assert ratio_of(0.9, 0.99) == 0.9 * 0.9 / 0.99
    assert ratio_of(0.0, 0.9) == ratio_of(0.0, 0.0) == 0.0
    assert ratio_of(0.9, 0.0) == math.inf
    assert ratio_of(0.5, 0.25) == 1.0


def test_known_largest_updates() -> None:
    assert adam_max_update(10**6, 0.9, 0.999) == pytest.approx(7.27, abs=0.005)
    assert adam_max_update(10**6, 0.9, 0.95) == pytest.approx(1.165, abs=0.0005)
    for steps in (1, 2, 10, 1000):
        assert adam_max_update(steps, 0.9, 0.9) == pytest.approx(1.0, rel=1e-12)
    assert adam_max_update(10**6, 0.0, 0.99) == pytest.approx(10.0)
    assert adam_max_update(2, 0.9, 0.0) == adam_max_update(10**5, 0.9, 0.5) == math.inf
    assert adam_max_update(1, 0.9, 0.0) == adam_max_update(10**7, 0.0, 0.0) == 1.0
    assert adam_max_update(10, 0.99, 0.5) < adam_max_update(20, 0.99, 0.5) < math.inf


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.25), (0.9, 0.5), (0.0, 0.9), (0.0, 0.0)], ids=str)
def test_the_largest_update_is_that_of_the_worst_gradients(betas: tuple[float, float]) -> None:
    beta1, beta2 = betas
    for step in (1, 2, 5, 20):
        m = v = 0.0
        for number in range(1, step + 1):
            # Cauchy-Schwarz is an equality for gradients in proportion to beta1^(t-i) / beta2^(t-i)
            g = 1.0 if number == step else (beta1 / beta2) ** (step - number) if beta1 else 0.0
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        update = m / (1 - beta1**step) / math.sqrt(v / (1 - beta2**step))
        assert adam_max_update(step, beta1, beta2) == pytest.approx(update, rel=1e-9)


def test_a_bound_is_of_numbers_and_tensors() -> None:
    for decay in (0.0, 0.5, 30.0):
        number = bound_after(2.0, 0.1, 3.0, decay)
        assert number == pytest.approx((2.0 * abs(1 - 0.1 * decay) + 0.3) * (1 + 2.0**-20), rel=1e-15)
        tensor = bound_after(torch.tensor([[2.0]]), 0.1, 3.0, decay)
        assert tensor.dtype == torch.float32 and float(tensor) == pytest.approx(number, rel=2.0**-22)


COUNT = 1 << 18


def bits_of(key: int, first: int = 0, count: int = COUNT) -> Tensor:
    """The 32 bits of each element as int64, not negative."""
    bits = random_bits(key, torch.arange(first, first + count))
    assert bits.dtype == torch.int32
    return bits.to(torch.int64) & 0xFFFFFFFF


def lowbias32(x: int) -> int:
    """C. Wellons' finaliser, in the original's words."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


@pytest.mark.parametrize("key", [0, 1, 0x80000000, 0xDEADBEEF])
@pytest.mark.parametrize("first", [0, (1 << 31) - 150, (1 << 32) - 150, 3 << 32, (5 << 32) - 150])
def test_it_is_the_finaliser_of_index_and_key(first, key):
    """Each element's bits are of its own index, whose upper half enters too: any part has the whole's."""
    expected = [lowbias32((i ^ (i >> 32) * 0x9E3779B9) & 0xFFFFFFFF ^ key) for i in range(first, first + 300)]
    assert bits_of(key, first, 300).tolist() == expected
    assert random_bits(key, torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


def test_a_key_is_the_finaliser_of_one_word_after_the_other():
    # runs that go on from a checkpoint draw what they would have drawn
    for numbers in ((0,), (7, 1), (-1, 1 << 33, 12345)):
        key = 0x243F6A88
        for word in (word for number in numbers for word in (number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF)):
            key = lowbias32((key * 0x9E3779B1 + word + 0x7F4A7C15) & 0xFFFFFFFF)
        assert key_of(*numbers) == key
