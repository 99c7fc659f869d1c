"""Modules that compute what octavo's do and keep nothing: every call casts anew, by the definitions of the tests.

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
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo import kernels
from octavo.nn.known_forwards import LeanRMSNorm, OfLlama
from octavo.tensor.stored_weight import StoredWeight
from tests.support import definitions

INPUT, WEIGHT, GRAD_OUTPUT = range(3)
Pair = tuple[Tensor, Tensor]


class History(NamedTuple):
    """A rank's delayed state of a layer: scales [3], 0 for none yet, and amaxes [3, H], newest first."""

    scale: Tensor
    amaxes: Tensor


class Casts:
    """How a layer's tensors are cast, with the state that delayed scaling has by its definition."""

    def __init__(self, recipe: octavo.Recipe | None) -> None:
        self.own: History | None = None
        self.forgets = False  # whether there is no history
        self.entered = False  # whether the optimizer step that is under way has an entry
        self.pass_id = -1  # of the last backward pass
        self.pending: tuple[octavo.Recipe, History, Tensor] | None = None  # what it shall roll, its largest amaxes [3]
        self.gathered: list[float] | None = None  # the weight's scales since its gather, of which the first holds
        self.set(recipe)

    def set(self, recipe: octavo.Recipe | None) -> None:
        """Follow another recipe from the next call on."""
        self.recipe = None if recipe is None or recipe.is_high_precision else recipe
        if recipe is None or recipe.delayed is None:
            self.own, self.entered = None, False

    @contextlib.contextmanager
    def using(self, recipe: octavo.Recipe) -> Iterator[None]:
        """Another recipe, or the same with a history that is thrown away."""
        self.settle()
        kept = self.recipe, self.own, self.entered
        if self.own is not None:
            self.own = History(*(part.clone() for part in self.own))
        self.set(recipe)
        yield
        self.settle()
        self.recipe, self.own, self.entered = kept

    def history(self) -> History | None:
        """The layer's on this rank, if its recipe has any."""
        self.settle()
        if self.recipe.delayed is None or self.forgets:
            return None
        if self.own is None:
            with torch.inference_mode(False):
                self.own = History(torch.zeros(3), torch.zeros(3, self.recipe.delayed.history_length))
        return self.own

    def forget(self, role: int) -> None:
        """Empty the history of a role."""
        self.settle()
        for part in self.own or ():
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
        """An optimizer has stepped: what the next backward pass sees is another entry."""
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
                found = amaxes[role].max() if recipe.delayed.reduce == "max" else amaxes[role, 0]
                how = delayed.format.max, delayed.power_of_two, delayed.margin
                scale[role] = definitions.scale_of(float(found), *how, float(scale[role]))
        self.entered = True


@functools.lru_cache(256)
def _cast(data: bytes, shape: torch.Size, dtype: torch.dtype, code_dtype: torch.dtype, *how: Any) -> Pair:
    """The definition, which gives the same for the same bits."""
    x = torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    codes, scale_inv, _ = definitions.cast(x, code_dtype, *how)
    return codes.view(code_dtype), scale_inv


def amax_of(x: Tensor) -> Tensor:
    """The largest absolute finite value."""
    return torch.where(x.isfinite(), x.float().abs(), 0.0).max() if x.numel() else torch.zeros(())


def product(casts: Any, a: Pair, b: Pair, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Of two pairs, with their casts."""
    return kernels.matmul(*a, casts[0].tile, *b, casts[1].tile, bias, dtype, False)


class _Products(torch.autograd.Function):
    """x . W^T + b, and its gradients, in the recipe's casts."""

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
        ctx.amaxes = [
            amax_of(x),
            amax_of(weight) if owned and not isinstance(weight, StoredWeight) else torch.zeros(()),
        ]
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        casts, history, grad_input, grad_weight = ctx.casts, ctx.history, ctx.recipe.grad_input, ctx.recipe.grad_weight
        if ctx.rolls is not None:
            casts.saw(ctx.recipe, ctx.rolls, [*ctx.amaxes, amax_of(g)])
            # another pass over a graph that is kept casts as this one, and enters its gradient alone
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
    """A weight; ``exact``: of one in FP8 the values that it was stored from."""
    if exact and isinstance(weight, StoredWeight):
        return nn.Parameter(weight.before_cast(), weight.requires_grad)
    return weight


class TwinLinear(nn.Module):
    """What octavo.nn.Linear computes of [T, K]."""

    def __init__(self, layer: Any, exact: bool) -> None:
        super().__init__()
        self.weight, self.bias = held(layer.weight, exact), layer.bias
        self.casts = Casts(None if exact else layer.recipe)

    def forward(self, x: Tensor) -> Tensor:
        if self.casts.recipe is None:
            weight = self.weight.dequantize() if isinstance(self.weight, StoredWeight) else self.weight
            return F.linear(x, weight, self.bias)
        if torch.is_autocast_enabled("cpu"):  # a weight is rounded once, to codes
            x = x.to(torch.get_autocast_dtype("cpu"))
        owned = isinstance(self.weight, nn.Parameter)
        return _Products.apply(x, self.weight, self.bias, self.casts, self.training, owned)


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
    """What octavo.nn.Experts computes, without a gate: a loop over experts."""

    def __init__(self, experts: Any, exact: bool) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Module(), nn.Module()
        for name in ("gate_up", "down"):
            ours, own = getattr(experts, name), getattr(self, name)
            assert ours.bias is None  # the library adds up its gradient in another order
            own.weight, own.casts = held(ours.weight, exact), Casts(None if exact else ours.recipe)
        assert experts.activation == "relu"

    def linear(self, layer: Any, x: Tensor, expert: int) -> Tensor:
        """One expert's rows times its matrix."""
        stored = isinstance(layer.weight, StoredWeight)
        weight = _OfExpert.apply(layer.weight, expert) if stored else layer.weight[expert]
        if layer.casts.recipe is None:
            return F.linear(x, weight)
        owned = isinstance(layer.weight, nn.Parameter)
        return _Products.apply(x, weight, None, layer.casts, self.training, owned)

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
    """x / sqrt(mean(x^2) + eps) * gamma over rows, in the order of the definition in the kernels' documentation."""

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
    """What an RMS norm that octavo computes does."""

    def __init__(self, norm: Any, exact: bool) -> None:
        super().__init__()
        self.weight, self.exact, self.eps = norm.weight, exact, getattr(norm, "variance_epsilon", norm.eps)

    def forward(self, x: Tensor, by_torch: bool = False) -> Tensor:
        """In torch's own operation if asked for, or exact."""
        if self.exact or by_torch:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return _Norm.apply(x, self.weight, self.eps)


class TwinMLP(nn.Module):
    """What octavo.nn.RMSNormMLP computes, one part after the other."""

    def __init__(self, mlp: Any, exact: bool) -> None:
        super().__init__()
        assert mlp.activation == "relu"
        self.norm = TwinNorm(mlp.norm, exact)
        self.fc1, self.fc2 = TwinLinear(mlp.fc1, exact), TwinLinear(mlp.fc2, exact)

    def forward(self, x: Tensor) -> Tensor:
        """Norm, fc1, ReLU, fc2; where fc1 is in high precision the norm is torch's."""
        return self.fc2(self.fc1(self.norm(x, self.fc1.casts.recipe is None)).relu())


class TwinFeedForward(nn.Module):
    """What Llama's feed-forward computes that convert(fuse=True) has changed: gate and up are one matrix.

    ``apart``: each is computed by itself, as where their weights are sharded.
    """

    apart = False

    def __init__(self, mlp: Any, exact: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = TwinLinear(mlp.gate_proj, exact), TwinLinear(mlp.up_proj, exact)
        self.down_proj, self.act_fn = TwinLinear(mlp.down_proj, exact), mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        recipe, plain = gate.casts.recipe, all(type(one.weight) is nn.Parameter for one in (gate, up))
        hooks = any(one._forward_hooks or one._forward_pre_hooks for one in (gate, up))
        if recipe is None or recipe is not up.casts.recipe or hooks or not plain or self.apart:
            h = gate(x), up(x)
        else:
            up.casts = gate.casts
            x = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x
            weight = torch.cat([gate.weight, up.weight])
            h = _Products.apply(x, weight, None, gate.casts, self.training, True).chunk(2, 1)
        return self.down_proj(self.act_fn(h[0]) * h[1])


TWINS: dict[type, Any] = {
    OfLlama: TwinFeedForward,
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
    """Let twins of feed-forwards compute gate and up each by itself, as where their weights are sharded."""
    with mock.patch.object(TwinFeedForward, "apart", apart):
        yield


def casts_of(model: nn.Module) -> list[Casts]:
    """Those of all twins in a model."""
    return [module.casts for module in model.modules() if isinstance(getattr(module, "casts", None), Casts)]
