"""UsedGradient: what stands in place of a gradient that update_in_backward has used, until the step ends.

Whoever clips or scales gradients would find none of them, or some, and go on unclipped. This holds the norm alone: so
the norm of all can be read, and logged; a factor of 1 changes nothing; anything else raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedOpError
from octavo.tensor.pair import Facade

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


def _same(func: Any, own: UsedGradient, shape: Sequence[int] | None = None) -> Any:
    return UsedGradient(own, own.norm_) if shape is None or tuple(shape) == tuple(own.shape) else NotImplemented


def _zero(func: Any, own: Any) -> Any:
    """By zero_grad(set_to_none=False): there is nothing to do."""
    if isinstance(own, Tensor):
        return own
    if rest := [gradient for gradient in own if not isinstance(gradient, UsedGradient)]:
        func(rest)
    return None


def _add(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedOpError(TWICE)


def _norm(func: Any, own: UsedGradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return NotImplemented if ord != 2 or dim is not None or keepdim else own.norm_.to(dtype or own.norm_.dtype)


def _norms(func: Any, gradients: Sequence[Tensor], ord: Any = 2, dtype: Any = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(gradient, ord, dtype=dtype) for gradient in gradients]


def _scale(func: Any, own: Any, factor: Any) -> Any:
    """By 1 alone, which has to be read on the host."""
    if isinstance(factor, Tensor | float | int) and not isinstance(factor, UsedGradient) and float(factor) == 1:
        return own
    return NotImplemented


def _scale_all(func: Any, gradients: Sequence[Tensor], factor: Any) -> Any:
    if _scale(func, gradients, factor) is NotImplemented:
        return NotImplemented
    if rest := [gradient for gradient in gradients if not isinstance(gradient, UsedGradient)]:
        func(rest, factor)
    return None


UsedGradient.RULES = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.view.default: _same,
    aten.zero_.default: _zero,
    aten._foreach_zero_.default: _zero,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norms,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten.div_.Tensor: _scale,
    aten.div_.Scalar: _scale,
    aten._foreach_mul_.Tensor: _scale_all,
    aten._foreach_mul_.Scalar: _scale_all,
    aten._foreach_div_.Tensor: _scale_all,
    aten._foreach_div_.Scalar: _scale_all,
}
