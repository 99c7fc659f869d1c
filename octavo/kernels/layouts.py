"""Which layouts a device's FP8 product can read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.kernels.capability import runs_natively


def needs_transposed_codes(device: torch.device) -> bool:
    """Whether the product wants both operands contiguous along the contraction, so casts write codes transposed too.

    True where FP8 is native: Ada's and Hopper's FP8 tensor cores have no transposed form, and torch's product takes no
    other layout on later GPUs either. The reference reads any strides.
    """
    if device.type != "cuda":
        return False
    native = _native.get(device)
    if native is None:
        native = runs_natively(device)
        if not torch.compiler.is_compiling():
            _native[device] = native
    return native


_native: dict[torch.device, bool] = {}  # asking the driver costs microseconds; dynamo warns of functools.cache


def contraction_multiple(device: torch.device) -> int:
    """What a product's contracted dimension must be a multiple of; casts pad the operands with zero codes.

    16 where torch's product takes bytes in sixteens; 1 where operands are strided views, or the reference.
    """
    return 16 if needs_transposed_codes(device) else 1


def is_small_block(tile: Sequence[int]) -> bool:
    """Whether a Triton program holds whole blocks of this size: powers of two up to 128."""
    return all(size in (1, 2, 4, 8, 16, 32, 64, 128) for size in tile)


def padded(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple.

    Raises:
        ValueError: unless the multiple divides 16: kernels write their padding in tiles of that.
    """
    if multiple < 1 or 16 % multiple:
        raise ValueError(f"pad={multiple}: codes are padded to multiples of 1, 2, 4, 8 or 16")
    return -(-size // multiple) * multiple
