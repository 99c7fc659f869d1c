"""`octavo compare`: train the same GPT as `octavo train`, with each of several recipes."""

from __future__ import annotations

import argparse

from octavo.cli.train import add_run, train, values_of
from octavo.train import BASELINE, RECIPES, TrainError

EXAMPLES = (
    "octavo compare --data corpus/ --recipes baseline dynamic mx --out runs/mine",
    "octavo compare --recipes baseline dynamic mx --out runs/mine --resume",
)
DEFAULTS = (BASELINE, "dynamic", "delayed")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``octavo compare``."""
    text, default = f"some of {', '.join(RECIPES)}", " ".join(DEFAULTS)
    add_run(parser, "--recipes", text, default, nargs="+", choices=RECIPES)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run ``octavo compare``."""
    values = values_of(options)
    if "recipe" in values and "recipes" not in values:
        raise TrainError(f"{options.config} gives a recipe, and octavo compare needs several: add --recipes")
    return train(values, values.get("recipes", DEFAULTS), arguments)
