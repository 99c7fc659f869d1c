"""Transformer Engine's modules over octavo.nn's, which compute: arguments, keys of a state_dict, initialisation.

Their forwards follow the recipe of the autocast around. Arguments that octavo has nothing for are in options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.compat.transformer_engine.context import Around
from octavo.compat.transformer_engine.keys import to_ours, to_theirs
from octavo.compat.transformer_engine.options import chosen, device_for, refuse
from octavo.errors import UnsupportedOptionError
from octavo.nn import fused, norm
from octavo.nn.convert import convert, set_recipe
from octavo.nn.linear import Linear as OctavoLinear
from octavo.nn.using import using
from octavo.scaling.recipe import Recipe

Init = Callable[[Tensor], Any]
_ACTIVATIONS = {name: name for name in ("relu", "reglu", "silu", "swiglu")}
_ACTIVATIONS |= {"qgelu": "quick_gelu", "srelu": "squared_relu"}
_ACTIVATIONS |= {"gelu": "gelu_tanh", "geglu": "geglu_tanh"}  # Transformer Engine's is the approximation by tanh
_normal = partial(nn.init.normal_, std=0.023)
_NORMS: dict[str, Any] = {"LayerNorm": norm.LayerNorm, "RMSNorm": norm.RMSNorm}


class _Layer(nn.Module):
    """What the layers share; mixed in before octavo's."""

    parts: tuple[tuple[str, str], ...] = ()  # how keys begin: octavo's, and Transformer Engine's
    rows: dict[str, int] | None = None  # of the parameters that the matrix is in a state_dict

    def _products(self) -> list[Any]:
        return [self] if isinstance(self, OctavoLinear) else self._linears()  # type: ignore[operator]

    def _finish(self, inits: Sequence[Init | None], options: dict[str, Any], split: Any = None) -> None:
        """Initialise as Transformer Engine does, store weights as the context says, and name the state_dict's keys."""
        refuse(type(self).__name__, options)
        _Layer._untraced = torch.compiler.disable(_Layer._switched)
        products = self._products()
        for product, init in zip(products, inits, strict=True):
            (init or _normal)(product.weight)
            if product.bias is not None:
                nn.init.zeros_(product.bias)
        if split is not None:
            size = products[0].out_features
            rows = dict(split) if isinstance(split, Mapping) else dict.fromkeys(split, size // len(split))
            if sum(rows.values()) != size or Around.storage is not None:
                raise UnsupportedOptionError(
                    f"parameters_split={split!r}: needs sizes that add up to {size}, and weights outside of FP8"
                )
            self.rows = {name.rstrip("_"): count for name, count in rows.items()}
        if Around.storage is not None:
            convert(self, Around.storage, weight_storage="fp8")
        self.register_state_dict_post_hook(to_theirs)
        self.register_load_state_dict_pre_hook(to_ours)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        """Micro-batches share an FP8 weight by themselves, whatever ``is_first_microbatch`` says."""
        refuse(type(self).__name__, options)
        wanted = Around.recipe
        own = getattr(self._products()[0], "recipe", wanted)  # octavo.restore leaves parts without
        if own is wanted or own == wanted:
            return super().forward(inp)
        return self._untraced(inp, wanted)

    def _switched(self, inp: Tensor, wanted: Recipe) -> Any:
        """Forward by a recipe that is not the layer's: it becomes the layer's own where it trains in FP8."""
        if any(product.gather.parameter is not None for product in self._products()):
            raise UnsupportedOptionError(
                "under fully_shard a weight is gathered by its layer's recipe before the forward: before fully_shard "
                "call octavo.convert(model, recipe.octavo(), select=lambda module, name: isinstance(module, "
                "octavo.nn.Linear)), then run all forwards in autocast(recipe=recipe)"
            )
        if wanted.is_high_precision or not (self.training and torch.is_grad_enabled()):
            with using(self, wanted):
                return super().forward(inp)
        set_recipe(self, wanted)
        return super().forward(inp)

    _untraced = _switched  # until torch.compiler.disable, which brings in all of the compiler, has made another


class Linear(_Layer, OctavoLinear):  # type: ignore[misc]  # its first argument has another name
    """octavo.nn.Linear with Transformer Engine's arguments, initialisation, keys and autocast.

    Example:
        >>> sorted(Linear(64, 96, parameters_split=("query", "key", "value"), bias=False).state_dict())
        ['key_weight', 'query_weight', 'value_weight']
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        parameters_split: Any = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        recipe = recipes.high_precision()
        OctavoLinear.__init__(self, in_features, out_features, bias, device_for(device), params_dtype, recipe=recipe)
        self._finish([init_method], options, parameters_split)


class LayerNormLinear(_Layer, fused.LayerNormLinear):  # type: ignore[misc]
    """octavo.nn.LayerNormLinear, or RMSNormLinear, with Transformer Engine's arguments and keys; else as Linear.

    Example:
        >>> sorted(LayerNormLinear(64, 32, normalization="RMSNorm").state_dict())
        ['bias', 'layer_norm_weight', 'weight']
    """

    parts = (("norm.", "layer_norm_"), ("linear.", ""))

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        device: Any = None,
        **options: Any,
    ) -> None:
        self.norm_class = chosen(_NORMS, "normalization", normalization)
        fused.LayerNormLinear.__init__(
            self,
            in_features,
            out_features,
            eps,
            bias,
            device_for(device),
            params_dtype,
            recipe=recipes.high_precision(),
            zero_centered_gamma=zero_centered_gamma,
            return_norm_output=return_layernorm_output,
        )
        self._finish([init_method], options, parameters_split)


class LayerNormMLP(_Layer, fused.LayerNormMLP):  # type: ignore[misc]
    """octavo.nn.LayerNormMLP, or RMSNormMLP, with Transformer Engine's arguments and keys; else as Linear.

    Example:
        >>> sorted(LayerNormMLP(32, 96, normalization="RMSNorm", activation="swiglu", bias=False).state_dict())
        ['fc1_weight', 'fc2_weight', 'layer_norm_weight']
    """

    parts = (("norm.", "layer_norm_"), ("fc1.", "fc1_"), ("fc2.", "fc2_"))

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        **options: Any,
    ) -> None:
        self.norm_class = chosen(_NORMS, "normalization", normalization)
        fused.LayerNormMLP.__init__(
            self,
            hidden_size,
            ffn_hidden_size,
            chosen(_ACTIVATIONS, "activation", activation),
            eps,
            bias,
            device_for(device),
            params_dtype,
            recipe=recipes.high_precision(),
            zero_centered_gamma=zero_centered_gamma,
        )
        self._finish([init_method, output_layer_init_method], options)
