"""The rows of a record."""

import json
from pathlib import Path

import pytest

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
    found = octavo.inspect.load(tmp_path)
    place = {row: at for at, row in enumerate(found.rows) if row.layer == "0" and row.role == "input"}
    amax = {
        row.cast.granularity: found.measures["amax"][:, at] for row, at in place.items() if "output" in row.products
    }
    assert np.isnan(amax[PerTensor()]).tolist() == [False, False, True, True]
    assert np.isnan(amax[PerRow()]).tolist() == [True, True, True, False]  # it came within the third step
    names = [row["name"] for row in json.loads(to_json(found, []))["exponents"]]
    assert len(set(names)) == len(names) == len(found.rows)
    assert found.events == [(2, "switch", "by hand")]
