"""convert, set_recipe, using and restore: a model's linear layers to FP8 modules and back, in place."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from octavo.granularity import Granularity
from octavo.nn.candidates import (
    REPLACED,
    SHARDED,
    Select,
    expert_weights,
    experts_class,
    fp8_class,
    is_fsdp_class,
    reads_of_weights,
    restore_class,
    why_left_alone,
    why_not_selected,
)
from octavo.nn.experts import ConvertedExperts, keys_of, recipe_names
from octavo.nn.known_forwards import KnownForward, fuse_known
from octavo.nn.linear import Grouped, Linear
from octavo.nn.loss import give_back_loss, has_loss
from octavo.nn.recipe_module import RecipeModule, readers_of
from octavo.recipes import AnyRecipe, as_recipe, default, high_precision
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.weights.fsdp2 import forget_gathered, groups_of
from octavo.weights.gathered import GatherGroup, settings_of
from octavo.weights.operands import (
    WeightOwner,
    check_readable,
    check_stored_granularity,
    weight_of,
)
from octavo.weights.storable import FROZEN_ONLY, stored_granularity, why_cut_blocks
from octavo.weights.stored import StoredWeight, local_stored, store, stored_as

LEFT_OUT = "select returned False"


class Convertible(NamedTuple):
    """A module to convert, and the class that it gets."""

    name: str
    module: nn.Module
    new_class: type[nn.Module]

    def weights(self) -> list[_Matrix]:
        """Return the weights of the module that convert takes."""
        module, name = self.module, self.name
        if keys := keys_of(module):
            return [_Matrix(recipe_names(name, part, key), module._parameters[key], self) for part, key in keys.items()]
        return [_Matrix(module.names(name) if isinstance(module, RecipeModule) else (name,), weight_of(module), self)]


class _Matrix(NamedTuple):
    """A weight of a module to convert, with the names that a RecipeMap's patterns may match.

    ``weight`` is None if it is computed from other parameters.
    """

    names: tuple[str, ...]
    weight: nn.Parameter | None
    target: Convertible


def convert(
    model: nn.Module,
    recipe: AnyRecipe | None = None,
    select: Select | None = None,
    weight_storage: Literal["fp8"] | None = None,
    fuse: bool = False,
) -> nn.Module:
    """Turn the model's linear layers into FP8 modules, in place.

    A module changes its class and nothing else: hooks, attributes, tied weights, the parameters, and every reference to
    it stay as they are; plain checkpoints load into the result and back. Converted are torch.nn.Linear, its subclasses
    that have no forward of their own, transformers' Conv1D, and its experts modules, which get two parts without
    parameters, ``gate_up`` and ``down``. ``octavo.summary`` lists the rest with the reason.
    Already converted modules take the new recipe, with a ``select`` those that it chooses.

    Args:
        model: any module, itself a Linear perhaps.
        recipe: an octavo.Recipe, or an octavo.RecipeMap of the names of ``model.named_modules()``; of experts of the
            module's or a part's; a recipe's name, or the path of a file of recipes by layer, as ``octavo inspect``
            writes them; None: octavo.recipes.default().
        select: ``select(module, name) -> bool`` says which candidates to convert; the default takes layers with at
            least 512 features in and out (experts: hidden and intermediate), below which FP8 gains nothing on a GPU.
        weight_storage: "fp8": the weights themselves become codes with their scale, one byte each; products read them
            without a cast, and octavo.optim.AdamW updates them, made before or after. Then fully_shard, if at all, and
            that before the optimizer. Weights that a module of another kind shares stay as they are. None leaves
            weights as they are; a model without stored weights.
        fuse: also give modules that hold these layers, whose forward octavo knows (transformers' feed-forwards and RMS
            norms), one that saves less for backward: an activation and the layer behind it compute together, from
            float32 with one rounding, and a norm saves its input alone. ``octavo.summary`` lists them, and the rest
            with the reason. False leaves such modules as they are, fused or not.

    Returns:
        ``model``.

    Raises:
        TypeError: if ``recipe`` is none of these, ``model`` no Module, ``select`` no function or ``fuse`` no bool;
            nothing is changed then.
        ValueError: if weights can't be stored under the recipe; nothing is changed then.

    Warns:
        UserWarning: if nothing was converted, or fused, with the reasons; of what stays in high precision: layers that
            are sharded by fully_shard already, whose forward something replaced (transformers' tp_plan), or whose
            weight the model reads without calling them; 3-D parameters of modules that it does not know.

    Example:
        >>> import torch, octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 4))
        >>> octavo.convert(model, octavo.recipes.delayed())
        Sequential(
          (0): Linear(in_features=512, out_features=512, bias=True, recipe=delayed)
          (1): GELU(approximate='none')
          (2): Linear(in_features=512, out_features=4, bias=True)
        )
    """
    recipe = _checked(model, default() if recipe is None else recipe)
    if weight_storage not in (None, "fp8"):
        raise ValueError(f"weight_storage={weight_storage!r}: use 'fp8' or None")
    if not isinstance(fuse, bool):
        raise TypeError(f"fuse={fuse!r}: use True or False")
    targets = _chosen(model, select)
    _convert_weights(model, recipe, targets, weight_storage)
    _convert_modules(recipe, targets)
    if fuse:
        _fuse(model)
    choose_fast_path(model)
    converted = [module for _, module in RecipeModule.named_in(model)]
    other_weights = _weights_of_others(model, {id(module.weight_owner) for module in converted})
    for module in converted:
        # with an embedding, say, which needs it in high precision
        module.fp8.gather.share(id(weight_of(module)) in other_weights)
    gather_anew(model)
    return model


def _convert_weights(
    model: nn.Module, recipe: Recipe | RecipeMap, targets: Sequence[Convertible], weight_storage: str | None
) -> None:
    """Store these modules' weights as ``convert`` does, or raise ValueError and change none."""
    granularities = {} if weight_storage is None else _granularities_in_fp8(model, recipe, targets)
    if granularities:
        _refuse_shards(model, "octavo.convert(..., weight_storage='fp8')")
    for target in targets:
        for names, weight, _ in target.weights():
            if weight not in granularities:
                check_readable(recipe.of(*names), weight)
    for weight, granularity in granularities.items():
        store(weight, granularity)


def _convert_modules(recipe: Recipe | RecipeMap, targets: Sequence[Convertible]) -> None:
    """Give modules their classes and recipes; those that are converted together gather together, too."""
    group = GatherGroup()
    for name, owner, new_class in targets:
        if type(owner) is not new_class:
            owner.__class__ = new_class
        if isinstance(owner, ConvertedExperts):
            owner.add_parts()
        assert isinstance(owner, WeightOwner)
        for module in readers_of(owner):
            # a second convert takes each part by its own name
            module_name = name if module is owner else f"{name}.{module.part_name}".strip(".")
            module.recipe = recipe.of(*module.names(module_name))
            module.fp8.gather.join(group, module, module_name)
            group.settings |= settings_of(module, module_name)
            if (stored_weight := local_stored(weight_of(module))) is not None:
                stored_weight.layer_name = module_name


def _fuse(model: nn.Module) -> None:
    """Fuse the modules of a converted model; warn, for ``convert``, which calls this, if there is none."""
    refused = fuse_known(model)
    takes_loss = any(has_loss(module) for module in model.modules())
    is_fused = any(isinstance(module, KnownForward) for module in model.modules())
    if not is_fused and (refused or not takes_loss):
        why = _text_of(refused) or "the model has no module that it knows"
        warnings.warn(f"octavo.convert fused nothing{' but the loss' * takes_loss}: {why}", stacklevel=3)


def _text_of(reasons: Mapping[str, Sequence[str]]) -> str:
    """Return as one text why modules stay as they are, from {reason: their names}."""
    return "; ".join(f"{why} ({len(names)} such, first {names[0]})" for why, names in reasons.items())


def _granularities_in_fp8(
    model: nn.Module, recipe: Recipe | RecipeMap, targets: Sequence[Convertible]
) -> dict[nn.Parameter, Granularity]:
    """Return {weight: granularity} of these modules' weights to store in FP8: all that no other module shares."""
    candidates = [w for target in targets for w in target.weights() if not recipe.of(*w.names).is_high_precision]
    owners = [getattr(w.target.module, "weight_owner", w.target.module) for w in candidates]
    other_weights = _weights_of_others(model, set(map(id, owners)))
    stored: dict[nn.Parameter, Granularity] = {}
    for names, weight, (_, module, new_class) in candidates:
        name = names[-1] or "the model"
        recipe_of_module = recipe.of(*names)
        if id(weight) in other_weights:
            continue
        if not issubclass(new_class, nn.Linear | Grouped | ConvertedExperts):
            raise ValueError(f"{name}: a {new_class.__name__}'s weight can't be stored in FP8: leave it out by select=")
        if weight is None:
            raise ValueError(
                f"{name}: a weight that is computed from others can't be stored in FP8: leave it out by select="
            )
        if reason := StoredWeight.why_not_storable(recipe_of_module, weight.requires_grad):
            raise ValueError(f"{name}: weights can't be stored in FP8 under {recipe_of_module.name!r}: {reason}")
        granularity = recipe_of_module.weight_casts.as_is.granularity  # type: ignore[union-attr]
        if stored_as(weight) is None:
            _refuse_sharded(name, weight)
        if granularity in FROZEN_ONLY and getattr(module, "is_transposed", getattr(module, "stores_transposed", False)):
            raise ValueError(f"{name}: experts [E, K, N] can't be stored in FP8 under {recipe_of_module.name!r}")
        if stored.setdefault(weight, granularity) != granularity:
            raise ValueError(f"{name}: modules that share a weight need recipes that scale it alike")
    granularities = {weight: stored_granularity(granularity, weight.shape) for weight, granularity in stored.items()}
    for weight, granularity in granularities.items():
        if (why := why_cut_blocks(weight, granularity)) is not None:
            raise ValueError(why)
    return granularities


Storage = Mapping[nn.Parameter, Granularity | None]  # how weights are stored: by granularity; None: as plain tensors


def storage_now(model: nn.Module) -> Storage:
    """Return how the weights of a model's octavo modules are stored.

    ``storage_after`` returns the same of a phase.
    """
    return {weight: stored_as(weight) for *_, weight in _weights_of(model)}


def storage_after(model: nn.Module, recipe: Recipe | RecipeMap, weight_storage: str | None, before: Storage) -> Storage:
    """Return how weights are stored in a phase of this ``weight_storage``, "fp8", None or "same": as ``before``.

    Raises ValueError if that can't be, the recipe can't read them, or the model has no octavo module.
    """
    modules = _octavo_modules(model)
    after = dict(before) if weight_storage else dict.fromkeys(before)
    if weight_storage == "fp8":
        targets = [Convertible(name, module, type(module)) for name, module in modules]
        after |= _granularities_in_fp8(model, recipe, targets)
    for name, module, weight in _weights_of(model):
        if after[weight] != before[weight]:
            _refuse_sharded(name, weight)
        if (granularity := after[weight]) is not None:
            check_stored_granularity(recipe.of(*module.names(name)), weight.shape, granularity)
    return after


def _weights_of(model: nn.Module) -> list[tuple[str, RecipeModule, nn.Parameter]]:
    """Return (name, module, weight) for each of a model's RecipeModules whose weight is a parameter."""
    modules = RecipeModule.named_in(model)
    return [(name, module, weight) for name, module in modules if (weight := weight_of(module)) is not None]


def _octavo_modules(model: nn.Module) -> list[tuple[str, RecipeModule]]:
    """Return (name, module) for each octavo module; ValueError if the model has none."""
    if not (modules := RecipeModule.named_in(model)):
        raise ValueError("the model holds no octavo module; call octavo.convert(model, recipe) first")
    return modules


def _refuse_shards(model: nn.Module, what: str) -> None:
    """Raise ValueError if a weight lives in FP8 and FSDP2 has sharded it: FSDP2 would go on with its old shard."""
    for name, module, weight in _weights_of(model):
        if stored_as(weight) is None:
            continue
        _refuse_sharded(name, weight)
        if module.fp8.gather.parameter is not None:
            raise ValueError(
                f"{name or 'the model'}: {what} of a weight that fully_shard has sharded in FP8; do it before, or save "
                "and load: octavo.distributed.checkpoint, or state_dict"
            )


def _refuse_sharded(name: str, weight: nn.Parameter) -> None:
    """Raise ValueError for experts on several ranks that FSDP2 too has sharded: it would go on with its old shard."""
    if weight.ndim == 3 and len(groups_of(weight)) > 1:
        raise ValueError(
            f"{name or 'the model'}: experts that expert_parallel has shared among ranks are stored in FP8, or not so, "
            "before fully_shard shards them over another dimension"
        )


def set_recipe(model: nn.Module, recipe: AnyRecipe) -> nn.Module:
    """Give every FP8 module of the model another recipe, from the next forward on.

    Backward passes of forwards already run use what those saved. After a spell under another recipe delayed state
    begins anew.

    Args:
        model: a converted model.
        recipe: as octavo.convert takes it; ``recipes.high_precision()`` computes as torch.nn.Linear.

    Returns:
        ``model``.

    Raises:
        TypeError: if ``recipe`` is no Recipe.
        ValueError: if the model has no FP8 module, or a module can't follow its recipe, or a weight is stored in a way
            that the recipe can't read; nothing is changed then.

    Example:
        >>> import octavo
        >>> octavo.set_recipe(octavo.nn.Linear(64, 64), octavo.recipes.high_precision())
        Linear(in_features=64, out_features=64, bias=True, recipe=high_precision)
    """
    recipe = _checked(model, recipe)
    modules = _octavo_modules(model)
    for name, module, weight in _weights_of(model):
        check_readable(recipe.of(*module.names(name)), weight)
    for name, module in modules:
        module.recipe = recipe.of(*module.names(name))
    gather_anew(model)
    return model


@contextlib.contextmanager
def using(model: nn.Module, recipe: AnyRecipe) -> Iterator[nn.Module]:
    """Run a block with every FP8 module of the model under another recipe, then with its own again.

    Each layer returns to the recipe object that it had, also after an exception; blocks may be nested. Its delayed
    state returns as it was: what the block casts does not enter the history, which is what an evaluation wants. A
    backward in the block of a forward before it does enter it. State whose weights were loaded or initialised anew in
    the block begins empty. To train on under another recipe for many steps take ``octavo.set_recipe``, after which
    delayed state begins anew.

    Args:
        model: a converted model.
        recipe: as octavo.convert takes it.

    Returns:
        a context manager that gives ``model``.

    Raises:
        TypeError, ValueError: as octavo.set_recipe; nothing is changed then.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(64, 64, recipe=octavo.recipes.delayed())
        >>> with octavo.using(layer, octavo.recipes.high_precision()):
        ...     layer.recipe.name
        'high_precision'
        >>> layer.recipe.name
        'delayed'
    """
    converted = [module for _, module in RecipeModule.named_in(model)] if isinstance(model, nn.Module) else []
    with contextlib.ExitStack() as afterwards:
        if converted:
            afterwards.callback(gather_anew, model)
        for module in converted:
            afterwards.enter_context(module.put_aside())
        set_recipe(model, recipe)
        yield model


def restore(model: nn.Module) -> nn.Module:
    """Turn every FP8 module back into the class it came from; parameters, hooks and attributes stay.

    Weights stored in FP8 become parameters in their high precision again. What torch has not (a Linear with named
    splits, GroupedLinear, experts on several ranks), or a Linear that fully_shard itself was applied to, stays and
    computes in high precision.

    Args:
        model: any module.

    Returns:
        ``model``.

    Raises:
        ValueError: for weights that fully_shard has sharded in FP8; nothing is changed then.

    Example:
        >>> import octavo
        >>> octavo.restore(octavo.nn.Linear(64, 64))
        Linear(in_features=64, out_features=64, bias=True)
    """
    _refuse_shards(model, "octavo.restore")
    for module in list(model.modules()):
        give_back_loss(module)
        if isinstance(module, RecipeModule):
            store(weight_of(module), None)
            stays = isinstance(module, Linear) and (module.splits is not None or is_fsdp_class(type(module)))
            if stays or isinstance(module, Grouped):
                module.recipe = high_precision()
            else:
                del module.fp8
                restore_class(module, WeightOwner)
        elif isinstance(module, ConvertedExperts) and not (is_fsdp_class(type(module)) or module.is_parallel):
            for part in module.parts:
                del module._modules[part.part_name]
            restore_class(module, WeightOwner)
        elif isinstance(module, KnownForward) and not is_fsdp_class(type(module)):
            restore_class(module, KnownForward)
    choose_fast_path(model)
    gather_anew(model)
    return model


def gather_anew(model: nn.Module) -> None:
    """Under FSDP2, have the next gathers follow the recipes that modules have now."""
    for owner in forget_gathered(model):
        for reader in readers_of(owner) if isinstance(owner, WeightOwner) else ():
            reader.fp8.gather.sent_as, reader.fp8.gather.settings_agree = None, False


def _weights_of_others(model: nn.Module, ours: set[int]) -> set[int]:
    """Return the ids of the parameters of all modules but those whose ids are ``ours``."""
    other_modules = (module for module in model.modules() if id(module) not in ours)
    return {id(parameter) for module in other_modules for parameter in module.parameters(recurse=False)}


def _checked(model: nn.Module, recipe: object) -> Recipe | RecipeMap:
    """Return the recipe that an argument stands for; TypeError for no model, a warning for patterns that match none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    recipe = as_recipe(recipe)
    names = [name for name, _ in model.named_modules()]
    for name, module in model.named_modules():
        names += [each for part_and_key in keys_of(module).items() for each in recipe_names(name, *part_and_key)]
    if isinstance(recipe, RecipeMap) and (unmatched := recipe.unmatched(names)):
        warnings.warn(f"these patterns of the RecipeMap match no module: {unmatched}", stacklevel=3)
    return recipe


def _chosen(model: nn.Module, select: Select | None) -> list[Convertible]:
    """Return the modules to convert, for convert, which calls this; warn of layers that stay in high precision."""
    if select is not None and not callable(select):
        raise TypeError(
            f"select={select!r} must be a function select(module, name) -> bool, such as lambda module, name: name in "
            "{'blocks.0.up', 'blocks.0.down'}"
        )
    reasons_by_id = {layer: str(reads) for layer, reads in reads_of_weights(model).items() if not reads.is_called}
    targets: list[Convertible] = []
    reasons: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        is_converted = isinstance(module, RecipeModule)
        new_class: Any = type(module) if is_converted else fp8_class(module) or experts_class(module)
        if new_class is None and not isinstance(module, nn.Linear):
            continue
        if (reason := _why_not_chosen(name, module, select, reasons_by_id)) is None:
            targets.append(Convertible(name, module, new_class))
        else:
            reasons.setdefault(reason, []).append(name or "the model")
    if not targets:
        why = _text_of(reasons) or "the model has no linear layer"
        warnings.warn(f"octavo.convert converted nothing: {why}", stacklevel=3)
        return targets
    for reason in sorted({SHARDED, REPLACED, *reasons_by_id.values()} & reasons.keys()):
        names = reasons[reason]
        warnings.warn(f"{len(names)} layers stay in high precision, first {names[0]}: {reason}", stacklevel=3)
    _warn_of_unknown_experts(model)
    return targets


def _why_not_chosen(name: str, module: nn.Module, select: Select | None, by_id: Mapping[int, str]) -> str | None:
    """Return why a linear layer, experts or an FP8 module is not converted; None if it is.

    ``by_id``: the reason for each layer whose weight the model reads without calling it.
    """
    if isinstance(module, RecipeModule):
        return None if select is None or select(module, name) else LEFT_OUT
    if select is None or (fp8_class(module) is None and experts_class(module) is None):
        reason = why_not_selected(module)
    elif (reason := why_left_alone(module)) in (None, REPLACED) and not select(module, name):
        reason = LEFT_OUT
    return by_id.get(id(module)) if reason is None else reason


def _warn_of_unknown_experts(model: nn.Module) -> None:
    """Warn of modules whose parameters may be experts' weights, and stay in high precision."""
    weights_by_module = {name: weights for name, m in model.named_modules() if (weights := expert_weights(m))}
    if weights_by_module:
        elements = sum(p.numel() for p in model.parameters() if p.ndim > 1)
        share = sum(p.numel() for weights in weights_by_module.values() for p in weights.values()) / elements
        warnings.warn(
            f"experts stay in high precision: {len(weights_by_module)} modules' weights, first "
            f"{next(iter(weights_by_module))}'s, are 3-D "
            f"parameters of no kind that octavo knows, {100 * share:.1f} % of the elements of the model's matrices; "
            "octavo.summary(model, *inputs) says how much of a forward pass is in FP8",
            stacklevel=4,
        )


# nn.TransformerEncoderLayer has a fast path: in evaluation torch computes the whole layer in one function of its own,
# which reads the weights of its linear layers and calls none of them: no FP8, and nothing that it could read where
# weights are stored in FP8. Here is the attribute that torch reads before it takes that path, and the value that keeps
# it from doing so: which activation it is (0: one that the function can't compute; nothing else reads it), and whether
# to make padded sequences nested tensors.
_FAST_PATH_SWITCHES: dict[type[nn.Module], tuple[str, int | bool]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_SAVED_SWITCH = "_switch_before_octavo"


def choose_fast_path(model: nn.Module) -> None:
    """Keep torch's encoder layers that hold FP8 modules off the fast path, which skips them; allow it for others."""
    for module in model.modules():
        for kind, (switch, off) in _FAST_PATH_SWITCHES.items():
            if not isinstance(module, kind) or switch not in module.__dict__:
                continue
            holds_fp8 = any(isinstance(inner, RecipeModule) for inner in module.modules())
            if holds_fp8 and _SAVED_SWITCH not in module.__dict__:
                module.__dict__[_SAVED_SWITCH] = module.__dict__[switch]
                module.__dict__[switch] = off
            elif not holds_fp8 and _SAVED_SWITCH in module.__dict__:
                module.__dict__[switch] = module.__dict__.pop(_SAVED_SWITCH)
