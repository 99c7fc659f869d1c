"""Modules of other libraries whose forward octavo knows, and computes with less to save for backward.

    feed-forward   act(gate(x)) . up(x), or act(up(x)), then down: the activation is computed as its result is cast for
                   down's product, and is never written in high precision (autograd/chain.py)
    RMS norm       saves its input, and no copies of it in float32 (autograd/chain.py)

A module becomes a subclass of its own class, as a linear layer does: parameters, parts, hooks and names stay. Known are
the forwards that stand here as ``known``, as transformers writes them: a class whose forward has the same instructions
computes the same, whatever its name. A feed-forward's first layers are called as ever; its activation and its last
layer compute together where nobody would notice, else the class's own forward runs:

    the last layer is no octavo.nn.Linear (adapted, quantised, restored), has hooks or another forward, is tensor
    parallel, or has its ``output`` product in high precision
    the activation has hooks, or is another one that casts don't compute
    dropout is at work between the two
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.autograd.chain import activated_linear, rms_norm
from octavo.nn.candidates import REPLACED, REPLACED_SINCE, SHARDED, class_of, fp8_class, is_sharded, of_subclass
from octavo.nn.experts import ConvertedExperts, function_of, name_of
from octavo.nn.fused import run_alone, runs_alone
from octavo.nn.inputs import product_dtype, refuse_for_fp8
from octavo.nn.linear import Linear
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.tensor_parallel import is_parallel
from octavo.private import functorch_is_active, in_forward_mode


class KnownForward(nn.Module):
    """Base of what modules with a known forward become; mixed in before their own class."""

    def known(self, *args: Any) -> Any:
        """The forward that is known, as its library writes it; never called."""
        raise NotImplementedError

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Why a module of this forward, not of this class yet, is left as it is; or None."""
        return None

    def why_bypassed(self) -> str | None:
        """Return why it computes by its own class's forward as things are now, or another one, and saves all; or None.

        Dropout and dtypes are asked in forward.
        """
        return REPLACED_SINCE if "forward" in self.__dict__ else self.why_not(self)

    def lean(self, x: Any) -> Tensor | None:
        """What forward returns, with less to save; None where the class's own forward is to compute it."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As its own class's, of the one tensor that this takes."""
        found = self.lean(*args, *kwargs.values())
        return super().forward(*args, **kwargs) if found is None else found


class PartNames(NamedTuple):
    """The names of a feed-forward's parts; an empty one: there is none."""

    gate: str
    up: str
    act: str
    dropout: str
    down: str


class FeedForward(KnownForward):
    """One or two layers, an activation, a layer."""

    parts: PartNames

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        names = cls.parts
        down, act, dropout = (getattr(module, name, None) for name in (names.down, names.act, names.dropout))
        if not isinstance(down, Linear):
            return f"{names.down} is not converted"
        if activation_of(act, bool(names.up)) is None:
            return f"casts don't compute {type(act).__name__}{' as a gate' if names.up else ''}"
        if isinstance(dropout, nn.Dropout) and dropout.p:
            return f"dropout of {dropout.p} lies between its activation and {names.down}"
        return None

    def why_bypassed(self) -> str | None:
        down: Any = getattr(self, self.parts.down)
        if (why := super().why_bypassed()) is None and not (down.splits is None and run_alone([down])):
            return f"{self.parts.down} has hooks, another forward, or its output product in high precision"
        return why

    def lean(self, x: Any) -> Tensor | None:
        names = self.parts
        down: Any = getattr(self, names.down)
        dropout: Any = getattr(self, names.dropout) if names.dropout else None
        if not isinstance(down, Linear) or down.splits is not None or not run_alone([down]):
            return None
        activation = activation_of(getattr(self, names.act), bool(names.up))
        if activation is None or (dropout is not None and dropout.p and dropout.training):
            return None
        tensors = weight, bias, parameter = down.operands()
        if is_parallel(weight) or not (weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type)):
            return None
        gate = getattr(self, names.gate)(x)
        up = getattr(self, names.up)(x) if names.up else None
        dtype = product_dtype(gate, weight)
        gate, up = gate.to(dtype), None if up is None else up.to(dtype)
        refuse_for_fp8(gate, parameter, bias)
        needs_grad = gate.requires_grad or (up is not None and up.requires_grad)
        return activated_linear(gate, up, weight, bias, down.layer_of(gate, tensors, needs_grad), activation)


class OfLlama(FeedForward):
    """Llama's, Mistral's, Qwen's and many others'."""

    parts = PartNames("gate_proj", "up_proj", "act_fn", "", "down_proj")

    def known(self: Any, x: Tensor) -> Any:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class OfViT(FeedForward):
    """ViT's and its kin's."""

    parts = PartNames("fc1", "", "activation_fn", "", "fc2")

    def known(self: Any, hidden_states: Tensor) -> Any:
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


class OfT5(FeedForward):
    """T5's without a gate."""

    parts = PartNames("wi", "", "act", "dropout", "wo")

    def known(self: Any, hidden_states: Tensor) -> Any:
        hidden_states = self.wi(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.dropout(hidden_states)
        if (
            isinstance(self.wo.weight, torch.Tensor)
            and hidden_states.dtype != self.wo.weight.dtype
            and self.wo.weight.dtype != torch.int8
        ):
            hidden_states = hidden_states.to(self.wo.weight.dtype)
        hidden_states = self.wo(hidden_states)
        return hidden_states


class OfGatedT5(FeedForward):
    """T5's with a gate, of version 1.1 and Flan-T5."""

    parts = PartNames("wi_0", "wi_1", "act", "dropout", "wo")

    def known(self: Any, hidden_states: Tensor) -> Any:
        hidden_gelu = self.act(self.wi_0(hidden_states))
        hidden_linear = self.wi_1(hidden_states)
        hidden_states = hidden_gelu * hidden_linear
        hidden_states = self.dropout(hidden_states)
        if (
            isinstance(self.wo.weight, torch.Tensor)
            and hidden_states.dtype != self.wo.weight.dtype
            and self.wo.weight.dtype != torch.int8
        ):
            hidden_states = hidden_states.to(self.wo.weight.dtype)
        hidden_states = self.wo(hidden_states)
        return hidden_states


class LeanRMSNorm(KnownForward):
    """Llama's, Qwen's, Mixtral's, Mamba's and many others'."""

    weight: nn.Parameter
    variance_epsilon: float

    def known(self: Any, hidden_states: Tensor) -> Any:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)

    def lean(self, x: Any) -> Tensor | None:
        weight = self.weight
        compiling = torch.compiler.is_compiling()
        if x.dtype != weight.dtype or is_parallel(weight) or is_parallel(x):
            return None
        if not compiling and (functorch_is_active() or in_forward_mode()):
            return None
        return rms_norm(x, weight, self.variance_epsilon)


class LeanT5Norm(LeanRMSNorm):
    """T5's."""

    def known(self: Any, hidden_states: Tensor) -> Any:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


_KINDS: tuple[type[KnownForward], ...] = (OfLlama, OfViT, OfT5, OfGatedT5, LeanRMSNorm, LeanT5Norm)


def activation_of(act: nn.Module | None, gated: bool) -> str | None:
    """The name of an activation module's function, or of a gate by it, in kernels/activations.py; or None."""
    return name_of(function_of(act), gated) if act is not None and runs_alone(act) else None


@functools.cache
def _known_class(kind: type[nn.Module]) -> type[KnownForward] | None:
    """Which of ours has the same instructions as a class's forward."""
    forward = kind.forward
    return next((ours for ours in _KINDS if inspect.isfunction(forward) and _same(forward, ours.known)), None)


def _same(one: Any, other: Any) -> bool:
    a, b = one.__code__, other.__code__
    return (a.co_code, a.co_names, a.co_consts) == (b.co_code, b.co_names, b.co_consts)


def refusal(module: nn.Module) -> str | None:
    """Why a module stays as it is, which holds an activation between layers, or is a norm of another library's.

    None of what is fused, or can be; "" of all else.
    """
    if isinstance(module, KnownForward):
        return module.why_bypassed()
    kind = class_of(module)
    ours = _known_class(kind)  # type: ignore[arg-type]  # torch annotates no hash of classes
    if ours is None:
        return f"octavo does not know the forward of {kind.__name__}" if _looks_alike(module, kind) else ""
    if is_sharded(type(module)):
        return SHARDED
    return REPLACED if "forward" in module.__dict__ else ours.why_not(module)


def fuse_known(model: nn.Module) -> dict[str, list[str]]:
    """Give a converted model's modules of known forwards their classes; the names of others by why they stay."""
    refused: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        why = refusal(module)
        if why is None and not isinstance(module, KnownForward):
            kind = class_of(module)
            module.__class__ = of_subclass(_known_class(kind), kind)  # type: ignore[arg-type]
        elif why:
            refused.setdefault(why, []).append(name or "the model")
    return refused


def _looks_alike(module: nn.Module, kind: type[nn.Module]) -> bool:
    if kind.__module__.startswith(("torch.", "octavo.")) or isinstance(module, ConvertedExperts | RecipeModule):
        return False
    if kind.__name__.endswith("Norm"):
        return True
    children = list(module.children())
    layers = [child for child in children if isinstance(child, nn.Linear) or fp8_class(child) is not None]
    return len(layers) > 1 and any(function_of(child) for child in children)
