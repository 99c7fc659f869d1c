"""Observers of a layer: they count what its casts do, and note faults in its products, in tensors on the device.

Forward and backward call a layer's observer where they cast and multiply; it changes nothing. What is counted is read
by octavo.inspect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import CodesAndScale
from octavo.autograd.grouped import group_of_rows, padded_ends, rows_of_codes
from octavo.autograd.products import Layer
from octavo.granularity import Tile
from octavo.kernels.backward_pass import is_running
from octavo.kernels.layouts import contraction_multiple
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, WEIGHT, Cast, Recipe
from octavo.tensor.pair import ForProducts, Operands

Counts = tuple[Tensor, Tensor]  # sums and extremes, arguments of the op cast_statistics; a row for each group
RoleCounts = tuple[Counts | None, Counts | None]  # of the cast as it lies, and of the transposed cast if it differs


class LayerCounts(NamedTuple):
    """The tensors in which a layer's casts are counted by role, while it has this recipe; the recorder counts weights.

    ``first``: the index of the first expert whose products this rank computes. ``seen``: not empty in a step whose
    forward was counted, so that a checkpoint's second forward, in backward, is not counted.
    """

    recipe: Recipe
    roles: Sequence[RoleCounts]
    first: int
    seen: set[int]


class Notes(NamedTuple):
    """The tensors in which faults of a layer's role are noted: arguments of the op note_faults."""

    place: Tensor
    faults: Tensor
    first: Tensor


class Observer(NamedTuple):
    """Counts the effects of a layer's casts and notes faults in its products, and changes nothing.

    ``counts``: None except in a step that is recorded; ``notes``: of (input, grad_output) where faults are traced.
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
        """Count the effects of a cast of ``source()``, of the role INPUT or GRAD_OUTPUT.

        ``offsets``: of rows in groups, see autograd/grouped.py. Rows that arrived in FP8 were counted by their sender.
        """
        if self.counts is None or self.counts.recipe is not recipe:
            return
        if not torch.compiler.is_compiling() and role == INPUT and operands.as_is is not None:
            if is_running() and self.counts.seen:
                return
            self.counts.seen.update(() if is_running() else (role,))
        x_RC = source()
        if isinstance(x_RC, ForProducts):
            return
        casts, (first, second) = recipe.casts[role], self.counts.roles[role]
        if first is not None and casts.as_is is not None and operands.as_is is not None:
            kernels.cast_statistics(x_RC, *operands.as_is, casts.as_is.tile, *self._of(first, offsets), offsets)
        elif casts.once:  # in a first layer, whose input needs no gradient
            second = first
        if second is not None and casts.transposed is not None and operands.transposed is not None:
            (codes, scale_inv), pad = operands.transposed, contraction_multiple(x_RC.device, recipe.pads)
            as_is = rows_of_codes(codes, offsets, x_RC.shape[0], pad), scale_inv.t()
            kernels.cast_statistics(x_RC, *as_is, casts.transposed.tile[::-1], *self._of(second, offsets), offsets)

    def _of(self, counts: Counts, offsets: Tensor | None) -> Counts:
        """Return the counts of these groups, which are all experts, or those whose products this rank computes."""
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

        "output" shows faults in the input, whose ``amax`` a Delayed cast has computed. "grad_input" shows faults in
        grad_output; where it is not computed, "grad_weight" does. A faulty element of a group's grad_weight does not
        show the row: all rows of the group are read.
        """
        if self.notes is None:
            return
        tensor, scale_inv = operand
        if name != "output" and layer.state is not None and layer.commits:
            amax = layer.state.amax_history[GRAD_OUTPUT, :1]
        if name == "grad_weight" and offsets is not None:
            pads = scale_inv is not None and layer.recipe.pads
            offsets = padded_ends(offsets, contraction_multiple(tensor.device, pads))
            tensor, scale_inv = tensor.t(), None if scale_inv is None else scale_inv.t()
            group = group_of_rows(offsets, tensor.shape[0]).clamp(max=offsets.shape[0] - 1)
            result = result[..., 0].sum(-1)[group].unsqueeze(1)
        kernels.note_faults(result, tensor, scale_inv, amax, *self.notes[name != "output"], offsets)


def count_weight(
    x_RC: Tensor,
    cast: Cast,
    tile: Tile,
    scale: Tensor | None,
    codes: CodesAndScale | None,
    counts: Counts,
    ends: Tensor | None,
) -> None:
    """Count what a weight's cast does, as the next forward will make it, or its ``codes`` if it has only these.

    ``scale``: the [3] scales of roles, None for one by the weight's amax; ``ends``: of each expert's rows.
    """
    if codes is None:
        dtype, _, *options = cast.arguments
        q, _, scale_inv, *_ = kernels.cast(x_RC, scale, WEIGHT, dtype, tile, *options, offsets=ends)
        codes = q, scale_inv
    kernels.cast_statistics(x_RC, *codes, tile, *counts, ends)
