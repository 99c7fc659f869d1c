"""A float32 weight is its own master; so is a float16 one, which is rounded to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import MasterWeight


class Itself:
    """Nothing besides the weight.

    Args:
        name: the ``master`` argument's.
        dtypes: of the weights that it is for.
    """

    kind = "weight"

    def __init__(self, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
        self.name, self.dtypes = name, dtypes

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """None."""
        return {}

    def stored(self, weight_RC: Tensor, state: dict[str, Tensor]) -> MasterWeight:
        """The weight."""
        return MasterWeight(weight_RC, self.kind)
