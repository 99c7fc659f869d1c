import math

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_state import pieces
from tests.support.fp8_weights import random16, read

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
    found = torch.cat([floats_of(bits), floats_of(subnormal), floats_of(ties), floats_of(torch.tensor(special))])
    assert found.numel() == 800
    return found.view(SHAPE)


def master(kind: str, shape: tuple[int, int] = SHAPE) -> MasterWeight:
    rest = {"split32": torch.int16, "split24": torch.int8}.get(kind)
    return MasterWeight(
        torch.zeros(shape, dtype=torch.float32 if kind == "weight" else torch.bfloat16),
        kind,
        None if rest is None else torch.zeros(shape, dtype=rest),
    )


def write(m: MasterWeight, wide: Tensor, bits: Tensor | None = None, *scale_and_found: Tensor) -> None:
    m.scale, m.found = scale_and_found or (None, None)
    for piece in pieces(*wide.shape):
        m.write(piece, piece.of(wide.clone()), None if bits is None else piece.of(bits))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two have the same bits; NaNs are one."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(nan=0.5, posinf=math.inf, neginf=-math.inf).view(torch.int32),
        b.nan_to_num(nan=0.5, posinf=math.inf, neginf=-math.inf).view(torch.int32),
    )


def nearest_bf16(x: Tensor) -> Tensor:
    """Ties away from zero, in float64: by the two bf16 numbers on either side."""
    down = floats_of(x.view(torch.int32) & -65536)
    up = floats_of((x.view(torch.int32) & -65536).long() + 65536)
    middle = (
        down.double()
        + torch.where(up.isinf(), torch.copysign(torch.tensor(2.0**128, dtype=torch.float64), x.double()), up.double())
    ) / 2
    return torch.where(x.double().abs() >= middle.abs(), up, down)


def test_split32_holds_every_float32():
    x, m = any_floats(), master("split32")
    write(m, x)
    assert same(read(m), x)
    nan = x.isnan()
    assert same(torch.where(nan, x, m.weight.float()), torch.where(x.isfinite(), nearest_bf16(x), x))
    assert m.weight[nan].isnan().all()


@pytest.mark.parametrize("kind", ["split32", "split24", "stochastic"])
@pytest.mark.parametrize("bits", [0, 0xFFFF])
def test_what_is_not_finite_stays_alone(kind, bits):
    x = torch.ones(SHAPE)
    faults = torch.tensor(
        [math.nan, math.inf, -math.inf, floats_of(torch.tensor(0x7FFFFFFF)), floats_of(torch.tensor(-1))]
    )
    x[1, 3:8] = faults
    m = master(kind)
    write(m, x, torch.full(SHAPE, bits, dtype=torch.int32))
    for found in (read(m), m.weight.float()):
        assert found[1, 3:8].isnan().tolist() == [True, False, False, True, True]
        assert found[1, 4:6].tolist() == [math.inf, -math.inf]
        found[1, 3:8] = 1.0
        assert (found == 1.0).all()


def test_split24_holds_the_upper_24_bits():
    x, m = any_floats(), master("split24")
    upper = torch.where(x.isfinite(), floats_of(x.view(torch.int32) & -256), x)
    write(m, upper, random16(SHAPE))
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
    write(m, x.repeat(draws, 1), random16((draws, 150)))
    found = read(m)
    assert ((found == low) | (found == high)).all()
    assert ((found - x).abs() < x.abs() * 2.0 ** (dropped - 23)).all()
    part = ((x - low).double() / (high - low).double())[0]
    sigma = (part * (1 - part) / draws).sqrt()
    assert ((found == high).double().mean(0) - part).abs().le(4.5 * sigma + 2.0**-16).all()
    assert torch.equal(m.weight.float(), nearest_bf16(found))


def test_a_float32_weight_is_its_own_master():
    x, m = any_floats(), master("weight")
    write(m, x)
    assert same(read(m), x)
    for piece in pieces(*SHAPE):
        assert m.read(piece).data_ptr() == piece.of(m.weight).data_ptr()
        m.read(piece).fill_(2.0)
        m.write(piece, m.read(piece), None)
    assert (m.weight == 2.0).all()


def test_only_masters_that_round_take_random_bits():
    kinds = ["weight", "split32", "split24", "stochastic"]
    assert [kind for kind in kinds if master(kind).is_random] == ["split24", "stochastic"]
