"""Where octavo.inspect counts what a layer's casts did, and notes faults: tensors, written where casts are made."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import INPUT
from octavo.autograd.grouped import rows_of_codes
from octavo.kernels.layouts import contraction_multiple
from octavo.scaling.recipe import Recipe
from octavo.tensor.pair import ForProducts, Operands

Counts = tuple[Tensor, Tensor]  # sums and extremes: arguments of the op cast_statistics; of groups a row each
RoleCounts = tuple[Counts | None, Counts | None]  # of the cast as it lies, and of the transposed one if it is another


class Tap(NamedTuple):
    """A layer's counts, by role, while it has this recipe; a weight's casts are counted by the recorder itself."""

    recipe: Recipe
    input: RoleCounts
    grad_output: RoleCounts

    def of(self, groups: slice) -> Tap:
        """The part of some groups."""
        roles = [[None if own is None else (own[0][groups], own[1][groups]) for own in role] for role in self[1:]]
        return Tap(self.recipe, *map(tuple, roles))  # type: ignore[arg-type]


def count(tap: Tap, role: int, x_RC: Tensor, operands: Operands, offsets: Tensor | None = None) -> None:
    """Count what the casts of ``x_RC``, of the role INPUT or GRAD_OUTPUT, into these operands did.

    ``offsets``: of rows in groups, see grouped.py. Rows that another rank has sent in FP8 it has counted.
    """
    if isinstance(x_RC, ForProducts):
        return
    casts, (first, second) = tap.recipe.casts[role], tap.input if role == INPUT else tap.grad_output
    if first is not None and casts.as_is is not None and operands.as_is is not None:
        kernels.cast_statistics(x_RC, *operands.as_is, casts.as_is.tile, *first, offsets)
    elif casts.once:  # of a first layer, whose input needs no gradient
        second = first
    if second is not None and casts.transposed is not None and operands.transposed is not None:
        codes, scale_inv = operands.transposed
        pad = contraction_multiple(x_RC.device) if tap.recipe.pads else 1
        laid = rows_of_codes(codes, offsets, x_RC.shape[0], pad), scale_inv.t()
        kernels.cast_statistics(x_RC, *laid, casts.transposed.tile[::-1], *second, offsets)


class Notes(NamedTuple):
    """Where faults of a layer's role are noted: arguments of the op note_faults."""

    place: Tensor
    found: Tensor
    first: Tensor

    def look(
        self,
        product: Tensor,
        operand: Tensor,
        scale_inv: Tensor | None,
        amax: Tensor | None,
        offsets: Tensor | None = None,
    ) -> None:
        """Note what a product says of the role's operand, which was cast with these scales."""
        kernels.note_faults(product, operand, scale_inv, amax, *self, offsets)


class Watch(NamedTuple):
    """A layer's notes, by role; a fault of the weight is found by looking at it between steps."""

    input: Notes
    grad_output: Notes
