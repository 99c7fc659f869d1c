"""Lightning: a precision plugin that converts the model, switches phases and saves octavo's state in checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from octavo.integrations.accelerate import TrainingState, check_clip, convert_once, uses_gradients_early
from octavo.nn.candidates import Select
from octavo.nn.recipe_module import RecipeModule
from octavo.recipes import AnyRecipe, as_recipe
from octavo.schedule import Phase, PrecisionSchedule

__all__ = ["OctavoPrecision"]

PRECISIONS = ("bf16-mixed", "bf16-true", "32-true")


class OctavoPrecision(Precision):
    """Trains a LightningModule in FP8: ``Trainer(plugins=[OctavoPrecision("delayed")])``.

    Checkpoints have octavo's state: on the same number of ranks ``fit(ckpt_path=...)`` continues bit for bit.

    Args:
        recipe: as octavo.convert takes it (a name or a file, too); the layers are converted to it before training.
        precision: precision of all but FP8, as Lightning's ``precision=``: "bf16-mixed", "bf16-true" or "32-true".
        select: which layers, as octavo.convert takes it.
        schedule: phases, the first without a trigger; see octavo.schedule.PrecisionSchedule. ``recipe`` is its first's.

    Attributes:
        schedule: the PrecisionSchedule, once training begins.

    Raises:
        ValueError: from here or ``fit``: for an unknown recipe or precision, phases by tokens, a model that was
            converted with another recipe or sharded first, a checkpoint of another recipe, or options that don't fit
            the optimizer.

    Example:
        >>> OctavoPrecision("delayed").precision
        'bf16-mixed'
    """

    def __init__(
        self,
        recipe: AnyRecipe,
        precision: str = "bf16-mixed",
        select: Select | None = None,
        schedule: Sequence[Phase] = (),
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r}: use one of {', '.join(PRECISIONS)}")
        self.recipe: Any = as_recipe(recipe)
        if schedule and schedule[0].recipe != self.recipe:
            raise ValueError(f"the first phase is {schedule[0]}, but the recipe is another: give the same")
        if by_tokens := [phase for phase in schedule if phase.trigger == "from_tokens"]:
            raise ValueError(f"{by_tokens[0]}: Lightning counts no tokens; begin it by from_step")
        self.precision: Any = precision
        self.select, self.phases = select, tuple(schedule)
        self.schedule: PrecisionSchedule | None = None
        # the precision of all but FP8
        self._other_precision: Precision = HalfPrecision("bf16-true") if precision == "bf16-true" else Precision()
        self._model: nn.Module | None = None
        self._early_optimizers: list[Any] = []  # optimizers that round or use gradients in backward
        self._state: TrainingState | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a model to the recipe at its first fit; raise ValueError if it was sharded before."""
        module = self._other_precision.convert_module(module)
        if module is self._model:  # converted in an earlier fit, and perhaps in a later phase since
            return module
        if not RecipeModule.named_in(module) and any(isinstance(child, FSDPModule) for child in module.modules()):
            raise ValueError(
                "configure_model sharded the model before it was converted: call octavo.convert(self, recipe) in "
                "configure_model, before fully_shard; the plugin's recipe must be the same"
            )
        convert_once(module, self.recipe, self.select, self.phases)
        self._model = module
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Begin the schedule, if the model is to be trained."""
        assert self._model is not None
        if self.precision == "bf16-mixed":
            self._other_precision = MixedPrecision("bf16-mixed", next(self._model.parameters()).device.type)
        trainer: Any = self._model.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return model, optimizers, lr_schedulers
        for optimizer in optimizers if trainer.gradient_clip_val else ():
            check_clip(optimizer, f"gradient_clip_val={trainer.gradient_clip_val}")
        self._early_optimizers = [optimizer for optimizer in optimizers if uses_gradients_early(optimizer)]
        if self.phases:
            if len(optimizers) != 1:
                raise ValueError(f"a schedule follows one optimizer, and configure_optimizers gave {len(optimizers)}")
            self.schedule = PrecisionSchedule(self._model, optimizers[0], self.phases)
        if self._state is not None:  # of an earlier fit
            self._state.remove()
        self._state = TrainingState(self._model, self.schedule)
        return model, optimizers, lr_schedulers

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward; gradients kept in FP8 or used in backward only accumulate before a step's last micro-batch."""
        with ExitStack() as contexts:
            for early in self._early_optimizers if model.trainer.fit_loop._should_accumulate() else ():
                contexts.enter_context(early.accumulate())
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step the optimizer, then the schedule."""
        loss = super().optimizer_step(optimizer, model, closure, **kwargs)
        if self.schedule is not None:
            self.schedule.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {} if self._state is None else self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._state is not None:
            self._state.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Warn of a checkpoint without octavo's state."""
        if type(self).__qualname__ not in checkpoint:
            warnings.warn("the checkpoint was saved without OctavoPrecision: its state begins anew", stacklevel=2)

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._other_precision.forward_context()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._other_precision.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._other_precision.module_init_context()

    def convert_input(self, data: Any) -> Any:
        return self._other_precision.convert_input(data)
