"""What is found in records that are made, and in trainings that are broken on purpose; and that remedies mend them."""

import dataclasses
import math
from pathlib import Path

import pytest

import octavo
from octavo import E4M3, Cast, Delayed, PerTensor, recipes
from octavo.inspect import Finding, diagnose

np = pytest.importorskip("numpy")

from collections.abc import Mapping  # noqa: E402

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from octavo import Recipe, RecipeMap  # noqa: E402
from octavo.inspect import Record  # noqa: E402
from octavo.inspect.remedies import together  # noqa: E402
from octavo.scaling.recipe_map import RecipeRule  # noqa: E402
from tests.support.made_records import made, put  # noqa: E402

NAMES = ("first", "second", "third")
BROKEN = "second"
OUTLIER = 2.0**14


class Network(nn.Module):
    """Three layers, each behind a norm; the input of one may be given an outlier channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(256, 256) for name in NAMES})
        self.outlier = 1.0
        with torch.no_grad():  # what an outlier channel adds to the layer's output is no more than others do
            self.layers[BROKEN].weight[:, 0] /= OUTLIER

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            h = nn.functional.rms_norm(x, x.shape[-1:])
            if name == BROKEN and self.outlier != 1.0:
                h = h * torch.cat([torch.tensor([self.outlier]), torch.ones(255)])
            x = x + nn.functional.gelu(layer(h))
        return x


def recorded(
    folder: Path,
    recipe: Recipe | RecipeMap,
    steps: int = 24,
    every: int = 2,
    lr: float = 1e-2,
    outlier_at: int | None = None,
    spike_at: int | None = None,
    before_step: str = "",
) -> Record:
    """The record of a training whose tokens weigh from 1 down to 2^-16; ``before_step``: Python, run before each."""
    model = Network()
    octavo.convert(model, recipe, select=lambda *_: True)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with octavo.inspect.record(model, folder, every=every) as recorder:
        for step in range(steps):
            torch.manual_seed(step)
            model.outlier = OUTLIER if outlier_at is not None and step >= outlier_at else 1.0
            optimizer.param_groups[0]["lr"] = 100.0 if step == spike_at else lr
            x = torch.randn(64, 256)
            loss = (torch.logspace(0, -16, 64, 2) * (model(x) - x.flip(-1)).square().mean(-1)).mean()
            loss.backward()
            exec(before_step)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss, lr=optimizer.param_groups[0]["lr"])
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


INPUT, WEIGHT, GRADIENT = 3, 4, 5  # rows of the second layer
NAN = math.nan


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


def where(found: Finding) -> tuple[str, str, str, int]:
    return found.kind, found.layer, found.role, found.begins


def test_nothing_is_wrong() -> None:
    assert diagnose(made(3, 5)) == []
    assert diagnose(made(0, 0)) == []


def test_flushed() -> None:
    record = put(made(), GRADIENT, flushed=[0.02, 0.071, 0.03])
    record.exponents[2, GRADIENT] = 0
    record.exponents[2, GRADIENT, 2:34] = 100  # 32 octaves below the amax, of about 2^-12
    found = only(diagnose(record))
    assert where(found) == ("flushed", "model.layers.1.mlp", "grad_output", 50)
    assert (found.worst, found.severity) == (100, pytest.approx(7.1))
    assert "7.1 % are flushed" in found.cause and "wider than E5M2" in found.cause


def test_a_finding_begins_where_its_worst_stretch_does() -> None:
    record = put(made(records=6), GRADIENT, flushed=[0.02, 0.0, 0.02, 0.05, 0.0])
    found = only(diagnose(record))
    assert (found.begins, found.worst) == (150, 200)


def test_a_stale_scale_and_what_it_clips() -> None:
    found = only(diagnose(put(made(), INPUT, assumed=[3.0, 6.0, 3.0], clipped=[0.01, 0.03, 0.01])))
    assert where(found) == ("stale", "model.layers.1.mlp", "input", 50)
    assert found.severity == pytest.approx(30) and "3 % are clipped" in found.cause
    assert "margin=3" in found.remedy


def test_a_margin_is_room_and_not_stale() -> None:
    record = made()
    record.rows[INPUT] = dataclasses.replace(record.rows[INPUT], cast=Cast(E4M3, PerTensor(), Delayed(), margin=3))
    assert diagnose(put(record, INPUT, assumed=6.0)) == []


def test_a_scale_that_is_far_too_old_is_given_up() -> None:
    found = only(diagnose(put(made(), INPUT, assumed=1000.0, clipped=0.5)))
    assert "Delayed" not in found.remedy.split("'grad_weight'")[0].split("(Cast")[1].split(")), ")[0]
    assert found.expected.startswith("nothing is clipped")


def test_what_is_not_finite_is_found_once_where_it_began() -> None:
    record = made(3, 5)
    for place, at in ((8, 2), (5, 2), (2, 3), (0, 3)):  # gradients of the third and second layer, then what follows
        record.measures["nonfinite"][at:, place] = 0.5
    found = only(diagnose(record))
    assert (found.role, found.layer[13:14], found.begins) == ("grad_output", "2", 100)
    assert "; soon those of 3 more casts in 2 layers too" in found.cause


def test_a_fault_that_begins_much_later_is_another() -> None:
    record = made(3, 9)
    for place, at in ((5, 1), (2, 2), (0, 7)):
        record.measures["nonfinite"][at:, place] = 0.5
    first, second = diagnose(record)
    assert (first.begins, second.begins) == (50, 350) and "soon" not in second.cause
    assert "; soon those of 1 more cast in 1 layer too" in first.cause


def test_after_what_is_not_finite_nothing_counts() -> None:
    record = put(made(), INPUT, nonfinite=1.0, sqnr=NAN, flushed=1.0)
    assert only(diagnose(record)).kind == "nonfinite"


def test_a_low_sqnr() -> None:
    found = only(diagnose(put(made(), GRADIENT, sqnr=[10.0, 15.0, 15.0])))
    assert where(found)[:3] == ("rounded", "model.layers.1.mlp", "grad_output")
    assert "10.0 dB" in found.cause and "E4M3" in found.remedy
    assert only(diagnose(put(made(), INPUT, sqnr=10.0))).remedy.count("None") == 2


def test_outliers() -> None:
    record = made()
    record.exponents[1:, INPUT] = 0
    record.exponents[1:, INPUT, 30:34] = 1000
    record.exponents[1:, INPUT, 50] = 30  # 2 to 4, as the amax
    found = only(diagnose(put(record, INPUT, flushed=0.2)))
    assert where(found) == ("outliers", "model.layers.1.mlp", "input", 50)
    assert "recipes." in found.expected and "at most" in found.expected


def test_weights_and_moments() -> None:
    record = made(3, 12)
    record.weights["changed"][6:, 1] = 0.01
    record.weights["second_flushed"][3:, 2] = 0.3
    record.weights["update"][9, 0] *= 1000
    found = {finding.kind: finding for finding in diagnose(record)}
    assert {kind: (each.layer[13], each.begins) for kind, each in found.items()} == {
        "unmoved": ("1", 300),
        "second moments": ("2", 150),
        "jump": ("0", 450),
    }
    assert all("octavo." in each.remedy for each in found.values())


def test_a_master_keeps_what_the_weight_rounds_off() -> None:
    record = made(1, 8)
    record.weights["changed"][:] = 0.01
    record.weights["master_update"][:] = 1e-9
    record.weights["master_changed"][:] = 1.0
    assert diagnose(record) == []
    record.weights["master_changed"][4:] = 0.05
    found = only(diagnose(record))
    assert where(found) == ("unmoved", "model.layers.0.mlp", "weight", 200)
    assert "the master's numbers: 95 % of them and 99 % of the weight's stay" in found.cause
    assert 'master="fp32"' in found.remedy


def test_gradients_with_a_margin_they_have_no_use_for(tmp_path: Path) -> None:
    recipe = narrow_gradients()
    first = diagnose(recorded(tmp_path / "broken", recipe, steps=3))[0]
    assert where(first) == ("flushed", f"layers.{BROKEN}", "grad_output", 0)
    assert first.numbers["flushed"] > 0.3 and "a margin of 8 leaves 8.0 octaves" in first.cause
    record = recorded(tmp_path / "mended", mended(recipe, first.rules), steps=3)
    assert diagnose(record) == []
    place = next(i for i, row in enumerate(record.rows) if (row.layer, row.role) == (first.layer, "grad_output"))
    foretold = float(first.expected.split(" %")[0]) / 100
    assert record.measures["flushed"][:, place].max() == pytest.approx(foretold, abs=2e-4)


@pytest.mark.full
def test_an_outlier_channel_from_a_step_on(tmp_path: Path) -> None:
    case = {"steps": 112, "every": 10, "outlier_at": 100, "lr": 1e-6}
    first = diagnose(recorded(tmp_path / "broken", recipes.dynamic(), **case))[0]
    assert where(first) == ("outliers", f"layers.{BROKEN}", "input", 100)
    found = diagnose(recorded(tmp_path / "mended", mended(recipes.dynamic(), first.rules), **case))
    assert not any(each.kind in ("outliers", "flushed") for each in found)


def test_a_jump_says_what_rose() -> None:
    record = made(1, 12)
    record.weights["update"][9, 0] *= 1000
    found = only(diagnose(record))
    assert "Recovery" in found.remedy and found.expected.endswith("; record lr to see what rose")
    record.scalars["grad_norm"][1][9] *= 100
    found = only(diagnose(record))
    assert "the gradients' norm rose" in found.cause and "clip_grad_norm_(model.parameters(), " in found.remedy
    record.scalars["lr"] = record.steps, [1e-3] * 9 + [0.1] * 3
    found = only(diagnose(record))
    assert "the learning rate rose from 0.001 to 0.1" in found.cause and "min(group" in found.remedy
    record.scalars["learning_rate"] = record.scalars.pop("lr")  # as transformers' Trainer calls it
    assert only(diagnose(record)).cause == found.cause
    record.weights["update"][10, 0] *= 2000  # the step after the rise is the worst
    found = only(diagnose(record))
    assert (found.begins, found.worst) == (450, 500) and "the learning rate rose from 0.001 to 0.1" in found.cause
    flat = record.steps, [1.0] * 12
    record.scalars.update(grad_norm=flat, learning_rate=flat)
    assert only(diagnose(record)).expected.endswith("; neither lr nor grad_norm rose")


@pytest.mark.full
def test_a_spike_of_the_learning_rate(tmp_path: Path) -> None:
    case = {"every": 1, "spike_at": 13}
    first, *stale = diagnose(recorded(tmp_path / "broken", recipes.delayed(), **case))
    assert (first.kind, first.begins) == ("jump", 13)
    assert "rose from 0.01 to 100; so in 3 of 3 layers" in first.cause
    assert {(each.kind, each.role, each.begins) for each in stale} == {("stale", "weight", 13)} and len(stale) == 3
    bounded = recorded(tmp_path / "bounded", recipes.delayed(), **case, before_step=first.remedy)
    assert diagnose(bounded) == []
    without = recorded(tmp_path / "without", recipes.delayed(), every=1)
    assert bounded.scalars["loss"][1] == pytest.approx(without.scalars["loss"][1], rel=1e-3)
    rules = together(each.rules for each in stale)
    record = recorded(tmp_path / "mended", octavo.RecipeMap(recipes.delayed(), rules), **case)
    assert [each.kind for each in diagnose(record)] == ["jump"]  # the learning rate is what it was
