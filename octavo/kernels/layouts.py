"""Which layouts a device's FP8 product can read."""

from __future__ import annotations

import torch


def needs_transposed_codes(device: torch.device) -> bool:
    """Whether the product wants both operands contiguous along the contraction, so casts write codes transposed too.

    True for Ada and Hopper (sm_89, sm_90), whose FP8 tensor cores have no transposed form; Blackwell's (sm_100) and the
    reference read any strides.
    """
    if device.type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major < 10
