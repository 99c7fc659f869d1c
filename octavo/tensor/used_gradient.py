"""UsedGradient: what stands in place of a gradient that update_in_backward has used, until the step ends.

Whoever clips, scales or logs gradients would find none of them, or some, and go on with a norm that is not theirs. This
takes no memory, and raises instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedOpError

aten = torch.ops.aten

TWICE = (
    "a gradient came for a weight that this step has updated already. Several backward passes a step: run all but the "
    "last within handle.accumulate() (optimizer.accumulate() is the same). A weight that two reentrant checkpoints "
    "share: use checkpoint(..., use_reentrant=False). Otherwise call optimizer.step() after each backward"
)


class UsedGradient(Tensor):
    """A gradient of which only shape, dtype and device are left.

    Args:
        like: what it had.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> weight.grad = UsedGradient(weight)
        >>> weight.grad
        UsedGradient((2, 3), torch.float32)
    """

    @staticmethod
    def __new__(cls, like: Tensor) -> UsedGradient:
        """Make the facade."""
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if func in _ALIASES or (func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
            return UsedGradient(args[0])
        if func in _ZEROS:  # zero_grad(set_to_none=False)
            return args[0]
        if func in _ADDITIONS:
            raise UnsupportedOpError(TWICE)
        raise UnsupportedOpError(
            f"{func} of a gradient that is gone: update_in_backward has updated its weight while backward ran, so it "
            "can't be clipped, scaled or logged any more. Switch the caller's clipping off (max_grad_norm=0 in "
            "transformers' TrainingArguments) and have update_in_backward clip: clip=EstimatedNorm(max_norm). Or "
            "remove() the handle"
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UsedGradient({tuple(self.shape)}, {self.dtype})"


_ALIASES = {aten.detach.default, aten.alias.default}
_ZEROS = {aten.zero_.default, aten._foreach_zero_.default}
_ADDITIONS = {aten.add.Tensor, aten.add_.Tensor}
