"""transformers' Conv1D (GPT-2): a linear layer that stores its weight as [K, N]."""

from __future__ import annotations

from torch import Tensor
from transformers.pytorch_utils import Conv1D as TransformersConv1D

from octavo.nn.recipe_module import RecipeModule


class Conv1D(RecipeModule, TransformersConv1D):
    """y = x . W + b, W [K, N], with each product cast as the recipe says. Made by octavo.convert only.

    Importing this module needs transformers; convert does it only for a model that already holds a Conv1D.
    """

    stores_transposed = True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return self._product(x)
