"""Cross entropy of bfloat16 logits, without copies of them in float32.

torch's own takes logits in float32, of which a step then holds three: the copy, the logarithms of probabilities, and
the gradient. Here a kernel reads the logits once forward, and another once backward, which writes their gradient. With
the head that makes the logits, by autograd/linear_cross_entropy.py, there are never logits of all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.autograd.casts import CastRequest, as_rows, cast_role
from octavo.autograd.cross_entropy import cross_entropy_of_rows
from octavo.autograd.linear_cross_entropy import LossOfRows, linear_cross_entropy_of_rows
from octavo.autograd.products import Layer
from octavo.formats import HIGH_PRECISION
from octavo.nn.inputs import product_dtype, refuse_for_fp8
from octavo.nn.linear import Linear, refuse_sharded
from octavo.private import is_dtensor
from octavo.recipes import AnyRecipe, as_recipe, high_precision
from octavo.scaling.recipe import WEIGHT, Recipe
from octavo.tensor.pair import Operands

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
        input: logits [T, V], bfloat16, float16 or float32. NaN or +inf makes a row NaN, gradient included, as in torch.
        target: int64 [T], a column of each row, or ``ignore_index``.
        ignore_index: rows with this target add nothing, and have a gradient of 0 even if they hold NaN; torch's is NaN.
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
    _check(input, reduction, label_smoothing, softcap)
    losses = cross_entropy_of_rows(input, target, ignore_index, label_smoothing, softcap or 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _check(input: Tensor, reduction: str, label_smoothing: float, softcap: float | None) -> None:
    """Raise the errors that both losses' docstrings list for these arguments."""
    if input.dtype not in HIGH_PRECISION:
        raise TypeError(f"input is {input.dtype}: use bfloat16, float16 or float32")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: use one of {', '.join(_REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: use 0 to 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: use a positive number, or None")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor | Linear,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    recipe: AnyRecipe | None = None,
) -> Tensor:
    """Return the cross entropy of a head's logits, of which those of 4,096 rows exist at a time.

    As ``octavo.nn.cross_entropy(head(input), target)``, whose losses it has, with torch's name and arguments
    (torch.nn.functional.linear_cross_entropy). Gradients are computed in forward, from the logits of each chunk, so
    that backward has no logits. In FP8 the gradient of logits is cast by a scale that needs no amax: under a delayed
    recipe the history of grad_output stays as it is, and those of input and weight advance as by one call of the head.

    Args:
        input: what the head reads [..., K], bfloat16, float16 or float32.
        linear_weight: the head, an octavo.nn.Linear with its recipe, which is called, so that its hooks run (whose
            output is the loss); or a weight [V, K].
        target: int64 [...], a column of each row, or ``ignore_index``.
        linear_bias: [V], with a weight; a head has its own.
        weight: None: weights of classes are not computed here.
        reduction: "mean" over the rows that count, or "sum".
        ignore_index: rows with this target add nothing; None is -100.
        label_smoothing, softcap: as of ``octavo.nn.cross_entropy``.
        recipe: with a weight, the recipe of the three products, or its name; None: high precision. A Delayed rule needs
            a head.

    Returns:
        a float32 scalar.

    Raises:
        ValueError: for shapes that don't fit, reduction="none", weights of classes, a label_smoothing outside of 0 to
            1, a softcap that is not positive, a weight that is sharded; a bias or recipe beside a head.
        TypeError: for float64, a head of another class, input and weight of different dtypes without autocast.
        IndexError: on a CPU for a target that is no column. On a GPU the loss is then NaN.
        HigherOrderGradientError: under create_graph=True.

    Example:
        >>> import torch, octavo
        >>> head = octavo.nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16)
        >>> hidden = torch.randn(2, 16, 64, dtype=torch.bfloat16)
        >>> octavo.nn.linear_cross_entropy(hidden, head, torch.randint(1000, (2, 16))).shape
        torch.Size([])
    """
    if reduction == "none":
        raise ValueError(
            "reduction='none': gradients are computed in forward, before each row's factor is there. Take "
            "octavo.nn.cross_entropy(head(input), target, reduction='none'), which keeps the logits"
        )
    if weight is not None:
        raise ValueError("weight: octavo.nn.linear_cross_entropy has no weights of classes; use torch's")
    _check(input, reduction, label_smoothing, softcap)
    if target.shape != input.shape[:-1] or target.dtype is not torch.int64:
        raise ValueError(
            f"target {list(target.shape)} of {target.dtype} needs a column's number, int64, for each row of input "
            f"{list(input.shape)}"
        )
    ignore_index = -100 if ignore_index is None else ignore_index
    targets = target.reshape(-1)
    divisor = (targets != ignore_index).sum() if reduction == "mean" else None
    loss = LossOfRows(targets, ignore_index, label_smoothing, softcap or 0.0, divisor)
    if isinstance(linear_weight, Linear):
        if linear_bias is not None or recipe is not None:
            raise ValueError("linear_bias and recipe are for a weight: a head has its own")
        return linear_weight(as_rows(input), loss=loss)
    recipe = high_precision() if recipe is None else as_recipe(recipe).of("")
    return _loss_with_weight(as_rows(input), linear_weight, linear_bias, loss, recipe)


def _loss_with_weight(input: Tensor, weight: Tensor, bias: Tensor | None, loss: LossOfRows, recipe: Recipe) -> Tensor:
    """Return the loss of logits input [T, K] . weight^T + bias."""
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"linear_weight is a {type(weight).__name__}: give an octavo.nn.Linear (octavo.convert makes one of a "
            "nn.Linear; recipes.high_precision() keeps it as it is), or its weight"
        )
    if recipe.delayed is not None:
        raise ValueError(
            f"the recipe {recipe.name!r} is delayed, and a weight has no history: give an octavo.nn.Linear"
        )
    refuse_sharded(weight)
    x = input.to(product_dtype(input, weight))
    operands = Operands()
    if not recipe.is_high_precision:
        refuse_for_fp8(x, weight, bias)
        needs_dx = torch.is_grad_enabled() and x.requires_grad
        request = CastRequest(recipe, WEIGHT, as_is=True, transposed=needs_dx, only_products=True)
        operands = cast_role(weight.detach(), request, None)
    return linear_cross_entropy_of_rows(x, weight, bias, loss, Layer(operands, recipe))


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
        self.options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        self.options |= {"label_smoothing": label_smoothing, "softcap": softcap}

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(input, target, **self.options)

    def extra_repr(self) -> str:
        """Return the options as text."""
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
    if is_dtensor(logits):
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(logits.view(-1, vocab_size), target, ignore_index=ignore_index, reduction=reduction)
    if isinstance(num_items_in_batch, Tensor):  # of a model on several GPUs: on the first one, the loss on the last
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


_LIBRARY_LOSS = "transformers.loss.loss_utils", "ForCausalLMLoss"  # its module and name


def take_loss(module: nn.Module) -> None:
    """Give a causal language model of transformers ``causal_lm_loss``, if it has the library's loss."""
    if getattr(module, "loss_type", None) != "ForCausalLM" or "_loss_function" in module.__dict__:
        return
    present: Any = getattr(module, "loss_function", None)  # of its class, or of a table of the library: maybe others'
    if (getattr(present, "__module__", ""), getattr(present, "__name__", "")) == _LIBRARY_LOSS:
        module.loss_function = causal_lm_loss  # type: ignore[assignment]


def has_loss(module: nn.Module) -> bool:
    """Whether a model's loss is ``causal_lm_loss``."""
    return module.__dict__.get("_loss_function") is causal_lm_loss


def give_back_loss(module: nn.Module) -> None:
    """Give a model its own loss again."""
    if has_loss(module):
        del module._loss_function
