"""No master: the bf16 weight is rounded stochastically, so that small updates count on average."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import MasterWeight


class Stochastic:
    """2 bytes."""

    name = None
    kind = "stochastic"
    dtypes = (torch.bfloat16,)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}

    def stored(self, weight_RC: Tensor, state: dict[str, Tensor]) -> MasterWeight:
        """The weight."""
        return MasterWeight(weight_RC, self.kind)
