"""Masters: the float32 weight that an optimizer updates, out of the weight itself and a few more bytes.

    float32 weight            the master is the weight
    bf16 + 16-bit remainder   all of float32: weight and remainder add up to its bits
    bf16 + 8-bit remainder    its upper 24 bits; the lower 8 are rounded stochastically
    bf16, float16 master      the master times a power of two, known before the update (bound_after), rounded
                              stochastically; the weight is that master, rounded to nearest
    bf16 alone                rounded stochastically

A bf16 weight with a remainder is its master rounded to nearest, ties away from zero: so the remainder, master minus
weight in units of the last bit, always fits.

Each master follows a weight that was given other values, however they were written: a remainder is added to what is
there, and a float16 master counts only where it rounds to the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.reference.moment_codes import round_to_bf16, round_to_half
from octavo.kernels.reference.optimizer_state import Piece, Scaled, finite_amax
from octavo.numerics import scale_from_amax

FLOAT16_MAX = 65504.0


@dataclass
class MasterWeight(Scaled):
    """A weight [R, C] and what its master has besides.

    Attributes:
        weight: float32, bf16 or float16.
        kind: "weight" (it is its own master), "split32", "split24", "fp16_scaled" or "stochastic".
        rest: int16 or int8 remainder, or the float16 master; None for the others.
        scale_inv: [1, 1] float32 of the float16 master.
        amax: [1, 1] float32 of the float16 master, no less than the weight's.
    """

    weight: Tensor
    kind: str
    rest: Tensor | None = None
    scale_inv: Tensor | None = None
    amax: Tensor | None = None

    @property
    def is_random(self) -> bool:
        """Whether writing takes random bits."""
        return self.kind in ("split24", "fp16_scaled", "stochastic")

    def scale_of(self, amax: Tensor) -> Tensor:
        """The float16 master's, of masters up to this amax."""
        return scale_from_amax(amax, FLOAT16_MAX, True, 0)

    def read(self, piece: Piece) -> Tensor:
        """The master in float32: the weight's own piece where it is that, else a fresh tensor."""
        weight = piece.of(self.weight)
        if self.rest is None:
            return weight.to(torch.float32)
        rest = piece.of(self.rest)
        if self.kind == "fp16_scaled":
            assert self.scale_inv is not None
            wide = rest.to(torch.float32).mul_(self.scale_inv.view(1, 1, 1))
            return torch.where(wide.to(weight.dtype) == weight, wide, weight.to(torch.float32))
        bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        bits.add_(rest.to(torch.int32), alpha=1 if self.kind == "split32" else 1 << 8)
        return bits.view(torch.float32)

    def write(self, piece: Piece, wide: Tensor, bits16: Tensor | None) -> None:
        """Store the updated master, float32, which is overwritten, and the weight; bits16: where ``is_random``."""
        weight = piece.of(self.weight)
        if self.rest is None:
            if self.kind == "stochastic":
                assert bits16 is not None
                wide = round_to_bf16(wide, bits16)
            if weight.data_ptr() != wide.data_ptr():
                weight.copy_(wide)
            return
        if self.kind == "fp16_scaled":
            assert self.scale is not None and bits16 is not None
            rest = round_to_half(wide.mul_(self.scale.view(1, 1, 1)), bits16)
            piece.of(self.rest).copy_(rest)
            # the master as it is stored: rounding may have made it larger
            wide.copy_(rest).div_(self.scale.view(1, 1, 1))
            weight.copy_(wide)
            self.raise_found(finite_amax(wide))
            return
        bits = wide.view(torch.int32)
        finite = bool(torch.isfinite(wide.sum()))
        if self.kind == "split24":
            assert bits16 is not None
            bits = (bits + (bits16 >> 8)).bitwise_and_(-256)
        upper = (bits + 0x8000) >> 16
        rest = bits - (upper << 16)
        if not finite:  # a NaN's bits must not run over into another number's
            faults = ~torch.isfinite(wide)
            upper = torch.where(faults, wide.to(torch.bfloat16).view(torch.int16).to(torch.int32), upper)
            rest.masked_fill_(faults, 0)
        weight.copy_(upper.to(torch.int16).view(torch.bfloat16))
        piece.of(self.rest).copy_(rest if self.kind == "split32" else rest >> 8)
