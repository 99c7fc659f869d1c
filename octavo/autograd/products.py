"""The three products of a linear layer, written once for every module and recipe.

    output       y_TN  = input_TK . weight_NK^T        forward
    grad_input   dx_TK = grad_output_TN . weight_KN^T  backward
    grad_weight  dW_NK = grad_output_NT . input_KT^T   backward

Legend: T tokens, K in features, N out features; a suffix gives the layout, contracted dimension last. An operand is a
pair (qdata, scale_inv); forward saves for backward the pair itself, never a copy, never the recipe's scale:
however the recipe moves on, the pair reads back as it was written.

Of rows in groups (grouped.py) each product is one of all groups: weight [G, N, K], bias [G, N].

Delayed state is committed by backward's cast of grad_output, see scaling/delayed.py.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.autograd.casts import CastRequest, CodesAndScale, Recast, as_rows, cast_and_commit, cast_role, commit
from octavo.autograd.gather_input import GatheredInput
from octavo.autograd.grouped import group_sums, grouped_linear, grouped_mm, scales_of_rows
from octavo.autograd.observer import Observer
from octavo.autograd.rows import DENSE, Rows
from octavo.autograd.shared_casts import CastReader, InputCasts
from octavo.errors import HigherOrderGradientError
from octavo.kernels.arguments import CastSource, RotaryHeads
from octavo.kernels.layouts import contraction_multiple
from octavo.private import has_storage, is_exporting, keeps_graph, tracing_state, will_engine_execute_node
from octavo.scaling.delayed import INPUT_NOT_CAST, UNKNOWN_CAST, State, entering_input
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, WEIGHT, Recipe
from octavo.tensor.pair import Operands


class Layer(NamedTuple):
    """A linear layer's part in its products, besides weight and bias themselves.

    Attributes:
        weight: the weight's operands.
        recipe: how its products are computed.
        state: the delayed state, if a cast is Delayed.
        commits: whether backward commits that state.
        observers: they see the casts and products.
        rows: how the rows of its input and output lie.
    """

    weight: Operands
    recipe: Recipe
    state: State | None = None
    commits: bool = False
    observers: tuple[Observer, ...] = ()
    rows: Rows = DENSE


class BackwardPlan(NamedTuple):
    """A layer's settings for the computation of its gradients in backward, besides the tensors that are saved.

    Attributes:
        layer: the layer, without tensors but its delayed state.
        dtype: that of products' results.
        weight_dtype, bias_dtype: those of the gradients of weight and bias.
        input_cast: a number that two layers have only if they read the same cast of their input, or UNKNOWN_CAST.
        weight_is_swapped: whether the weight is saved [..., K, N].
        first_state: the state by which the first backward pass cast grad_output, if it kept the graph for this one.
    """

    layer: Layer
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None = None
    input_cast: int = UNKNOWN_CAST
    weight_is_swapped: bool = False
    first_state: State | None = None


_SAVED = Operands()  # stands for the weight's operands, whose tensors autograd keeps


def backward_plan(
    layer: Layer, dtype: torch.dtype, weight_NK: Tensor, bias: Tensor | None, input_cast: int = UNKNOWN_CAST
) -> BackwardPlan:
    """Return the plan of a layer's backward, with results of this dtype."""
    source, rows = layer.weight.source, layer.rows
    if rows.offsets is not None:  # they are saved
        rows = Rows(None, rows.parts, rows.wire)
    # field by field, as every forward calls this: _replace takes twice as long
    layer = Layer(_SAVED, layer.recipe, layer.state, layer.commits, layer.observers, rows)
    bias_dtype = None if bias is None else bias.dtype
    return BackwardPlan(layer, dtype, weight_NK.dtype, bias_dtype, input_cast, source is not None and source.is_swapped)


def output(
    x_TK: Tensor | None, x: Operands, weight_NK: Tensor, bias: Tensor | None, layer: Layer, dtype: torch.dtype
) -> Tensor:
    """Return the output product [T, N] in this dtype; ``x_TK`` is read where it stays in high precision."""
    recipe, offsets = layer.recipe, layer.rows.offsets
    if recipe.output is None:
        assert x_TK is not None
        weight, bias = weight_NK.to(dtype), None if bias is None else bias.to(dtype)
        y_TN = F.linear(x_TK, weight, bias) if offsets is None else grouped_linear(x_TK, weight, bias, offsets)
    else:
        assert x.as_is is not None and layer.weight.as_is is not None
        y_TN = _matmul(recipe, "output", x.as_is, layer.weight.as_is, bias, dtype, offsets)
    for observer in layer.observers:
        observer.product(recipe, "output", y_TN, x.as_is or (x_TK, None), offsets, x.amax)
    return y_TN


class Saved(NamedTuple):
    """The tensors that forward saves for backward; None where no gradient that is needed reads one.

    Attributes:
        x_TK: the input, for a grad_weight in high precision.
        x_q, x_scale_inv: the input's transposed pair, for a grad_weight in FP8.
        weight_NK: the weight, for a grad_input in high precision or a cast in backward (WeightSource).
        weight_q, weight_scale_inv: the weight's transposed pair, for a grad_input in FP8.
        offsets: [G] int32, where groups of rows end.
        x_amax, weight_amax: of Delayed casts, which backward commits.
        delayed_scale: of all roles [3], by which backward casts the weight again.
        recast_scale: of an activation's output, whose codes backward computes again (casts.Recast), without an x_q.
    """

    x_TK: Tensor | None
    x_q: Tensor | None
    x_scale_inv: Tensor | None
    weight_NK: Tensor | None
    weight_q: Tensor | None
    weight_scale_inv: Tensor | None
    offsets: Tensor | None
    x_amax: Tensor | None
    weight_amax: Tensor | None
    delayed_scale: Tensor | None
    recast_scale: Tensor | None = None


def to_save(x_TK: Tensor | None, x: Operands, weight_NK: Tensor, layer: Layer, needs_dx: bool, needs_dw: bool) -> Saved:
    """Return the tensors that forward saves for the gradients of (input, weight) that are needed."""
    recipe, weight, source = layer.recipe, layer.weight, layer.weight.source
    weight_to_save = weight_NK if source is None else source.tensor
    no_pair: tuple[Tensor | None, Tensor | None] = None, None
    x_pair = x.transposed if needs_dw and recipe.grad_weight is not None else None
    weight_pair = weight.transposed if needs_dx and recipe.grad_input is not None else None
    return Saved(
        x_TK if needs_dw and recipe.grad_weight is None else None,
        *(x_pair or no_pair),
        weight_to_save if needs_dx and (recipe.grad_input is None or source is not None) else None,
        *(weight_pair or no_pair),
        layer.rows.offsets,
        x.amax,
        weight.amax,
        source.delayed_scale if needs_dx and source is not None else None,
    )


def plan_for_next_pass(plan: BackwardPlan) -> BackwardPlan:
    """Return the plan for a second backward over a kept graph (retain_graph).

    It casts grad_output by the scales that this pass reads, and commits only grad_output's amax: this pass has
    committed forward's. It may be called before or after that commit: the scales are those from before the pass.
    Compiled code commits forward's amaxes in each pass, by the scales of that pass.
    """
    state = plan.layer.state if plan.layer.commits and plan.first_state is None else None
    if state is None or torch.compiler.is_compiling() or not keeps_graph():
        return plan
    scale = state.in_force(GRAD_OUTPUT)
    return plan._replace(first_state=State(scale, state.amax_history, torch.zeros_like(state.before)))


def gradients_needed_now(ctx: Any) -> Any:
    """Return which of the gradients that forward's first inputs need are computed in this backward pass.

    torch.autograd.grad may ask for those of inputs first and for those of weights later, as pipelines without bubbles
    do. ``ctx.are_tensors``, which forward has set: which of these inputs are tensors, and not None.
    """
    needs = ctx.needs_input_grad[: len(ctx.are_tensors)]
    if torch.compiler.is_compiling():
        return needs
    edges, needed = iter(ctx.next_functions), []
    for need, is_tensor in zip(needs, ctx.are_tensors, strict=True):
        node = next(edges)[0] if is_tensor else None
        try:
            needed.append(need and bool(will_engine_execute_node(node)))
        except RuntimeError:  # it is a leaf among torch.autograd.grad's inputs
            needed.append(True)
    return tuple(needed)


GradientSource = Tensor | CastSource | RotaryHeads  # what a layer's grad_output is cast from, see ``cast_gradient``
NeededGradients = tuple[bool, bool, bool]  # whether those of (input, weight, bias) are needed


class GradOutput:
    """A layer's grad_output: its pairs, its column sums, and itself where a gradient reads it in high precision.

    ``gradients`` sets each pair to None once its product is computed, so that it is freed before the next: an argument
    itself would be held until the call returns, by the star of a call or torch.compile's way to call.
    """

    def __init__(self, operands: Operands, grad_TN: Tensor | None = None) -> None:
        self.as_is, self.transposed, self.column_sum = operands.as_is, operands.transposed, operands.column_sum
        self.recast_codes, self.grad_TN = operands.recast_codes, grad_TN


def cast_gradient(
    source: GradientSource, saved: Saved, plan: BackwardPlan, needs: NeededGradients, recast: Recast | None = None
) -> GradOutput:
    """Cast a layer's grad_output for the gradients of (input, weight, bias) that are needed; commit the delayed state.

    ``saved`` comes from ``to_save``. ``source`` is the gradient of the layer's output [T, N], or what that is computed
    from: the gradient of an activation of the output, or of heads that rotary positions turned.
    """
    layer, offsets = plan.layer, saved.offsets
    recipe, state = layer.recipe, layer.state
    needs_dx, needs_dw, needs_db = needs
    request = CastRequest(recipe, GRAD_OUTPUT, needs_dx, needs_dw, needs_db, only_products=True, recast=recast)
    rows = layer.rows if offsets is None else Rows(offsets, layer.rows.parts, layer.rows.wire)
    forward_amax = saved.x_amax, saved.weight_amax
    if state is None or not layer.commits:
        g = cast_role(source, request, state, rows)
    elif plan.first_state is not None:  # another pass over the graph: the first one has entered forward's amaxes
        g = cast_role(source, request, plan.first_state, rows)
        if g.amax is not None:
            with entering_input(state, INPUT_NOT_CAST):
                commit(state, recipe, (None, None, g.amax), rows.parts)
    else:
        with entering_input(state, INPUT_NOT_CAST if saved.x_amax is None else plan.input_cast):
            g = cast_and_commit(source, request, state, forward_amax, rows)
    for observer in layer.observers:
        observer.cast(recipe, GRAD_OUTPUT, functools.partial(unrounded, source, offsets), g, offsets)
    high_precision_reads = (needs_dx and recipe.grad_input is None) or (needs_dw and recipe.grad_weight is None)
    if not high_precision_reads and (not needs_db or g.column_sum is not None):
        return GradOutput(g)
    return GradOutput(g, source if isinstance(source, Tensor) else unrounded(source, offsets).to(plan.dtype))


def commit_forward(plan: BackwardPlan, x_amax: Tensor | None, weight_amax: Tensor | None) -> None:
    """Enter forward's amaxes alone into a layer's delayed state, where no Delayed cast of grad_output was made."""
    layer = plan.layer
    if layer.state is not None and layer.commits and plan.first_state is None:
        with entering_input(layer.state, INPUT_NOT_CAST if x_amax is None else plan.input_cast):
            commit(layer.state, layer.recipe, (x_amax, weight_amax, None), layer.rows.parts)


def unrounded(source: GradientSource, offsets: Tensor | None) -> Tensor:
    """Return the values that a cast of the source rounds to codes, in float32 if they are computed.

    Codes of h are read in float32, as the cast reads them: not in the layer's dtype, as ``activated_linear`` does.
    """
    if isinstance(source, Tensor):
        return source
    if isinstance(source, RotaryHeads):
        return kernels.rotary(*source).view(source.shape)
    x, activation, preactivation, h_scale_inv, h_tile = source
    if h_scale_inv is not None:
        if offsets is not None:
            h_scale_inv, h_tile = scales_of_rows(h_scale_inv, h_tile, offsets, x.shape[0])
        h = kernels.dequantize(x if preactivation is None else preactivation, h_scale_inv, h_tile, torch.float32)
        x, preactivation = (h, None) if preactivation is None else (x, h)
    return kernels.produced(x, activation, preactivation)


def gradients(
    g: GradOutput, saved: Saved, plan: BackwardPlan, needs: NeededGradients
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of (input, weight, bias) that are needed, from ``cast_gradient`` of the same arguments."""
    weight_NK, offsets = saved.weight_NK, saved.offsets
    if plan.weight_is_swapped and weight_NK is not None:
        weight_NK = weight_NK.mT
    layer, dtype, recipe = plan.layer, plan.dtype, plan.layer.recipe
    committed_state = layer.state if layer.commits else None
    needs_dx, needs_dw, needs_db = needs
    dx_TK = dw_NK = db_N = None
    if needs_dx:
        if recipe.grad_input is None:
            assert g.grad_TN is not None and weight_NK is not None
            dx_TK = _mm(g.grad_TN, weight_NK.to(g.grad_TN.dtype), offsets)
        else:
            w_q, w_scale_inv = saved.weight_q, saved.weight_scale_inv
            if w_q is None and weight_NK is not None:
                w_q, w_scale_inv = weight_cast_again(weight_NK, layer, saved.delayed_scale)
            assert g.as_is is not None and w_q is not None and w_scale_inv is not None
            dx_TK = _matmul(recipe, "grad_input", g.as_is, (w_q, w_scale_inv), None, dtype, offsets)
        for observer in layer.observers:
            observer.product(recipe, "grad_input", dx_TK, g.as_is or (g.grad_TN, None), offsets, None, committed_state)
    g.as_is = None
    if needs_dw:
        if recipe.grad_weight is None:
            assert g.grad_TN is not None and saved.x_TK is not None
            dw_NK = _mm(g.grad_TN.t(), saved.x_TK, offsets)
        else:
            assert g.transposed is not None and saved.x_q is not None and saved.x_scale_inv is not None
            dw_NK = _matmul(recipe, "grad_weight", g.transposed, (saved.x_q, saved.x_scale_inv), None, dtype, offsets)
        dw_NK = dw_NK.to(plan.weight_dtype)
        for observer in () if needs_dx else layer.observers:
            operand = g.transposed or (None if g.grad_TN is None else g.grad_TN.t(), None)
            observer.product(recipe, "grad_weight", dw_NK, operand, offsets, None, committed_state)
        g.transposed = None
    if needs_db:
        if (column_sum := g.column_sum) is None:
            assert g.grad_TN is not None
            column_sum = g.grad_TN.sum(0) if offsets is None else group_sums(g.grad_TN, offsets)
        assert plan.bias_dtype is not None
        db_N = column_sum.to(plan.bias_dtype)
    return dx_TK, dw_NK, db_N


def weight_cast_again(weight_NK: Tensor, layer: Layer, delayed_scale: Tensor | None) -> CodesAndScale:
    """Return the transposed pair of a weight that was freed since forward, with the bits that forward would have cast.

    Raises RuntimeError where nobody has gathered the weight again.
    """
    # a compiled graph can't ask for the bytes of a storage
    is_freed = not torch.compiler.is_compiling() and weight_NK.numel() and not weight_NK.untyped_storage().nbytes()
    if weight_NK.ndim < 2 or is_freed:
        raise RuntimeError(
            f"a weight {tuple(weight_NK.shape)} that is sharded was not gathered for its layer's backward: FSDP and "
            "ZeRO-3 do so in hooks of the module that they wrap, whose outputs have to be used"
        )
    if (state := layer.state) is not None:
        state = None if delayed_scale is None else state._replace(scale=delayed_scale, before=state.before * 0)
    request = CastRequest(layer.recipe, WEIGHT, as_is=False, transposed=True, only_products=True)
    pair = cast_role(weight_NK.detach(), request, state, layer.rows).transposed
    assert pair is not None
    return pair


def refuse_in_backward(*grads: Tensor | None) -> None:
    """Raise HigherOrderGradientError for second derivatives, and for gradients in batches; a graph has neither."""
    if torch.compiler.is_compiling():
        return
    remedy = "use octavo.set_recipe(model, octavo.recipes.high_precision()) for that pass"
    if torch.is_grad_enabled():
        raise HigherOrderGradientError(f"create_graph=True asks for second derivatives, which FP8 has not; {remedy}")
    for grad in grads:
        if grad is not None and not has_storage(grad):
            raise HigherOrderGradientError(
                "is_grads_batched=True, jacobian(vectorize=True) and torch.func.vmap pass gradients in batches, which "
                f"FP8 products can't take; call backward once for each gradient, or {remedy}"
            )


def _matmul(
    recipe: Recipe,
    product: str,
    a: CodesAndScale,
    b: CodesAndScale,
    bias: Tensor | None,
    dtype: torch.dtype,
    offsets: Tensor | None,
) -> Tensor:
    a_cast, b_cast = getattr(recipe, product)
    operands, fast_accum = (*a, a_cast.tile, *b, b_cast.tile), product in recipe.fast_accum
    if offsets is None:
        return kernels.matmul(*operands, bias, dtype, fast_accum)
    pad = contraction_multiple(offsets.device, recipe.may_pad)
    return kernels.grouped_matmul(*operands, offsets, bias, dtype, fast_accum, pad)


def _mm(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    return torch.mm(a, b) if offsets is None else grouped_mm(a, b, offsets)


def input_operands(
    x_TK: Tensor, layer: Layer, x_casts: GatheredInput | InputCasts | None, needs_dw: bool
) -> tuple[Tensor | None, Operands, int]:
    """Return (the input in high precision, or None if it exists as pairs only, its pairs, their cast's number).

    ``x_casts``: those of an input that was gathered in FP8, or those that layers share; None: this layer shares none.
    """
    if isinstance(x_casts, GatheredInput):
        return None, x_casts.operands, UNKNOWN_CAST
    reader = CastReader(layer.recipe, layer.state, x_TK.dtype, layer.rows.offsets)
    if x_casts is not None and (shared_cast := x_casts.find(reader, needs_dw)) is not None:
        return x_TK, *shared_cast
    request = CastRequest(layer.recipe, INPUT, as_is=True, transposed=needs_dw, only_products=True)
    x = cast_role(x_TK, request, layer.state, layer.rows)
    return x_TK, x, UNKNOWN_CAST if x_casts is None else x_casts.add(reader, needs_dw, x)


class _LinearFunction(torch.autograd.Function):
    """y = x . W^T + b with a recipe's products."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None, layer: Layer, x_casts: Any) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad[:3]
        x_to_save, x, number = input_operands(x_TK, layer, x_casts, needs_dw)
        for observer in () if isinstance(x_casts, GatheredInput) else layer.observers:
            observer.cast(layer.recipe, INPUT, lambda: x_TK, x, layer.rows.offsets)
        ctx.plan = backward_plan(layer, x_TK.dtype, weight_NK, bias, number)
        ctx.are_tensors = True, True, bias is not None
        ctx.save_for_backward(*to_save(x_to_save, x, weight_NK, layer, needs_dx, needs_dw))
        return output(x_to_save, x, weight_NK, bias, layer, x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_in_backward(*grads)
        plan, needs = ctx.plan, gradients_needed_now(ctx)
        ctx.plan = plan_for_next_pass(plan)
        saved = Saved(*ctx.saved_tensors)
        return *gradients(cast_gradient(grads[0], saved, plan, needs), saved, plan, needs), None, None


def linear(
    x: Tensor | GatheredInput, weight_NK: Tensor, bias: Tensor | None, layer: Layer, x_casts: InputCasts | None = None
) -> Tensor:
    """Return y [..., N] = x [..., K] . weight^T + bias, in the dtype of x; the recipe has at least one product in FP8.

    Gradients flow to ``weight_NK`` itself, whose operands the layer has. All are bf16, fp16 or fp32. ``x_casts``: the
    input's casts that layers share, see shared_casts.py; x itself has them if it was gathered.
    """
    casts: GatheredInput | InputCasts | None = x_casts
    if isinstance(x, GatheredInput):
        casts, x = x, x.carrier
    x_TK = x if x.ndim == 2 else as_rows(x)
    if is_recorded(x, weight_NK, bias):
        y_TN = _LinearFunction.apply(x_TK, weight_NK, bias, layer, casts)
    else:
        x_to_read, operands, _ = input_operands(x_TK, layer, casts, False)
        y_TN = output(x_to_read, operands, weight_NK, bias, layer, x_TK.dtype)
    return y_TN if x.ndim == 2 else y_TN.view(*x.shape[:-1], weight_NK.shape[0])


def is_recorded(*tensors: Tensor | None) -> bool:
    """Return whether autograd records operations on these: not in programs of torch.export and torch.jit.trace.

    Casts for backward would ask whether there are rows for more than one block, and so limit the number of rows.
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return not is_exporting() and tracing_state() is None
    return False


def requires_grad(tensor: Tensor | None) -> bool:
    """Whether there is a tensor that requires a gradient."""
    return tensor is not None and tensor.requires_grad
