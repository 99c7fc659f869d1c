"""Remedies: casts to replace a cast by, cheapest first, and the share each would flush by the exponents counted.

With one scale for the tensor, the exponents and the amax determine what would be flushed. With finer scales they only
bound it, as they don't say where in the tensor a number lies. Let t be any magnitude. A tile without numbers beyond t
has a scale with room for t or less: all such tiles together flush at most what one scale with room for t would. A tile
with a number beyond t has B numbers in all: so such tiles hold at most B times the share of the numbers beyond t. The
bound is the least sum of both over all t.
"""

from __future__ import annotations

import dataclasses
import glob
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from octavo.formats import E4M3, E5M2, Format
from octavo.granularity import PerBlock, PerTensor
from octavo.inspect.record import np
from octavo.inspect.rows import Row
from octavo.kernels.arguments import Counted
from octavo.nn.recipe_module import RecipeModule
from octavo.recipes import blockwise, mx
from octavo.scaling.recipe import OPERANDS, Cast, Delayed, Dynamic, Recipe, RecipeMap

RECIPES_FILE = "recipes.json"  # a record's file, with the recipes of its model
_FINER = ((128, blockwise), (32, mx))  # how many numbers share a scale, and the recipe

LayerRule = Recipe | Mapping[str, Any] | None  # what a RecipeMap has for a layer


class Exponents:
    """The histogram of a tensor's magnitudes, in one recorded step or in each of several.

    Args:
        counts: [..., 64], how many numbers have each binary exponent, from -48 on; zeros are not counted.
        amax: [...], the largest magnitude.
    """

    def __init__(self, counts: Any, amax: Any) -> None:
        self.amax, self.counts = np.asarray(amax, dtype="float64"), np.asarray(counts, dtype="float64")
        # each bin holds the magnitudes from this one to its double
        self._bins = 2.0 ** (Counted.lowest + np.arange(self.counts.shape[-1]))
        self._total = np.maximum(self.counts.sum(axis=-1), 1)

    def below(self, magnitude: Any) -> Any:
        """Return the share of numbers below a magnitude, as if numbers of one exponent were distributed evenly."""
        parts_of_bins = np.clip(np.nan_to_num(magnitude)[..., None] / self._bins - 1, 0, 1)
        return (self.counts * parts_of_bins).sum(axis=-1) / self._total

    def octaves_above_all_but(self, share: float) -> Any:
        """Return how many octaves the amax lies above the exponents of all numbers but a share of the largest."""
        place = (np.cumsum(self.counts, axis=-1) >= (1 - share) * self._total[..., None]).argmax(-1)
        return np.log2(np.maximum(self.amax / (2 * self._bins[place]), 1))

    def bound(self, tile: int, format: Format, least: float) -> float:
        """Return a bound of the share below ``least`` times its scale_inv, if ``tile`` numbers share a scale."""
        room = format.max / 2  # a scale that is a power of two is up to twice too small
        tops = 2 * self._bins
        tops[-1] = max(tops[-1], float(self.amax))
        flushed = self.below(2.0 ** np.ceil(np.log2(least * tops / room)))  # to a whole exponent, as it is a bound
        return min(1.0, float((tile * (1 - self.below(tops)) + flushed).min()))


class Remedy(NamedTuple):
    """A change of a layer's recipe, by rules of a RecipeMap: ``{"layers.3.mlp.down": {"grad_weight": None}}``."""

    rules: dict[str, LayerRule]
    share: float  # the share of the row's numbers that would be too small
    is_bound: bool  # whether ``share`` is only an upper bound


def remedies(row: Row, rows: Sequence[Row], numbers: Exponents, scale_inv: float, least: str) -> Iterator[Remedy]:
    """Yield changes that leave fewer of a row's numbers too small, cheapest first; the last one gives up FP8.

    Args:
        row: the row to mend.
        rows: the rows of the same layer and step, whose casts stay.
        numbers: the row's numbers.
        scale_inv: the largest scale_inv in use.
        least: "smallest_subnormal": flushed numbers are too small; "smallest_normal": also those that lose digits.
    """
    cast, finer, with_e5m2 = row.cast, [], []
    changes: list[dict[str, Any]] = [{}]
    if cast.is_delayed:
        changes.append({"rule": Dynamic()})
    if cast.format is not E5M2 and not cast.is_packed:  # E2M1's blocks are its alone
        changes.append({"format": E5M2})
    # leave out a margin that the numbers did not need
    is_unused = float(numbers.amax) * 2.0 ** max(cast.margin - 1, 0) <= cast.format.max * scale_inv
    for change in changes:
        changed = dataclasses.replace(cast, **change, margin=0 if is_unused else cast.margin)
        if changed != cast and (rules := with_cast(row, rows, changed)) is not None:
            share = float(numbers.below(_least(changed.format, least) * _scale_inv(cast, scale_inv, changed, numbers)))
            finer.append(Remedy(rules, share, cast.granularity != PerTensor()))
            if "format" in change:
                with_e5m2.append(rules)
    shared = math.prod(cast.tile) if isinstance(cast.granularity, PerBlock) else math.inf
    for tile, recipe in _FINER:
        if tile < shared or cast.is_packed:
            finer.append(Remedy(_rules(row, recipe()), numbers.bound(tile, E4M3, _least(E4M3, least)), True))
    # gradients keep enough digits in E5M2; inputs and weights do not, so that for them it comes last
    yield from sorted(finer, key=lambda remedy: row.role != "grad_output" and remedy.rules in with_e5m2)
    yield Remedy(without_fp8(row), 0.0, False)


def _scale_inv(cast: Cast, scale_inv: float, changed: Cast, numbers: Exponents) -> float:
    """Return the scale_inv of a cast after its change to ``changed``."""
    if changed.rule != cast.rule:
        scale_inv = float(numbers.amax) * 2.0**cast.margin / cast.format.max
        if cast.power_of_two and scale_inv > 0:
            scale_inv = 2.0 ** math.ceil(math.log2(scale_inv))
    return scale_inv * cast.format.max / changed.format.max * 2.0 ** (changed.margin - cast.margin)


def _least(format: Format, least: str) -> float:
    """Return the magnitude below which, times scale_inv, numbers are too small: half a subnormal is rounded to 0."""
    return format.smallest_subnormal / 2 if least == "smallest_subnormal" else format.smallest_normal


def with_cast(row: Row, rows: Sequence[Row], cast: Cast) -> dict[str, LayerRule] | None:
    """Return the rule that changes a row's cast in the products that read it; None if no recipe can have it."""
    casts = {(other.role, product): each for other in rows for product, each in _by_product(other, other.cast)}
    changed = {(row.role, product): each for product, each in _by_product(row, cast)}
    pairs: dict[str, Any] = {}
    for product, roles in OPERANDS.items():
        if all((role, product) in casts for role in roles):
            pairs[product] = tuple((casts | changed)[role, product] for role in roles)
    try:
        Recipe(**pairs)
    except ValueError:
        return None
    after = {product: pairs[product] for _, product in changed if product in pairs}
    return _rules(row, after) if after else None


def _by_product(row: Row, cast: Cast) -> Iterator[tuple[str, Cast]]:
    """Yield (product, cast) of the products that read a row: a second product reads the codes transposed."""
    first, *second = row.products
    yield first, cast
    for product in second:
        yield product, dataclasses.replace(cast, granularity=cast.granularity.transposed())


def without_fp8(row: Row) -> dict[str, LayerRule]:
    """Return the rule that puts the products that read a row in high precision."""
    return _rules(row, dict.fromkeys(row.products))


def _rules(row: Row, rule: LayerRule) -> dict[str, LayerRule]:
    """Return a rule of a RecipeMap for a row's layer."""
    return {glob.escape(row.layer): rule}


def as_text(rules: Mapping[str, LayerRule]) -> str:
    """Return rules as Python."""
    texts = (f"recipes.{rule.name}()" if isinstance(rule, Recipe) else repr(rule) for rule in rules.values())
    short = (text.replace(", Dynamic())", ")").replace(str(Delayed()), "Delayed()") for text in texts)  # no defaults
    return "{" + ", ".join(f"{pattern!r}: {text}" for pattern, text in zip(rules, short, strict=True)) + "}"


def own_recipes(model: nn.Module) -> RecipeMap | None:
    """Return a model's recipes by layer, the most frequent one as default; None if it has no octavo modules."""
    if not (layers := {name: module.recipe for name, module in RecipeModule.named_in(model)}):
        return None
    ((default, _),) = Counter(layers.values()).most_common(1)
    return RecipeMap(default, {glob.escape(name): recipe for name, recipe in layers.items() if recipe != default})


def with_remedies(recipe_map: RecipeMap, rules_of_remedies: Iterable[Mapping[str, LayerRule]]) -> RecipeMap:
    """Return a model's ``own_recipes`` with remedies applied; of two for the same product of a layer the first."""
    chosen: dict[str, LayerRule] = {}
    for rules in rules_of_remedies:
        for pattern, rule in rules.items():
            first = chosen.setdefault(pattern, rule)
            if isinstance(first, Mapping) and isinstance(rule, Mapping) and not first.keys() & rule.keys():
                chosen[pattern] = {**first, **rule}
    merged = dict(recipe_map.rules)
    for pattern, rule in chosen.items():
        present = merged.get(pattern)
        changes = isinstance(present, Recipe) and isinstance(rule, Mapping)
        merged[pattern] = dataclasses.replace(present, **rule) if changes else rule  # type: ignore[arg-type, type-var]
    return RecipeMap(recipe_map.default, merged)


def percent(share: float) -> str:
    """Return a share in words: as a percentage of two digits."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def outcome(chosen: Remedy, options: Sequence[Remedy], least: str) -> str:
    """Return a sentence on the effect of a chosen remedy; for high precision also on finer scales that may do too."""
    problem = "flushed" if least == "smallest_subnormal" else "below the smallest normal number"
    if chosen is not options[-1]:
        return f"{'at most ' if chosen.is_bound else ''}{percent(chosen.share)} {problem}, by the exponents recorded"
    text = f"nothing is {problem}: these products are in high precision"
    best = min((option for option in options if option.is_bound), key=lambda option: option.share, default=None)
    if best is None:
        return text
    bound = f"of its finer scales only a bound is known, at most {percent(best.share)}"
    return f"{text}; {as_text(best.rules)} may do too: {bound}"
