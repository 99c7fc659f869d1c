"""StoredGradient: a gradient that is kept in FP8 between backward and update.

It is a pair behind the facade of a high-precision tensor of any shape, so that torch takes it as a parameter's
``grad``. Norms read its values, a factor goes to its scales, octavo's optimizers read codes and scales as they are.
Nothing adds to it, which would round it again, and nothing dequantises it silently. Frozen: no new features until a GPU
shows what ``gradient_storage`` gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo import kernels
from octavo.errors import UnsupportedOpError
from octavo.formats import E4M3
from octavo.granularity import BLOCK, PerBlock
from octavo.kernels.layouts import as_matrix_shape
from octavo.tensor.pair import COPIES, DIVISIONS, MOVES, Facade, Pair, gradient_rules, moves
from octavo.tensor.scaled_tensor import ScaledTensor, quantize

aten = torch.ops.aten

GRANULARITY = PerBlock(1, BLOCK)
_ELEMENTS_AT_A_TIME = 1 << 24  # that a norm reads, in float32


class StoredGradient(Pair):
    """A gradient in E4M3 codes, with a scale for each block of 1 x 128 of its matrix, 1.03 bytes an element.

    The matrix [R, C] is its first dimension by all others; a vector is one row.

    Args:
        qdata: float8_e4m3fn [R, C], contiguous.
        scale_inv: float32 [R, ceil(C / 128)].
        shape: the gradient's, of R x C elements.
        dtype: what it reads back to.
    """

    is_zero: bool  # by zero_(): a gradient can be added, as nothing was rounded yet
    REMEDY = (
        "of a gradient that is kept in FP8. Step with octavo.optim's optimizer, which reads it (torch.optim can't); "
        "multiply all of it by one number, which goes to its scales; for views and other norms and factors read "
        ".grad.dequantize(); or keep gradients in high precision with gradient_storage=None"
    )

    @staticmethod
    def __new__(
        cls, qdata: Tensor, scale_inv: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> StoredGradient:
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=qdata.device)
        self.qdata, self.scale_inv, self.is_zero = qdata, scale_inv, False
        return self

    def validate(self) -> None:
        """Raise TypeError or ValueError if codes and scales are none that such a gradient has."""
        if self.qdata.dtype != E4M3.dtype or self.qdata.ndim != 2 or self.qdata.numel() != self.numel():
            raise ValueError(f"{self} of codes {self.qdata.dtype} {tuple(self.qdata.shape)}: it takes a matrix in E4M3")
        ScaledTensor(self.qdata, self.scale_inv, GRANULARITY, self.dtype)

    @classmethod
    def cast(cls, gradient: Tensor, dtype: torch.dtype | None = None, by_expert: bool = False) -> StoredGradient:
        """Cast a high-precision gradient of any shape to FP8, rounded to nearest; inf and NaN become NaN.

        ``dtype``: what it reads back to, if not to the gradient's; ``by_expert``: of experts in FP8 [E, N, K], whose
        blocks are of each one's rows: its matrix is [E * N, K].
        """
        gradient = gradient.detach().contiguous()
        matrix = gradient.flatten(0, 1) if by_expert else gradient.view(as_matrix_shape(gradient.shape))
        pair = quantize(matrix, E4M3, GRANULARITY)
        scale_inv = pair.scale_inv.contiguous()  # casts write them column by column, as products read them
        return cls(pair.qdata, scale_inv, gradient.shape, dtype or gradient.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor, by default of its own dtype; norms and optimizers read float32."""
        return ScaledTensor(self.qdata, self.scale_inv, GRANULARITY, dtype or self.dtype).dequantize().view(self.shape)

    def other_arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        return tuple(self.shape), dtype


def _write(func: Any, gradients: list[StoredGradient], *factor: Any) -> Any:
    """Zero gradients, or multiply or divide their scales by one factor."""
    for gradient in gradients:
        if not factor:
            gradient.qdata.view(torch.uint8).zero_()
            gradient.scale_inv.fill_(1.0)
            gradient.is_zero = True
            continue
        (by,) = factor
        if not isinstance(gradient, StoredGradient) or (isinstance(by, Tensor) and by.numel() != 1):
            return NotImplemented
        by = by.reshape(()) if isinstance(by, Tensor) else by
        gradient.scale_inv.div_(by) if func in DIVISIONS else gradient.scale_inv.mul_(by)
    return None


def _add(func: Any, grad: Tensor, other: Tensor, *, alpha: float = 1) -> StoredGradient:
    """Write ``alpha`` x ``other`` where the gradient is zero; else raise UnsupportedOpError."""
    if func is aten.add_.Tensor and isinstance(grad, StoredGradient) and grad.is_zero and grad.shape == other.shape:
        by_expert = grad.qdata.shape != as_matrix_shape(grad.shape)
        fresh = other if isinstance(other, StoredGradient) else StoredGradient.cast(other, by_expert=by_expert)
        grad.qdata.view(torch.uint8).copy_(fresh.qdata.view(torch.uint8))
        grad.scale_inv.copy_(fresh.scale_inv)
        if alpha != 1:
            grad.scale_inv.mul_(alpha)
        grad.is_zero = False
        return grad
    raise UnsupportedOpError(
        "a gradient that is kept in FP8 can't be added to: it would be rounded a second time, and small addends lost. "
        "Several backward passes a step: run all but the last within optimizer.accumulate(); one a step: call "
        "optimizer.zero_grad() before it; under a trainer that accumulates by itself: gradient_storage=None. A weight "
        "that two reentrant checkpoints share: use checkpoint(..., use_reentrant=False). Otherwise add to "
        ".grad.dequantize()"
    )


def _norm(
    func: Any, gradient: StoredGradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    return NotImplemented if dim is not None or keepdim else norm_of(gradient, ord).to(dtype or torch.float32)


def norm_of(gradient: StoredGradient, ord: float = 2) -> Tensor:
    """Return the norm of a gradient's values, in float32 as codes and scales have them: one number."""
    q, scale_inv = gradient.qdata, gradient.scale_inv
    if q.numel() == 0:
        return torch.zeros((), device=q.device, dtype=torch.float32)
    rows = max(_ELEMENTS_AT_A_TIME // q.shape[1], 1)
    norms = [
        torch.linalg.vector_norm(kernels.dequantize(codes, scales, GRANULARITY.tile, torch.float32), ord)
        for codes, scales in zip(q.split(rows), scale_inv.split(rows), strict=True)
    ]
    # of pieces' numbers of elements other than 0, which ord=0 counts, the sum
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), ord if ord else 1)


def _unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients for a GradScaler: note whether any value is not finite, and multiply by inv_scale."""
    if plain := [gradient for gradient in gradients if not isinstance(gradient, StoredGradient)]:
        func(plain, found_inf, inv_scale)
    for gradient in gradients:
        if isinstance(gradient, StoredGradient):
            gradient.mul_(inv_scale)
            found_inf.masked_fill_(~torch.isfinite(norm_of(gradient, float("inf"))), 1.0)


StoredGradient.RULES = {
    **MOVES,
    **COPIES,
    **gradient_rules(StoredGradient, _write, _add, _norm),
    aten.view.default: moves,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}

torch.serialization.add_safe_globals([StoredGradient])


# --- UsedGradient: it stands in place of a gradient that update_in_backward has used, until the step ends.

TWICE = (
    "a gradient came for a weight that this step has updated already. Several backward passes a step: run all but the "
    "last within handle.accumulate() (optimizer.accumulate() is the same). A weight that two reentrant checkpoints "
    "share: use checkpoint(..., use_reentrant=False). Otherwise call optimizer.step() after each backward"
)


class UsedGradient(Facade):
    """A gradient of which only its 2-norm is left, and shape, dtype and device, those of ``like``."""

    norm_: Tensor
    REMEDY = (
        "of a gradient that is gone: update_in_backward has updated its weight while backward ran, so it can't be "
        "clipped or scaled any more. Leave out a GradScaler (train in bf16); switch the caller's clipping off "
        "(max_grad_norm=0 in transformers' TrainingArguments) and have update_in_backward clip: clip=max_norm. Or "
        "remove() the handle"
    )

    @staticmethod
    def __new__(cls, like: Tensor, norm: Tensor) -> UsedGradient:
        self = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self.norm_ = norm
        return self

    def moved(self, move: Any) -> UsedGradient:
        """Return a new facade of the same gradient; ``move`` can only be an alias."""
        assert move in MOVES
        return UsedGradient(self, self.norm_)


def _write_used(_func: Any, _gradients: list[Any], *factor: Any) -> Any:
    """Do nothing for zero_grad(set_to_none=False), nor for a factor of 1, which has to be read on the host."""
    for by in factor:
        if not isinstance(by, Tensor | float | int) or isinstance(by, UsedGradient) or float(by) != 1:
            return NotImplemented
    return None


def _refuse_used(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedOpError(TWICE)


def _norm_of_used(
    func: Any, grad: UsedGradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    return NotImplemented if ord != 2 or dim is not None or keepdim else grad.norm_.to(dtype or grad.norm_.dtype)


UsedGradient.RULES = gradient_rules(UsedGradient, _write_used, _refuse_used, _norm_of_used)
UsedGradient.RULES |= MOVES | {aten.view.default: moves}
