"""torchtitan 0.3: a converter for its model registry.

torchtitan's order is also octavo's: build on the meta device, convert, parallelize, compile, fully_shard, to_empty,
initialise. Adapters of LoRAConverter are not converted. torchtitan's checkpoints don't have delayed state: the first
step after a resume takes each tensor's own scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from octavo import recipes
from octavo.errors import MissingExtraError
from octavo.nn.candidates import Select, large_enough, of_subclass
from octavo.nn.convert import convert, storage_now
from octavo.nn.recipe_module import RecipeModule
from octavo.recipes import AnyRecipe
from octavo.weights.operands import plain_within

__all__ = ["OctavoConverter"]

try:
    from torchtitan.protocols.model import ModelConfigConverter
    from torchtitan.protocols.module import Module
except ImportError:  # torchtitan is absent, or older than 0.3
    Module = nn.Module

    class ModelConfigConverter:  # type: ignore[no-redef]
        """Takes the place of torchtitan's class."""

        class Config:
            """Raises when it is made."""

            def __post_init__(self) -> None:
                raise MissingExtraError("OctavoConverter is for torchtitan 0.3: pip install 'torchtitan>=0.3'")


@torch.no_grad()
def _initialise(module: Any) -> None:
    """Run torchtitan's Module._init_self_parameters; initialise weights that live in FP8 as plain ones, then cast them.

    All ranks that share a weight call it, as functions such as trunc_normal_ read all its values.
    """
    with plain_within(module):
        type(module)._init_self_parameters(module)


def _convert_built_models(model_config: Any, config: OctavoConverter.Config) -> None:
    """Make a model's configuration convert each model that it builds; some registries call nothing but its build."""
    kind = type(model_config)

    class Converting(kind):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def build(self, **kwargs: Any) -> nn.Module:
            model: nn.Module = kind.build(self, **kwargs)
            convert(model, config.recipe, config.chosen, config.weight_storage)  # type: ignore[arg-type]
            stored = {weight for weight, granularity in storage_now(model).items() if granularity is not None}
            for module in model.modules():
                if isinstance(module, RecipeModule) and module.part_name:
                    # of_subclass is cached, and mypy finds no hash in torch's type of modules
                    module.__class__ = of_subclass(type(module), Module)  # type: ignore[arg-type]
                if not stored.isdisjoint(module._parameters.values()):
                    vars(module)["_init_self_parameters"] = functools.partial(_initialise, module)
            return model

    Converting.__name__, Converting.__qualname__ = kind.__name__, kind.__qualname__
    model_config.__class__ = Converting


class OctavoConverter(ModelConfigConverter):  # type: ignore[misc, unused-ignore]
    """torchtitan's ModelConfigConverter over octavo.convert: ``model_registry("8B", converters=[...])``.

    The model is converted as soon as it is built, on the meta device.

    Args:
        config: an OctavoConverter.Config.

    Raises:
        MissingExtraError: if a Config is made without torchtitan 0.3.

    Example:
        >>> try:
        ...     config = OctavoConverter.Config(recipe=recipes.rowwise(), filter_fqns=["lm_head"])
        ... except MissingExtraError as error:
        ...     config = None
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc, unused-ignore, name-defined]
        """The arguments of octavo.convert, and names of layers to leave out.

        Attributes:
            recipe: as octavo.convert takes it, by the names of the model's modules.
            filter_fqns: layers whose names contain one of these stay in high precision.
            select: which of the other layers to convert, as octavo.convert takes it; None: its default.
            weight_storage: as octavo.convert's.
        """

        recipe: AnyRecipe = recipes.default()
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head", "output"])
        select: Select | None = None
        weight_storage: str | None = None

        def chosen(self, module: nn.Module, name: str) -> bool:
            """Whether a layer of this name is converted."""
            return not any(fqn in name for fqn in self.filter_fqns) and (self.select or large_enough)(module, name)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return the same configuration, which from now on converts the models that it builds."""
        _convert_built_models(model_config, self.config)
        return model_config
