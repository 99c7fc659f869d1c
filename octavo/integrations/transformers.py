"""transformers' Trainer: a callback that converts, switches phases, records, and saves octavo's state in checkpoints.

Trainer calls ``on_init_end`` before it makes an optimizer and wraps, compiles or shards the model: there the model is
converted. Trainer loads model and optimizer before ``on_train_begin``, where octavo's state is loaded. That is in
``trainer_state.json``, as base64 of torch's format, because callbacks are not given a path to read from.
"""

from __future__ import annotations

import base64
import inspect
import io
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from octavo.export.loading import split_stored
from octavo.inspect import Recorder
from octavo.inspect.weight_updates import torch_optimizer
from octavo.integrations.accelerate import (
    TrainingState,
    check_clip,
    convert_once,
    follow_accumulation,
    uses_gradients_early,
)
from octavo.nn.candidates import Select
from octavo.nn.checkpointing import checkpoint_model_in_fp8
from octavo.nn.recipe_module import RecipeModule
from octavo.recipes import AnyRecipe, as_recipe
from octavo.schedule import Phase, PrecisionSchedule
from octavo.schedule.phase import SAME
from octavo.weights.files import SCALE_INV

__all__ = ["OctavoCallback"]

KEY = "octavo"  # the key in trainer_state.json, among the states of callbacks
# fields of a Phase that change the optimizer's state
OPTIMIZER_FIELDS = ("moments", "master", "weight_storage")


class OctavoCallback(TrainerCallback):
    """Trains a Trainer's model in FP8: ``Trainer(..., callbacks=[OctavoCallback(recipes.delayed())])``.

    Checkpoints have octavo's state: on as many ranks ``train(resume_from_checkpoint=...)`` continues bit for bit.

    Args:
        recipe: the recipe of layers that are converted when the Trainer is made, as octavo.convert takes it: a name
            or a file, too; None: that of the first phase of ``schedule``, or the model is converted already.
        select: which layers, as octavo.convert takes it.
        schedule: phases, the first without a trigger; see octavo.schedule.PrecisionSchedule. If they change moments,
            masters or the storage of weights, give an optimizer of octavo.optim in ``Trainer(optimizers=...)``.
        inspect: a folder for a record of what casts do; see octavo.inspect.record.
        inspect_every: record one in so many steps.
        checkpoint_in_fp8: keep the inputs of checkpointed layers in FP8, as octavo.checkpoint_in_fp8 does; with
            ``gradient_checkpointing=True``.

    Attributes:
        schedule: the PrecisionSchedule, once training begins.
        recorder: the Recorder during training.

    Raises:
        ValueError: from Trainer or ``train()``: the model was converted with another recipe, the Trainer made another
            model since, a checkpoint is of another recipe, or an option does not fit the TrainingArguments.

    Example:
        >>> from octavo import recipes
        >>> callback = OctavoCallback(recipes.delayed())  # Trainer(..., callbacks=[callback])
        >>> callback.recipe == recipes.delayed()
        True
    """

    def __init__(
        self,
        recipe: AnyRecipe | None = None,
        select: Select | None = None,
        schedule: Sequence[Phase] = (),
        inspect: str | Path | None = None,
        inspect_every: int = 50,
        checkpoint_in_fp8: bool = False,
    ) -> None:
        self.checkpoint_in_fp8 = checkpoint_in_fp8
        self.phases, self.select, self.inspect, self.inspect_every = tuple(schedule), select, inspect, inspect_every
        recipe = self.phases[0].recipe if recipe is None and self.phases else recipe
        self.recipe = None if recipe is None else as_recipe(recipe)
        self.schedule: PrecisionSchedule | None = None
        self.recorder: Recorder | None = None
        self._state: TrainingState | None = None
        self._optimizer: Optimizer | None = None
        self._training = ExitStack()  # ends what a training has begun
        self._tokens = 0
        self._logged: dict[str, float] | None = None  # numbers of a step that is done; None once it is recorded

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Convert the model; begin the schedule, if there is an optimizer."""
        if self.recipe is not None:
            convert_once(kwargs["model"], self.recipe, self.select, self.phases)
        if isinstance(kwargs["model"], PreTrainedModel):
            kwargs["model"].register_load_state_dict_pre_hook(_read_hub_names)
        if kwargs["optimizer"] is not None:
            self._begin(kwargs["model"], kwargs["optimizer"])
        elif any(getattr(phase, name) != SAME for phase in self.phases for name in OPTIMIZER_FIELDS):
            raise ValueError(
                f"phases that say {' or '.join(OPTIMIZER_FIELDS)} need the optimizer before training begins: "
                "Trainer(optimizers=(octavo.optim.AdamW(model.parameters(), ...), None))"
            )

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> TrainingState:
        """Begin the schedule; return a new TrainingState, which takes the place of that of an earlier training."""
        self.schedule = PrecisionSchedule(model, optimizer, self.phases) if self.phases else None
        if self._state is not None:
            self._state.remove()
        self._state, self._optimizer = TrainingState(model, self.schedule), optimizer
        return self._state

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load octavo's state from the checkpoint, if there is one, and begin."""
        model = kwargs["model"]
        optimizer: Any = torch_optimizer(kwargs["optimizer"])
        if not RecipeModule.named_in(model):
            raise ValueError(
                "the model is not converted: give the callback to Trainer(callbacks=[...]), not to add_callback; and "
                "with model_init=, call octavo.convert there"
            )
        by_tokens = [phase for phase in self.phases if phase.trigger == "from_tokens"]
        if by_tokens and args.include_num_input_tokens_seen in ("no", False):
            raise ValueError(f"{by_tokens[0]}: Trainer counts tokens with include_num_input_tokens_seen='all' only")
        if self.checkpoint_in_fp8:
            checkpoint_model_in_fp8(model)
        if args.max_grad_norm:
            check_clip(optimizer, f"max_grad_norm={args.max_grad_norm}")
        self._training.close()  # of a training that was interrupted
        if args.gradient_accumulation_steps > 1 and uses_gradients_early(optimizer):
            self._training.callback(follow_accumulation(model, optimizer, _is_in_train).remove)
        saved = state.stateful_callbacks.pop(KEY, None)
        # on_init_end has begun unless Trainer made the optimizer since; a second train() without resuming begins anew
        is_another_training = saved is None and self.schedule is not None and self.schedule.steps > 0
        training_state = self._state
        if training_state is None or self._optimizer is not optimizer or is_another_training:
            training_state = self._begin(model, optimizer)
        if saved is not None:
            training_state.load_state_dict(torch.load(io.BytesIO(base64.b64decode(saved)), "cpu", weights_only=True))
        elif state.global_step and self.phases:
            raise ValueError("the checkpoint holds no schedule: it was saved without this callback")
        elif state.global_step:
            warnings.warn("the checkpoint was saved without OctavoCallback: delayed scaling begins anew", stacklevel=2)
        self._tokens = state.num_input_tokens_seen
        self._logged = None
        if self.inspect is not None:
            more = {"optimizer": optimizer, "schedule": self.schedule, "step": state.global_step}
            self.recorder = Recorder(model, self.inspect, self.inspect_every, **more)
            self._training.callback(self.recorder.close)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step before, unless it is recorded, with its numbers, which Trainer logs after its end."""
        if self.recorder is not None and self._logged is not None:
            self.recorder.step(**self._logged)
        self._logged = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the next phase if it is time."""
        self._logged = {}
        if self.schedule is not None:
            self.schedule.step(int(state.num_input_tokens_seen - self._tokens))
        self._tokens = state.num_input_tokens_seen

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep a step's numbers for the record."""
        if self._logged is not None and "loss" in (logs or {}):
            self._logged = {name: logs[name] for name in ("loss", "grad_norm", "learning_rate") if name in logs}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the record."""
        self.on_step_begin(args, state, control)  # records the last step
        self._training.close()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add octavo's state to the checkpoint that was written, unless a search for hyperparameters runs."""
        if self._state is None or state.is_hyper_param_search:
            return
        content = self._state.state_dict()
        if args.should_save:
            torch.save(content, buffer := io.BytesIO())
            state.stateful_callbacks[KEY] = base64.b64encode(buffer.getvalue()).decode()
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            state.save_to_json(str(folder / TRAINER_STATE_NAME))
            del state.stateful_callbacks[KEY]  # later checkpoints have their own


def _is_in_train() -> bool:
    """Whether Trainer.train is running: callbacks are not called when an exception ends it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Trainer.train.__code__:
        frame = frame.f_back
    return frame is not None


def _read_hub_names(model: Any, state_dict: dict[str, Any], *others: Any) -> None:
    """Rename and rearrange weights that save_pretrained wrote as on the hub; a Trainer loads them unchanged.

    For a ViT or a Mixtral, say, it would ignore most of them, with a warning (transformers issue 48805).
    """
    unknown = {name for name in state_dict.keys() - model.state_dict().keys() if not name.endswith(SCALE_INV)}
    if not unknown:
        return
    stored, plain = split_stored(model, state_dict)
    try:
        read, info = type(model).from_pretrained(
            None, config=model.config, state_dict=plain, dtype=torch.float32, output_loading_info=True
        )
        lost = [name for kind in ("missing_keys", "mismatched_keys") for name in info[kind] if name not in stored]
    except RuntimeError as error:
        lost, info = [str(error)], {"unexpected_keys": ()}
    if unknown <= {*info["unexpected_keys"]}:
        return  # the names are not the hub's: torch reports them
    if lost:
        raise ValueError(
            f"this checkpoint's names are the hub's, and not all that a weight is made of is in one file: {lost[0]}; "
            "write one, with model.save_pretrained(folder, max_shard_size='1TB'), and resume from that"
        )
    state_dict.clear()
    state_dict.update({**read.state_dict(), **stored})
