"""The least time that an operation can take, from peaks measured in the same run: whichever bound is the larger."""

from __future__ import annotations

from benchmarks.common.gpu_timer import Peaks


def floor_seconds(peaks: Peaks, nbytes: float = 0.0, flop: float = 0.0, fast_accum: bool = True) -> float:
    """max(bytes / copy bandwidth, FLOP / FP8 rate).

    Args:
        peaks: of this run.
        nbytes: read and written, each once.
        flop: of FP8 products.
        fast_accum: which of the two FP8 rates.
    """
    return max(nbytes / peaks.copy, flop / (peaks.fp8 if fast_accum else peaks.fp8_exact))


def product_flop(rows: int, cols: int, contraction: int) -> float:
    """FLOP of [rows, contraction] . [contraction, cols]."""
    return 2.0 * rows * cols * contraction


def product_bytes(rows: int, cols: int, contraction: int, result: float = 2.0) -> float:
    """Bytes of FP8 operands and a result of so many bytes an element."""
    return (rows + cols) * contraction + result * rows * cols
