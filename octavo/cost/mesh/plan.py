"""``octavo plan --gpus``: a step in each recipe on a mesh, as text: times, memory, what limits it, what to change.

``plan`` makes the steps of the flags, and ``MeshPlan.text`` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from octavo.cost.estimate import estimate
from octavo.cost.from_flags import tokens_of
from octavo.cost.mesh.search import better, in_pairs, order, searched
from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.settings import RANKS, MeshLayout, Precision, mesh_of
from octavo.cost.mesh.shapes import BF16, shapes_of, shortened
from octavo.cost.mesh.step import Stage
from octavo.cost.rates import IN_BF16, PlanError, Rates
from octavo.cost.steps import RECIPES
from octavo.cost.text import GIB, folded
from octavo.cost.work import work_of


class MeshPlan(NamedTuple):
    """A step on a mesh in each recipe, compiled and in eager; the best that is compiled; what to change, best first.

    ``other``: a mesh on which a compiled step fits, if none does on the one that was asked for.
    """

    steps: Mapping[str, Sequence[Stage]]
    best: Stage
    changes: Sequence[tuple[str, Stage]]
    other: Stage | None

    def text(self) -> str:
        """Return tables, whether the step fits, what limits it, and what to change."""
        best, hardware, name = self.best, self.best.hardware, self.best.precision.name
        batch, rates = best.layout.batch, hardware.rates
        says = f"{name}, compiled, is the fastest that fits" if best.fits else f"None fits: {name} is the smallest"
        return "\n".join(
            [
                f"{flags(best)}, micro-batches of {batch} sequences, by the rates of {rates.device} ({rates.source})",
                *("", folded(self._times()), "", folded(self._sizes()), ""),
                f"{says}: it needs {best.size / GIB:,.0f} GiB, {rates.device} has {hardware.memory / GIB:.0f}.",
                f"{name}, compiled: {limit(best)}.",
                *self._what_to_change(),
            ]
        )

    def _rows(self) -> Iterator[tuple[str, Stage, float]]:
        """Yield (name, step, its share of bf16's time with these kernels) for each row of the tables."""
        for kernels, stages in self.steps.items():
            for stage in stages:
                yield f"{stage.precision.name} {kernels}", stage, stage.step.seconds / stages[0].step.seconds

    def _times(self) -> list[list[str]]:
        """Return the rows of milliseconds a step by kind; of collectives also how long ranks wait for them."""
        step = self.best.step
        kinds, waits = list(step.kinds), [kind for kind, wait in step.waits.items() if wait.seconds]
        header = ["ms a step", *kinds, *(f"{kind}: waits of all" for kind in waits), "bubble", "optimizer"]
        rows = [[*header, "total", "of bf16", "TFLOP/s"]]
        for name, stage, share in self._rows():
            step = stage.step
            row = [f"{1e3 * step.kinds[kind]:.1f}" for kind in kinds]
            row += [f"{1e3 * step.waits[kind].exposed:.1f} of {1e3 * step.waits[kind].seconds:.1f}" for kind in waits]
            row += [f"{1e3 * seconds:.1f}" for seconds in (step.bubble, step.optimizer, step.seconds)]
            rows.append([name, *row, f"{share:.2f}", f"{step.tflops:.0f}"])
        return rows

    def _sizes(self) -> list[list[str]]:
        """Return the rows of GiB a rank by kind, and whether they fit."""
        rows = [["GiB a rank", *self.best.memory, "total", "fits"]]
        for name, stage, _ in self._rows():
            sizes = [f"{size / GIB:.2f}" for size in (*stage.memory.values(), stage.size)]
            rows.append([name, *sizes, "yes" if stage.fits else "no"])
        return rows

    def _what_to_change(self) -> Iterator[str]:
        """Yield a line for each change, and one for a mesh on which the step fits, if it doesn't on this one."""
        for words, step in self.changes:
            gain = f"{step.step.tflops / self.best.step.tflops:.2f} times the speed, {step.size / GIB:,.0f} GiB"
            yield f"change first: {words}: {gain}{'' if step.fits else ', still too much'}"
        if self.other is not None:
            yield f"{self.other.precision.name} fits with {flags(self.other)}: {self.other.size / GIB:.0f} GiB"


def limit(stage: Stage) -> str:
    """Return a text of what takes longest, and of the link that ranks wait for."""
    step = stage.step
    times = {**step.kinds, "bubble": step.bubble, "optimizer": step.optimizer}
    times |= {f"{kind}'s collectives": wait.exposed for kind, wait in step.waits.items()}
    longest, (kind, wait) = max(times, key=times.__getitem__), max(step.waits.items(), key=lambda item: item[1].exposed)
    link_name = {"NVLink": "NVLink inside a server", "network": "the network between servers"}[wait.link]
    share = f"{times[longest] / step.seconds:.0%} of the step is {longest}"
    if (waits := wait.exposed / step.seconds) < 0.01:
        return f"{share}; no link limits"
    waiting = f"ranks wait for {kind}'s collectives in {waits:.0%} of the step"
    return f"{share}; the link that limits is {link_name}, on which {waiting}"


def flags(stage: Stage) -> str:
    """Return the command's flags for a step."""
    now = stage.layout
    in_fp8 = " --checkpoint-in-fp8" * (stage.precision.regions < BF16)
    return f"--mesh {now} --micro-batches {now.micro_batches} --recompute {now.recomputed:g}{in_fp8}"


def plan(model: nn.Module, rates: Rates, **options: Any) -> MeshPlan:
    """Return a step in each recipe, eager and compiled, on the mesh of the options or on the fastest that fits.

    ``options``: gpus, mesh (text or None), sequences of a step, context (their tokens), micro_batches, recompute, fuse,
    checkpoint_in_fp8, algorithm.
    """
    hardware, layout = _hardware_and_layout(rates, options)
    context, has_mesh = options["context"], bool(options["mesh"])
    short, inputs = shortened(model), tokens_of(context, context)
    work = work_of(short, inputs)

    def stage(name: str, compiled: bool) -> Stage:
        recipe, saved = None if name == IN_BF16 else RECIPES[name](), None
        if not compiled:
            fuse = recipe is not None and options["fuse"]
            saved = estimate(short, inputs, recipe, rates, work=work, fuse=fuse).memory.saved
        shapes = shapes_of(model, work, context, saved)
        precision = Precision(
            name,
            name,
            gathers=recipe is not None,
            pairs=recipe is not None,
            regions=in_pairs(shapes.width) if options["checkpoint_in_fp8"] else BF16,
            algorithm=options["algorithm"],
        )
        return Stage(shapes, layout, precision, hardware)

    compiled, other = [stage(name, True) for name in (IN_BF16, *RECIPES)], None
    if not has_mesh or not any(each.fits for each in compiled):
        other = max(map(searched, compiled), key=order)
    if not has_mesh and other is not None:
        layout, other = other.layout, None
        compiled = [replace(each, layout=layout) for each in compiled]
    steps = {"compiled": compiled, "eager": [stage(each.precision.name, False) for each in compiled]}
    best = max(compiled, key=order)
    return MeshPlan(steps, best, better(best), other if other and other.fits else None)


def _hardware_and_layout(rates: Rates, options: Mapping[str, Any]) -> tuple[Hardware, MeshLayout]:
    """Return the servers and the layout that these options of ``plan`` ask for; without a mesh, all ranks are FSDP2's.

    Raises:
        PlanError: for options that contradict each other, or a device that is no GPU.
    """
    gpus, sequences, mesh, recompute = (options[name] for name in ("gpus", "sequences", "mesh", "recompute"))
    if gpus < 1 or not 0 <= recompute <= 1:
        raise PlanError(f"--gpus {gpus} --recompute {recompute:g}: one GPU at least, and a share from 0 to 1")
    hardware, ranks = Hardware.of(rates), mesh_of(mesh, gpus) if mesh else dict.fromkeys(RANKS, 1)
    del ranks["fsdp"]
    layout = MeshLayout(gpus, sequences, options["context"], recomputed=recompute, **ranks)
    if (count := options["micro_batches"]) is not None:
        layout = replace(layout, batch=max(1, layout.micro_batches // max(1, count)))
        if layout.micro_batches != count:
            raise PlanError(
                f"--micro-batches {count} does not divide the {sequences // layout.data} sequences of a rank"
            )
    return hardware, layout
