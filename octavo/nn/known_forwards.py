"""Modules of other libraries whose forward octavo knows, and computes so that less is saved for backward.

    feed-forward   act(gate(x)) . up(x), or act(up(x)), then down: the activation is computed as its result is cast for
                   down's product, and is never written in high precision (autograd/chain.py)
    RMS norm       saves its input, and no copies of it in float32 (autograd/norm.py)

A module becomes a subclass of its own class, as a linear layer does: parameters, parts, hooks and names stay. Known are
the forwards that stand here as ``library_forward``, as transformers writes them: a class whose forward has the same
instructions and defaults computes the same, whatever its name. A feed-forward's first layers are called as ever; its
activation and its last layer compute together. The class's own forward runs instead if

    the last layer is no octavo.nn.Linear (adapted, quantised, restored), has hooks or another forward, is tensor
    parallel, or has its ``output`` product in high precision
    the activation has hooks or another forward, or is one that casts don't compute
    dropout is active between the two, or has hooks or another forward
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from octavo.autograd.chain import activated_linear
from octavo.autograd.norm import norm_and_branch
from octavo.autograd.products import requires_grad
from octavo.autograd.rotary import Attended, Positions, heads_apart, rotary
from octavo.nn.bytecode import same_code
from octavo.nn.candidates import REPLACED_SINCE, SHARDED, class_of, fp8_class, is_fsdp_class, of_subclass
from octavo.nn.experts import ConvertedExperts, function_of, name_of
from octavo.nn.fused import can_fuse, forward_is_bypassable, run_as_one
from octavo.nn.inputs import product_dtype, refuse_for_fp8
from octavo.nn.joined import Joined
from octavo.nn.linear import Linear
from octavo.nn.loss import has_loss, take_loss
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.tensor_parallel import FusedParts
from octavo.private import functorch_is_active, in_forward_mode, is_dtensor


class PartNames(NamedTuple):
    """The names of a module's parts; empty for those that it lacks."""

    input_layers: tuple[str, ...] = ()  # that read the input and may be computed as one
    act: str = ""
    down: str = ""
    dropout: str = ""


class KnownForward(nn.Module):
    """Base of the classes for modules with a known forward; mixed in before a module's own class.

    Each class's ``forward`` returns what the module's own class returns, with less saved, or leaves it to that class.
    """

    fused_kind: str  # FusedModule's
    part_names = PartNames()
    library_forward: Any  # repeats the source of the library's forward; compared with it, and never called

    @classmethod
    def why_not_fused(cls, module: nn.Module) -> str | None:
        """Return why a module that has this forward, but not this class yet, stays as it is; or None."""
        return None

    def why_bypassed(self) -> str | None:
        """Return why the module now computes by its own class's or a replaced forward, and saves all; or None.

        Dropout's mode and dtypes are checked in forward.
        """
        return REPLACED_SINCE if "forward" in self.__dict__ else self.why_not_fused(self)

    def forward_of_own_class(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own class, which follows this one, computes."""
        return super().forward(*args, **kwargs)

    @property
    def input_layers(self) -> list[Any]:
        """The layers that read the module's input and may be computed as one."""
        return [getattr(self, name) for name in self.part_names.input_layers]


class FeedForward(KnownForward):
    """Base of feed-forwards: one or two layers, an activation, a layer."""

    fused_kind = "feed-forward"

    @classmethod
    def why_not_fused(cls, module: nn.Module) -> str | None:
        names = cls.part_names
        is_gated = len(names.input_layers) == 2
        down, act, dropout = (getattr(module, name, None) for name in (names.down, names.act, names.dropout))
        if not isinstance(down, Linear):
            return f"{names.down} is not converted"
        if name_of(function_of(act), is_gated) is None:
            return f"casts don't compute {type(act).__name__}{' as a gate' * is_gated}"
        sizes = {getattr(getattr(module, name), "out_features", None) for name in names.input_layers}
        if len(sizes - {None}) > 1:
            return f"{' and '.join(names.input_layers)} have different numbers of features"
        if isinstance(dropout, nn.Dropout) and dropout.p:
            return f"dropout of {dropout.p} lies between its activation and {names.down}"
        can_bypass = activation_name(act, is_gated) is not None and can_skip_dropout(dropout)
        return None if can_bypass else "its activation or dropout has hooks or another forward"

    def why_bypassed(self) -> str | None:
        down = self.part_names.down
        why = f"{down} has hooks, another forward, or its output product in high precision"
        return super().why_bypassed() or (None if is_bypassable_linear(getattr(self, down)) else why)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (x,) = *args, *kwargs.values()
        names, input_layers = self.part_names, self.input_layers
        down: Any = getattr(self, names.down)
        dropout = getattr(self, names.dropout) if names.dropout else None
        activation = activation_name(getattr(self, names.act), len(input_layers) == 2)
        if activation is None or not is_bypassable_linear(down) or not can_skip_dropout(dropout):
            return self.forward_of_own_class(*args, **kwargs)
        tensors = weight, bias, parameter = down.layer_tensors()
        if is_dtensor(weight) or not (weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type)):
            return self.forward_of_own_class(*args, **kwargs)
        if (first := as_one_layer(input_layers)) is not None:
            layers = [first.layer_tensors(), tensors]
            x = x.to(product_dtype(x, layers[0][0]))
            return run_as_one(FusedParts(x, layers), None, [first, down], activation, x.dtype)
        gate = input_layers[0](x)
        up = input_layers[1](x) if len(input_layers) == 2 else None
        dtype = product_dtype(gate, weight)
        gate, up = gate.to(dtype), None if up is None else up.to(dtype)
        refuse_for_fp8(gate, parameter, bias)
        needs_grad = gate.requires_grad or (up is not None and up.requires_grad)
        return activated_linear(gate, up, weight, bias, down.layer_of(gate, tensors, needs_grad), activation)


def can_skip_dropout(dropout: Any) -> bool:
    """Whether a module between an activation and a layer, if there is one, does nothing now, and may be bypassed."""
    if dropout is None:
        return True
    forward = getattr(type(dropout), "forward", None)  # none of a plain function
    if forward not in (nn.Dropout.forward, nn.Identity.forward) or not forward_is_bypassable(dropout):
        return False
    return isinstance(dropout, nn.Identity) or not (dropout.p and dropout.training)


def is_bypassable_linear(layer: Any) -> bool:
    """Whether a layer is octavo's, with one result by a product in FP8, and nothing has to call it."""
    return isinstance(layer, Linear) and layer.splits is None and can_fuse((layer,))


def as_one_layer(layers: Sequence[Any]) -> Any:
    """Return layers that read one tensor as one layer for ``run_as_one``; None if hooks or the like forbid it."""
    if len(layers) == 1:
        return layers[0] if is_bypassable_linear(layers[0]) and not is_dtensor(layers[0].weight) else None
    if not layers or not all(isinstance(layer, Linear) for layer in layers):
        return None
    joint_layer = Joined(tuple(layers))
    return joint_layer if joint_layer.can_join() else None


class LlamaFeedForward(FeedForward):
    """The feed-forward of Llama, Mistral, Qwen and many others."""

    part_names = PartNames(("gate_proj", "up_proj"), "act_fn", "down_proj")

    def library_forward(self: Any, x: Tensor) -> Any:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class ViTFeedForward(FeedForward):
    """The feed-forward of ViT and similar models."""

    part_names = PartNames(("fc1",), "activation_fn", "fc2")

    def library_forward(self: Any, hidden_states: Tensor) -> Any:
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


class T5FeedForward(FeedForward):
    """The feed-forward of T5, without a gate."""

    part_names = PartNames(("wi",), "act", "wo", "dropout")

    def library_forward(self: Any, hidden_states: Tensor) -> Any:
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


class GatedT5FeedForward(FeedForward):
    """The feed-forward of T5 version 1.1 and Flan-T5, with a gate."""

    part_names = PartNames(("wi_0", "wi_1"), "act", "wo", "dropout")

    def library_forward(self: Any, hidden_states: Tensor) -> Any:
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
    """The RMS norm of Llama, Qwen, Mixtral, Mamba and many others."""

    fused_kind = "norm"
    weight: nn.Parameter
    variance_epsilon: float

    @classmethod
    def why_not_fused(cls, module: nn.Module) -> str | None:
        weight: Any = getattr(module, "weight", None)
        if isinstance(getattr(module, "variance_epsilon", None), Tensor):
            return "its epsilon is a tensor"
        return None if isinstance(weight, Tensor) and weight.ndim == 1 else "its weight is no vector"

    def library_forward(self: Any, hidden_states: Tensor) -> Any:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (x,) = *args, *kwargs.values()
        return self.norm_and_residual(x)[0] if self.can_be_lean(x) else self.forward_of_own_class(*args, **kwargs)

    def can_be_lean(self, x: Tensor) -> bool:
        """Whether a norm of x, or of its sum with a residual, is computed here."""
        weight = self.weight
        if x.dtype != weight.dtype or is_dtensor(weight) or is_dtensor(x) or weight.shape != x.shape[-1:]:
            return False
        return torch.compiler.is_compiling() or not (functorch_is_active() or in_forward_mode())

    def norm_and_residual(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (the norm of x, or of x + residual if there is one; the norm's input, for the residual branch)."""
        return norm_and_branch(x, self.weight, self.variance_epsilon, residual)


class LeanT5Norm(LeanRMSNorm):
    """The RMS norm of T5."""

    def library_forward(self: Any, hidden_states: Tensor) -> Any:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


# what a decoder layer passes to its attention in place of arguments that its caller leaves out
_DECODER_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("attention_mask", "position_ids", "cache", "position_embeddings")),
    "use_cache": False,
}


class DecoderLayer(KnownForward):
    """The decoder layer of Llama and many others; each norm adds the residual, and in backward its gradient."""

    fused_kind = "residual"

    def library_forward(  # type: ignore[no-untyped-def]
        self: Any, hidden_states, attention_mask, position_ids, cache, use_cache, position_embeddings, **kwargs
    ):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states

    @classmethod
    def why_not_fused(cls, module: nn.Module) -> str | None:
        norms = [getattr(module, name) for name in ("input_layernorm", "post_attention_layernorm")]
        are_fused = all(isinstance(norm, LeanRMSNorm) or refusal(norm) is None for norm in norms)
        return None if are_fused else f"its norms, {class_of(norms[0]).__name__}, are not fused"

    def why_bypassed(self: Any) -> str | None:
        norms = self.input_layernorm, self.post_attention_layernorm
        why = None if all(map(forward_is_bypassable, norms)) else "its norms have hooks or other forwards"
        return super().why_bypassed() or why

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what its own class returns, which computes it for arguments by position, or by an old name."""
        norms = self.input_layernorm, self.post_attention_layernorm
        are_lean = all(
            isinstance(norm, LeanRMSNorm) and forward_is_bypassable(norm) and norm.can_be_lean(hidden_states)
            for norm in norms
        )
        # its own class gives past_key_values their new name, cache
        if args or "past_key_values" in kwargs or not are_lean:
            return self.forward_of_own_class(hidden_states, *args, **kwargs)
        x, residual = norms[0].norm_and_residual(hidden_states)
        x, _ = self.self_attn(hidden_states=x, **(_DECODER_DEFAULTS | kwargs))
        if x.dtype == residual.dtype:
            x, residual = norms[1].norm_and_residual(x, residual)
        else:  # under autocast, where torch's sum has the residual's wider dtype
            residual = residual + x
            x = norms[1](residual)
        return residual + self.mlp(x)


# An attention's forward, as transformers writes it in several variants: the function that turns positions and the table
# of functions of attention are names of the library's module. Python compiles a call of a method of what a module
# imports to instructions of its own, so the table is imported here as there.
_ATTENTION = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def forward(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    query_states = {queries}.transpose(1, 2)
    key_states = {keys}.transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    cos, sin = position_embeddings
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
    if cache is not None:
        key_states, value_states = cache.update(key_states, value_states, self.layer_idx, kwargs=kwargs)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    attn_output, attn_weights = attend(
        self, query_states, key_states, value_states, attention_mask,
        dropout=0.0 if not self.training else self.attention_dropout, scaling=self.scaling, {window} **kwargs,
    )
    attn_output = attn_output.reshape(*input_shape, -1).contiguous()
    attn_output = self.o_proj(attn_output)
    return attn_output, attn_weights
"""


def _attention_forward(window: str = "", norms_heads: bool = False) -> Any:
    """Return the function that a variant of _ATTENTION defines, to be compared and never called."""
    queries, keys = (f"self.{name}_proj(hidden_states).view(hidden_shape)" for name in "qk")
    if norms_heads:
        queries, keys = f"self.q_norm({queries})", f"self.k_norm({keys})"
    source = _ATTENTION.format(queries=queries, keys=keys, window=window)
    constants = compile(source, __file__, "exec").co_consts  # nothing of it runs, and nothing is imported
    return FunctionType(next(constant for constant in constants if isinstance(constant, CodeType)), {})


QKV = ("q_proj", "k_proj", "v_proj")


class Attention(KnownForward):
    """The attention of Llama and many others; q, k and v are one product, rotary positions of q and k one launch."""

    fused_kind = "attention"
    part_names = PartNames(QKV)
    head_dim: int
    attention_functions: Any  # transformers' functions of attention by name, and the class's own in plain torch
    eager_attention: Any
    library_forward: Any = _attention_forward()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.take_functions()

    @classmethod
    def take_functions(cls) -> None:
        """Note the library's functions of attention, which may have been replaced since the last model was fused."""
        plain: Any = cls.__mro__[cls.__mro__.index(KnownForward) + 1]
        if plain is not nn.Module:  # nn.Module follows in the classes of this file
            names = inspect.unwrap(plain.forward).__globals__
            cls.attention_functions = names["ALL_ATTENTION_FUNCTIONS"]
            cls.eager_attention = staticmethod(names["eager_attention_forward"])

    @classmethod
    def why_not_fused(cls, module: nn.Module) -> str | None:
        layers = [getattr(module, name) for name in QKV]
        if not all(isinstance(layer, Linear) for layer in layers):
            return f"{', '.join(QKV)} are not all converted"
        if any(layer.recipe != layers[0].recipe for layer in layers):
            return f"{', '.join(QKV)} have different recipes"
        # a fused one calls none of the library's functions for that, also if they are replaced since
        if not isinstance(module, KnownForward) and not _turns_as_kernels_do(inspect.unwrap(class_of(module).forward)):
            return "its rotary positions are none that octavo knows"
        return None

    def why_bypassed(self) -> str | None:
        why = f"{', '.join(QKV)} have hooks, other forwards, or weights that are sharded or in FP8"
        return super().why_bypassed() or (why if as_one_layer(self.input_layers) is None else None)

    def attention_options(self) -> dict[str, Any]:
        """Return the further keyword arguments that the class passes to the function of attention."""
        return {}

    def heads_from(self, run: Callable[..., Any], positions: Positions) -> Attended:
        """Return queries, keys and values for attention; ``run`` computes the joined layers' product, as run_as_one."""
        return run(positions=positions)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what its own class returns, which computes it for arguments by position, or by an old name."""
        layers = self.input_layers
        # its own class gives past_key_values their new name, cache
        tables: Any = None if "past_key_values" in kwargs else kwargs.get("position_embeddings")
        can_turn_here = not (args or tables is None or requires_grad(tables[0]) or requires_grad(tables[1]))
        if not can_turn_here or hidden_states.ndim != 3 or (joint_layer := as_one_layer(layers)) is None:
            return self.forward_of_own_class(hidden_states, *args, **kwargs)
        del kwargs["position_embeddings"]
        tensors = joint_layer.layer_tensors()
        x = hidden_states.to(product_dtype(hidden_states, tensors[0]))
        run = functools.partial(run_as_one, FusedParts(x, [tensors]), None, [joint_layer], "", x.dtype)
        heads, kv_heads, _ = [layer.out_features // self.head_dim for layer in layers]
        query, key, value = self.heads_from(run, Positions(tables[0], tables[1], (heads, kv_heads), x.shape[0]))
        mask, cache = kwargs.pop("attention_mask", None), kwargs.pop("cache", None)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
            if torch.is_grad_enabled():  # a view of all three would be saved beside the cache's copies of two
                query = query.contiguous()
        attend = self.attention_functions.get_interface(self.config._attn_implementation, self.eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.scaling, **self.attention_options()}
        output, weights = attend(self, query, key, value, mask, **options, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class AttentionOfMistral(Attention):
    """The attention of Mistral and Mixtral, whose configuration may limit how far back queries look."""

    library_forward = _attention_forward(window="sliding_window=getattr(self.config, 'sliding_window', None),")

    def attention_options(self) -> dict[str, Any]:
        return {"sliding_window": getattr(self.config, "sliding_window", None)}


class AttentionOfQwen2(Attention):
    """The attention of Qwen2 and others, whose layers differ in how far back queries look."""

    sliding_window: int | None
    library_forward = _attention_forward(window="sliding_window=self.sliding_window,")

    def attention_options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


class AttentionOfQwen3(AttentionOfQwen2):
    """The attention of Qwen3 and others, with a norm of each head of queries and keys before their rotary positions."""

    q_norm: nn.Module
    k_norm: nn.Module
    library_forward = _attention_forward(window="sliding_window=self.sliding_window,", norms_heads=True)

    def heads_from(self, run: Callable[..., Any], positions: Positions) -> Attended:
        cos, sin, counts, _ = positions
        query, key, value = heads_apart(run(), counts, self.head_dim)
        query, key = self.q_norm(query), self.k_norm(key)
        return rotary((query, key, value.to(query.dtype)), cos, sin, counts)  # under autocast a norm is in float32


def rotate_half(x: Tensor) -> Tensor:
    """Turn halves as transformers does; never called, only compared with its function."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    """Turn queries and keys as transformers does; never called, only compared with its function."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def _turns_as_kernels_do(forward: Any) -> bool:
    """Whether a forward turns q and k by functions that compute as the two above, as the kernels do."""
    turns = rotate_half, apply_rotary_pos_emb
    return all(same_code(forward.__globals__.get(turn.__name__), turn) for turn in turns)


_FEED_FORWARDS = (LlamaFeedForward, ViTFeedForward, T5FeedForward, GatedT5FeedForward)
_ATTENTIONS = (Attention, AttentionOfMistral, AttentionOfQwen2, AttentionOfQwen3)
_KINDS: tuple[type[KnownForward], ...] = (*_FEED_FORWARDS, LeanRMSNorm, LeanT5Norm, DecoderLayer, *_ATTENTIONS)


def activation_name(act: Any, gated: bool) -> str | None:
    """Return the name in kernels/activations.py of an activation module's function, or of a gate by it; or None."""
    return name_of(function_of(act), gated) if isinstance(act, nn.Module) and forward_is_bypassable(act) else None


@functools.cache  # by function, and not by class: a library may replace a class's forward
def _class_for(forward: Any) -> type[KnownForward] | None:
    """Return the class of this file whose ``library_forward`` has a forward's code; or None."""
    return next((kind for kind in _KINDS if same_code(forward, kind.library_forward)), None)


def refusal(module: nn.Module) -> str | None:
    """Return why a module with an activation between layers, or another library's norm, is not fused.

    None for a module that is or can be fused; "" for every other module.
    """
    if isinstance(module, KnownForward):
        return module.why_bypassed()
    kind = class_of(module)
    if (known_class := _class_for(inspect.unwrap(kind.forward))) is None:
        return f"octavo does not know the forward of {kind.__name__}" if _looks_alike(module, kind) else ""
    if is_fsdp_class(type(module)):
        return SHARDED
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance before octavo.convert"
    if parametrize.is_parametrized(module):
        return "its parameters are computed from others (weight_norm or the like)"
    return known_class.why_not_fused(module)


class FusedModule(NamedTuple):
    """A module that computes by a forward of octavo's: what it is, and which of its layers are one product.

    ``kind``: "norm", "residual" (a decoder layer), "feed-forward", "attention", or "loss" (the model's own loss).
    ``input_layers``: the names in it of those that read its input; ``down``: that of a feed-forward's last layer.
    """

    name: str
    kind: str
    input_layers: tuple[str, ...] = ()
    down: str = ""
    is_joined: bool = False  # whether these are one product
    norms_heads: bool = False  # whether queries and keys are normed


def fused_modules(model: nn.Module) -> Iterator[FusedModule]:
    """Yield each module of a model that computes by a known forward, or the loss by octavo's."""
    for name, module in model.named_modules():
        if has_loss(module):
            yield FusedModule(name, "loss")
        if isinstance(module, KnownForward):
            names = module.part_names
            is_joined = as_one_layer(module.input_layers) is not None
            norms_heads = isinstance(module, AttentionOfQwen3)
            yield FusedModule(name, module.fused_kind, names.input_layers, names.down, is_joined, norms_heads)


def fuse_known(model: nn.Module) -> dict[str, list[str]]:
    """Give a converted model's modules of known forwards their classes; return {reason: names} of those that stay."""
    refused: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if (why := refusal(module)) is None and not isinstance(module, KnownForward):
            kind = class_of(module)
            module.__class__ = of_subclass(_class_for(inspect.unwrap(kind.forward)), kind)  # type: ignore[arg-type]
            if isinstance(module, Attention):
                module.take_functions()
        elif why:
            refused.setdefault(why, []).append(name or "the model")
        take_loss(module)
    return refused


def _looks_alike(module: nn.Module, kind: type[nn.Module]) -> bool:
    if kind.__module__.startswith(("torch.", "octavo.")) or isinstance(module, ConvertedExperts | RecipeModule):
        return False
    if kind.__name__.endswith("Norm") or all(isinstance(getattr(module, name, None), nn.Linear) for name in QKV):
        return True
    children = list(module.children())
    layers = [child for child in children if isinstance(child, nn.Linear) or fp8_class(child) is not None]
    return len(layers) > 1 and (kind.__name__.endswith("MLP") or any(function_of(child) for child in children))
