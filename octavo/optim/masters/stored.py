"""Masters of weights that are stored in FP8 (convert(..., weight_storage="fp8")); bytes count codes and master."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.fp8_weights import FLOAT16_FACTOR, Fp8Weight, values_with
from octavo.tensor.stored_weight import StoredWeight


class Stored:
    """A StoredWeight's master.

    Args:
        name: the ``master`` argument's.
        kind: Fp8Weight's.
        rest: dtype of what it keeps besides the codes, or None.
    """

    def __init__(self, name: str | None, kind: str, rest: torch.dtype | None) -> None:
        self.name, self.kind, self.rest = name, kind, rest

    def new_state(self, weight: StoredWeight) -> dict[str, Tensor]:
        """The rest, so that the master begins as what was cast to the weight, and the amax that bounds the next scale.

        Where that is not known any more, it begins as the weight. Without a master there is nothing to hold it.
        """
        rest = weight.rest
        if rest is None or self.rest is None:
            rest = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
        values = values_with(weight.qdata.view(torch.uint8), weight.scale_inv, rest)
        state = {"master_amax": _amax_of(values, weight.scale_inv.shape)}
        if self.rest == torch.int8:
            state["master_rest"] = rest.clone()
        elif self.rest == torch.int16:  # as bytes [N, K, 2]: NCCL and gloo send no int16
            state["master_rest"] = rest.to(torch.int16).mul_(1 << 8).unsqueeze(-1).view(torch.uint8)
        elif self.rest == torch.float16:
            one = torch.full_like(weight.scale_inv, FLOAT16_FACTOR)
            state["master_rest"] = values_with(weight.qdata.view(torch.uint8), one, rest).half()
        elif self.rest == torch.float32:
            state["master_rest"] = values
        return state

    def stored(self, codes_RC: Tensor, state: dict[str, Tensor], scale_inv: Tensor) -> Fp8Weight:
        """All."""
        rest = None if self.rest is None else state["master_rest"]
        if rest is not None and self.rest == torch.int16:
            rest = rest.view(self.rest)
        rest = None if rest is None else rest.view(codes_RC.shape)
        return Fp8Weight(codes_RC, self.kind, scale_inv, rest)


def _amax_of(values: Tensor, shape: torch.Size) -> Tensor:
    """Of all finite values, or of each block of 128 x 128."""
    values = values.nan_to_num(0.0, 0.0, 0.0)
    if shape == (1, 1):
        return values.abs().amax().reshape(1, 1) if values.numel() else values.new_zeros(1, 1)
    rows, cols = values.shape
    whole = values.new_zeros(shape[0] * 128, shape[1] * 128)
    whole[:rows, :cols] = values
    return whole.view(shape[0], 128, shape[1], 128).abs().amax((1, 3))


STORED: dict[str | None, Stored] = {
    "split16": Stored("split16", "fp8_split16", torch.int8),
    "split24": Stored("split24", "fp8_split24", torch.int16),
    "fp16_scaled": Stored("fp16_scaled", "fp8_fp16", torch.float16),
    "fp32": Stored("fp32", "fp8_fp32", torch.float32),
    None: Stored(None, "fp8_stochastic", None),
}
