"""Loading an optimizer's state: whether it fits, what is copied, what is converted, and the warning about that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.optim import state as states
from octavo.optim.masters import KINDS
from octavo.optim.moment import Moment
from octavo.optim.state import Settings


def fit_groups(groups: list[dict[str, Any]], optimizer: Any) -> dict[str, Any] | None:
    """Have loaded groups hold the parameters of an optimizer's own, and of these the options that they lack.

    Returns:
        what they said of how the state is to be read; None: it is torch's.

    Raises:
        ValueError: if they don't fit, or are of a kind that octavo doesn't keep.
    """
    own = optimizer.param_groups
    given, here = ([len(group["params"]) for group in some] for some in (groups, own))
    if given != here:
        raise ValueError(f"the state is of groups of {given} parameters, and the optimizer has groups of {here}")
    described = None
    for group, ours in zip(groups, own, strict=True):
        described = group.pop("octavo", None)
        if group.get("amsgrad"):
            raise ValueError("the state is of amsgrad=True, whose largest second moments octavo does not keep")
        group |= {**ours, **group, "params": ours["params"]}
        for param in group["params"]:
            optimizer.check(param, group, optimizer.settings, optimizer.clip_update)
    return described


def loaded(
    param: nn.Parameter, given: dict[str, Any], described: dict[str, Any] | None, same: bool, settings: Settings
) -> tuple[dict[str, Any], list[str]]:
    """A parameter's state out of a loaded one.

    Args:
        param: the parameter.
        given: its loaded state.
        described: how that is to be read; None: it is torch's.
        same: whether moments are kept as they are here.
        settings: how they are here.

    Returns:
        the state; and, where it had to be converted, what became of the master ("": it is kept).
    """
    if described is None and any(str(name).endswith("_codes") for name in given):
        raise ValueError("the state holds codes, but its groups no 'octavo', which says how these are to be read")
    state = states.new_state(param, settings)
    given = _as_loaded(given, settings.names, state)
    step = given.get("step", 1.0)  # torch's SGD keeps none
    state["step"].copy_(torch.as_tensor(step, dtype=torch.float32))
    lost = take_master(state, given)
    names = [name for name in state if name != "step" and not name.startswith("master_")]
    if same and _copy(state, given, names):
        return state, [] if lost is None else [lost]
    before = settings.moments if described is None else tuple(map(states.moment_from, described["moments"]))
    if len(before) < len(settings.names):
        raise ValueError(f"the state's moments are {before}, and this optimizer keeps {', '.join(settings.names)}")
    for old, (name, new) in zip(before, settings.moments_of(param).items(), strict=False):
        state |= states.converted(param, name, old, new, given)
    return state, [lost or ""]


def said(
    described: dict[str, Any] | None, moments: tuple[Moment, ...], master: str | None, converted: Sequence[str]
) -> str:
    """What a warning says of a state that was converted; arguments as ``loaded``'s, and what it returned of each."""
    before = "torch's"
    if described is not None:
        before = f"{tuple(map(states.moment_from, described['moments']))}, master {described['master']}"
    now = "; ".join([f"{moments}, master {master}", *sorted({*converted} - {""})])
    if before == now:
        before, now = "other blocks, or moments in codes on one side alone", "as they are kept here, to nearest"
    return f"the optimizer's state was converted: from {before} to {now}"


def take_master(state: dict[str, Any], given: dict[str, Any]) -> str | None:
    """Copy a loaded master into a new state if it was kept in the same way.

    If it was not, and had more than the weight, the new one begins as the weight: returns how it was kept, else None.
    """
    own, kind = (some.get("master_kind") for some in (state, given))
    if own is None and kind is None:
        return None
    names = [name for name in state if name.startswith("master_")]
    if own is not None and kind is not None and int(own) == int(kind) and _copy(state, given, names):
        return None
    was, now = ("none" if some is None else KINDS[int(some)] for some in (kind, own))
    return f"masters that were {was} begin anew as the weights are: {now}"


def _as_loaded(given: dict[str, Any], names: Sequence[str], state: dict[str, Any]) -> dict[str, Any]:
    """A loaded state without the optimizer's own moments, which torch leaves beside those of a full state dict.

    Where a moment is there twice, in codes and not, the one that isn't kept here was loaded.
    """
    twice = {name for name in names if name in given and f"{name}_codes" in given}
    own = {name if name in state else f"{name}_codes" for name in twice}
    return {key: value for key, value in given.items() if key not in own}


def _copy(state: dict[str, Any], given: dict[str, Any], names: list[str]) -> bool:
    """Copy these loaded tensors, plain or sharded, into a state's if all are kept alike; whether they are."""
    for name in names:
        own, other = state[name], given.get(name)
        if not isinstance(other, Tensor) or other.dtype != own.dtype:
            return False
        if states.local(other).shape != states.local(own).shape:
            return False
    for name in names:
        states.local(state[name]).copy_(states.local(given[name]))
    return True
