"""The rows of a record, and observers' counts, which are float64's of the tensors that were cast."""

import json
from pathlib import Path

import pytest
import torch

import octavo
from octavo import PerRow, PerTensor, recipes
from octavo.inspect.report import to_json
from tests.inspect.test_recorder import network, train

np = pytest.importorskip("numpy")


def test_another_recipe_is_another_row(tmp_path: Path) -> None:
    model = network(recipes.dynamic())
    with octavo.inspect.record(model, tmp_path, every=1) as recorder:
        train(model, range(2), recorder)
        octavo.set_recipe(model, recipes.rowwise())
        recorder.event("switch", "by hand")
        train(model, range(2, 4), recorder)
    record = octavo.inspect.load(tmp_path)
    place = {row: at for at, row in enumerate(record.rows) if row.layer == "0" and row.role == "input"}
    amax = {
        row.cast.granularity: record.measures["amax"][:, at] for row, at in place.items() if "output" in row.products
    }
    assert np.isnan(amax[PerTensor()]).tolist() == [False, False, True, True]
    assert np.isnan(amax[PerRow()]).tolist() == [True, True, True, False]  # it came within the third step
    names = [row["name"] for row in json.loads(to_json(record, []))["exponents"]]
    assert len(set(names)) == len(names) == len(record.rows)
    assert record.events == [(2, "switch", "by hand")]


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


def test_a_record_and_a_trace_of_faults_share_a_layer(tmp_path: Path) -> None:
    layer, x = octavo.nn.Linear(32, 48, recipe=recipes.delayed()), torch.randn(40, 32)
    with octavo.inspect.trace_faults(layer, raises=False) as trace:
        with octavo.inspect.record(layer, tmp_path) as recorder:
            layer(x).sum().backward()
            trace.step()
            recorder.step()
        assert trace.fault is None and layer.observer.counts is None
        layer(x * torch.inf).sum().backward()
        trace.step()
    assert (trace.fault.step, trace.fault.role) == (1, "input") and trace.fault.before[0]["input amax"] == x.abs().max()
    assert "observer" not in layer.__dict__
    assert octavo.inspect.load(tmp_path).measures["amax"][0, 0] == x.abs().max()
