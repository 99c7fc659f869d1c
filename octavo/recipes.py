"""The named recipes, and recipes by layer as a file.

Each name returns a frozen octavo.Recipe; dataclasses.replace makes variants. A file is JSON:

    {"default": "delayed",
     "rules": {"lm_head": null,
               "blocks.0.*": "blockwise",
               "*.fc2": {"grad_weight": null, "saved": "Cast(E4M3, PerTensor(), Dynamic())"}}}

Rules are an octavo.RecipeMap's: null, a recipe by its name, or the fields that change. A recipe without a name in
octavo.recipes is all its fields, with a name of its own. Casts are text, as they print. A RecipeMap's "prefix" is
written where it has one. Nothing in a file is run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn

from octavo import reading
from octavo.formats import E2M1, E4M3, E5M2
from octavo.granularity import BLOCK, MX, NV, PerBlock, PerRow, PerTensor
from octavo.scaling.recipe import (
    FIELDS,
    PRODUCTS,
    Cast,
    Delayed,
    Dynamic,
    Recipe,
    RecipeMap,
    RecipeRule,
    Rotation,
    Stochastic,
)

__all__ = ["dynamic", "dynamic_with_output_hp", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mx"]
__all__ += ["nvfp4", "batch_invariant", "high_precision"]
NAMED = tuple(__all__)  # each recipe once: default() is another's name
__all__ += ["default", "last_blocks", "as_recipe", "load", "to_json", "AnyRecipe"]
AnyRecipe = Recipe | RecipeMap | str | Path
"""What arguments called ``recipe`` take: a recipe, recipes by names of layers, or the name of a recipe or of a file."""


def default() -> Recipe:
    """Return the recipe of ``octavo.convert`` and octavo's modules where none is named: ``dynamic()``.

    Where one scale a tensor is enough, no recipe's final loss has been told apart from another's. This one keeps no
    state, works with every feature, and every GPU with FP8 multiplies its codes natively. The evidence is in the
    guide "which recipe?".

    Example:
        >>> from octavo import recipes
        >>> recipes.default().name
        'dynamic'
    """
    return dynamic()


def dynamic(power_of_two: bool = False) -> Recipe:
    """One scale a tensor, from its own amax; E4M3 forward, E5M2 gradients.

    Source: "current scaling" in Transformer Engine, "tensorwise" in torchao.

    Args:
        power_of_two: round scales down to powers of two.

    Example:
        >>> from octavo import recipes
        >>> print(recipes.dynamic())
        dynamic:
          output      input Cast(E4M3, PerTensor(), Dynamic()), weight Cast(E4M3, PerTensor(), Dynamic())
          grad_input  grad_output Cast(E5M2, PerTensor(), Dynamic()), weight Cast(E4M3, PerTensor(), Dynamic())
          grad_weight grad_output Cast(E5M2, PerTensor(), Dynamic()), input Cast(E4M3, PerTensor(), Dynamic())
    """
    forward = Cast(E4M3, PerTensor(), Dynamic(), power_of_two)
    return _linear("dynamic", forward, forward, grad_output=Cast(E5M2, PerTensor(), Dynamic(), power_of_two))


def dynamic_with_output_hp() -> Recipe:
    """``dynamic`` with the output in high precision: the recipe for a model's head, whose gradients alone are FP8.

    The logits, and so the loss, are bit for bit torch.nn.Linear's; two of the head's three products take FP8's time.

    Example:
        >>> from octavo import RecipeMap, recipes
        >>> by_layer = RecipeMap(recipes.delayed(), {"lm_head": recipes.dynamic_with_output_hp()})
        >>> print(by_layer.of("lm_head"))
        dynamic_with_output_hp:
          output      high precision
          grad_input  grad_output Cast(E5M2, PerTensor(), Dynamic()), weight Cast(E4M3, PerTensor(), Dynamic())
          grad_weight grad_output Cast(E5M2, PerTensor(), Dynamic()), input Cast(E4M3, PerTensor(), Dynamic())
    """
    return dataclasses.replace(dynamic(), output=None, name="dynamic_with_output_hp")


def delayed(history_length: int = 16, reduce: Literal["max", "most_recent"] = "max", margin: int = 0) -> Recipe:
    """One scale a tensor, from the amax of earlier steps; E4M3 forward, E5M2 gradients.

    Source: Micikevicius et al., arXiv 2209.05433; Transformer Engine's DelayedScaling (whose history is 1024 long).

    Args:
        history_length: of how many optimizer steps the largest amax is kept, for each role.
        reduce: ``"max"`` or ``"most_recent"``.
        margin: divide scales by 2^margin, room for an amax that grows.

    Example:
        >>> from octavo import recipes
        >>> recipes.delayed(history_length=4).delayed
        Delayed(history_length=4, reduce='max')
    """
    rule = Delayed(history_length, reduce)
    forward = Cast(E4M3, PerTensor(), rule, margin=margin)
    return _linear("delayed", forward, forward, grad_output=Cast(E5M2, PerTensor(), rule, margin=margin))


def rowwise(power_of_two: bool = False) -> Recipe:
    """One scale for each row of a product's result; E4M3 throughout.

    Source: torchao's "rowwise"; Meta's FP8 recipe for Llama 3, arXiv 2407.21783, section 6.2.

    Args:
        power_of_two: round scales down to powers of two.

    Example:
        >>> from octavo import recipes
        >>> recipes.rowwise().grad_weight[1]
        Cast(E4M3, PerRow(), Dynamic())
    """
    cast = Cast(E4M3, PerRow(), Dynamic(), power_of_two)
    return _linear("rowwise", cast, cast, cast)


def rowwise_with_gw_hp(power_of_two: bool = True) -> Recipe:
    """``rowwise`` with the gradient of the weight in high precision; grad_input reads the weight with one scale.

    grad_weight sums over all tokens, so it is where rounding shows most; and no operand is cast by columns.

    Source: torchao's recipe of this name.

    Args:
        power_of_two: round scales down to powers of two, as torchao does.

    Example:
        >>> from octavo import recipes
        >>> print(recipes.rowwise_with_gw_hp(power_of_two=False))
        rowwise_with_gw_hp:
          output      input Cast(E4M3, PerRow(), Dynamic()), weight Cast(E4M3, PerRow(), Dynamic())
          grad_input  grad_output Cast(E4M3, PerRow(), Dynamic()), weight Cast(E4M3, PerTensor(), Dynamic())
          grad_weight high precision
    """
    row = Cast(E4M3, PerRow(), Dynamic(), power_of_two)
    weight = Cast(E4M3, PerTensor(), Dynamic(), power_of_two)
    return Recipe(output=(row, row), grad_input=(row, weight), name="rowwise_with_gw_hp")


def blockwise(power_of_two: bool = True) -> Recipe:
    """1x128 blocks for inputs and gradients, 128x128 blocks for weights; E4M3 throughout.

    Source: DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.

    Args:
        power_of_two: round scales down to powers of two.

    Example:
        >>> from octavo import recipes
        >>> recipes.blockwise().output[1].granularity
        PerBlock(128, 128)
    """
    vector = Cast(E4M3, PerBlock(1, BLOCK), Dynamic(), power_of_two)
    square = Cast(E4M3, PerBlock(BLOCK, BLOCK), Dynamic(), power_of_two)
    return _linear("blockwise", vector, square, vector)


def mx() -> Recipe:
    """1x32 blocks with power-of-two scales; E4M3 throughout, as 32 neighbours need no range of E5M2's in gradients.

    Source: OCP Microscaling Formats v1.0; Mishra et al., arXiv 2506.08027, whose rounding of the scale keeps every
    block's largest element from saturating, as rounding down does here.

    Example:
        >>> from octavo import recipes
        >>> recipes.mx().output[0]
        Cast(E4M3, PerBlock(1, 32), Dynamic(), power_of_two=True)
    """
    cast = Cast(E4M3, PerBlock(*MX), Dynamic(), power_of_two=True)
    return _linear("mx", cast, cast, cast)


def nvfp4(history_length: int | None = None, margin: int = 3) -> Recipe:
    """4-bit E2M1 in blocks of 16: emulated everywhere so far, to see what it does to a training.

    Inputs and gradients have 1x16 blocks, weights 16x16. Gradients of outputs are rounded stochastically, and both
    operands of grad_weight are rotated. A block's scale is E4M3 times a power of two of the tensor. Keep the last
    blocks of a model in high precision: ``last_blocks``.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, but for the tensor's factor, which
    is a power of two here: so every value is exact in bfloat16, and no later token changes an earlier one's values.

    Args:
        history_length: of how many optimizer steps the largest amax is kept, which makes the tensor's scale and a cast
            one pass; None: the scale comes from the tensor's own amax.
        margin: with a history, divide the tensor's scale by 2^margin: an amax that grows up to 2^margin times saturates
            nothing, and E4M3 has room for it.

    Example:
        >>> from octavo import recipes
        >>> print(recipes.nvfp4().output[1])
        Cast(E2M1, PerBlock(16, 16), Dynamic(), power_of_two=True)
        >>> print(recipes.nvfp4().grad_weight[0].rounding, recipes.nvfp4().grad_weight[1].rotation)
        Stochastic(seed=1) Rotation(signs=55272)
    """
    rule = Dynamic() if history_length is None else Delayed(history_length)
    vector = Cast(E2M1, PerBlock(*NV), rule, power_of_two=True, margin=0 if history_length is None else margin)
    weight = dataclasses.replace(vector, granularity=PerBlock(NV[1], NV[1]))
    gradient = dataclasses.replace(vector, rounding=Stochastic(0))
    rotated = dataclasses.replace(vector, rotation=Rotation())
    return Recipe(
        output=(vector, weight),
        grad_input=(gradient, weight),
        grad_weight=(dataclasses.replace(rotated, rounding=Stochastic(1)), rotated),
        name="nvfp4",
    )


def last_blocks(model: nn.Module, share: float = 0.15) -> dict[str, None]:
    """Return an octavo.RecipeMap's rules that keep a model's last blocks, and all that follows, in high precision.

    Blocks are the modules of the model's longest ModuleList, or Sequential if it has no list. What is defined behind
    it, as a head is, is high precision too.

    Args:
        model: any module.
        share: of the blocks, rounded up; 0 keeps only what follows them.

    Raises:
        ValueError: for a model without a list of blocks, or a share outside of 0 to 1.

    Source: arXiv 2509.25149, appendix E, which keeps the last 15 % of a model's layers in bfloat16.

    Example:
        >>> import torch, octavo
        >>> layers = [torch.nn.Linear(64, 64) for _ in range(8)]
        >>> model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(layers), "head": torch.nn.Linear(64, 64)})
        >>> rules = octavo.recipes.last_blocks(model)
        >>> rules
        {'blocks.6': None, 'blocks.7': None, 'head': None}
        >>> _ = octavo.convert(model, octavo.RecipeMap(octavo.recipes.nvfp4(), rules), select=lambda *_: True)
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share={share!r}: needs a number from 0 to 1")
    if not (lists := {name: module for name, module in model.named_modules() if isinstance(module, _LISTS)}):
        raise ValueError(f"{type(model).__name__} has no torch.nn.ModuleList or Sequential of blocks: write rules")
    name = max(lists, key=lambda name: (isinstance(lists[name], nn.ModuleList), len(lists[name])))
    blocks, parts = list(lists[name]._modules), name.split(".") if name else []
    # round: 0.14 * 50 is 7.000000000000001 in binary
    names = [f"{name}.{block}" for block in blocks[len(blocks) - math.ceil(round(share * len(blocks), 9)) :]]
    for depth, part in enumerate(parts):  # what is defined behind the list, and behind each module that it is in
        parent = ".".join(parts[:depth])
        children = list(model.get_submodule(parent)._modules)
        names += [f"{parent}.{child}" for child in children[children.index(part) + 1 :]]
    names = [one.removeprefix(".") for one in names]
    return {f"{one}.*" if model.get_submodule(one)._modules else one: None for one in names}


_LISTS = nn.ModuleList, nn.Sequential


def batch_invariant() -> Recipe:
    """A recipe for evaluation and log-probabilities: no values in a batch's other rows change a row's output by a bit.

    This holds in forward, if the batch has as many rows; the guide "which recipe?" says what is not promised. It is
    ``rowwise`` with powers of two: a row's scale is its own, and a CPU, which multiplies powers of two in bfloat16 and
    other scales in float32, never chooses by what a batch's scales happen to be.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> with octavo.using(layer, octavo.recipes.batch_invariant()):
        ...     layer.recipe.name
        'batch_invariant'
    """
    return dataclasses.replace(rowwise(power_of_two=True), name="batch_invariant")


def high_precision() -> Recipe:
    """No product in FP8: a layer computes as torch.nn.Linear does.

    Example:
        >>> from octavo import recipes
        >>> recipes.high_precision().is_high_precision
        True
    """
    return Recipe(name="high_precision")


def _linear(name: str, input: Cast, weight: Cast, grad_output: Cast) -> Recipe:
    return Recipe((input, weight), (grad_output, weight), (grad_output, input), name=name)


def as_recipe(recipe: object) -> Recipe | RecipeMap:
    """Return the recipe that an argument of octavo.convert, set_recipe, the trainer or the integrations stands for.

    Args:
        recipe: a Recipe or RecipeMap, which is returned; a recipe's name; the path of a file for ``load``, a str that
            ends in .json; or such a file's content.

    Raises:
        TypeError, ValueError: for anything else, or if the file can't be read.

    Example:
        >>> as_recipe("mx") == mx(), as_recipe({"default": "mx", "rules": {"lm_head": None}}).of("lm_head").name
        (True, 'high_precision')
    """
    if isinstance(recipe, Recipe | RecipeMap):
        return recipe
    if isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".json")):
        return load(recipe)
    if isinstance(recipe, str):
        return _rule(recipe)  # type: ignore[return-value]
    if isinstance(recipe, Mapping) and "default" in recipe:
        return _map(recipe, None)
    name = getattr(recipe, "__name__", recipe)  # the name of a recipe's function that was not called
    meant = f"recipes.{name if isinstance(name, str) and name in NAMED else 'default'}()"
    if isinstance(recipe, dict):
        meant = "RecipeMap(octavo.recipes.default(), rules)"
    raise TypeError(f"recipe={recipe!r} is no octavo.Recipe; try octavo.{meant}")


def load(path: str | Path, default: Recipe | None = None) -> RecipeMap:
    """Return recipes by layer from a file, such as ``octavo inspect --write`` leaves; octavo.convert takes them.

    Args:
        path: JSON, see the top of the file.
        default: of layers that no rule names (default: the file's).

    Raises:
        ValueError: where the file, or what it says, can't be a RecipeMap.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "map.json")
        >>> _ = path.write_text('{"default": "dynamic", "rules": {"lm_head": null, "*.fc2": {"grad_weight": null}}}')
        >>> load(path).of("lm_head").name, load(path).of("blocks.0.fc2").name
        ('high_precision', 'dynamic with grad_weight changed')
    """
    try:
        return _map(reading.read_json(Path(path).read_bytes()), default)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; octavo inspect RECORD --write {path} writes it") from None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no recipes by layer: {type(error).__name__}: {error}") from error


def _map(content: Mapping[str, Any], default: Recipe | None) -> RecipeMap:
    """Return the recipes by layer of a file's content."""
    rules = content.get("rules") if isinstance(content, Mapping) else None
    if not isinstance(rules, Mapping) or not isinstance(prefix := content.get("prefix", ""), str):
        form = '{"default": a recipe, "rules": {pattern: rule}, "prefix": text}'
        raise TypeError(f"{content!r} is not of the form {form}")
    if unknown := sorted(set(content) - {"default", "rules", "prefix"}):
        raise ValueError(f"it has {', '.join(map(repr, unknown))}, and may have 'default', 'rules' and 'prefix'")
    if default is None and "default" not in content:
        raise ValueError("it names no default: give one, as in octavo.recipes.load(path, octavo.recipes.dynamic())")
    chosen = _rule(content["default"]) if default is None else default
    return RecipeMap(chosen, {pattern: _rule(rule) for pattern, rule in rules.items()}, prefix)  # type: ignore[arg-type]


def to_json(recipe: Recipe | RecipeMap | Mapping[str, RecipeRule]) -> str:
    """Return the text of a file that ``load`` reads.

    Args:
        recipe: a Recipe, of all layers; a RecipeMap; or rules without a default.

    Example:
        >>> print(to_json(RecipeMap(dynamic(), {"lm_head": None})))
        {
         "default": "dynamic",
         "rules": {
          "lm_head": null
         }
        }
    """
    recipe = RecipeMap(recipe) if isinstance(recipe, Recipe) else recipe
    rules = recipe.rules if isinstance(recipe, RecipeMap) else recipe
    content = {"default": _plain(recipe.default)} if isinstance(recipe, RecipeMap) else {}
    content |= {"rules": {pattern: _plain(rule) for pattern, rule in rules.items()}}
    content |= {"prefix": recipe.prefix} if isinstance(recipe, RecipeMap) and recipe.prefix else {}
    return json.dumps(content, indent=1, default=str)


def _rule(content: Any) -> RecipeRule:
    """Return the rule that a value in a file stands for."""
    if isinstance(content, str):
        if content not in (names := ("default", *NAMED)):
            raise ValueError(f"{content!r} is no recipe: choose {', '.join(names)}, or a file that ends in .json")
        recipe: Recipe = globals()[content]()
        return recipe
    if content is None:
        return None
    if not isinstance(content, Mapping):
        raise TypeError(f"{content!r} is no rule: use null, a recipe's name, or an object of what changes")
    fields = _fields(content)
    return Recipe(**fields) if "name" in fields else fields  # a recipe refuses null as its name, a change has none


def _fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a file gives to fields of a recipe."""
    read: dict[str, Callable[[Any], Any]] = {"saved": Cast.of, "fast_accum": tuple, "name": str}
    read |= dict.fromkeys(PRODUCTS, lambda casts: tuple(map(Cast.of, casts)))
    return {key: one if one is None else read.get(key, str)(one) for key, one in content.items()}


def _plain(rule: RecipeRule) -> Any:
    """Return a rule as values of JSON, but for Casts."""
    if not isinstance(rule, Recipe):
        return rule
    is_named = rule.name in NAMED and _rule(rule.name) == rule
    return rule.name if is_named else {"name": rule.name, **{name: getattr(rule, name) for name in FIELDS}}
