"""The delayed state's update, alone or at the end of the cast that found grad_output's amax."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.known_scales import committed
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.tiles import scale_from_amax


class Update(NamedTuple):
    """How kernels find the next scales; limits (format.max / 2^margin) and powers_of_two have an element a role."""

    limits: tuple[float, ...]
    powers_of_two: tuple[bool, ...]
    most_recent: bool
    length: int  # of the history
    block: int  # that, rounded up to a power of two


@triton.jit
def roll(scale_ptr, history_ptr, amax, ROLE: tl.constexpr, update: tl.constexpr):
    """history[ROLE] <- (amax, history[ROLE][:-1]) and the next scale; history is [3, length]."""
    index = tl.arange(0, update.block)
    row_ptr = history_ptr + ROLE * update.length
    old = tl.load(row_ptr + index - 1, mask=(index > 0) & (index < update.length), other=0.0)
    previous = tl.load(scale_ptr + ROLE)
    rolled = tl.where(index == 0, amax, old)
    if update.most_recent:
        largest = amax
    else:
        largest = tl.max(rolled, 0)
    tl.debug_barrier()  # every thread has read its neighbour's element
    tl.store(row_ptr + index, rolled, mask=index < update.length)
    scale = scale_from_amax(largest, update.limits[ROLE], update.powers_of_two[ROLE])
    tl.store(scale_ptr + ROLE, tl.where(largest > 0, scale, previous))


@triton.jit
def roll_others(scale_ptr, history_ptr, amax_input_ptr, amax_weight_ptr, update: tl.constexpr):
    """Roll input and weight where their amax is given."""
    if amax_input_ptr is not None:
        roll(scale_ptr, history_ptr, tl.load(amax_input_ptr), 0, update)
    if amax_weight_ptr is not None:
        roll(scale_ptr, history_ptr, tl.load(amax_weight_ptr), 1, update)


@triton.jit
def delayed_update_kernel(
    scale_ptr, history_ptr, amax_input_ptr, amax_weight_ptr, amax_grad_output_ptr, update: tl.constexpr
):
    """Roll the roles whose amax is given."""
    roll_others(scale_ptr, history_ptr, amax_input_ptr, amax_weight_ptr, update)
    if amax_grad_output_ptr is not None:
        roll(scale_ptr, history_ptr, tl.load(amax_grad_output_ptr), 2, update)


@functools.cache
def update_of(
    limits: tuple[float, ...], powers_of_two: tuple[bool, ...], margins: tuple[int, ...], reduce: str, length: int
) -> Update:
    """The kernels' Update from the op's arguments."""
    margined = tuple(limit * 2.0**-margin for limit, margin in zip(limits, margins, strict=True))
    return Update(margined, powers_of_two, reduce == "most_recent", length, triton.next_power_of_2(length))


def delayed_update(
    delayed_scale: Tensor,
    delayed_amax_history: Tensor,
    amax_input: Tensor | None,
    amax_weight: Tensor | None,
    amax_grad_output: Tensor | None,
    limits: Sequence[float],
    powers_of_two: Sequence[bool],
    margins: Sequence[int],
    reduce: str,
) -> None:
    """``octavo::delayed_update``."""
    length = delayed_amax_history.shape[1]
    update = update_of(tuple(limits), tuple(powers_of_two), tuple(margins), reduce, length)
    arguments = delayed_scale, delayed_amax_history, amax_input, amax_weight, amax_grad_output, update
    launch(delayed_update_kernel, 1, arguments, 4 if length > 32 else 1)
    rolled = amax_input is not None, amax_weight is not None, amax_grad_output is not None
    committed(delayed_scale, delayed_amax_history, rolled)
