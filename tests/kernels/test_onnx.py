"""The lowering of octavo's ops, computed by torch: the parts around QuantizeLinear."""

import pytest
import torch

from octavo import kernels
from octavo.kernels.arguments import RotaryHeads
from octavo.kernels.onnx import _TYPES, _amax, _repeated, _rotary
from octavo.numerics import floor_power_of_two, floor_power_of_two_by_comparison
from tests.support.definitions import GRANULARITIES


@pytest.mark.parametrize("tile", [g.tile for g in GRANULARITIES], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 130), (150, 40), (128, 256)], ids=str)
def test_amax(shape, tile):
    x = torch.randn(shape)
    assert torch.equal(_amax(x, tile), kernels.amax(x, tile))


@pytest.mark.parametrize("halves", [False, True])
def test_rotary(halves):
    q, k, v = (torch.randn(2, 5, heads, 8) for heads in (4, 2, 2))
    angles = torch.rand(1, 5, 4 if halves else 8) * 6
    heads = RotaryHeads(q, k, v, angles.cos(), angles.sin(), False)
    assert torch.equal(_rotary(heads), kernels.rotary(*heads))


def test_formats_have_onnxs_numbers():
    proto = pytest.importorskip("onnx").TensorProto
    assert _TYPES == {torch.float8_e4m3fn: proto.FLOAT8E4M3FN, torch.float8_e5m2: proto.FLOAT8E5M2}


def test_scales_of_tiles_for_each_row():
    scale = torch.arange(6.0).view(3, 2)
    assert _repeated(scale, 1, 3) is scale
    assert _repeated(scale, 4, 10)[:, 0].tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 4, 4]
    assert _repeated(scale[:1], -1, 5).shape == (5, 2)


def test_powers_of_two_by_comparison():
    exponents = torch.arange(-126, 127)
    exact = 2.0 ** exponents.float()
    near = [torch.nextafter(exact, torch.full_like(exact, to)) for to in (0.0, torch.inf)]
    for scale in (exact, *near, exact * 1.5, torch.rand(10_000) + 1e-3):
        scale = scale.clamp(2.0**-126, 2.0**126)
        assert torch.equal(floor_power_of_two_by_comparison(scale), floor_power_of_two(scale))
