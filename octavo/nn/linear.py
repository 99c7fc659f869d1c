"""torch.nn.Linear whose three products follow a recipe."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.recipe import Recipe


class Linear(RecipeModule, nn.Linear):
    """y = x . W^T + b with each of the three products cast as the recipe says.

    Parameters, their names, their initialisation and the state_dict are those of torch.nn.Linear. Saved for backward
    are the FP8 pairs of the input and the weight. Under torch.autocast the input is cast to autocast's dtype, the
    weight to FP8 from its own.

    Args:
        in_features: K, any size.
        out_features: N, any size.
        bias: whether there is a bias [N].
        recipe: an octavo.Recipe; octavo.recipes.dynamic() by default.
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.

    Shape:
        input [..., K], result [..., N] of the same dtype, any leading dimensions, 0 tokens included.

    Raises:
        TypeError: input and weight of different dtypes without autocast, or float64.
        ValueError: a last dimension other than ``in_features``.
        HigherOrderGradientError: under create_graph=True or torch.func.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(256, 512, recipe=octavo.recipes.blockwise(), dtype=torch.bfloat16)
        >>> layer(torch.randn(4, 16, 256, dtype=torch.bfloat16)).shape
        torch.Size([4, 16, 512])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self.adopt_recipe(recipes.dynamic() if recipe is None else recipe, self.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        weight = self.weight
        return self._product(input, weight, self.bias, weight)

    def extra_repr(self) -> str:
        """torch's, and the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
