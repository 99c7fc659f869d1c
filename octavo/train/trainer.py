"""The model, its optimizer, and one step of both: all that a run computes; files and progress are in other modules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import octavo
from octavo.cost.from_flags import muons_names
from octavo.cost.rates import memory_of
from octavo.distributed.ranks import Ranks
from octavo.kernels.capability import fast_dtype
from octavo.nn.convert import storage_now
from octavo.nn.linear import SeparateSplits
from octavo.optim.base import CompactOptimizer
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.schedule import Phase
from octavo.train.checkpoint import Content, Identity, RunFolder, StepRow
from octavo.train.config import (
    AUTO,
    BASELINE,
    FSDP,
    UNCONVERTED,
    VOCABULARY,
    ModelConfig,
    OptimizerConfig,
    RunCheckpointError,
    StateConfig,
    TrainConfig,
    TrainError,
    check_recipe_name,
    or_none,
    train_errors,
)
from octavo.train.data import Batches, Corpus
from octavo.train.model import GPT, HEAD, ROUTER, balance, next_byte_loss
from octavo.train.shard import shard, share_of, syncing
from octavo.weights.fsdp2 import whole

DEFAULT_STATE = StateConfig()

AUTO_RATIO = 0.06  # auto's threshold: the default run crosses it after three quarters; benchmarks/training/adaptive.py


def phases_of(text: str, recipe: Recipe | RecipeMap, steps: int, state: StateConfig) -> list[Phase]:
    """Return the phases of a run by --schedule, such as fp8-then-bf16@0.7.

    In fp8 layers have the run's recipe, weights and ``state``. In bf16 (float32 and baseline are the same here) they
    compute in high precision, in the run's dtype; weights are plain, and masters and moments float32.

    Raises:
        TrainError: for a schedule whose phases begin in no step of the run.
    """
    if text == AUTO:
        return [_phase("fp8", recipe, state), _phase(BASELINE, recipe, state, when_update_below_resolution=AUTO_RATIO)]
    first, *later = text.split("-then-")
    phases, previous_start = [_phase(first, recipe, state)], 0
    for words in later:
        name, share = words.split("@")
        start = round(float(share) * steps)
        if not previous_start < start < steps:
            raise TrainError(
                f"schedule {text}: {name} would begin at step {start} of {steps}, after one at step {previous_start}: "
                "choose a share of the steps between those around it"
            )
        phases.append(_phase(name, recipe, state, from_step=start))
        previous_start = start
    return phases


def _phase(name: str, recipe: Recipe | RecipeMap, state: StateConfig, **trigger: Any) -> Phase:
    if name in UNCONVERTED:
        return Phase(octavo.recipes.high_precision(), "fp32", "fp32", None, **trigger)
    casts = recipe if name == "fp8" else octavo.recipes.as_recipe(name)
    return Phase(casts, state.moments, or_none(state.master), or_none(state.weight_storage), **trigger)  # type: ignore[arg-type]


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step (from 0 on): a linear warmup, then half a cosine down to final_lr x lr."""
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(config.steps - warmup - 1, 1)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def build_optimizer(model: nn.Module, config: OptimizerConfig, state: StateConfig = DEFAULT_STATE) -> Optimizer:
    """Return AdamW or Muon that decays matrices, not norms' gains: torch's AdamW, unless the state needs octavo's."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = config.beta1, config.beta2
    if state == StateConfig(master=state.master) and not state.bf16_weights:
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)
    state_formats: Any = {"moments": state.moments, "master": or_none(state.master)}
    if state.algorithm == "adamw":
        return octavo.optim.AdamW(groups, config.lr, betas, **state_formats)
    hidden = {model.get_parameter(name) for name in muons_names(model)}
    groups[0]["params"] = [p for p in matrices if p not in hidden]
    others = [{**group, "algorithm": "adamw"} for group in groups]
    first = {"params": [p for p in matrices if p in hidden], "weight_decay": config.weight_decay, "algorithm": "muon"}
    adamw = {"lr": config.lr, "betas": betas}
    return octavo.optim.Muon([first, *others], config.lr, adjust_lr_fn="match_rms_adamw", **state_formats, adamw=adamw)


def choose_device(name: str) -> torch.device:
    """Return the device of this name; raise TrainError if it can't be used here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device, dtype=torch.float32).add_(1).item()  # the meta device has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # an absent backend raises one of these
        raise TrainError(f"device {name!r} cannot be used here: choose auto, or one that octavo info lists") from error
    return device


def settle_dtype(config: TrainConfig, device: torch.device, recipes: Collection[object] = ()) -> TrainConfig:
    """Return the options with the dtype that `auto` means on a device for these recipes, or raise TrainError."""
    return config.with_dtype(recipes, str(fast_dtype(device)).removeprefix("torch."))


def require_memory(config: TrainConfig, device: torch.device, ranks: int = 1) -> None:
    """Raise TrainError if a rank cannot possibly hold weights, gradients, moments and activations.

    It counts 16 bytes a parameter, and for each token 2 bytes x 20 x width in each layer and 4 bytes a logit.
    """
    total = memory_of(device)
    model, data = config.model, config.data
    tokens = data.batch // (data.micro_batches * ranks) * model.context
    parameters = model.parameters // (ranks if config.ranks.shard == FSDP else 1)
    needed = 16 * parameters + tokens * (40 * model.width * model.layers + 4 * VOCABULARY)
    if needed > total > 0:
        raise TrainError(
            f"this model needs at least {needed / 2**30:,.1f} GiB, but {device} has {total / 2**30:,.1f} GiB: "
            "lower --width, --layers, --context or --batch, or raise --micro-batches"
        )


def build_model(
    config: ModelConfig, recipe: str | Recipe | RecipeMap, seed: int, state: StateConfig = DEFAULT_STATE
) -> GPT:
    """Return the model with a seed's initial weights, its blocks converted to the recipe unless it is the baseline.

    The output head stays in high precision, as is usual in FP8 training: it is a small share of the work, and rounding
    the gradients of the loss at their source costs more than anywhere else. Routers of experts stay so, too.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = GPT(config)
    if state.bf16_weights:
        for parameter in model.parameters():  # not buffers, which are rotary tables
            parameter.data = parameter.data.bfloat16()
    casts, storage = recipe_named(recipe), or_none(state.weight_storage)
    if casts is None and storage is not None:
        raise TrainError(f"weight_storage {storage} needs an FP8 recipe, not {recipe}: choose FP8 recipes alone")
    if casts is not None:
        with train_errors():
            octavo.convert(model, casts, select=in_fp8, weight_storage=storage)  # type: ignore[arg-type]
    return model


def in_fp8(module: nn.Module, name: str) -> bool:
    """Whether a layer of the GPT follows the recipe."""
    return name.rpartition(".")[2] not in (HEAD, ROUTER)


def recipe_named(recipe: str | Recipe | RecipeMap) -> Recipe | RecipeMap | None:
    """Return the recipe with this name, or the recipe itself; None: the model stays as it is built."""
    if not isinstance(recipe, str):
        return recipe
    return None if check_recipe_name(recipe) in UNCONVERTED else octavo.recipes.as_recipe(recipe)


class Trainer:
    """The model, which is on its device and converted, its optimizer and one step of both.

    On several ranks the model, the same on each, is sharded or replicated here. ``recipe`` is the model's, for the
    phases of the config's schedule; without one there is no FP8, and there are no phases. ``wrapped_model`` is what a
    step calls, and ``batch_ranks`` are those that share a batch: see ``shard``.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: GPT,
        corpus: Corpus,
        ranks: Ranks | None = None,
        recipe: Recipe | RecipeMap | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.model = model
        self.batches = Batches(corpus, config.model.context, config.data.batch, config.run.seed)
        self.device = model.head.weight.device
        self.config = config = settle_dtype(config, self.device)
        self.wrapped_model, self.batch_ranks = shard(model, config, self.ranks)
        state = config.state if recipe is not None else dataclasses.replace(config.state, schedule="")
        self.optimizer: Any
        with train_errors():
            self.optimizer = build_optimizer(model, config.optimizer, state)
        self.in_backward: Any = None
        if (outstanding := config.state.outstanding_bytes) is not None:
            clip = config.optimizer.clip or math.inf
            self.in_backward = octavo.optim.update_in_backward(self.optimizer, outstanding, clip)
        self.schedule: octavo.schedule.PrecisionSchedule | None = None
        if state.schedule and recipe is not None:
            phases = phases_of(state.schedule, recipe, config.optimizer.steps, state)
            with train_errors(f"schedule {state.schedule}: "):
                self.schedule = octavo.schedule.PrecisionSchedule(model, self.optimizer, phases)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, in autocast if the dtype is bfloat16; inputs and targets [B, C] uint8."""
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.run.dtype == "bfloat16"):
            return next_byte_loss(self.wrapped_model(inputs), targets)

    def step(self, step: int) -> tuple[Tensor, Tensor, float]:
        """Take a step; return loss and gradients' norm, over all ranks and on the device, and the learning rate."""
        options, optimizer = self.config.optimizer, self.optimizer
        lr = learning_rate(step, options)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        inputs, targets = (share_of(whole_batch, self.batch_ranks) for whole_batch in self.batches.training(step))
        count = self.config.data.micro_batches
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        for index, micro_batch in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            is_last = index == count - 1
            # updates in backward wait for the backward of the last micro-batch
            waits = isinstance(optimizer, CompactOptimizer) and not is_last
            with syncing(self.wrapped_model, is_last), optimizer.accumulate() if waits else nullcontext():
                loss = self.loss(*micro_batch) / count
                loss.backward()
            total += loss.detach()
        if self.in_backward is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), options.clip or math.inf)
        optimizer.step()
        if mixtures := self.model.mixtures:
            balance(mixtures, self.ranks)
        if self.schedule is not None:
            self.schedule.step(inputs.numel() * self.batch_ranks.size)
        if self.in_backward is not None:
            norm = self.in_backward.last_norm
        return self.batch_ranks.mean(total), whole(norm), lr

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over the validation windows, nats a byte."""
        self.model.eval()
        windows = list(self.batches.validation(self.config.data.eval_windows))
        losses = []
        for batch in windows:
            count = len(share_of(batch[0], self.batch_ranks))
            # a rank without sequences computes one all the same: under fsdp other ranks wait for it
            inputs, targets = (share_of(part, self.batch_ranks) if count else part[:1] for part in batch)
            losses.append(self.loss(inputs, targets) * count)
        self.model.train()
        return sum(float(self.batch_ranks.sum(loss)) for loss in losses) / sum(len(inputs) for inputs, _ in windows)

    def save(self, folder: RunFolder, identity: Identity, rows: list[StepRow]) -> None:
        """Replace the folder's checkpoint."""
        stateful = {"schedule": self.schedule, "in_backward": self.in_backward}
        content: Content = {name: each.state_dict() for name, each in stateful.items() if each is not None}
        content |= {"step": len(rows), "identity": identity, "rows": [dataclasses.astuple(row) for row in rows]}
        content["weights_in_fp8"] = any(granularity is not None for granularity in storage_now(self.model).values())
        content["separate_splits"] = any(isinstance(module, SeparateSplits) for module in self.model.modules())
        folder.save(self.model, self.optimizer, content)

    def load(self, folder: RunFolder, content: Content) -> None:
        """Load the checkpoint that the folder has read; raise RunCheckpointError if schedule or model don't fit it."""
        try:
            if self.schedule is not None:  # first, as it brings model and optimizer into the form of its phase
                self.schedule.load_state_dict(content["schedule"])
            if self.in_backward is not None:
                self.in_backward.load_state_dict(content["in_backward"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise RunCheckpointError(f"the checkpoint does not fit this run: {error}") from error
        folder.fill(self.model, self.optimizer)
