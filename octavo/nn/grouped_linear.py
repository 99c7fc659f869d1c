"""Linear layers of experts: rows in groups, each group times a matrix of its own, as a recipe says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.autograd.products import requires_grad
from octavo.nn.linear import recipe_for
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.recipe import Recipe
from octavo.scaling.recipe_map import RecipeMap


class Grouped(RecipeModule):
    """Base of the modules that multiply rows in groups, whoever owns their matrices."""

    elsewhere: Callable[..., Tensor] | None = None  # computes these experts on the ranks that hold them

    @property
    def trains(self) -> tuple[bool, bool]:
        """Whether backward, if there will be one, is asked for the gradients of (weight, bias)."""
        weight, bias = self.own_parameters()
        enabled = torch.is_grad_enabled()
        return enabled and weight.requires_grad, enabled and requires_grad(bias)

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:
        return self._product(input, offsets)


class GroupedLinear(Grouped):
    """y = x . W_e^T + b_e for each group e of rows, with each of the three products cast as the recipe says.

    As a loop over experts of octavo.nn.Linear computes, but each product is one for all groups, and nothing reads their
    sizes on the host. Every group has scales of its own; under Delayed all share one history a role, of the largest
    amax. An expert without rows gets a gradient of exact zeros.

    Args:
        experts: E, how many groups there are.
        in_features: K, at least 1.
        out_features: N, at least 1.
        bias: whether there is a bias [E, N].
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.
        recipe: an octavo.Recipe or RecipeMap (of the name ""); octavo.recipes.default() by default.

    Shape:
        input [T, K], its rows sorted by expert; offsets [E] int32 on the same device: where each expert's rows end,
        ``counts.cumsum(0).to(torch.int32)``. Result [T, N], of the input's dtype or autocast's; rows behind the last
        end are zero. ``weight`` is [E, N, K], each expert's initialised as torch.nn.Linear's.

    Raises:
        TypeError: for float64, offsets of another dtype than int32, input and weight of different dtypes.
        ValueError: for shapes that do not fit, offsets of another number of experts or on another device; on a CPU for
            offsets that descend or exceed T, which a GPU does not look at.
        HigherOrderGradientError: under create_graph=True or torch.func.

    Source:
        torch.nn.functional.grouped_mm, whose ``offs`` the offsets are.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.GroupedLinear(4, 64, 32, bias=False)
        >>> counts = torch.tensor([3, 0, 5, 2])
        >>> layer(torch.randn(10, 64), counts.cumsum(0).to(torch.int32)).shape
        torch.Size([10, 32])
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeMap | None = None,
    ) -> None:
        super().__init__()
        if min(experts, in_features, out_features) < 1:
            raise ValueError(f"experts={experts}, in_features={in_features}, out_features={out_features}: at least 1")
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype)) if bias else None
        self.recipe = recipe_for(recipe, "")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert's as torch.nn.Linear's: uniform within 1 / sqrt(in_features); and empty the delayed state."""
        bound = self.in_features**-0.5
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)
        self.reset_delayed_state()

    def extra_repr(self) -> str:
        """Sizes, and the recipe's name."""
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, recipe={self.recipe.name}"
