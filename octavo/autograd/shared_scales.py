"""Per-tensor scales of tensors that lie in parts on the ranks of a tensor-parallel group.

A scale per tensor is that of the whole tensor, so that its codes are those that one rank would write. Each rank scales
its own rows and blocks, without a collective. Under Dynamic one collective of 4 bytes finds the largest amax before the
cast. Under Delayed the scale is there already, the same on all ranks, and one collective of 12 bytes in backward makes
the amaxes that enter the history those of whole tensors; a first step, without a history, scales as under Dynamic. A
compiled graph looks for a history each time it runs, in an op, and sends nothing more once there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.rows import Parts
from octavo.formats import E4M3, format_of
from octavo.granularity import ALL
from octavo.kernels.arguments import Castable, RotaryHeads
from octavo.numerics import scale_from_amax
from octavo.scaling.delayed import State, may_be_empty
from octavo.scaling.recipe import ROLES, Cast
from octavo.tensor.collectives import maximum_over_ranks

AnySource = Tensor | Castable  # what is cast, see casts.py


def scale_for(source: AnySource, cast: Cast, state: State | None, role: int, parts: Parts | None) -> Tensor | None:
    """Return the scales [3] that the cast indexes by role, delayed or shared by ranks; None: it finds its own amax."""
    if parts is not None and not parts.roles[role]:
        parts = None  # it is whole on each rank
    delayed = state if cast.is_delayed else None
    if parts is None or (delayed is not None and not parts.scale_may_be_empty):
        return None if delayed is None else delayed.in_force(role)
    if not cast.has_one_scale and not cast.is_packed:
        return None
    assert not isinstance(source, RotaryHeads)  # layers on several ranks are not joined
    x, *activation = (source,) if isinstance(source, Tensor) else source
    if delayed is not None:
        return first_scale(x, delayed.scale, role, *cast.arguments, parts.group, *activation)
    return scale_of_whole(x, role, cast.arguments, parts.group, activation)[0]


def scale_of_whole(
    x: Tensor,
    role: int,
    arguments: Sequence[Any],
    group: str,
    activation: Sequence[Any] = (),
    delayed: Tensor | None = None,
    **norm_options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the scales [3] that a cast indexes by role, and the amax [1, 1], of the tensor that ranks hold in parts x.

    It is x itself, or its activation or norm, which is computed twice and not written in between. ``arguments`` are the
    cast's; ``delayed`` scales [3] are used where they are not empty.
    """
    dtype, _, power_of_two, margin = arguments
    if activation or norm_options:
        per_tensor = E4M3.dtype, (ALL, ALL), False, 0
        amax = kernels.cast(x, None, role, *per_tensor, False, 1, False, *activation, **norm_options)[3]
    else:
        amax = kernels.amax(x, (ALL, ALL))
    amax = maximum_over_ranks(amax, group)
    return by_role(scale_from_amax(amax.view(1), format_of(dtype).limit, power_of_two, margin, delayed)), amax


def by_role(scale: Tensor) -> Tensor:
    """Return one scale, [], [1] or [3], as the three that a cast of any role finds its own among."""
    return scale.expand(len(ROLES)).contiguous()


@torch.library.custom_op("octavo::first_scale", mutates_args=())
def first_scale(
    x: Tensor,
    delayed_scale: Tensor,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    group: str,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] | None = None,
) -> Tensor:
    """Return the delayed scales [3]; where there may be none yet, that of the whole tensor that x [R, C] is a part of.

    It is an op, so that a graph compiled for a first step shares scales among ranks in first steps alone.
    """
    if not may_be_empty(delayed_scale):
        return delayed_scale.clone()
    activation_arguments = (activation, preactivation, h_scale_inv, h_tile or (ALL, ALL)) if activation else ()
    return scale_of_whole(x, role, (dtype, tile, power_of_two, margin), group, activation_arguments, delayed_scale)[0]


@first_scale.register_fake
def _(x: Tensor, delayed_scale: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(delayed_scale)


def shared_amax(amaxes: Sequence[Tensor | None], parts: Parts | None) -> Sequence[Tensor | None]:
    """Return the amaxes of whole tensors, from those of this rank's parts of them; None where nothing was cast."""
    local_amaxes = [amax for amax in amaxes if amax is not None]
    if parts is None or not local_amaxes:
        return amaxes
    together = maximum_over_ranks(torch.cat([amax.view(1) for amax in local_amaxes]), parts.group)
    whole_amaxes = iter(together.view(-1, 1, 1).unbind())
    return [None if amax is None else next(whole_amaxes) for amax in amaxes]
