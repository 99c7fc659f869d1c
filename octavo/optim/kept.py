"""What an optimizer keeps of a weight from step to step, and whether it still holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.reference.optimizer_step import WeightUpdate
from octavo.tensor.stored_weight import StoredWeight


class Kept(NamedTuple):
    """A weight's update, all but its gradient, and what it was made of: while that stays, so does the update."""

    update: WeightUpdate
    held: Tensor  # what it writes of the weight
    address: int
    version: int  # of the weight after the last step
    identity: tuple[int, ...]  # the weight's group and number, the seed, whether it has moments, ids of its state


def _is_part(weight: Tensor) -> bool:
    return isinstance(weight, StoredWeight) and weight.is_shard


def has_moved(kept: Kept, weight: Tensor, held: Tensor) -> bool:
    """Whether a weight lies elsewhere now; a shard without rows has no address that would tell."""
    return kept.held is not held if _is_part(weight) else kept.address != held.data_ptr()


def was_written(kept: Kept, weight: Tensor, held: Tensor) -> bool:
    """Whether anything but a step has written a weight since; FSDP2 gives shards other storage when they are loaded."""
    if not _is_part(weight):
        return kept.address == held.data_ptr() and kept.version != held._version
    if kept.held._version != kept.version:
        return True
    return kept.held is not held and not torch.equal(kept.held.view(torch.uint8), held.view(torch.uint8))
