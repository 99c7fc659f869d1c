"""Linear layers of experts: rows in groups, each group times a matrix of its own, as a recipe says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.autograd.exchange import Exchange
from octavo.autograd.grouped import grouped_linear
from octavo.autograd.products import Layer, linear, requires_grad
from octavo.autograd.shared_scales import Parts
from octavo.formats import HIGH_PRECISION
from octavo.kernels.groups import check_offsets_kind
from octavo.nn.inputs import product_dtype, refuse_for_fp8
from octavo.nn.linear import recipe_for
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.stored_weights import widened
from octavo.scaling.delayed import State
from octavo.scaling.recipe import Recipe
from octavo.scaling.recipe_map import RecipeMap
from octavo.tensor.pair import Operands
from octavo.tensor.stored_weight import local_stored


class _OwnExperts(torch.autograd.Function):
    """Parameters of a rank's experts; their gradients, which all ranks' tokens add to, are divided by ``ranks``."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


# Inference mode is asked for last: there a compiled graph ends.
def _of_this_rank(parameter: Any, ranks: int) -> Tensor:
    """What this rank has of its experts' parameter; gradients flow, divided by ``ranks``."""
    stored = local_stored(parameter)
    if stored is not None and torch.is_inference_mode_enabled():  # torch makes no view
        return stored
    return _OwnExperts.apply(parameter.to_local(), ranks)


def _swapped(weight: Tensor) -> Tensor:
    """A parameter [E, K, N] as [E, N, K]; of one in FP8 torch makes no view in inference mode."""
    if local_stored(weight) is not None and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return weight.transpose(-2, -1)
    return weight.mT


class Grouped(RecipeModule):
    """Base of the modules that multiply rows in groups, whoever owns their matrices.

    Attributes:
        exchange: the ranks that hold the experts, under expert parallelism; parameters are DTensors then.
        elsewhere: what computes these experts there, see octavo/distributed/experts.py.
    """

    exchange: Exchange | None = None
    elsewhere: Callable[..., Tensor] | None = None

    def own_parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weight and bias, as they are stored."""
        raise NotImplementedError

    @property
    def weight_parameter(self) -> nn.Parameter:
        """See RecipeModule."""
        return self.own_parameters()[0]

    def operands(self) -> tuple[Tensor, Tensor | None, nn.Parameter]:
        """Weight [E, N, K], bias [E, N] or None, of this rank's experts; the parameter that the weight is a view of."""
        parameter, own_bias = self.own_parameters()
        weight: Tensor = parameter
        bias: Tensor | None = own_bias
        if self.exchange is not None:
            ranks = self.exchange.size if self.exchange.average else 1
            weight = _of_this_rank(weight, ranks)
            bias = None if bias is None else _of_this_rank(bias, ranks)
        return _swapped(weight) if self.stores_transposed else weight, bias, parameter

    @property
    def trains(self) -> tuple[bool, bool]:
        """Whether backward, if there will be one, is asked for the gradients of (weight, bias)."""
        weight, bias = self.own_parameters()
        enabled = torch.is_grad_enabled()
        return enabled and weight.requires_grad, enabled and requires_grad(bias)

    def take_parameter(self, weight: nn.Parameter, whole: nn.Parameter | None, part: str = "") -> None:
        """See RecipeModule; FSDP2 gathers weights as they are stored whose experts are on several ranks."""
        if self.exchange is None:
            super().take_parameter(weight, whole, part)
        elif part and (stored := local_stored(weight)) is not None:
            stored.part = part

    def _weight_operands(
        self, weight_NK: Tensor, parameter: Tensor, transposed: bool, state: State | None, parts: Parts | None
    ) -> Operands:
        stored = None if parts is None else local_stored(parameter)
        if stored is not None:  # of this rank's experts, as they lie
            return stored.operands(self, transposed)
        return super()._weight_operands(weight_NK, parameter, transposed, state, parts)

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:
        """See GroupedLinear."""
        weight, bias, parameter = self.operands()
        dtype = checked(input, weight, offsets)
        if self.recipe.is_high_precision:  # torch's grouped product does not follow autocast by itself
            bias = None if bias is None else bias.to(dtype)
            return grouped_linear(input.to(dtype), widened(weight).to(dtype), bias, offsets)
        input = input.to(dtype)
        refuse_for_fp8(input, parameter, bias)
        layer = self.grouped_layer(input, weight, parameter, input.requires_grad, offsets)
        return linear(input, weight, bias, layer)

    def grouped_layer(
        self, input: Tensor, weight: Tensor, parameter: nn.Parameter, needs_input_grad: bool, offsets: Tensor
    ) -> Layer:
        """What this module brings to its products."""
        parts = None if self.exchange is None else Parts(self.exchange.group, (False,) * 3)
        return self.layer_of(input, weight, parameter, needs_input_grad, parts)._replace(offsets=offsets)


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

    def own_parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        """See Grouped."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        """Sizes, and the recipe's name."""
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, recipe={self.recipe.name}"


def checked(input: Tensor, weight_ENK: Tensor, offsets: Tensor) -> torch.dtype:
    """The dtype that products with ``input`` compute in.

    Raises:
        TypeError, ValueError: as GroupedLinear.
    """
    if input.ndim != 2:
        raise ValueError(f"input of shape {tuple(input.shape)}: rows sorted by expert are [T, K]")
    dtype = product_dtype(input, weight_ENK)
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"experts compute in bfloat16, float16 or float32, not {dtype}")
    check_offsets_kind(offsets, input.device)
    if offsets.shape[0] != weight_ENK.shape[0]:
        raise ValueError(f"offsets of {offsets.shape[0]} experts, but the weight has {weight_ENK.shape[0]}")
    return dtype
