"""torchtitan: a converter for its model registry (0.3), and one for its ``[model] converters`` (0.1 and 0.2).

Its order is octavo's too: build on the meta device, convert, parallelize, compile, fully_shard, to_empty, initialise.
Adapters of its LoRAConverter are not converted. Delayed state is not in its checkpoints: after a resume the first step
takes each tensor's own scale.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from octavo import recipes
from octavo.errors import MissingExtraError
from octavo.nn.candidates import Select, large_enough
from octavo.nn.convert import convert
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.delayed import BUFFERS
from octavo.scaling.recipe import Recipe
from octavo.scaling.recipe_map import RecipeMap

__all__ = ["OctavoModelConverter", "register"]

try:
    from torchtitan.protocols.model import ModelConfigConverter
except ImportError:  # none, or one before 0.3
    ModelConfigConverter = None

HEADS = ("lm_head", "output")  # of its models


class OctavoModelConverter:
    """torchtitan 0.2's ModelConverter protocol over octavo.convert.

    Args:
        job_config: torchtitan's.
        parallel_dims: torchtitan's.
        recipe: an octavo.Recipe or RecipeMap of the names of the model's modules.
        filter_fqns: layers whose names hold one of these stay in high precision.
        select: which of the others to convert, as octavo.convert takes it; None: its default.
        weight_storage: as octavo.convert's.

    Example:
        >>> model = nn.ModuleDict({"w1": nn.Linear(512, 512), "lm_head": nn.Linear(512, 512)})
        >>> OctavoModelConverter(None, None).convert(model)
        >>> [type(layer).__module__ for layer in model.values()]
        ['octavo.nn.linear', 'torch.nn.modules.linear']
    """

    def __init__(
        self,
        job_config: Any,
        parallel_dims: Any,
        *,
        recipe: Recipe | RecipeMap = recipes.default(),
        filter_fqns: Sequence[str] = HEADS,
        select: Select | None = None,
        weight_storage: Any = None,
    ) -> None:
        self.recipe, self.filter_fqns, self.weight_storage = recipe, tuple(filter_fqns), weight_storage
        self.select = large_enough if select is None else select

    def convert(self, model: nn.Module) -> None:
        """Convert the model in place, before it is parallelized."""
        convert(model, self.recipe, self._chosen, self.weight_storage)

    def _chosen(self, module: nn.Module, name: str) -> bool:
        return not any(part in name for part in self.filter_fqns) and self.select(module, name)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: layers and gathers notice a step of any torch.optim.Optimizer by themselves."""


def register(name: str = "octavo", **options: Any) -> None:
    """Give OctavoModelConverter with these options a name for torchtitan 0.2's ``--model.converters``.

    Args:
        name: what torchtitan's configuration calls it.
        options: OctavoModelConverter's.

    Raises:
        MissingExtraError: for a torchtitan that has no such converters.

    Example:
        >>> try:  # then torchtitan.train --model.converters octavo
        ...     register(recipe=recipes.rowwise())
        ... except MissingExtraError as error:  # of a torchtitan that is not 0.2
        ...     print(error)
        torchtitan 0.3 takes OctavoConverter.Config(...) in model_registry
    """
    try:
        from torchtitan.protocols.model_converter import register_model_converter
    except ImportError as error:
        raise MissingExtraError("torchtitan 0.3 takes OctavoConverter.Config(...) in model_registry") from error
    register_model_converter(functools.partial(OctavoModelConverter, **options), name)


def _distribute_parameters(module: Any, parallel_dims: Any) -> None:
    """What torchtitan's Module.parallelize does to parameters and buffers, but not to the delayed state.

    It knows no layout of that, which is each rank's and the same on all.
    """
    delayed = {name: module._buffers.pop(name) for name in BUFFERS if name in module._buffers}
    try:
        type(module)._distribute_states(module, parallel_dims)
    finally:
        module._buffers.update(delayed)


def _converting(model_config: Any, converter: OctavoModelConverter) -> Any:
    """A model's configuration that converts the model when it has built it, and is else the same."""
    kind = type(model_config)

    class Converting(kind):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def build(self, **kwargs: Any) -> nn.Module:
            model: nn.Module = kind.build(self, **kwargs)
            converter.convert(model)
            for module in model.modules():
                if isinstance(module, RecipeModule) and hasattr(module, "_distribute_states"):
                    module._distribute_states = functools.partial(_distribute_parameters, module)
            return model

    Converting.__name__, Converting.__qualname__ = kind.__name__, kind.__qualname__
    fields = dataclasses.fields(model_config)
    return Converting(**{item.name: getattr(model_config, item.name) for item in fields if item.init})


if ModelConfigConverter is not None:

    class OctavoConverter(ModelConfigConverter):  # type: ignore[misc, unused-ignore]
        """torchtitan 0.3's ModelConfigConverter over octavo.convert: ``model_registry("8B", converters=[...])``.

        The model is converted as soon as it is built, on the meta device. Fields of its Config are those of
        OctavoModelConverter.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(ModelConfigConverter.Config):  # type: ignore[misc, unused-ignore, name-defined]
            """What OctavoModelConverter is made with."""

            recipe: Recipe | RecipeMap = recipes.default()
            filter_fqns: list[str] = field(default_factory=lambda: [*HEADS])
            select: Select | None = None
            weight_storage: str | None = None

        def __init__(self, config: Config) -> None:
            options = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
            self.converter = OctavoModelConverter(None, None, **options)

        def convert(self, model_config: Any) -> Any:
            """The configuration that builds the same model, converted."""
            return _converting(model_config, self.converter)
