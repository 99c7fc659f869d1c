"""Per-tensor scales of tensors that lie in parts on the ranks of a tensor-parallel group.

A scale per tensor is that of the whole tensor, so that its codes are those that one rank would write. Rows and blocks
have the scales of what each rank has of them, and nothing is agreed on. Under Dynamic one collective of 4 bytes finds
the largest amax before the cast. Under Delayed the scale is there already, the same on all ranks, and one of 12 bytes
in backward makes the amax that is rolled that of the whole tensors; where there is no history yet, it is as under
Dynamic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.granularity import ALL
from octavo.numerics import scale_from_amax
from octavo.scaling.recipe import Cast


class Parts(NamedTuple):
    """How a layer's roles lie on the ranks of the process group of this name: ``roles`` in parts, or whole on each.

    ``begins``: whether delayed scales may not be there yet, on all of these ranks alike.
    """

    group: str
    roles: tuple[bool, bool, bool]
    begins: bool = False


def largest(values: Tensor, group: str) -> Tensor:
    """The largest of each of ``values`` over the ranks of a group: a collective, in compiled graphs too."""
    return _reduced(values, "max", group)


def summed(values: Tensor, group: str) -> Tensor:
    """The sum of each of ``values`` over the ranks of a group, in their own dtype."""
    return _reduced(values, "sum", group)


def _reduced(values: Tensor, how: str, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    found: Tensor = functional.wait_tensor(functional.all_reduce(values, how, group))
    return found


def shared_scale(
    x: Tensor, cast: Cast, role: int, parts: Parts | None, activation: Sequence[Any] = ()
) -> Tensor | None:
    """The scale of the whole tensor that x [R, C] is a part of, as casts take a delayed one; None: x has its own.

    ``activation``: see casts.py; the cast's amax is that of what is cast.
    """
    if parts is None or not parts.roles[role] or cast.tile != (ALL, ALL):
        return None
    if activation:
        amax = kernels.cast(x, None, role, *cast.arguments, False, 1, False, *activation)[3]
    else:
        amax = kernels.amax(x, cast.tile)
    scale = scale_from_amax(largest(amax.view(1), parts.group), cast.format.max, cast.power_of_two, cast.margin)
    return scale.expand(3).contiguous()


def shared_amax(found: Sequence[Tensor | None], parts: Parts | None) -> Sequence[Tensor | None]:
    """The amax of whole tensors, of what this rank found of its parts of them, None where nothing was cast."""
    own = [amax for amax in found if amax is not None]
    if parts is None or not own:
        return found
    whole = iter(largest(torch.cat([amax.view(1) for amax in own]), parts.group).view(-1, 1, 1).unbind())
    return [None if amax is None else next(whole) for amax in found]
