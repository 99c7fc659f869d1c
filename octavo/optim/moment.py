"""Moment: how an optimizer keeps one of its moving averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.formats import E4M3, E4M4, Format
from octavo.granularity import BLOCK, Granularity, PerBlock, PerTensor
from octavo.kernels.layouts import as_matrix_shape, blocks_in_row
from octavo.kernels.moment_codes import decode_moment
from octavo.kernels.reference.optimizer_state import MomentTensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOMENT_GRANULARITIES = (PerBlock(1, BLOCK), PerTensor())
ROUNDINGS = ("nearest", "stochastic", "hybrid")


@dataclass(frozen=True)
class Moment:
    """A way to store a moving average.

    Args:
        format: "fp32", "bf16", or codes of octavo.E4M3, octavo.E5M2, octavo.optim.E4M4 (no sign: second moments).
        root: store the square root (of second moments): half the octaves, twice the relative error.
        granularity: which codes share a scale: PerBlock(1, 128), along rows of the first dimension, or PerTensor().
        rounding: "nearest": an average that moves by less than half a step stands still; "stochastic": it follows, with
            up to twice the error; "hybrid": to nearest, but stochastically where that would leave the code as it is.
        scale: "block": from the values of this step; "previous": from the amax of the last, for PerTensor() only.

    Raises:
        TypeError, ValueError: for arguments that don't fit each other, with the remedy.

    Example:
        >>> from octavo import E4M3
        >>> Moment(E4M3, rounding="stochastic")
        Moment(E4M3, PerBlock(1, 128), stochastic)
        >>> Moment("bf16")
        Moment(bf16, nearest)
    """

    format: Literal["fp32", "bf16"] | Format
    root: bool = False
    granularity: Granularity = PerBlock(1, BLOCK)
    rounding: Literal["nearest", "stochastic", "hybrid"] = "nearest"
    scale: Literal["block", "previous"] = "block"

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format) and self.format not in DTYPES:
            raise TypeError(f"Moment: format={self.format!r}: use 'fp32', 'bf16', E4M3, E5M2 or E4M4")
        if self.rounding not in ROUNDINGS or (self.format == "fp32" and self.rounding != "nearest"):
            uses = "'nearest'" if self.format == "fp32" else ", ".join(map(repr, ROUNDINGS))
            raise ValueError(f"Moment: rounding={self.rounding!r} of {self.format}: use {uses}")
        if self.granularity not in MOMENT_GRANULARITIES:
            raise ValueError(f"Moment: granularity={self.granularity}: use PerBlock(1, {BLOCK}) or PerTensor()")
        if self.scale not in ("block", "previous"):
            raise ValueError(f"Moment: scale={self.scale!r}: use 'block' or 'previous'")
        if self.scale == "previous" and (self.granularity != PerTensor() or not isinstance(self.format, Format)):
            raise ValueError("Moment: scale='previous' is the amax of codes, and needs granularity=PerTensor()")
        if self.root and not isinstance(self.format, Format):
            raise ValueError(f"Moment: root=True is for codes; {self.format} holds the octaves without it")

    def __repr__(self) -> str:
        words = [str(self.format)]
        if isinstance(self.format, Format):
            words += (["root"] if self.root else []) + [str(self.granularity)]
        words.append(self.rounding)
        return f"Moment({', '.join(words + (['previous amax'] if self.scale == 'previous' else []))})"

    def new_state(self, name: str, shape: torch.Size, device: Any, fp8_experts: bool = False) -> dict[str, Tensor]:
        """Return the tensors of a moment of zeros in an optimizer's state, whose names begin with ``name``.

        ``fp8_experts``: the weight is experts in FP8 [E, N, K]; each has a scale, or those of blocks of its rows.
        """
        if not isinstance(self.format, Format):
            return {name: torch.zeros(shape, dtype=DTYPES[self.format], device=device)}
        rows, cols = as_matrix_shape(shape)
        scales: tuple[int, ...] = (rows, blocks_in_row(cols))
        if self.granularity == PerTensor():
            scales = (rows if fp8_experts else 1, 1)
        elif fp8_experts and shape[1] > 1 and shape[2] % BLOCK:  # blocks are no longer those of a plain weight's rows
            scales = (*shape[:2], blocks_in_row(shape[2]))
        state = {
            f"{name}_codes": torch.zeros(shape, dtype=torch.uint8, device=device),
            f"{name}_scale_inv": torch.ones(scales, dtype=torch.float32, device=device),
        }
        if self.scale == "previous":
            state[f"{name}_amax"] = torch.zeros(scales, dtype=torch.float32, device=device)
        return state

    def for_kernel(self, name: str, state: dict[str, Tensor], fp8_experts: bool = False) -> MomentTensors:
        """Return the tensors of ``new_state`` as matrices, which the kernels read and write."""
        if not isinstance(self.format, Format):
            return MomentTensors(as_matrix(state[name], fp8_experts), rounding=self.rounding)
        data, scale_inv = as_matrix(state[f"{name}_codes"], fp8_experts), state[f"{name}_scale_inv"]
        if fp8_experts and self.granularity != PerTensor():
            scale_inv = scale_inv.view(data.shape[0], blocks_in_row(data.shape[1]))
        return MomentTensors(data, self.format, scale_inv, state.get(f"{name}_amax"), self.root, self.rounding)

    def read_codes(self, codes: Tensor, scale_inv: Tensor, row: int = 0, column: int = 0) -> Tensor:
        """Return float32 values of codes that begin at this place of a tensor, whose scales are as in ``new_state``."""
        assert isinstance(self.format, Format)
        if len(scale_inv) > 1:
            scale_inv = scale_inv[row : row + len(codes)]
        matrix = codes.flatten(0, 1) if scale_inv.ndim == 3 else codes.reshape(as_matrix_shape(codes.shape))
        rows, cols = matrix.shape
        blocks = scale_inv.flatten(0, -2).expand(rows, max(scale_inv.shape[-1], blocks_in_row(column + cols)))
        factors = blocks.repeat_interleave(BLOCK, 1)[:, column : column + cols]
        wide = decode_moment(matrix, self.format).mul_(factors)
        return (wide.square_() if self.root else wide).view(codes.shape)


def as_matrix(tensor: Tensor, fp8_experts: bool = False) -> Tensor:
    """View a contiguous tensor as [R, C]; experts in FP8 [E, N, K] as matrices one below the other, [E * N, K]."""
    return tensor.flatten(0, 1) if fp8_experts else tensor.view(as_matrix_shape(tensor.shape))


# "fp8": second moments have no sign, so that its bit is one more of the mantissa; their root takes half the octaves.
# Blocks of 128 keep underflow below one element in a thousand; stochastic rounding lets averages follow small changes.
NAMED_MOMENTS: dict[str, tuple[Moment, Moment]] = {
    "fp32": (Moment("fp32"), Moment("fp32")),
    "bf16": (Moment("bf16", rounding="stochastic"), Moment("bf16", rounding="stochastic")),
    "fp8": (Moment(E4M3, rounding="stochastic"), Moment(E4M4, root=True, rounding="stochastic")),
}


def moments_of(moments: Any, count: int = 2) -> tuple[Moment, ...]:
    """Return the Moments that a ``moments`` argument means: a name of NAMED_MOMENTS, a pair of Moments or a Moment."""
    alternative = "a pair of octavo.optim.Moment" if count == 2 else "an octavo.optim.Moment"
    remedy = f"moments={moments!r}: use {', '.join(map(repr, NAMED_MOMENTS))} or {alternative}"
    if isinstance(moments, str):
        if moments not in NAMED_MOMENTS:
            raise ValueError(remedy)
        return NAMED_MOMENTS[moments][:count]
    chosen = (moments,) if count == 1 else moments
    if not (isinstance(chosen, tuple) and len(chosen) == count and all(isinstance(m, Moment) for m in chosen)):
        raise TypeError(remedy)
    first = chosen[0]
    if first.root or (isinstance(first.format, Format) and not first.format.signed):
        raise ValueError(f"{first} has no sign: it is for second moments")
    return chosen
