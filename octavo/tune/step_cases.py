"""Steps of AdamW on one weight that are timed: what a step reads and writes, made from its gradient [R, C]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.granularity import Granularity, PerBlock
from octavo.kernels.reference.optimizer_step import AdamGroup, WeightUpdate
from octavo.kernels.triton.launch import config
from octavo.optim.masters import NAMED as MASTERS
from octavo.optim.masters import OF_FP8_WEIGHTS
from octavo.optim.moment import NAMED, Moment, as_matrix
from octavo.tensor.stored_weight import StoredWeight
from octavo.tune.plain_cases import Case
from octavo.tune.timing import ON_GPU

ADAM = AdamGroup(1e-3, 0.9, 0.999, 1e-8, 0.01, False, True, True)

Make = Callable[[tuple[int, int]], WeightUpdate]


def update(
    shape: tuple[int, int], moments: tuple[Moment, ...], master: str | None, dtype: torch.dtype, grad: torch.dtype
) -> WeightUpdate:
    """A weight's update, of memory that is never read."""
    weight = torch.empty(shape, dtype=dtype)
    state: dict[str, Tensor] = {}
    for number, moment in enumerate(moments):
        state |= moment.new_state(str(number), weight.shape, weight.device)
    small = MASTERS[master].new_state(torch.empty(1, 1, dtype=dtype))
    if (rest := small.pop("master_rest", None)) is not None:
        small["master_rest"] = torch.empty(*shape, *rest.shape[2:], dtype=rest.dtype)
    state |= small
    stored = tuple(moment.for_kernel(str(number), state) for number, moment in enumerate(moments))
    kept = MASTERS[master].for_kernel(as_matrix(weight), state)
    return WeightUpdate(kept, stored, torch.empty(shape, dtype=grad), torch.zeros(()), 1, 0, 0)


def stored_update(shape: tuple[int, int], master: str | None, granularity: Granularity) -> WeightUpdate:
    """The update of a weight that is stored in FP8."""
    scale_inv = torch.empty(granularity.scale_shape(shape))
    weight = StoredWeight(torch.empty(shape, dtype=torch.float8_e4m3fn), scale_inv)
    like = OF_FP8_WEIGHTS[master]
    state = {"master_amax": torch.empty_like(scale_inv)}
    if like.rest is not None:
        rest = torch.empty(shape, dtype=like.rest)
        state["master_rest"] = rest.view(torch.uint8) if like.rest == torch.int16 else rest  # 16 bits are kept as bytes
    moments = update(shape, NAMED["fp8"], "split32", torch.bfloat16, torch.bfloat16)
    kept = like.for_kernel(weight.qdata.view(torch.uint8), state, scale_inv)
    return moments._replace(master=kept)


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
