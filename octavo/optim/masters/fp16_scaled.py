"""bf16 weight and a float16 master with one power-of-two scale: MS-AMP's, but the scale is known before the update."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import FLOAT16_MAX, MasterWeight
from octavo.numerics import scale_from_amax


class Fp16Scaled:
    """4 bytes in all, for weights of which the smallest matter less: float16 reaches 40 octaves below the largest."""

    name = "fp16_scaled"
    kind = "fp16_scaled"
    dtypes = (torch.bfloat16, torch.float16)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """The master, its scale_inv and its amax, which bounds the next."""
        amax = weight.detach().abs().amax().float() if weight.numel() else weight.new_zeros((), dtype=torch.float32)
        scale = scale_from_amax(amax.reshape(1, 1), FLOAT16_MAX, True, 0)
        return {
            "master_rest": (weight.detach().float().contiguous() * scale.reshape(())).half(),
            "master_scale_inv": scale.reciprocal(),
            "master_amax": amax.reshape(1, 1).clone(),
        }

    def stored(self, weight_RC: Tensor, state: dict[str, Tensor]) -> MasterWeight:
        """All."""
        return MasterWeight(weight_RC, self.kind, state["master_rest"].view(weight_RC.shape), state["master_scale_inv"])
