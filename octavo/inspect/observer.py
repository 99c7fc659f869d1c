"""The observer of a layer: it counts what its casts do, and notes faults in its products, in tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import GRAD_OUTPUT
from octavo.autograd.grouped import group_of_rows, padded_ends, rows_of_codes
from octavo.autograd.products import Layer
from octavo.kernels.layouts import contraction_multiple
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.recipe import Recipe
from octavo.tensor.pair import ForProducts, Operands

Counts = tuple[Tensor, Tensor]  # sums and extremes, arguments of the op cast_statistics; a row for each group
RoleCounts = tuple[Counts | None, Counts | None]  # of the cast as it lies, and of the transposed one if that differs


class LayerCounts(NamedTuple):
    """Where a layer's casts are counted by role, while it has this recipe; the recorder counts those of the weight.

    ``first``: the number of the first expert whose products this rank computes.
    """

    recipe: Recipe
    roles: Sequence[RoleCounts]
    first: int


class Notes(NamedTuple):
    """Where faults of a layer's role are noted: arguments of the op note_faults."""

    place: Tensor
    found: Tensor
    first: Tensor


class Observer(NamedTuple):
    """Sees what a layer's casts and products do, and changes nothing.

    ``counts``: None except in a step that is recorded; ``notes``: of (input, grad_output), where faults are traced.
    """

    counts: LayerCounts | None = None
    notes: tuple[Notes, Notes] | None = None

    def cast(
        self,
        recipe: Recipe,
        role: int,
        source: Callable[[], Tensor],
        operands: Operands,
        offsets: Tensor | None = None,
    ) -> None:
        """Count what a cast of ``source()``, of the role INPUT or GRAD_OUTPUT, did.

        ``offsets``: of rows in groups, see autograd/grouped.py. Rows that came in FP8 were counted by their sender.
        """
        if self.counts is None or self.counts.recipe is not recipe:
            return
        x_RC = source()
        if isinstance(x_RC, ForProducts):
            return
        casts, (first, second) = recipe.casts[role], self.counts.roles[role]
        if first is not None and casts.as_is is not None and operands.as_is is not None:
            kernels.cast_statistics(x_RC, *operands.as_is, casts.as_is.tile, *self._of(first, offsets), offsets)
        elif casts.once:  # in a first layer, whose input needs no gradient
            second = first
        if second is not None and casts.transposed is not None and operands.transposed is not None:
            codes, scale_inv = operands.transposed
            as_is = rows_of_codes(codes, offsets, x_RC.shape[0], _pad(x_RC, recipe)), scale_inv.t()
            kernels.cast_statistics(x_RC, *as_is, casts.transposed.tile[::-1], *self._of(second, offsets), offsets)

    def _of(self, counts: Counts, offsets: Tensor | None) -> Counts:
        """The counts of these groups, which are all experts, or those whose products this rank computes."""
        assert self.counts is not None
        if offsets is None or offsets.shape[0] == counts[0].shape[0]:
            return counts
        here = slice(self.counts.first, self.counts.first + offsets.shape[0])
        return counts[0][here], counts[1][here]

    def product(
        self,
        layer: Layer,
        name: str,
        result: Tensor,
        operand: tuple[Tensor, Tensor | None],
        offsets: Tensor | None,
        amax: Tensor | None = None,
    ) -> None:
        """Note faults in a product's operand by its result; the operand is a pair, or (tensor, None) in high precision.

        "output" shows faults in the input, whose ``amax`` a Delayed cast has found. "grad_input" shows those in
        grad_output; where it is not computed, "grad_weight" does. A faulty element of a group's grad_weight does not
        show the row: all rows of the group are read.
        """
        if self.notes is None:
            return
        tensor, scale_inv = operand
        if name != "output" and layer.state is not None and layer.commits:
            amax = layer.state.amax_history[GRAD_OUTPUT, :1]
        if name == "grad_weight" and offsets is not None:
            offsets = padded_ends(offsets, 1 if scale_inv is None else _pad(tensor, layer.recipe))
            tensor, scale_inv = tensor.t(), None if scale_inv is None else scale_inv.t()
            group = group_of_rows(offsets, tensor.shape[0]).clamp(max=offsets.shape[0] - 1)
            result = result[..., 0].sum(-1)[group].unsqueeze(1)
        kernels.note_faults(result, tensor, scale_inv, amax, *self.notes[name != "output"], offsets)


def _pad(x: Tensor, recipe: Recipe) -> int:
    return contraction_multiple(x.device) if recipe.pads else 1


def observe(module: RecipeModule, **fields: Any) -> None:
    """Set fields of a module's Observer; a module with no field set has no Observer."""
    observer = (module.__dict__.pop("observer", None) or Observer())._replace(**fields)
    if observer != (None, None):
        module.observer = observer
