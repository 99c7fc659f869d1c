"""What is recorded of weights and moments."""

from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes

np = pytest.importorskip("numpy")


def test_moments_that_flush_and_weights_that_stand_still(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(256, 8, bias=False, recipe=recipes.dynamic(), dtype=torch.bfloat16)
    optimizer = octavo.optim.AdamW(layer.parameters(), 1e-7, moments="fp8", master=None)
    with octavo.inspect.record(layer, tmp_path, optimizer=optimizer) as recorder:
        (layer(torch.randn(4, 256, dtype=torch.bfloat16)) * torch.logspace(0, -12, 8)).sum().backward()
        before = layer.weight.detach().double()
        optimizer.step()
        recorder.step()
    found = octavo.inspect.load(tmp_path)
    changed = (layer.weight.detach().double() - before) != 0
    assert found.weights["changed"][0, 0] == pytest.approx(changed.double().mean().item())
    assert found.weights["resolution"][0, 0] < 0.3
    codes = [optimizer.state[layer.weight][f"{name}_codes"] for name in ("exp_avg", "exp_avg_sq")]
    flushed = ((codes[1] == 0) & (codes[0] & 0x7F != 0)).double().mean().item()
    assert found.weights["second_flushed"][0, 0] == pytest.approx(flushed)


def test_weights_that_live_in_fp8(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)).bfloat16()
    octavo.convert(model, recipes.dynamic(), weight_storage="fp8", select=lambda *_: True)
    optimizer = octavo.optim.AdamW(model.parameters(), 1e-2)
    with octavo.inspect.record(model, tmp_path, optimizer=optimizer) as recorder:
        model(torch.randn(16, 32, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        recorder.step()
    found = octavo.inspect.load(tmp_path)
    assert np.isposinf(found.measures["sqnr"][0, 1])  # its codes are the weight
    assert 0.1 < found.weights["changed"][0].min()
