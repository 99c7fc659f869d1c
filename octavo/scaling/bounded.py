"""Who decides the scale of a weight that an optimizer writes: three rules, of which octavo's is ``Bounded``.

Bounded: the weight's last amax and the most that the optimizer can have moved it. The scale is known before the update,
so codes are written in the pass that computes them, and it cannot overflow. For Adam the bound on |m_hat / sqrt(v_hat)|
is exact: gradients g_i proportional to (beta1 / beta2)^(t - i) attain it.

Beside it for comparison: TwoStage (MS-AMP's), which computes the update, takes its amax, then scales, in two passes or
with a float32 copy; PreviousAmax, which takes the amax of the step before, and overflows where a weight grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.formats import Format
from octavo.kernels.reference.step_numbers import adam_max_update, bound_after
from octavo.numerics import scale_from_amax

__all__ = [
    "Bounded",
    "BoundsItsUpdate",
    "PreviousAmax",
    "TwoStage",
    "WeightRule",
    "adam_max_update",
    "bound_after",
    "sgd_max_update",
]


class BoundsItsUpdate(Protocol):
    """An optimizer that knows how far a step can move a weight; octavo's do, and of any sign update it is 1."""

    def max_update(self, step: int) -> float:
        """The most that step number ``step`` (from 1) moves any element, by its learning rate."""
        ...


def sgd_max_update(
    amax_momentum: float, amax_gradient: float, momentum: float, dampening: float = 0.0, nesterov: bool = False
) -> float:
    """The most that a step of SGD moves an element, by its learning rate; it depends on the gradient.

    Args:
        amax_momentum: of the momentum before the step.
        amax_gradient: of the gradient, weight decay included.
        momentum, dampening, nesterov: SGD's.

    Example:
        >>> sgd_max_update(2.0, 1.0, momentum=0.5)
        2.0
    """
    if not momentum:
        return amax_gradient
    after = momentum * amax_momentum + max(1.0 - dampening, 1.0) * amax_gradient  # the first step has no dampening
    return amax_gradient + momentum * after if nesterov else after


class WeightRule(Protocol):
    """Where the scale comes from that an updated weight is written with."""

    passes: int  # over the weight, its state and gradient

    def scale(self, fmt: Format, before: Tensor, bound: Tensor, after: Callable[[], Tensor]) -> Tensor:
        """The scale, float32.

        Args:
            fmt: of the codes.
            before: the weight's amax before the step.
            bound: the most that it can be after it (``bound_after``).
            after: gives the updated weight.
        """
        ...


@dataclass(frozen=True)
class Bounded:
    """The bound's: in one pass, and never too large a scale.

    Example:
        >>> import torch
        >>> from octavo import E4M3
        >>> amax = torch.tensor(3.0)
        >>> Bounded().scale(E4M3, amax, bound_after(amax, lr=0.25, max_update=1.0), lambda: torch.zeros(4))
        tensor(128.)
    """

    power_of_two: bool = True
    passes = 1

    def scale(self, fmt: Format, before: Tensor, bound: Tensor, after: Callable[[], Tensor]) -> Tensor:
        """See WeightRule."""
        return scale_from_amax(bound, fmt.max, self.power_of_two, 0)


@dataclass(frozen=True)
class TwoStage:
    """The updated weight's own, as MS-AMP: the closest, after a pass that only finds the amax."""

    power_of_two: bool = True
    passes = 2

    def scale(self, fmt: Format, before: Tensor, bound: Tensor, after: Callable[[], Tensor]) -> Tensor:
        """See WeightRule."""
        return scale_from_amax(after().abs().amax(), fmt.max, self.power_of_two, 0)


@dataclass(frozen=True)
class PreviousAmax:
    """The last amax's: in one pass, but what grew beyond it saturates."""

    power_of_two: bool = True
    passes = 1

    def scale(self, fmt: Format, before: Tensor, bound: Tensor, after: Callable[[], Tensor]) -> Tensor:
        """See WeightRule."""
        return scale_from_amax(before, fmt.max, self.power_of_two, 0)
