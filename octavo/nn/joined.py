"""Linear layers that read one tensor, computed as one product: an attention's q, k and v; a feed-forward's gate and up.

Their parameters stay apart, and get gradients of their own. Their weights are joined by rows for the cast: under a rule
per tensor all have one scale, that of the largest amax, as one matrix has; their delayed state is the first layer's.
The gradient of their input is then one product and no sum, and what they compute lies beside each other in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.autograd.products import Layer, is_recorded
from octavo.autograd.rows import DENSE, Rows
from octavo.nn.fused import can_fuse
from octavo.nn.linear import Linear
from octavo.nn.tensor_parallel import LayerTensors
from octavo.private import FakeTensor, no_modes
from octavo.scaling.delayed import note_empty
from octavo.weights.operands import fresh_state, is_freed_after_forward


def _facade_of(weights: Sequence[Tensor]) -> Tensor:
    """Return a tensor without memory of the shape that weights [N_i, K] have when joined by rows."""
    return weights[0].new_empty(1).expand(sum(weight.shape[0] for weight in weights), weights[0].shape[1])


class _JoinedWeights(torch.autograd.Function):
    """A facade of weights [N_i, K] joined by rows, [N, K]; its gradient flows to each weight, as a view."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.rows = [weight.shape[0] for weight in weights]
        return _facade_of(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0].split(ctx.rows)


class Joined(NamedTuple):
    """Linear layers to compute as one; ``run_as_one`` takes it for a layer."""

    linears: tuple[Linear, ...]

    def can_join(self) -> bool:
        """Whether no hook or replaced forward is bypassed, and one product in FP8 has the result of all layers."""
        first = self.linears[0]
        if first.recipe.output is None or first.recipe.grad_input is None:
            return False
        if any(linear.out_features % first.recipe.rows_unit for linear in self.linears[:-1]):
            return False  # a block would have rows of two layers
        return can_fuse(self.linears) and all(map(self._is_like_the_first, self.linears))

    def _is_like_the_first(self, linear: Linear) -> bool:
        first, weight = self.linears[0], linear._parameters.get("weight")
        return (
            isinstance(weight, nn.Parameter)  # not computed from others
            and type(weight) in (nn.Parameter, FakeTensor)  # not sharded, not stored in FP8
            and not is_freed_after_forward(linear, weight)
            and weight.dtype == first.weight.dtype
            and linear.fp8.recipe is first.fp8.recipe
            and linear.training == first.training
            and (linear.bias is None) == (first.bias is None)
            and linear.splits is None
            and linear.fp8.kept_operands is None
            and linear.fp8.gather.parameter is None
        )

    def layer_tensors(self) -> LayerTensors:
        """Return (a facade of the weights [N, K], the biases [N] or None, the first weight)."""
        first = self.linears[0]
        bias = None if first.bias is None else torch.cat([linear.bias for linear in self.linears])
        weights = [linear.weight for linear in self.linears]
        facade: Tensor = _JoinedWeights.apply(*weights) if is_recorded(*weights) else _facade_of(weights)
        return facade, bias, first.weight

    def layer_of(self, input: Tensor, tensors: LayerTensors, needs_input_grad: bool, rows: Rows = DENSE) -> Layer:
        """Return the Layer of the layers' joint product with ``input``, as RecipeModule.layer_of returns it for one."""
        first, *others = self.linears
        if first.training and first.recipe.delayed is not None and not torch.compiler.is_compiling():
            self._share_state()
            for linear in others:
                fresh_state(linear, linear.weight, True, input.device)  # a weight written by hand has no history
        weights = torch.cat([linear.weight.detach() for linear in self.linears])
        layer = first.layer_of(input, (weights, *tensors[1:]), needs_input_grad, rows)
        observers = tuple(linear.fp8.observer for linear in self.linears if linear.fp8.observer is not None)
        # each layer's observer counts the joint product
        return layer._replace(observers=observers) if layer.observers else layer

    def _share_state(self) -> None:
        """Give all layers the first one's delayed state, which is made to cover the histories of all.

        Each has its own state before the first forward together, and after a checkpoint or a move.
        """
        first, *others = self.linears
        device = first.weight.device
        if (state := first.fp8.state_on(device)) is None:
            return
        for linear in others:
            if (its_state := linear.fp8.state_on(device)) is not state and its_state is not None:
                # no_modes: a mode must see the same ops in a recomputed forward. A scale that is not set yet is 0
                with no_modes(), torch.no_grad():
                    state.scale.copy_(torch.minimum(state.scale, its_state.scale))
                    state.amax_history.copy_(torch.maximum(state.amax_history, its_state.amax_history))
                note_empty(state.scale)
                linear.fp8.state = state
