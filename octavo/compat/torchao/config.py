"""The configuration of casts and products; names, fields and defaults are those of torchao.float8.config."""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.errors import UnsupportedOptionError
from octavo.formats import E4M3, E5M2
from octavo.granularity import Granularity, PerRow, PerTensor
from octavo.scaling.recipe import OPERANDS, Cast, Recipe
from octavo.weights.stored import StoredWeight

_FORMATS = {E4M3.dtype: E4M3, E5M2.dtype: E5M2}


class _AbbreviatedEnum(enum.Enum):
    """An enum whose values have torchao's abbreviations."""

    def short_str(self) -> str:
        """Return torchao's abbreviation of the value."""
        return {"axiswise": "axs"}.get(self.value, self.value[:3])


class ScalingType(_AbbreviatedEnum):
    """Whether an operand is cast: DYNAMIC by its own amax, DISABLED not at all.

    Example:
        >>> ScalingType.DYNAMIC.short_str()
        'dyn'
    """

    DYNAMIC = "dynamic"
    DISABLED = "disabled"


class ScalingGranularity(_AbbreviatedEnum):
    """The number of scales of an operand: TENSORWISE one, AXISWISE one a row.

    Example:
        >>> ScalingGranularity("axiswise").short_str()
        'axs'
    """

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


_NAMES = {"TENSORWISE": "tensorwise", "ROWWISE": "rowwise", "ROWWISE_WITH_GW_HP": "rowwise_with_gw_hp"}
Float8LinearRecipeName = enum.Enum("Float8LinearRecipeName", _NAMES)  # type: ignore[misc]
"""Named configurations: TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP."""
_GRANULARITIES: dict[str, Granularity] = {"tensorwise": PerTensor(), "axiswise": PerRow()}


@dataclass(frozen=True)
class CastConfig:
    """The cast of one operand; ``target_dtype``: float8_e4m3fn or float8_e5m2, None for the role's usual one.

    Example:
        >>> CastConfig(scaling_granularity=ScalingGranularity.AXISWISE).scaling_type
        <ScalingType.DYNAMIC: 'dynamic'>
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def short_str(self) -> str:
        """Return torchao's name of the cast."""
        name = f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}"
        return name if self.target_dtype is None else f"{name}_{str(_FORMATS[self.target_dtype]).lower()}"

    def __post_init__(self) -> None:
        if self.target_dtype not in (None, *_FORMATS):
            raise UnsupportedOptionError(f"target_dtype={self.target_dtype}: use {' or '.join(map(str, _FORMATS))}")


@dataclass(frozen=True)
class Float8GemmConfig:
    """Whether tensor cores may sum a product in their own, shorter accumulator (octavo.Recipe's ``fast_accum``).

    Example:
        >>> Float8LinearConfig(gemm_config_output=Float8GemmConfig(use_fast_accum=False)).gemm_config_output
        Float8GemmConfig(use_fast_accum=False)
    """

    use_fast_accum: bool = False


@dataclass(frozen=True)
class Float8LinearConfig:
    """The casts and products of a linear layer; fields and defaults are torchao's.

    Octavo pads where that is needed, whatever ``pad_inner_dim`` says, and gathers weights with one scale in FP8,
    whatever ``enable_fsdp_float8_all_gather`` says.

    Raises:
        ValueError: for operands that don't go together.
        UnsupportedOptionError: for an all-gather in FP8 of weights that have several scales.

    Example:
        >>> import octavo
        >>> recipe_of(Float8LinearConfig.from_recipe_name("rowwise")) == octavo.recipes.rowwise(power_of_two=True)
        True
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        for role, product in (("input", "grad_weight"), ("weight", "grad_input"), ("grad_output", "grad_weight")):
            first, second = f"cast_config_{role}", f"cast_config_{role}_for_{product}"
            usual = (E5M2 if role == "grad_output" else E4M3).dtype
            for name in (first, second):
                cast = getattr(self, name) or getattr(self, first)
                object.__setattr__(self, name, replace(cast, target_dtype=cast.target_dtype or usual))
            if getattr(self, first).target_dtype != getattr(self, second).target_dtype:
                raise ValueError(f"{first} and {second} must have one target_dtype")
        recipe = recipe_of(self)
        if self.enable_fsdp_float8_all_gather and (why := StoredWeight.why_not_storable(recipe)):
            raise UnsupportedOptionError(
                f"enable_fsdp_float8_all_gather=True: this recipe's weights can't be gathered in FP8: {why}; leave it "
                "out, or take the recipe 'tensorwise' or octavo.recipes.blockwise()"
            )
        if self.force_recompute_fp8_weight_in_bwd:
            warnings.warn("force_recompute_fp8_weight_in_bwd has no effect: leave it out", DeprecationWarning, 3)

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """Return the configuration of this name, "tensorwise", "rowwise" or "rowwise_with_gw_hp"."""
        name = Float8LinearRecipeName(recipe_name)
        if name.value == "tensorwise":
            return Float8LinearConfig()
        row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=E4M3.dtype)
        if name.value == "rowwise":
            return Float8LinearConfig(row, None, row, None, row, round_scales_to_power_of_2=True)
        off = CastConfig(ScalingType.DISABLED, target_dtype=E4M3.dtype)
        # grad_input reads the weight with one scale, and grad_weight stays in high precision
        return Float8LinearConfig(row, off, row, CastConfig(), row, off, round_scales_to_power_of_2=True)


def recipe_of(config: Float8LinearConfig) -> Recipe:
    """Return the octavo.Recipe with the same casts and products, for a program that stops using this module.

    Raises:
        ValueError: if one operand of a product is in FP8 and the other is not.

    Example:
        >>> recipe_of(Float8LinearConfig()).output[0]
        Cast(E4M3, PerTensor(), Dynamic())
    """
    products: dict[str, Any] = {}
    for product, roles in OPERANDS.items():
        names = [f"cast_config_{role}" for role in roles]
        configs = [getattr(config, f"{name}_for_{product}", getattr(config, name)) for name in names]
        if len({cast.scaling_type for cast in configs}) > 1:
            raise ValueError(f"{product} multiplies {' by '.join(roles)}: DISABLED is for both or none")
        if configs[0].scaling_type is ScalingType.DYNAMIC:
            power_of_two = config.round_scales_to_power_of_2
            products[product] = tuple(
                Cast(_FORMATS[c.target_dtype], _GRANULARITIES[c.scaling_granularity.value], power_of_two=power_of_two)
                for c in configs
            )
    fast = tuple(product for product in OPERANDS if getattr(config, f"gemm_config_{product}").use_fast_accum)
    return Recipe(**products, fast_accum=fast, name="torchao")
