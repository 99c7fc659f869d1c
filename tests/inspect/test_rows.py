"""The rows of a record, where recipes change, and where faults are traced too."""

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


def test_a_record_and_a_trace_of_faults_share_a_layer(tmp_path: Path) -> None:
    layer, x = octavo.nn.Linear(32, 48, recipe=recipes.delayed()), torch.randn(40, 32)
    with octavo.inspect.trace_faults(layer, raises=False) as trace:
        with octavo.inspect.record(layer, tmp_path) as recorder:
            layer(x).sum().backward()
            trace.step()
            recorder.step()
        assert trace.fault is None and layer.fp8.observer.counts is None
        layer(x * torch.inf).sum().backward()
        trace.step()
    assert (trace.fault.step, trace.fault.role) == (1, "input") and trace.fault.before[0]["input amax"] == x.abs().max()
    assert layer.fp8.observer is None
    assert octavo.inspect.load(tmp_path).measures["amax"][0, 0] == x.abs().max()
