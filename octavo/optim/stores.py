"""A weight's state as the kernels take it: begun, and seen as master and moments over its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.kernels.reference.adam import Master
from octavo.kernels.reference.optimizer_state import StoredMoment
from octavo.optim import state as states
from octavo.optim.masters import master_of
from octavo.optim.moment import Moment
from octavo.tensor.stored_weight import StoredWeight


class Settings(NamedTuple):
    """How an optimizer keeps weights: its moments with their names, and the ``master`` argument."""

    moments: tuple[Moment, ...]
    names: tuple[str, ...]
    master: str | None


class Stores(NamedTuple):
    """A weight's own tensors, to be read and written.

    Attributes:
        matrix: the weight [R, C]; of one that lives in FP8 its codes.
        master: the weight and its master.
        moments: all [R, C].
        amax: float32, of a scaled master; else None.
    """

    matrix: Tensor
    master: Master
    moments: tuple[StoredMoment, ...]
    amax: Tensor | None


def new_state(param: nn.Parameter, weight: Tensor, settings: Settings) -> dict[str, Any]:
    """An empty state; of a sharded weight its tensors are sharded alike.

    Args:
        param: the weight.
        weight: this rank's part of it.
        settings: how it is kept.
    """
    found: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=weight.device)}
    own: dict[str, Tensor] = {}
    for moment, name in zip(states.moments_for(param, settings.moments), settings.names, strict=True):
        own |= moment.new_state(name, weight.shape, weight.device)
    own |= master_of(param, settings.master).new_state(weight)
    return found | {name: states.like_param(value, param) for name, value in own.items()}


class StateBytes(NamedTuple):
    """What a weight takes on this rank: itself with its scales, its master's rest, its moments."""

    weight: int
    master: int
    moments: int


def bytes_of(param: nn.Parameter, weight: Tensor, settings: Settings | None) -> StateBytes:
    """Bytes of a weight and its state.

    Args:
        param: the parameter that has it now.
        weight: what it is to be, on the meta device, this rank's part.
        settings: how it is kept; None: it is frozen.
    """
    own = [weight.q, weight.scale_inv] if isinstance(weight, StoredWeight) else [weight]
    master: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    if settings is not None:
        master = master_of(nn.Parameter(weight, False), settings.master).new_state(weight)
        for moment, name in zip(states.moments_for(param, settings.moments), settings.names, strict=True):
            moments |= moment.new_state(name, weight.shape, weight.device)
    parts = own, master.values(), moments.values()
    return StateBytes(*(sum(part.numel() * part.element_size() for part in some) for some in parts))


def stores_of(param: nn.Parameter, weight: Tensor, state: dict[str, Any], settings: Settings) -> Stores:
    """Master and moments over the tensors of a state; arguments as ``new_state``'s."""
    kept = {name: states.local(value) for name, value in state.items() if isinstance(value, Tensor)}
    matrix = states.matrix_of(weight)
    if states.is_sharded_vector(param):  # a row an element, so that its index is that of the whole vector
        kept = {name: value.view(-1, 1) if value.ndim else value for name, value in kept.items()}
        matrix = matrix.view(-1, 1)
    pairs = zip(states.moments_for(param, settings.moments), settings.names, strict=True)
    moments = tuple(moment.stored(name, kept) for moment, name in pairs)
    scale_inv = (weight.scale_inv,) if isinstance(weight, StoredWeight) else ()
    master = master_of(param, settings.master).stored(matrix, kept, *scale_inv)
    return Stores(matrix, master, moments, kept.get("master_amax"))
