"""Records as they are read, and the measures that come from them."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import E5M2, recipes
from octavo.inspect.findings import diagnose
from octavo.inspect.record import RecordError
from octavo.inspect.report import table, to_json
from tests.inspect.test_recorder import network, train
from tests.support.damage import damaged_json

np = pytest.importorskip("numpy")


def test_a_stale_scale_is_seen(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(32, 32, recipe=recipes.delayed())
    with octavo.inspect.record(layer, tmp_path, every=1) as recorder:
        for size in (1.0, 1.0, 8.0):
            torch.manual_seed(0)
            layer(size * torch.randn(16, 32)).sum().backward()
            recorder.step()
    record = octavo.inspect.load(tmp_path)
    assert record.measures["assumed"][:, 0] == pytest.approx([1, 1, 8], rel=1e-6)
    assert record.measures["clipped"][:2, 0].max() == 0 < record.measures["clipped"][2, 0]


def test_a_margin_is_room(tmp_path: Path) -> None:
    gradient = dataclasses.replace(recipes.dynamic().grad_input[0], margin=3)
    assert gradient.format is E5M2
    layer = octavo.nn.Linear(
        16, 16, recipe=dataclasses.replace(recipes.dynamic(), grad_input=(gradient, recipes.dynamic().grad_input[1]))
    )
    x: Tensor = torch.randn(8, 16, requires_grad=True)
    with octavo.inspect.record(layer, tmp_path) as recorder:
        layer(x).square().sum().backward()
        recorder.step()
    record = octavo.inspect.load(tmp_path)
    assert [row.largest for row in record.rows if row.role == "grad_output"] == [57344 / 8, 57344]
    assert record.measures["assumed"][0] == pytest.approx(1.0)


def test_a_nan_in_gradients_is_not_denied(tmp_path: Path) -> None:
    """As of another rank: no layer has one, and the optimizer gets it."""
    layer = octavo.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with octavo.inspect.record(layer, tmp_path, every=1, optimizer=optimizer) as recorder:
        for step in range(3):
            layer.weight.grad = None
            layer(torch.randn(16, 32)).square().mean().backward()
            layer.weight.grad += math.nan if step == 2 else 0
            optimizer.step()
            recorder.step()
    record = octavo.inspect.load(tmp_path)
    assert (record.weights["gradient"][:, 0] == math.inf).tolist() == [False, False, True]
    assert diagnose(record)[0].sentence.startswith("The gradients that the optimizer gets have inf or NaN")


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no layer in FP8"):
        octavo.inspect.record(nn.Linear(4, 4), tmp_path)
    apart = nn.Sequential(octavo.nn.Linear(16, 16), octavo.nn.Linear(16, 16, device="meta"))
    with pytest.raises(ValueError, match="several devices"):
        octavo.inspect.record(apart, tmp_path)
    wrong: list[tuple[str, Any]] = [("every", 0), ("every", 2.5), ("step", -1), ("step", 2.5), ("optimizer", 3)]
    for name, value in wrong:
        with pytest.raises(TypeError if name == "optimizer" else ValueError, match=f"{name}={value}: (needs|give)"):
            octavo.inspect.record(octavo.nn.Linear(16, 16), tmp_path, **{name: value})
    with pytest.raises(octavo.OctavoError, match="holds no record"):
        octavo.inspect.load(tmp_path)
    (tmp_path / "record.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(octavo.OctavoError, match="form 99"):
        octavo.inspect.load(tmp_path)


def test_a_damaged_record_says_which_file(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(16, 16, recipe=recipes.dynamic())
    with octavo.inspect.record(layer, tmp_path) as recorder:
        layer(torch.randn(8, 16)).sum().backward()
        recorder.step(loss=0.5)
    counts, rows, steps = (tmp_path / name for name in ("counts-00000000.npz", "rows-00000000.json", "steps.jsonl"))
    named = rows.read_bytes()
    for path, damage, says in (
        (counts, counts.read_bytes()[:100], "counts-00000000.npz is damaged"),
        (rows, b"", "rows-00000000.json is damaged"),
        (rows, named.replace(b"Cast(", b"Kast("), "rows-00000000.json is damaged .*'Kast.* is no Cast.*copy it"),
        (rows, None, "has no rows-.* that says what counts-00000000.npz counts"),
    ):
        before = path.read_bytes()
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(octavo.OctavoError, match=says):
            octavo.inspect.load(tmp_path)
        path.write_bytes(before)
    steps.write_bytes(steps.read_bytes() + b'{"loss": 1}\n[3]\n\xff\n{"step": 1, "loss": "low"}\n{"step": 1, "lo')
    assert octavo.inspect.load(tmp_path).scalars == {"loss": ([0], [0.5])}


def test_a_damaged_document_is_an_error_or_a_record_that_is_reported(tmp_path: Path) -> None:
    model = network(recipes.delayed())
    with octavo.inspect.record(model, tmp_path, every=1) as recorder:
        train(model, range(2), recorder)
    read = 0
    for path in (tmp_path / name for name in ("record.json", "rows-00000000.json", "steps.jsonl")):
        data = path.read_bytes()
        values = [json.loads(line) for line in data.splitlines()] if path.suffix == ".jsonl" else json.loads(data)
        for seed in range(16):
            damaged = damaged_json(values, seed)
            path.write_bytes(damaged.replace(b"}, {", b"}\n{") if path.suffix == ".jsonl" else damaged)
            try:
                record = octavo.inspect.load(tmp_path)
            except RecordError:
                continue
            read += bool(table(record, diagnose(record), 10)) and bool(to_json(record, diagnose(record)))
        path.write_bytes(data)
    assert 10 < read < 40


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
