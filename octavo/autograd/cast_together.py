"""Casts of many matrices in one launch: rows of experts that are sent, shards of weights, weights that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.scaling.recipe import Cast


class MatrixToCast(NamedTuple):
    """A matrix, and the tensors that a launch writes of it; of one launch all have, or lack, the same ones.

    Attributes:
        x: [R, C], with contiguous rows.
        codes: float8 [R, C], or of more columns.
        scale_inv: one of each tile; None where it is known already.
        scale: by which to cast, [1] or, by roles, [3]; where that is 0, or None, by the matrix's own amax.
        transposed: the codes once more, [C, R], where they are needed.
        amax: one of each tile, float32, where it is needed.
    """

    x: Tensor
    codes: Tensor
    scale_inv: Tensor | None = None
    scale: Tensor | None = None
    transposed: Tensor | None = None
    amax: Tensor | None = None


def cast_together(matrices: Sequence[MatrixToCast], cast: Cast, role: int = 0, skip: Tensor | None = None) -> None:
    """Cast matrices of one dtype and device in one launch.

    ``role``: the place in ``scale``; ``skip``: one int32 element, with which nothing is written unless it is 0.
    """
    if not matrices:
        return
    xs, codes, inverses, scales, transposed, amaxes = map(list, zip(*matrices, strict=True))
    if inverses[0] is None:
        inverses = [x.new_empty(1, 1, dtype=torch.float32) for x in xs]
    if amaxes[0] is None:
        amaxes = [torch.empty_like(inverse, dtype=torch.float32) for inverse in inverses]
    optional = [[] if tensors[0] is None else tensors for tensors in (transposed, scales)]
    options = cast.tile, cast.power_of_two, cast.margin, skip
    kernels.multi_tensor_cast(xs, codes, optional[0], inverses, amaxes, optional[1], role, *options)
