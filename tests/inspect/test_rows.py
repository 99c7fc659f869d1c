"""The rows of a record, where recipes change, and where faults are traced too."""

import json
from pathlib import Path

import pytest
import torch

import octavo
from octavo import PerRow, PerTensor, recipes
from octavo.inspect.report import to_json
from octavo.inspect.rows import Row, Table
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


def test_a_layer_in_place_of_another_of_the_same_recipe_is_counted(tmp_path: Path) -> None:
    model = network(recipes.dynamic())
    with octavo.inspect.record(model, tmp_path, every=1) as recorder:
        train(model, range(2), recorder)
        model[0] = network(recipes.dynamic())[0]
        train(model, range(2, 5), recorder)
    record = octavo.inspect.load(tmp_path)
    of_first = [row.layer == "0" and row.role == "input" for row in record.rows]
    assert np.isfinite(record.measures["amax"][:, of_first]).all(1).tolist() == [True, True, False, True, True]


def test_layers_that_are_restored_meanwhile_are_left_alone(tmp_path: Path) -> None:
    model = torch.nn.Sequential(octavo.nn.Linear(32, 48), octavo.nn.Linear(48, 16))
    with octavo.inspect.record(model, tmp_path, every=1) as recorder:
        model(torch.randn(8, 32)).sum().backward()
        recorder.step()
        octavo.restore(model[0])
    assert type(model[0]) is torch.nn.Linear and "fp8" not in vars(model[0]) and model[1].fp8.observer is None
    assert octavo.inspect.load(tmp_path).steps == [0]


@pytest.mark.parametrize("counts", [{"experts": -1}, {"features": 2.5}, {"experts": True}])
def test_a_row_of_a_file_has_numbers_of_experts_and_features(counts: dict[str, object]) -> None:
    (row, *_) = Table(octavo.nn.GroupedLinear(3, 32, 16, recipe=recipes.dynamic())).rows
    assert Row.of(row.as_dict()) == row and (row.experts, row.features) == (3, 32)
    with pytest.raises(ValueError, match="are no numbers of experts and of features"):
        Row.of(row.as_dict() | counts)


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


def test_a_forward_by_which_a_pipeline_finds_shapes_is_not_counted(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.pipelining.stage")
    layer, x = octavo.nn.Linear(32, 48, recipe=recipes.dynamic()), torch.randn(40, 32)

    def _shape_inference(unwritten: torch.Tensor) -> None:  # the name of torch's function
        layer(unwritten)

    with octavo.inspect.record(layer, tmp_path) as recorder:
        _shape_inference(1e6 * x)
        layer(x).sum().backward()
        recorder.step()
    assert octavo.inspect.load(tmp_path).measures["amax"][0, 0] == x.abs().max()
