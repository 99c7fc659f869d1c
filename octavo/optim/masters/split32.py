"""bf16 weight + 16-bit remainder: together the bits of float32."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import MasterWeight
from octavo.optim.moment import as_matrix


class Split32:
    """4 bytes in all; training is that of a float32 weight, bit for bit."""

    name = "split32"
    dtypes = (torch.bfloat16,)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """The remainder, 0: the master begins as the weight."""
        return {"master_rest": torch.zeros(weight.shape, dtype=torch.int16, device=weight.device)}

    def stored(self, weight_RC: Tensor, state: dict[str, Tensor]) -> MasterWeight:
        """Both."""
        return MasterWeight(weight_RC, "split32", as_matrix(state["master_rest"]))
