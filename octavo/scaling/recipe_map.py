"""Which layer follows which recipe: a value that is accepted wherever a recipe is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from octavo.scaling.recipe import FIELDS, Recipe

RecipeRule = Recipe | Mapping[str, Any] | None


@dataclass(frozen=True)
class RecipeMap:
    """Recipes by the names of layers.

    Every rule whose pattern matches a layer's name applies, in order, on top of what the ones before it gave:

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
        for pattern, rule in self.rules.items():
            if not isinstance(pattern, str) or not (rule is None or isinstance(rule, Recipe | Mapping)):
                raise TypeError(
                    f"RecipeMap: {pattern!r}: {rule!r} is no name's pattern with a Recipe, None or products"
                )
            if isinstance(rule, Mapping):
                if unknown := sorted(set(rule) - set(FIELDS)):
                    raise ValueError(f"RecipeMap: {pattern!r} changes {unknown}; a recipe has {', '.join(FIELDS)}")
                dataclasses.replace(self.default, **rule)  # what can't be carried out on the default says so now
        copies = {pattern: dict(rule) if isinstance(rule, Mapping) else rule for pattern, rule in self.rules.items()}
        object.__setattr__(self, "rules", copies)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, RecipeMap) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.default, tuple(self.rules), self.prefix))

    def _key(self) -> tuple[Any, ...]:
        return self.default, list(self.rules.items()), self.prefix  # rules apply in order

    def of(self, *names: str) -> Recipe:
        """The recipe of the layer of this name, or of these, if it has several."""
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
        """The patterns that match none of these names."""
        found = list(names)
        return [pattern for pattern in self.rules if not any(fnmatchcase(name, pattern) for name in found)]


_HIGH_PRECISION = Recipe(name="high_precision")


@functools.cache
def _changed(recipe: Recipe, name: str, changes: tuple[tuple[str, Any], ...]) -> Recipe:
    """One object for the same change, so that layers share it; the name is no part of a recipe's value."""
    return dataclasses.replace(recipe, **dict(changes))


def recipe_of(recipe: Recipe | RecipeMap, *names: str) -> Recipe:
    """The recipe of the layer of this name, or of these, from a recipe for all or by names."""
    return recipe.of(*names) if isinstance(recipe, RecipeMap) else recipe


def under(recipe: Recipe | RecipeMap | None, name: str) -> Recipe | RecipeMap | None:
    """What a module hands to its part of this name as its ``recipe`` argument."""
    if not isinstance(recipe, RecipeMap):
        return recipe
    return dataclasses.replace(recipe, prefix=_joined(recipe.prefix, name))


def _joined(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)
