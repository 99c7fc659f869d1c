"""`octavo plan`: predict a training step's time and memory in each recipe, on one device or a mesh of GPUs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import cost
from octavo.cli.options import add_flags, flag_of, option_errors
from octavo.cost import Rates, from_flags
from octavo.cost.mesh.plan import plan as plan_on_mesh
from octavo.cost.rates import PlanError, with_attention
from octavo.cost.steps import estimates
from octavo.cost.verdict import change_that_fits, describe_plan, fits
from octavo.recipes import NAMED
from octavo.train import GPT, ModelConfig, StateConfig
from octavo.train.config import build, or_none

EXAMPLES = (
    "octavo plan path/to/config.json --tokens 16384 --context 8192 --device H100",
    "octavo plan --width 4096 --layers 32 --heads 32 --context 4096 --device B200",
    "octavo plan path/to/config.json --device H100 --algorithm muon --moments fp8 --master split24",
    "octavo plan path/to/config.json --device H100 --fuse --attention cudnn --loss chunked "
    "--head dynamic_with_output_hp",
    "octavo plan path/to/config.json --device H100 --gpus 64 --mesh fsdp=8,tensor=8",
)
STATE = ("algorithm", "moments", "master", "weight_storage", "update_in_backward")  # fields of StateConfig
OF_DEVICE = ("head", "attention", "loss")  # options for a step on one device alone, besides those of STATE
# arguments of plan_on_mesh, with what they are where the flag is not given
OF_MESH = {"mesh": None, "micro_batches": None, "recompute": None, "checkpoint_in_fp8": False}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``octavo plan``."""
    parser.usage = f"{parser.prog} [OPTIONS] [CONFIG]"
    help = "a Hugging Face config.json, or its folder, which transformers reads (pip install transformers); it takes "
    help += "--context (default: a GPT by the sizes below)"
    parser.add_argument("model", nargs="?", type=Path, metavar="CONFIG", help=help)
    help = "of a step on one device, or for each GPU (default: the sequences in 16384, or one if it is longer)"
    parser.add_argument("--tokens", type=int, metavar="N", help=help)
    help = "H100, H200 or B200, by their known rates (default: this one, by what `octavo info --measure` found)"
    parser.add_argument("--device", metavar="NAME", help=help)
    parser.add_argument("--fuse", action="store_true", help="predict as octavo.convert(..., fuse=True) converts")
    help = "recipe of the layer that computes logits, high_precision for bf16 (default: each recipe's own)"
    parser.add_argument("--head", choices=NAMED, metavar="RECIPE", help=help)
    help = "whose attention, by published rates of Hopper (default: flash, FlashAttention-2, which torch takes)"
    parser.add_argument("--attention", choices=("flash", "cudnn"), help=help)
    help = "chunked: logits are computed in chunks with their loss, as octavo.nn.linear_cross_entropy does"
    parser.add_argument("--loss", choices=("chunked",), help=help)
    help = "plan a step on N GPUs in servers of 8; without --mesh, find the fastest mesh that fits"
    parser.add_argument("--gpus", type=int, metavar="N", help=help)
    help = "ranks by kind, such as fsdp=8,tensor=8: fsdp, replicate, tensor, pipeline, context, expert"
    parser.add_argument("--mesh", metavar="KIND=RANKS,...", help=help)
    help = "of a rank of data parallelism in a step on a mesh (default: one for each sequence; without --mesh as many "
    help += "as is fastest)"
    parser.add_argument("--micro-batches", type=int, metavar="N", help=help)
    help = "share of layers whose activations are checkpointed on a mesh, 0 to 1 (default: 0; without --mesh 0 or 1, "
    help += "the faster)"
    parser.add_argument("--recompute", type=float, metavar="SHARE", help=help)
    help = "these layers keep their input as octavo.checkpoint_in_fp8 does"
    parser.add_argument("--checkpoint-in-fp8", action="store_true", help=help)
    add_flags(parser, ModelConfig)
    add_flags(parser, StateConfig, STATE)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print how long a training step would take, in how much memory, and whether FP8 pays."""
    logging.disable(logging.WARNING)  # nothing is computed, so warnings about emulation and imports don't matter
    try:
        print(_text(options))
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _text(options: argparse.Namespace) -> str:
    """Return the plan of the options, whose first line says what is planned."""
    with option_errors():
        config, state = build(ModelConfig, vars(options)), build(StateConfig, vars(options))
    _require_consistent(options, state)
    model, context = _model_of(options, config)
    rates = cost.rates_of(options.device)
    if options.attention is not None:
        rates = with_attention(rates, options.attention)
    inputs = from_flags.tokens_of(options.tokens, context)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    title = f"{size:.3g} B parameters, {len(inputs[0]) * (options.gpus or 1)} sequences of {context} tokens"
    title += f", by {state.algorithm}" * (state != StateConfig())
    if options.gpus is None:
        return _on_one_device(title, model, inputs, rates, options, state)
    of_mesh = {name: getattr(options, name) for name in OF_MESH}
    of_mesh |= {"gpus": options.gpus, "fuse": options.fuse, "algorithm": state.algorithm}
    of_mesh |= {"context": context, "sequences": len(inputs[0]) * options.gpus}
    return f"{title}\n{plan_on_mesh(model, rates, **of_mesh).text()}"


def _require_consistent(options: argparse.Namespace, state: StateConfig) -> None:
    """Raise PlanError for options that are for another kind of model, or of step, than the one planned."""
    sizes = vars(options).keys() & ModelConfig.__dataclass_fields__.keys() - {"context"}
    if options.model is not None and sizes:
        flags = ", ".join(sorted(map(flag_of, sizes)))
        raise PlanError(f"{flags}: the model's sizes are those of {options.model}: leave out one or the other")
    if options.gpus is None:
        if any(getattr(options, name) is not default for name, default in OF_MESH.items()):
            raise PlanError(f"{_flags([*OF_MESH])} are for a step on several GPUs: add --gpus")
    elif state != StateConfig(algorithm=state.algorithm) or any(getattr(options, name) for name in OF_DEVICE):
        flags = _flags(STATE[1:] + OF_DEVICE)
        raise PlanError(f"{flags} are for a step on one device; with --gpus it says what FP8 brings")


def _model_of(options: argparse.Namespace, config: ModelConfig) -> tuple[nn.Module, int]:
    """Return the model that the options name, without memory, and the tokens of one of its sequences."""
    if options.model is not None:
        model = from_flags.from_hugging_face(options.model)
        return model, getattr(options, "context", None) or from_flags.context_of(model)
    with torch.device("meta"):
        return GPT(config).bfloat16(), config.context


def _flags(names: Sequence[str]) -> str:
    """Return options' flags as words: "--mesh, --micro-batches and --recompute"."""
    *flags, last = map(flag_of, names)
    return f"{', '.join(flags)} and {last}"


def _on_one_device(
    title: str, model: nn.Module, inputs: tuple[Tensor], rates: Rates, options: argparse.Namespace, state: StateConfig
) -> str:
    """Return the title with the options of a step on one device, its plan, and what to change if none fits."""
    of_optimizer: dict[str, Any] = {"algorithm": state.algorithm, "outstanding": state.outstanding_bytes}
    of_optimizer |= {"moments": state.moments, "master": or_none(state.master)}
    has_options = state != StateConfig()
    words = [f"moments {state.moments}, master {state.master}"] * has_options
    words += ["weights in FP8 under the recipes"] * (state.weight_storage == "fp8")
    words += [f"updates in backward by {state.update_in_backward}"] * (state.outstanding_bytes is not None)
    words += [f"head {options.head}"] * bool(options.head) + ["chunked loss"] * bool(options.loss)
    settings: dict[str, Any] = {"head": options.head, "chunked_loss": options.loss == "chunked", "fuse": options.fuse}
    settings["weight_storage"] = or_none(state.weight_storage)
    settings["optimizer"] = from_flags.optimizer_of(model, **of_optimizer) if has_options else torch.optim.AdamW
    steps = estimates(model, inputs, rates, **settings)
    lines = [", ".join([title, *words]), describe_plan(steps, rates)]
    if not fits(steps, rates):
        lines.append(change_that_fits(model, inputs, rates, of_optimizer, **settings))
    return "\n".join(lines)
