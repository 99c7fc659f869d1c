"""Capabilities of devices: native FP8, the dtype that is multiplied fastest, and a warning where FP8 is emulated."""

from __future__ import annotations

import functools
import logging

import torch

from octavo.private import is_avx512_bf16_supported

_logger = logging.getLogger("octavo")
_warned: set[str] = set()
FIRST_NATIVE = (8, 9)  # sm_89


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return (9, 0) for an sm_90; None for a device that is no GPU of NVIDIA's."""
    # AMD's GPUs are called cuda too, with capabilities that mean something else
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else None


def runs_natively(device: torch.device) -> bool:
    """Whether the device has FP8 tensor cores that octavo uses: NVIDIA's sm_89, sm_90, sm_100 and later."""
    capability = compute_capability(device)
    return capability is not None and capability >= FIRST_NATIVE


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the fastest products on a device that hold bfloat16's values exactly: bfloat16, or float32.

    A CPU without instructions for bfloat16 multiplies it about five times slower than float32.
    """
    return torch.float32 if device.type == "cpu" and not _cpu_multiplies_bfloat16() else torch.bfloat16


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16: x86 with AVX512_BF16 or AMX, Arm with BF16; asked once."""
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return is_avx512_bf16_supported()
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def warn_once_if_emulated(device: torch.device) -> None:
    """Log, once for each device type, that FP8 is emulated there: exactly, but without FP8's speed."""
    if device.type in _warned or device.type == "meta" or runs_natively(device):
        return
    message = f"no FP8 hardware on {device}: octavo emulates it there in PyTorch, exactly but without its speed"
    warn_once(device.type, message)


def warn_once(key: str, message: str) -> None:
    """Log a warning, once in a process for each key."""
    if key not in _warned:
        _warned.add(key)
        _logger.warning(message)
