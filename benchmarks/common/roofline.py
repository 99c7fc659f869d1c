"""The GPU's peak rates, measured in the same run, and the least time that an operation can take by them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.tune.timing import DEVICE, timings


class Peaks(NamedTuple):
    """Peak rates of the device in this run: bytes/s read + written, FLOP/s."""

    copy: float
    bf16: float
    fp8: float  # the tensor cores' short accumulator
    fp8_exact: float

    def __str__(self) -> str:
        return (
            f"measured peaks: copy {self.copy / 1e12:.3f} TB/s, bf16 {self.bf16 / 1e12:.0f} TFLOP/s, "
            f"FP8 {self.fp8 / 1e12:.0f} TFLOP/s fast accumulation, {self.fp8_exact / 1e12:.0f} without"
        )


def peaks(toy: bool = False) -> Peaks:
    """Measure the peak rates: a copy of 1 GiB, square products of random numbers, 8192 a side."""
    elements, side = (1 << 16, 64) if toy else (1 << 30, 8192)
    source, target = (torch.zeros(elements, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=DEVICE)

    def fp8(fast: bool) -> Tensor:
        return torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    times = timings(
        {
            "copy": lambda: target.copy_(source),
            "bf16": lambda: torch.mm(a, b.t()),
            "fp8": lambda: fp8(True),
            "fp8_exact": lambda: fp8(False),
        },
        rounds=20,
    )
    flop = 2 * side**3
    return Peaks(2 * elements / times.median("copy"), *(flop / times.median(name) for name in Peaks._fields[1:]))


def floor_seconds(peaks: Peaks, nbytes: float = 0.0, flop: float = 0.0, fast_accum: bool = True) -> float:
    """Return max(bytes / copy bandwidth, FLOP / FP8 rate).

    Args:
        peaks: of this run.
        nbytes: read and written, each once.
        flop: of FP8 products.
        fast_accum: which of the two FP8 rates.
    """
    return max(nbytes / peaks.copy, flop / (peaks.fp8 if fast_accum else peaks.fp8_exact))


def product_flop(rows: int, cols: int, contraction: int) -> float:
    """Return FLOP of [rows, contraction] . [contraction, cols]."""
    return 2.0 * rows * cols * contraction


def product_bytes(rows: int, cols: int, contraction: int, result: float = 2.0) -> float:
    """Return bytes of FP8 operands and of a result with ``result`` bytes an element."""
    return (rows + cols) * contraction + result * rows * cols
