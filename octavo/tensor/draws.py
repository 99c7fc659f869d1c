"""Uniform draws of a weight in FP8, of which torch.nn.init makes truncated normals in steps: the rules of those ops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Draw:
    """The draw of a weight's values, so that torch.nn.init's further steps begin with the values before the cast.

    They are drawn again for that: kept beside the codes they would be the wider copy that a weight in FP8 has not.

    Attributes:
        state: the generator's, before the draw.
        bounds: between which values are distributed uniformly.
        steps: the ops since then, and what follows the tensor among their arguments.
        version: the codes', after the last step.
    """

    state: Tensor
    bounds: tuple[float, ...]
    steps: tuple[tuple[Any, tuple[Any, ...]], ...]
    version: int


def uniform(func: Any, weight: Any, *bounds: float, generator: torch.Generator | None = None) -> Any:
    """Apply the rule of uniform_: write the values, and note on the weight how they were drawn, for ``go_on``."""
    source = _default_generator(weight.device) if generator is None else generator
    state = None if source is None else source.get_state()
    plain = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    weight.take(func(plain, *bounds, generator=generator))
    if state is not None and not weight.qdata.is_inference():
        weight.known.draw = Draw(state, bounds, (), weight.qdata._version)
    return weight


def _default_generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a CPU or CUDA device; None of others."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator if device.type == "cpu" else None


def go_on(func: Any, weight: Any, *args: Any) -> Any:
    """Take a further step of trunc_normal_ (torch's before 2.13, timm's), which erfinv_ begins just after the draw.

    All steps are taken in high precision, and their result is cast: of a draw that was rounded to 1 erfinv is infinite.
    """
    draw, is_first = weight.known.draw, func is aten.erfinv_.default
    if draw is None or draw.version != weight.qdata._version or is_first == bool(draw.steps):
        return NotImplemented
    generator, steps = torch.Generator(weight.device), (*draw.steps, (func, args))
    generator.set_state(draw.state)
    values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    values.uniform_(*draw.bounds, generator=generator)
    for step, others in steps:
        step(values, *others)
    weight.take(values)
    is_last = func is aten.clamp_.default
    weight.known.draw = None if is_last else replace(draw, steps=steps, version=weight.qdata._version)
    return weight
