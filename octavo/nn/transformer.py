"""A transformer block: causal attention with rotary positions and grouped queries, then an MLP, each after its norm.

Shapes: B sequences, C positions, W width, H heads, G heads of keys and values, D width of a head (even).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.autograd.products import requires_grad
from octavo.autograd.rotary import rotary as turn_queries_and_keys
from octavo.nn.fused import LayerNormLinear, LayerNormMLP, RMSNormLinear, RMSNormMLP, forward_is_bypassable
from octavo.nn.inputs import not_a_tensor_error
from octavo.nn.linear import Linear, split_output
from octavo.private import is_dtensor
from octavo.scaling.recipe import Recipe, RecipeMap, under

RotaryTables = tuple[Tensor, Tensor]  # cosines and sines [C, D / 2]
ROTARY_BASE = 10_000.0
_PARTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": (RMSNormLinear, RMSNormMLP),
    "layer_norm": (LayerNormLinear, LayerNormMLP),
}


def rotary_table(
    positions: int, head_width: int, base: float = ROTARY_BASE, device: torch.device | str | None = None
) -> RotaryTables:
    """Return cosines and sines of the rotary angles (Su et al. 2021, arXiv 2104.09864).

    Args:
        positions: C.
        head_width: features of one head, D (even).
        base: the longest wavelength is about 2π × base positions.
        device: where they are made.

    Returns:
        cos and sin, each [C, D / 2] float32.

    Raises:
        ValueError: for a head_width that is not even: features are turned in pairs.

    Example:
        >>> cos, sin = rotary_table(128, 64)
        >>> cos.shape
        torch.Size([128, 32])
    """
    if head_width < 2 or head_width % 2:
        raise ValueError(f"head_width={head_width} is not even: rotary positions turn pairs of features")
    steps = torch.arange(0, head_width, 2, dtype=torch.float64, device=device)
    angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * base ** (-steps / head_width)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rotary_tables: RotaryTables) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x [..., C, D] by its position's angle: q . k depends on distance alone."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = (table.to(x.dtype) for table in rotary_tables)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class SelfAttention(nn.Module):
    """Causal self-attention after a norm: ``out(attention(qkv(norm(x))))``.

    The norm and the one product of query, key and value are a LayerNormLinear or RMSNormLinear; the attention itself is
    torch's scaled_dot_product_attention in the product's dtype.

    Args:
        hidden_size: W.
        heads: H, a divisor of W with an even quotient.
        kv_heads: G, a divisor of H: so many heads share their keys and values; H by default.
        norm: "rms_norm" or "layer_norm".
        eps: the norm's.
        bias: of the two linear layers.
        recipe: an octavo.Recipe or RecipeMap (of the names "qkv.linear" and "out").
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.

    Raises:
        ValueError: for heads that don't divide the width, or kv_heads that don't divide the heads; in forward for
            rotary tables of fewer positions or another head width.

    Shape:
        input [B, C, W], result the same, dtype of the input or autocast's; C positions, each sees those before.

    Example:
        >>> import torch, octavo
        >>> attention = octavo.nn.SelfAttention(64, heads=4, kv_heads=1, recipe=octavo.recipes.rowwise())
        >>> attention(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        norm: str = "rms_norm",
        eps: float = 1e-5,
        bias: bool = False,
        recipe: Recipe | RecipeMap | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or hidden_size % (2 * heads):
            raise ValueError(f"hidden_size={hidden_size} is not a multiple of 2 x heads (heads={heads})")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}")
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, hidden_size // heads
        kv_size = kv_heads * self.head_width
        splits = {"query": hidden_size, "key": kv_size, "value": kv_size}
        if norm not in _PARTS:
            raise ValueError(f"norm={norm!r}: use 'layer_norm' or 'rms_norm'")
        self.qkv = _PARTS[norm][0](hidden_size, splits, eps, bias, device, dtype, recipe=under(recipe, "qkv"))
        self.out = Linear(hidden_size, hidden_size, bias, device, dtype, recipe=under(recipe, "out"))

    def forward(self, x: Tensor, rotary: RotaryTables | None = None) -> Tensor:
        """Return attention's output [B, C, W] for x [B, C, W].

        ``rotary`` has at least C positions, and D / 2 columns for heads of width D; it is computed here if a model has
        none to share between its blocks.
        """
        if not isinstance(x, Tensor):
            raise not_a_tensor_error(x)
        if x.ndim != 3:
            raise ValueError(f"input of shape {tuple(x.shape)} must be [sequences, positions, features]")
        query, key, value = self._heads(x, rotary)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.out(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, rotary_tables: RotaryTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys turned by positions, and values, [B, H or G, C, D]; by one launch if possible."""
        output = self.qkv.output_and_norm(x)[0] if forward_is_bypassable(self.qkv) else self.qkv(x)
        first = output if isinstance(output, Tensor) else output[0]
        positions = first.shape[1]  # of which x has a part under sequence parallelism
        if rotary_tables is None:
            rotary_tables = rotary_table(positions, self.head_width, device=x.device)
        cos, sin = (table[:positions] for table in rotary_tables)
        columns = self.head_width // 2  # of wider tables the first ones turn by another head width's frequencies
        if any(table.shape[0] < positions or table.shape[1] != columns for table in (cos, sin)):  # 1 would be broadcast
            shapes = f"rotary tables {list(cos.shape)} and {list(sin.shape)}"
            raise ValueError(f"{shapes}: each needs at least {positions} rows, and {columns} columns")
        if isinstance(output, Tensor) and not is_dtensor(output) and not (requires_grad(cos) or requires_grad(sin)):
            return turn_queries_and_keys((output,), cos[None], sin[None], (self.heads, self.kv_heads))
        parts = split_output(output, self.qkv.splits) if isinstance(output, Tensor) else output
        query, key, value = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        return rotate(query, (cos, sin)), rotate(key, (cos, sin)), value


class TransformerBlock(nn.Module):
    """``x + attention(x)``, then ``x + mlp(x)``, each with its own norm before it (pre-norm).

    Args:
        hidden_size: W.
        ffn_hidden_size: features of the MLP's activation.
        heads: attention heads, a divisor of W with an even quotient.
        kv_heads: heads of keys and values, a divisor of heads; as many by default.
        activation: the MLP's, see octavo.nn.LayerNormMLP.
        norm: "rms_norm" or "layer_norm".
        eps: the norms'.
        bias: of the linear layers.
        recipe: an octavo.Recipe or RecipeMap (of the names "attention.qkv.linear", "attention.out", "mlp.fc1",
            "mlp.fc2"); octavo.recipes.default() by default.
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.

    Shape:
        input [B, C, W], result the same, dtype of the input or autocast's.

    Raises:
        ValueError: as SelfAttention and LayerNormMLP.

    Example:
        >>> import torch, octavo
        >>> block = octavo.nn.TransformerBlock(64, 176, heads=4, kv_heads=2, recipe=octavo.recipes.delayed())
        >>> block(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        activation: str = "swiglu",
        norm: str = "rms_norm",
        eps: float = 1e-5,
        bias: bool = False,
        recipe: Recipe | RecipeMap | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"eps": eps, "bias": bias, "device": device, "dtype": dtype}
        self.attention = SelfAttention(
            hidden_size, heads, kv_heads, norm=norm, recipe=under(recipe, "attention"), **options
        )
        self.mlp = _PARTS[norm][1](hidden_size, ffn_hidden_size, activation, recipe=under(recipe, "mlp"), **options)

    def forward(self, x: Tensor, rotary: RotaryTables | None = None) -> Tensor:
        """Return the block's output [B, C, W] for x [B, C, W]; ``rotary`` as SelfAttention takes it."""
        x = x + self.attention(x, rotary)
        return x + self.mlp(x)
