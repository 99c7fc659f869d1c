"""The cast of rows in groups: of each group its own, as reference/cast.py makes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.arguments import CastSource, Groups, Output, Scaling, new_grouped
from octavo.kernels.groups import check_offsets, places
from octavo.kernels.reference.cast import cast


def grouped_cast(
    source: CastSource, scaling: Scaling, groups: Groups, cast: Callable[..., tuple[Tensor, ...]] = cast
) -> tuple[Tensor, ...]:
    """``octavo::grouped_cast``."""
    offsets, as_is, transpose, pad = groups
    q, t, scale_inv, amax = new_grouped(source, scaling, groups)
    rows, cols = source.shape
    ends = check_offsets(offsets, rows)
    for codes in (q, t):
        codes.view(torch.uint8).zero_()
    scale_inv.fill_(1.0)
    amax.zero_()
    inputs = places(ends, source.h_tile[0])
    for place, of_input in zip(places(ends, scaling.tile[0], pad), inputs, strict=True):
        if place.rows.start == place.rows.stop and scaling.delayed_scale is None:
            continue  # a scale of 1 and an amax of 0, which are there
        codes, _, found_inv, found, _ = cast(source.part(of_input.rows, of_input.scale_rows), scaling, Output())
        scale_inv[place.scale_rows], amax[place.scale_rows] = found_inv, found
        raw = codes.view(torch.uint8)
        if as_is:
            q.view(torch.uint8)[place.rows, :cols] = raw
        if transpose:
            t.view(torch.uint8)[:, place.columns] = raw.t()
    return q, t, scale_inv, amax
