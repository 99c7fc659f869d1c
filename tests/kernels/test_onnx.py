"""The lowering of octavo's ops, computed by torch: the parts around QuantizeLinear."""

import pytest
import torch

from octavo import E2M1, E4M3, ExportError, kernels
from octavo.granularity import scale_shape
from octavo.kernels.arguments import CastSource, Output, RotaryHeads, Scaling
from octavo.kernels.onnx import _TYPES, _amax, _cast, _dequantize, _repeated, _rotary
from octavo.numerics import floor_power_of_two, floor_power_of_two_by_comparison
from tests.support.definitions import GRANULARITIES

X = torch.randn(4, 32)


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


@pytest.mark.parametrize("tile", [g.tile for g in GRANULARITIES], ids=str)
def test_each_tile_is_dequantized_by_its_scale(tile, monkeypatch):
    """DequantizeLinear as ONNX defines it: a scale for all, for each index along an axis, or for blocks along it."""

    def dequantize_linear(op, inputs, attributes, *, dtype, shape, version):
        (codes, scales), axis = inputs, attributes.get("axis", 1)
        assert (op, dtype, version) == ("DequantizeLinear", torch.float32, 21) and codes.shape == shape
        if block_size := attributes.get("block_size"):
            scales = scales.repeat_interleave(block_size, axis).narrow(axis, 0, shape[axis])
        elif scales.ndim == 1:
            scales = scales.unsqueeze(1 - axis)
        return codes.to(dtype) * scales

    monkeypatch.setattr("torch.onnx.ops.symbolic", dequantize_linear)
    codes = torch.randn(150, 140).to(torch.float8_e4m3fn)
    scale_inv = torch.rand(scale_shape(codes.shape, tile))
    expected = kernels.dequantize(codes, scale_inv, tile, torch.float32)
    assert torch.equal(_dequantize(codes, scale_inv, tile, torch.float32), expected)


@pytest.mark.parametrize(
    ("source", "scaling", "says"),
    [
        (CastSource(X, "silu", X), Scaling(E4M3.dtype, (-1, -1), True, 0), "a gradient can't be exported"),
        (CastSource(X), Scaling(E2M1.dtype, (1, 16), True, 0), "ONNX has no E2M1 .* set a recipe of E4M3 first"),
    ],
    ids=["a gradient", "E2M1"],
)
def test_casts_that_onnx_can_not_express(source, scaling, says):
    with pytest.raises(ExportError, match=says):
        _cast(source, scaling, None, Output(), None)


def test_powers_of_two_by_comparison():
    exact = 2.0 ** torch.arange(-126, 127).float()
    near = [torch.nextafter(exact, torch.full_like(exact, to)) for to in (0.0, torch.inf)]
    for scale in (exact, *near, exact * 1.5, torch.rand(10_000) + 1e-3):
        scale = scale.clamp(2.0**-126, 2.0**126)
        assert torch.equal(floor_power_of_two_by_comparison(scale), floor_power_of_two(scale))
