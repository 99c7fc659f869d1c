"""Modules with octavo's computations that keep nothing: every call casts anew, by the definitions of the tests.

Casts are those of tests/support/definitions.py (numpy, ml_dtypes, gfloat); only the products of codes are octavo's, so
that sums round in the same order. Delayed scaling is as the documentation defines it: a history has an entry for each
optimizer step, the largest amax of all calls of the layer in it; it belongs to a rank; forward changes nothing. A twin
that forgets has no history: it casts each tensor by its own amax, whatever the definition of delayed scaling says.

Without a recipe a twin computes in the dtype of its weight: in float64 it is what a sound verdict is measured against.

Legend: T tokens, K in features, N out features; a suffix gives the layout, contracted dimension last.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo import kernels
from octavo.nn.known_forwards import DecoderLayer, LeanRMSNorm, LlamaFeedForward
from octavo.weights.stored import StoredWeight
from tests.support import definitions

INPUT, WEIGHT, GRAD_OUTPUT = range(3)
Pair = tuple[Tensor, Tensor]


class History(NamedTuple):
    """A rank's delayed state of a layer: scales [3], 0 for none yet, and amaxes [3, H], newest first."""

    scale: Tensor
    amaxes: Tensor


class Casts:
    """The casts of a layer's tensors, with the state that delayed scaling has by its definition."""

    def __init__(self, recipe: octavo.Recipe | None) -> None:
        self.own_history: History | None = None
        self.forgets = False  # whether there is no history
        self.entered = False  # whether the optimizer step that is under way has an entry
        self.pass_id = -1  # of the last backward pass
        self.pending: tuple[octavo.Recipe, History, Tensor] | None = None  # of the last pass; its largest amaxes [3]
        self.gathered: list[float] | None = None  # the weight's scales since its gather, of which the first holds
        self.set(recipe)

    def set(self, recipe: octavo.Recipe | None) -> None:
        """Follow another recipe from the next call on."""
        self.recipe = None if recipe is None or recipe.is_high_precision else recipe
        if recipe is None or recipe.delayed is None:
            self.own_history, self.entered = None, False

    @contextlib.contextmanager
    def using(self, recipe: octavo.Recipe) -> Iterator[None]:
        """Follow another recipe, or the same with a history that is thrown away."""
        self.settle()
        state = self.recipe, self.own_history, self.entered
        if self.own_history is not None:
            self.own_history = History(*(part.clone() for part in self.own_history))
        self.set(recipe)
        yield
        self.settle()
        self.recipe, self.own_history, self.entered = state

    def history(self) -> History | None:
        """The layer's on this rank, if its recipe has any."""
        self.settle()
        if self.recipe.delayed is None or self.forgets:
            return None
        if self.own_history is None:
            with torch.inference_mode(False):
                self.own_history = History(torch.zeros(3), torch.zeros(3, self.recipe.delayed.history_length))
        return self.own_history

    def cover(self, other: Casts) -> None:
        """Make the history that of both layers' weights as one matrix: the largest amaxes, the smallest scales."""
        if other is not self and (histories := (self.history(), other.history()))[0] is not None:
            scales, amaxes = zip(*histories, strict=True)
            self.own_history = History(torch.minimum(*scales), torch.maximum(*amaxes))

    def forget(self, role: int) -> None:
        """Empty the history of a role."""
        self.settle()
        for part in self.own_history or ():
            part[role] = 0

    def cast(self, x: Tensor, cast: octavo.Cast, role: int, history: History | None, transposed: bool = False) -> Pair:
        """The pair of x [R, C] as a product reads it; without a history, or an empty one, by its own amax."""
        tile = cast.tile[::-1] if transposed else cast.tile
        scale = 0.0 if history is None or not cast.is_delayed else float(history.scale[role])
        if role == WEIGHT and self.gathered is not None:
            self.gathered.append(scale)
            scale = self.gathered[0]
        if isinstance(x, StoredWeight) and transposed and x.granularity.tile != tile:  # of rows, or 1x32: its values
            values = kernels.dequantize(x.qdata, x.scale_inv, x.granularity.tile, torch.float32)
            return self.cast(values, cast, role, history, transposed)
        if isinstance(x, StoredWeight):
            pair = x.qdata.clone(), x.scale_inv.clone()
        else:
            x = x.detach().contiguous()
            if cast.format is octavo.E2M1:
                return packed(x.t().contiguous() if transposed else x, cast, scale)
            how = cast.format.dtype, tile, cast.power_of_two, cast.margin, scale
            pair = _cast(x.view(torch.uint8).numpy().tobytes(), x.shape, x.dtype, *how)
        return (pair[0].t(), pair[1].t()) if transposed else pair

    def saw(self, recipe: octavo.Recipe, history: History, amaxes: list[Tensor]) -> None:
        """Note the amaxes of a call in the backward pass that runs; once it is over, completed or not, they roll."""
        self.settle()
        seen = torch.zeros(3) if self.pending is None else self.pending[2]
        self.pass_id = torch._C._current_graph_task_id()
        self.pending = recipe, history, torch.maximum(seen, torch.stack(amaxes))

    def end_step(self) -> None:
        """End an optimizer's step: the next backward pass is another entry."""
        self.settle()
        self.entered = False

    def settle(self) -> None:
        """Put the largest amaxes of the last pass into the history, if it is over."""
        if self.pending is None or torch._C._current_graph_task_id() == self.pass_id:
            return
        (recipe, (scale, amaxes), seen), self.pending = self.pending, None
        for role, pair in enumerate(recipe.casts):
            delayed = next((cast for cast in pair[:2] if cast is not None and cast.is_delayed), None)
            if delayed is not None:
                if not self.entered:
                    amaxes[role] = amaxes[role].roll(1)
                    amaxes[role, 0] = 0
                amaxes[role, 0] = torch.maximum(amaxes[role, 0], seen[role])
                amax = amaxes[role].max() if recipe.delayed.reduce == "max" else amaxes[role, 0]
                how = delayed.format.limit, delayed.power_of_two, delayed.margin
                scale[role] = definitions.scale_of(float(amax), *how, float(scale[role]))
        self.entered = True


@functools.lru_cache(256)
def _cast(data: bytes, shape: torch.Size, dtype: torch.dtype, code_dtype: torch.dtype, *how: Any) -> Pair:
    """The definition, which gives the same for the same bits."""
    x = torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    codes, scale_inv, _ = definitions.cast(x, code_dtype, *how)
    return codes.view(code_dtype), scale_inv


def packed(x: Tensor, cast: octavo.Cast, scale: float) -> Pair:
    """The pair of x, laid as the product reads it, in E2M1."""
    rotation, seed = cast.rotation and cast.rotation.signs, cast.rounding and cast.rounding.seed
    codes, scale_inv = definitions.nvfp4(x, cast.tile, cast.margin, scale, rotation, seed)
    return codes.view(octavo.E2M1.dtype), scale_inv


def amax_of(x: Tensor) -> Tensor:
    """The largest absolute finite value."""
    return torch.where(x.isfinite(), x.float().abs(), 0.0).max() if x.numel() else torch.zeros(())


def product(casts: Any, a: Pair, b: Pair, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product of two pairs, with their casts."""
    return kernels.matmul(*a, casts[0].tile, *b, casts[1].tile, bias, dtype, False)


class _Products(torch.autograd.Function):
    """The product x . W^T + b, and its gradients, in the recipe's casts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Tensor | None, casts: Casts, training: bool, owned: bool
    ) -> Tensor:
        ctx.casts, ctx.recipe, ctx.history = casts, casts.recipe, casts.history()
        ctx.rolls = ctx.history if training else None
        of_weight = ctx.rolls if owned else None  # a plain tensor is not what the history is of
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        output, grad_input, grad_weight = ctx.recipe.output, ctx.recipe.grad_input, ctx.recipe.grad_weight
        if output is None:
            y = F.linear(x, weight, bias)
        else:
            w_pair = casts.cast(weight, output[1], WEIGHT, of_weight)
            y = product(output, casts.cast(x, output[0], INPUT, ctx.history), w_pair, bias, x.dtype)
        ctx.x, ctx.weight = x.detach(), weight.detach().clone() if grad_input is None else None  # or their pairs
        if grad_input is not None:
            ctx.weight = casts.cast(weight, grad_input[1], WEIGHT, of_weight, transposed=True)
        if grad_weight is not None:
            ctx.x = casts.cast(x, grad_weight[1], INPUT, ctx.history, transposed=True)
        seen = owned and not isinstance(weight, StoredWeight)
        ctx.amaxes = [amax_of(x), amax_of(weight) if seen else torch.zeros(())]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        casts, history, grad_input, grad_weight = ctx.casts, ctx.history, ctx.recipe.grad_input, ctx.recipe.grad_weight
        if ctx.rolls is not None:
            casts.saw(ctx.recipe, ctx.rolls, [*ctx.amaxes, amax_of(g)])
            # another pass over the same graph casts as this one, and notes only its gradient's amax
            ctx.history, ctx.amaxes = History(history.scale.clone(), history.amaxes), [torch.zeros(())] * 2
        dtype, weight_dtype, bias_dtype = ctx.dtypes
        dx = dw = db = None
        if ctx.needs_input_grad[0] and grad_input is None:
            dx = g @ ctx.weight
        elif ctx.needs_input_grad[0]:
            dx = product(grad_input, casts.cast(g, grad_input[0], GRAD_OUTPUT, history), ctx.weight, None, dtype)
        if ctx.needs_input_grad[1] and grad_weight is None:
            dw = (g.t() @ ctx.x).to(weight_dtype)
        elif ctx.needs_input_grad[1]:
            pair = casts.cast(g, grad_weight[0], GRAD_OUTPUT, history, transposed=True)
            dw = product(grad_weight, pair, ctx.x, None, dtype).to(weight_dtype)
        if ctx.needs_input_grad[2]:
            db = g.sum(0).to(bias_dtype)  # in float32, rounded once
        return dx, dw, db, None, None, None


def held(weight: Any, exact: bool) -> Any:
    """Return a weight; ``exact``: of one in FP8 the values that it was stored from."""
    if exact and isinstance(weight, StoredWeight):
        return nn.Parameter(weight.before_cast(), weight.requires_grad)
    return weight


class TwinLinear(nn.Module):
    """The computation of octavo.nn.Linear, of [T, K]."""

    def __init__(self, layer: Any, exact: bool) -> None:
        super().__init__()
        self.weight, self.bias = held(layer.weight, exact), layer.bias
        self.casts = Casts(None if exact else layer.recipe)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """The output, or of a head the mean cross entropy of it and of targets."""
        if self.casts.recipe is None:
            weight = self.weight.dequantize() if isinstance(self.weight, StoredWeight) else self.weight
            y = F.linear(x, weight, self.bias)
            return y if target is None else cross_entropy_by_hand(y, target)
        if torch.is_autocast_enabled("cpu"):  # a weight is rounded once, to codes
            x = x.to(torch.get_autocast_dtype("cpu"))
        if target is not None:
            return _HeadLoss.apply(x, self, target, self.weight, self.bias)
        owned = isinstance(self.weight, nn.Parameter)
        return _Products.apply(x, self.weight, self.bias, self.casts, self.training, owned)


UNIT = History(torch.full((3,), 2.0**15), torch.zeros(3, 1))  # of numbers in [-1, 1] in E5M2


def _loss_and_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the mean cross entropy, the gradient of the sum [T, V] in float32, the rows with a target)."""
    z, counts = logits.float(), target >= 0
    lse, place = z.logsumexp(1), target.clamp(min=0)[:, None]
    losses = torch.where(counts, lse - z.gather(1, place)[:, 0], 0.0)
    grad = (z - lse[:, None]).exp()
    grad.scatter_add_(1, place, torch.full(place.shape, -1.0))
    return losses.sum() / counts.sum(), torch.where(counts[:, None], grad, 0.0), counts.sum()


class _Loss(torch.autograd.Function):
    """The mean cross entropy of logits and targets, in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        loss, ctx.grad, ctx.count = _loss_and_gradient(logits, target)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return (ctx.grad * (g / ctx.count)).to(ctx.dtype), None


def cross_entropy_by_hand(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of rows whose target is not -100; of float64 torch's."""
    if logits.dtype is torch.float64:
        return F.cross_entropy(logits, target)
    return _Loss.apply(logits, target)  # type: ignore[no-any-return]


class _HeadLoss(torch.autograd.Function):
    """The mean cross entropy of x . W^T + b in the recipe's casts, its gradients computed in forward, as documented.

    Where a delayed recipe has a scale for all of grad_output, it is that of numbers in [-1, 1] in E5M2 instead.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: TwinLinear, target: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        casts = ctx.casts = layer.casts
        output, grad_input, grad_weight = casts.recipe.output, casts.recipe.grad_input, casts.recipe.grad_weight
        ctx.recipe, history = casts.recipe, casts.history()
        ctx.rolls = history if layer.training else None
        owned = isinstance(layer.weight, nn.Parameter)
        of_weight = ctx.rolls if owned else None
        w_pair = casts.cast(weight, output[1], WEIGHT, of_weight)
        logits = product(output, casts.cast(x, output[0], INPUT, history), w_pair, bias, x.dtype)
        loss, grad, ctx.count = _loss_and_gradient(logits, target)
        if not grad_input[0].is_delayed:
            grad = grad.to(logits.dtype)
        w_pair = casts.cast(weight, grad_input[1], WEIGHT, of_weight, transposed=True)
        ctx.dx = product(grad_input, casts.cast(grad, grad_input[0], GRAD_OUTPUT, UNIT), w_pair, None, x.dtype)
        ctx.grad = casts.cast(grad, grad_weight[0], GRAD_OUTPUT, UNIT, transposed=True)
        ctx.x = casts.cast(x, grad_weight[1], INPUT, history, transposed=True)
        ctx.db = grad.to(logits.dtype).sum(0, dtype=torch.float32)
        ctx.amaxes = [amax_of(x), amax_of(weight) if owned else torch.zeros(()), torch.zeros(())]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.rolls is not None:
            ctx.casts.saw(ctx.recipe, ctx.rolls, ctx.amaxes)
            ctx.amaxes = [torch.zeros(())] * 3
        factor, casts, (codes, scale_inv) = (g / ctx.count).view(1, 1), ctx.recipe.grad_weight, ctx.grad
        dtype, weight_dtype, bias_dtype = ctx.dtypes
        if casts[0].is_delayed:
            dw = product(casts, (codes, scale_inv * factor), ctx.x, None, dtype)
        else:
            dw = product(casts, (codes, scale_inv), ctx.x, None, dtype) * factor
        db = None if bias_dtype is None else (ctx.db * factor[0]).to(bias_dtype)
        return (ctx.dx * factor).to(dtype), None, None, dw.to(weight_dtype), db


class _OfExpert(torch.autograd.Function):
    """One expert's matrix of a weight in FP8 [E, N, K]."""

    @staticmethod
    def forward(ctx: Any, weight: StoredWeight, expert: int) -> Tensor:
        ctx.shape, ctx.expert = weight.shape, expert
        return StoredWeight(weight.qdata[expert], weight.scale_inv[expert], weight.dtype, weight.granularity)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        grad = g.new_zeros(ctx.shape)
        grad[ctx.expert] = g
        return grad, None


class TwinExperts(nn.Module):
    """The computation of octavo.nn.Experts, without a gate: a loop over experts."""

    def __init__(self, experts: Any, exact: bool) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Module(), nn.Module()
        for name in ("gate_up", "down"):
            ours, twin = getattr(experts, name), getattr(self, name)
            assert ours.bias is None  # the library adds up its gradient in another order
            twin.weight, twin.casts = held(ours.weight, exact), Casts(None if exact else ours.recipe)
        assert experts.activation == "relu"

    def linear(self, layer: Any, x: Tensor, expert: int) -> Tensor:
        """Multiply one expert's rows by its matrix."""
        stored = isinstance(layer.weight, StoredWeight)
        weight = _OfExpert.apply(layer.weight, expert) if stored else layer.weight[expert]
        if layer.casts.recipe is None:
            return F.linear(x, weight)
        return _Products.apply(x, weight, None, layer.casts, self.training, isinstance(layer.weight, nn.Parameter))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = index.reshape(-1)
        x_of_rows = x[:, None].expand(*index.shape, x.shape[1]).reshape(len(rows), x.shape[1])
        result = x.new_zeros(len(rows), x.shape[1])
        for expert in range(self.gate_up.weight.shape[0]):
            mine = (rows == expert).nonzero()[:, 0]
            if len(mine):
                hidden = self.linear(self.gate_up, x_of_rows[mine], expert).relu()
                result = result.index_copy(0, mine, self.linear(self.down, hidden, expert))
        return (result.view(len(x), -1, x.shape[1]) * weights.unsqueeze(-1)).sum(1)


class _Norm(torch.autograd.Function):
    """The norm x / sqrt(mean(x^2) + eps) * gamma over rows, in the order of the kernels' documentation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        rstd = torch.reciprocal((x.square().mean(1) + eps).sqrt())[:, None]
        ctx.save_for_backward(x * rstd, rstd, gamma)
        return x * rstd * gamma

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        n, rstd, gamma = ctx.saved_tensors
        w = g * gamma
        dx = torch.addcmul(w, n, (w * n).mean(1, keepdim=True), value=-1) * rstd
        return dx, (g * n).sum(0), None


class TwinNorm(nn.Module):
    """The computation of an RMS norm that octavo computes."""

    def __init__(self, norm: Any, exact: bool) -> None:
        super().__init__()
        self.weight, self.exact, self.eps = norm.weight, exact, getattr(norm, "variance_epsilon", norm.eps)

    def forward(self, x: Tensor, by_torch: bool = False) -> Tensor:
        """Return the norm of x, by torch's own operation if asked for, or if it is exact."""
        if self.exact or by_torch:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return _Norm.apply(x, self.weight, self.eps)


class TwinMLP(nn.Module):
    """The computation of octavo.nn.RMSNormMLP, one part after the other."""

    def __init__(self, mlp: Any, exact: bool) -> None:
        super().__init__()
        assert mlp.activation == "relu"
        self.norm = TwinNorm(mlp.norm, exact)
        self.fc1, self.fc2 = TwinLinear(mlp.fc1, exact), TwinLinear(mlp.fc2, exact)

    def forward(self, x: Tensor) -> Tensor:
        """Norm, fc1, ReLU, fc2; where fc1 is in high precision the norm is torch's."""
        return self.fc2(self.fc1(self.norm(x, self.fc1.casts.recipe is None)).relu())


class ReadsAsOne(nn.Module):
    """A module of convert(fuse=True) whose layers that read one tensor are one matrix.

    ``apart``: each is computed by itself, as where their weights are sharded.
    """

    apart = False

    def each(self, layers: Sequence[TwinLinear], x: Tensor) -> Sequence[Tensor]:
        """Return each layer's output of x [T, K]."""
        first, weights = layers[0], [layer.weight for layer in layers]
        recipe, plain = first.casts.recipe, all(type(weight) is nn.Parameter for weight in weights)
        hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        alike = all(layer.casts.recipe is recipe for layer in layers)
        if recipe is None or not alike or hooks or not plain or self.apart:
            return [layer(x) for layer in layers]
        for layer in layers:
            first.casts.cover(layer.casts)
            layer.casts = first.casts
        x = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x
        y = _Products.apply(x, torch.cat(weights), None, first.casts, self.training, True)
        return y.split([len(weight) for weight in weights], 1)  # type: ignore[no-any-return]


class TwinFeedForward(ReadsAsOne):
    """The computation of Llama's feed-forward: gate and up are one matrix."""

    def __init__(self, mlp: Any, exact: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = TwinLinear(mlp.gate_proj, exact), TwinLinear(mlp.up_proj, exact)
        self.down_proj, self.act_fn = TwinLinear(mlp.down_proj, exact), mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.each((self.gate_proj, self.up_proj), x)
        return self.down_proj(self.act_fn(gate) * up)


class TwinAttention(ReadsAsOne):
    """The computation of Llama's attention of a sequence [T, W]: q, k and v are one matrix; positions turn by hand."""

    def __init__(self, attention: Any, exact: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            TwinLinear(getattr(attention, name), exact) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        self.width = attention.head_dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention's output; cos, sin [T, D] of the angles of positions."""
        parts = self.each((self.q_proj, self.k_proj, self.v_proj), x)
        q, k, v = (part.unflatten(1, (-1, self.width)).transpose(0, 1) for part in parts)  # [heads, T, D]
        q, k = (_turned(heads, cos, sin) for heads in (q, k))
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return self.o_proj(attended.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (a, b), the halves of each head [..., D], turned by angles: (a cos - b sin, b cos + a sin)."""
    (a, b), half = x.chunk(2, -1), x.shape[-1] // 2
    return torch.cat((a * cos[:, :half] - b * sin[:, :half], b * cos[:, half:] + a * sin[:, half:]), -1)


class TwinDecoderLayer(nn.Module):
    """The computation of Llama's decoder layer of one sequence [1, T, W]."""

    def __init__(self, layer: Any, exact: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = TwinAttention(layer.self_attn, exact), TwinFeedForward(layer.mlp, exact)
        self.input_layernorm = TwinNorm(layer.input_layernorm, exact)
        self.post_attention_layernorm = TwinNorm(layer.post_attention_layernorm, exact)

    def forward(self, x: Tensor, position_embeddings: Any, **_: Any) -> Tensor:
        x = x[0]
        x = x + self.self_attn(self.input_layernorm(x), *(table[0] for table in position_embeddings))
        return (x + self.mlp(self.post_attention_layernorm(x)))[None]


TWINS: dict[type, Any] = {
    DecoderLayer: TwinDecoderLayer,
    LlamaFeedForward: TwinFeedForward,
    octavo.nn.Linear: TwinLinear,
    octavo.nn.Experts: TwinExperts,
    octavo.nn.RMSNormMLP: TwinMLP,
    LeanRMSNorm: TwinNorm,
}


def twin_of(model: nn.Module, exact: bool = False) -> nn.Module:
    """The model with twins in the place of octavo's modules, on the same parameters; ``exact``: in float64."""
    for name, child in model.named_children():
        twin = next((TWINS[kind] for kind in type(child).__mro__ if kind in TWINS), None)
        setattr(model, name, twin_of(child, exact) if twin is None else twin(child, exact))
    return model.double() if exact else model


@contextlib.contextmanager
def computing_apart(apart: bool) -> Iterator[None]:
    """Let twins compute layers that read one tensor each by itself, as where their weights are sharded."""
    with mock.patch.object(ReadsAsOne, "apart", apart):
        yield


def casts_of(model: nn.Module) -> list[Casts]:
    """Return the casts of all twins in a model."""
    return [module.casts for module in model.modules() if isinstance(getattr(module, "casts", None), Casts)]
