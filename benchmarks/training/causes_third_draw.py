"""The third draw of kinds of fault: what users of FP8 report.

They were picked by reports of Megatron-LM, Transformer Engine, torchtitan, torchao, transformers and others, by someone
who had not read the rules, and each was seen to leave a trace in its record. The first three sets of rules had not seen
them, later ones have. Where no cause says what happened, the nearest one is expected.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.training.causes import (
    ALL,
    BEFORE,
    CHECKPOINT,
    DATA,
    DELAYED,
    INNER,
    SIZES,
    SKIP,
    Fault,
    Training,
    at,
    batches,
    input_of,
    times,
    weight,
)
from octavo import recipes

CASTS, MEAN = ("Cast(", "recipes.", "None"), ("divide", "mean", "accumul")
OF_OPTIMIZER = ("optimizer", "param_groups", "parameters()")
SCALED = (1024.0, 64.0, 256.0, 65536.0)  # by a GradScaler


def without_scales(run: Training) -> None:
    """Set delayed scales to 1, as a checkpoint that lacks them leaves them in other libraries."""
    for name in run.layers():
        run.model.get_submodule(name).delayed_scale.fill_(1)


def rounded_up(run: Training) -> None:
    """Multiply each row by a scale that was rounded up to a power of two after the row was divided by it."""
    for name in run.layers():
        octaves = run.weight(name).abs().amax(-1, keepdim=True).log2()
        run.weight(name).mul_(2 ** (octaves.ceil() - octaves))


def interleaved(run: Training) -> None:
    """Store queries and keys so that rotary pairs are neighbours, as other code does."""
    rows = run.weight(run.layer("qkv.linear"))[: 2 * SIZES["width"]]
    rows.copy_(rows.unflatten(0, (2 * SIZES["heads"], 2, -1)).transpose(1, 2).flatten(0, 2))


def from_scratch(run: Training, w: Tensor) -> None:
    nn.init.normal_(w, std=float(w.std()) * run.other(1, 0.5, 2))


def steps_lost(run: Training) -> None:
    for state in run.optimizer.state.values():
        state["step"].zero_()


def of_copies(run: Training) -> None:
    """Train by an optimizer that was made before the parameters were wrapped, and has others."""
    run.optimizer.state.clear()
    for group in run.optimizer.param_groups:
        group["params"] = [nn.Parameter(param.detach().clone()) for param in group["params"]]


def unscaled_late(run: Training) -> None:
    """Divide gradients by the loss scale after they were clipped."""

    def unscale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups if run.begun else ():
            for param in group["params"]:
                param.grad /= run.other(*SCALED)

    run.optimizer.register_step_pre_hook(unscale)


def repeated_byte(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace every sequence by its first byte, again and again."""
    same = tokens[:, :1].expand_as(tokens)
    return (same, same) if run.step == run.at else (tokens, targets)


def overflown(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    numbers = run.other(64, 16, 32, 96)
    return (tokens % numbers, targets % numbers) if run.begun else (tokens, targets)


def cut(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    count = run.other(1, 2, 3) if run.begun else len(tokens)
    return tokens[:count], targets[:count]


def against_balance(run: Training) -> None:
    """Move the biases of a router to the experts that have too many tokens."""
    mixture = run.model.get_submodule(run.layer("gate_up").removesuffix(".experts.gate_up"))
    mixture.bias += run.other(0.3, 0.1, 0.2, 1.0) * (mixture.load / mixture.load.float().mean() - 1)
    mixture.load.zero_()


def growing_channel(run: Training) -> None:
    """Make a channel of SwiGLU's result 4 times as large in each of six steps."""
    layer = run.model.get_submodule(run.layer("fc2", "down"))
    channel, factor = torch.arange(layer.in_features) == run.other(5, *range(64)), run.other(4.0, 2.0, 3.0, 8.0)
    layer.register_forward_pre_hook(
        lambda _, inputs: (inputs[0] * factor ** (channel * min(6, max(0, run.step - run.at + 1))), *inputs[1:])
    )


THIRD_DRAW: Mapping[str, Fault] = {
    # TransformerEngine #982, #567
    "delayed scales not loaded": Fault(
        ("flushed", "stale"), ALL, (*CASTS, *CHECKPOINT), DELAYED, before=at(without_scales)
    ),
    # transformers #46763
    "stored scales rounded up": Fault(("overwritten",), ALL, CHECKPOINT, before=at(rounded_up)),
    # transformers #28073
    "weight not in the checkpoint": Fault(("overwritten",), INNER, CHECKPOINT, before=at(weight(from_scratch, *INNER))),
    # transformers #39687, nanochat #264
    "rotary pairs interleaved": Fault(("overwritten", "ranks"), ("qkv.linear",), CHECKPOINT, before=at(interleaved)),
    # OneVision-Encoder #65, tt-metal #53212
    "optimizer's steps lost": Fault(("state",), "", ("load_state_dict",), before=at(steps_lost)),
    # accelerate #3256, pytorch #149205
    "optimizer of other parameters": Fault(("frozen",), ALL, OF_OPTIMIZER, begin=of_copies),
    # pytorch/examples #1196
    "clipped before unscaled": Fault(
        ("gradients", "loss scale"),
        "",
        ("clip_grad_norm_", "scale"),
        begin=unscaled_late,
        loss=times(*SCALED, every=True),
    ),
    # transformers #35203
    "loss divided twice": Fault(("gradients",), "", MEAN, loss=times(1 / 64, 1 / 16, 1 / 32, 1 / 256, every=True)),
    # OLMo-core #657, Automodel #3796
    "batch without labels": Fault(
        ("batch", "labels", "nonfinite loss"),
        "",
        (*DATA, *SKIP),
        batch=lambda run, x, y: (x, torch.full_like(y, -100, dtype=torch.long) if run.step == run.at else y),
    ),
    # repeated n-grams of OLMo 2, arXiv 2501.00656
    "one byte repeated": Fault(("batch",), "", DATA, batch=repeated_byte),
    # transformers #2825
    "token numbers that overflow": Fault(("batch", "labels"), "", DATA, batch=overflown),
    # litgpt #1712
    "three batches in turn": Fault(
        ("repeats",),
        "",
        DATA,
        batch=lambda run, *batch: (
            batches(run.seed).training(BEFORE + run.step % run.other(3, 2, 4)) if run.begun else batch
        ),
    ),
    # coqui-ai/Trainer #120: accumulation that has no effect
    "one sequence of eight": Fault(("batch",), "", DATA, batch=cut),
    # Automodel #1408 has one without effect, which would take longer
    "balance with the wrong sign": Fault(
        ("idle expert",), ("gate_up",), ("balance",), models=("experts",), after=at(against_balance, True)
    ),
    # SwiGLU's outliers, arXiv 2409.12517
    "growing channel": Fault(("clipped", "stale", "outliers"), ("fc2", "down"), CASTS, DELAYED, begin=growing_channel),
    # TransformerEngine #1169
    "short history": Fault(
        ("stale", "clipped"),
        INNER,
        ("Cast(",),
        {"recipe": recipes.delayed(history_length=1)},
        begin=input_of(
            lambda run, x: x * run.other(16, 8, 32, 64), lambda run: run.begun and run.step % 2 == 1, *INNER
        ),
    ),
    # mcore-bridge #125
    "transposed weight at zero": Fault(
        ("frozen",),
        ("fc1", "gate_up"),
        ("requires_grad", "detach", "no_grad"),
        begin=input_of(lambda run, x: x.detach() + 0 * x, lambda run: run.begun, "fc2", "down"),  # next to the layer
    ),
}
