"""The search among meshes: which step is better, the best of all meshes, and the changes that make one better."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.cost.mesh.settings import RANKS
from octavo.cost.mesh.step import Stage
from octavo.cost.rates import PlanError
from octavo.cost.steps import STORED

WORTH_NAMING = 1.02  # of the speed, from which on a change is worth naming


def order(stage: Stage) -> tuple[bool, float]:
    """Return a key that is largest for the fastest step that fits; if none fits, for the smallest."""
    return stage.fits, stage.step.tflops if stage.fits else -stage.size


def in_pairs(width: int) -> float:
    """Return the bytes an element that octavo.checkpoint_in_fp8 keeps: a code, and its share of a row's scale."""
    return 1 + 4 / width


def changed(stage: Stage, precision: Mapping[str, Any] | None = None, **layout: Any) -> Iterator[Stage]:
    """Yield the step with these changes, if the model divides so."""
    with contextlib.suppress(PlanError, ZeroDivisionError):
        other = replace(stage.precision, **precision or {})
        yield replace(stage, layout=replace(stage.layout, **layout), precision=other)


def searched(stage: Stage) -> Stage:
    """Return the best step on all meshes of powers of two, with and without recomputation."""
    powers, stages = [1 << power for power in range(7)], [stage]
    experts = powers if any(weight.split == "experts" for weight in stage.whole.block) else [1]
    choices: dict[str, Sequence[Any]] = {"tensor": powers[:4], "pipeline": powers[:5], "expert": experts}
    choices |= {"batch": powers[:4], "recomputed": (0.0, 1.0)}
    for values in itertools.product(*choices.values()):
        layout = dict(zip(choices, values, strict=True))
        for replicate in {1, max(1, stage.layout.gpus // (layout["pipeline"] * stage.hardware.server))}:
            stages += changed(stage, replicate=replicate, context=1, **layout)
    return max(stages, key=order)


def better(stage: Stage) -> list[tuple[str, Stage]]:
    """Return at most three changes, best first: those that make a step fit, or smaller; faster, if it fits already."""
    candidates = [(words, step) for words, steps in _neighbours(stage) for step in steps if order(step) > order(stage)]
    if stage.fits:
        speed = WORTH_NAMING * stage.step.tflops
        candidates = [(words, step) for words, step in candidates if step.step.tflops > speed]
    return sorted(candidates, key=lambda candidate: order(candidate[1]), reverse=True)[:3]


def _neighbours(stage: Stage) -> Iterator[tuple[str, Iterator[Stage]]]:
    """Yield changes, each with the step that has it, if there is one: an option, or ranks of one kind for another's."""
    layout, ranks = stage.layout, stage.layout.ranks
    yield "checkpoint activations (--recompute 1)", changed(stage, recomputed=1.0)
    yield "keep activations (--recompute 0)", changed(stage, recomputed=0.0)
    regions = {"regions": in_pairs(stage.whole.width)}
    yield "octavo.checkpoint_in_fp8 in the place of torch's", changed(stage, regions)
    yield f"micro-batches of {2 * layout.batch} sequences", changed(stage, batch=2 * layout.batch)
    yield f"micro-batches of {layout.batch // 2} sequences", changed(stage, batch=layout.batch // 2)
    yield "twice as many tokens a step", changed(stage, sequences=2 * layout.sequences)
    yield "gradients reduced in FP8 (octavo.distributed.Fp8Reduction)", changed(stage, {"reduction": 2})
    if stage.precision.recipe in STORED:
        yield "weights, masters and moments in FP8", changed(stage, {"state": "FP8"})
    for more, fewer in itertools.permutations(RANKS[:-1], 2):
        if ranks[fewer] % 2 == 0:
            kinds: dict[str, Any] = ranks | {more: 2 * ranks[more], fewer: ranks[fewer] // 2}
            words = f"more {more} ranks ({more}={kinds[more]}, {fewer}={kinds[fewer]})"
            yield words, changed(stage, **{kind: count for kind, count in kinds.items() if kind != "fsdp"})
