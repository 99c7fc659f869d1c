"""Observers of a layer: they count what its casts do, and note faults in its products, in tensors on the device.

Forward and backward call a layer's observer where they cast and multiply; it changes nothing. What is counted is read
by octavo.inspect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import CodesAndScale
from octavo.autograd.grouped import group_of_rows, padded_ends, rows_of_codes
from octavo.autograd.shared_scales import by_role
from octavo.granularity import ALL, NV, Tile
from octavo.kernels.backward_pass import is_running
from octavo.kernels.layouts import contraction_multiple
from octavo.kernels.reference.nvfp4 import rotated
from octavo.scaling.delayed import State
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, WEIGHT, Cast, Recipe
from octavo.tensor.pair import Operands, OperandsFacade

Counts = tuple[Tensor, Tensor]  # sums and extremes, arguments of the op cast_statistics; a row for each group
RoleCounts = tuple[Counts | None, Counts | None]  # of the cast as it lies, and of the transposed cast if it differs
Notes = tuple[Tensor, Tensor, Tensor]  # where faults of a role are noted: place, faults and first of the op note_faults


class LayerCounts(NamedTuple):
    """The tensors in which a layer's casts are counted by role, while it has this recipe; the recorder counts weights.

    ``first``: the index of the first expert whose products this rank computes. ``seen``: not empty in a step whose
    forward was counted, so that a checkpoint's second forward, in backward, is not counted.
    """

    recipe: Recipe
    roles: Sequence[RoleCounts]
    first: int
    seen: set[int]

    def count_weight(
        self,
        matrices: Tensor,
        pair: tuple[Tile, CodesAndScale] | None,
        swaps: bool,
        delayed_scale: Tensor | None,
        shared_scale: Tensor | None,
        experts: slice | None,
    ) -> None:
        """Count what the weight's casts do, as the next forward will make them.

        Args:
            matrices: the weight [N, K], or this rank's experts [E, N, K], in high precision.
            pair: the tile, and (codes, scale_inv), of a weight that has only these: nothing is cast.
            swaps: whether the weight is stored with its last two dimensions swapped.
            delayed_scale, shared_scale: [3] by roles, of a Delayed cast and of one that ranks share; None: by the amax.
            experts: which experts these matrices are; None: it is one matrix.
        """
        x_RC, ends = matrices.flatten(0, -2), None
        if experts is not None:
            height = matrices.shape[1]
            ends = torch.arange(height, len(x_RC) + 1, height, dtype=torch.int32, device=x_RC.device)
        casts = zip(self.recipe.weight_casts[:2], self.roles[WEIGHT], (False, True), strict=True)
        for cast, counts, is_transposed in casts:
            if cast is None or counts is None:
                continue
            x, casts_transpose = x_RC, is_transposed != swaps
            scale = delayed_scale if cast.is_delayed else shared_scale if cast.has_one_scale else None
            if pair is not None:
                tile, (q, scale_inv) = pair
            elif cast.is_packed:
                x, tile = x_RC.t() if casts_transpose else x_RC, cast.tile
                q, _, scale_inv, *_ = kernels.cast(x, scale, WEIGHT, *cast.arguments, False, NV[1], **cast.named)
            else:
                arguments = cast.arguments_transposed if casts_transpose else cast.arguments
                q, _, scale_inv, *_ = kernels.cast(x_RC, scale, WEIGHT, *arguments, offsets=ends)
                tile = arguments[1]
            sums, extremes = counts if experts is None else (counts[0][experts], counts[1][experts])
            kernels.cast_statistics(x, q, scale_inv, tile, sums, extremes, ends)

    @staticmethod
    def shared_scales(shards: Sequence[tuple[Tensor, Cast]], largest: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the [3] scales of per-tensor casts of sharded weights; ``largest``: takes a maximum over ranks."""
        amaxes = largest(torch.cat([kernels.amax(shard, (ALL, ALL)).reshape(1) for shard, _ in shards]))
        return [by_role(cast.scale_of(amax)) for (_, cast), amax in zip(shards, amaxes, strict=True)]


class Observer(NamedTuple):
    """Counts the effects of a layer's casts and notes faults in its products, and changes nothing.

    ``counts``: None except in a step that is recorded; ``notes``: of (input, grad_output) where faults are traced.
    """

    counts: LayerCounts | None = None
    notes: tuple[Notes, Notes] | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the layer is not observed
        return type(None), ()

    def cast(
        self, recipe: Recipe, role: int, source: Callable[[], Tensor], operands: Operands, offsets: Tensor | None = None
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
        if isinstance(x_RC := source(), OperandsFacade):
            return
        casts, (counts, counts_t) = recipe.casts[role], self.counts.roles[role]
        if counts is not None and casts.as_is is not None and operands.as_is is not None:
            counts_of_groups = self._counts_of_groups(counts, offsets)
            kernels.cast_statistics(x_RC, *operands.as_is, casts.as_is.tile, *counts_of_groups, offsets)
        elif casts.coincide:  # in a first layer, whose input needs no gradient, the transposed pair alone is there
            counts_t = counts
        if counts_t is None or casts.transposed is None or operands.transposed is None:
            return
        (codes, scale_inv), cast = operands.transposed, casts.transposed
        if cast.is_packed:
            laid = x_RC.t() if cast.rotation is None else rotated(x_RC.t().to(torch.float32), cast.rotation.signs)
            kernels.cast_statistics(laid, codes, scale_inv, cast.tile, *counts_t)
        else:
            rows = rows_of_codes(codes, offsets, x_RC.shape[0], contraction_multiple(x_RC.device, recipe.may_pad))
            counts_of_groups = self._counts_of_groups(counts_t, offsets)
            kernels.cast_statistics(x_RC, rows, scale_inv.t(), cast.tile[::-1], *counts_of_groups, offsets)

    def _counts_of_groups(self, counts: Counts, offsets: Tensor | None) -> Counts:
        """Return the counts of these groups, which are all experts, or those whose products this rank computes."""
        assert self.counts is not None
        if offsets is None or offsets.shape[0] == counts[0].shape[0]:
            return counts
        here = slice(self.counts.first, self.counts.first + offsets.shape[0])
        return counts[0][here], counts[1][here]

    def product(
        self,
        recipe: Recipe,
        name: str,
        result: Tensor,
        operand: tuple[Tensor | None, Tensor | None],
        offsets: Tensor | None,
        amax: Tensor | None = None,
        committed_state: State | None = None,
    ) -> None:
        """Note faults in a product's operand by its result; the operand is a pair, or (tensor, None) in high precision.

        "output" shows faults in the input, whose ``amax`` a Delayed cast has computed. "grad_input" shows faults in
        grad_output, whose amax has entered ``committed_state``; where it is not computed, "grad_weight" does. A
        faulty element of a group's grad_weight does not show the row: all rows of the group are read.
        """
        if self.notes is None:
            return
        tensor, scale_inv = operand
        assert tensor is not None
        if committed_state is not None:
            amax = committed_state.amax_history[GRAD_OUTPUT, :1]
        if name == "grad_weight" and offsets is not None:
            may_pad = scale_inv is not None and recipe.may_pad
            offsets = padded_ends(offsets, contraction_multiple(tensor.device, may_pad))
            tensor, scale_inv = tensor.t(), None if scale_inv is None else scale_inv.t()
            group = group_of_rows(offsets, tensor.shape[0]).clamp(max=offsets.shape[0] - 1)
            # a faulty grad_output[t, n] makes all of dW[group, n, :] faulty, so that a sum of one column shows it
            result = result[..., 0].sum(-1)[group].unsqueeze(1)
        of_input, of_grad_output = self.notes
        notes = of_input if name == "output" else of_grad_output
        kernels.note_faults(result, tensor, scale_inv, amax, *notes, offsets)
