"""The second draw of kinds of fault: faults that users meet, and that are not among the first 32.

They were written down before the second rules of octavo.inspect were made, and run once after that. Then they were
opened: today's rules were made with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from benchmarks.training.causes import (
    ANY,
    BEFORE,
    CHECKPOINT,
    DATA,
    INNER,
    SKIP,
    Do,
    Fault,
    Training,
    at,
    input_of,
    number,
    one,
    times,
    weight,
)

SGD = {"optimizer_of": torch.optim.SGD, "lr": 0.1, "clip": 0.0}
LAST_OF_BLOCK = ("blocks.0.mlp.fc2", "blocks.0.mlp.experts.down")


def unknown(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace most tokens by token 0, as if they were out of the vocabulary."""
    return (tokens * (tokens % run.other(5, 2, 3, 10) == 0) if run.begun else tokens), targets


def padded(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace three quarters of each sequence by padding, which the loss counts."""
    there = torch.arange(tokens.shape[1]) < tokens.shape[1] // (run.other(4, 2, 8) if run.begun else 1)
    return tokens * there, targets * there


def zero_norm(run: Training) -> None:
    """Set the weight of a norm to zeros, as if loaded so; it does not train."""
    run.model.get_submodule(run.layer("qkv.linear").replace("linear", "norm")).weight.data.zero_()


def left_out(run: Training) -> None:
    """Leave out a weight, as one that was made after the optimizer."""
    param = run.model.get_submodule(run.layer(*INNER)).weight
    for group in run.optimizer.param_groups:
        group["params"] = [each for each in group["params"] if each is not param]
    run.optimizer.state.pop(param, None)


def kept_gradients(run: Training) -> None:
    """Leave out zero_grad from then on."""
    clear = run.optimizer.zero_grad
    run.optimizer.zero_grad = lambda: clear() if not run.begun else None


def decay_without_rate(run: Training) -> None:
    """Decay weights by 0.1 a step, as an optimizer that does not multiply the decay by the learning rate."""
    run.optimizer.param_groups[0]["weight_decay"] = run.other(0.1, 0.03, 0.2, 0.5) / run.lr


def moments_lost(run: Training) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def detached(run: Training) -> None:
    """Put a detach() between the blocks."""
    run.model.blocks[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),) if run.begun else None)


def scheduled(factor: Callable[[Training, int], float]) -> Do:
    """Return a schedule by the steps that are recorded."""
    return lambda run: vars(run).update(schedule=lambda step: factor(run, max(0, step - BEFORE)))


HELD_OUT: Mapping[str, Fault] = {
    "tokens out of the vocabulary": Fault(("batch", "labels"), "", DATA, batch=unknown),
    "padding in the loss": Fault(("batch", "labels", "repeats"), "", DATA, batch=padded),
    "accumulation not divided": Fault(
        ("gradients",),
        "",
        ("clip_grad_norm_", "divide", "mean"),
        SGD,
        loss=times(8, 4, 16, 32, every=True),
    ),
    "zero_grad forgotten": Fault(("gradients",), "", ("zero_grad",), SGD, begin=kept_gradients),
    "norm's weight at zero": Fault(
        ("dead units", "overwritten"), ("qkv.linear",), ("initial", "norm", *CHECKPOINT), before=at(zero_norm, True)
    ),
    "schedule past its end": Fault(
        ("learning rate",), "", ("lr",), begin=scheduled(lambda run, step: 1 - step / run.at)
    ),
    "schedule that grows": Fault(
        ("learning rate",),
        "",
        ("lr",),
        begin=scheduled(lambda run, step: run.other(1.7, 1.3, 2.0, 3.0) ** max(0, step - run.at)),
    ),
    "optimizer without a weight": Fault(
        ("frozen",), INNER, ("optimizer", "param_groups", "parameters()"), begin=left_out
    ),
    "decay not times lr": Fault(("decay",), "", ("weight_decay",), before=at(decay_without_rate)),
    "bit flip in a weight": Fault(
        ("overwritten",), ANY, CHECKPOINT, before=at(weight(number(2.0**20, 2.0**10, 2.0**40, -(2.0**20))))
    ),
    "moments lost": Fault(("state",), "", ("load_state_dict",), before=at(moments_lost)),
    "detached block": Fault(("frozen",), LAST_OF_BLOCK, ("requires_grad", "detach", "no_grad"), begin=detached),
    "NaN in an activation": Fault(
        ("nonfinite input",), INNER, SKIP, begin=input_of(one(math.nan), lambda run: run.step == run.at, *INNER)
    ),
}
