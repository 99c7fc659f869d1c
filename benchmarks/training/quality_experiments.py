"""Experiments of `python -m benchmarks quality`: their options, model sizes, and the order of runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo import E4M3, E5M2, Cast, Dynamic, PerTensor, Recipe, RecipeMap, recipes
from octavo.scaling.recipe import PRODUCTS
from octavo.train import (
    BASELINE,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
)

STEPS = 3000
SIZES = {
    "0.5M": ModelConfig(width=128, layers=2, heads=2, context=64),
    "2.5M": ModelConfig(width=256, layers=3, heads=4, context=64),
    "7.5M": ModelConfig(width=448, layers=3, heads=7, context=64),
}
BATCH, WINDOWS = 8, 2048  # sequences a step, and of the final validation
TOY = "toy"
TOY_SIZE, TOY_STEPS, TOY_WINDOWS = ModelConfig(width=32, layers=1, heads=2, context=16), 20, 64
PARITY, PARITY_BATCH = "0.06M", 32  # the experiment of loss parity, which parity.py evaluates
MODELS = SIZES | {PARITY: ModelConfig(width=40, layers=2, heads=2, context=64), TOY: TOY_SIZE}


@dataclass(frozen=True)
class Experiment:
    """The difference of an experiment from the run in bf16 with torch's AdamW in float32.

    Attributes:
        recipe: of the blocks' layers.
        head: the output layer's recipe; None: it stays in high precision.
        state: the optimizer's state, weights and masters.
        dtype: of what is not in FP8.
        exact_norm: updates in backward are clipped by the step's exact norm, computed by another backward before.
        parts: micro-batches of a step. In bf16 they change last bits alone, and so what chance alone makes of a loss.
    """

    recipe: str | Recipe | RecipeMap = BASELINE
    head: Recipe | None = None
    state: StateConfig = StateConfig()  # noqa: RUF009 (frozen)
    dtype: str = "bfloat16"
    exact_norm: bool = False
    parts: int = 1


_tensor = Cast(E4M3, PerTensor(), Dynamic())
_dynamic = recipes.dynamic()
_e4m3 = Recipe((_tensor, _tensor), (_tensor, _tensor), (_tensor, _tensor), name="dynamic, E4M3 gradients")
_e5m2 = Cast(E5M2, PerTensor(), Dynamic())
_e5m2_weights = Recipe((_tensor, _e5m2), (_tensor, _e5m2), (_tensor, _tensor), name="dynamic, E5M2 weights")
_PARTS = {product: Recipe(**{product: getattr(_dynamic, product)}, name=f"{product} alone") for product in PRODUCTS}
_HEADS = {"dynamic": _dynamic, "E4M3 gradients": _e4m3, "rowwise": recipes.rowwise(), **_PARTS}
_KEPT = {
    f"dynamic, {name} in high precision": RecipeMap(_dynamic, {pattern: None})
    for name, pattern in {"attention": "*.attention.*", "first block": "blocks.0.*"}.items()
}
_nvfp4 = recipes.nvfp4()
_NVFP4 = {
    "nvfp4": _nvfp4,
    "nvfp4, without rotation": dataclasses.replace(
        _nvfp4, grad_weight=tuple(dataclasses.replace(cast, rotation=None) for cast in _nvfp4.grad_weight or ())
    ),
    "nvfp4, to nearest": dataclasses.replace(
        _nvfp4,
        **{
            product: tuple(dataclasses.replace(cast, rounding=None) for cast in getattr(_nvfp4, product))
            for product in ("grad_input", "grad_weight")
        },
    ),
    "nvfp4, last block in high precision": RecipeMap(_nvfp4, {"blocks.1.*": None}),
    "nvfp4, scale from a history": recipes.nvfp4(history_length=16),
}
_LATE = "nvfp4, the last fifth in bf16"
_FULL = StateConfig("fp8", "split16", "fp8")
_IN_BACKWARD = "64KB"  # most gradients are updated alone
BASELINES = ("bf16", "bf16 in 2 parts", "bf16 in 4 parts")  # each seed's losses are compared with the mean of these
RECIPES = ("dynamic", "delayed", "rowwise", "blockwise", "mx")
EXPERIMENTS = {
    "bf16": Experiment(),
    **{f"bf16 in {parts} parts": Experiment(parts=parts) for parts in (2, 4)},
    "float32": Experiment(dtype="float32"),
    **{name: Experiment(name) for name in RECIPES},
    "rowwise_with_gw_hp": Experiment("rowwise_with_gw_hp"),
    "dynamic, E4M3 gradients": Experiment(_e4m3),
    "dynamic, E5M2 weights": Experiment(_e5m2_weights),
    **{f"dynamic, {product} alone": Experiment(recipe) for product, recipe in _PARTS.items()},
    **{name: Experiment(recipe) for name, recipe in (_KEPT | _NVFP4).items()},
    _LATE: Experiment("nvfp4", state=StateConfig(schedule="fp8-then-bf16@0.8")),
    "dynamic, head too": Experiment("dynamic", head=_dynamic),
    **{f"head alone, {name}": Experiment(head=recipe) for name, recipe in _HEADS.items()},
    "dynamic, rowwise head": Experiment("dynamic", head=recipes.rowwise()),
    "dynamic, FP8 moments": Experiment("dynamic", state=StateConfig("fp8")),
    "dynamic, FP8 moments and weights, split24": Experiment("dynamic", state=StateConfig("fp8", "split24", "fp8")),
    "full stack": Experiment("dynamic", state=_FULL),
    "full stack in backward": Experiment("dynamic", state=dataclasses.replace(_FULL, update_in_backward=_IN_BACKWARD)),
    "full stack in backward, exact norm": Experiment(
        "dynamic", state=dataclasses.replace(_FULL, update_in_backward=_IN_BACKWARD), exact_norm=True
    ),
    "bf16 in backward": Experiment(state=StateConfig(update_in_backward=_IN_BACKWARD)),
}

_NAMED = ("bf16", *RECIPES)
_CLIP = ("full stack in backward, exact norm", "bf16 in backward")
_MORE = ("dynamic, head too", "full stack", "full stack in backward", "dynamic, E4M3 gradients", "float32")
_ALONE = tuple(f"head alone, {name}" for name in _HEADS)
_PRODUCTS = tuple(f"dynamic, {product} alone" for product in PRODUCTS)
_STATES = ("dynamic, FP8 moments", "dynamic, FP8 moments and weights, split24")
Stage = tuple[tuple[str, ...], str, Sequence[int]]  # experiments, size, seeds
STAGES: tuple[Stage, ...] = (
    (_NAMED, "0.5M", range(2)),
    (BASELINES, "0.5M", range(2)),
    (_MORE + _ALONE, "0.5M", range(2)),
    (BASELINES + _MORE + _NAMED, "0.5M", range(2, 3)),
    (("bf16", "dynamic", "full stack", "rowwise", "mx"), "2.5M", range(1)),
    (BASELINES + _NAMED + _MORE, "0.5M", range(3, 5)),
    (BASELINES + _NAMED, "2.5M", range(3)),
    (_MORE, "2.5M", range(3)),
    (_CLIP + _PRODUCTS, "0.5M", range(5)),
    (BASELINES + _NAMED + _MORE, "0.5M", range(5, 10)),
    (BASELINES + _NAMED + _MORE, "2.5M", range(3, 5)),
    (("bf16", "dynamic", "rowwise", "full stack"), "7.5M", range(2)),
    (tuple(_KEPT), "0.5M", range(8)),
    (_CLIP, "0.5M", range(5, 10)),
    (("dynamic, rowwise head", *_STATES), "0.5M", range(5)),
    (("rowwise_with_gw_hp", *_ALONE), "0.5M", range(5)),
    ((*_NVFP4, _LATE), "0.5M", range(5)),
)

PARITY_ARMS = {  # experiments by bytes of training a parameter
    20: ("bf16", "bf16 in 2 parts", "dynamic", "blockwise", "dynamic, E5M2 weights"),
    10: ("bf16", "dynamic", "blockwise"),
    5: ("bf16", "dynamic", "blockwise"),
}
PARITY_SEEDS = 12
PARITY_STAGES = tuple((length, range(seeds)) for seeds in (PARITY_SEEDS // 2, PARITY_SEEDS) for length in PARITY_ARMS)


class Task(NamedTuple):
    """One run."""

    experiment: str
    size: str
    seed: int
    steps: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return "-".join(map(str, self)).replace(", ", "_").replace(" ", "_")


def queue(steps: int = STEPS) -> Iterator[Task]:
    """Yield all runs, the most wanted first; those of loss parity have their own steps."""
    for experiments, size, seeds in STAGES:
        yield from (Task(name, size, seed, steps) for seed in seeds for name in experiments)
    for length, seeds in PARITY_STAGES:
        yield from (Task(name, PARITY, seed, parity_steps(length)) for seed in seeds for name in PARITY_ARMS[length])


def parity_steps(length: int) -> int:
    """Return the steps that read so many bytes a parameter of the parity experiment's model."""
    model = MODELS[PARITY]
    return math.ceil(length * model.parameters / (PARITY_BATCH * model.context))


def config_of(task: Task) -> TrainConfig:
    """Return all options of a run, but for the folder."""
    experiment = EXPERIMENTS[task.experiment]
    batch = PARITY_BATCH if task.size == PARITY else BATCH
    windows = TOY_WINDOWS if task.size == TOY else WINDOWS // 4
    return TrainConfig(
        model=MODELS[task.size],
        data=DataConfig(batch=batch, micro_batches=experiment.parts, eval_windows=windows),
        optimizer=OptimizerConfig(steps=task.steps),
        run=RunConfig(seed=task.seed, device="cpu", dtype=experiment.dtype, checkpoint_every=250, eval_every=500),
        state=experiment.state,
    )
