"""WeightReader: what this room needs of a module that multiplies by a weight, which is above the room.

WeightReader is a RecipeModule, LayerState its LayerFP8 (both nn/recipe_module.py), WeightGather a Gather (gathered.py).
mypy compares them where a module passes itself to this room; tests/weights/test_reader.py compares their names.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from octavo.autograd.exchange import Exchange
from octavo.scaling.delayed import State
from octavo.scaling.recipe import Recipe
from octavo.tensor.pair import OperandsFacade
from octavo.weights.writes import KeptOperands, WeightWrites


class WeightReader(Protocol):
    """A module that multiplies by a weight, its own or another module's: a RecipeModule.

    Attributes:
        training: as any module's.
        part_name: the name of this part in the module that owns the weight; "" if that is this module.
        exchange: between the ranks that hold the experts, or None.
    """

    training: bool
    part_name: str
    exchange: Exchange | None

    @property
    def fp8(self) -> LayerState:
        """The module's state for its weight."""

    @property
    def stores_transposed(self) -> bool:
        """Whether a product reads the weight's parameter with its last two dimensions swapped."""

    @property
    def parameters_device(self) -> torch.device:
        """The device of the parameters of the module that owns the weight."""

    @property
    def weight_parameter(self) -> nn.Parameter:
        """The parameter that holds the weight."""

    def settings(self) -> dict[str, object]:
        """Return the settings beside its recipe that must be equal on all ranks, by name."""

    def take_parameter(self, weight: nn.Parameter, whole: nn.Parameter | None) -> None:
        """Note that the parameter ``weight`` replaces ``whole``."""

    def weight_was_loaded(self, load: object) -> None:
        """Forget state of the weight before a load."""


class LayerState(Protocol):
    """The state of a module for its weight: LayerFP8."""

    recipe: Recipe
    state: State | None
    weight_writes: WeightWrites
    kept_operands: KeptOperands | None

    @property
    def gather(self) -> WeightGather:
        """The state of the weight's gathers."""

    def state_on(self, device: torch.device) -> State | None:
        """Return the delayed state, moved to this device."""


class WeightGather(Protocol):
    """The state of a weight's gathers under FSDP2: Gather, in a file that imports those which need it."""

    parameter: Any  # DTensor or None
    name: str
    settings_agree: bool

    def adopt(self, parameter: Any, replaced: Any, module: WeightReader) -> None:
        """Gather ``parameter`` from now on, which replaces another."""

    def read(self, weight: OperandsFacade, module: WeightReader) -> None:
        """Note that the module computes with its gathered weight."""
