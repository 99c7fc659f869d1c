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

from octavo.kernels.reference.optimizer_state import Piece, finite_amax, round_to_bf16, round_to_half
from octavo.numerics import scale_from_amax

FLOAT16_MAX = 65504.0


@dataclass
class MasterWeight:
    """A weight [R, C] and what its master has besides.

    Attributes:
        weight: float32, bf16 or float16.
        kind: "weight" (it is its own master), "split32", "split24", "fp16_scaled" or "stochastic".
        rest: int16 or int8 remainder, or the float16 master; None for the others.
        scale_inv: [1, 1] float32 of the float16 master.
    """

    weight: Tensor
    kind: str
    rest: Tensor | None = None
    scale_inv: Tensor | None = None

    @property
    def is_random(self) -> bool:
        """Whether writing takes random bits."""
        return self.kind in ("split24", "fp16_scaled", "stochastic")

    @property
    def needs_bound(self) -> bool:
        """Whether it is written with a scale that a bound of the update gives."""
        return self.kind == "fp16_scaled"

    def begin(self, bound: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, found) to ``write`` with; bound [1, 1]: of |w| after the step."""
        return scale_from_amax(bound, FLOAT16_MAX, True, 0), torch.zeros_like(bound)

    def end(self, scale: Tensor, found: Tensor, amax: Tensor) -> None:
        """Note the scale that was written with, and the amax found."""
        assert self.scale_inv is not None
        self.scale_inv.copy_(scale.reciprocal())
        amax.copy_(found)

    def read(self, piece: Piece) -> Tensor:
        """The master in float32: the weight's own piece where it is that, else a fresh tensor."""
        weight = piece.of(self.weight)
        if self.kind in ("weight", "stochastic"):
            return weight.to(torch.float32)
        assert self.rest is not None
        rest = piece.of(self.rest)
        if self.kind == "fp16_scaled":
            assert self.scale_inv is not None
            wide = rest.to(torch.float32).mul_(self.scale_inv.view(1, 1, 1))
            return torch.where(wide.to(weight.dtype) == weight, wide, weight.to(torch.float32))
        bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        bits.add_(rest.to(torch.int32), alpha=1 if self.kind == "split32" else 1 << 8)
        return bits.view(torch.float32)

    def write(
        self, piece: Piece, wide: Tensor, bits16: Tensor | None, scale: Tensor | None, found: Tensor | None
    ) -> None:
        """Store the updated master, and the weight.

        Args:
            piece: where.
            wide: float32; overwritten.
            bits16: random bits, where ``is_random``.
            scale: [1, 1], of the float16 master from now on.
            found: [1, 1], raised to the master's amax, where it is scaled.
        """
        weight = piece.of(self.weight)
        if self.kind == "weight":
            if weight.data_ptr() != wide.data_ptr():
                weight.copy_(wide)
            return
        if self.kind == "stochastic":
            assert bits16 is not None
            weight.copy_(round_to_bf16(wide, bits16))
            return
        assert self.rest is not None
        if self.kind == "fp16_scaled":
            assert scale is not None and found is not None and bits16 is not None
            rest = round_to_half(wide.mul_(scale.view(1, 1, 1)), bits16)
            piece.of(self.rest).copy_(rest)
            wide.copy_(rest).div_(scale.view(1, 1, 1))  # the master as it is stored: rounding may have made it larger
            weight.copy_(wide)
            torch.maximum(found, finite_amax(wide).max(), out=found)
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
