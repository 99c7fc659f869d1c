"""Memory of a call: the tensors that it saves for backward, and its peak."""

import warnings

import torch
from torch import Tensor, nn


def saved_tensors(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the tensors that a forward saves for backward, without the parameters."""
    parameter_storages = {p.untyped_storage()._cdata for p in net.parameters()}
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in parameter_storages:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x).sum()
    return saved


def peak_bytes(step) -> int:
    """Return the most bytes that a call allocates beyond those before it: all of the allocator's events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        warnings.catch_warnings(action="ignore"),  # torch 2.11 would have its own events kept, which take longest
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
