"""A linear layer that holds a shard of its weight and gathers it in FP8 itself, by functional collectives.

FSDP2 gathers in hooks around a module, which torch.compile does not enter. Here the gather is part of forward, and of
backward, so that one graph holds cast, collective and product, and a compiler may move them past each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.autograd.casts import INPUT, WEIGHT, Operands, State, cast_role
from octavo.autograd.products import (
    Layer,
    as_rows,
    cast_gradient,
    gradients,
    output,
    plan_of,
    refuse_second_derivatives,
    to_save,
)
from octavo.granularity import ALL
from octavo.nn.gather import lay_out
from octavo.nn.linear import Linear
from octavo.nn.recipe_module import RecipeModule
from octavo.numerics import scale_from_amax
from octavo.scaling.recipe import Delayed, Recipe
from octavo.tensor.sharded_weight import padded_rows, rows_on_each_rank


class _Sharding(NamedTuple):
    """What a sharded layer's products need besides tensors; ``rows``: of the whole weight."""

    recipe: Recipe
    state: State | None
    commits: bool
    mesh: Any
    rows: int


class ShardedLinear(RecipeModule, nn.Module):
    """y = x . W^T + b, of whose weight each rank holds some rows: gathered in FP8 in forward, and again in backward.

    The gradient of the shard is the mean over ranks (a reduce-scatter), as is the bias's, which every rank holds whole.
    Outside of torch.compile it computes the same, but ``fully_shard`` overlaps its collectives better there.

    Args:
        linear: an octavo.nn.Linear whose recipe casts weights per tensor (``dynamic()``, ``delayed()``); the same on
            all ranks.
        mesh: a 1-D DeviceMesh of the ranks that share the weight.

    Attributes:
        weight: [ceil(N / ranks), K], this rank's rows; behind the last of W rows of zeros.

    Raises:
        TypeError: for another module.
        ValueError: for another recipe.
    """

    def __init__(self, linear: Linear, mesh: Any) -> None:
        super().__init__()
        if not isinstance(linear, Linear) or linear.splits is not None:
            raise TypeError(f"{type(linear).__name__} is no octavo.nn.Linear with one output; convert the model first")
        self.mesh, self.in_features, self.out_features = mesh, linear.in_features, linear.out_features
        rows = rows_on_each_rank(linear.out_features, mesh.size())
        first = mesh.get_local_rank() * rows
        shard = linear.weight.detach()[first : first + rows]
        self.weight = nn.Parameter(padded_rows(shard, rows).clone(), linear.weight.requires_grad)
        self.bias = (
            None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
        )
        self.adopt_recipe(linear.recipe, self.weight.device)

    def check_recipe(self, recipe: Recipe | None) -> None:
        """Raise where it can't follow a recipe, and to be restored.

        Raises:
            ValueError: for a recipe that does not cast weights per tensor.
            TypeError: for None: there is no plain layer that holds a shard.
        """
        super().check_recipe(recipe)
        if recipe is None:
            raise TypeError("a ShardedLinear can't be restored; keep the Linear that it was made from")
        casts = recipe.weight_casts
        if not casts.once or casts.as_is is None or casts.as_is.tile != (ALL, ALL):
            raise ValueError(f"recipe {recipe.name}: needs one scale for the whole weight, as dynamic() or delayed()")

    def reset_parameters(self) -> None:
        """Raise: its values are those of the layer that it was made from."""
        raise TypeError("a ShardedLinear is made from a Linear that has its values; reset that one")

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N], dtype of the input."""
        if input.shape[-1] != self.in_features or input.dtype != self.weight.dtype:
            raise ValueError(
                f"input of shape {tuple(input.shape)}, {input.dtype} needs in_features={self.in_features} last and "
                f"{self.weight.dtype}"
            )
        state = None
        if self.recipe.delayed is not None:
            assert self.delayed_scale is not None and self.delayed_amax_history is not None
            state = State(self.delayed_scale, self.delayed_amax_history)
        commits = self.training and torch.is_grad_enabled()
        sharding = _Sharding(self.recipe, state, commits, self.mesh, self.out_features)
        y = _ShardedLinear.apply(as_rows(input), self.weight, self.bias, sharding)
        return y.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, ranks and the recipe's name."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, ranks={self.mesh.size()}"
        return f"{sizes}, bias={self.bias is not None}, recipe={self.recipe.name}"


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, shard: Tensor, bias: Tensor | None, sharding: _Sharding) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad[:3]
        codes, scale_inv, amax = _cast_shard(shard, sharding)
        weight = _gathered(codes, scale_inv, sharding)._replace(amax=amax)
        layer = Layer(weight, sharding.recipe, sharding.state, sharding.commits)
        x = cast_role(x_TK, sharding.recipe, INPUT, True, needs_dw, sharding.state)
        ctx.plan, ctx.sharding = plan_of(layer, x_TK.dtype, shard, bias), sharding
        saved = list(to_save(x_TK, x, shard, layer, needs_dx, needs_dw))
        saved[4:6] = (codes, scale_inv) if needs_dx else (None, None)  # the shard's, to be gathered again
        ctx.save_for_backward(*saved)
        return output(x_TK, x, shard, bias, layer, x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from torch.distributed import _functional_collectives as collectives

        refuse_second_derivatives()
        sharding, needs, saved = ctx.sharding, ctx.needs_input_grad[:3], list(ctx.saved_tensors)
        if needs[0]:
            saved[4], saved[5] = _gathered(saved[4], saved[5], sharding).transposed  # type: ignore[misc]
        arguments = tuple(saved), ctx.plan, needs
        dx, dw, db = gradients(cast_gradient(grads[0].contiguous(), *arguments), *arguments)
        mesh, ranks = sharding.mesh, sharding.mesh.size()
        if dw is not None:
            whole = padded_rows(dw, rows_on_each_rank(sharding.rows, ranks) * ranks)
            dw = collectives.wait_tensor(collectives.reduce_scatter_tensor(whole, "sum", 0, mesh)) / ranks
        if db is not None:
            db = collectives.wait_tensor(collectives.all_reduce(db, "sum", mesh)) / ranks
        return dx, dw, db, None


def _cast_shard(shard: Tensor, sharding: _Sharding) -> tuple[Tensor, Tensor, Tensor | None]:
    """The shard's codes as bytes, by the scale of the whole weight; that scale_inv; and the whole weight's amax."""
    from torch.distributed import _functional_collectives as collectives

    cast, state = sharding.recipe.weight_casts.as_is, sharding.state
    assert cast is not None
    amax = kernels.amax(shard, (ALL, ALL))
    amax = collectives.wait_tensor(collectives.all_reduce(amax, "max", sharding.mesh))
    scale = scale_from_amax(amax, cast.format.max, cast.power_of_two, cast.margin).reshape(1)
    delayed = isinstance(cast.rule, Delayed)
    if delayed:
        assert state is not None
        kept = state.scale[WEIGHT : WEIGHT + 1]
        scale = torch.where(kept > 0, kept, scale)
    q, scale_inv, *_ = kernels.cast(
        shard, scale, 0, cast.format.dtype, cast.tile, cast.power_of_two, cast.margin, 1, False
    )
    return q.view(torch.uint8), scale_inv, amax if delayed else None


def _gathered(codes: Tensor, scale_inv: Tensor, sharding: _Sharding) -> Operands:
    """The whole weight's pairs from every rank's codes."""
    from torch.distributed import _functional_collectives as collectives

    cast = sharding.recipe.weight_casts.as_is
    assert cast is not None
    whole = collectives.wait_tensor(collectives.all_gather_tensor(codes, 0, sharding.mesh))
    q, transposed = lay_out(whole[: sharding.rows].view(cast.format.dtype), sharding.recipe)
    return Operands((q, scale_inv), (transposed, scale_inv))
