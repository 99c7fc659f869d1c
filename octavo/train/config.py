"""The options of a run: eight frozen dataclasses, checked when built; the CLI's flags are made from their fields.

A field's annotation says what it may be (a Literal: one of these strings), its metadata what it means and its limits.
As a file, JSON or TOML, they are the `config.json` in a run's folder, and what `octavo train --config` reads. Sections
are TrainConfig's parts; what a file leaves out has its default:

    {"recipe": "delayed", "model": {"width": 192, "layers": 4}, "optimizer": {"steps": 1000}}

Example:
    >>> from octavo.train import ModelConfig
    >>> ModelConfig(width=100, heads=3)
    Traceback (most recent call last):
    ...
    ValueError: width 100 is not a multiple of 2 x heads (heads 3): choose width 96 or 102
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from octavo.distributed.files import replacing
from octavo.errors import OctavoError, first_line
from octavo.recipes import NAMED

CONFIG_FILE = "config.json"
_OF_ONE_RUN = ("out", "resume")  # where it lies and that it goes on: not what another run is to repeat


class TrainError(OctavoError):
    """A run cannot start or go on; the message names the values and the remedy."""


class RunCheckpointError(TrainError):
    """A checkpoint cannot be written, read or continued."""


class DivergedError(TrainError):
    """The loss or the gradients stopped being finite, or the loss ran away."""


@contextlib.contextmanager
def train_errors(before: str = "") -> Iterator[None]:
    """Makes a ValueError in the block a TrainError of the same words, ``before`` them."""
    try:
        yield
    except ValueError as error:
        raise TrainError(f"{before}{error}") from error


VOCABULARY = 256  # bytes
BASELINE = "baseline"  # the model as it is built; such a run is named after its dtype:
DTYPES = {"bfloat16": "bf16", "float32": "float32"}
UNCONVERTED = (BASELINE, *DTYPES.values())
ALONE, FSDP, DDP = "none", "fsdp", "ddp"
AUTO = "auto"
RECIPES = (*UNCONVERTED, *(name for name in NAMED if name != "default"))
SMALLEST = math.ulp(0.0)  # above 0
LARGEST = 2**31 - 1  # torch indexes with int64, but no size below may need it


def option(default: Any, help: str, *limits: float, metavar: str = "") -> Any:
    """A dataclass field: its flag's help, and its limits: the lowest integer, or lowest and largest float.

    ``metavar`` is what the flag's help calls a value (default: N for an integer, X for a float).
    """
    return field(default=default, metadata={"help": help, "limits": limits, "metavar": metavar})


@cache
def hints(config: type) -> dict[str, Any]:
    """The annotations of a dataclass, evaluated."""
    return typing.get_type_hints(config)


def choices(config: type, name: str) -> tuple[str, ...]:
    """The strings that a field may be: those of its Literal; empty for a field of another kind."""
    return typing.get_args(hint) if typing.get_origin(hint := hints(config)[name]) is Literal else ()


def remedy(config: type, own: dataclasses.Field[Any], value: object) -> str | None:
    """What to choose where a value is not what a field may be, or None where it is."""
    default, limits = own.default, own.metadata["limits"]
    if known := choices(config, own.name):
        return None if value in known else f"{', '.join(known[:-1])} or {known[-1]}"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        fits = type(value) is int and limits[0] <= value <= LARGEST
        return None if fits else f"a whole number from {limits[0]} to {LARGEST}"
    if not isinstance(default, float):
        return None if isinstance(value, hints(config)[own.name]) else "a Path" if default is None else "a string"
    low, high = limits
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    return None if fits else f"a number {'above 0' if low == SMALLEST else f'from {low:g}'} up to {high:g}"


class _Checked:
    def __post_init__(self) -> None:
        for own in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, own.name)
            if (choice := remedy(type(self), own, value)) is not None:
                raise ValueError(f"{own.name} is {value!r}: choose {choice}")


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

        Of experts, each one's: so many by top_k, so that a byte takes as many FLOPs as without experts.
        """
        parts = 3 * self.top_k if self.experts else 3
        return -(-8 * self.width // parts // 32) * 32

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        mlp = 3 * self.width * self.hidden
        mlp = self.experts * (mlp + self.width) if self.experts else mlp  # a row of the router each
        block = 4 * self.width**2 + mlp + 2 * self.width
        return self.layers * block + 2 * VOCABULARY * self.width + self.width


@dataclass(frozen=True)
class DataConfig(_Checked):
    """Which text, and how much of it in each step."""

    data: Path | None = option(  # noqa: RUF009 (it is a field)
        None, "text file, or folder of text files (default: Python's own standard library)", metavar="PATH"
    )
    batch: int = option(16, "sequences in each step", 1)
    micro_batches: int = option(1, "parts in which a step's batch is computed; their gradients are summed", 1)
    eval_windows: int = option(256, "validation sequences, the same ones each time", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch % self.micro_batches:
            raise ValueError(
                f"batch {self.batch} does not divide into {self.micro_batches} micro_batches: "
                f"choose a batch of {math.ceil(self.batch / self.micro_batches) * self.micro_batches}"
            )


@dataclass(frozen=True)
class OptimizerConfig(_Checked):
    """AdamW, with a linear warmup and a cosine decay."""

    steps: int = option(200, "optimizer steps", 1)
    lr: float = option(1.5e-3, "peak learning rate", SMALLEST, 1e3, metavar="RATE")
    final_lr: float = option(0.01, "last learning rate, as a part of the peak", 0, 1, metavar="PART")
    warmup: float = option(0.1, "part of the steps in which the learning rate rises", 0, 1, metavar="PART")
    weight_decay: float = option(0.1, "decoupled weight decay of the matrices", 0, 1)
    beta1: float = option(0.9, "decay of AdamW's first moment", 0, 0.999999)
    beta2: float = option(0.95, "decay of AdamW's second moment", 0, 0.999999)
    clip: float = option(1.0, "largest norm of all gradients together (0: no clipping)", 0, 1e9)


def or_none(value: str) -> str | None:
    """What an option says, None for "none"."""
    return None if value == "none" else value


@dataclass(frozen=True)
class StateConfig(_Checked):
    """In how many bytes the optimizer keeps its state, and the weights, and when that changes."""

    moments: Literal["fp32", "bf16", "fp8"] = option(
        "fp32", "how AdamW's moments are kept: fp32 (torch's own optimizer), bf16 or fp8"
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
    gradient_storage: Literal["none", "fp8"] = option(
        "none", "fp8: gradients are kept in FP8 between backward and update"
    )
    schedule: str = option(
        "", "phases of the run: fp8-then-bf16@0.7 (from 70 % of its steps on), or auto", metavar="PHASES"
    )
    recover: int = option(
        0,
        "skip a step whose loss jumps or is not finite, and compute so many after it in high precision (0: never)",
        0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_storage == "fp8" and self.master == "split32":
            raise ValueError("master is 'split32': weights that live in FP8 take auto, split16, split24, fp32, ...")
        if self.outstanding_bytes is not None and self.gradient_storage == "fp8":
            raise ValueError("gradient_storage keeps gradients that update_in_backward does not: choose one")
        if self.outstanding_bytes is not None and self.recover:
            raise ValueError("recover looks at all gradients, which update_in_backward does not keep: choose one")
        if self.schedule:
            check_schedule(self.schedule)

    @property
    def bf16_weights(self) -> bool:
        """Whether the model's weights are bf16."""
        return self.master not in ("auto", "fp32")

    @property
    def outstanding_bytes(self) -> int | None:
        """Bytes of gradients that wait for an update in backward (a KB is 2^10); None: updates come after it."""
        text = self.update_in_backward
        if not text:
            return None
        if (match := re.fullmatch(r"(\d+)(KB|MB|GB|)", text.strip().upper())) is None:
            raise ValueError(f"update_in_backward is {text!r}: choose a number of bytes, such as 64MB or 0")
        return int(match[1]) << {"": 0, "KB": 10, "MB": 20, "GB": 30}[match[2]]


@dataclass(frozen=True)
class RunConfig(_Checked):
    """Where and how a run is computed, and what it leaves behind."""

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
    resume: bool = option(
        False,
        "continue the run in the folder --out (default: the newest one under runs/), or begin one",
    )
    checkpoint_every: int = option(100, "steps between checkpoints (0: only at the end and when interrupted)", 0)
    eval_every: int = option(80, "steps between validations (0: only at the end)", 0)


@dataclass(frozen=True)
class RanksConfig(_Checked):
    """Which processes train together, and how they share the model."""

    shard: Literal["none", "fsdp", "ddp"] = option(
        "none", "fsdp (each rank has a part of the model) or ddp (the whole of it): train on the ranks of torchrun"
    )
    tensor_parallel: int = option(1, "under fsdp: ranks that share each product and each sequence", 1, metavar="RANKS")
    timeout: int = option(60, "seconds that ranks wait for each other before they give up", 1, metavar="SECONDS")


@dataclass(frozen=True)
class InspectConfig(_Checked):
    """What a run records of its casts to FP8."""

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
        if self.state.gradient_storage == "fp8" and self.ranks.shard == DDP:
            raise ValueError("gradient_storage fp8 rounds gradients before ddp exchanges them: choose shard fsdp")
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
        if self.ranks.shard != FSDP:
            raise ValueError(f"tensor_parallel {ranks} with shard {self.ranks.shard}: choose shard fsdp")
        shared = {"experts": model.experts} if model.experts else {"hidden": model.hidden}
        sizes = {"heads": model.heads, "context": model.context, "bytes": VOCABULARY} | shared
        if wrong := {name: size for name, size in sizes.items() if size % ranks}:
            raise ValueError(f"tensor_parallel {ranks} does not divide {wrong}: choose sizes that are multiples of it")

    def with_dtype(self, recipes: Collection[object], fastest: str) -> TrainConfig:
        """The options with the dtype that `auto` means: a recipe's or the master's, or where none says one the fastest.

        Raises:
            ValueError: recipes, dtype and master say different ones.
        """
        said = {dtype for dtype, name in DTYPES.items() if name in recipes or dtype == self.run.dtype}
        said |= {"bfloat16"} if self.state.bf16_weights else set()
        if len(said) > 1:
            raise ValueError(
                f"recipe {', '.join(map(str, recipes))}, dtype {self.run.dtype} and master {self.state.master} mean "
                f"both {' and '.join(DTYPES)}: choose one dtype, and recipe {BASELINE} for the run in it"
            )
        dtype: Any = said.pop() if said else fastest
        return dataclasses.replace(self, run=dataclasses.replace(self.run, dtype=dtype))

    def require_phases(self, recipes: Collection[object]) -> None:
        """Raise ValueError where a schedule or recovery would change nothing: without a recipe there is no FP8."""
        wanted = [
            f"{name} {getattr(self.state, name)}" for name in ("schedule", "recover") if getattr(self.state, name)
        ]
        if wanted and all(recipe in UNCONVERTED for recipe in recipes):
            raise ValueError(
                f"{wanted[0]} switches FP8 layers, and {', '.join(map(str, recipes))} has none: "
                "choose an FP8 recipe, such as dynamic; a phase of the schedule may be bf16"
            )

    def called(self, recipe: str) -> str:
        """What a run of this recipe is called: the baseline by the dtype, which must be settled."""
        return DTYPES[self.run.dtype] if recipe in UNCONVERTED else recipe

    def identity(self) -> dict[str, int | float | str]:
        """The options that decide the loss curve: a run can only be resumed with the same ones.

        The data's path is not among them (its contents are compared instead), nor device, compile, out, resume, the
        intervals, the ranks and what is recorded. The dtype must be settled.
        """
        parts = (self.model, self.data, self.optimizer, self.state)
        chosen = {name: value for part in parts for name, value in vars(part).items() if name != "data"}
        return chosen | {"seed": self.run.seed, "dtype": self.run.dtype}


def check_schedule(text: str) -> str:
    """Returns the schedule, or raises ValueError; see trainer.py's phases_of."""
    names = "|".join(("fp8", *RECIPES))
    if text != AUTO and re.fullmatch(rf"({names})(-then-({names})@(0?\.\d+))+", text) is None:
        raise ValueError(
            f"schedule is {text!r}: choose auto, or phases and the shares of the steps where they begin, such as "
            f"fp8-then-bf16@0.7 (fp8: the run's recipe; others: {', '.join(RECIPES)})"
        )
    return text


def check_recipe(name: str) -> str:
    """Returns the name, or raises ValueError with the known ones."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: choose from {', '.join(RECIPES)}")
    return name


def save_options(folder: Path, config: TrainConfig, recipe: str) -> None:
    """Write a run's options to `config.json` in its folder; without --out and --resume, which are its own."""
    sections: dict[str, Any] = {"recipe": recipe}
    for name, part in vars(config).items():
        sections[name] = {key: value for key, value in vars(part).items() if key not in _OF_ONE_RUN}
    with replacing(folder / CONFIG_FILE) as file:
        file.write(f"{json.dumps(sections, indent=2, default=lambda path: str(path.absolute()))}\n".encode())


def load_options(path: Path) -> dict[str, Any]:
    """The options that a file gives, by their names; `recipe` (a name) and `recipes` (a list of names) among them.

    Args:
        path: JSON, or TOML where it ends in .toml; or the folder of a run, whose `config.json` it is.

    Raises:
        TrainError: it can't be read, or holds something that is no option, or a value that an option can't have.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise TrainError(f"{file}: {error.strerror}: give a run's folder, its {CONFIG_FILE}, or a TOML file") from error
    except ValueError as error:
        raise TrainError(f"{file} is neither JSON nor, ending in .toml, TOML: {first_line(error)}") from error
    known = hints(TrainConfig)
    if not isinstance(content, dict) or (unknown := content.keys() - known - {"recipe", "recipes"}):
        held = f"{', '.join(sorted(unknown))} is no section" if isinstance(content, dict) else "it has no sections"
        raise TrainError(f"{file}: {held}: choose recipe, recipes, {', '.join(known)}")
    options: dict[str, Any] = {}
    for section, values in content.items():
        with train_errors(f"{file}: "):
            options |= _section(known[section], section, values) if section in known else _recipes(section, values)
    return options


def _recipes(key: str, value: Any) -> dict[str, Any]:
    names = [value] if key == "recipe" else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} is {value!r}: choose {'a name' if key == 'recipe' else 'a list of names'}")
    for name in names:
        check_recipe(name)
    return {key: value}


def _section(part: type, section: str, values: Any) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(part)}
    if not isinstance(values, dict) or values.keys() - fields:
        wrong = sorted(values.keys() - fields) if isinstance(values, dict) else [repr(values)]
        raise ValueError(f"{section} has no option {', '.join(wrong)}: choose {', '.join(fields)}")
    found = {}
    for name, value in values.items():
        found[name] = Path(value) if fields[name].default is None and isinstance(value, str) and value else value
        if (choice := remedy(part, fields[name], found[name])) is not None:
            raise ValueError(f"{section}.{name} is {value!r}: choose {choice}")
    return found


def config_of(options: Mapping[str, Any]) -> TrainConfig:
    """All options, of some given by name; the others have their defaults.

    Raises:
        ValueError: options that contradict each other, or that can't be.
    """
    return TrainConfig(**{section: build(part, options) for section, part in hints(TrainConfig).items()})


def build(part: type, options: Mapping[str, Any]) -> Any:
    """One part of TrainConfig, of options by name; see `config_of`."""
    names = (field.name for field in dataclasses.fields(part))
    return part(**{name: options[name] for name in names if name in options})
