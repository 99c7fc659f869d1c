"""The state of delayed scaling: tensors in a module's attribute ``fp8`` (nn/recipe_module.py), which are no buffers.

    delayed_scale         [3]     float32, one scale a role (input, weight, grad_output); 0 = no history yet
    delayed_amax_history  [3, H]  float32, one an optimizer step, newest first
    delayed_before        [3, 3]  int32, rows last_commit, scale_before, last_roll, an element a role:
                                  kernels/backward_pass.py

Forward only reads it. Backward's cast of grad_output commits: the first pass after an optimizer's step begins an entry
of the histories, later passes of the same step raise that entry; each writes the next scales. Casts in
a pass read the scales from before the pass. So a recomputed forward (activation checkpointing) reads the first one's
scales, and the history is as long whether a step has one backward pass or many. kernels/backward_pass.py tells steps
and passes.

The state belongs to this rank: were its tensors buffers, DistributedDataParallel would write rank 0's over them before
each forward. They are in no state_dict: a converted model's has the keys of the plain model. Losing them costs one step
whose scales are each tensor's own; for a bit-identical continuation save ``delayed_state_dict`` beside the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS

from octavo import kernels
from octavo.kernels import backward_pass
from octavo.numerics import MAX_SCALE, MIN_SCALE
from octavo.private import FakeTensor, current_graph_task_id, no_modes
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, ROLES, Delayed
from octavo.step_count import version_of

# names of a state's tensors that are saved, in files and as a module's attributes
SAVED_TENSORS = SCALE, HISTORY = "delayed_scale", "delayed_amax_history"
FACTS_ATTRIBUTE = "_octavo_facts"  # of a scale: its StateFacts
NEXT_LOAD = None  # in StateFacts.loads: a load_state_dict that has not begun
NO_LOAD = object()  # of a layer without an entry there: it is like no load_state_dict
IN_CUDA_GRAPH = 0  # a history's id, see have_same_inputs
# input_cast where no amax enters (INPUT_NOT_CAST), or that of a cast without a number (UNKNOWN_CAST)
INPUT_NOT_CAST, UNKNOWN_CAST = 0, 1

# a recomputed forward calls it, the first one did not, and selective checkpointing compares their ops
SAC_IGNORED_OPS.add(torch.ops.octavo.scales_of_pass.default)


class StateFacts:
    """Facts that this process knows of a state without reading its tensors, as long as the scale has this version.

    They hang on the scale, as an op in a compiled graph is given no more of a state. A copied scale has an empty set in
    their place, which ``torch.load(weights_only=True)`` reads.
    """

    def __init__(self, version: int, may_be_empty: bool) -> None:
        self.version = version
        self.may_be_empty = may_be_empty  # whether a role may have no scale
        self.history_id: int | None = None  # see have_same_inputs
        # the history's version when the id was renewed; another one says that the history was written by hand since
        self.history_version: int | None = None
        # {id of a layer: the load_state_dict that loads the weight which the state belongs to}. A load is the object
        # that all of its calls share; NEXT_LOAD where the state was loaded before its weight. A layer has no entry if
        # the state belongs to no weight that was loaded
        self.loads: dict[int, object] = {}

    def is_of(self, layer: nn.Module, load: object) -> bool:
        """Whether the state belongs to the weight of this layer that this ``load_state_dict`` loads."""
        owner = self.loads.get(id(layer), NO_LOAD)
        return owner is NEXT_LOAD or owner is load

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()


def facts_of(scale: Tensor) -> StateFacts:
    """Return what is known of a delayed scale as it is now: after a write, only that its roles have scales."""
    facts, version = scale.__dict__.get(FACTS_ATTRIBUTE), version_of(scale)
    if type(facts) is not StateFacts:  # a new scale; or a copy, whose versions are its own
        facts = scale.__dict__[FACTS_ATTRIBUTE] = StateFacts(version, facts is not None or version <= 0)
    elif facts.version != version:
        facts.version, facts.may_be_empty, facts.loads = version, False, {}
        if facts.history_id != IN_CUDA_GRAPH:  # whose replays enter more after any write
            facts.history_id = None
    return facts


class State(NamedTuple):
    """A module's delayed state: the tensors of the file's table."""

    scale: Tensor
    amax_history: Tensor
    before: Tensor

    @classmethod
    def empty(cls, history_length: int, device: torch.device | str | None = None) -> State:
        """Return a state without history."""
        scale = torch.zeros(len(ROLES), dtype=torch.float32, device=device)
        history = torch.zeros(len(ROLES), history_length, dtype=torch.float32, device=device)
        state = cls(scale, history, torch.zeros(3, len(ROLES), dtype=torch.int32, device=device))
        note_empty(scale)
        return state

    def on(self, device: torch.device) -> State:
        """Return the state on this device: itself if it is there, an empty one if either device is meta."""
        if self.scale.device == device:
            return self
        if self.scale.is_meta or device.type == "meta":
            return State.empty(self.amax_history.shape[1], device)
        moved = State(*(tensor.to(device) for tensor in self))
        note_empty(moved.scale)
        return moved

    def in_force(self, role: int) -> Tensor:
        """Return the scales that this role's casts read: in a backward pass, recomputing too, those from before it."""
        if role == GRAD_OUTPUT or (not torch.compiler.is_compiling() and backward_pass.is_running()):
            return kernels.scales_of_pass(self.scale, self.before)
        return self.scale

    def clone(self) -> State:
        """Return a copy."""
        return State(*(tensor.clone() for tensor in self))


def state_of(module: nn.Module) -> State | None:
    """Return the delayed state in a module's attribute ``fp8``; None if it has none."""
    state = getattr(module.__dict__.get("fp8"), "state", None)
    return state if type(state) is State else None  # another library's module may have such an attribute


def state_under(rule: Delayed | None, old: State | None, device: torch.device) -> State | None:
    """Return a layer's state under a rule, None without one, as nothing would keep it up to date.

    It is the ``old`` state if that has the rule's length and is not on meta; from one of another length the scales and
    newest amaxes are copied. Otherwise it is empty.
    """
    if rule is None:
        return None
    if old is not None and old.amax_history.shape[1] == rule.history_length and not old.scale.is_meta:
        return old
    new = State.empty(rule.history_length, device)
    if old is not None and not old.scale.is_meta:
        new.scale.copy_(old.scale)
        new.amax_history[:, 0] = old.amax_history[:, 0]
        note_empty(new.scale)
    return new


def empty_state(state: State | None, role: int | None = None) -> None:
    """Forget the history of a role, or of all."""
    if state is None:
        return
    history_id, history_version = facts_of(state.scale).history_id, version_of(state.amax_history)
    with torch.no_grad():
        for tensor in (state.scale, state.amax_history):
            (tensor if role is None else tensor[role]).zero_()
        (state.before if role is None else state.before[:, role]).zero_()  # no pass has rolled this history
    note_empty(state.scale)
    if role not in (None, INPUT):
        facts = facts_of(state.scale)
        facts.history_id = history_id
        if facts.history_version == history_version:
            facts.history_version = version_of(state.amax_history)


def note_empty(scale: Tensor) -> None:
    """Note that a role may have no scale; nothing is noted in a compiled graph, where may_be_empty is always True."""
    if not torch.compiler.is_compiling():
        facts_of(scale).may_be_empty = True


def may_be_empty(scale: Tensor) -> bool:
    """Whether a role may have no scale: no backward has committed one since the state was created or emptied.

    Decided by this process's history, never by values, so that all ranks decide alike. In compiled code: always True,
    and the graph may look at the facts when it runs.
    """
    return torch.compiler.is_compiling() or facts_of(scale).may_be_empty


_fresh_histories = itertools.count(1)


def have_same_inputs(a: State, b: State) -> bool:
    """Whether two layers' histories of the input are the same, bit for bit, so that both would cast it alike.

    They stay the same for as long as the layers share each input's cast, which their history ids tell:

        None             something unknown wrote the history: a user, before a commit made a scale of it, a load, a
                         compiled graph, or a commit of a cast without a number. The values are compared, once, for
                         which the host waits
        IN_CUDA_GRAPH    replays of a captured graph write it, unseen: it is like no other
        other integers   equal ones mean equal histories, on the same device: the number of a history that was
                         compared, and from a commit on the hash of (the id before it, the pass, the cast's number)
    """
    id_a, id_b = facts_of(a.scale).history_id, facts_of(b.scale).history_id
    if IN_CUDA_GRAPH in (id_a, id_b):
        return False
    if id_a is not None and id_b is not None:
        return id_a == id_b
    if a.scale.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    if type(a.scale) is FakeTensor:  # a forward without data: as in a training from its beginning
        return True
    shared_history = id_a or id_b or next(_fresh_histories)
    with no_modes(), torch.no_grad():  # a mode that sees ops must see the same ones in a recomputed forward
        values = [(state.scale[INPUT], state.amax_history[INPUT], state.before[:, INPUT]) for state in (a, b)]
        same = all(map(torch.equal, *values))
    for state, history_id in ((a, id_a), (b, id_b)):
        if history_id is None:
            facts = facts_of(state.scale)
            facts.history_id = shared_history if same else next(_fresh_histories)
            facts.history_version = version_of(state.amax_history)
    return same


@contextmanager
def entering_input(state: State, input_cast: int) -> Iterator[None]:
    """Renew the id of a layer's input history around a commit; ``input_cast``: the number of the cast that enters.

    the first of these that applies                           the id after the commit, see have_same_inputs
    a CUDA graph is captured                                  IN_CUDA_GRAPH
    the id was None, or IN_CUDA_GRAPH                         the same
    the history was written by hand since the last commit     None
    the amax of an UNKNOWN_CAST enters                        None
    INPUT_NOT_CAST: nothing enters                            the same
    the amax of a cast with a number enters                   the hash of (the id, the pass, that number)
    """
    if torch.compiler.is_compiling():
        yield
        return
    facts, history = facts_of(state.scale), state.amax_history
    old_id = facts.history_id
    # by version_of, without the call
    was_written_by_hand = facts.history_version not in (None, -1 if history.is_inference() else history._version)
    yield
    if state.scale.is_cuda and torch.cuda.is_current_stream_capturing():
        new_id: int | None = IN_CUDA_GRAPH
    elif old_id in (None, IN_CUDA_GRAPH):
        new_id = old_id
    elif was_written_by_hand or input_cast == UNKNOWN_CAST:
        new_id = None
    elif input_cast == INPUT_NOT_CAST:
        new_id = old_id
    else:
        new_id = hash((old_id, current_graph_task_id(), input_cast))
    if old_id is not None or new_id is not None:
        facts_of(state.scale).history_id = new_id
    facts.history_version = -1 if history.is_inference() else history._version


def delayed_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the delayed state of every converted module in ``model``.

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
    return {name: tensor.detach().clone() for name, tensor in _saved_tensors(model).items()}


def load_delayed_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what ``delayed_state_dict`` returned; nothing is changed unless all of it fits.

    After ``model.load_state_dict``, or before it: the state belongs to the weights that were loaded just before, or
    else to the next that are loaded. Other weights, loaded later or written by hand, empty it.

    Args:
        model: a model converted with a recipe of the same history length.
        state: names and tensors as ``delayed_state_dict`` gives them.

    Raises:
        ValueError: for missing or unexpected names, another shape, or values that no cast has found: an amax that is
            not finite or is negative, a scale that is neither 0 (no history yet) nor 2^-126 to 2^126.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(64, 64, recipe=octavo.recipes.delayed())
        >>> octavo.nn.load_delayed_state_dict(layer, octavo.nn.delayed_state_dict(layer))
    """
    tensors_of_model = _saved_tensors(model)
    missing, unexpected = sorted(tensors_of_model.keys() - state.keys()), sorted(state.keys() - tensors_of_model.keys())
    if missing or unexpected:
        raise ValueError(
            f"delayed state does not fit the model: missing {missing[:4]}, unexpected {unexpected[:4]}; "
            "convert the model with the recipe it was saved under first"
        )
    loaded = {name: state[name].to(tensor.dtype) for name, tensor in tensors_of_model.items()}
    for name, values in loaded.items():
        if values.shape != (shape := tensors_of_model[name].shape):
            raise ValueError(
                f"{name}: saved shape {tuple(values.shape)}, the model's {tuple(shape)}; use the same history_length"
            )
        least, largest = (MIN_SCALE, MAX_SCALE) if name.endswith(SCALE) else (0.0, torch.finfo(torch.float32).max)
        if not bool(((values == 0) | ((values >= least) & (values <= largest))).all()):
            raise ValueError(f"{name}: {values.tolist()} holds what is no scale or amax; the file is damaged")
    states = {module: module_state for module in model.modules() if (module_state := state_of(module)) is not None}
    loads = {module: facts_of(module_state.scale).loads for module, module_state in states.items()}
    for name, tensor in tensors_of_model.items():
        tensor.copy_(loaded[name])
        if not bool(loaded[name].all()):
            note_empty(tensor)
    for module, module_state in states.items():
        module_state.before.zero_()
        # other layers that share this state have entries too: keep them
        facts_of(module_state.scale).loads |= {id(module): NEXT_LOAD} | loads[module]
        module.state_was_loaded()  # type: ignore[operator]


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    layers = [(path, module) for path, module in model.named_modules() if state_of(module) is not None]
    return {f"{path}.{key}".removeprefix("."): getattr(layer, key) for path, layer in layers for key in SAVED_TENSORS}
