"""Update the delayed state, alone or at the end of grad_output's cast; and tell casts which delayed scales exist.

An eager cast leaves out the amax launch if its delayed scale is known to exist. Only the device knows whether a scale
is still 0 (its role was not rolled yet, or only with amaxes of 0). After a commit the three scales from before its
backward pass, which the pass goes on reading, are copied to the host, without waiting. Those that the copy shows to be
other than 0 exist from then on, until somebody else writes the buffer (by its version): a commit never removes a scale.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import backward_pass as passes
from octavo.kernels.arguments import Commit
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.replay import recorder, repeatable
from octavo.kernels.triton.tiles import scale_from_amax

backward_pass = repeatable(passes.backward_pass)


class Update(NamedTuple):
    """A kernel's constants for the next scales; limits (format.max / 2^margin), powers_of_two: an element a role."""

    limits: tuple[float, ...]
    powers_of_two: tuple[bool, ...]
    most_recent: bool
    length: int  # entries of the history
    block: int  # that, rounded up to a power of two
    longest: int  # passes of one step


class StateTensors(NamedTuple):
    """A delayed state's tensors, and the numbers of backward passes, which octavo/kernels/backward_pass.py counts."""

    scale: Tensor  # [3]
    history: Tensor | None  # [3, length]; None, as what follows, where the scale alone is read
    before: Tensor | None  # [3, 3] int32, see octavo/kernels/backward_pass.py
    numbers: Tensor | None  # [2] int32: of this pass, and of the last one of a step that is over


# where rows of ``before`` [3, 3] begin, which have an element a role; see octavo/kernels/backward_pass.py
LAST_COMMIT, SCALE_BEFORE, LAST_ROLL = map(tl.constexpr, (0, 3, 6))


@triton.jit
def scale_of_pass(state, ROLE: tl.constexpr):
    """Return the scale that was in force when the backward pass began; of a state without ``before`` its scale."""
    scale = tl.load(state.scale + ROLE)
    if state.before is not None:
        scale_before = tl.load(state.before + SCALE_BEFORE + ROLE).to(tl.float32, bitcast=True)
        scale = tl.where(tl.load(state.before + LAST_COMMIT + ROLE) == tl.load(state.numbers), scale_before, scale)
    return scale


@triton.jit
def roll(state, amax, ROLE: tl.constexpr, update: tl.constexpr):
    """Put amax at the front of history[ROLE], or again in a step raise its newest to amax; and write the next scale.

    ROLE: 0 is the input's, 1 the weight's, 2 grad_output's.
    """
    index = tl.arange(0, update.block)
    row_ptr = state.history + ROLE * update.length
    number = tl.load(state.numbers)
    last_roll = tl.load(state.before + LAST_ROLL + ROLE)
    passes_since = number - last_roll  # negative: of another process's or device's numbers
    again = (last_roll > tl.load(state.numbers + 1)) & (passes_since >= 0) & (passes_since < update.longest)
    again = again | (tl.load(state.before + LAST_COMMIT + ROLE) == number)
    previous = tl.load(state.scale + ROLE)
    scale_before = scale_of_pass(state, ROLE)
    newest = tl.where(again, tl.maximum(amax, tl.load(row_ptr)), amax)
    moved = index - tl.where(again, 0, 1)
    old = tl.load(row_ptr + moved, mask=(index > 0) & (index < update.length), other=0.0)
    rolled = tl.where(index == 0, newest, old)
    largest = newest if update.most_recent else tl.max(rolled, 0)
    tl.debug_barrier()  # every thread has read what another writes
    tl.store(row_ptr + index, rolled, mask=index < update.length)
    tl.store(state.before + LAST_COMMIT + ROLE, number)
    tl.store(state.before + SCALE_BEFORE + ROLE, scale_before.to(tl.int32, bitcast=True))
    tl.store(state.before + LAST_ROLL + ROLE, tl.where(again, last_roll, number))
    scale = scale_from_amax(largest, update.limits[ROLE], update.powers_of_two[ROLE])
    tl.store(state.scale + ROLE, tl.where(largest > 0, scale, previous))


@triton.jit
def roll_others(state, amax_input_ptr, amax_weight_ptr, update: tl.constexpr):
    """Roll input and weight where their amax is given."""
    if amax_input_ptr is not None:
        roll(state, tl.load(amax_input_ptr), 0, update)
    if amax_weight_ptr is not None:
        roll(state, tl.load(amax_weight_ptr), 1, update)


@triton.jit
def delayed_update_kernel(state, amax_input_ptr, amax_weight_ptr, amax_grad_output_ptr, update: tl.constexpr):
    """Roll the roles whose amax is given."""
    roll_others(state, amax_input_ptr, amax_weight_ptr, update)
    if amax_grad_output_ptr is not None:
        roll(state, tl.load(amax_grad_output_ptr), 2, update)


def state_and_update(commit: Commit) -> tuple[StateTensors, Update]:
    """Return a commit as kernels take it, in a backward pass that this counts."""
    limits, powers_of_two, margins = commit[5:8]
    margined = tuple(limit * 2.0**-margin for limit, margin in zip(limits, margins, strict=True))
    length, most_recent = commit.delayed_amax_history.shape[1], commit.reduce == "most_recent"
    block = triton.next_power_of_2(length)
    update = Update(margined, tuple(powers_of_two), most_recent, length, block, passes.LONGEST)
    return StateTensors(*commit[:3], backward_pass(commit.delayed_scale.device)), update


def delayed_update(commit: Commit, amax_grad_output: Tensor | None) -> None:
    """Compute the op ``octavo::delayed_update``; its contract is in signatures.py."""
    state, update = state_and_update(commit)
    amaxes = *commit[3:5], amax_grad_output
    launch(delayed_update_kernel, 1, (state, *amaxes, update), 4 if update.length > 32 else 1)
    committed(*commit[:3], tuple(amax is not None for amax in amaxes))


class _KnownScale:
    """The host's knowledge of a delayed_scale: which elements are other than 0, and a copy on its way to the host."""

    def __init__(self, delayed_scale: Tensor) -> None:
        key = id(delayed_scale)
        self.owner = weakref.ref(delayed_scale, lambda _: _entries.pop(key, None))
        self.version = delayed_scale._version
        self.exists: tuple[bool, ...] = (False, False, False)
        self.copy: Tensor | None = None
        # by the commit that sent the copy: its scales are from before that pass
        self.rolled: tuple[bool, ...] = self.exists
        self.arrived: torch.cuda.Event | None = None

    def exists_now(self, role: int) -> bool:
        """Whether a role's scale is known to be other than 0, by the copy too if that has arrived, without waiting."""
        if not self.exists[role] and self.copy is not None:
            # an event must not be queried while a CUDA graph is captured
            if self.arrived is None or (not torch.cuda.is_current_stream_capturing() and self.arrived.query()):
                scales = zip(self.exists, self.rolled, self.copy.tolist(), strict=True)
                self.exists = tuple(exists or (rolled and scale != 0) for exists, rolled, scale in scales)
                self.copy = None
        return self.exists[role]


# by id, as tensors compare element by element; an entry goes with its tensor, and _current leaves it out once anyone
# but ``committed`` has written that
_entries: dict[int, _KnownScale] = {}


def _current(delayed_scale: Tensor) -> _KnownScale | None:
    """Return this buffer's entry, None if someone else has written the buffer since."""
    entry = _entries.get(id(delayed_scale))
    if entry is None or entry.owner() is not delayed_scale or entry.version != delayed_scale._version:
        return None
    return entry


def scale_exists(delayed_scale: Tensor, role: int) -> bool:
    """Whether element ``role`` is known to be other than 0."""
    entry = _current(delayed_scale)
    exists = entry is not None and entry.exists_now(role)
    if (recording := recorder()) is not None:
        recording.assume(exists)
    return exists


@repeatable
def committed(
    delayed_scale: Tensor, delayed_amax_history: Tensor, delayed_before: Tensor, rolled: tuple[bool, ...]
) -> None:
    """Note that a kernel has just rolled these roles: raise the state's versions, and copy the scales to the host."""
    if delayed_scale.is_inference():  # has no version, so nothing can be known of it
        return
    entry = _current(delayed_scale)
    torch.autograd.graph.increment_version((delayed_scale, delayed_amax_history, delayed_before))
    if entry is None:
        entry = _entries[id(delayed_scale)] = _KnownScale(delayed_scale)
    entry.version = delayed_scale._version
    if entry.copy is not None or not any(new and not old for new, old in zip(rolled, entry.exists, strict=True)):
        return
    entry.rolled, scales_before = rolled, delayed_before.detach()[1].view(torch.float32)
    if not delayed_scale.is_cuda:
        entry.copy, entry.arrived = scales_before.clone(), None
    elif not torch.cuda.is_current_stream_capturing():
        entry.copy = torch.empty(3, dtype=torch.float32, pin_memory=True, device="cpu")
        entry.copy.copy_(scales_before, non_blocking=True)
        entry.arrived = torch.cuda.Event()
        entry.arrived.record()
