"""The kinds of fault that no threshold of octavo.inspect was chosen by: ``random.Random(0).sample`` of all but three.

The three are a scaled weight, a NaN in a batch and a learning rate times ten: they were known to be misjudged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from benchmarks.training.causes import (
    ALL,
    ANY,
    AT,
    DATA,
    FIRST,
    Fault,
    Training,
    at,
    batch_with,
    gradient,
)


def untie(run: Training) -> None:
    run.model.head.weight = nn.Parameter(run.model.head.weight.detach().clone())


def decay_all(run: Training) -> None:
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 0.1


def wide_features(run: Training) -> None:
    """The first layer's input has features from 1 down to 2^-30, as raw numbers in different units."""
    layer = run.model.get_submodule(FIRST)
    scales = torch.logspace(0, -30, layer.in_features, 2)
    layer.register_forward_pre_hook(lambda _, arguments: (arguments[0] * scales, *arguments[1:]))


BFLOAT16 = {"dtype": torch.bfloat16, "lr": 1e-5}
SKIP = ("None", "Recovery", "skip")
HELD_OUT: Mapping[str, Fault] = {
    "untied weight": Fault(("untied",), "head", ("tie",), {"tied": True}, before=at(untie)),
    "inf in a batch": Fault(("batch",), "", DATA, begin=batch_with(math.inf)),
    "resumed without state": Fault(
        ("state",), "", ("load_state_dict",), before=at(lambda run: run.optimizer.state.clear())
    ),
    "inf in a gradient": Fault(("nonfinite grad_output",), ANY, SKIP, begin=gradient(math.inf)),
    "NaN in a gradient": Fault(("nonfinite grad_output",), ANY, SKIP, begin=gradient(math.nan)),
    "decay of norms": Fault(("decay",), "", ("weight_decay",), begin=decay_all),
    "learning rate x 0": Fault(
        ("learning rate",), "", ("lr",), before=lambda run: vars(run).update(lr=run.lr * (run.step < AT))
    ),
    "labels shifted": Fault(("labels",), "", DATA, batch=lambda run, x, y: (x, y.roll(int(run.step >= AT), 0))),
    "updates rounded off": Fault(("unmoved",), ALL, ("master",), BFLOAT16),
    "first layer in FP8": Fault(("flushed",), FIRST, ("None", "recipes.", "Cast("), begin=wide_features),
    "no warm-up": Fault(("warm-up",), "", ("warm",), {"warmup": 0, "lr": 3e-2}, fresh=True),
}
