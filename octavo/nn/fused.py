"""Modules that run a norm, linear layers and the activation between them as one: kernels pass pairs to each other.

Each module holds ordinary parts under their names (norm, linear; norm, fc1, fc2), and computes what these compute one
after the other; autograd/chain.py says what is fused. So parameters, delayed state, recipes and weight caches are the
parts' own. The parts run one after the other if there is

    a hook on a part                  which has to be called
    a part or a forward replaced      by torch's, a quantised or an adapted one, which has to run
    a part whose output product is in high precision
    a norm without a weight           by which the kernels would multiply
    a part under tensor parallelism   other than by octavo.distributed's styles, see tensor_parallel.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.autograd.chain import Chain, ChainTensors, run_chain
from octavo.autograd.norm import Norm
from octavo.autograd.products import requires_grad
from octavo.autograd.rotary import Positions
from octavo.kernels.activations import activation_of
from octavo.kernels.reference.activation import activate
from octavo.nn.inputs import product_dtype, refuse_for_fp8
from octavo.nn.linear import Linear, Splits, recipe_for, split_output
from octavo.nn.tensor_parallel import FusedParts, as_styles_return, fused_parts, hooks_on, style_of
from octavo.private import is_dtensor
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.weights.gathered import check_layers_agree


class _ZeroCentered(nn.Module):
    """Adds ``zero_centered_gamma`` to torch's norms; mixed in before them."""

    weight: nn.Parameter  # None with elementwise_affine=False, which torch's annotation does not say either

    def __init__(self, features: int, eps: float = 1e-5, zero_centered_gamma: bool = False, **options: Any) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(features, eps, **options)

    def reset_parameters(self) -> None:
        """Initialise as torch does, with a weight that multiplies by 1."""
        super().reset_parameters()  # type: ignore[misc]
        if self.zero_centered_gamma and self.weight is not None:
            nn.init.zeros_(self.weight)

    def factor(self) -> Tensor | None:
        """Return the tensor that the norm multiplies by; None with ``elementwise_affine=False``."""
        if not self.zero_centered_gamma or self.weight is None:
            return self.weight
        return torch.ones_like(self.weight) + self.weight  # not 1 + weight, which torch 2.11 cannot export


class LayerNorm(_ZeroCentered, nn.LayerNorm):
    """torch.nn.LayerNorm over the last dimension; with ``zero_centered_gamma`` it multiplies by 1 + weight.

    Args:
        features: size of the last dimension.
        eps: added to the variance.
        zero_centered_gamma: see above; the weight then starts at 0.
        options: torch.nn.LayerNorm's ``elementwise_affine``, ``bias``, ``device`` and ``dtype``.

    Shape:
        input [..., features], result the same, of the input's dtype.

    Example:
        >>> LayerNorm(8, zero_centered_gamma=True).weight.sum().item()
        0.0
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.factor(), self.bias, self.eps)

    def norm(self) -> Norm:
        """Return the description by which fused kernels compute this norm."""
        return Norm("layer_norm", self.eps, self.zero_centered_gamma)


class RMSNorm(_ZeroCentered, nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension; with ``zero_centered_gamma`` it multiplies by 1 + weight.

    Args:
        features: size of the last dimension.
        eps: added to the mean square.
        zero_centered_gamma: see above; the weight then starts at 0.
        options: torch.nn.RMSNorm's ``elementwise_affine``, ``device`` and ``dtype``.

    Shape:
        input [..., features], result the same, of the input's dtype.

    Example:
        >>> RMSNorm(8).weight.sum().item()
        8.0
    """

    bias = None

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self.factor(), self.eps)

    def norm(self) -> Norm:
        """Return the description by which fused kernels compute this norm."""
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps  # as torch does for None
        return Norm("rms_norm", eps, self.zero_centered_gamma)


def forward_is_bypassable(module: nn.Module) -> bool:
    """Whether a part's forward may be bypassed: it isn't replaced, and all hooks are those of the part's style."""
    style = style_of(module)
    return "forward" not in module.__dict__ and hooks_on(module) == (0 if style is None else style.hooks)


def can_fuse(linears: Sequence[Any]) -> bool:
    """Whether all linear layers' forwards may be bypassed, and their ``output`` products are in FP8."""
    return all(forward_is_bypassable(linear) and linear.fp8.recipe.output is not None for linear in linears)


def run_as_one(
    parts: FusedParts,
    norm: Any,
    linears: Sequence[Any],
    activation: str,
    dtype: torch.dtype,
    returns_norm: bool = False,
    positions: Positions | None = None,
) -> Any:
    """Return the results, of this dtype, of one or two linear layers, behind a norm if there is one, run as one chain.

    ``parts``: their input and parameters; ``positions``: by which the heads of one layer's result are turned.
    """
    x = parts.input
    gamma, beta = parts.norm
    leaves = [leaf for _, bias, parameter in parts.linears for leaf in (parameter, bias)]
    refuse_for_fp8(x, gamma, beta, *leaves)
    needs_grad = x.requires_grad or requires_grad(gamma) or requires_grad(beta)
    layers = []
    for linear, tensors, rows in zip(linears, parts.linears, parts.rows, strict=False):
        layers.append(linear.layer_of(x, tensors, needs_grad, rows))
        needs_grad = needs_grad or tensors[0].requires_grad or requires_grad(tensors[1])
    chain = Chain(None if norm is None else norm.norm(), tuple(layers), activation, dtype, returns_norm, positions)
    parameters: list[Any] = [tensor for weight, bias, _ in parts.linears for tensor in (weight, bias)]
    leading = None if parts.shape is None else parts.shape[:-1]
    return run_chain(ChainTensors(x, *parts.norm, *parameters), chain, leading)


class Fused(nn.Module):
    """Base of the modules whose parts run as one."""

    norm_class: type[LayerNorm | RMSNorm]
    norm: LayerNorm | RMSNorm
    linear_parts: tuple[str, ...]  # in order

    def _run_fused(self, input: Tensor, activation: str, returns_norm: bool) -> tuple[Any, Any] | None:
        """Return (the parts' output, the norm's or None) by one chain; None if the parts run one after the other."""
        norm, linears = self.norm, [getattr(self, name) for name in self.linear_parts]
        first: Any = linears[0]._parameters.get("weight")
        if is_dtensor(first):  # settings are compared before any part runs
            check_layers_agree([linear for linear in linears if isinstance(linear, Linear)], first.device_mesh)
        if type(norm) not in (LayerNorm, RMSNorm) or any(type(part) is not Linear for part in linears):
            return None
        if norm.weight is None or not (forward_is_bypassable(norm) and can_fuse(linears)):
            return None
        weights = [linear.weight for linear in linears]
        dtype = product_dtype(input, weights[0])
        if (parts := fused_parts(norm, linears, weights, input)) is None:
            return None
        results = run_as_one(parts, norm, linears, activation, dtype, returns_norm)
        return as_styles_return(parts, norm, linears[-1], *(results if returns_norm else (results, None)))


class _NormLinear(Fused):
    """Base of a norm followed by a linear layer."""

    linear_parts = ("linear",)

    def __init__(
        self,
        in_features: int,
        out_features: int | Splits,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeMap | None = None,
        zero_centered_gamma: bool = False,
        return_norm_output: bool = False,
    ) -> None:
        super().__init__()
        self.return_norm_output = return_norm_output
        self.norm = self.norm_class(in_features, eps, zero_centered_gamma, device=device, dtype=dtype)
        self.linear = Linear(in_features, out_features, bias, device, dtype, recipe=recipe_for(recipe, "linear"))
        self.splits = self.linear.splits

    def output_and_norm(self, input: Tensor) -> tuple[Any, Any]:
        """Return (the output of all splits side by side, or a tuple of them if they are separate; the norm's)."""
        if (results := self._run_fused(input, "", self.return_norm_output)) is not None:
            return results
        normed = self.norm(input)
        output = self.linear(normed)
        if self.return_norm_output:  # as the fused parts return it: under autocast a norm's own dtype differs
            normed = normed.to((output[0] if isinstance(output, tuple) else output).dtype)
        return output, normed

    def forward(self, input: Tensor) -> Any:
        output, normed = self.output_and_norm(input)
        if isinstance(output, Tensor):  # another module in the linear layer's place returns a tensor too
            output = split_output(output, self.splits)
        return (output, normed) if self.return_norm_output else output


class LayerNormLinear(_NormLinear):
    """``linear(norm(x))``: torch's LayerNorm, then octavo's Linear; the norm writes the pairs that the product reads.

    Args:
        in_features: K.
        out_features: N, or {name: size}: see octavo.nn.Linear.
        eps: the norm's.
        bias: of the linear layer; the norm always has one.
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.
        recipe: an octavo.Recipe or RecipeMap (of the name "linear"); octavo.recipes.default() by default.
        zero_centered_gamma: the norm multiplies by 1 + weight.
        return_norm_output: return ``(output, norm(x))``, both of one dtype.

    Shape:
        input [..., K], result [..., N], dtype of the input or autocast's.

    Raises:
        TypeError, ValueError, HigherOrderGradientError: as octavo.nn.Linear.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.LayerNormLinear(64, {"query": 64, "key": 32, "value": 32})
        >>> [output.shape[-1] for output in layer(torch.randn(2, 64))]
        [64, 32, 32]
    """

    norm_class = LayerNorm


class RMSNormLinear(_NormLinear):
    """``linear(norm(x))``: torch's RMSNorm, then octavo's Linear; else as LayerNormLinear.

    Args:
        in_features, out_features, eps, bias, device, dtype, recipe, zero_centered_gamma, return_norm_output: as there.

    Shape:
        input [..., K], result [..., N], dtype of the input or autocast's.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.RMSNormLinear(64, 32, bias=False, return_norm_output=True)
        >>> output, normed = layer(torch.randn(2, 64))
        >>> output.shape, normed.shape
        (torch.Size([2, 32]), torch.Size([2, 64]))
    """

    norm_class = RMSNorm


class _NormMLP(Fused):
    """Base of a norm followed by a linear layer, an activation and a linear layer."""

    linear_parts = ("fc1", "fc2")

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str = "swiglu",
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeMap | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        gated = activation_of(activation).gated
        inner_size = {"gate": ffn_hidden_size, "up": ffn_hidden_size} if gated else ffn_hidden_size
        self.norm = self.norm_class(hidden_size, eps, zero_centered_gamma, device=device, dtype=dtype)
        self.fc1 = Linear(hidden_size, inner_size, bias, device, dtype, recipe=recipe_for(recipe, "fc1"))
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, device, dtype, recipe=recipe_for(recipe, "fc2"))

    def forward(self, input: Tensor) -> Tensor:
        if (results := self._run_fused(input, self.activation, False)) is not None:
            return results[0]
        return self.fc2(activate(self.fc1(self.norm(input)), self.activation))

    def extra_repr(self) -> str:
        """Return the activation's name."""
        return f"activation={self.activation}"


class LayerNormMLP(_NormMLP):
    """``fc2(activation(fc1(norm(x))))`` with torch's LayerNorm: a transformer's feed-forward half.

    With a recipe in FP8 the norm, the activation and its gradient write the pairs that products read; none of their
    results is written in high precision. ``fc1`` of a gated activation is one matrix (gate | up), whose separate
    ``fc1.gate.weight`` and ``fc1.up.weight`` load_state_dict takes too.

    Args:
        hidden_size: features in and out.
        ffn_hidden_size: features of the activation's output.
        activation: "swiglu", "geglu", "geglu_tanh", "reglu" (gated), "gelu", "gelu_tanh", "relu", "squared_relu",
            "silu" or "quick_gelu".
        eps: the norm's.
        bias: of the two linear layers; the norm always has one.
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.
        recipe: an octavo.Recipe or RecipeMap (of the names "fc1" and "fc2"); octavo.recipes.default() by default. Its
            ``saved`` says how backward's copy of the activation's input is kept.
        zero_centered_gamma: the norm multiplies by 1 + weight.

    Shape:
        input [..., hidden_size], result the same, dtype of the input or autocast's.

    Raises:
        ValueError: for another activation.
        TypeError, ValueError, HigherOrderGradientError: as octavo.nn.Linear.

    Example:
        >>> import torch, octavo
        >>> mlp = octavo.nn.LayerNormMLP(64, 256, activation="gelu_tanh", recipe=octavo.recipes.delayed())
        >>> mlp(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    norm_class = LayerNorm


class RMSNormMLP(_NormMLP):
    """``fc2(activation(fc1(norm(x))))`` with torch's RMSNorm; else as LayerNormMLP.

    Args:
        hidden_size, ffn_hidden_size, activation, eps, bias, device, dtype, recipe, zero_centered_gamma: as there.

    Shape:
        input [..., hidden_size], result the same, dtype of the input or autocast's.

    Example:
        >>> import torch, octavo
        >>> octavo.nn.RMSNormMLP(64, 192, bias=False, recipe=octavo.recipes.blockwise())(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    norm_class = RMSNorm
