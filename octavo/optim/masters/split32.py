"""bf16 weight + 16-bit remainder: together the bits of float32.

The remainder is kept as bytes: NCCL and gloo send no int16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import MasterWeight


class Split32:
    """4 bytes in all; training is that of a float32 weight, bit for bit."""

    name = "split32"
    kind = "split32"
    dtypes = (torch.bfloat16,)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """The remainder's bytes [..., 2], 0: the master begins as the weight."""
        return {"master_rest": torch.zeros(*weight.shape, 2, dtype=torch.uint8, device=weight.device)}

    def stored(self, weight_RC: Tensor, state: dict[str, Tensor]) -> MasterWeight:
        """Both."""
        return MasterWeight(weight_RC, self.kind, state["master_rest"].view(torch.int16).view(weight_RC.shape))
