"""Situations of one process: what is made of a model, what fails, and what is written by hand."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import octavo
from octavo.errors import UnsupportedOpError
from tests.support.seams.made import Made
from tests.support.seams.situations import situation
from tests.support.seams.verdicts import Documented, Refused, Sound

COPIES, FAULTS, WRITES = "Copies and files", "Faults", "Writes by hand"
STORED = ("FP8 weights", "FP8 weights in blocks")
FROM_CODES = Sound(15, "a state dict holds codes, so masters begin as these read")
NOT_BY_HAND = {
    STORED: Refused(
        UnsupportedOpError, r"\.copy_\(values\)", "a weight in FP8 is written as codes and scales together"
    ),
    "FP8 gradients": Refused(UnsupportedOpError, r"\.grad\.dequantize", "a gradient in FP8 is not read by itself"),
    "updates in backward": Refused(UnsupportedOpError, "update_in_backward", "the gradient was used in backward"),
}


@situation("deepcopy", COPIES)
def deep_copy(made: Made) -> None:
    """Train, and go on with a copy and a new optimizer; a twin has a new optimizer only."""
    made.train(2)
    model = made.model
    made.take(copy.deepcopy(model) if made.is_library else model)
    made.train(2)


@situation("a pickled module", COPIES)
def pickled(made: Made) -> None:
    """torch.save of the whole module before training."""
    if made.is_library:
        file = io.BytesIO()
        torch.save(made.model, file)
        file.seek(0)
        made.take(torch.load(file, weights_only=False))
    made.train()


def _load(made: Made, assign: bool) -> None:
    """Back to what was saved, after a step; a twin takes no such step."""
    if made.is_library:
        state = copy.deepcopy(made.model.state_dict())
        made.begin()
        made.loss(made.call(made.data(9, rank=1))).backward()
        made.update()
        made.model.load_state_dict(state, assign=assign)
        made.step_number = 0
        made.take(made.model)
    made.train()


situation("load_state_dict", COPIES, exceptions={STORED: FROM_CODES})(functools.partial(_load, assign=False))
situation("load_state_dict(assign=True)", COPIES, exceptions={STORED: FROM_CODES})(
    functools.partial(_load, assign=True)
)


@situation(
    "an exponential moving average",
    COPIES,
    exceptions={
        (*STORED, "LoRA over FP8"): Refused(UnsupportedOpError, r"dequantize", "codes and scales average to no weight")
    },
)
def averaged(made: Made) -> None:
    """torch's AveragedModel, evaluated at the end."""
    average = AveragedModel(made.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        made.train(1)
        average.update_parameters(made.model)
    with torch.no_grad():
        made.note("output of the average", average.eval()(made.data(7)))


@situation("meta, to_empty, reset_parameters", COPIES)
def from_meta(made: Made) -> None:
    """A model without memory, then with, then initialised."""

    def initialise(model: nn.Module) -> None:
        torch.manual_seed(1)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    if made.is_library:
        with torch.device("meta"):
            model = made.converted(made.plain())
        initialise(model.to_empty(device="cpu"))
    else:
        plain = made.plain()
        initialise(plain)
        model = made.converted(plain)
    made.take(model)
    made.train()


@situation("an exception in forward", FAULTS)
def fails_in_forward(made: Made) -> None:
    """After the first part; then on with the next batch."""
    made.train(1)
    if made.is_library:
        handle = made.model[0].register_forward_hook(_fail)
        try:
            made.call(made.data(9))
        except MemoryError:
            handle.remove()
        made.model.zero_grad()
    made.train(2)


def _fail(*_: Any) -> None:
    raise MemoryError("out of memory")


@situation(
    "an exception in backward",
    FAULTS,
    exceptions={
        "updates in backward": Sound(10, "weights whose gradients came before the fault have been updated"),
    },
)
def fails_in_backward(made: Made) -> None:
    """After the second part's, whose history rolls; then zero_grad, and on with the next batch."""
    made.train(1)
    handle = made.model[1].register_forward_pre_hook(lambda module, x: (_Fails.apply(x[0]),))
    with contextlib.suppress(MemoryError):
        made.loss(made.call(made.data(9))).backward()
    handle.remove()
    made.model.zero_grad()
    made.train(2)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise MemoryError("out of memory")


@situation(
    "a batch with a NaN",
    FAULTS,
    exceptions={
        "updates in backward": Documented("weights.md#updates-during-backward", "its gradients have been used"),
    },
)
def not_a_number(made: Made) -> None:
    """In one row; its gradients are dropped, as by a loop that looks at the loss."""
    made.train(1)
    x = made.data(9)
    x[3, 5] = torch.nan
    made.loss(made.call(x)).backward()
    made.model.zero_grad()
    made.train(2)


def _descend(made: Made, write: Any, seen: Any = None) -> None:
    """Plain descent by hand, without an optimizer; then twice the weights, after one has stepped."""

    def wrote() -> None:
        made.model.zero_grad()
        if seen is not None:
            seen(made)

    made.train(1)
    for step in (5, 6):
        made.gradients(step)
        for parameter in made.model.parameters():
            if parameter.grad is not None:
                write(parameter, 0.05 * parameter.grad)
        wrote()
    made.train(1)
    for parameter in made.model.parameters():
        if parameter.requires_grad:
            write(parameter, -parameter.detach())
    wrote()
    made.train(2)


@situation(
    "descent through .data",
    WRITES,
    exceptions={
        **NOT_BY_HAND,
        "KeptWeights": Documented(
            "#writes-by-hand",
            "what `cast()` wrote last is what counts: call it, or `octavo.nn.invalidate(model)`, after the write; "
            "after any write, where a compiled or captured graph reads it",
        ),
    },
)
def descent_by_data(made: Made) -> None:
    """p.data -= lr * p.grad."""
    _descend(made, lambda parameter, change: parameter.data.sub_(change))


@situation("descent through .data, octavo.nn.invalidate", WRITES, exceptions=NOT_BY_HAND)
def descent_and_invalidate(made: Made) -> None:
    """Told of each."""

    def invalidate(made: Made) -> None:
        if made.is_library:
            octavo.nn.invalidate(made.model)
        made.wrote()

    _descend(made, lambda parameter, change: parameter.data.sub_(change), invalidate)


@situation("descent through torch._foreach_", WRITES, exceptions=NOT_BY_HAND)
def descent_by_foreach(made: Made) -> None:
    """torch._foreach_sub_."""
    _descend(made, lambda parameter, change: torch.no_grad()(torch._foreach_sub_)([parameter], [change]), Made.wrote)


@situation(
    "fewer rows through .data",
    WRITES,
    exceptions={
        (*STORED, "LoRA over FP8"): Refused(UnsupportedOpError, r"dequantize", "codes and scales are cut together")
    },
)
def fewer_rows(made: Made) -> None:
    """The last layer loses half its rows, and has a new optimizer."""
    made.train(2)
    for parameter, kept in made.feature.half(made.model):
        parameter.data = parameter.data[kept].clone()
    made.take(made.model)
    made.train(2)
