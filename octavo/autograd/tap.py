"""Where octavo.inspect counts what a layer's casts did, and notes faults: tensors, written where casts are made."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo import kernels
from octavo.scaling.recipe import Recipe, RoleCasts
from octavo.tensor.pair import Operands

Counts = tuple[Tensor, Tensor]  # sums and extremes: the last arguments of the op cast_statistics
RoleCounts = tuple[Counts | None, Counts | None]  # of the cast as it lies, and of the transposed one if it is another


class Tap(NamedTuple):
    """A layer's counts, by role, while it has this recipe; a weight's casts are counted by the recorder itself."""

    recipe: Recipe
    input: RoleCounts
    grad_output: RoleCounts


def count(counts: RoleCounts, x_RC: Tensor, operands: Operands, casts: RoleCasts) -> None:
    """Count what the casts of ``x_RC`` into these operands did."""
    as_is, transposed = counts
    if as_is is not None and casts.as_is is not None and operands.as_is is not None:
        kernels.cast_statistics(x_RC, *operands.as_is, casts.as_is.tile, *as_is)
    elif casts.once and as_is is not None and casts.transposed is not None and operands.transposed is not None:
        # of a first layer, whose input needs no gradient
        kernels.cast_statistics(x_RC.t(), *operands.transposed, casts.transposed.tile, *as_is)
    if transposed is not None and casts.transposed is not None and operands.transposed is not None:
        kernels.cast_statistics(x_RC.t(), *operands.transposed, casts.transposed.tile, *transposed)


class Notes(NamedTuple):
    """Where faults of a layer's role are noted: the last arguments of the op note_faults."""

    place: Tensor
    found: Tensor
    first: Tensor

    def look(self, product: Tensor, operand: Tensor, scale_inv: Tensor | None, amax: Tensor | None) -> None:
        """Note what a product says of the role's operand, which was cast with these scales."""
        kernels.note_faults(product, operand, scale_inv, amax, *self)


class Watch(NamedTuple):
    """A layer's notes, by role; a fault of the weight is found by looking at it between steps."""

    input: Notes
    grad_output: Notes
