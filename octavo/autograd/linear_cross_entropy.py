"""The cross entropy of a linear layer's output, in chunks of rows, of whose logits one chunk exists at a time.

    logits = x . W^T + b                          the output product of a chunk's rows
    G      = d (sum of losses) / d logits         in [-1, 1], as softmax - one-hot is; rows that are ignored are 0
    dx     = G . W                                of a chunk's rows, in forward
    dW     = G^T . x                              of all rows, in backward
    db     = the sum of G's rows                  in float32, in forward

The factor that backward brings (1 / the number of rows, a loss scale) multiplies dx, dW and db, not G. So G has a scale
before it is computed, 2^15 in E5M2, and no pass looks for its amax: one launch reads logits and writes codes. With
131,072 columns a logit's first gradient is about 2^-17 of the largest: E5M2 reaches 2^-31 of it, E4M3 only 2^-17.
The fixed scale is used where one scale spans the contraction (per tensor, per row). Blocks along it are cast by the
recipe's own cast of grad_output: a chunk holds whole blocks.

Saved for backward are dx and, where grad_weight is in FP8, G's codes transposed, a byte a logit, and those of x: dW is
one product with one rounding. In high precision dW is added up in float32 in forward, which is 4 bytes an element of
the weight. Backward reads no weight. Of the delayed state it enters the amaxes of input and weight, once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import CastRequest, CodesAndScale, cast_role
from octavo.autograd.products import (
    BackwardPlan,
    GradOutput,
    Layer,
    NeededGradients,
    Saved,
    backward_plan,
    commit_forward,
    gradients,
    gradients_needed_now,
    input_operands,
    is_recorded,
    output,
    plan_for_next_pass,
    refuse_in_backward,
    to_save,
    weight_cast_again,
)
from octavo.autograd.shared_casts import InputCasts
from octavo.formats import E4M3, E5M2, Format
from octavo.granularity import ALL, PADDING
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes, padded_size, plain_scales, tile_rows
from octavo.numerics import E8M0, scale_of_unit
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, Cast, Recipe
from octavo.tensor.pair import Operands

# rows of a chunk: products of as many fill a GPU (32 x 1,002 tiles of a vocabulary of 128,256), and read the weight's
# codes, a quarter of the bytes of a chunk's logits at 2,048 features, once for them all; the logits take 1 GiB there
ROWS = 4096


class LossOfRows(NamedTuple):
    """A loss [T] of rows of logits, by targets [T] int64, as kernels/reference/cross_entropy.py computes it.

    ``divisor``: int64 [], divides the sum of the losses; None: nothing does.
    """

    target: Tensor
    ignore_index: int
    label_smoothing: float
    softcap: float
    divisor: Tensor | None


class _Gradients(NamedTuple):
    """Gradients of the sum of the losses, None where not needed: dx [T, K], dW [N, K] and db [N] in float32.

    Where grad_weight is in FP8, ``codes`` [N, T] and ``scale_inv`` are of G^T, in place of dW.
    """

    dx: Tensor | None = None
    dw: Tensor | None = None
    db: Tensor | None = None
    codes: Tensor | None = None
    scale_inv: Tensor | None = None


def _has_fixed_scale(cast: Cast | None) -> bool:
    """Whether the fixed scale of numbers in [-1, 1] replaces a cast of grad_output; see the file."""
    return cast is not None and cast.tile[1] == ALL


def _fixed_format(recipe: Recipe) -> Format:
    """Return the format of codes by the fixed scale: E4M3 only beside E5M2, as no GPU multiplies E5M2 by E5M2."""
    others = [product[1].format for product in (recipe.grad_input, recipe.grad_weight) if product is not None]
    return E4M3 if E5M2 in others else E5M2


def _fixed_scale_inv(recipe: Recipe, cast: Cast, rows: int, like: Tensor) -> Tensor:
    """Return the scale_inv of codes [rows, ...] by the fixed scale, as a product reads it: by tensor or by row."""
    value = 1.0 / scale_of_unit(_fixed_format(recipe).max)
    return like.new_full((1 if cast.tile[0] == ALL else rows, 1), value, dtype=torch.float32)


def _rows_of_chunk(recipe: Recipe) -> int:
    """Return ROWS, rounded to whole blocks of rows, and to whole padding: only the last chunk's codes have some."""
    along = (recipe.input_casts.as_is, 0), (recipe.grad_output_casts.as_is, 0), (recipe.grad_output_casts.transposed, 1)
    blocks = [cast.tile[dim] for cast, dim in along if cast is not None and cast.tile[dim] != ALL]
    unit = math.lcm(PADDING, *blocks)
    return max(ROWS // unit, 1) * unit


class _Chunks:
    """The tensors that all chunks of rows share, and the loss and gradients that chunks add up to.

    ``needs``: whether the gradients of (x, weight, bias) are needed.
    """

    def __init__(
        self, x_TK: Tensor, x: Operands, weight_NK: Tensor, bias: Tensor | None, loss: LossOfRows, layer: Layer
    ) -> None:
        recipe, self.dtype = layer.recipe, x_TK.dtype
        if recipe.output is None or recipe.grad_input is None:
            weight_NK = weight_NK.to(self.dtype)  # once
        self.x_TK, self.x, self.weight_NK, self.bias, self.loss = x_TK, x, weight_NK, bias, loss
        self.loss_options = loss.ignore_index, loss.label_smoothing, loss.softcap
        self.x_pair = x.as_is
        if x.as_is is not None and recipe.output is not None:
            q, scale_inv = x.as_is
            self.x_pair = q, plain_scales(scale_inv, q.shape, recipe.output[0].tile)
        self.layer, self.observers = layer._replace(observers=()), layer.observers
        self.plan = BackwardPlan(self.layer, self.dtype, weight_NK.dtype)
        self.pad = contraction_multiple(x_TK.device, recipe.may_pad)
        self.writes_transposed = needs_transposed_codes(x_TK.device)

    def loss_and_gradients(self, needs: NeededGradients) -> tuple[Tensor, _Gradients]:
        """Return the loss, and the gradients of the sum of the losses that are needed."""
        losses, lse, sum_gradients = self._run(needs)
        for observer in self.observers:
            recipe, operand = self.layer.recipe, self.x.as_is or (self.x_TK, None)
            observer.cast(recipe, INPUT, lambda: self.x_TK, self.x)
            # lse shows a fault (inf, NaN) in any logit of its row
            observer.product(recipe, "output", lse[:, None], operand, None, self.x.amax)
        total = losses.sum()
        return total if self.loss.divisor is None else total / self.loss.divisor, sum_gradients

    def _run(self, needs: NeededGradients) -> tuple[Tensor, Tensor, _Gradients]:
        """Return (losses [T], the logarithms of the sums of exponentials [T], the gradients that are needed)."""
        recipe, tokens, columns = self.layer.recipe, len(self.x_TK), len(self.weight_NK)
        needs_dx, needs_dw, needs_db = needs
        step = _rows_of_chunk(recipe)
        parts, scales, dxs = [], [], []  # of each chunk: (losses, lse), the transposed codes' scale_inv, dx
        dw = codes = None
        saved = self._saved(needs_dx)
        if needs_dw and recipe.grad_weight is None:
            dw = self.x_TK.new_zeros(self.weight_NK.shape, dtype=torch.float32)
        elif needs_dw:  # where they are copied, as bytes: Inductor computes nothing of float8
            is_fixed = _has_fixed_scale(recipe.grad_output_casts.transposed)
            dtype = _fixed_format(recipe).dtype if is_fixed else torch.uint8
            shape = (columns, padded_size(tokens, self.pad)) if self.writes_transposed else (tokens, columns)
            codes = self.x_TK.new_empty(shape, dtype=dtype)
        db = self.x_TK.new_zeros(columns, dtype=torch.float32) if needs_db else None
        for first in range(0, max(tokens, 1), step):
            rows = slice(first, first + step)
            logits, losses, lse = self._losses(rows)
            parts.append((losses, lse))
            if not any(needs):
                continue
            pair, scale_inv, g = self._cast(logits, rows, lse, needs, codes)
            if needs_dx:
                (dx, *_) = gradients(GradOutput(Operands(pair), g), saved, self.plan, (True, False, False))
                assert dx is not None
                dxs.append(dx)
            if dw is not None and g is not None:
                dw += g.t() @ self.x_TK[rows]
            if scale_inv is not None:
                scales.append(scale_inv)
            if db is not None and g is not None:
                db += g.sum(0, dtype=torch.float32)
        losses, lse = (torch.cat(chunks) for chunks in zip(*parts, strict=True))
        if codes is not None and recipe.grad_weight is not None:
            codes = codes if self.writes_transposed else codes.t()
            codes = codes.view(recipe.grad_weight[0].format.dtype) if codes.dtype is torch.uint8 else codes
        scale_inv = join_scales(scales) if scales else None
        return losses, lse, _Gradients(torch.cat(dxs) if dxs else None, dw, db, codes, scale_inv)

    def _saved(self, needs_dx: bool) -> Saved:
        """Return the tensors that a chunk's dx is computed from, besides its G."""
        layer, source = self.layer, self.layer.weight.source
        if source is not None:  # FSDP1's or ZeRO-3's weight, which forward has: it is cast once for all chunks
            pair = None
            if needs_dx and layer.recipe.grad_input is not None:
                weight = source.tensor.mT if source.is_swapped else source.tensor
                pair = weight_cast_again(weight, layer, source.delayed_scale)
            layer = layer._replace(weight=Operands(transposed=pair))
        return to_save(None, Operands(), self.weight_NK, layer, needs_dx, needs_dw=False)

    def _losses(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return a chunk's logits, losses and logarithms of sums of exponentials."""
        recipe, x = self.layer.recipe, Operands()
        if recipe.output is not None and self.x_pair is not None:
            q, scale_inv = self.x_pair
            x = Operands((q[rows], tile_rows(scale_inv, recipe.output[0].tile, rows)))
        logits = output(self.x_TK[rows], x, self.weight_NK, self.bias, self.layer, self.dtype)
        return logits, *kernels.cross_entropy(logits, self.loss.target[rows], *self.loss_options)

    def _cast(
        self, logits: Tensor, rows: slice, lse: Tensor, needs: NeededGradients, codes: Tensor | None
    ) -> tuple[CodesAndScale | None, Tensor | None, Tensor | None]:
        """Return (a chunk's G as dx's product reads it, the scale_inv of its codes transposed, G itself), if needed.

        The codes transposed are written to their place in ``codes``, which has those of all rows. Their scale_inv is
        None where all have the fixed scale of numbers in [-1, 1].
        """
        arguments = logits, self.loss.target[rows], *self.loss_options, lse
        cast, cast_t, _ = self.layer.recipe.grad_output_casts
        needs_dx, needs_dw, needs_db = needs
        fixed_layouts = needs_dx and _has_fixed_scale(cast), needs_dw and _has_fixed_scale(cast_t)
        amax_layouts = needs_dx and not fixed_layouts[0], needs_dw and not fixed_layouts[1]
        pair = scale_inv = g = None
        if any(fixed_layouts):
            pair = self._cast_by_fixed_scale(arguments, rows, fixed_layouts[0], codes if fixed_layouts[1] else None)
        if needs_db or any(amax_layouts):
            g = kernels.cross_entropy_backward(*arguments, lse.new_ones(1).expand(len(lse)))
            operands = cast_role(g, CastRequest(self.layer.recipe, GRAD_OUTPUT, *amax_layouts), None)
            pair = operands.as_is or pair
            if operands.transposed is not None and codes is not None:
                q, scale_inv = operands.transposed
                place = codes[:, rows] if self.writes_transposed else codes[rows].t()
                place.copy_(q.view(torch.uint8))
        return pair, scale_inv, g

    def _cast_by_fixed_scale(
        self, arguments: tuple[Any, ...], rows: slice, as_is: bool, codes: Tensor | None
    ) -> CodesAndScale | None:
        """Write G's codes straight from the logits; return them with their scale_inv if dx's product reads them.

        ``arguments``: the op's, which say what is cast, logits first; ``as_is``: whether dx's product reads the codes;
        ``codes``: where dW's product reads them, transposed, among all rows'; None: it does not.
        """
        logits, recipe = arguments[0], self.layer.recipe
        q = q_t = logits.new_empty((0, 0), dtype=_fixed_format(recipe).dtype)  # by this shape the op writes nothing
        if codes is not None and self.writes_transposed:
            q_t = codes[:, : rows.stop]
        if codes is not None and not self.writes_transposed:
            q = codes[rows]  # one copy serves both products
        elif as_is:
            q = logits.new_empty((logits.shape[0], padded_size(logits.shape[1], self.pad)), dtype=q.dtype)
        kernels.cross_entropy_codes(*arguments, q, q_t, rows.start)
        cast = recipe.grad_output_casts.as_is
        return (q, _fixed_scale_inv(recipe, cast, q.shape[0], q)) if as_is and cast is not None else None


@torch.library.custom_op("octavo::join_scales", mutates_args=())
def join_scales(chunks: list[Tensor]) -> Tensor:
    """Return chunks' scales [R, C] beside each other, laid by columns as a cast of all rows lays them.

    It is an op because Inductor computes nothing of E8M0.
    """
    transposed = [scale_inv.t() for scale_inv in chunks]
    if chunks[0].dtype is E8M0:
        return torch.cat([scale_inv.view(torch.uint8) for scale_inv in transposed]).view(E8M0).t()
    return torch.cat(transposed).t()


@join_scales.register_fake
def _(chunks: list[Tensor]) -> Tensor:
    columns = sum(scale_inv.shape[1] for scale_inv in chunks)
    return chunks[0].new_empty((columns, chunks[0].shape[0])).t()


class _LinearCrossEntropy(torch.autograd.Function):
    """linear_cross_entropy_of_rows with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None, loss: LossOfRows, layer: Layer, x_casts: Any
    ) -> Tensor:
        needs = ctx.needs_input_grad[:3]
        x_to_save, x, number = input_operands(x_TK, layer, x_casts, needs[1])
        result, sum_gradients = _Chunks(x_TK, x, weight_NK, bias, loss, layer).loss_and_gradients(needs)
        saved = to_save(x_to_save, x, weight_NK, layer, needs_dx=False, needs_dw=needs[1])
        if sum_gradients.codes is None:  # dW is there
            saved = saved._replace(x_TK=None)
        ctx.plan = backward_plan(layer._replace(observers=()), x_TK.dtype, weight_NK, bias, number)
        ctx.are_tensors = True, True, bias is not None
        # divisor or None; the five of _Gradients; Saved, as dW's product reads it
        ctx.save_for_backward(loss.divisor, *sum_gradients, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_in_backward(*grads)
        plan = ctx.plan
        divisor, *tensors = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = gradients_needed_now(ctx)
        count = len(_Gradients._fields)
        sum_gradients, saved = _Gradients(*tensors[:count]), Saved(*tensors[count:])
        ctx.plan = plan_for_next_pass(plan)
        commit_forward(plan, saved.x_amax, saved.weight_amax)
        # where no row counts the loss is NaN and the gradient 0, as torch's
        factor = grads[0] if divisor is None else grads[0] / divisor.clamp(min=1)
        factor = factor.to(torch.float32).view(1, 1)
        dx, dw, db, *_ = sum_gradients
        dx = (dx * factor).to(plan.dtype) if needs_dx and dx is not None else None
        if needs_dw:
            dw = _grad_weight(sum_gradients, saved, plan, factor) if dw is None else (dw * factor).to(plan.weight_dtype)
        db = (db * factor[0]).to(plan.bias_dtype) if needs_db and db is not None else None
        return dx, dw if needs_dw else None, db, None, None, None


def _grad_weight(sum_gradients: _Gradients, saved: Saved, plan: BackwardPlan, factor: Tensor) -> Tensor:
    """Return dW by one product; the factor multiplies G's scale where all of G has one, else the result."""
    recipe, codes, scale_inv = plan.layer.recipe, sum_gradients.codes, sum_gradients.scale_inv
    assert codes is not None and recipe.grad_weight is not None
    cast, dtype = recipe.grad_weight[0], plan.dtype
    if scale_inv is None:
        pair, product = (codes, _fixed_scale_inv(recipe, cast, codes.shape[0], factor) * factor), plan
    else:  # a power of two stays one
        dtype = torch.float32 if dtype is torch.float16 else dtype  # which may not hold a sum over all rows
        pair, product = (codes, scale_inv), plan._replace(dtype=dtype, weight_dtype=dtype)
    _, dw, _ = gradients(GradOutput(Operands(None, pair)), saved, product, (False, True, False))
    assert dw is not None
    return dw if scale_inv is None else (dw * factor).to(plan.weight_dtype)


def linear_cross_entropy_of_rows(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    loss: LossOfRows,
    layer: Layer,
    x_casts: InputCasts | None = None,
) -> Tensor:
    """Return the loss, a float32 scalar, of logits x . weight^T + bias [T, N], of which one chunk exists at a time.

    Gradients flow to x, ``weight_NK`` and bias; all are bf16, fp16 or fp32. ``layer`` and ``x_casts``: as of
    products.linear.

    Raises:
        ValueError: for a recipe that casts to E2M1.
    """
    if layer.recipe.has_e2m1:
        raise ValueError(
            f"a head of the recipe {layer.recipe.name!r} has no loss in chunks, as E2M1's scales are of all rows: give "
            'it another recipe, e.g. octavo.RecipeMap(recipe, {"lm_head": None})'
        )
    if is_recorded(x_TK, weight_NK, bias):
        return _LinearCrossEntropy.apply(x_TK, weight_NK, bias, loss, layer, x_casts)
    _, x, _ = input_operands(x_TK, layer, x_casts, False)
    return _Chunks(x_TK, x, weight_NK, bias, loss, layer).loss_and_gradients((False, False, False))[0]
