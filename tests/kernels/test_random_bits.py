import itertools

import pytest
import torch
from torch import Tensor

from octavo.kernels.random_bits import key_of, random_bits

COUNT = 1 << 18


def bits_of(key: int, first: int = 0, count: int = COUNT) -> Tensor:
    """The 32 bits of each element as int64, not negative."""
    found = random_bits(key, torch.arange(first, first + count))
    assert found.dtype == torch.int32
    return found.to(torch.int64) & 0xFFFFFFFF


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def lowbias32(x: int) -> int:
    """C. Wellons' finaliser, in the original's words."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


@pytest.mark.parametrize("key", [0, 1, 0x80000000, 0xDEADBEEF])
def test_it_is_the_finaliser_of_index_and_key(key):
    assert bits_of(key, 0, 300).tolist() == [lowbias32(i ^ key) for i in range(300)]
    past = 3 << 32
    expected = [lowbias32((i ^ 3 * 0x9E3779B9) & 0xFFFFFFFF ^ key) for i in range(300)]
    assert bits_of(key, past, 300).tolist() == expected


@pytest.mark.parametrize("first", [0, (1 << 31) - 50, (1 << 32) - 50, (5 << 32) - 50])
def test_any_split_of_the_elements_gives_the_same_bits(first):
    whole = bits_of(7, first, 100)
    for cut in (1, 49, 50, 51, 99):
        assert torch.equal(torch.cat([bits_of(7, first, cut), bits_of(7, first + cut, 100 - cut)]), whole)
    assert torch.equal(
        random_bits(7, torch.arange(first, first + 100).view(2, 5, 10)).view(-1).long() & 0xFFFFFFFF, whole
    )
    assert random_bits(7, torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize("first", [0, 3 << 32])
@pytest.mark.parametrize("key", [0, 0xFFFFFFFF, key_of(0, 0), key_of(1, 2, 3)])
def test_each_bit_is_as_often_one_as_zero(key, first):
    bits = bits_of(key, first)
    ones = torch.stack([bits >> i & 1 for i in range(32)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 4.5 * 0.5 / COUNT**0.5


@pytest.mark.parametrize("shift", [0, 16], ids=["low", "high"])
@pytest.mark.parametrize("key", [key_of(0, 0, 1, 0), key_of(3, 1, 4, 1)])
def test_the_halves_are_uniform(key, shift):
    half = bits_of(key) >> shift & 0xFFFF
    for digits in (half >> 8, half & 0xFF, half >> 4 & 0xFF):
        counts = torch.bincount(digits, minlength=256).double()
        chi2 = float(((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum())
        assert 255 - 4 * 510**0.5 < chi2 < 255 + 4.5 * 510**0.5


def test_nothing_is_correlated():
    most = 4.5 / COUNT**0.5
    keys = [key_of(key_of(0, 0), step, stream) for step in (1, 2, 3) for stream in (0, 1)]
    drawn = [bits_of(key) for key in keys]
    for a, b in itertools.combinations(drawn, 2):
        assert abs(correlation(a, b)) < most
    for bits in drawn:
        for distance in (1, 2, 128, 4096):
            assert abs(correlation(bits[:-distance], bits[distance:])) < most
        assert abs(correlation(bits & 0xFFFF, bits >> 16)) < most


@pytest.mark.parametrize("upper", [1, 2, 3, 1 << 20])
def test_elements_past_two_to_the_32_have_bits_of_their_own(upper):
    here, wrapped = bits_of(7, upper << 32), bits_of(7)
    assert (here == wrapped).sum() <= 2
    assert abs(correlation(here, wrapped)) < 4.5 / COUNT**0.5


def test_a_key_depends_on_each_number():
    keys = [key_of(a, b, c) for a, b, c in itertools.product((0, 1, 2, 1 << 31, 1 << 32, -1), repeat=3)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 32 for key in keys)
    assert key_of(0, 1) != key_of(1, 0) != key_of(1)
    steps = torch.tensor([key_of(key_of(0, 0), step, 0) for step in range(4096)])
    ones = torch.stack([steps >> i & 1 for i in range(32)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 4.5 * 0.5 / 64
    changed = torch.stack([(steps[1:] ^ steps[:-1]) >> i & 1 for i in range(32)]).double().mean(1)
    assert (changed - 0.5).abs().max() < 4.5 * 0.5 / 64


def test_a_key_is_the_finaliser_of_one_word_after_the_other():
    # runs that go on from a checkpoint draw what they would have drawn
    for numbers in ((0,), (7, 1), (-1, 1 << 33, 12345)):
        key = 0x243F6A88
        for word in (word for number in numbers for word in (number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF)):
            key = lowbias32((key * 0x9E3779B1 + word + 0x7F4A7C15) & 0xFFFFFFFF)
        assert key_of(*numbers) == key
