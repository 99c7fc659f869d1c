"""Products of linear layers whose operands are rounded to FP8 in ways of which a recipe may have none, in plain torch.

A product's operands are laid with the contracted dimension last, as a recipe's casts see them. All is float32; with a
Cast's own options the result is that of octavo's layers in float32, up to the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octavo import Recipe
from octavo.formats import E4M3, Format
from octavo.granularity import ALL, Granularity, PerTensor
from octavo.numerics import floor_power_of_two, scale_from_amax
from octavo.scaling.recipe import OPERANDS

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = OPERANDS
HADAMARD = 16


@dataclass(frozen=True)
class Rounding:
    """How one operand of one product is rounded.

    Attributes:
        format: its format.
        granularity: of the operand laid with the contracted dimension last.
        powers: of two: "none"; scales rounded "down" as a Cast's; or "ocp", as the OCP's MX formats take them from the
            exponent of the largest element alone, which saturates if it is above 1.75 times its power of two.
        stochastic: up or down at random, so that the mean is right; else to nearest.
        hadamard: 16 neighbours along the contraction are mixed before, with random signs; the product stays the same.
    """

    format: Format = E4M3
    granularity: Granularity = PerTensor()
    powers: str = "none"
    stochastic: bool = False
    hadamard: bool = False


Operands = tuple[Rounding | None, Rounding | None]
Products = Mapping[str, Operands]  # of the products that are not in high precision


def products_of(recipe: Recipe) -> Products:
    """The same of a recipe whose casts are Dynamic."""
    found = {name: getattr(recipe, name) for name in OPERANDS if getattr(recipe, name) is not None}
    return {
        name: tuple(Rounding(c.format, c.granularity, "down" if c.power_of_two else "none") for c in casts)  # type: ignore[misc]
        for name, casts in found.items()
    }


def scaled(x: Tensor, how: Rounding) -> tuple[Tensor, Tensor]:
    """A float32 matrix in tiles [tiles, rows, tiles, columns], times their scales, and these: before it is rounded."""
    rows, cols = (size if side == ALL else side for size, side in zip(x.shape, how.granularity.tile, strict=True))
    tiles = F.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))
    tiles = tiles.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    amax, limit = tiles.abs().amax((1, 3), keepdim=True), how.format.max
    if how.powers == "ocp":
        amax, limit = floor_power_of_two(amax), 2.0 ** math.floor(math.log2(limit))
    scale = scale_from_amax(amax, limit, how.powers == "down", 0)
    return tiles * scale, scale


def rounded(x: Tensor, how: Rounding | None, generator: torch.Generator) -> Tensor:
    """A float32 matrix [R, C] as it reads after the cast."""
    if how is None:
        return x
    values, scale = scaled(x, how)
    values = values.clamp(-how.format.max, how.format.max)
    values = stochastically(values, how.format, generator) if how.stochastic else values.to(how.format.dtype).float()
    return (values / scale).flatten(0, 1).flatten(1)[: x.shape[0], : x.shape[1]]


def stochastically(values: Tensor, fmt: Format, generator: torch.Generator) -> Tensor:
    """Values within a format's range, up or down to a number of the format, with their own value as the mean."""
    _, exponent = torch.frexp(values)  # a mantissa below 1
    lowest = 1 - fmt.bias  # exponent of the smallest normal number
    gap = torch.exp2((exponent - 1).clamp(min=lowest) - fmt.mantissa_bits)
    return torch.floor(values / gap + torch.rand(values.shape, generator=generator)) * gap


def mixed(matrices: tuple[Tensor, Tensor], how: Operands, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Both operands of a product, mixed by the same random Hadamard transform where either asks for it."""
    if not any(own is not None and own.hadamard for own in how):
        return matrices
    signs = 1 - 2 * torch.randint(2, (matrices[0].shape[1],), generator=generator).float()
    transform = torch.ones(1, 1)
    while len(transform) < HADAMARD:
        transform = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), transform) / 2**0.5
    first, second = ((m * signs).unflatten(1, (-1, HADAMARD)).matmul(transform).flatten(1) for m in matrices)
    return first, second


class Product(torch.autograd.Function):
    """A linear layer without bias whose three products round their operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Products, generator: torch.Generator) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.generator = how, generator
        x_TK = x.flatten(0, -2)
        return _multiply(x_TK, weight, how.get(OUTPUT), generator).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        x_TK, grad_TN = x.flatten(0, -2), grads[0].flatten(0, -2)
        grad_x = _multiply(grad_TN, weight.t(), ctx.how.get(GRAD_INPUT), ctx.generator).view(x.shape)
        return grad_x, _multiply(grad_TN.t(), x_TK.t(), ctx.how.get(GRAD_WEIGHT), ctx.generator), None, None


def _multiply(first: Tensor, second: Tensor, how: Operands | None, generator: torch.Generator) -> Tensor:
    """first . second^T."""
    if how is None:
        return first @ second.t()
    first, second = mixed((first, second), how, generator)
    return rounded(first, how[0], generator) @ rounded(second, how[1], generator).t()


class RoundedProducts(TorchFunctionMode):
    """Within it the linear layers of these weights have rounded products; all others compute as they do.

    Args:
        how: for a layer's weight, its products.
        seed: of random roundings and signs.
    """

    def __init__(self, how: Mapping[nn.Parameter, Products], seed: int = 0) -> None:
        super().__init__()
        self.how, self.generator = how, torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        if func is F.linear and (found := self.how.get(args[1])) is not None:
            return Product.apply(args[0], args[1], found, self.generator)
        return func(*args, **(kwargs or {}))
