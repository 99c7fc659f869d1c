"""`octavo inspect`: say what FP8 does to a recorded training, or would do to a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.inspect.command import Subject, add_arguments, asked, entry_point, inspect_command, what_if_command
from octavo.inspect.what_if import WhatIfError
from octavo.train import Batches, checkpoint, load_corpus, next_byte_loss
from octavo.train.config import RULES_FILE
from octavo.train.loop import RECORD, run_in, trained_model

EXAMPLES = (
    "octavo inspect runs/train-001/dynamic --html report.html",
    "octavo inspect runs/train-001/dynamic --live",
    "octavo inspect job:training --recipes dynamic,blockwise --loss 0.1% --write map.json",
)
BATCH, STEPS = 16, 2  # windows a step, and steps, of the text on which a run's model is measured


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``octavo inspect``."""
    parser.usage = f"{parser.prog} [OPTIONS] RECORD_OR_MODEL"
    add_arguments(parser)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print the findings of a record, or which layers of a model lose too much in FP8."""
    source = run_in(options.folder)
    is_run = checkpoint.RunFolder(source).holds_run()
    if options.against is not None and _is_record(other := run_in(options.against) / RECORD):
        options.against = other
    if options.apply:
        if not is_run:
            raise WhatIfError(f"--apply: {source} is no run of octavo train: give --write FILE")
        options.write = source / RULES_FILE
    record = source / RECORD if _is_record(source / RECORD) else None  # of a run
    options.folder = source
    if record is not None and not asked(options):
        options.folder = record
        return inspect_command(options)
    if is_run and not _is_record(source):
        return what_if_command(options, _run_as_subject(source, options.data), record)
    if source.exists() and (flags := asked(options)):
        raise WhatIfError(f"{', '.join(flags)}: {source} is a record, and these are for models")
    return inspect_command(options) if source.exists() else what_if_command(options, entry_point(str(source)))


def _is_record(folder: Path) -> bool:
    return (folder / "record.json").exists()


def _run_as_subject(run: Path, data: Path | None) -> Subject:
    """Return a run's model with some batches of its text, to be measured in each recipe."""
    model, corpus = trained_model(run), load_corpus(data)
    corpus.require(model.config)
    windows = Batches(corpus, model.config.context, BATCH, seed=0)
    batches = [windows.training(step) for step in range(STEPS)]
    return Subject(model, lambda model, batch: next_byte_loss(model(batch[0]), batch[1]), batches)
