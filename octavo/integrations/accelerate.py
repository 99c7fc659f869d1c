"""The state of octavo in any trainer's checkpoints, as an object that accelerate can register.

The file also has what the integrations of all trainers share: convert_once, check_clip, uses_gradients_early.

    octavo.convert(model, recipe)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(TrainingState(model))

Accelerate has recipes for torchao, Transformer Engine and MS-AMP, ``AORecipeKwargs`` and so on, and takes no others;
these lines replace such a recipe. The integrations of transformers and Lightning save the same object in their
checkpoints.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from octavo.distributed.checkpoint import PlainModel
from octavo.distributed.ranks import Ranks
from octavo.nn.convert import convert
from octavo.nn.recipe_module import RecipeModule
from octavo.optim.base import CompactOptimizer
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.schedule import Phase, PrecisionSchedule
from octavo.weights.files import SCALE_INV
from octavo.weights.operands import weight_of

__all__ = ["TrainingState", "follow_accumulation"]

SCHEDULE_KEY = "octavo_schedule"  # a key in the optimizer's state_dict


class TrainingState:
    """The state that a checkpoint needs besides model and optimizer: ranks' delayed state, the recipes, a schedule.

    With it a run continues bit for bit. Without it, delayed scaling takes one step with each tensor's own scale, and a
    schedule begins anew. The schedule's state is also in the optimizer's ``state_dict()``: it decides the form of the
    optimizer's state, and is loaded before that. Hooks on model and optimizer see to this; they keep this object alive
    until ``remove()``.

    Args:
        model: a converted model, before or after it is wrapped.
        schedule: its schedule, if there is one.

    Raises:
        ValueError: for a model without octavo's modules; when a state is loaded, if it is of another recipe, or has a
            schedule while there is none here, or the reverse.

    Example:
        >>> import octavo
        >>> state = TrainingState(octavo.nn.Linear(64, 64, recipe=octavo.recipes.delayed()))
        >>> state.load_state_dict(state.state_dict())
        >>> sorted(state.state_dict())
        ['delayed', 'recipes', 'schedule']
    """

    def __init__(self, model: nn.Module, schedule: PrecisionSchedule | None = None) -> None:
        self.model, self.schedule = PlainModel(model).module, schedule
        recipes_of(self.model)
        self._warning = ExitStack()  # the hook that warns at the next training forward; closed when a state is loaded
        self._hooks: list[RemovableHandle] = []
        if "lightning.fabric" in sys.modules:
            self._hooks.append(self.model.register_load_state_dict_post_hook(self._warn_at_next_forward))
        if schedule is not None:
            self._hooks.append(schedule.optimizer.register_state_dict_post_hook(self._add_schedule))
            self._hooks.append(schedule.optimizer.register_load_state_dict_pre_hook(self._load_schedule))
            self._hooks.append(self.model.register_load_state_dict_pre_hook(self._follow_storage))

    def remove(self) -> None:
        """Remove the hooks on model and optimizer; needed where another TrainingState takes the place of this one."""
        self._warning.close()
        for hook in self._hooks:
            hook.remove()

    def _warn_at_next_forward(self, model: nn.Module, keys: Any) -> None:
        """Prepare a warning after sharded weights were loaded: Fabric may load only weights and optimizers."""
        if any(hasattr(parameter, "placements") for parameter in model.parameters()):
            self._warning.close()
            self._warning.callback(model.register_forward_pre_hook(self._warn).remove)

    def _warn(self, model: nn.Module, arguments: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._warning.close()
            warnings.warn(
                "weights were loaded but no TrainingState: delayed state and schedule begin anew. After fabric.load "
                "under ModelParallelStrategy call load_state_dict(state['octavo']) of the TrainingState",
                stacklevel=2,
            )

    def _add_schedule(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[SCHEDULE_KEY] = self.schedule.state_dict()  # type: ignore[union-attr]

    def _load_schedule(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if SCHEDULE_KEY in state_dict:
            self._load_fitting_schedule(state_dict[SCHEDULE_KEY])

    def _follow_storage(self, model: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Begin the phase that stores weights as the ``state_dict`` does that the model is about to load.

        Hooks of the optimizer, which get the saved phase, run after that. Once training has begun this does nothing: an
        optimizer's state of a weight would not change with the weight.
        """
        if (schedule := self.schedule) is None or schedule.optimizer.state:
            return
        layers = dict(RecipeModule.named_in(model))
        are_stored = [f"{prefix}{layer.weight_name(name)}{SCALE_INV}" in state_dict for name, layer in layers.items()]
        for index in (schedule.index, *range(len(schedule.phases))):
            storage: dict[Any, Any] = {**schedule.targets[index].storage_of(model)}
            if [storage.get(weight_of(layer)) is not None for layer in layers.values()] == are_stored:
                schedule.load_state_dict({**schedule.state_dict(), "index": index})  # begin it without counting a step
                return

    def _load_fitting_schedule(self, saved: dict[str, Any]) -> None:
        """Load the schedule's state; model and optimizer, if loaded already, must have the form of its phase."""
        schedule: Any = self.schedule
        target = schedule.target_of(saved)
        storage_differs = bool(target.conversion(self.model).storage)
        settings_differ = target.settings != getattr(schedule.optimizer, "settings", None)
        if storage_differs or (schedule.optimizer.state and settings_differ):
            raise ValueError(
                f"the checkpoint is of {target.phase}, which keeps {'weights' if storage_differs else 'optimizer'} "
                "otherwise than the model and its optimizer did when they were loaded: call schedule.load_state_dict "
                "before these, in a loop of your own"
            )
        schedule.load_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers and strings, the same on all ranks; all ranks call it."""
        layers: dict[str, list[str]] = {}
        for name, recipe in recipes_of(self.model).items():
            layers.setdefault(str(recipe), []).append(name)
        schedule = None if self.schedule is None else self.schedule.state_dict()
        delayed = PlainModel(self.model).gather_delayed(Ranks.of_process())
        return {"recipes": layers, "delayed": delayed, "schedule": schedule}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, before or after the model's and the optimizer's; every rank calls it.

        Raises:
            ValueError: if it is no state of a TrainingState, or of other recipes or phases, or if model or optimizer,
                loaded before, have another form. Nothing is changed then.
        """
        if missing := {"schedule", "recipes", "delayed"} - state_dict.keys():
            raise ValueError(f"this is no state that TrainingState.state_dict returned: it has no {min(missing)!r}")
        if (state_dict["schedule"] is None) != (self.schedule is None):
            raise ValueError("the checkpoint was saved with a schedule and there is none here, or the other way round")
        recipes_here = recipes_of(self.model)
        if self.schedule is not None:  # it brings those of its phase
            recipes = self.schedule.target_of(state_dict["schedule"]).recipes_of(self.schedule.model)
            recipes_here = dict(zip(recipes_here, recipes, strict=True))
        saved_texts = {name: text for text, names in state_dict["recipes"].items() for name in names}
        for layer in sorted(recipes_here.keys() | saved_texts.keys()):
            recipe, saved_text = recipes_here.get(layer), saved_texts.get(layer)
            name_here = "no recipe" if recipe is None else recipe.name
            saved_name = "no recipe" if saved_text is None else saved_text.partition(":\n")[0]
            # recipes may differ in their names alone
            if saved_text != (None if recipe is None else str(replace(recipe, name=saved_name))):
                raise ValueError(
                    f"the checkpoint's layer {layer!r} computes in {saved_name}, this model's in {name_here}: resume "
                    "with the same recipe and select; another recipe is octavo.set_recipe's after loading"
                )
        if self.schedule is not None:
            self._load_fitting_schedule(state_dict["schedule"])
        PlainModel(self.model).load_delayed(state_dict["delayed"], Ranks.of_process())
        self._warning.close()


def recipes_of(model: nn.Module) -> dict[str, Recipe]:
    """Return each octavo module's recipe, by its name in the plain model; raise ValueError if there is none."""
    if not (recipes := {name: module.recipe for name, module in PlainModel(model).layers().items()}):
        raise ValueError("the model holds no octavo module; call octavo.convert(model, recipe) first")
    return recipes


def convert_once(
    model: nn.Module, recipe: Recipe | RecipeMap, select: Any = None, phases: Sequence[Phase] = ()
) -> None:
    """Convert a model unless it is converted; raise ValueError if it is, with another recipe, or if no layer is.

    A model that an earlier training left in one of the schedule's phases is accepted: the schedule begins anew.
    """
    layers = PlainModel(model).layers()
    accepted = [recipe, *(phase.recipe for phase in phases)]
    for name, module in layers.items():
        names = module.names(name)
        if all(module.recipe != accepted_recipe.of(*names) for accepted_recipe in accepted):
            raise ValueError(
                f"{name or 'the model'} was converted with {module.recipe.name!r} already, not "
                f"{recipe.of(*names).name!r}: convert in one place only, or with the same recipe"
            )
    converted = model if layers else convert(model, recipe, select)
    if not RecipeModule.named_in(converted):
        raise ValueError("no layer was converted, as octavo.convert's warning has it: choose layers by select=")


class Following(NamedTuple):
    """Undoes follow_accumulation; ``micro_batch``: the contexts of the micro-batch that has begun."""

    hook: RemovableHandle
    micro_batch: ExitStack

    def remove(self) -> None:
        """Remove the hook, even if a training was interrupted within a micro-batch."""
        self.hook.remove()
        self.micro_batch.close()


def follow_accumulation(
    model: nn.Module, optimizer: Optimizer, is_training: Callable[[], bool] = lambda: True
) -> Following:
    """Make gradients that are kept in FP8 or used in backward wait for accelerate's last micro-batch of each step.

    Args:
        model: the model whose forward in training begins each micro-batch; before or after ``prepare``.
        optimizer: an octavo.optim optimizer of its parameters, before or after ``prepare``. Others don't need this.
        is_training: called at each forward; once it returns False, the hook is removed.

    Returns:
        a handle; its ``remove()`` undoes it.

    Example:
        >>> import octavo
        >>> model = nn.Linear(64, 64)
        >>> optimizer = octavo.optim.AdamW(model.parameters(), gradient_storage="fp8")
        >>> handle = follow_accumulation(model, optimizer)
        >>> handle.remove()
    """
    from accelerate.state import GradientState

    from octavo.inspect.weight_updates import torch_optimizer  # here, as the room takes a while to import

    inner: Any = torch_optimizer(optimizer)
    micro_batch = ExitStack()

    @torch.compiler.disable
    def begin(module: nn.Module, arguments: Any) -> None:
        if not is_training():
            following.remove()
        elif module.training:  # an evaluation may be within a micro-batch
            micro_batch.close()
            if uses_gradients_early(inner) and not GradientState().sync_gradients:
                micro_batch.enter_context(inner.accumulate())

    following = Following(PlainModel(model).module.register_forward_pre_hook(begin), micro_batch)
    return following


def uses_gradients_early(optimizer: Optimizer) -> bool:
    """Whether an optimizer rounds or uses gradients in backward, so that it must know a step's last micro-batch."""
    return isinstance(optimizer, CompactOptimizer) and bool(optimizer.gradient_storage or optimizer.in_backward)


def check_clip(optimizer: Optimizer, option: str) -> None:
    """Raise ValueError if gradients are gone before a trainer would clip them; ``option``: the trainer's option."""
    if getattr(optimizer, "in_backward", None) is not None:
        raise ValueError(
            f"{option} clips after backward, when update_in_backward has used the gradients: set it to 0, and clip by "
            "octavo.optim.update_in_backward(optimizer, clip=1.0)"
        )
