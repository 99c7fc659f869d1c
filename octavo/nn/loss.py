"""Cross entropy of logits in bfloat16, without copies of them in float32.

torch's own takes logits in float32, of which a step then holds three: the copy, the logarithms of probabilities, and
the gradient. Here a kernel reads the logits once forward, and another once backward, which writes their gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from octavo.autograd.cross_entropy import cross_entropy_of_rows
from octavo.formats import HIGH_PRECISION
from octavo.nn.tensor_parallel import is_parallel

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the cross entropy of logits and targets, computed in float32 from logits of any float dtype.

    As torch.nn.functional.cross_entropy of ``input.float()``, but of the logits' size nothing is made besides their
    gradient, in their dtype.

    Args:
        input: logits [T, V], bfloat16, float16 or float32.
        target: int64 [T], a column of each row, or ``ignore_index``.
        ignore_index: rows with this target add nothing.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing: the share of each target that is spread over all V columns, 0 to 1.
        softcap: logits are softcap x tanh(logits / softcap) first, as Gemma 2's; None leaves them as they are.

    Returns:
        a float32 scalar, or [T] with reduction="none".

    Raises:
        ValueError: for shapes that don't fit, another reduction, a label_smoothing outside of 0 to 1, a softcap that is
            not positive.
        TypeError: for float64.
        IndexError: on a CPU for a target that is no column. On a GPU the loss is then NaN.

    Example:
        >>> import torch, octavo
        >>> logits = torch.randn(4, 10, dtype=torch.bfloat16)
        >>> octavo.nn.cross_entropy(logits, torch.tensor([1, 2, -100, 3])).dtype
        torch.float32
    """
    if input.dtype not in HIGH_PRECISION:
        raise TypeError(f"input is {input.dtype}: use bfloat16, float16 or float32")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: use one of {', '.join(_REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: use 0 to 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: use a positive number, or None")
    losses = cross_entropy_of_rows(input, target, ignore_index, label_smoothing, softcap or 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class CrossEntropyLoss(nn.Module):
    """``octavo.nn.cross_entropy`` as a module.

    Args:
        weight: None. Weights of classes are not computed here: use torch.nn.CrossEntropyLoss.
        ignore_index, reduction, label_smoothing, softcap: as there.

    Shape:
        input [T, V], target [T]; result a scalar, or [T].

    Raises:
        ValueError: for weights.

    Example:
        >>> import torch, octavo
        >>> loss = octavo.nn.CrossEntropyLoss()(torch.zeros(2, 8), torch.tensor([0, 7]))  # log 8
        >>> round(loss.item(), 4)
        2.0794
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if weight is not None:
            raise ValueError("weight: octavo.nn.CrossEntropyLoss has no weights of classes; use torch's")
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
        }

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(input, target, **self.options)

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


# --- transformers' causal language models -----------------------------------------------------------------------------


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the loss of a causal language model of transformers, as its ForCausalLMLoss, which takes the same.

    Args:
        logits: [..., S, V].
        labels: [..., S], each token's own, which are shifted by one here; or ``shift_labels``, which are not.
        vocab_size: V.
        num_items_in_batch: what the sum is divided by; None: by the labels that count.
    """
    if is_parallel(logits):
        from transformers.loss.loss_utils import ForCausalLMLoss

        loss: Tensor = ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
        return loss
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    how: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "mean" if num_items_in_batch is None else "sum"}
    loss = cross_entropy(logits.view(-1, vocab_size), target, **how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def take_loss(module: nn.Module) -> None:
    """Give a causal language model of transformers the loss above, if it has the library's."""
    if getattr(module, "loss_type", None) == "ForCausalLM" and "_loss_function" not in module.__dict__:
        module.loss_function = causal_lm_loss  # type: ignore[assignment]


def has_loss(module: nn.Module) -> bool:
    """Whether a model's loss is the one above."""
    return module.__dict__.get("_loss_function") is causal_lm_loss


def give_back_loss(module: nn.Module) -> None:
    """Give a model its own loss again."""
    if has_loss(module):
        del module._loss_function
