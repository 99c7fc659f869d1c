"""Mixtures of experts: tokens sorted by expert, two grouped products with an activation between them, and back.

Legend: T tokens, k experts a token, S = T * k rows, E experts, H hidden size, I intermediate size. Nothing reads on the
host which expert got how many rows: all sizes depend on T, k and E alone, so that a compiled step is one graph for any
routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.autograd.casts import as_rows
from octavo.autograd.grouped import Routing
from octavo.kernels.activations import activation_of
from octavo.nn.fused import activate, run_alone, run_as_one
from octavo.nn.inputs import grouped_dtype
from octavo.nn.linear import Grouped, GroupedLinear, recipe_for
from octavo.nn.tensor_parallel import FusedParts
from octavo.private import assert_async
from octavo.scaling.recipe import Recipe, RecipeMap


class _Rows(torch.autograd.Function):
    """rows[i] = x[index[i] // k]; the gradient gathers too, by the inverse of ``index``, where torch would scatter."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, k: int) -> Tensor:
        return x[index // k]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, inverse, ctx.k = inputs
        ctx.save_for_backward(index, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, inverse = ctx.saved_tensors
        dx = grads[0][inverse]
        return dx if ctx.k == 1 else dx.unflatten(0, (len(inverse) // ctx.k, ctx.k)).sum(1), None, None, None


def mix(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: int,
    limit: int,
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Each token's sum over its experts of weight times ``compute(rows [S, H], offsets)``, in the dtype of ``x``.

    Numbers of experts are below ``limit``; those of ``experts`` or more add nothing. It raises what Experts does.
    """
    x_TH = as_rows(x)
    if top_k_index.shape != top_k_weights.shape or top_k_index.ndim != 2 or len(top_k_index) != len(x_TH):
        raise ValueError(
            f"top_k_index {list(top_k_index.shape)} and top_k_weights {list(top_k_weights.shape)} must both be "
            f"[{len(x_TH)} tokens, k]"
        )
    if top_k_index.is_floating_point() or not top_k_weights.is_floating_point():
        raise TypeError(
            f"top_k_index is {top_k_index.dtype}, experts' numbers are integers; top_k_weights is {top_k_weights.dtype}"
        )
    if top_k_index.device.type == "cpu":  # a GPU would have to be waited for
        known = (top_k_index >= 0).logical_and(top_k_index < limit).all()
        assert_async(known, f"top_k_index holds numbers of experts that are not below {limit}")
    routing, k = Routing.of(top_k_index.reshape(-1), experts), top_k_index.shape[1]
    rows = _Rows.apply(x_TH, routing.order, routing.inverse, k)
    y = _Rows.apply(compute(rows, routing.offsets), routing.inverse, routing.order, 1)
    by_token = *x.shape[:-1], k
    mixed = (y.view(*by_token, y.shape[1]) * top_k_weights.reshape(*by_token, 1)).sum(-2)
    return mixed.to(x.dtype)  # no view, of which FSDP2 warns


def feed_forward(
    rows: Tensor,
    offsets: Tensor,
    gate_up: Grouped,
    down: Grouped,
    activation: str | None,
    between: Callable[[Tensor], Tensor],
) -> Tensor:
    """Down's product of an activation of gate_up's; the activation and its gradient are fused into casts, where known.

    ``rows`` [S, H] are sorted by expert and end at ``offsets``. ``activation``: a name of kernels/activations.py, or
    None where ``between``, which computes it on its own, is none of them.
    """

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        linears = gate_up, down
        if activation is None or not run_alone(linears):
            return down(between(gate_up(rows, offsets)), offsets)
        own = [linear.operands() for linear in linears]
        dtype = grouped_dtype(rows, own[0][0], offsets)
        return run_as_one(
            FusedParts(rows.to(dtype), (None, None), own), None, linears, activation, dtype, offsets=offsets
        )

    if gate_up.elsewhere is not None:
        return gate_up.elsewhere(rows, offsets, gate_up, down, compute)
    return compute(rows, offsets)


class Experts(nn.Module):
    """A mixture's experts: of each token's k experts, the weighted sum of ``down(activation(gate_up(x)))``.

    What a loop over experts computes, in two grouped products forward and four backward. With a recipe in FP8 the
    activation and its gradient write the pairs that products read, as octavo.nn.LayerNormMLP. The router, which says
    what ``top_k_index`` and ``top_k_weights`` are, is the model's own, in high precision.

    Args:
        experts: E, how many.
        hidden_size: H, features in and out.
        intermediate_size: I, features of the activation's output.
        activation: a name as of octavo.nn.LayerNormMLP; of a gated one ``gate_up.weight`` is (gate | up) [E, 2I, H].
        bias: of the two linear layers.
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.
        recipe: an octavo.Recipe or RecipeMap (of the names "gate_up" and "down"); octavo.recipes.default() by default.
            The ``saved`` of the recipe of "down" says how backward's copy of the activation's input is kept.

    Shape:
        hidden_states [..., H] of T tokens; top_k_index [T, k], integers below E; top_k_weights [T, k], to which
        gradients flow. Result as hidden_states, of their dtype.

    Raises:
        ValueError: for another activation, or shapes that do not fit.
        TypeError: for float64, indices that are no integers, or input and weights of different dtypes.
        RuntimeError: on a CPU, for numbers of experts that there are not; a GPU does not look at them.
        HigherOrderGradientError: as octavo.nn.Linear.

    Source:
        transformers' experts modules, whose forward has these arguments.

    Example:
        >>> import torch, octavo
        >>> experts = octavo.nn.Experts(8, 64, 128, recipe=octavo.recipes.blockwise())
        >>> x, router = torch.randn(2, 5, 64), torch.nn.Linear(64, 8)
        >>> weights, index = router(x.flatten(0, 1)).softmax(-1).topk(2)
        >>> experts(x, index, weights).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeMap | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        wide = intermediate_size * (2 if activation_of(activation).gated else 1)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_up = GroupedLinear(experts, hidden_size, wide, **options, recipe=recipe_for(recipe, "gate_up"))
        self.down = GroupedLinear(experts, intermediate_size, hidden_size, **options, recipe=recipe_for(recipe, "down"))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:

        def compute(rows: Tensor, offsets: Tensor) -> Tensor:
            name = self.activation
            return feed_forward(rows, offsets, self.gate_up, self.down, name, lambda h: activate(h, name))

        experts = self.gate_up.experts
        return mix(hidden_states, top_k_index, top_k_weights, experts, experts, compute)

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation}"
