"""Steps of AdamW on one weight that are timed: what a step reads and writes, made from its gradient [R, C]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.gpu_timer import ON_GPU
from benchmarks.kernels.plain_cases import Case
from benchmarks.machine_code.compiled_optimizer import ADAM, stored_update, update
from octavo.granularity import PerBlock
from octavo.kernels.reference.optimizer_step import WeightUpdate
from octavo.kernels.triton.launch import config
from octavo.optim.moment import NAMED

Make = Callable[[tuple[int, int]], WeightUpdate]


def _places(one: WeightUpdate) -> list[tuple[Any, str]]:
    """Where the tensors are that a step reads and writes: (object, attribute's name)."""
    names = ("weight", "data", "rest", "scale_inv", "amax")
    parts = one.master, *one.moments
    return [(part, name) for part in parts for name in names if getattr(part, name, None) is not None]


def stored(one: WeightUpdate) -> tuple[Tensor, ...]:
    """The tensors that a step reads and writes."""
    return tuple(getattr(part, name) for part, name in _places(one))


def filled(tensor: Tensor, x: Tensor | None = None) -> Tensor:
    """With x, or zeros: a new state."""
    return tensor.zero_() if x is None else tensor.copy_(x)


def _case(make: Make) -> Case:
    def made(x: Tensor) -> WeightUpdate:
        with torch.device(x.device):
            return make((x.shape[0], x.shape[1]))

    def inputs(x: Tensor) -> tuple[Tensor, ...]:
        one = made(x)
        return filled(one.gradient, x), *map(filled, stored(one))

    def arguments(gradient: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        one = made(gradient)._replace(gradient=gradient)
        for (part, name), tensor in zip(_places(one), tensors, strict=True):
            setattr(part, name, tensor)
        return one, {}

    return Case("step", arguments, inputs=inputs, exact=ON_GPU)


def stepping(kernel: Callable[..., None], keeps_plans: bool) -> Callable[..., tuple[Tensor, ...]]:
    """A step as a function of ``_case``'s arguments, with results: what it has written."""

    def run(one: WeightUpdate, plans: dict[Any, dict[Any, Any]]) -> tuple[Tensor, ...]:
        kept = {"plans": plans.setdefault(config("optimizer_step", 64), {})} if keeps_plans else {}
        kernel([one], [ADAM], **kept)
        # torch's roots on a CPU are not always correctly rounded, which a remainder of 16 bits shows
        return tuple(tensor for tensor in stored(one) if ON_GPU or tensor.dtype != torch.int16)

    return run


CASES = {
    "AdamW fp8, split32": _case(lambda s: update(s, NAMED["fp8"], "split32", torch.bfloat16, torch.bfloat16)),
    "AdamW fp8, fp32": _case(lambda s: update(s, NAMED["fp8"], "fp32", torch.float32, torch.bfloat16)),
    "AdamW fp32, fp32": _case(lambda s: update(s, NAMED["fp32"], "fp32", torch.float32, torch.float32)),
    "AdamW fp8, E4M3 weight in blocks, split16": _case(lambda s: stored_update(s, "split16", PerBlock(128, 128))),
}
