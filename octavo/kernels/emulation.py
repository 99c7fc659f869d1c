"""Where FP8 is native, and the one warning where it is not."""

from __future__ import annotations

import logging

import torch

_logger = logging.getLogger("octavo")
_warned: set[str] = set()


def runs_natively(device: torch.device) -> bool:
    """Whether the device has FP8 tensor cores that octavo uses: NVIDIA's sm_89, sm_90, sm_100 and later."""
    # AMD's GPUs answer to the name of cuda too, with capabilities that mean something else
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def warn_once_if_emulated(device: torch.device) -> None:
    """Log, once a device type, that FP8 is emulated there: exact, but without FP8's speed."""
    if device.type in _warned or device.type == "meta" or runs_natively(device):
        return
    _warned.add(device.type)
    _logger.warning(
        "no FP8 hardware on %s: octavo emulates it there by its reference kernels, exactly but without its speed",
        device,
    )
