"""Findings in records that are written by hand and in trainings that are broken on purpose; remedies mend these."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import E4M3, E5M2, Cast, Delayed, Dynamic, PerTensor, Recipe, RecipeMap, recipes
from octavo.inspect import Finding, Record, diagnose
from octavo.inspect.rows import Row
from octavo.kernels.arguments import Counted
from octavo.scaling.recipe import RecipeRule

np = pytest.importorskip("numpy")


CASTS = (  # role, products, format
    ("input", ("output", "grad_weight"), E4M3),
    ("weight", ("output", "grad_input"), E4M3),
    ("grad_output", ("grad_input", "grad_weight"), E5M2),
)
DELAYED = Delayed()


def healthy(layers: int = 2, records: int = 4, rule: Delayed | Dynamic = DELAYED) -> Record:
    """A record in which nothing is wrong: normal numbers under scales that fit them, one row a role."""
    random = np.random.default_rng(0)
    names = [f"model.layers.{place}.mlp" for place in range(layers)]
    rows = [
        Row(name, role, products, Cast(format, PerTensor(), rule)) for name in names for role, products, format in CASTS
    ]
    shape = (records, len(rows))
    amax = np.exp2(random.normal(0, 0.3, shape)) * np.resize([4.0, 1.0, 2.0**-12], len(rows))
    usual_sqnr = np.resize([31.5, 31.5, 25.5], len(rows))
    measures = {
        "flushed": random.uniform(0, 1e-3, shape),
        "clipped": random.uniform(0, 1e-5, shape),
        "nonfinite": np.zeros(shape),
        "elements": np.full(shape, 1e4),
        "zeros": np.zeros(shape),
        "rms": amax / 4,
        "sqnr": usual_sqnr + random.normal(0, 0.2, shape),
        "amax": amax,
        "scale_inv": amax / [row.largest for row in rows],
        "assumed": np.ones(shape),
    }
    moved = (records, layers)
    weights = {
        **{name: np.full(moved, np.nan) for name in ("size", "gradient", "outside", "second_moment")},
        **{f"twin_{name}": np.full(moved, np.nan) for name in ("cosine", "norm")},
        "update": 1e-4 * random.uniform(0.5, 2, moved),
        "resolution": random.uniform(50, 100, moved),
        "changed": np.ones(moved),
        "between": np.zeros(moved),
        "first_flushed": np.zeros(moved),
        "second_flushed": np.zeros(moved),
        **{f"master_{name}": np.full(moved, np.nan) for name in ("update", "resolution", "changed")},
    }
    steps = [50 * record for record in range(records)]
    loss = [float(4 + 6 * math.exp(-step / 9000) + random.normal(0, 0.1)) for step in steps]
    scalars = {"loss": (steps, loss), "grad_norm": (steps, [1.0 + loss % 0.1 for loss in loss])}
    events = [(step, "switch", "fp8") for step in steps[1:2]]
    return Record(rows, steps, measures, _normal(amax), names, weights, scalars, events)


def _normal(amax: Any) -> Any:
    """Return how many of 10,000 numbers have each exponent, each further below the amax's half as many."""
    top = np.floor(np.log2(amax)).astype(int) - Counted.lowest
    below = top[..., None] - np.arange(Counted.exponents)
    return np.where(below >= 0, 10000 * 0.5 ** (below + 1.0), 0).round().astype("float32")


def put(record: Record, place: int, **values: Any) -> Record:
    """Give a row's measures these values from the second record on."""
    for name, value in values.items():
        record.measures[name][1:, place] = value
    return record


NAMES = ("first", "second", "third")
BROKEN = "second"


class Network(nn.Module):
    """A model of three layers, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(256, 256) for name in NAMES})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + nn.functional.gelu(layer(nn.functional.rms_norm(x, x.shape[-1:])))
        return x


def recorded(folder: Path, recipe: Recipe | RecipeMap, steps: int = 3) -> Record:
    """The record of a training whose tokens weigh from 1 down to 2^-16."""
    model = Network()
    octavo.convert(model, recipe, select=lambda *_: True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with octavo.inspect.record(model, folder, every=2) as recorder:
        for step in range(steps):
            torch.manual_seed(step)
            x = torch.randn(64, 256)
            loss = (torch.logspace(0, -16, 64, 2) * (model(x) - x.flip(-1)).square().mean(-1)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss, lr=1e-2)
    return octavo.inspect.load(folder)


def narrow_gradients() -> RecipeMap:
    """Gradients of one layer in E4M3 with a margin of 8."""
    normal = recipes.dynamic()
    forward = Cast(E4M3, PerTensor())
    narrow = dataclasses.replace(forward, margin=8)
    changes = {"grad_input": (narrow, forward), "grad_weight": (narrow, forward)}
    return RecipeMap(normal, {f"layers.{BROKEN}": changes})


def mended(recipe: Recipe | RecipeMap, rules: Mapping[str, RecipeRule]) -> RecipeMap:
    """A recipe with a finding's rules after its own."""
    if isinstance(recipe, Recipe):
        return RecipeMap(recipe, rules)
    return RecipeMap(recipe.default, {**recipe.rules, **rules})


INPUT, GRADIENT = 3, 5  # rows of the second layer
NAN = math.nan


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def where(finding: Finding) -> tuple[str, str, str, int]:
    return finding.kind, finding.layer, finding.role, finding.begins


def test_nothing_is_wrong() -> None:
    assert diagnose(healthy(3, 5)) == []
    assert diagnose(healthy(0, 0)) == []


def test_flushed() -> None:
    record = put(healthy(), GRADIENT, flushed=[0.02, 0.071, 0.03])
    record.exponents[2, GRADIENT] = 0
    record.exponents[2, GRADIENT, 2:34] = 100  # 32 octaves below the amax, of about 2^-12
    finding = only(diagnose(record))
    assert where(finding) == ("flushed", "model.layers.1.mlp", "grad_output", 50)
    assert (finding.worst, finding.severity) == (100, pytest.approx(1 + 2 * math.log(7.1, 20)))
    assert "7.1 % are flushed" in finding.cause and "wider than E5M2" in finding.cause
    finding = only(diagnose(put(healthy(records=6), GRADIENT, flushed=[0.02, 0.0, 0.02, 0.05, 0.0])))
    assert (finding.begins, finding.worst) == (150, 200)  # where its worst stretch begins


def test_a_stale_scale_and_what_it_clips() -> None:
    """A stale scale gets a margin, one that is far too old another cast; what fits a margin is no finding."""
    finding = only(diagnose(put(healthy(), INPUT, assumed=[3.0, 6.0, 3.0], clipped=[0.01, 0.03, 0.01])))
    assert where(finding) == ("stale", "model.layers.1.mlp", "input", 50)
    assert finding.severity == pytest.approx(1 + 2 * math.log(30, 20)) and "3 % are clipped" in finding.cause
    assert "margin=3" in finding.remedy
    finding = only(diagnose(put(healthy(), INPUT, assumed=1000.0, clipped=0.5)))
    assert "Delayed" not in finding.remedy.split("'grad_weight'")[0].split("(Cast")[1].split(")), ")[0]
    assert finding.expected.startswith("nothing is clipped")
    grows = only(diagnose(put(healthy(), INPUT, assumed=3.0, clipped=2e-4)))  # small, and in three records in turn
    once = only(diagnose(put(healthy(), INPUT, assumed=[3.0, 3.0, 1.0], clipped=2e-4)))
    assert (grows.level, once.level) == ("warning", "note")
    record = healthy()
    record.rows[INPUT] = dataclasses.replace(record.rows[INPUT], cast=Cast(E4M3, PerTensor(), Delayed(), margin=3))
    assert diagnose(put(record, INPUT, assumed=6.0)) == []


def test_a_low_sqnr() -> None:
    finding = only(diagnose(put(healthy(), GRADIENT, sqnr=[10.0, 15.0, 15.0])))
    assert where(finding)[:3] == ("rounded", "model.layers.1.mlp", "grad_output")
    assert "10.0 dB" in finding.cause and "E4M3" in finding.remedy
    assert only(diagnose(put(healthy(), INPUT, sqnr=10.0))).remedy.count("None") == 2


def test_outliers() -> None:
    record = healthy()
    record.exponents[1:, INPUT] = 0
    record.exponents[1:, INPUT, 30:34] = 1000
    record.exponents[1:, INPUT, 50] = 30  # 2 to 4, as the amax
    finding = only(diagnose(put(record, INPUT, flushed=0.2)))
    assert where(finding) == ("outliers", "model.layers.1.mlp", "input", 50)
    assert "recipes." in finding.expected and "at most" in finding.expected


def test_a_master_keeps_what_the_weight_rounds_off() -> None:
    record = healthy(1, 8)
    record.weights["changed"][:] = 0.01
    record.weights["master_update"][:] = 1e-9
    record.weights["master_changed"][:] = 1.0
    assert diagnose(record) == []
    record.weights["master_changed"][4:] = 0.05
    finding = only(diagnose(record))
    assert where(finding) == ("unmoved", "model.layers.0.mlp", "weight", 200)
    assert "its master's numbers: 95 % of them stay, in 1 of 1 layers" in finding.cause
    assert 'master="fp32"' in finding.remedy


def test_gradients_with_a_margin_they_have_no_use_for(tmp_path: Path) -> None:
    recipe = narrow_gradients()
    first = diagnose(recorded(tmp_path / "broken", recipe))[0]
    assert where(first) == ("flushed", f"layers.{BROKEN}", "grad_output", 0)
    assert first.numbers["flushed"] > 0.3 and "a margin of 8 leaves 8.0 octaves" in first.cause
    record = recorded(tmp_path / "mended", mended(recipe, first.rules))
    assert diagnose(record) == []
    place = next(i for i, row in enumerate(record.rows) if (row.layer, row.role) == (first.layer, "grad_output"))
    foretold = float(first.expected.split(" %")[0]) / 100
    assert record.measures["flushed"][:, place].max() == pytest.approx(foretold, abs=2e-4)


def test_four_bit_blocks_whose_scales_are_rounded_to_0(tmp_path: Path) -> None:
    recipe = RecipeMap(recipes.dynamic(), {f"layers.{BROKEN}": recipes.nvfp4(4, margin=24)})
    record = recorded(tmp_path / "broken", recipe)
    first = diagnose(record)[0]
    assert (first.kind, first.layer) == ("flushed", f"layers.{BROKEN}") and first.numbers["flushed"] == 1
    assert "the scales of all blocks are rounded to 0, because of a margin of 24" in first.cause
    record = recorded(tmp_path / "mended", mended(recipe, first.rules))
    assert record.measures["flushed"][-1, [row.layer == first.layer for row in record.rows]].max() < 0.1


def test_four_bits_flush_what_their_blocks_do(tmp_path: Path) -> None:
    """A GELU's outputs lie far below their block's amax; where a block's scale is lost, the SQNR tells."""
    for margin, kinds in ((0, []), (16, ["flushed"])):
        torch.manual_seed(0)
        recipe = octavo.recipes.nvfp4(history_length=16, margin=margin)
        layers = (octavo.nn.Linear(64, 128, recipe=recipe), octavo.nn.Linear(128, 64, recipe=recipe))
        model = nn.Sequential(layers[0], nn.GELU(), layers[1])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with octavo.inspect.record(model, folder := tmp_path / str(margin), 1, optimizer=optimizer) as recorder:
            for _ in range(4):
                x = torch.randn(256, 64)
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss=loss)
        record = octavo.inspect.load(folder)
        findings = octavo.inspect.diagnose(record)
        assert sorted({each.kind for each in findings if each.level != "note"}) == kinds
        assert octavo.inspect.verdict(record, findings).startswith(
            "FP8 is the cause" if kinds else "FP8 changes little"
        )
