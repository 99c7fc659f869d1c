"""Which layouts a device's FP8 product can read."""

from __future__ import annotations

import functools

import torch


def needs_transposed_codes(device: torch.device) -> bool:
    """Whether the product wants both operands contiguous along the contraction, so casts write codes transposed too.

    True for Ada and Hopper (sm_89, sm_90), whose FP8 tensor cores have no transposed form; Blackwell's (sm_100) and the
    reference read any strides.
    """
    return device.type == "cuda" and _needs_transposed_codes(device)


@functools.cache
def _needs_transposed_codes(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] < 10


def contraction_multiple(device: torch.device) -> int:
    """What a product's contracted dimension must be a multiple of; casts pad the operands with zero codes.

    16 where torch's product takes bytes in sixteens; 1 where operands are strided views, or the reference.
    """
    return 16 if needs_transposed_codes(device) else 1


def padded(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple
