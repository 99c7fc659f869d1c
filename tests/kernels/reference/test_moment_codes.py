import math

import pytest
import torch
from torch import Tensor

from octavo import E4M3, E5M2, Format
from octavo.formats import E4M4
from octavo.kernels.reference.moment_codes import decode_moment, encode_moment
from tests.support.definitions import value_of

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M4], ids=str)
ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def e4m4_value(code: int) -> float:
    """eeee mmmm, bias 7; 1111.1111 is NaN."""
    exponent, mantissa = code >> 4, code & 15
    if code == 0xFF:
        return math.nan
    return mantissa / 16 * 2.0**-6 if exponent == 0 else (1 + mantissa / 16) * 2.0 ** (exponent - 7)


def values(fmt: Format) -> Tensor:
    """What the 256 codes read, by definition."""
    of = e4m4_value if fmt is E4M4 else lambda code: value_of(code, fmt.dtype)
    return torch.tensor([of(code) for code in range(256)], dtype=torch.float32)


def positive(fmt: Format) -> Tensor:
    """The finite values that are not negative, ascending with their codes."""
    found = values(fmt)
    found = found[:128] if fmt.signed else found
    return found[found.isfinite()]


def nearby(fmt: Format) -> Tensor:
    """Codes, the middles between them, and numbers near both."""
    codes = positive(fmt)
    places = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([fmt.max * 2, 3e38, 1e-38, 1e-45])])
    found = [places]
    for direction in (0.0, math.inf):
        x = places
        for _ in range(3):
            x = torch.nextafter(x, torch.tensor(direction))
            found.append(x)
    found.append(places * (1 + 2.0**-12))
    found.append(places * (1 - 2.0**-12))
    x = torch.cat(found)
    return x[x.isfinite()]


def nearest(x: Tensor, fmt: Format) -> Tensor:
    """Codes by search among the codes, ties to even; saturated."""
    codes = positive(fmt).double()
    x = x.double().clamp(max=fmt.max)
    below = (torch.searchsorted(codes, x, right=True) - 1).clamp(0, len(codes) - 2)
    down, up = x - codes[below], codes[below + 1] - x
    return (below + ((up < down) | ((up == down) & (below % 2 == 1)))).to(torch.uint8)


@FORMATS
def test_all_codes_read_what_the_definition_says(fmt):
    expected, found = values(fmt), decode_moment(ALL, fmt)
    assert found.dtype == torch.float32
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(
        found.nan_to_num(nan=1e9, posinf=1e10, neginf=-1e10), expected.nan_to_num(nan=1e9, posinf=1e10, neginf=-1e10)
    )
    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~found.isnan()])
    assert float(found[found.isfinite()].max()) == fmt.max
    if fmt is not E4M4:
        assert torch.equal(found.nan_to_num(nan=1e9), ALL.view(fmt.dtype).float().nan_to_num(nan=1e9))


@FORMATS
@pytest.mark.parametrize("code", [0, 1, 0x7E, 0x80, 0xFE, 0xFF])
def test_a_few_codes_read_as_among_all(fmt, code):
    assert torch.equal(
        decode_moment(ALL[code : code + 1], fmt).nan_to_num(7.0), values(fmt)[code : code + 1].nan_to_num(7.0)
    )
    assert decode_moment(ALL[:0], fmt).shape == (0,)
    assert torch.equal(
        decode_moment(ALL.view(16, 16).T, fmt).nan_to_num(7.0), values(fmt).view(16, 16).T.nan_to_num(7.0)
    )


@FORMATS
@pytest.mark.parametrize("bits", [None, 0, 0xFFFF])
def test_a_number_that_has_a_code_gets_it(fmt, bits):
    finite = ALL[values(fmt).isfinite()]
    bits16 = None if bits is None else torch.full(finite.shape, bits, dtype=torch.int32)
    assert torch.equal(encode_moment(values(fmt)[finite.long()].clone(), fmt, bits16), finite)


@FORMATS
def test_to_nearest(fmt):
    x = nearby(fmt)
    expected = nearest(x, fmt)
    assert torch.equal(encode_moment(x.clone(), fmt, None), expected)
    if fmt.signed:
        assert torch.equal(encode_moment(-x, fmt, None), expected | 0x80)
        inside = x[x <= fmt.max]
        assert torch.equal(encode_moment(inside.clone(), fmt, None), inside.to(fmt.dtype).view(torch.uint8))


@FORMATS
@pytest.mark.parametrize("bits", [None, 0, 0xFFFF])
def test_what_is_not_finite_is_nan_and_alone(fmt, bits):
    x = torch.tensor([1.0, math.nan, 3e38, math.inf, 3e38, -math.inf, 0.0, -math.nan])
    bits16 = None if bits is None else torch.full(x.shape, bits, dtype=torch.int32)
    codes = encode_moment(x, fmt, bits16)
    largest = len(positive(fmt)) - 1
    one = int((positive(fmt) == 1.0).nonzero())
    assert codes.tolist() == [one, fmt.nan_code, largest, fmt.nan_code, largest, fmt.nan_code, 0, fmt.nan_code]
    assert decode_moment(codes, fmt).isnan().tolist() == [False, True, False, True, False, True, False, True]


@FORMATS
def test_without_random_bits_it_truncates(fmt):
    codes = positive(fmt)
    x = torch.cat([codes[:-1] + (codes[1:] - codes[:-1]) * part for part in (0.0, 0.1, 0.5, 0.9, 1 - 2.0**-16)])
    expected = torch.arange(len(codes) - 1, dtype=torch.int32).to(torch.uint8).repeat(5)
    assert torch.equal(encode_moment(x, fmt, torch.zeros(x.shape, dtype=torch.int32)), expected)


@FORMATS
def test_stochastic_rounding_gives_a_neighbour_and_is_unbiased(fmt):
    codes, draws = positive(fmt), 1 << 12
    places = torch.cat([torch.arange(12), torch.arange(12, len(codes) - 1, 7)])
    low, high = codes[places], codes[places + 1]
    part = torch.rand(len(places))
    x = low + (high - low) * part
    bits16 = torch.randint(0, 1 << 16, (draws, len(x)), dtype=torch.int32)
    found = decode_moment(encode_moment(x.repeat(draws, 1), fmt, bits16), fmt)
    assert ((found == low) | (found == high)).all()
    part = ((x - low) / (high - low)).double()
    sigma = (part * (1 - part) / draws).sqrt()
    error = (found == high).double().mean(0) - part
    assert (error.abs() <= 4 * sigma + 2.0**-15).all()
    assert abs(error.mean()) < 4 * float(sigma.square().sum().sqrt()) / len(x) + 2.0**-15
    if fmt.signed:
        negative = decode_moment(encode_moment(-x.repeat(draws, 1), fmt, bits16), fmt)
        assert torch.equal(negative, -found)


@FORMATS
def test_each_of_the_random_bits_counts(fmt):
    # of the 2^16 draws, the number that go up is the dropped part in units of 2^-16
    x = positive(fmt)[9] + (positive(fmt)[10] - positive(fmt)[9]) * (1234 / 65536)
    codes = encode_moment(x.repeat(1 << 16), fmt, torch.arange(1 << 16, dtype=torch.int32))
    assert int((codes == 10).sum()) == 1234
    assert int((codes == 9).sum()) == (1 << 16) - 1234
