"""Masters: the wider weight that an optimizer updates in place of one of few bits, and what its state keeps for it.

Their arithmetic, and each one's bits: kernels/reference/optimizer_state.py. A float16 weight is its own master under
"auto", rounded to nearest. 16-bit remainders are kept as bytes: NCCL and gloo send no int16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.formats import HIGH_PRECISION
from octavo.kernels import amax
from octavo.kernels.reference.optimizer_state import (
    FLOAT16_FACTOR,
    MASTER_KINDS,
    Fp8Weight,
    Master,
    MasterWeight,
    values_with,
)
from octavo.weights.storable import FROZEN_ONLY
from octavo.weights.stored import StoredWeight, has_powers_of_two, local_stored


@dataclass(frozen=True)
class MasterForm:
    """The form in which a master is kept; ``kind``: of MASTER_KINDS."""

    kind: str

    @property
    def low_bits_dtype(self) -> torch.dtype | None:
        """The dtype of the kernels' ``low_bits``, which the state keeps besides the weight; None: it keeps none."""
        return MASTER_KINDS[self.kind].low_bits

    @classmethod
    def of(cls, param: Tensor, master: str | None) -> MasterForm:
        """Return a weight's master, by "auto" or a name of either table below; all serve float32 and bf16 weights.

        ValueError for another name, or a weight of another dtype than the master is for.
        """
        if local_stored(param) is not None:
            name = "split16" if master == "auto" else master
            if name not in FP8_MASTERS:
                names = ", ".join(map(repr, FP8_MASTERS))
                raise ValueError(f"master={master!r}: weights stored in FP8 take {names}")
            return FP8_MASTERS[name]
        if master not in PLAIN_MASTERS and master not in _BF16_NAMES:
            names = ", ".join(map(repr, dict.fromkeys((*_BF16_NAMES, *PLAIN_MASTERS))))
            raise ValueError(f"master={master!r}: use {names}")
        if param.dtype not in HIGH_PRECISION:
            raise ValueError(f"octavo's optimizers take weights of float32, bfloat16 and float16, not {param.dtype}")
        if param.dtype == torch.bfloat16:
            return PLAIN_MASTERS[_BF16_NAMES.get(master, master)]
        if param.dtype == torch.float32 or (param.dtype == torch.float16 and master == "auto"):
            return PLAIN_MASTERS["fp32"]  # whatever the name: a norm's weight, say, beside bf16 matrices
        dtype = torch.float32 if master in _BF16_NAMES else torch.bfloat16
        raise ValueError(
            f"master={master!r} is for weights of {dtype}, not {param.dtype}; use 'auto', or convert the model"
        )

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state's tensors of a master that begins as the weight."""
        if isinstance(weight, StoredWeight):
            return self._new_state_of_codes(weight)
        if self.low_bits_dtype is None:
            return {}
        return {"master_rest": _as_bytes(torch.zeros(weight.shape, dtype=self.low_bits_dtype, device=weight.device))}

    def _new_state_of_codes(self, weight: StoredWeight) -> dict[str, Tensor]:
        """Return what ``new_state`` does, of a weight in FP8: also its amax, from which the next scale comes.

        The master begins as the value that was cast to the codes, if that is still known and the master keeps more than
        the codes.
        """
        if not has_powers_of_two(weight.scale_inv) or weight.granularity in FROZEN_ONLY:
            raise ValueError(
                f"a weight {tuple(weight.shape)} stored in FP8 was loaded while it was frozen, with scales that are no "
                "powers of two, or of rows or 1 x 32, which an optimizer can't update: load it again with requires_grad"
            )
        extra_bits, dtype = weight.extra_bits, self.low_bits_dtype
        if extra_bits is None or dtype is None:
            extra_bits = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
        codes = weight.qdata.view(torch.uint8)
        values = _values_of(codes, weight.scale_inv, extra_bits)
        amaxes = torch.empty_like(weight.scale_inv)
        for target, matrix in zip(amaxes, values, strict=True) if weight.ndim == 3 else [(amaxes, values)]:
            target.copy_(amax(matrix, weight.granularity.tile))
        if dtype is None:
            return {"master_amax": amaxes}
        if dtype == torch.float16:
            master_rest = _values_of(codes, torch.full_like(weight.scale_inv, FLOAT16_FACTOR), extra_bits).to(dtype)
        elif dtype.is_floating_point:
            master_rest = values.to(dtype)
        else:
            shift = torch.iinfo(dtype).bits - torch.iinfo(extra_bits.dtype).bits
            master_rest = _as_bytes(extra_bits.to(dtype, copy=True).mul_(1 << shift))
        return {"master_amax": amaxes, "master_rest": master_rest}

    def for_kernel(self, matrix: Tensor, state: dict[str, Tensor], scale_inv: Tensor | None = None) -> Master:
        """Return the kernels' view of a weight [R, C] and its state's tensors; ``scale_inv``: if it is codes."""
        dtype = self.low_bits_dtype
        low_bits = None if dtype is None else state["master_rest"].view(dtype).view(matrix.shape)
        if scale_inv is not None:
            return Fp8Weight(matrix, self.kind, scale_inv, low_bits, state.get("master_amax"))
        return MasterWeight(matrix, self.kind, low_bits)


def _values_of(codes: Tensor, scale_inv: Tensor, low_bits: Tensor) -> Tensor:
    """Return ``values_with``; on the meta device, where reading each of its pieces takes time for nothing, as empty."""
    if codes.is_meta:
        return torch.empty(codes.shape, dtype=torch.float32, device="meta")
    return values_with(codes, scale_inv, low_bits)


def _as_bytes(low_bits: Tensor) -> Tensor:
    """Return 16 bits as two bytes, [...] -> [..., 2]; other dtypes as they are."""
    return low_bits.unsqueeze(-1).view(torch.uint8) if low_bits.dtype == torch.int16 else low_bits


# masters by the name that ``master=`` gives them
PLAIN_MASTERS = {master.name: MasterForm(kind) for kind, master in MASTER_KINDS.items() if not kind.startswith("fp8_")}
FP8_MASTERS = {master.name: MasterForm(kind) for kind, master in MASTER_KINDS.items() if kind.startswith("fp8_")}
# what names that are for other weights mean of a bf16 one: under "split32" it is the upper half of the master "fp32"
_BF16_NAMES = {"auto": "split32"} | {kind.name: kind.bf16_name for kind in MASTER_KINDS.values() if kind.bf16_name}
