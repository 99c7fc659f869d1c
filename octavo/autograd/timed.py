"""A recipe's products and casts by themselves, as calls: for those who time them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import CastRequest, cast_role
from octavo.scaling.delayed import State
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, ROLES, Recipe


class TimedCalls(NamedTuple):
    """Calls of a recipe's kernels by themselves."""

    recipe: Recipe

    def product(self, x: Tensor, weight: Tensor, role: str) -> Callable[[], Any]:
        """Return a call of a product of two operands, which are cast before: as an input, and as this role."""
        operands: list[Any] = []
        for tensor, which in ((x, INPUT), (weight, ROLES.index(role))):
            pair: Any = cast_role(tensor, CastRequest(self.recipe, which, as_is=True, transposed=False), None).as_is
            operands += [*pair, self.recipe.casts[which].as_is.tile]  # type: ignore[union-attr]
        return lambda: kernels.matmul(*operands, None, x.dtype, True)

    def cast(self, x: Tensor) -> Callable[[], Any]:
        """Return a call of the cast of a gradient in both layouts; a Delayed one has a scale already."""
        state, request = None, CastRequest(self.recipe, GRAD_OUTPUT, as_is=True, transposed=True)
        if (rule := self.recipe.delayed) is not None:
            state = State.empty(rule.history_length, x.device)
            state.scale.fill_(1.0)
        return lambda: cast_role(x, request, state)
