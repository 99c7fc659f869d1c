"""The table: two lists and the one function that builds all its cells, the sample of the default set, and the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tests.support.seams.alone
import tests.support.seams.on_ranks  # noqa: F401
from tests.support.helpers import sqnr
from tests.support.seams.alone import COMPILED
from tests.support.seams.features import FEATURES, LLAMA, OF_RECIPES, Feature
from tests.support.seams.situations import SITUATIONS, Documented, Refused, Situation, Sound, Verdict
from tests.support.seams.training_run import Role, TrainingRun
from tests.support.seams.twins import computing_apart

PAGE = Path(__file__).parents[3] / "docs/combinations.md"
Cell = tuple[str, str]  # names of a feature and of a situation
HISTORY_COSTS = 6  # dB at most, where tensors are up to twice as large as in the steps before
OPEN: dict[Cell, str] = {}  # cells whose verdict does not hold yet, each with the defect's sign; to be emptied


def all_cells() -> list[Cell]:
    return [(feature, situation) for situation in SITUATIONS for feature in FEATURES]


def verdict_of(cell: Cell) -> Verdict:
    """The verdict of a cell of the table."""
    feature, situation = FEATURES[cell[0]], SITUATIONS[cell[1]]
    return situation.exceptions.get(feature.name) or (not situation.ranks and feature.alone) or situation.verdict


def run(feature: Feature, situation: Situation, role: Role, mesh: Any) -> dict[str, Tensor]:
    """The trace of the situation's program."""
    sharded = situation.group.startswith("Parts of") or any(name in situation.name for name in ("FSDP", "ZeRO"))
    with computing_apart(sharded or feature.name == "KeptWeights"):
        training = TrainingRun(feature, role, mesh)
        with training.closing:
            situation.program(training)
            return training.finish()


def fault(mesh: Any, feature_name: str, situation_name: str) -> str:
    """Return what is wrong with a cell, or "" if nothing is; on ranks all call this."""
    verdict = verdict_of((feature_name, situation_name))
    feature, situation = FEATURES[feature_name], SITUATIONS[situation_name]
    if isinstance(verdict, Documented):
        return ""
    try:
        trace = run(feature, situation, "library", mesh)
    except Exception as error:
        if not isinstance(verdict, Refused):
            raise
        if not isinstance(error, verdict.error) or re.search(verdict.remedy, str(error)) is None:
            return f"it shall raise {verdict.error.__name__} that names {verdict.remedy!r}: {error!r}"
        return ""
    if isinstance(verdict, Refused):
        return f"it shall raise {verdict.error.__name__}"
    has_vectors = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    if isinstance(verdict, Sound) and not (verdict.exact_with_vectors and has_vectors):
        return noise(trace, run(feature, situation, "float64", mesh), verdict)
    said = differences(trace, run(feature, situation, "twin", mesh))
    if said or not feature.has_history:
        return said
    unknown = ("weight", *situation.grows, *feature.by_chance)
    comparable = {name: value for name, value in trace.items() if not name.startswith(unknown)}
    return lost(comparable, *(run(feature, situation, role, mesh) for role in ("twin that forgets", "float64")))


def differences(trace: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Return where the library's trace is not its twin's, bit for bit, in the order of the program; or ""."""
    if missing := trace.keys() - wanted.keys():
        return f"the twin has no {sorted(missing)}"
    if not any(name.startswith("output") for name in trace):
        return "the trace has no output"
    off = [name for name, value in trace.items() if not torch.equal(value.float(), wanted[name].float())]
    if not off:
        return ""
    ratio = sqnr(trace[off[0]], wanted[off[0]])
    return f"{len(off)} of {len(trace)} differ from the twin's, first {off[0]}: {ratio:.1f} dB"


def lost(trace: dict[str, Tensor], anew: dict[str, Tensor], exact: dict[str, Tensor]) -> str:
    """Return which output or input's gradient is worse with a history than with each tensor's own amax; or ""."""
    for name, value in trace.items():
        ratio, ratio_anew = sqnr(value, exact[name]), sqnr(anew[name], exact[name])
        if not ratio > ratio_anew - HISTORY_COSTS:
            return f"{name} has {ratio:.1f} dB, and {ratio_anew:.1f} if each tensor is cast by its own amax"
    return ""


def noise(trace: dict[str, Tensor], wanted: dict[str, Tensor], verdict: Sound) -> str:
    """Return which output or input's gradient is further from float64's than the verdict allows; or ""."""
    ratios = {name: sqnr(value, wanted[name]) for name, value in trace.items() if not name.startswith("weight")}
    worst = min(ratios, key=lambda name: ratios[name])
    return "" if ratios[worst] >= verdict.db else f"{worst} has {ratios[worst]:.1f} dB, {verdict.db} are promised"


def sample() -> set[Cell]:
    """Return each situation once, each feature twice or more, delayed scaling wherever one process runs eager code.

    And where ranks' delayed states become one, and in a pipeline; another recipe, which differs in its casts alone, is
    there too only if it would else be there once. What costs seconds is left to the full set where the
    sample has it in parts: decoder layers on ranks, whose parts are those of ``KNOWN``; histories on four ranks; the
    graph of each phase of a schedule, which tests/compile/test_around.py compiles.
    """
    features, counts, chosen = list(FEATURES), dict.fromkeys(FEATURES, 0), set()

    def usable(cell: Cell) -> bool:
        feature, situation = FEATURES[cell[0]], SITUATIONS[cell[1]]
        computes = not isinstance(verdict_of(cell), Documented) and cell not in OPEN and cell not in chosen
        costly = (situation.ranks and feature.name in LLAMA) or (len(situation.ranks) > 1 and feature.has_history)
        return computes and not (costly or situation.slow or (cell[0], situation.group) == ("schedule", COMPILED))

    def take(cells: list[Cell]) -> None:
        cell = min(cells, key=lambda cell: counts[cell[0]])
        chosen.add(cell)
        counts[cell[0]] += 1

    for number, situation in enumerate(SITUATIONS):
        turned = features[number % len(features) :] + features[: number % len(features)]
        if cells := [cell for feature in turned if usable(cell := (feature, situation))]:
            take(cells)
    for feature in features:
        cells = [cell for situation in SITUATIONS if usable(cell := (feature, situation))]
        for cell in cells[: max(0, 2 - counts[feature])]:
            take([cell])
    delayed = [situation for situation, one in SITUATIONS.items() if not one.ranks and one.group != COMPILED]
    delayed += ["FSDP2, a checkpoint of two ranks on one", "pipeline, zero-bubble V"]
    alike = {cell for situation in delayed if usable(cell := ("delayed", situation))}
    for cell in sorted(chosen):
        if cell[0] in OF_RECIPES and ("delayed", cell[1]) in alike and counts[cell[0]] > 2:
            chosen.remove(cell)
            counts[cell[0]] -= 1
    return chosen | alike
