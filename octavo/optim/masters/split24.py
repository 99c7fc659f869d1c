"""bf16 weight + 8-bit remainder: the upper 24 bits of float32, the others rounded stochastically."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import MasterWeight


class Split24:
    """3 bytes in all."""

    name = "split24"
    kind = "split24"
    dtypes = (torch.bfloat16,)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """The remainder, 0: the master begins as the weight."""
        return {"master_rest": torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)}

    def stored(self, weight_RC: Tensor, state: dict[str, Tensor]) -> MasterWeight:
        """Both."""
        return MasterWeight(weight_RC, self.kind, state["master_rest"].view(weight_RC.shape))
