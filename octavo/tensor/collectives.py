"""torch.distributed's collectives, by the names that they have in each release."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def all_gather(whole: Tensor, part: Tensor, group: Any, async_op: bool = False) -> Any:
    """Fill ``whole`` with all ranks' ``part``, in the order of the ranks; returns what waits for it if ``async_op``."""
    import torch.distributed as dist

    # torch 2.13 warns of the name that 2.11 has
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=async_op)
