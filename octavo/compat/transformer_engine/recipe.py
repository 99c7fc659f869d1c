"""Transformer Engine's recipes: their names, fields and defaults (2.20), each of which becomes an octavo.Recipe.

What octavo can't do raises octavo.UnsupportedOptionError when the recipe is made. Environment variables (NVTE_...) are
not read: write the field.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from octavo import recipes
from octavo.errors import UnsupportedOptionError
from octavo.formats import E4M3, E5M2
from octavo.granularity import PerBlock
from octavo.scaling.recipe import PRODUCTS, Cast
from octavo.scaling.recipe import Recipe as OctavoRecipe


class Format(enum.Enum):
    """The formats of forward's and backward's operands; HYBRID: gradients of outputs are E5M2.

    Example:
        >>> print(DelayedScaling(fp8_format=Format.E4M3).octavo().grad_input[0].format)
        E4M3
    """

    E4M3 = "e4m3"
    HYBRID = "hybrid"
    E5M2 = "e5m2"


@dataclass(frozen=True)
class MMParams:
    """Whether a product is added up in float32 (octavo.Recipe's ``fast_accum`` is the contrary)."""

    use_split_accumulator: bool = True


_FAST, _SPLIT = MMParams(False), MMParams()


class Recipe:
    """Base of the recipes; ``octavo()`` is the octavo.Recipe that means the same, for a program that writes it."""

    fp8_format: Format
    fp8_dpa: bool
    fp8_mha: bool
    backward_override: str | None

    def __post_init__(self) -> None:
        self.octavo()

    def octavo(self) -> OctavoRecipe:
        """See the class."""
        raise NotImplementedError

    def _with(self, input: Cast, weight: Cast, grad_output: Cast) -> OctavoRecipe:
        """The recipe of these casts and of what all recipes have in common."""
        if self.fp8_dpa or self.fp8_mha:
            raise UnsupportedOptionError("fp8_dpa, fp8_mha: octavo's attention is torch's, in bf16; leave them out")
        if self.fp8_format is Format.E5M2:
            raise UnsupportedOptionError("fp8_format=Format.E5M2: no GPU multiplies E5M2 by E5M2; use Format.HYBRID")
        if self.backward_override not in (None, "high_precision"):
            raise UnsupportedOptionError(
                f"backward_override={self.backward_override!r}: use None, or 'high_precision' for bf16 operands"
            )
        grad_output = replace(grad_output, format=E5M2 if self.fp8_format is Format.HYBRID else E4M3)
        products: dict[str, Any] = {"output": (input, weight)}
        if self.backward_override is None:
            products |= {"grad_input": (grad_output, weight), "grad_weight": (grad_output, input)}
        return OctavoRecipe(**products, name=type(self).__name__)


@dataclass
class DelayedScaling(Recipe):
    """octavo.recipes.delayed, with Transformer Engine's history of 1024; each rank keeps its own amax.

    Raises:
        UnsupportedOptionError: for functions of one's own, attention in FP8 or a backward of dequantised operands.

    Example:
        >>> DelayedScaling(amax_history_len=16).octavo() == recipes.delayed()
        True
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def octavo(self) -> OctavoRecipe:
        """See Recipe."""
        if callable(self.amax_compute_algo) or self.scaling_factor_compute_algo is not None:
            raise UnsupportedOptionError(
                "amax_compute_algo, scaling_factor_compute_algo: a kernel makes the next scale; use 'max' "
                "or 'most_recent', and margin for room"
            )
        if self.backward_override is not None:
            raise UnsupportedOptionError("backward_override: leave it out, or take Float8CurrentScaling")
        found = recipes.delayed(self.amax_history_len, self.amax_compute_algo, self.margin)  # type: ignore[arg-type]
        assert found.output is not None and found.grad_input is not None
        return self._with(*found.output, found.grad_input[0])


@dataclass
class Float8CurrentScaling(Recipe):
    """octavo.recipes.dynamic: one scale a tensor, from its own amax.

    Example:
        >>> Float8CurrentScaling().octavo() == recipes.dynamic()
        True
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = field(default=_FAST)
    fp8_gemm_dgrad: MMParams = field(default=_SPLIT)
    fp8_gemm_wgrad: MMParams = field(default=_SPLIT)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def octavo(self) -> OctavoRecipe:
        """See Recipe."""
        found = recipes.dynamic(self.use_power_2_scales)
        assert found.output is not None and found.grad_input is not None
        params = zip(PRODUCTS, (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad), strict=True)
        fast = tuple(product for product, param in params if not param.use_split_accumulator)
        return replace(self._with(*found.output, found.grad_input[0]), fast_accum=fast, name=type(self).__name__)


@dataclass
class MXFP8BlockScaling(Recipe):
    """octavo.recipes.mx: 1x32 blocks; with ``enable_2d_quantization`` those of weights are 32x32.

    Example:
        >>> MXFP8BlockScaling().octavo() == recipes.mx()
        True
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def octavo(self) -> OctavoRecipe:
        """See Recipe."""
        if self.margin:
            raise UnsupportedOptionError("margin: blocks have no history to leave room for; leave it out")
        vector, square = (Cast(E4M3, PerBlock(rows, 32), power_of_two=True) for rows in (1, 32))
        return self._with(vector, square if self.enable_2d_quantization else vector, vector)


@dataclass
class Float8BlockScaling(Recipe):
    """octavo.recipes.blockwise: 1x128 blocks for inputs and gradients, 128x128 for weights.

    Example:
        >>> Float8BlockScaling().octavo() == recipes.blockwise()
        True
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default=_SPLIT)
    fp8_gemm_dgrad: MMParams = field(default=_SPLIT)
    fp8_gemm_wgrad: MMParams = field(default=_SPLIT)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def octavo(self) -> OctavoRecipe:
        """See Recipe."""
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        params = (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        if not {*dims} <= {1, 2} or _FAST in params:
            raise UnsupportedOptionError("blocks have 1 or 2 dimensions, and their products use_split_accumulator=True")
        return self._with(
            *(Cast(E4M3, PerBlock(1 if d == 1 else 128, 128), power_of_two=not self.use_f32_scales) for d in dims)
        )
