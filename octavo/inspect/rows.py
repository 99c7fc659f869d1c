"""The rows of a model's record, one for each cast of each layer's roles, and the tensors that observers count it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octavo.autograd.observer import LayerCounts
from octavo.kernels.arguments import Counted
from octavo.nn.candidates import sizes_of
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.recipe import OPERANDS, ROLES, Cast, Recipe

# the products that read a role as it lies, and transposed
READS = {role: tuple(product for product, roles in OPERANDS.items() if role in roles) for role in ROLES}

RecordedLayer = tuple[RecipeModule, LayerCounts]


def observe(module: RecipeModule, **fields: Any) -> None:
    """Set fields of a module's Observer; a module with no field set has no Observer."""
    if (fp8 := module.__dict__.get("fp8")) is not None:  # else octavo.restore has made it torch's meanwhile
        fp8.observe(**fields)


def require_whole(name: str, number: Any, least: int) -> None:
    """Raise ValueError unless an argument is a whole number of at least ``least``."""
    if isinstance(number, bool) or not hasattr(number, "__index__") or number < least:
        raise ValueError(f"{name}={number!r}: needs a whole number, at least {least}")


@dataclass(frozen=True)
class Row:
    """A cast of a role of a layer.

    Attributes:
        layer: the module's name.
        role: "input", "weight" or "grad_output".
        products: the products that read the codes.
        cast: the cast.
        experts: how many experts the layer has, each with a matrix of its own; 0 for other layers.
        features: for experts, how many columns the cast tensor has.
    """

    layer: str
    role: str
    products: tuple[str, ...]
    cast: Cast
    experts: int = 0
    features: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return {**{name: value for name, value in vars(self).items() if value != 0}, "cast": str(self.cast)}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Row:
        """Return the row with such fields; ValueError, TypeError or KeyError if there is none."""
        row = cls(**{**fields, "products": tuple(fields["products"]), "cast": Cast.of(fields["cast"])})
        counts = row.experts, row.features
        if not isinstance(row.layer, str) or row.role not in ROLES or not {*row.products} <= {*OPERANDS}:
            raise ValueError(f"{row.role!r} of {row.layer!r}, read by {row.products}, is no role of a layer")
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{counts} are no numbers of experts and of features")
        return row

    @property
    def largest(self) -> float:
        """The largest number that the cast's scale has room for, times the scale."""
        return self.cast.format.max / 2.0**self.cast.margin


class Table:
    """The rows of a model with its present recipes, and the tensors in which they are counted.

    Attributes:
        rows: in the order of the model's layers.
        sums, extremes: [lines of all rows, ...], as in ``cast_statistics``.
        layers: each layer with a product in FP8, and its part of these tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        devices = {m.parameters_device for _, m in RecipeModule.named_in(model)} or {torch.device("cpu")}
        if len(devices) > 1:
            raise ValueError(f"the model lies on several devices, {sorted(map(str, devices))}: record each part")
        (device,) = devices
        self._recipes = _fp8_recipes(model)
        self.rows = [
            Row(name, role, *cast, *_experts_and_columns(module, role))
            for name, module, recipe in self._recipes
            for role in ROLES
            for cast in _casts(recipe, role)
            if cast
        ]
        lines = [row.experts or 1 for row in self.rows]  # each row's lines of counts: one, or one for each expert
        self.sums = torch.zeros(sum(lines), len(Counted.sums) + Counted.exponents, dtype=torch.float64, device=device)
        self.extremes = torch.zeros(sum(lines), len(Counted.extremes), device=device, dtype=torch.float32)
        counts = zip(self.rows, self.sums.split(lines), self.extremes.split(lines), strict=True)
        counters = ((sums, extremes) if row.experts else (sums[0], extremes[0]) for row, sums, extremes in counts)
        self.layers: list[RecordedLayer] = []
        for _, module, recipe in self._recipes:
            pairs: Any = [tuple(next(counters) if cast else None for cast in _casts(recipe, role)) for role in ROLES]
            self.layers.append((module, LayerCounts(recipe, pairs, first_here(module), set())))
        self._is_attached = False

    def is_of(self, model: nn.Module) -> bool:
        """Return whether a model's layers and recipes are those of the table."""
        return self._recipes == _fp8_recipes(model)

    def attach(self, on: bool) -> None:
        """Make the modules count (``on``), or stop counting."""
        if on or self._is_attached:
            for module, counts in self.layers:
                counts.seen.clear()
                observe(module, counts=counts if on else None)
        self._is_attached = on


def _fp8_recipes(model: nn.Module) -> list[tuple[str, RecipeModule, Recipe]]:
    """Return the names, modules and recipes of layers with a product in FP8."""
    return [(name, m, m.recipe) for name, m in RecipeModule.named_in(model) if not m.recipe.is_high_precision]


def first_here(module: RecipeModule) -> int:
    """Return the index of the first expert whose rows this rank computes."""
    exchange = getattr(module, "exchange", None)
    return 0 if exchange is None else exchange.local_experts(sizes_of(module)[0] // exchange.size).start


def _experts_and_columns(module: RecipeModule, role: str) -> tuple[int, int]:
    """Return how many experts a layer has and how many columns a role's tensor has, 0 and 0 for other layers."""
    experts, columns, rows = sizes_of(module)
    return (experts, rows if role == "grad_output" else columns) if experts else (0, 0)


def _casts(recipe: Recipe, role: str) -> list[tuple[tuple[str, ...], Cast] | None]:
    """Return a role's casts as it lies and transposed, with the products that read them; only one if they are equal."""
    casts, products = recipe.casts[ROLES.index(role)], READS[role]
    if casts.coincide:
        assert casts.as_is is not None
        return [(products, casts.as_is), None]
    return [None if cast is None else ((product,), cast) for cast, product in zip(casts[:2], products, strict=True)]
