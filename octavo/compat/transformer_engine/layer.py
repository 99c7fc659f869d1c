"""Transformer Engine's TransformerLayer of this package's modules and torch's attention; its norms, its rotary angles.

Shapes: S positions, B sequences, W width, H heads, G groups of them that share keys and values, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.compat.transformer_engine.modules import Init, LayerNormLinear, LayerNormMLP, Linear
from octavo.compat.transformer_engine.options import chosen, device_for, refuse
from octavo.errors import UnsupportedOptionError
from octavo.nn import norm
from octavo.nn.transformer import rotate

_TO_HEADS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}  # to [B, H, S, D]
_BACK = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}


class _Norm(nn.Module):
    """Transformer Engine's arguments, before octavo's norm."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, **options: Any) -> None:
        own = {name: options.pop(name) for name in ("zero_centered_gamma", "dtype") if name in options}
        device = device_for(options.pop("device", None))
        refuse(type(self).__name__, options)
        super().__init__(normalized_shape, eps, device=device, **own)


class LayerNorm(_Norm, norm.LayerNorm):
    """octavo.nn.LayerNorm with Transformer Engine's arguments.

    Example:
        >>> LayerNorm(8, zero_centered_gamma=True).weight.sum().item()
        0.0
    """


class RMSNorm(_Norm, norm.RMSNorm):
    """octavo.nn.RMSNorm with Transformer Engine's arguments.

    Example:
        >>> RMSNorm(8).weight.sum().item()
        8.0
    """


class RotaryPositionEmbedding(nn.Module):
    """The angles of rotary positions: of ``dim`` features, in two equal halves, [positions, 1, 1, dim] float32.

    Example:
        >>> RotaryPositionEmbedding(64)(128).shape
        torch.Size([128, 1, 1, 64])
    """

    def __init__(self, dim: int, *, rotary_base: float = 10_000.0, **options: Any) -> None:
        super().__init__()
        refuse("RotaryPositionEmbedding", options)
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device_for(None)) / dim
        self.register_buffer("inv_freq", rotary_base**-steps)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of this many positions from ``offset`` on."""
        frequencies: Any = self.inv_freq
        positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=frequencies.device)
        return torch.outer(positions, frequencies).repeat(1, 2)[:, None, None]


class TransformerLayer(nn.Module):
    """Self-attention, then an MLP, each after its norm and with dropout: Transformer Engine's layer of an encoder.

    Keys of a state_dict are Transformer Engine's: "self_attention.layernorm_qkv.query_weight" and so on, or one
    "weight" with ``fuse_qkv_params``, whose heads lie one behind the other if ``qkv_weight_interleaved``.

    Raises:
        UnsupportedOptionError: for options that octavo has nothing for, with what to write instead.

    Example:
        >>> layer = TransformerLayer(64, 256, 4, device="cpu")
        >>> layer(torch.randn(16, 2, 64)).shape
        torch.Size([16, 2, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        *,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        activation: str = "gelu",
        attn_input_format: str = "sbhd",
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse("TransformerLayer", options)
        self.groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.repeats = num_attention_heads // self.groups
        self.head_width = kv_channels or hidden_size // num_attention_heads
        self.hidden_dropout, self.attention_dropout = hidden_dropout, attention_dropout
        self.mask_type, self.format = self_attn_mask_type, attn_input_format
        chosen(_TO_HEADS, "attn_input_format", attn_input_format)
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        queries, keys = (count * self.head_width for count in (num_attention_heads, self.groups))
        common: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device}
        normed: dict[str, Any] = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma, **common}
        split = None if fuse_qkv_params else {"query": queries, "key": keys, "value": keys}
        normed |= {"eps": layernorm_epsilon, "init_method": init_method}
        qkv = LayerNormLinear(hidden_size, queries + 2 * keys, parameters_split=split, **normed)
        proj = Linear(queries, hidden_size, init_method=output_layer_init_method, **common)
        self.self_attention = nn.ModuleDict({"layernorm_qkv": qkv, "proj": proj})
        normed |= {"activation": activation, "output_layer_init_method": output_layer_init_method}
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, **normed)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        *,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """[S, B, W], or [B, S, W] for "bshd", to the same; an "arbitrary" mask is True where not to look."""
        refuse("TransformerLayer.forward", options)
        x = hidden_states
        query, key, value = self._heads(self.self_attention["layernorm_qkv"](x))
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb[: query.shape[2], 0, 0, : self.head_width // 2]
            query, key = (rotate(part, (angles.cos(), angles.sin())) for part in (query, key))
        attended = self._attend(query, key, value, attention_mask, self_attn_mask_type or self.mask_type)
        x = x + self._drop(self.self_attention["proj"](attended.permute(_BACK[self.format]).flatten(2)))
        return x + self._drop(self.layernorm_mlp(x))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """[..., (H + 2 G) D] to query [B, H, S, D], key and value [B, G, S, D]."""
        per_group = self.repeats, 1, 1
        if self.interleaved:
            grouped = qkv.unflatten(-1, (self.groups, sum(per_group), self.head_width)).split(per_group, dim=-2)
            parts = tuple(part.flatten(-3, -2) for part in grouped)
        else:
            heads = qkv.unflatten(-1, (-1, self.head_width))
            parts = heads.split([count * self.groups for count in per_group], dim=-2)
        return tuple(part.permute(_TO_HEADS[self.format]) for part in parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: str) -> Tensor:
        if kind not in ("causal", "no_mask", "arbitrary") or (mask is not None) != (kind == "arbitrary"):
            raise UnsupportedOptionError(
                f"self_attn_mask_type={kind!r} with{'out' if mask is None else ''} an attention_mask: use 'causal' or "
                "'no_mask' without one, or 'arbitrary' with a mask that is True where not to look"
            )
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask is None else ~mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=kind == "causal",
            enable_gqa=self.repeats > 1,
        )

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training)
