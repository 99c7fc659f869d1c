"""The options of a run: eight frozen dataclasses, checked when built; the CLI's flags are made from their fields.

A field's annotation says which values it takes (a Literal: one of these strings), its metadata what it means and its
limits. A run's folder has them as `config.json`, and `octavo train --config` reads such a file, JSON or TOML. A section
is a field of TrainConfig; options that a file leaves out have their defaults:

    {"recipe": "delayed", "model": {"width": 192, "layers": 4}, "optimizer": {"steps": 1000}}
"""

import contextlib
import dataclasses
import json
import math
import re
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from octavo.errors import OctavoError, first_line
from octavo.reading import read_json
from octavo.recipes import NAMED, as_recipe
from octavo.scaling.recipe import Recipe, RecipeMap

CONFIG_FILE = "config.json"
RULES_FILE = "rules.json"  # what `octavo inspect RUN --apply` writes beside it, and --config RUN reads as the recipe
AUTO = "auto"


class TrainError(OctavoError):
    """A run cannot start or go on; the message names the values and the remedy."""


class RunCheckpointError(TrainError):
    """A checkpoint cannot be written, read or continued."""


class DivergedError(TrainError):
    """The loss or the gradients stopped being finite, or the loss ran away."""


@contextlib.contextmanager
def train_errors(before: str = "") -> Iterator[None]:
    """Raise a ValueError in the block as a TrainError with the same message after ``before``."""
    try:
        yield
    except ValueError as error:
        raise TrainError(f"{before}{error}") from error


VOCABULARY = 256  # bytes
BASELINE = "baseline"  # the model as it is built; such a run is named after its dtype:
NAMES_BY_DTYPE = {"bfloat16": "bf16", "float32": "float32"}
UNCONVERTED = (BASELINE, *NAMES_BY_DTYPE.values())
ALONE, FSDP, DDP = "none", "fsdp", "ddp"
RECIPES = (*UNCONVERTED, *NAMED)
OUTSTANDING = r"(?:(\d+)(KB|MB|GB)?)?"  # bytes of gradients, or nothing
ABOVE_0 = math.ulp(0.0)  # above 0
LARGEST_INTEGER = 2**31 - 1  # torch indexes with int64, but no size below may need it


def option(default: Any, help: str, *limits: float, metavar: str = "") -> Any:
    """Return a dataclass field with its flag's help and limits: the lowest integer, or the lowest and largest float.

    ``metavar``: what the flag's help calls a value (default: N for an integer, X for a float).
    """
    metavar = metavar or {int: "N", float: "X"}.get(type(default), "")
    return field(default=default, metadata={"help": help, "limits": limits, "metavar": metavar})


def choices(field: Field[Any]) -> tuple[str, ...]:
    """Return the strings of a field's Literal, () without one; a bool field takes them besides true and false."""
    literals = (kind for kind in (field.type, *typing.get_args(field.type)) if typing.get_origin(kind) is Literal)
    return tuple(word for literal in literals for word in typing.get_args(literal))


def check_value(field: Field[Any], value: object, name: str) -> None:
    """Raise ValueError, which says what to choose for the option called ``name``, if a field doesn't take this value.

    The kind of a field is seen by its default, and by the words of its annotation, a Literal:

        bool             true, false, or one of the words
        a word           one of the words
        int              a whole number from its limit on
        float            a number within its two limits
        None, or a str   a Path or None, or any string
    """
    default, limits, words = field.default, field.metadata["limits"], choices(field)
    if isinstance(default, bool):
        fits, choice = isinstance(value, bool) or value in words, " or ".join(("true", "false", *words))
    elif words:
        fits, choice = value in words, f"{', '.join(words[:-1])} or {words[-1]}"
    elif isinstance(default, int):
        fits = type(value) is int and limits[0] <= value <= LARGEST_INTEGER
        choice = f"a whole number from {limits[0]} to {LARGEST_INTEGER}"
    elif isinstance(default, float):
        low, high = limits
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        choice = f"a number {'above 0' if low == ABOVE_0 else f'from {low:g}'} up to {high:g}"
    else:
        fits, choice = isinstance(value, field.type), "a Path" if default is None else "a string"  # type: ignore[arg-type]
    if not fits:
        raise ValueError(f"{name} is {value!r}: choose {choice}")


class _Checked:
    """A section of options, each of which is checked when it is built."""

    def __post_init__(self) -> None:
        for checked in fields(self):  # type: ignore[arg-type]
            check_value(checked, getattr(self, checked.name), checked.name)


@dataclass(frozen=True)
class ModelConfig(_Checked):
    """Sizes of the byte-level GPT."""

    width: int = option(192, "features of the residual stream", 1)
    layers: int = option(4, "transformer blocks", 1)
    heads: int = option(3, "attention heads; width / heads must be even", 1)
    context: int = option(128, "bytes that the model sees at once", 1)
    experts: int = option(0, "experts of each block's MLP (0: it is one MLP, for all bytes)", 0)
    top_k: int = option(2, "experts that compute each byte; each is 1 / top_k of the MLP", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.experts < self.top_k:
            raise ValueError(
                f"top_k is {self.top_k} of {self.experts} experts: choose top_k {self.experts}, or more experts"
            )
        step = 2 * self.heads  # rotary positions turn pairs of features
        if self.width % step:
            below = self.width // step * step
            choices = f"{below} or {below + step}" if below else f"{step}"
            raise ValueError(
                f"width {self.width} is not a multiple of 2 x heads (heads {self.heads}): choose width {choices}"
            )

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Features inside the SwiGLU: 8/3 of the width (the parameters of a plain 4x MLP), rounded up to 32.

        Each expert has 1 / top_k of that, so that a byte takes as many FLOPs as without experts.
        """
        divisor = 3 * self.top_k if self.experts else 3
        return -(-8 * self.width // divisor // 32) * 32

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        mlp = 3 * self.width * self.hidden
        mlp = self.experts * (mlp + self.width) if self.experts else mlp  # each expert has a row of the router
        block = 4 * self.width**2 + mlp + 2 * self.width
        return self.layers * block + 2 * VOCABULARY * self.width + self.width


@dataclass(frozen=True)
class DataConfig(_Checked):
    """The text, and how much of it each step reads."""

    data: Path | None = option(  # noqa: RUF009 (it is a field)
        None, "text file, or folder of text files (default: Python's own standard library)", metavar="PATH"
    )
    batch: int = option(16, "sequences in each step", 1)
    micro_batches: int = option(1, "micro-batches that a step's batch is split into; their gradients are summed", 1)
    eval_windows: int = option(256, "sequences in each validation, always the same ones", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch % self.micro_batches:
            raise ValueError(
                f"batch {self.batch} does not divide into {self.micro_batches} micro_batches: "
                f"choose a batch of {math.ceil(self.batch / self.micro_batches) * self.micro_batches}"
            )


@dataclass(frozen=True)
class OptimizerConfig(_Checked):
    """AdamW, or Muon beside it, with a linear warmup and a cosine decay."""

    steps: int = option(200, "optimizer steps", 1)
    lr: float = option(1.5e-3, "peak learning rate", ABOVE_0, 1e3, metavar="RATE")
    final_lr: float = option(0.01, "last learning rate, as a share of the peak", 0, 1, metavar="SHARE")
    warmup: float = option(0.1, "share of the steps in which the learning rate rises", 0, 1, metavar="SHARE")
    weight_decay: float = option(0.1, "decoupled weight decay of the matrices", 0, 1)
    beta1: float = option(0.9, "decay of AdamW's first moment", 0, 0.999999)
    beta2: float = option(0.95, "decay of AdamW's second moment", 0, 0.999999)
    clip: float = option(1.0, "largest norm of all gradients together (0: no clipping)", 0, 1e9)


def or_none(value: str) -> str | None:
    """Return an option's value, None for "none"."""
    return None if value == "none" else value


@dataclass(frozen=True)
class StateConfig(_Checked):
    """The optimizer, the formats of its state and of the weights, and when these change."""

    moments: Literal["fp32", "bf16", "fp8"] = option(
        "fp32", "how moments are kept: fp32 (AdamW is torch's own then), bf16 or fp8"
    )
    master: Literal["auto", "fp32", "split32", "split24", "split16", "fp16_scaled", "none"] = option(
        "auto",
        "how a bf16 weight's master is kept: split32, split24, split16 or none (auto, fp32: weights are float32); "
        "fp16_scaled is for weights in FP8",
    )
    weight_storage: Literal["none", "fp8"] = option(
        "none", "fp8: the blocks' weights live in FP8 (masters split16, split24, ...)"
    )
    update_in_backward: str = option(
        "", "update weights while backward runs, by so many bytes of gradients: 64MB", metavar="BYTES"
    )
    schedule: str = option(
        "", "phases of the run: fp8-then-bf16@0.7 (from 70 % of its steps on), or auto", metavar="PHASES"
    )
    algorithm: Literal["adamw", "muon"] = option(
        "adamw", "muon: orthogonalised updates of the blocks' matrices, as large as AdamW's, which has all others"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_storage == "fp8" and self.master == "split32":
            raise ValueError("master is 'split32', which weights that live in FP8 don't take: choose auto or split24")
        if re.fullmatch(OUTSTANDING, self.update_in_backward.strip().upper()) is None:
            raise ValueError(
                f"update_in_backward is {self.update_in_backward!r}: choose a number of bytes, such as 64MB or 0"
            )
        names = "|".join(("fp8", *RECIPES))
        phases = rf"({names})(-then-({names})@(0?\.\d+))+"  # see trainer.py's phases_of
        if self.schedule not in ("", AUTO) and re.fullmatch(phases, self.schedule) is None:
            raise ValueError(
                f"schedule is {self.schedule!r}: choose auto, or phases and the shares of the steps where they begin, "
                f"such as fp8-then-bf16@0.7 (fp8: the run's recipe; others: {', '.join(RECIPES)})"
            )

    @property
    def bf16_weights(self) -> bool:
        """Whether the model's weights are bf16."""
        return self.master not in ("auto", "fp32")

    @property
    def outstanding_bytes(self) -> int | None:
        """Bytes of gradients that wait for an update in backward (a KB is 2^10); None: updates come after backward."""
        match = re.fullmatch(OUTSTANDING, self.update_in_backward.strip().upper())
        return int(match[1]) << {None: 0, "KB": 10, "MB": 20, "GB": 30}[match[2]] if match and match[1] else None


@dataclass(frozen=True)
class RunConfig(_Checked):
    """Device, dtype and folder of a run, and how often it saves and validates."""

    seed: int = option(0, "seed of the initial weights and of the data order", 0)
    device: str = option("auto", "auto (cuda if there is one), cpu, cuda, cuda:1, ...", metavar="DEVICE")
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto",
        "of what is not FP8: bfloat16 (autocast over float32 parameters), float32 (no autocast), or auto: bfloat16, "
        "but float32 on a CPU without instructions for it",
    )
    compile: bool = option(False, "compile the model with torch.compile")
    out: Path | None = option(  # noqa: RUF009 (it is a field)
        None, "folder for checkpoints, logs and plots (default: a new one under runs/)", metavar="FOLDER"
    )
    resume: bool | Literal["auto"] = option(
        False,
        "continue the run in the folder --out (default: the newest one under runs/), or begin one; auto: for a command "
        "that is started again and again, which must name --out",
    )
    checkpoint_every: int = option(100, "steps between checkpoints (0: only at the end and when interrupted)", 0)
    eval_every: int = option(80, "steps between validations (0: only at the end)", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume == AUTO and self.out is None:
            raise ValueError("resume auto finds its run by the folder: give out, too")


@dataclass(frozen=True)
class RanksConfig(_Checked):
    """The processes that train together, how they share the model, and how they save it."""

    shard: Literal["none", "fsdp", "ddp"] = option(
        "none", "fsdp (each rank has a part of the model) or ddp (the whole of it): train on the ranks of torchrun"
    )
    tensor_parallel: int = option(1, "under fsdp: ranks that share each product and each sequence", 1, metavar="RANKS")
    timeout: int = option(60, "seconds that ranks wait for each other before they give up", 1, metavar="SECONDS")
    keep: int = option(1, "checkpoints that stay, the newest ones", 1)
    async_save: bool = option(False, "write checkpoints while training goes on: a step waits for a copy alone")


@dataclass(frozen=True)
class InspectConfig(_Checked):
    """The record of a run's casts to FP8."""

    inspect: bool = option(False, "record what casts do, in the run's folder: see `octavo inspect`; needs NumPy")
    inspect_every: int = option(50, "steps between records", 1)


@dataclass(frozen=True)
class TrainConfig:
    """All options of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    state: StateConfig = field(default_factory=StateConfig)
    inspect: InspectConfig = field(default_factory=InspectConfig)

    def __post_init__(self) -> None:
        if self.state.bf16_weights and self.run.dtype == "float32":
            raise ValueError(f"master {self.state.master} keeps weights in bf16: choose dtype bfloat16")
        if self.state.update_in_backward and self.ranks.shard == DDP:
            raise ValueError("update_in_backward uses gradients before ddp has exchanged them: choose shard fsdp")
        self._check_tensor_parallel()
        beta1, beta2 = self.optimizer.beta1, self.optimizer.beta2
        if beta1 * beta1 > beta2 and self.state.weight_storage == "fp8":
            raise ValueError(
                f"beta1 {beta1} and beta2 {beta2}: updates have no bound where beta1^2 is above beta2, and "
                "weight_storage fp8 needs one: choose a larger beta2"
            )

    def _check_tensor_parallel(self) -> None:
        ranks, model = self.ranks.tensor_parallel, self.model
        if ranks == 1:
            return
        if self.state.algorithm == "muon":
            raise ValueError(f"tensor_parallel {ranks} cuts columns of matrices, which muon takes whole: choose adamw")
        if self.ranks.shard != FSDP:
            raise ValueError(f"tensor_parallel {ranks} with shard {self.ranks.shard}: choose shard fsdp")
        shared = {"experts": model.experts} if model.experts else {"hidden": model.hidden}
        sizes = {"heads": model.heads, "context": model.context, "bytes": VOCABULARY} | shared
        if uneven := {name: size for name, size in sizes.items() if size % ranks}:
            raise ValueError(f"tensor_parallel {ranks} does not divide {uneven}: choose sizes that are multiples of it")

    def with_dtype(self, recipes: Collection[object], fastest: str) -> Self:
        """Return the options with a dtype instead of `auto`: the one that a recipe or master needs, or the fastest."""
        demanded = {dtype for dtype, name in NAMES_BY_DTYPE.items() if name in recipes or dtype == self.run.dtype}
        demanded |= {"bfloat16"} if self.state.bf16_weights else set()
        if len(demanded) > 1:
            raise TrainError(
                f"recipe {', '.join(map(str, recipes))}, dtype {self.run.dtype} and master {self.state.master} mean "
                f"both {' and '.join(NAMES_BY_DTYPE)}: choose one dtype, and recipe {BASELINE} for the run in it"
            )
        dtype: Any = demanded.pop() if demanded else fastest
        return dataclasses.replace(self, run=dataclasses.replace(self.run, dtype=dtype))

    def require_phases(self, recipes: Collection[object]) -> None:
        """Raise TrainError for a schedule that would change nothing, because no recipe has FP8."""
        if self.state.schedule and all(recipe in UNCONVERTED for recipe in recipes):
            raise TrainError(
                f"schedule {self.state.schedule} switches FP8 layers, and {', '.join(map(str, recipes))} has none: "
                "choose an FP8 recipe, such as dynamic; a phase of the schedule may be bf16"
            )

    def called(self, recipe: str | Recipe | RecipeMap) -> str:
        """Return the name of a run of this recipe; for a baseline the dtype's, which must not be "auto" any more."""
        default = recipe.default if isinstance(recipe, RecipeMap) else recipe
        name = default if isinstance(default, str) else default.name
        return NAMES_BY_DTYPE[self.run.dtype] if name in UNCONVERTED else name

    def identity(self) -> dict[str, int | float | str]:
        """Return the options that decide the loss curve: a run can only be resumed with the same ones.

        They are those of model, data, optimizer and state, the seed and the dtype, which must not be "auto" any more;
        not the data's path, as its contents are compared instead.
        """
        sections = (self.model, self.data, self.optimizer, self.state)
        chosen = {name: value for section in sections for name, value in vars(section).items() if name != "data"}
        return chosen | {"seed": self.run.seed, "dtype": self.run.dtype}


SECTIONS: dict[str, Any] = {section.name: section.type for section in fields(TrainConfig)}


def check_recipe_name(name: str) -> str:
    """Return the recipe's name; raise ValueError, with a list of all names, if there is no such recipe."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: choose from {', '.join(RECIPES)}")
    return name


def chosen_recipe(value: Any) -> str | Recipe | RecipeMap:
    """Return a name in RECIPES as it is; a file of recipes by layer, or its content, as octavo.recipes.as_recipe does.

    Raise ValueError for anything else.
    """
    if isinstance(value, str) and not value.endswith(".json"):
        return check_recipe_name(value)
    try:
        return as_recipe(value)
    except TypeError as error:  # content of another form
        raise ValueError(str(error)) from error


def options_text(config: TrainConfig, recipe: str) -> str:
    """Return the text of `config.json`: a run's options without --out and --resume. ``recipe``: a name, or JSON."""
    sections: dict[str, Any] = {"recipe": json.loads(recipe) if recipe.startswith("{") else recipe}
    for name, section in vars(config).items():
        sections[name] = {key: value for key, value in vars(section).items() if key not in ("out", "resume")}
    return f"{json.dumps(sections, indent=2, default=lambda path: str(path.absolute()))}\n"


def load_options(path: Path) -> dict[str, Any]:
    """Return the options in a file, by their names; `recipe` (a name, or recipes by layer) among them.

    It is a JSON file, a TOML file whose name ends with .toml, or the `config.json` of a run's folder, where
    `rules.json`, if there is one, is the recipe. Raise TrainError if it can't be read, has an unknown option, or a
    value that an option does not take.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        data = file.read_bytes()
        content = tomllib.loads(data.decode("utf-8-sig")) if file.suffix == ".toml" else read_json(data)
    except OSError as error:
        raise TrainError(f"{file}: {error.strerror}: give a run's folder, its {CONFIG_FILE}, or a TOML file") from error
    except (ValueError, RecursionError) as error:  # tomllib's own, for lists in lists
        raise TrainError(f"{file} is neither JSON nor, ending in .toml, TOML: {first_line(error)}") from error
    if not isinstance(content, dict) or (unknown := content.keys() - SECTIONS - {"recipe"}):
        fault = f"{', '.join(sorted(unknown))} is no section" if isinstance(content, dict) else "it has no sections"
        raise TrainError(f"{file}: {fault}: choose recipe, {', '.join(SECTIONS)}")
    if file != path and (path / RULES_FILE).exists():
        content["recipe"] = str(path / RULES_FILE)
    options: dict[str, Any] = {}
    for name, values in content.items():
        with train_errors(f"{file}: "):
            if name in SECTIONS:
                options |= _section(name, values)
            else:
                options[name] = chosen_recipe(values) if isinstance(values, dict | str) else check_recipe_name(values)
    return options


def _section(section: str, values: Any) -> dict[str, Any]:
    fields_by_name = {field.name: field for field in fields(SECTIONS[section])}
    unknown = sorted(values.keys() - fields_by_name) if isinstance(values, dict) else [repr(values)]
    if unknown:
        raise ValueError(f"{section} has no option {', '.join(unknown)}: choose {', '.join(fields_by_name)}")
    options = {}
    for name, value in values.items():
        is_path = fields_by_name[name].default is None and isinstance(value, str) and value
        options[name] = Path(value) if is_path else value
        check_value(fields_by_name[name], options[name], f"{section}.{name}")
    return options


def config_of(options: Mapping[str, Any]) -> TrainConfig:
    """Return a TrainConfig with these options, by name, and defaults for the others; a section may raise ValueError."""
    return TrainConfig(**{name: build(section, options) for name, section in SECTIONS.items()})


def build(section: Any, options: Mapping[str, Any]) -> Any:
    """Return a section of TrainConfig with those of the options that are its fields."""
    return section(**{field.name: options[field.name] for field in fields(section) if field.name in options})
