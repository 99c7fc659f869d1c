"""The conversion of a model's linear layers, and torchao's choice of layers for it."""

from __future__ import annotations

import warnings

from torch import nn

from octavo.compat.torchao.config import Float8LinearConfig, Float8LinearRecipeName, recipe_of
from octavo.errors import UnsupportedOptionError
from octavo.kernels.capability import runs_natively
from octavo.nn.candidates import Select
from octavo.nn.convert import convert
from octavo.nn.summary import summary


def convert_to_float8_training(
    module: nn.Module, *, module_filter_fn: Select | None = None, config: Float8LinearConfig | None = None
) -> nn.Module:
    """Convert, in place, all linear layers of any size that ``module_filter_fn(module, name)`` chooses.

    Raises:
        TypeError: for another configuration, such as torchao's.
        UnsupportedOptionError: for ``emulate`` on a GPU that multiplies FP8.

    Warns:
        UserWarning: of chosen layers that octavo leaves in high precision, with the reason for the first.

    Example:
        >>> convert_to_float8_training(nn.Linear(32, 8), config=Float8LinearConfig.from_recipe_name("rowwise"))
        Linear(in_features=32, out_features=8, bias=True, recipe=torchao)
    """
    config = Float8LinearConfig() if config is None else config
    if not isinstance(config, Float8LinearConfig):
        by_name = f"use Float8LinearConfig.from_recipe_name({config!r})"
        remedy = by_name if isinstance(config, str) else f"import Float8LinearConfig from {__package__} too"
        raise TypeError(f"config is a {type(config).__module__}.{type(config).__qualname__}: {remedy}")

    def chosen(layer: nn.Module, name: str) -> bool:  # torchao converts nothing but nn.Linear
        return isinstance(layer, nn.Linear) and (module_filter_fn is None or module_filter_fn(layer, name))

    if config.emulate and any(runs_natively(parameter.device) for parameter in module.parameters()):
        raise UnsupportedOptionError("emulate=True: octavo uses a GPU's FP8 products; to emulate them train on a CPU")
    converted = convert(module, recipe_of(config), select=chosen)
    layers = {name: layer for name, layer in converted.named_modules() if chosen(layer, name)}
    left = [f"{row.name or 'the model'}: {row.reason}" for row in summary(converted).left_alone if row.name in layers]
    if left:
        warnings.warn(f"{len(left)} chosen layers stay in high precision; {left[0]}", stacklevel=2)
    return converted


def _auto_filter_for_recipe(recipe: Float8LinearRecipeName | str, filter_fqns: list[str]) -> Select:
    """Return torchao's filter: layers of sizes (multiples of 16) faster in FP8 on an H100, none of filter_fqns."""
    recipe_name = Float8LinearRecipeName(recipe)
    if recipe_name.value == "rowwise_with_gw_hp":
        raise NotImplementedError("torchao has no such filter: octavo.nn.candidates.large_enough is octavo's")

    def keep(module: nn.Module, fqn: str) -> bool:
        if not isinstance(module, nn.Linear) or any(name in fqn for name in filter_fqns):
            return False
        rows, cols = module.weight.shape
        if rows % 16 or cols % 16:
            return False
        if recipe_name.value == "tensorwise":
            return rows > 1024 or cols > 4096
        return rows > 2048 and cols > 1024 and (rows > 4096 or cols > 2048)

    return keep
