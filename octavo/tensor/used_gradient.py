"""UsedGradient: what stands in place of a gradient that update_in_backward has used, until the step ends.

Whoever clips or scales gradients would find none of them, or some, and go on unclipped. This holds the norm alone: so
the norm of all can be read, and logged; a factor of 1 changes nothing; anything else raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedOpError
from octavo.tensor.pair import MOVES, Facade, gradient_rules, moves

aten = torch.ops.aten

TWICE = (
    "a gradient came for a weight that this step has updated already. Several backward passes a step: run all but the "
    "last within handle.accumulate() (optimizer.accumulate() is the same). A weight that two reentrant checkpoints "
    "share: use checkpoint(..., use_reentrant=False). Otherwise call optimizer.step() after each backward"
)


class UsedGradient(Facade):
    """A gradient of which only shape, dtype, device and 2-norm are left.

    Args:
        like: what it had.
        norm: one number.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> weight.grad = UsedGradient(weight, torch.tensor(0.5))
        >>> torch.nn.utils.clip_grad_norm_([weight], 1.0)
        tensor(0.5000)
        >>> weight.grad
        UsedGradient((2, 3), torch.float32)
    """

    norm_: Tensor
    REMEDY = (
        "of a gradient that is gone: update_in_backward has updated its weight while backward ran, so it can't be "
        "clipped or scaled any more. Switch the caller's clipping off (max_grad_norm=0 in transformers' "
        "TrainingArguments) and have update_in_backward clip: clip=EstimatedNorm(max_norm). Or remove() the handle"
    )

    @staticmethod
    def __new__(cls, like: Tensor, norm: Tensor) -> UsedGradient:
        """Make the facade."""
        self = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self.norm_ = norm
        return self

    def moved(self, move: Any) -> UsedGradient:
        """The same again."""
        return UsedGradient(self, self.norm_)


def _write(func: Any, own: list[Any], *factor: Any) -> Any:
    """Nothing to do for zero_grad(set_to_none=False), nor for a factor of 1, which has to be read on the host."""
    for by in factor:
        if not isinstance(by, Tensor | float | int) or isinstance(by, UsedGradient) or float(by) != 1:
            return NotImplemented
    return None


def _add(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedOpError(TWICE)


def _norm(func: Any, own: UsedGradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return NotImplemented if ord != 2 or dim is not None or keepdim else own.norm_.to(dtype or own.norm_.dtype)


UsedGradient.RULES = MOVES | gradient_rules(UsedGradient, _write, _add, _norm) | {aten.view.default: moves}
