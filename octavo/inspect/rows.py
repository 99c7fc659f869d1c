"""The rows of a model's record, one for each cast of each layer's roles, and the observers that count its effects.

An observer also notes faults in its layer's products. Counts and notes are tensors on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.autograd.grouped import group_of_rows, padded_ends, rows_of_codes
from octavo.autograd.products import Layer
from octavo.kernels.arguments import EXPONENTS, EXTREMES, SUMS
from octavo.kernels.backward_pass import is_running
from octavo.kernels.layouts import contraction_multiple
from octavo.nn.candidates import features
from octavo.nn.linear import Grouped, PartedLinear
from octavo.nn.recipe_module import RecipeModule, device_of
from octavo.nn.weight import weight_of
from octavo.scaling.recipe import OPERANDS, ROLES, Cast, Recipe
from octavo.tensor.pair import ForProducts, Operands

INPUT, WEIGHT, GRAD_OUTPUT = range(len(ROLES))
PRODUCTS = tuple(OPERANDS)
# the products that read a role as it lies, and transposed
READS = {role: tuple(product for product, roles in OPERANDS.items() if role in roles) for role in ROLES}

Counts = tuple[Tensor, Tensor]  # sums and extremes, arguments of the op cast_statistics; a row for each group
RoleCounts = tuple[Counts | None, Counts | None]  # of the cast as it lies, and of the transposed cast if it differs


class LayerCounts(NamedTuple):
    """The tensors in which a layer's casts are counted by role, while it has this recipe; the recorder counts weights.

    ``first``: the index of the first expert whose products this rank computes. ``seen``: not empty in a step whose
    forward was counted, so that a checkpoint's second forward, in backward, is not counted.
    """

    recipe: Recipe
    roles: Sequence[RoleCounts]
    first: int
    seen: set[int]


RecordedLayer = tuple[RecipeModule, LayerCounts]


class Notes(NamedTuple):
    """The tensors in which faults of a layer's role are noted: arguments of the op note_faults."""

    place: Tensor
    faults: Tensor
    first: Tensor


class Observer(NamedTuple):
    """Counts the effects of a layer's casts and notes faults in its products, and changes nothing.

    ``counts``: None except in a step that is recorded; ``notes``: of (input, grad_output) where faults are traced.
    """

    counts: LayerCounts | None = None
    notes: tuple[Notes, Notes] | None = None

    def cast(
        self,
        recipe: Recipe,
        role: int,
        source: Callable[[], Tensor],
        operands: Operands,
        offsets: Tensor | None = None,
    ) -> None:
        """Count the effects of a cast of ``source()``, of the role INPUT or GRAD_OUTPUT.

        ``offsets``: of rows in groups, see autograd/grouped.py. Rows that arrived in FP8 were counted by their sender.
        """
        if self.counts is None or self.counts.recipe is not recipe:
            return
        if not torch.compiler.is_compiling() and role == INPUT and operands.as_is is not None:
            if is_running() and self.counts.seen:
                return
            self.counts.seen.update(() if is_running() else (role,))
        x_RC = source()
        if isinstance(x_RC, ForProducts):
            return
        casts, (first, second) = recipe.casts[role], self.counts.roles[role]
        if first is not None and casts.as_is is not None and operands.as_is is not None:
            kernels.cast_statistics(x_RC, *operands.as_is, casts.as_is.tile, *self._of(first, offsets), offsets)
        elif casts.once:  # in a first layer, whose input needs no gradient
            second = first
        if second is not None and casts.transposed is not None and operands.transposed is not None:
            codes, scale_inv = operands.transposed
            as_is = rows_of_codes(codes, offsets, x_RC.shape[0], _pad(x_RC, recipe)), scale_inv.t()
            kernels.cast_statistics(x_RC, *as_is, casts.transposed.tile[::-1], *self._of(second, offsets), offsets)

    def _of(self, counts: Counts, offsets: Tensor | None) -> Counts:
        """Return the counts of these groups, which are all experts, or those whose products this rank computes."""
        assert self.counts is not None
        if offsets is None or offsets.shape[0] == counts[0].shape[0]:
            return counts
        here = slice(self.counts.first, self.counts.first + offsets.shape[0])
        return counts[0][here], counts[1][here]

    def product(
        self,
        layer: Layer,
        name: str,
        result: Tensor,
        operand: tuple[Tensor, Tensor | None],
        offsets: Tensor | None,
        amax: Tensor | None = None,
    ) -> None:
        """Note faults in a product's operand by its result; the operand is a pair, or (tensor, None) in high precision.

        "output" shows faults in the input, whose ``amax`` a Delayed cast has computed. "grad_input" shows faults in
        grad_output; where it is not computed, "grad_weight" does. A faulty element of a group's grad_weight does not
        show the row: all rows of the group are read.
        """
        if self.notes is None:
            return
        tensor, scale_inv = operand
        if name != "output" and layer.state is not None and layer.commits:
            amax = layer.state.amax_history[GRAD_OUTPUT, :1]
        if name == "grad_weight" and offsets is not None:
            offsets = padded_ends(offsets, 1 if scale_inv is None else _pad(tensor, layer.recipe))
            tensor, scale_inv = tensor.t(), None if scale_inv is None else scale_inv.t()
            group = group_of_rows(offsets, tensor.shape[0]).clamp(max=offsets.shape[0] - 1)
            result = result[..., 0].sum(-1)[group].unsqueeze(1)
        kernels.note_faults(result, tensor, scale_inv, amax, *self.notes[name != "output"], offsets)


def _pad(x: Tensor, recipe: Recipe) -> int:
    return contraction_multiple(x.device) if recipe.pads else 1


def observe(module: RecipeModule, **fields: Any) -> None:
    """Set fields of a module's Observer; a module with no field set has no Observer."""
    observer = (module.__dict__.pop("observer", None) or Observer())._replace(**fields)
    if observer != (None, None):
        module.observer = observer


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
        if not isinstance(row.layer, str) or row.role not in ROLES or not {*row.products} <= {*PRODUCTS}:
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
        devices = {device_of(m) for m in model.modules() if isinstance(m, RecipeModule)} or {torch.device("cpu")}
        if len(devices) > 1:
            raise ValueError(f"the model lies on several devices, {sorted(map(str, devices))}: record each part")
        (device,) = devices
        layers = _fp8_layers(model)
        self._recipes = [(name, m.recipe) for name, m in layers]
        planned = [(name, m, [_casts(m.recipe, role) for role in range(len(ROLES))]) for name, m in layers]
        self.rows = [
            Row(name, ROLES[role], *cast, *_of_experts(m, role))
            for name, m, roles in planned
            for role, casts in enumerate(roles)
            for cast in casts
            if cast
        ]
        lines = [row.experts or 1 for row in self.rows]  # each row's lines of counts: one, or one for each expert
        self.sums = torch.zeros(sum(lines), len(SUMS) + EXPONENTS, dtype=torch.float64, device=device)
        self.extremes = torch.zeros(sum(lines), len(EXTREMES), device=device, dtype=torch.float32)
        counts = zip(self.rows, self.sums.split(lines), self.extremes.split(lines), strict=True)
        places = ((sums, extremes) if row.experts else (sums[0], extremes[0]) for row, sums, extremes in counts)
        self.layers: list[RecordedLayer] = []
        for _, module, roles in planned:
            of_roles = [(next(places) if first else None, next(places) if second else None) for first, second in roles]
            self.layers.append((module, LayerCounts(module.recipe, of_roles, first_here(module), set())))
        self._is_attached = False

    def is_of(self, model: nn.Module) -> bool:
        """Return whether a model's layers and recipes are those of the table."""
        return self._recipes == [(name, m.recipe) for name, m in _fp8_layers(model)]

    def attach(self, on: bool) -> None:
        """Make the modules count (``on``), or stop counting."""
        if on or self._is_attached:
            for module, counts in self.layers:
                counts.seen.clear()
                observe(module, counts=counts if on else None)
        self._is_attached = on


def _fp8_layers(model: nn.Module) -> list[tuple[str, RecipeModule]]:
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, RecipeModule)]
    return [(name, m) for name, m in layers if not m.recipe.is_high_precision]


def sizes_of(module: RecipeModule) -> tuple[int, int, int]:
    """Return (how many experts a layer has, or 0; in_features; out_features)."""
    if not isinstance(module, Grouped):
        return 0, *features(module)
    experts, *sizes = module.weight_parameter.shape
    columns, rows = sizes if module.stores_transposed else sizes[::-1]
    return experts, columns, rows


def first_here(module: RecipeModule) -> int:
    """Return the index of the first expert whose rows this rank computes."""
    exchange = getattr(module, "exchange", None)
    return 0 if exchange is None else exchange.part(sizes_of(module)[0] // exchange.size).start


def _of_experts(module: RecipeModule, role: int) -> tuple[int, int]:
    experts, columns, rows = sizes_of(module)
    return (experts, rows if ROLES[role] == "grad_output" else columns) if experts else (0, 0)


def parameter_of(module: RecipeModule) -> nn.Parameter | None:
    """Return a layer's weight, [E, ., .] for experts; None if it is computed from other parameters.

    It is a parameter, except of a layer whose splits are parameters: then it is this rank's rows of all splits, joined.
    """
    return module.weight if isinstance(module, PartedLinear) else weight_of(module)


def parameters_of(module: RecipeModule) -> list[nn.Parameter]:
    """Return the parameters that are a layer's weight or its splits; none if the weight is computed from others."""
    weights = module.weights if isinstance(module, PartedLinear) else [weight_of(module)]
    return [weight for weight in weights if weight is not None]


def _casts(recipe: Recipe, role: int) -> list[tuple[tuple[str, ...], Cast] | None]:
    """Return a role's casts as it lies and transposed, with the products that read them; only one if they are equal."""
    casts, products = recipe.casts[role], READS[ROLES[role]]
    if casts.once:
        assert casts.as_is is not None
        return [(products, casts.as_is), None]
    pairs = zip(casts[:2], products, strict=True)
    return [None if cast is None else ((product,), cast) for cast, product in pairs]
