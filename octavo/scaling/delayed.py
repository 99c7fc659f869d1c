"""The state of delayed scaling: two ordinary buffers on the module that owns it.

    delayed_scale         [3]     float32, one scale a role (input, weight, grad_output); 0 = no history yet
    delayed_amax_history  [3, H]  float32, newest first

Forward only reads it. Backward's cast of grad_output commits: it rolls the histories and writes the next scales, so a
recomputed forward (activation checkpointing) sees what the first one saw. The buffers are not persistent: a converted
model's state_dict has the keys of the plain model. Losing them costs one step whose scales are each tensor's own; for
a bit-identical continuation save ``delayed_state_dict`` beside the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octavo.scaling.recipe import ROLES, Delayed
from octavo.step_count import version_of

BUFFERS = ("delayed_scale", "delayed_amax_history")
ASIDE = "_delayed_state_aside"  # on a module: the buffers to return to, of each octavo.using around
EMPTIED = "_delayed_state_emptied"  # on a buffer: its id, and its version when some of it was empty
LOADED = "_delayed_state_loaded"  # on a module: the version of delayed_scale when it was loaded


def register_delayed_state(module: nn.Module, rule: Delayed, device: torch.device) -> None:
    """Give ``module`` a delayed state for ``rule``.

    A real one of the same length is kept as it is; of another length its scales and last amaxes are. Else it is empty.
    """
    history, scale = getattr(module, "delayed_amax_history", None), getattr(module, "delayed_scale", None)
    if history is not None and history.shape[1] == rule.history_length and not history.is_meta:
        return
    new_scale = torch.zeros(len(ROLES), dtype=torch.float32, device=device)
    new_history = torch.zeros(len(ROLES), rule.history_length, dtype=torch.float32, device=device)
    if history is not None and scale is not None and not history.is_meta:
        new_scale = scale.detach().to(device, copy=True)
        new_history[:, 0] = history[:, 0]
    note_empty(new_scale)  # for copies of it
    module.register_buffer("delayed_scale", new_scale, persistent=False)
    module.register_buffer("delayed_amax_history", new_history, persistent=False)


def empty_state(buffers: Mapping[str, Tensor | None], role: int | None = None) -> None:
    """Forget the history of a role, or of all."""
    with torch.no_grad():
        for name in BUFFERS:
            if (buffer := buffers.get(name)) is not None:
                (buffer if role is None else buffer[role]).zero_()
                note_empty(buffer)


def note_empty(buffer: Tensor) -> None:
    """Some of it may be empty, for all that is known; a compiled graph does not ask."""
    if not torch.compiler.is_compiling():
        buffer.__dict__[EMPTIED] = id(buffer), version_of(buffer)


def may_be_empty(scale: Tensor) -> bool:
    """Whether a role may have no scale: no backward has committed one since all were made, or since one was emptied.

    By what this process has done, without asking the device, so that ranks that do the same find the same. What is
    compiled is told yes, and may ask when it runs.
    """
    if torch.compiler.is_compiling():
        return True
    noted, version = scale.__dict__.get(EMPTIED, (id(scale), 0))
    if noted != id(scale):  # on what this is a copy of, whose versions are others
        note_empty(scale)
        return True
    return version_of(scale) <= version


def take_state_local(module: nn.Module) -> None:
    """Make the buffers plain tensors again: torch's parallelize_module makes DTensors of all buffers, replicated."""
    for name in BUFFERS:
        buffer = module._buffers.get(name)
        local = getattr(buffer, "_local_tensor", None)
        if local is not None:
            module._buffers[name] = local
            note_empty(local)  # torch has written it, but no backward


def drop_delayed_state(module: nn.Module) -> None:
    """Take the delayed state from ``module``: under another recipe nothing keeps it up to date."""
    for name in BUFFERS:
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
    module.__dict__.pop(LOADED, None)


def delayed_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The delayed state of every converted module in ``model``.

    Args:
        model: any module; parts without delayed state are passed over.

    Returns:
        ``{"<module name>.delayed_scale": [3] float32, "<module name>.delayed_amax_history": [3, H] float32, ...}``,
        detached copies on their devices; empty where no recipe is delayed.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(64, 64, recipe=octavo.recipes.delayed())
        >>> layer(torch.randn(8, 64)).sum().backward()
        >>> sorted(octavo.nn.delayed_state_dict(torch.nn.Sequential(layer)))
        ['0.delayed_amax_history', '0.delayed_scale']
    """
    return {name: buffer.detach().clone() for name, buffer in _buffers(model).items()}


def load_delayed_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what ``delayed_state_dict`` returned; nothing is changed unless all of it fits.

    Before ``model.load_state_dict`` or after it: loading weights empties the state, but not one that was just loaded.

    Args:
        model: a model converted with a recipe of the same history length.
        state: names and tensors as ``delayed_state_dict`` gives them.

    Raises:
        ValueError: for missing or unexpected names, another shape, or values that no cast has found (negative, NaN,
            infinite scales).

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(64, 64, recipe=octavo.recipes.delayed())
        >>> octavo.nn.load_delayed_state_dict(layer, octavo.nn.delayed_state_dict(layer))
    """
    own = _buffers(model)
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unexpected:
        raise ValueError(
            f"delayed state does not fit the model: missing {missing[:4]}, unexpected {unexpected[:4]}; "
            "convert the model with the recipe it was saved under first"
        )
    for name, buffer in own.items():
        if state[name].shape != buffer.shape:
            raise ValueError(
                f"{name}: saved shape {tuple(state[name].shape)}, the model's {tuple(buffer.shape)}; "
                "use the same history_length"
            )
        # an amax may be infinite or NaN, as the tensor was; a scale is never
        if bool((state[name] < 0).any()) or (name.endswith(BUFFERS[0]) and not bool(state[name].isfinite().all())):
            raise ValueError(f"{name}: {state[name].tolist()} holds what is no scale or amax; the file is damaged")
    for name, buffer in own.items():
        buffer.copy_(state[name])
        if not bool(state[name].all()):
            note_empty(buffer)
    for module in model.modules():
        if BUFFERS[0] in module._buffers:
            module.__dict__[LOADED] = module._buffers[BUFFERS[0]]._version  # type: ignore[union-attr]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    for module in model.modules():
        take_state_local(module)
    return {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in BUFFERS}
