"""The steps that a plan compares: in bf16, in bf16 with the same fusions, and in each recipe of COMPARED."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from octavo import recipes
from octavo.cost.estimate import Estimate, estimate
from octavo.cost.rates import PlanError, Rates
from octavo.cost.work import COMPARED, Work, head_of, work_of
from octavo.scaling.recipe import RecipeMap

STORED = ("dynamic", "delayed", "blockwise")  # recipes whose weights can live in FP8


def step_in(
    name: str,
    model: nn.Module,
    inputs: Sequence[Any],
    rates: Rates,
    work: Work,
    head: str | None = None,
    **options: Any,
) -> Estimate:
    """Return the step in octavo's recipe of this name.

    Args:
        head: the name of a recipe for the layer that computes logits; None: as the others.
        options: other arguments of ``estimate``.
    """
    if head is not None and head_of(work) is None:
        raise PlanError(f"--head {head}: no layer of this model computes logits")
    rules = {} if head is None else {head_of(work).name: getattr(recipes, head)()}  # type: ignore[union-attr]
    try:
        step = estimate(model, inputs, RecipeMap(getattr(recipes, name)(), rules), rates, work=work, **options)
    except ValueError as error:
        if head is None or options.get("weight_storage") is None or isinstance(error, PlanError):
            raise
        way = "plan without --head, or with --head high_precision"
        raise PlanError(f"under --head {head} that layer's weight can't be stored in FP8: {way}") from error
    return replace(step, name=name)


def estimates(
    model: nn.Module,
    inputs: Sequence[Any],
    rates: Rates,
    head: str | None = None,
    chunked_loss: bool = False,
    weight_storage: Literal["fp8"] | None = None,
    **options: Any,
) -> list[Estimate]:
    """Return the steps in bf16, with ``fuse`` also in bf16 with the same fusions, and in each of COMPARED.

    Args:
        head: as for ``step_in``.
        chunked_loss, weight_storage: as for ``estimate``, under the recipes; with "fp8" those of STORED.
        options: other arguments of ``estimate``.
    """
    work = work_of(model, inputs)
    bf16_options = [{**options, "fuse": fuse} for fuse in sorted({False, options.get("fuse", False)})]
    steps = [estimate(model, inputs, None, rates, work=work, **fusing) for fusing in bf16_options]
    fp8_options = {**options, "head": head, "chunked_loss": chunked_loss, "weight_storage": weight_storage}
    names = [name for name in COMPARED if weight_storage is None or name in STORED]
    return [*steps, *(step_in(name, model, inputs, rates, work, **fp8_options) for name in names)]
