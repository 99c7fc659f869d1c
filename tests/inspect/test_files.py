"""A record's folder: a run goes on with it, whatever a killed one left."""

from pathlib import Path

import pytest

import octavo
from octavo import recipes
from tests.support.inspected import network, train

np = pytest.importorskip("numpy")


def test_a_run_goes_on_with_its_record(tmp_path: Path) -> None:
    model = network(recipes.dynamic())
    with octavo.inspect.record(model, tmp_path / "whole", every=2) as recorder:
        train(model, range(6), recorder)
    model = network(recipes.dynamic())
    with octavo.inspect.record(model, tmp_path / "parts", every=2) as recorder:
        train(model, range(5), recorder)  # of which only three were saved
    with pytest.raises(ValueError, match="holds a record"):
        octavo.inspect.record(model, tmp_path / "parts", every=2)
    (tmp_path / "parts" / "counts-00000006.npz.1234abcd.partial").touch()
    with open(tmp_path / "parts" / "steps.jsonl", "ab") as file:
        file.write(b'{"loss": 1}\n\xff\n{"step": 5, "lo')  # as a killed run leaves it
    model = network(recipes.dynamic())
    train(model, range(3))
    with octavo.inspect.record(model, tmp_path / "parts", every=2, step=3) as recorder:
        train(model, range(3, 6), recorder)
    whole, parts = (octavo.inspect.load(tmp_path / name) for name in ("whole", "parts"))
    assert parts.steps == whole.steps and parts.rows == whole.rows
    assert parts.scalars["loss"][0] == list(range(6))
    assert not list(tmp_path.glob("*/*.partial"))
    assert (parts.measures["amax"][:2] == whole.measures["amax"][:2]).all()
