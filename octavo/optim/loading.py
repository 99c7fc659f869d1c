"""A state that is loaded: whether it fits, what of it is taken as it is, what is converted, what is said of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.optim import state as states
from octavo.optim.masters import KINDS
from octavo.optim.moment import Moment
from octavo.optim.state import Settings
from octavo.optim.weight_state import new_state


def check_groups(groups: list[dict[str, Any]], own: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What loaded groups say of how the state is to be read, which is taken out of them; None: it is torch's.

    Raises:
        ValueError: if they don't fit the optimizer's ``own``, or are of a kind that octavo doesn't keep.
    """
    given, here = ([len(group["params"]) for group in some] for some in (groups, own))
    if given != here:
        raise ValueError(f"the state is of groups of {given} parameters, and the optimizer has groups of {here}")
    described = None
    for group in groups:
        described = group.pop("octavo", None)
        if group.get("amsgrad"):
            raise ValueError("the state is of amsgrad=True, whose largest second moments octavo does not keep")
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

    Raises:
        ValueError: if it does not fit.
    """
    if described is None and any(str(name).endswith("_codes") for name in given):
        raise ValueError("the state holds codes, but its groups no 'octavo', which says how these are to be read")
    state = new_state(param, settings)
    step = given.get("step", 1.0)  # torch's SGD keeps none
    state["step"].copy_(torch.as_tensor(step, dtype=torch.float32))
    lost = take_master(state, given)
    names = [name for name in state if name != "step" and not name.startswith("master_")]
    if same and all(states.is_like(state[name], given.get(name)) for name in names):
        for name in names:
            states.copy_into(state[name], given[name])
        return state, [] if lost is None else [lost]
    convert(param, given, described, state, settings)
    return state, [lost or ""]


def said(
    described: dict[str, Any] | None, moments: tuple[Moment, ...], master: str | None, converted: Sequence[str]
) -> str:
    """What a warning says of a state that was converted; arguments as ``loaded``'s, and what it returned of each."""
    before = "torch's"
    if described is not None:
        before = f"{tuple(map(states.moment_from, described['moments']))}, master {described['master']}"
    now = "; ".join([f"{moments}, master {master}", *sorted({*converted} - {""})])
    return f"the optimizer's state was converted: from {before} to {now}"


def take_master(state: dict[str, Any], given: dict[str, Any]) -> str | None:
    """Copy a loaded master into a new state if it was kept in the same way.

    Returns:
        None, or how it was kept, if it had more than the weight: the new one begins as the weight.
    """
    own, kind = (some.get("master_kind") for some in (state, given))
    if own is None and kind is None:
        return None
    names = [name for name in state if name.startswith("master_")]
    if own is not None and kind is not None and int(own) == int(kind):
        if all(states.is_like(state[name], given.get(name)) for name in names):
            for name in names:
                states.copy_into(state[name], given[name])
            return None
    was, now = ("none" if some is None else KINDS[int(some)] for some in (kind, own))
    return f"masters that were {was} begin anew as the weights are: {now}"


def convert(
    param: nn.Parameter, given: dict[str, Any], described: dict[str, Any] | None, state: dict[str, Any], kept: Settings
) -> None:
    """Fill the moments of a new state from others; arguments as ``loaded``'s.

    Raises:
        ValueError: if its moments are not there or of another shape.
    """
    before = kept.moments
    if described is not None:
        before = tuple(states.moment_from(m) for m in described["moments"])[: len(kept.names)]
    if len(before) != len(kept.names):
        raise ValueError(f"the state's moments are {before}, and this optimizer keeps {', '.join(kept.names)}")
    own = {key: states.local(value) for key, value in state.items() if isinstance(value, Tensor)}
    for old, (name, new) in zip(before, kept.moments_of(param).items(), strict=True):
        values = states.as_fp32(name, old, given)
        if values.shape != states.local(param).shape:
            raise ValueError(f"{name} of shape {tuple(values.shape)} does not fit a weight of {tuple(param.shape)}")
        states.write_moment(values, new, name, own)
