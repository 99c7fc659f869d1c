"""The other commands: export, plan, inspect, tune, info."""

from __future__ import annotations

import argparse
import logging

from octavo.cli.options import flag_of, option_errors


def export(options: argparse.Namespace, arguments: list[str]) -> int:
    """Writes a run as ONNX, and says how near to octavo it is in onnxruntime."""
    import torch

    from octavo import export
    from octavo.train import Batches, load_corpus, next_byte_loss, trained

    model = trained.trained_model(options.source)
    corpus = load_corpus(options.data)
    corpus.require(model.config)
    tokens, targets = next(Batches(corpus, model.config.context, 16, 0).validation(16))
    written = export.to_onnx(
        model, (tokens.int(),), options.onnx, opset=options.opset, weights=getattr(torch, options.weights)
    )
    sqnr = export.sqnr_in_onnxruntime(model, tokens.int(), written)
    with torch.no_grad():
        ours = float(next_byte_loss(model(tokens), targets))
    theirs = float(next_byte_loss(export.run_onnx(written, tokens.int())[0], targets))
    size, in_bf16 = written.stat().st_size, 2 * sum(parameter.numel() for parameter in model.parameters())
    print(
        f"wrote {written}: {size:,} bytes, {size / in_bf16:.2f} of its weights in bf16\n"
        f"in onnxruntime: SQNR {sqnr:.1f} dB, validation loss {theirs:.4f} nats a byte (octavo {ours:.4f})"
    )
    return 0


def plan(options: argparse.Namespace, arguments: list[str]) -> int:
    """Says what a training step would take, and whether FP8 pays."""
    import torch

    from octavo.cost import command, estimate, rates_of
    from octavo.cost.estimate import work_of
    from octavo.cost.rates import PlanError
    from octavo.train import GPT, ModelConfig, config_file

    logging.getLogger("octavo").setLevel(logging.ERROR)  # nothing runs here, so nothing is emulated
    sizes = vars(options).keys() & ModelConfig.__dataclass_fields__.keys() - {"context"}
    if options.model is not None and sizes:
        flags = ", ".join(sorted(map(flag_of, sizes)))
        raise PlanError(f"{flags}: the model's sizes are those of {options.model}: leave out one or the other")
    with option_errors():
        config = config_file.build(ModelConfig, vars(options))
    rates, context = rates_of(options.device), config.context
    if options.model is not None:
        model = command.from_hugging_face(options.model)
        context = getattr(options, "context", None) or command.context_of(model)
    else:
        with torch.device("meta"):
            model = GPT(config).bfloat16()
    inputs = command.tokens_of(options.tokens, context)
    recipes = [None, *(make() for make in command.RECIPES.values())]
    print(f"{command.parameters_of(model)}, {len(inputs[0])} sequences of {context} tokens")
    work = work_of(model, inputs)
    print(command.describe_plan([estimate(model, inputs, recipe, rates, work=work) for recipe in recipes], rates))
    return 0


def inspect(options: argparse.Namespace, arguments: list[str]) -> int:
    """Says what a record shows, or which layers of a model can't stand FP8."""
    from octavo.inspect.command import asked, entry_point, inspect_command, what_if_command
    from octavo.inspect.effects import WhatIfError
    from octavo.train import checkpoint, inspection, trained

    source = options.folder = trained.run_in(options.folder)
    if (source / inspection.FOLDER / "record.json").exists() and not asked(options):
        source = options.folder = source / inspection.FOLDER
    if source.is_file() or (checkpoint.RunFolder(source).holds_run() and not (source / "record.json").exists()):
        own = source / inspection.FOLDER
        subject = trained.trained_subject(source, options.data)
        return what_if_command(options, subject, own if (own / "record.json").exists() else None)
    if source.exists() and (given := asked(options)):
        raise WhatIfError(f"{', '.join(given)}: {source} is a record, and these are for models")
    return inspect_command(options) if source.exists() else what_if_command(options, entry_point(str(source)))


def tune(options: argparse.Namespace, arguments: list[str]) -> int:
    """Measures the tiles of kernels here."""
    from octavo.tune.command import tune_here

    return tune_here(options)


def info(options: argparse.Namespace, arguments: list[str]) -> int:
    """Says what this machine has, and what it does where that is asked for."""
    from octavo.train import environment

    print(environment.describe())
    if options.measure:
        from octavo.cost import command, measure
        from octavo.cost.rates import keep

        print("\nmeasuring ...", flush=True)
        rates = measure()
        print(command.describe_rates(rates), f"\nkept in {keep(rates)}", sep="\n")
    return 0
