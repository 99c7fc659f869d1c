import math

import pytest
import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.reference.optimizer_state import (
    FLOAT16_FACTOR,
    MASTER_KINDS,
    Fp8Weight,
    MasterWeight,
    pieces,
    remainder_of,
    values_with,
)
from tests.support.definitions import same_bits
from tests.support.fp8_weights import BITS, RESTS, amax_of, master_of, random32, read, store, values_of, weight

SHAPE = (4, 200)  # a row is a block and a part of one


def floats_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def any_floats() -> Tensor:
    """Float32 numbers of random bits, subnormals, ties of bf16, the ends of its range."""
    bits = torch.randint(-(1 << 31), 1 << 31, (700,))
    subnormal = torch.randint(0, 1 << 23, (40,)) - (torch.arange(40) % 2 << 31)
    upper = torch.randint(-(1 << 15), 1 << 15, (16,)) << 16
    ties = torch.cat([upper + 0x8000, upper + 0x7FFF, upper + 0x8001])
    special = [0, -(1 << 31), 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x00800000, 1, 0x7F800000, 0x807FFFFF - (1 << 32)]
    special += [0xFF7FFFFF - (1 << 32), 0xFF800000 - (1 << 32), 0x7FC00000]
    floats = torch.cat([floats_of(bits), floats_of(subnormal), floats_of(ties), floats_of(torch.tensor(special))])
    assert floats.numel() == 800
    return floats.view(SHAPE)


def master(kind: str, shape: tuple[int, int] = SHAPE) -> MasterWeight:
    return master_of(kind, torch.zeros(shape, dtype=torch.float32 if kind == "weight" else torch.bfloat16))


def write(m: MasterWeight, wide: Tensor, bits: Tensor | None = None) -> None:
    for piece in pieces(*wide.shape):
        m.write(piece, piece.of(wide.clone()), None if bits is None else piece.of(bits))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two have the same bits; NaNs are one."""
    return same_bits(*(torch.where(values.isnan(), math.nan, values) for values in (a, b)))


def nearest_bf16(x: Tensor) -> Tensor:
    """Ties away from zero, in float64: by the two bf16 numbers on either side."""
    down = floats_of(x.view(torch.int32) & -65536)
    up = floats_of((x.view(torch.int32) & -65536).long() + 65536)
    beyond = torch.copysign(torch.tensor(2.0**128, dtype=torch.float64), x.double())
    middle = (down.double() + torch.where(up.isinf(), beyond, up.double())) / 2
    return torch.where(x.double().abs() >= middle.abs(), up, down)


def test_split32_holds_every_float32():
    x, m = any_floats(), master("split32")
    write(m, x)
    assert same(read(m), x)
    nan = x.isnan()
    assert same(torch.where(nan, x, m.weight.float()), torch.where(x.isfinite(), nearest_bf16(x), x))
    assert m.weight[nan].isnan().all()


@pytest.mark.parametrize("kind", ["split32", "split24", "stochastic"])
@pytest.mark.parametrize("bits", [0, -1])
def test_what_is_not_finite_stays_alone(kind, bits):
    x = torch.ones(SHAPE)
    x[1, 3:8] = torch.cat([torch.tensor([math.nan, math.inf, -math.inf]), floats_of(torch.tensor([0x7FFFFFFF, -1]))])
    m = master(kind)
    write(m, x, torch.full(SHAPE, bits, dtype=torch.int32))
    for values in (read(m), m.weight.float()):
        assert values[1, 3:8].isnan().tolist() == [True, False, False, True, True]
        assert values[1, 4:6].tolist() == [math.inf, -math.inf]
        values[1, 3:8] = 1.0
        assert (values == 1.0).all()


def test_split24_holds_the_upper_24_bits():
    x, m = any_floats(), master("split24")
    upper = torch.where(x.isfinite(), floats_of(x.view(torch.int32) & -256), x)
    write(m, upper, random32(SHAPE))
    assert same(read(m), upper)
    write(m, x, torch.zeros(SHAPE, dtype=torch.int32))
    assert same(read(m), upper)  # with random bits of 0 it truncates
    assert same(torch.where(x.isnan(), x, m.weight.float()), torch.where(x.isfinite(), nearest_bf16(upper), x))


@pytest.mark.parametrize(("kind", "dropped"), [("split24", 8), ("stochastic", 16)])
def test_stochastic_rounding_gives_a_neighbour_and_is_unbiased(kind, dropped):
    draws = 1 << 12
    x = torch.randn(1, 150) * torch.randn(1, 150).mul(10).exp()
    low = floats_of(x.view(torch.int32) & -(1 << dropped))
    high = floats_of((x.view(torch.int32) & -(1 << dropped)) + (1 << dropped))
    m = master(kind, (draws, 150))
    write(m, x.repeat(draws, 1), random32((draws, 150)))
    read_back = read(m)
    assert ((read_back == low) | (read_back == high)).all()
    assert ((read_back - x).abs() < x.abs() * 2.0 ** (dropped - 23)).all()
    part = ((x - low).double() / (high - low).double())[0]
    sigma = (part * (1 - part) / draws).sqrt()
    assert ((read_back == high).double().mean(0) - part).abs().le(4.5 * sigma + 2.0**-16).all()
    assert torch.equal(m.weight.float(), nearest_bf16(read_back))


def test_a_float32_weight_is_its_own_master():
    x, m = any_floats(), master("weight")
    write(m, x)
    assert same(read(m), x)
    for piece in pieces(*SHAPE):
        assert m.read(piece).data_ptr() == piece.of(m.weight).data_ptr()
        m.read(piece).fill_(2.0)
        m.write(piece, m.read(piece), None)
    assert (m.weight == 2.0).all()


# --- weights that live in FP8 -----------------------------------------------------------------------------------------

FLOATS = [kind for kind, dtype in RESTS.items() if dtype is not None and dtype.is_floating_point]  # masters themselves

each_kind = pytest.mark.parametrize("kind", RESTS)
each_split = pytest.mark.parametrize("kind", [kind for kind in RESTS if RESTS[kind] is not None and kind not in FLOATS])
each_shape = pytest.mark.parametrize("shape", [(1, 1), (3, 31), (130, 300), (256, 256)], ids=str)
each_granularity = pytest.mark.parametrize("blocks", [False, True], ids=["tensor", "blocks"])


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Return each element's scale."""
    if scales.numel() == 1:
        return scales.expand(shape)
    return scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def code_values(m: Fp8Weight) -> Tensor:
    return m.weight.view(torch.float8_e4m3fn).float()


@each_split
def test_reading_is_exact(kind):
    """A master lies between its code and the next one, as far as the remainder says."""
    bits = torch.iinfo(RESTS[kind]).bits
    low_bits = torch.arange(-128, 128) if bits == 8 else torch.randint(-(1 << 15), 1 << 15, (256,))
    low_bits[0], low_bits[1] = -(1 << bits - 1), (1 << bits - 1) - 1
    m = weight(kind, (256, 256))
    m.weight.copy_(torch.arange(256)[:, None])
    m.low_bits.copy_(low_bits)
    m.scale_inv.fill_(2.0**-10)
    read_back = read(m).double()
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for sign, codes in ((1, read_back[:127]), (-1, read_back[128:255])):
        for code in range(1, 126):  # of 0 and the largest only remainders of one sign are ever written
            step = torch.where(low_bits < 0, values[code] - values[code - 1], values[code + 1] - values[code])
            assert torch.equal(codes[code], sign * (values[code] + step * low_bits / 2.0**bits) * 2.0**-10)
        up, down = low_bits >= 0, low_bits <= 0
        assert torch.equal(codes[0, up], sign * low_bits[up] / 2.0**bits * values[1] * 2.0**-10)
        assert torch.equal(codes[126, down], sign * (448 + low_bits[down] / 2.0**bits * 32) * 2.0**-10)
    assert read_back[127].isnan().all() and read_back[255].isnan().all()


@each_granularity
@each_shape
@each_kind
def test_a_master_is_as_close_as_its_bits_and_its_code_the_nearest(kind, shape, blocks):
    x, m = values_of(shape), weight(kind, shape, blocks)
    amax, read_back, scale_inv = store(m, x), read(m), spread(m.scale_inv, m.weight.shape)
    if kind == "fp8_fp32":
        assert torch.equal(read_back, x)
    else:
        smallest, bits = E4M3.smallest_normal * scale_inv, BITS[kind] - 1
        assert float(((read_back - x).abs() / x.abs().clamp_min(smallest)).max()) < 2.0**-bits
        assert bits != 19 or not torch.equal(read_back, x) or x.numel() == 1  # so that the test sees a rounding
    if kind == "fp8_fp16":
        assert torch.equal(read_back, m.low_bits.float() * (scale_inv / FLOAT16_FACTOR))
    elif kind == "fp8_stochastic":
        assert torch.equal(read_back, code_values(m) * scale_inv)
    assert torch.equal(amax, amax_of(read_back, m.scale_inv.shape))
    assert torch.equal(torch.log2(m.scale_inv) % 1, torch.zeros_like(m.scale_inv))
    scaled = (x if kind in FLOATS else read_back) / scale_inv  # a float master is rounded after the code was found
    nearest = scaled.to(torch.float8_e4m3fn).float()
    assert torch.equal((code_values(m) - scaled).abs(), (nearest - scaled).abs())  # ties may go either way
    assert torch.equal(torch.signbit(code_values(m)), torch.signbit(x))


@pytest.mark.parametrize("kind", [kind for kind in RESTS if MASTER_KINDS[kind].is_random])
def test_stochastic_rounding_in_fp8_is_unbiased(kind):
    draws, bits = 1 << 12, BITS[kind] - 1
    x = torch.randn(1, 150)
    x = torch.where(x.abs() < 0.05, 0.05, x)  # codes are normal numbers
    m = weight(kind, (draws, 150))
    store(m, x.repeat(draws, 1))
    ulp = torch.exp2(torch.floor(torch.log2(x.abs().double())) - bits)[0]
    part = (x[0].abs().double() / ulp) % 1
    fraction = (read(m).double().abs() / ulp) - torch.floor(x[0].abs().double() / ulp)
    assert ((fraction == 0) | (fraction == 1)).all()  # one of the two neighbours
    sigma = (part * (1 - part) / draws).sqrt()
    assert (fraction.mean(0) - part).abs().le(4.5 * sigma + 2.0**-15).all()


@each_kind
def test_ties_and_what_is_around_them(kind):
    codes = torch.arange(126, dtype=torch.uint8)
    low, high = codes.view(torch.float8_e4m3fn).float(), (codes + 1).view(torch.float8_e4m3fn).float()
    tie = (low + high) / 2
    x = torch.stack([tie, torch.nextafter(tie, low), torch.nextafter(tie, high), -tie])
    m = weight(kind, (4, 126))
    store(m, x, torch.zeros(4, 126, dtype=torch.int32), torch.full((1, 1), 448.0))
    assert float(m.scale_inv) == 1.0
    if kind == "fp8_stochastic":  # with random bits of 0 it truncates
        assert torch.equal(code_values(m), torch.stack([low, low, low, -low]))
        return
    assert ((code_values(m)[0] == low) | (code_values(m)[0] == high)).all()
    normal = codes >= 8  # a subnormal's master has no bits left for it
    assert torch.equal(code_values(m)[1, normal], low[normal])
    if kind in FLOATS:
        assert torch.equal(code_values(m)[2], high)
    assert torch.equal(code_values(m)[3], -code_values(m)[0])


@each_kind
def test_the_largest_number_is_not_passed(kind):
    """Not by stochastic rounding either; and a bound that was too small saturates."""
    x = torch.tensor([[448.0, math.nextafter(448.0, 0), 447.999, -448.0, 500.0, -1e30]])
    m = weight(kind, (1, 6))
    amax = store(m, x, torch.full((1, 6), -1, dtype=torch.int32), torch.full((1, 1), 448.0))
    assert m.weight.tolist() == [[0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE]]
    if kind not in FLOATS:
        assert read(m).tolist()[0][3:] == [-448.0, 448.0, -448.0] and float(amax) == 448.0


@each_granularity
@each_shape
@each_split
@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 3, 6])
def test_a_new_scale_changes_no_normal_number(shift, kind, shape, blocks):
    x, m = values_of(shape), weight(kind, shape, blocks)
    bound = amax_of(x, m.scale_inv.shape)
    store(m, x, bound=4 * bound)
    before, again = read(m), weight(kind, shape, blocks)
    store(again, before, torch.full(shape, -1, dtype=torch.int32), 4 * bound * 2.0**shift)
    assert torch.equal(again.scale_inv, m.scale_inv * 2.0**shift)
    smallest = E4M3.smallest_normal * spread(again.scale_inv, x.shape)
    normal = before.abs() >= smallest
    assert normal.any() and torch.equal(read(again)[normal], before[normal])
    assert ((read(again) - before).abs() < smallest * 2.0 ** (1 - BITS[kind])).all()


@each_kind
@each_granularity
def test_signs_and_zeros(blocks, kind):
    x = torch.zeros(3, 300)
    x[0, 5], x[1, 6], x[2, :2], x[2, 99], x[2, 299] = -1e-30, 1e-30, torch.tensor([-0.0, 0.0]), 3.0, 3.0
    m = weight(kind, (3, 300), blocks)
    for bits in (0, -1):
        store(m, x, torch.full((3, 300), bits, dtype=torch.int32))
        read_back = read(m)
        assert torch.equal(torch.signbit(read_back), torch.signbit(x))
        assert torch.equal(torch.signbit(code_values(m)), torch.signbit(x))
        assert read_back[2, 99] == read_back[2, 299] == 3.0 and torch.equal(read_back[x == 0], x[x == 0])
        if kind not in FLOATS or torch.finfo(RESTS[kind]).tiny > 1e-30:
            assert read_back.count_nonzero() == 2
    if blocks:
        assert float(m.scale_inv[0, 1]) == 1.0  # a block of zeros


@each_granularity
@each_kind
def test_what_is_not_finite_stays_alone_in_fp8(kind, blocks):
    shape = (130, 300)
    x, bits = values_of(shape), random32(shape)
    bound = 2 * amax_of(x, weight(kind, shape, blocks).scale_inv.shape)
    broken, zeroed = x.clone(), x.clone()
    places = ((0, 0), (1, 200), (129, 299))
    for place, fault in zip(places, (math.nan, math.inf, -math.inf), strict=True):
        broken[place], zeroed[place] = fault, 0.0
    m, other = weight(kind, shape, blocks), weight(kind, shape, blocks)
    assert torch.equal(store(m, broken, bits, bound), store(other, zeroed, bits, bound))
    assert torch.equal(m.scale_inv, other.scale_inv)
    read_back = read(m)
    for place in places:
        assert code_values(m)[place].isnan()
        assert not read_back[place].isfinite()
        read_back[place] = 0.0
        m.weight[place] = other.weight[place] = 0
    assert torch.equal(read_back, read(other).masked_fill_(zeroed == 0, 0.0)) and torch.equal(m.weight, other.weight)
    if RESTS[kind] in (torch.int8, torch.int16):
        assert all(int(m.low_bits[place]) == 0 for place in places)


@pytest.mark.parametrize("shape", [SHAPE, (3, 5, 300)], ids=str)
def test_a_remainder_beside_codes_reads_values_to_twelve_bits(shape: tuple[int, ...]) -> None:
    """The last bit is 2^-11 of a number's power of two; half of it is lost at most, or all next to a tie of codes."""
    values, scale_inv = torch.randn(shape) * torch.logspace(-6, 0, shape[-1]), torch.full((1, 1), 2.0**-5)
    scale_inv = scale_inv if len(shape) == 2 else scale_inv.expand(shape[0], 1, 1)
    scaled = values / 2.0**-5
    codes = scaled.to(E4M3.dtype).view(torch.uint8)
    remainder = remainder_of(values, codes, scale_inv)
    errors = (values_with(codes, scale_inv, remainder) / 2.0**-5 - scaled).abs()
    last_bit = scaled.abs().clamp(min=E4M3.smallest_normal).log2().floor().exp2() * 2.0**-11
    assert (errors <= torch.where(remainder == 127, last_bit, last_bit / 2)).all()
