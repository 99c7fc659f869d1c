"""A recipe's products and casts by themselves, as calls: for those who time them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.autograd.casts import CastRequest, cast_role
from octavo.scaling.delayed import State
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, Recipe


def product_call(x: Tensor, weight: Tensor, recipe: Recipe | None, role: int) -> Callable[[], Any]:
    """Return a call of a product of two operands, cast before as an input and as ``role``; without a recipe in bf16."""
    if recipe is None:
        return lambda: F.linear(x, weight)
    operands: list[Any] = []
    for tensor, which in ((x, INPUT), (weight, role)):
        cast, pair = recipe.casts[which].as_is, cast_role(tensor, CastRequest(recipe, which, True, False), None).as_is
        assert cast is not None and pair is not None
        operands += [*pair, cast.tile]
    return lambda: kernels.matmul(*operands, None, x.dtype, True)


def cast_call(x: Tensor, recipe: Recipe) -> Callable[[], Any]:
    """Return a call of a recipe's cast of a gradient in both layouts; a Delayed one has a scale already."""
    state = None
    if (rule := recipe.delayed) is not None:
        state = State.empty(rule.history_length, x.device)
        state.scale.fill_(1.0)
    return lambda: cast_role(x, CastRequest(recipe, GRAD_OUTPUT, True, True), state)
