"""A run's options as a file: the `config.json` in its folder, and what `octavo train --config` reads, JSON or TOML.

    {"recipe": "delayed", "model": {"width": 192, "layers": 4}, "optimizer": {"steps": 1000}}

Sections are TrainConfig's parts. What a file leaves out has its default.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.distributed.files import replacing
from octavo.errors import first_line
from octavo.train.config import TrainConfig, check_recipe, hints, remedy
from octavo.train.errors import TrainError, train_errors

NAME = "config.json"
_OF_ONE_RUN = ("out", "resume")  # where it lies and that it goes on: not what another run is to repeat


def save(folder: Path, config: TrainConfig, recipe: str) -> None:
    """Write a run's options to `config.json` in its folder; without --out and --resume, which are its own."""
    sections: dict[str, Any] = {"recipe": recipe}
    for name, part in vars(config).items():
        sections[name] = {key: value for key, value in vars(part).items() if key not in _OF_ONE_RUN}
    with replacing(folder / NAME) as file:
        file.write(f"{json.dumps(sections, indent=2, default=lambda path: str(path.absolute()))}\n".encode())


def load(path: Path) -> dict[str, Any]:
    """The options that a file gives, by their names; `recipe` (a name) and `recipes` (a list of names) among them.

    Args:
        path: JSON, or TOML where it ends in .toml; or the folder of a run, whose `config.json` it is.

    Raises:
        TrainError: it can't be read, or holds something that is no option, or a value that an option can't have.
    """
    file = path / NAME if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise TrainError(f"{file}: {error.strerror}: give a run's folder, its {NAME}, or a TOML file") from error
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
