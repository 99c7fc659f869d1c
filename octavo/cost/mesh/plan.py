"""``octavo plan --gpus``: a step in each recipe on a mesh, as text: times, memory, what limits it, what to change.

``plan`` makes the steps of the flags, ``fastest_mesh`` and ``improvements`` look for better meshes, and
``MeshPlan.text`` writes all.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from octavo.cost.estimate import estimate
from octavo.cost.from_flags import tokens_of
from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.settings import RANKS, MeshLayout, Precision, mesh_of
from octavo.cost.mesh.shapes import BF16, CODE, FLOAT, shapes_of
from octavo.cost.mesh.step import RankStep
from octavo.cost.rates import IN_BF16, PlanError, Rates
from octavo.cost.steps import STORED
from octavo.cost.text import GIB, folded
from octavo.cost.work import COMPARED, work_of

WORTH_NAMING = 1.02  # of the speed, from which on a change is worth naming


class MeshPlan(NamedTuple):
    """A step on a mesh in each recipe, compiled and in eager; the best that is compiled; what to change, best first.

    ``other``: a mesh on which a compiled step fits, if none does on the one that was asked for.
    """

    steps: Mapping[str, Sequence[RankStep]]
    best: RankStep
    changes: Sequence[tuple[str, RankStep]]
    other: RankStep | None

    def text(self) -> str:
        """Return tables, whether the step fits, what limits it, and what to change."""
        best, name, rates = self.best, self.best.precision.name, self.best.hardware.rates
        size, memory = best.layout.micro_batch_size, best.hardware.memory
        says = f"{name}, compiled, is the fastest that fits" if best.fits else f"None fits: {name} is the smallest"
        return "\n".join(
            [
                f"{flags(best)}, micro-batches of {size} sequences, by the rates of {rates.device} ({rates.source})",
                *("", folded(self._times()), "", folded(self._sizes()), ""),
                f"{says}: it needs {best.bytes_needed / GIB:,.0f} GiB, {rates.device} has {memory / GIB:.0f}.",
                f"{name}, compiled: {limit(best)}.",
                *self._what_to_change(),
            ]
        )

    def _rows(self) -> Iterator[tuple[str, RankStep, float]]:
        """Yield (name, step, its share of bf16's time with these kernels) for each row of the tables."""
        for kernels, by_recipe in self.steps.items():
            for each in by_recipe:
                yield f"{each.precision.name} {kernels}", each, each.step.seconds / by_recipe[0].step.seconds

    def _times(self) -> list[list[str]]:
        """Return the rows of milliseconds a step by kind; of collectives also how long ranks wait for them."""
        step = self.best.step
        kinds = list(step.seconds_by_kind)
        waits = [kind for kind, wait in step.waits.items() if wait.seconds]
        header = ["ms a step", *kinds, *(f"{kind}: waits of all" for kind in waits), "bubble", "optimizer"]
        rows = [[*header, "total", "of bf16", "TFLOP/s"]]
        for name, candidate, share in self._rows():
            step = candidate.step
            row = [f"{1e3 * step.seconds_by_kind[kind]:.1f}" for kind in kinds]
            row += [f"{1e3 * step.waits[kind].exposed:.1f} of {1e3 * step.waits[kind].seconds:.1f}" for kind in waits]
            row += [f"{1e3 * seconds:.1f}" for seconds in (step.bubble, step.optimizer, step.seconds)]
            rows.append([name, *row, f"{share:.2f}", f"{step.tflops:.0f}"])
        return rows

    def _sizes(self) -> list[list[str]]:
        """Return the rows of GiB a rank by kind, and whether they fit."""
        rows = [["GiB a rank", *self.best.memory, "total", "fits"]]
        for name, candidate, _ in self._rows():
            sizes = [f"{size / GIB:.2f}" for size in (*candidate.memory.values(), candidate.bytes_needed)]
            rows.append([name, *sizes, "yes" if candidate.fits else "no"])
        return rows

    def _what_to_change(self) -> Iterator[str]:
        """Yield a line for each change, and one for a mesh on which the step fits, if it doesn't on this one."""
        for words, other in self.changes:
            speed = other.step.tflops / self.best.step.tflops
            gain = f"{speed:.2f} times the speed, {other.bytes_needed / GIB:,.0f} GiB"
            yield f"change first: {words}: {gain}{'' if other.fits else ', still too much'}"
        if self.other is not None:
            yield f"{self.other.precision.name} fits with {flags(self.other)}: {self.other.bytes_needed / GIB:.0f} GiB"


def limit(candidate: RankStep) -> str:
    """Return a text of what takes longest, and of the link that ranks wait for."""
    step = candidate.step
    times = {**step.seconds_by_kind, "bubble": step.bubble, "optimizer": step.optimizer}
    times |= {f"{kind}'s collectives": wait.exposed for kind, wait in step.waits.items()}
    longest = max(times, key=times.__getitem__)
    kind, wait = max(step.waits.items(), key=lambda item: item[1].exposed)
    link_name = {"NVLink": "NVLink inside a server", "network": "the network between servers"}[wait.link]
    share = f"{times[longest] / step.seconds:.0%} of the step is {longest}"
    if (waits := wait.exposed / step.seconds) < 0.01:
        return f"{share}; no link limits"
    waiting = f"ranks wait for {kind}'s collectives in {waits:.0%} of the step"
    return f"{share}; the link that limits is {link_name}, on which {waiting}"


def flags(candidate: RankStep) -> str:
    """Return the command's flags for a step."""
    now = candidate.layout
    in_fp8 = " --checkpoint-in-fp8" * (candidate.precision.region_bytes < BF16)
    return f"--mesh {now} --micro-batches {now.micro_batches} --recompute {now.recomputed:g}{in_fp8}"


def plan(
    model: nn.Module,
    rates: Rates,
    *,
    gpus: int,
    sequences: int,
    context: int,
    mesh: str | None,
    micro_batches: int | None,
    recompute: float | None,
    fuse: bool,
    checkpoint_in_fp8: bool,
    algorithm: str,
) -> MeshPlan:
    """Return a step in each recipe, eager and compiled, on a mesh of these ranks or on the fastest that fits.

    Args:
        sequences: of a step, each of ``context`` tokens.
        mesh: ranks by kind, as for ``mesh_of``; None: any.
        micro_batches: of a rank in a step; None: one for each sequence, or without ``mesh`` what is fastest.
        recompute: share of layers whose forward runs again; None: 0, or without ``mesh`` 0 or 1, what is faster.
        fuse, checkpoint_in_fp8, algorithm: as the flags of ``octavo plan``.

    Raises:
        PlanError: for options that contradict each other, or a device that is no GPU.
    """
    if gpus < 1 or not 0 <= (recompute or 0) <= 1:
        raise PlanError(f"--gpus {gpus} --recompute {recompute or 0:g}: one GPU at least, and a share from 0 to 1")
    if micro_batches is not None and micro_batches < 1:
        raise PlanError(f"--micro-batches {micro_batches}: at least one")
    hardware = Hardware.of(rates)
    ranks = mesh_of(mesh, gpus) if mesh else dict.fromkeys(RANKS, 1)
    del ranks["fsdp"]  # MeshLayout derives it: the ranks that are left
    layout = MeshLayout(gpus, sequences, context, recomputed=recompute or 0.0, **ranks)
    if mesh:
        layout = layout.in_micro_batches(micro_batches)
    inputs = tokens_of(context, context)
    work = work_of(model, inputs)

    def rank_step(name: str, compiled: bool) -> RankStep:
        in_fp8, saved = name != IN_BF16, None
        if not compiled:
            recipe = name if in_fp8 else None
            saved = estimate(model, inputs, recipe, rates, work=work, fuse=in_fp8 and fuse).memory.saved
        shapes = shapes_of(model, work, context, saved)
        region_bytes = fp8_region_bytes(shapes.width) if checkpoint_in_fp8 else BF16
        precision = Precision(name, name, gathers=in_fp8, pairs=in_fp8, region_bytes=region_bytes, algorithm=algorithm)
        return RankStep(shapes, layout, precision, hardware)

    compiled = [rank_step(name, True) for name in (IN_BF16, *COMPARED)]
    other = None
    if not mesh:
        layout = max((fastest_mesh(each, micro_batches, recompute) for each in compiled), key=merit).layout
        compiled = [replace(each, layout=layout) for each in compiled]
    elif not any(each.fits for each in compiled):
        other = max(map(fastest_mesh, compiled), key=merit)
    steps = {"compiled": compiled, "eager": [rank_step(each.precision.name, False) for each in compiled]}
    best = max(compiled, key=merit)
    return MeshPlan(steps, best, improvements(best), other if other and other.fits else None)


def merit(candidate: RankStep) -> tuple[bool, float]:
    """Return a key that is largest for the fastest step that fits; if none fits, for the smallest."""
    return candidate.fits, candidate.step.tflops if candidate.fits else -candidate.bytes_needed


def fp8_region_bytes(width: int) -> float:
    """Return the bytes an element that octavo.checkpoint_in_fp8 keeps: a code, and its share of a row's scale."""
    return CODE + FLOAT / width


def with_changes(
    candidate: RankStep, precision: Mapping[str, Any] | None = None, micro_batches: int | None = None, **layout: Any
) -> Iterator[RankStep]:
    """Yield the step with these changes, and in so many micro-batches unless None, if the model divides so."""
    with contextlib.suppress(PlanError, ZeroDivisionError):
        other_layout = replace(candidate.layout, **layout).in_micro_batches(micro_batches)
        yield replace(candidate, layout=other_layout, precision=replace(candidate.precision, **precision or {}))


def fastest_mesh(start: RankStep, micro_batches: int | None = None, recompute: float | None = None) -> RankStep:
    """Return the best step on all meshes of powers of two: with so many micro-batches, and this share recomputed.

    None for either leaves it open: micro-batches have 1, 2, 4 or 8 sequences, and all layers are recomputed or none.
    Raises PlanError where no mesh has so many micro-batches.
    """
    candidates = [start] if micro_batches is None and not recompute else []
    has_experts = any(weight.split == "experts" for weight in start.model_shapes.block)
    choices: dict[str, Sequence[Any]] = {
        "tensor": (1, 2, 4, 8),
        "pipeline": (1, 2, 4, 8, 16),
        "expert": (1, 2, 4, 8, 16, 32, 64) if has_experts else (1,),
        "micro_batch_size": (1, 2, 4, 8) if micro_batches is None else (1,),
        "recomputed": (0.0, 1.0) if recompute is None else (recompute,),
    }
    for values in itertools.product(*choices.values()):
        layout = dict(zip(choices, values, strict=True))
        for replicate in {1, max(1, start.layout.gpus // (layout["pipeline"] * start.hardware.server))}:
            candidates += with_changes(start, None, micro_batches, replicate=replicate, context=1, **layout)
    if not candidates:
        raise PlanError(f"--micro-batches {micro_batches}: on no mesh of {start.layout.gpus} GPUs has a rank so many")
    return max(candidates, key=merit)


def improvements(candidate: RankStep) -> list[tuple[str, RankStep]]:
    """Return at most three changes, best first: those that make a step fit, or smaller; faster, if it fits already."""
    least = (True, WORTH_NAMING * candidate.step.tflops) if candidate.fits else merit(candidate)
    changes = [(words, other) for words, ways in _neighbours(candidate) for other in ways if merit(other) > least]
    return sorted(changes, key=lambda change: merit(change[1]), reverse=True)[:3]


def _neighbours(candidate: RankStep) -> Iterator[tuple[str, Iterator[RankStep]]]:
    """Yield changes, each with the step that has it, if there is one: an option, or ranks of one kind for another's."""
    layout, ranks = candidate.layout, candidate.layout.ranks
    yield "checkpoint activations (--recompute 1)", with_changes(candidate, recomputed=1.0)
    yield "keep activations (--recompute 0)", with_changes(candidate, recomputed=0.0)
    in_fp8 = {"region_bytes": fp8_region_bytes(candidate.model_shapes.width)}
    yield "octavo.checkpoint_in_fp8 in the place of torch's", with_changes(candidate, in_fp8)
    for size in (2 * layout.micro_batch_size, layout.micro_batch_size // 2):
        yield f"micro-batches of {size} sequences", with_changes(candidate, micro_batch_size=size)
    yield "twice as many tokens a step", with_changes(candidate, sequences=2 * layout.sequences)
    reduced = with_changes(candidate, {"reduction": "by server"})
    yield "gradients reduced in FP8 (octavo.distributed.Fp8Reduction)", reduced
    if candidate.precision.recipe in STORED:
        yield "weights, masters and moments in FP8", with_changes(candidate, {"state": "FP8"})
    for more, fewer in itertools.permutations(RANKS[:-1], 2):
        if ranks[fewer] % 2 == 0:
            kinds: dict[str, Any] = ranks | {more: 2 * ranks[more], fewer: ranks[fewer] // 2}
            words = f"more {more} ranks ({more}={kinds[more]}, {fewer}={kinds[fewer]})"
            yield words, with_changes(candidate, **{kind: count for kind, count in kinds.items() if kind != "fsdp"})
