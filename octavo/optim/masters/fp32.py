"""A float32 weight is its own master."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import MasterWeight


class Fp32:
    """Nothing besides the weight: 4 bytes."""

    name = "fp32"
    dtypes = (torch.float32,)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}

    def stored(self, weight_RC: Tensor, state: dict[str, Tensor]) -> MasterWeight:
        """The weight."""
        return MasterWeight(weight_RC, "weight")
