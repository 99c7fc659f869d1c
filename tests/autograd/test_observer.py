"""Tests: observers count what float64 says of the tensors that were cast."""

from pathlib import Path

import pytest
import torch

import octavo
from octavo import PerTensor, recipes

np = pytest.importorskip("numpy")


def test_what_is_recorded_is_what_tensors_say(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(32, 48, recipe=recipes.dynamic())
    x, grad = torch.randn(40, 32) * torch.logspace(0, -9, 32), torch.randn(40, 48)
    x.requires_grad_()
    with octavo.inspect.record(layer, tmp_path) as recorder:
        layer(x).backward(grad)
        recorder.step()
    record = octavo.inspect.load(tmp_path)
    assert [row.role for row in record.rows] == ["input", "weight", "grad_output"]
    for place, (tensor, cast) in enumerate(zip((x, layer.weight, grad), recipes.dynamic().casts, strict=True)):
        numbers = tensor.detach().double()
        read = octavo.quantize(tensor.detach(), cast.as_is.format, PerTensor()).dequantize().double()
        flushed = ((read == 0) & (numbers != 0)).sum() / (numbers != 0).sum()
        expected = {
            "flushed": float(flushed),
            "sqnr": float(10 * torch.log10(numbers.square().sum() / (numbers - read).square().sum())),
            "amax": float(numbers.abs().max()),
            "clipped": 0.0,
            "nonfinite": 0.0,
            "assumed": 1.0,
        }
        for name, value in expected.items():
            assert record.measures[name][0, place] == pytest.approx(value, rel=1e-6), name
        exponents = np.floor(np.log2(numbers.abs().numpy())).astype(int)
        counted = np.bincount(np.clip(exponents - record.lowest, 0, 63).ravel(), minlength=64)
        assert (record.exponents[0, place] == counted).all()
    assert record.measures["flushed"][0, 0] > 0.1
