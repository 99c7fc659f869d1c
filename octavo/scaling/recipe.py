"""Cast and Recipe: values that say how the *next* cast is made; RecipeMap: which layer follows which recipe.

A linear layer's three products, each operand laid with the contracted dimension last (a name's suffix is its layout):

    product       result      first operand     second operand     contracts over
    output        y_TN        input_TK          weight_NK          K
    grad_input    dx_TK       grad_output_TN    weight_KN          N
    grad_weight   dW_NK       grad_output_NT    input_KT           T

So each role is an operand of two products, once as it lies and once transposed. Where its two casts read the same tile
of the same tensor (per tensor; 128x128) it is cast once and used twice; else it is read once and rounded twice.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octavo.errors import first_line
from octavo.formats import CAST_FORMATS, E4M3, E5M2, Format
from octavo.granularity import ALL, NV, PADDING, Granularity, PerBlock, PerRow, PerTensor, Tile, check_packed
from octavo.numerics import check_scale_options, scale_from_amax, scale_inv_dtype

ROLES = ("input", "weight", "grad_output")
INPUT, WEIGHT, GRAD_OUTPUT = range(len(ROLES))  # places of roles in Recipe.casts and in delayed state
OPERANDS = {  # the roles that each product multiplies
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
PRODUCTS = tuple(OPERANDS)
FIELDS = (*PRODUCTS, "saved", "fast_accum")  # of a recipe's value


@dataclass(frozen=True)
class Dynamic:
    """Rule: the scale comes from this tensor's own amax.

    Example:
        >>> Dynamic()
        Dynamic()
    """


@dataclass(frozen=True)
class Delayed:
    """Rule: the scale comes from a history of amax of earlier steps, so that a cast is one pass over its tensor.

    Args:
        history_length: how many optimizer steps' largest amaxes are kept, at least 1.
        reduce: ``"max"`` takes the largest of the history, ``"most_recent"`` its newest, which is that of the step's
            micro-batches so far.

    Raises:
        ValueError: for another ``reduce`` or a history without room.

    Source:
        Micikevicius et al., arXiv 2209.05433; Transformer Engine's DelayedScaling.

    Example:
        >>> Delayed(history_length=16)
        Delayed(history_length=16, reduce='max')
    """

    history_length: int = 16
    reduce: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        if type(self.history_length) is not int or self.history_length < 1:
            raise ValueError(f"history_length={self.history_length!r}: needs an integer of at least 1")
        if self.reduce not in ("max", "most_recent"):
            raise ValueError(f"reduce={self.reduce!r}: use 'max' or 'most_recent'")


@dataclass(frozen=True)
class Stochastic:
    """Rounding of E2M1: up with the probability of the part that is dropped, to 8 bits, so that errors average out.

    The random bits of an element depend on the seed, on the values of its block of 16 and on its place in the matrix,
    and on nothing else: a step that is computed again, by any number of ranks or implementations, has the same ones,
    and there is no state to save. Values beyond 6 times a block's scale saturate: a block's scale is rounded to
    nearest, so about 3.5 % of normally distributed elements do, and results are 0.4 % too small on average.

    Args:
        seed: 0 to 2^31 - 1.

    Raises:
        ValueError: for another seed.

    Source:
        NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, section 4.3.

    Example:
        >>> Stochastic()
        Stochastic(seed=0)
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed={self.seed!r}: needs an integer from 0 to 2^31 - 1")


@dataclass(frozen=True)
class Rotation:
    """A Hadamard transform of each 16 elements along the contraction, which spreads outliers before the cast.

    Both operands of a product are rotated by the same matrix H, whose product with its transpose is the identity, so
    that the product stays what it is. The rotated elements are rounded to bfloat16.

    Args:
        signs: 16 bits, of which bit i says whether row i of H is negated.

    Raises:
        ValueError: for another number.

    Source:
        NVIDIA, arXiv 2509.25149, section 4.2; the default signs are Transformer Engine's.

    Example:
        >>> Rotation()
        Rotation(signs=55272)
    """

    signs: int = 0b1101_0111_1110_1000

    def __post_init__(self) -> None:
        if type(self.signs) is not int or not 0 <= self.signs < 1 << 16:
            raise ValueError(f"signs={self.signs!r}: needs an integer of 16 bits")


_SCALING = ("dtype", "tile", "power_of_two", "margin")  # a cast op's arguments


class _DerivedOfCast:
    """The values that a Cast derives from its fields, once, for every cast to read."""

    tile: Tile  # the granularity's
    has_one_scale: bool  # whether the granularity is PerTensor()
    limit: float  # the number that a scale brings its amax to, see Format.limit
    is_delayed: bool
    is_packed: bool  # whether two codes lie in a byte, see formats.E2M1
    scale_inv_dtype: torch.dtype  # see numerics.scale_inv_dtype
    arguments: tuple[Any, ...]  # as the cast ops take them
    arguments_transposed: tuple[Any, ...]  # of the operand's transpose
    named: dict[str, Any]  # rotation and seed of E2M1, by the op's argument names
    as_second: dict[str, Any]  # the transposed cast's arguments, prefixed second_


@dataclass(frozen=True)
class Cast(_DerivedOfCast):
    """The format, granularity and rule by which one operand of one product is cast.

    Args:
        format: E4M3, E5M2 or E2M1.
        granularity: that of the operand laid with the contracted dimension last; of E2M1 PerBlock(1, 16) or (16, 16).
        rule: Dynamic() or Delayed(...); Delayed needs PerTensor(), or E2M1, of whose tensor it makes the outer scale.
        power_of_two: round the scale down to a power of two; of E2M1 the outer scale always is one.
        margin: divide the scale by 2^margin, 0 to 64; of E2M1 the outer scale.
        rounding: of E2M1, Stochastic(seed), or None: to nearest, ties to even, as every other cast rounds.
        rotation: of E2M1, Rotation(signs) before rounding, or None.

    Raises:
        TypeError, ValueError: for a wrong field, naming it and the remedy.

    Example:
        >>> from octavo import E4M3, PerRow
        >>> Cast(E4M3, PerRow())
        Cast(E4M3, PerRow(), Dynamic())
    """

    format: Format
    granularity: Granularity
    rule: Dynamic | Delayed = Dynamic()
    power_of_two: bool = False
    margin: int = 0
    rounding: Stochastic | None = None
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        for name, kind in (("format", Format), ("granularity", Granularity), ("rule", (Dynamic, Delayed))):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"Cast: {name}={getattr(self, name)!r} is no {name}; e.g. {_EXAMPLE_OF_FIELD[name]}")
        if self.format not in CAST_FORMATS.values():
            raise ValueError(f"Cast: format={self.format} is none that casts write; use {', '.join(_FORMATS)}")
        check_scale_options(self.power_of_two, self.margin, "Cast: ")
        self._check_packed()
        if isinstance(self.rule, Delayed) and self.granularity != PerTensor() and not self.format.is_packed:
            raise ValueError(f"Cast: a Delayed rule has one scale a role and needs PerTensor(), not {self.granularity}")
        if isinstance(self.granularity, PerRow) and self.granularity.dim != -1:
            raise ValueError("Cast: an operand is laid with the contracted dimension last, so its rows are PerRow()")
        tile, format = self.granularity.tile, self.format
        transposed = format.dtype, tile[::-1], self.power_of_two, self.margin
        named = {"seed": self.rounding and self.rounding.seed, "rotation": self.rotation and self.rotation.signs}
        named = {name: value for name, value in named.items() if value is not None}
        second = dict(zip(_SCALING, transposed, strict=True)) | named
        vars(self).update(  # frozen, so that nothing else sets them
            tile=tile,
            has_one_scale=tile == (ALL, ALL),
            limit=format.limit,
            is_delayed=isinstance(self.rule, Delayed),
            is_packed=format.is_packed,
            scale_inv_dtype=scale_inv_dtype(tile, self.power_of_two, format.is_packed),
            arguments=(format.dtype, tile, self.power_of_two, self.margin),
            arguments_transposed=transposed,
            named=named,
            as_second={f"second_{name}": value for name, value in second.items()},
        )

    def _check_packed(self) -> None:
        """Raise ValueError for what only E2M1 has, or does not have."""
        if self.format.is_packed:
            check_packed(self.granularity, self.power_of_two, "Cast: ")
            if self.rotation is not None and self.granularity.tile != NV:
                raise ValueError(f"Cast: rotation={self.rotation} runs along rows: give PerBlock(1, 16)")
        elif self.rounding is not None or self.rotation is not None:
            raise ValueError(f"Cast: rounding and rotation are E2M1's; a cast to {self.format} has neither")
        for name, kind in (("rounding", Stochastic), ("rotation", Rotation)):
            if not isinstance(value := getattr(self, name), kind | None):
                raise TypeError(f"Cast: {name}={value!r} must be None or octavo.{kind.__name__}()")

    def __repr__(self) -> str:
        names = ("power_of_two", "margin", "rounding", "rotation")
        others = [f", {name}={value}" for name in names if (value := getattr(self, name))]
        return f"Cast({self.format}, {self.granularity}, {self.rule}{''.join(others)})"

    def scale_of(self, amax: Tensor, delayed: Tensor | None = None) -> Tensor:
        """Return the scales by which this cast multiplies, float32, of tiles with these amaxes.

        Args:
            amax: float32, any shape; of E2M1 the tensor's, and the result is the outer scale.
            delayed: scales that replace them where they are not 0.

        Example:
            >>> Cast(E4M3, PerTensor(), power_of_two=True).scale_of(torch.tensor([0.0, 1.0])).tolist()
            [1.0, 256.0]
        """
        return scale_from_amax(amax, self.limit, self.power_of_two, self.margin, delayed)

    @classmethod
    def of(cls, text: str) -> Cast:
        """Return the cast that prints as this text; nothing in the text is run.

        Raises:
            ValueError: for other text.

        Example:
            >>> Cast.of("Cast(E5M2, PerTensor(), Delayed(4), margin=1)")
            Cast(E5M2, PerTensor(), Delayed(history_length=4, reduce='max'), margin=1)
        """
        quoted = repr(text) if len(repr(text)) <= 200 else f"{repr(text)[:200]}..."
        try:
            cast = _value(ast.parse(text, mode="eval").body)
        except (SyntaxError, TypeError, ValueError, KeyError, RecursionError, MemoryError) as error:
            raise ValueError(f"{quoted} is no Cast, such as {_EXAMPLE_CAST} ({first_line(error)})") from error
        if not isinstance(cast, Cast):
            raise ValueError(f"{quoted} is no Cast, such as {_EXAMPLE_CAST}")
        return cast


_EXAMPLE_CAST = "Cast(E4M3, PerTensor(), Dynamic())"
_FORMATS = {format.name: format for format in CAST_FORMATS.values()}
_NAMES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (Cast, PerTensor, PerRow, PerBlock, Dynamic, Delayed, Stochastic, Rotation)},
    **_FORMATS,
}


def _value(node: ast.AST) -> Any:
    """Return the value of a cast's text: calls of these names with literals, and nothing else."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            named = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
            return _NAMES[name](*map(_value, node.args), **named)
        case ast.Name(id=name):
            return _NAMES[name]
        case _:
            return ast.literal_eval(node)


_EXAMPLE_OF_FIELD = {"format": "octavo.E4M3", "granularity": "octavo.PerTensor()", "rule": "octavo.Dynamic()"}


class RoleCasts(NamedTuple):
    """A role's two casts: as it lies, and transposed; None where that product stays in high precision.

    ``coincide``: both exist and are the same cast, which serves both layouts.
    """

    as_is: Cast | None
    transposed: Cast | None
    coincide: bool

    @property
    def shared_tile(self) -> Tile | None:
        """The tile, of the tensor as it lies, of the cast that serves both layouts; None if they need two."""
        return self.as_is.tile if self.coincide and self.as_is is not None else None


class _DerivedOfRecipe:
    """The values that a Recipe derives from its fields, once, for every forward to read."""

    input_casts: RoleCasts
    weight_casts: RoleCasts
    grad_output_casts: RoleCasts
    casts: tuple[RoleCasts, RoleCasts, RoleCasts]  # these three, by role
    weight_key: str  # weight_casts, as a compiled graph can compare them
    rows_unit: int  # layers are joined by multiples of it in N, so that no block spans two
    may_pad: bool  # whether padding each contraction to a multiple of PADDING leaves the number of scales as it is
    has_e2m1: bool  # whether a cast is to E2M1
    is_high_precision: bool  # no product is in FP8
    delayed: Delayed | None
    # that op's last arguments: by role limits of formats, whether scales are powers of two, and margins; ``reduce``
    delayed_update: tuple[Any, ...]


@dataclass(frozen=True)
class Recipe(_DerivedOfRecipe):
    """The casts of each product's two operands, or None: that product stays in high precision.

    Args:
        output: (cast of input, cast of weight).
        grad_input: (cast of grad_output, cast of weight).
        grad_weight: (cast of grad_output, cast of input).
        saved: how a fused MLP keeps the input of its activation (the gate and up pair) for backward: a Dynamic Cast of
            that tensor [T, N] as it lies, or None, in its own dtype. The activation's gradient reads it, and where
            grad_weight of the layer behind it is in high precision, the activation is computed from it once more.
        fast_accum: the products, of "output", "grad_input" and "grad_weight", that a GPU's tensor cores may sum in
            their own, shorter accumulator over all of the contraction: on a Hopper about 14 bits, and faster. The
            others are added up in float32 at least every 128 terms. Products by blocks along the contraction and those
            in high precision are not concerned, nor are a CPU's, which are float32 always.
        name: how it is printed; not compared. A recipe that dataclasses.replace changes without a new name is named
            "<name> with <fields> changed".

    Raises:
        TypeError, ValueError: for what no kernel or state could carry out, with the remedy.

    Example:
        >>> import dataclasses
        >>> from octavo import recipes
        >>> dataclasses.replace(recipes.dynamic(), grad_weight=None).name
        'dynamic with grad_weight changed'
    """

    output: tuple[Cast, Cast] | None = None
    grad_input: tuple[Cast, Cast] | None = None
    grad_weight: tuple[Cast, Cast] | None = None
    saved: Cast | None = None
    fast_accum: tuple[str, ...] = ("output",)
    name: str = field(default="custom", compare=False)
    _named: dict[str, Any] | None = field(default=None, repr=False, compare=False, kw_only=True)  # see _rename

    def __post_init__(self) -> None:
        self._check()
        vars(self)["fast_accum"] = tuple(product for product in PRODUCTS if product in self.fast_accum)
        output, grad_input, grad_weight = (getattr(self, product) or (None, None) for product in PRODUCTS)
        pairs = (output[0], grad_weight[1]), (output[1], grad_input[1]), (grad_input[0], grad_weight[0])  # by role
        casts = tuple(RoleCasts(*pair, coincide=_coincide(*pair)) for pair in pairs)
        all_casts = [cast for pair in pairs for cast in pair if cast is not None]
        delayed_casts = [[cast for cast in pair if cast is not None and cast.is_delayed] for pair in pairs]
        rule = _one_rule(delayed_casts)
        vars(self).update(  # frozen, so that nothing else sets them
            casts=casts,
            input_casts=casts[INPUT],
            weight_casts=casts[WEIGHT],
            grad_output_casts=casts[GRAD_OUTPUT],
            may_pad=all(cast.tile[1] == ALL or cast.tile[1] % PADDING == 0 for cast in all_casts),
            has_e2m1=any(cast.is_packed for cast in all_casts),
            is_high_precision=not all_casts,
            delayed=rule,
            delayed_update=_delayed_update(delayed_casts, rule),
            weight_key=str(casts[WEIGHT]),
            rows_unit=_rows_unit(casts[WEIGHT], casts[GRAD_OUTPUT]),
        )
        self._rename()

    def _check(self) -> None:
        """Raise TypeError or ValueError for products that can't be computed; ``_one_rule`` looks at delayed casts."""
        for product in PRODUCTS:
            if (casts := getattr(self, product)) is None:
                continue
            if not (isinstance(casts, tuple) and len(casts) == 2 and all(isinstance(cast, Cast) for cast in casts)):
                raise TypeError(f"Recipe: {product}={casts!r} must be None or a pair of Casts, one for each operand")
            if casts[0].format is E5M2 and casts[1].format is E5M2:
                raise ValueError(f"Recipe: {product} multiplies E5M2 by E5M2, which no GPU does; make one operand E4M3")
            _check_packed_product(product, *casts)
        if self.saved is not None and not (
            isinstance(self.saved, Cast) and isinstance(self.saved.rule, Dynamic) and not self.saved.is_packed
        ):
            raise TypeError(f"Recipe: saved={self.saved!r} must be None or a Cast whose rule is Dynamic(), not to E2M1")
        if not isinstance(self.name, str):
            raise TypeError(f"Recipe: name={self.name!r} must be text")
        if not isinstance(self.fast_accum, (tuple, list)) or not all(name in PRODUCTS for name in self.fast_accum):
            raise ValueError(f"Recipe: fast_accum={self.fast_accum!r} must be a tuple of products, of {PRODUCTS}")

    def of(self, *names: str) -> Recipe:
        """Return this recipe, which all layers have, as ``RecipeMap.of`` returns the one of a layer of these names."""
        return self

    def _rename(self) -> None:
        """Note the fields that the name stands for; rename what dataclasses.replace changed under an old name.

        A frozen value has to remember them: ``replace`` calls __init__ with all fields, the old ``_named`` too, and
        nothing else says that ``name`` was not given anew.
        """
        values, old_values = {name: getattr(self, name) for name in FIELDS}, self._named
        if old_values is not None and old_values["name"] == self.name:
            if changed := [name for name in FIELDS if old_values[name] != values[name]]:
                vars(self)["name"] = f"{self.name} with {', '.join(changed)} changed"
        vars(self)["_named"] = {"name": self.name, **values}

    def __str__(self) -> str:
        lines = [f"{self.name}:"]
        for product, (first, second) in OPERANDS.items():
            casts = getattr(self, product)
            text = "high precision" if casts is None else f"{first} {casts[0]}, {second} {casts[1]}"
            lines.append(f"  {product:<12}{text}")
        if self.saved is not None:
            lines.append(f"  {'saved':<12}{self.saved}")
        if self.fast_accum != Recipe.fast_accum:
            lines.append(f"  {'fast_accum':<12}{', '.join(self.fast_accum) or 'none'}")
        return "\n".join(lines)


def _check_packed_product(product: str, first: Cast, second: Cast) -> None:
    """Raise ValueError for casts to E2M1 that no product multiplies, or that would spoil it."""
    if first.is_packed != second.is_packed:
        raise ValueError(f"Recipe: {product} multiplies {first.format} by {second.format}; make both E2M1 or neither")
    if first.rotation != second.rotation:
        raise ValueError(f"Recipe: {product} rotates by {first.rotation} and {second.rotation}: give both the same")
    if first.rotation is not None and product != "grad_weight":
        raise ValueError(f"Recipe: {product} rotates its operands, which grad_weight's alone may be: set rotation=None")
    for role, cast in zip(OPERANDS[product], (first, second), strict=True):
        if cast.rounding is not None and role != "grad_output":
            raise ValueError(f"Recipe: {product} rounds {role} randomly; rounding=Stochastic() is for grad_output")


def _one_rule(delayed_casts: Sequence[Sequence[Cast]]) -> Delayed | None:
    """Return the rule of all Delayed casts, which are listed by role; raise ValueError if one history can't serve."""
    rules: set[Any] = {cast.rule for casts in delayed_casts for cast in casts}
    if len(rules) > 1:
        raise ValueError(f"Recipe: a layer keeps one kind of history, but the casts ask for {sorted(map(str, rules))}")
    for role, casts in zip(ROLES, delayed_casts, strict=True):
        if len({_as_scaled(cast) for cast in casts}) > 1:
            raise ValueError(
                f"Recipe: {role} has one delayed scale but two casts, {casts[0]} and {casts[1]}; "
                "make them equal or one of them Dynamic"
            )
    return next(iter(rules), None)


def _as_scaled(cast: Cast) -> Cast:
    """Return the cast without what two casts that read one delayed scale may differ in."""
    return replace(cast, granularity=PerBlock(*NV), rounding=None, rotation=None) if cast.is_packed else cast


def _coincide(as_is: Cast | None, transposed: Cast | None) -> bool:
    """Whether one cast serves both layouts: the same but for the tile, and the tile is the other's transpose."""
    if as_is is None or transposed is None:
        return False
    alike = as_is.granularity.transposed() == transposed.granularity
    return alike and replace(as_is, granularity=transposed.granularity) == transposed


def _rows_unit(weight: RoleCasts, grad_output: RoleCasts) -> int:
    """Return the least number of output features that is whole blocks in each cast of what joined layers share."""
    along = [(weight.as_is, 0), (weight.transposed, 1), (grad_output.as_is, 1), (grad_output.transposed, 0)]
    return math.lcm(*(cast.tile[dim] for cast, dim in along if cast is not None and cast.tile[dim] != ALL))


def _delayed_update(delayed_casts: Sequence[Sequence[Cast]], rule: Delayed | None) -> tuple[Any, ...]:
    """Return ops' options for next scales: by role (max, power_of_two, margin) of its Delayed cast; and the reduction.

    A role without a Delayed cast is never rolled, so that any cast's options will do.
    """
    cast_of_role = [casts[0] if casts else Cast(E4M3, PerTensor(), Delayed()) for casts in delayed_casts]
    each = ((cast.limit, cast.power_of_two, cast.margin) for cast in cast_of_role)
    return *zip(*each, strict=True), "max" if rule is None else rule.reduce


RecipeRule = Recipe | Mapping[str, Any] | None


@dataclass(frozen=True)
class RecipeMap:
    """Recipes by the names of layers.

    Every rule whose pattern matches a layer's name applies, in order, on top of the result of the rules before it:

        a Recipe                   takes its place
        None                       all of it in high precision
        {"grad_weight": None}      of these products (or ``saved``) alone; a pair of Casts instead of None changes them

    Args:
        default: the recipe of layers that no pattern matches.
        rules: {pattern: rule}; a pattern is matched with the whole name, ``*`` with any part of it, dots too.
        prefix: put before each name, with a dot, where a module's parts ask for theirs.

    Raises:
        TypeError, ValueError: for a rule that is none of these, or that leads to no valid Recipe.

    Example:
        >>> import octavo
        >>> recipe = octavo.RecipeMap(
        ...     octavo.recipes.dynamic(),
        ...     {"lm_head": None, "blocks.0.*": octavo.recipes.blockwise(), "*.fc2": {"grad_weight": None}},
        ... )
        >>> recipe.of("lm_head").name, recipe.of("blocks.1.fc1").name, recipe.of("blocks.0.fc2").name
        ('high_precision', 'dynamic', 'blockwise with grad_weight changed')
    """

    default: Recipe
    rules: Mapping[str, RecipeRule] = field(default_factory=dict)
    prefix: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.default, Recipe):
            raise TypeError(f"RecipeMap: default={self.default!r} is no octavo.Recipe")
        if not isinstance(self.rules, Mapping):
            raise TypeError(f"RecipeMap: rules={self.rules!r} is no dict of patterns and rules")
        rules: dict[str, RecipeRule] = {}
        for pattern, rule in self.rules.items():
            if not isinstance(pattern, str) or not (rule is None or isinstance(rule, Recipe | Mapping)):
                raise TypeError(f"RecipeMap: {pattern!r}: {rule!r} is no name's pattern with a Recipe, None or changes")
            if isinstance(rule, Mapping):
                if unknown := sorted(set(rule) - set(FIELDS)):
                    raise ValueError(f"RecipeMap: {pattern!r} changes {unknown}; a recipe has {', '.join(FIELDS)}")
                alone = Recipe(**rule)  # raises for what no recipe can have
                if not any(isinstance(earlier, Mapping) for earlier in rules.values()):  # which may change any recipe
                    _check_change(rule, self.default, [earlier or _HIGH_PRECISION for earlier in rules.values()])
                rule = {name: getattr(alone, name) for name in rule}  # lists as the tuples that they mean
            rules[pattern] = rule
        object.__setattr__(self, "rules", rules)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, RecipeMap) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.default, tuple(self.rules), self.prefix))

    def _key(self) -> tuple[Any, ...]:
        return self.default, list(self.rules.items()), self.prefix  # rules apply in order

    def of(self, *names: str) -> Recipe:
        """Return the recipe of the layer of this name, or of these, if it has several."""
        names = tuple(_joined(self.prefix, name) for name in names)
        recipe = self.default
        for pattern, rule in self.rules.items():
            if not any(fnmatchcase(name, pattern) for name in names):
                continue
            if rule is None or isinstance(rule, Recipe):
                recipe = rule or _HIGH_PRECISION
            else:
                recipe = _changed(recipe, recipe.name, tuple(rule.items()))
        return recipe

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of these names."""
        layer_names = list(names)
        return [pattern for pattern in self.rules if not any(fnmatchcase(name, pattern) for name in layer_names)]


_HIGH_PRECISION = Recipe(name="high_precision")


def _check_change(change: Mapping[str, Any], default: Recipe, others: Iterable[Any]) -> None:
    """Raise the default's TypeError or ValueError if neither that recipe nor any of the others can have this change."""
    for recipe in others:
        with contextlib.suppress(ValueError):
            replace(recipe, **change)
            return
    replace(default, **change)


@functools.cache
def _changed(recipe: Recipe, name: str, changes: tuple[tuple[str, Any], ...]) -> Recipe:
    """Return one object for the same change, so that layers share it; ``name``: recipe's, which == does not compare."""
    return replace(recipe, **dict(changes))


def under(recipe: Recipe | RecipeMap | None, name: str) -> Recipe | RecipeMap | None:
    """Return the ``recipe`` argument that a module passes to its part of this name."""
    return replace(recipe, prefix=_joined(recipe.prefix, name)) if isinstance(recipe, RecipeMap) else recipe


def _joined(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)
