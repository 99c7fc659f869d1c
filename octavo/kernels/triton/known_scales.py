"""Which delayed scales are known to exist, so that an eager cast can leave out the amax launch for those that may not.

Only the device knows whether a scale is still 0 (a role not yet rolled, or only ever with an amax of 0). After a commit
the three scales of before its backward pass, which the pass goes on reading, are copied to the host, without waiting;
once the copy has arrived and shows them, and as long as nobody else writes the buffer (its version), they exist: a
commit never takes a scale away.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class _KnownScale:
    def __init__(self, delayed_scale: Tensor) -> None:
        key = id(delayed_scale)
        self.owner = weakref.ref(delayed_scale, lambda _: _entries.pop(key, None))
        self.version = delayed_scale._version
        self.exists: tuple[bool, ...] = (False, False, False)
        self.copy: Tensor | None = None
        self.rolled = self.exists  # the roles whose scales in the copy are of just before
        self.arrived: torch.cuda.Event | None = None


_entries: dict[int, _KnownScale] = {}


def _current(delayed_scale: Tensor) -> _KnownScale | None:
    """What is known of this buffer, unless someone else has written it since."""
    entry = _entries.get(id(delayed_scale))
    if entry is None or entry.owner() is not delayed_scale or entry.version != delayed_scale._version:
        return None
    return entry


def scale_exists(delayed_scale: Tensor, role: int) -> bool:
    """Whether element ``role`` is known to be other than 0."""
    entry = _current(delayed_scale)
    if entry is None:
        return False
    if not entry.exists[role] and entry.copy is not None and _has_arrived(entry.arrived):
        found = zip(entry.exists, entry.rolled, entry.copy.tolist(), strict=True)
        entry.exists = tuple(exists or (rolled and scale != 0) for exists, rolled, scale in found)
        entry.copy = None
    return entry.exists[role]


def _has_arrived(event: torch.cuda.Event | None) -> bool:
    # an event must not be asked while a CUDA graph is captured
    return event is None or (not torch.cuda.is_current_stream_capturing() and event.query())


def committed(
    delayed_scale: Tensor, delayed_amax_history: Tensor, delayed_before: Tensor, rolled: tuple[bool, bool, bool]
) -> None:
    """Note that a kernel has just rolled these roles: the state's versions move, and the scales are looked at."""
    if delayed_scale.is_inference():  # has no version, so nothing can be known of it
        return
    entry = _current(delayed_scale)
    torch.autograd.graph.increment_version((delayed_scale, delayed_amax_history, delayed_before))
    if entry is None:
        entry = _entries[id(delayed_scale)] = _KnownScale(delayed_scale)
    entry.version = delayed_scale._version
    if entry.copy is not None or not any(new and not old for new, old in zip(rolled, entry.exists, strict=True)):
        return
    entry.rolled, before = rolled, delayed_before.detach()[1].view(torch.float32)
    if not delayed_scale.is_cuda:
        entry.copy, entry.arrived = before.clone(), None
    elif not torch.cuda.is_current_stream_capturing():
        entry.copy = torch.empty(3, dtype=torch.float32, pin_memory=True)
        entry.copy.copy_(before, non_blocking=True)
        entry.arrived = torch.cuda.Event()
        entry.arrived.record()
