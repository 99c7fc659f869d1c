"""A byte-level GPT: RMSNorm, rotary positions, causal attention, SwiGLU, and plain bias-free `nn.Linear` layers.

Shapes: B sequences, C positions (context), W width, H heads, D width of a head, F hidden features, V = 256 bytes.
`octavo.convert` turns the Linears of the blocks into FP8 ones; nothing else here knows about FP8.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.train.config import VOCABULARY, ModelConfig

ROTARY_BASE = 10_000.0
HEAD = "head"  # the name of the output layer


def rotary_table(context: int, head_width: int, base: float = ROTARY_BASE) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (Su et al. 2021, arXiv 2104.09864).

    Args:
        context: positions, C.
        head_width: features of one head, D (even).
        base: the longest wavelength is about 2π × base positions.

    Returns:
        cos and sin, each [C, D / 2] float32.
    """
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)  # [D/2]
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency  # [C, D/2]
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + D/2]) by its position's angle, so that q·k depends on the distance only.

    Args:
        x: [..., C, D], any float dtype.
        cos: [C, D / 2].
        sin: [C, D / 2].

    Returns:
        [..., C, D], the dtype of x.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        cos, sin = rotary_table(config.context, config.head_width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, W] -> [B, C, W]
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # [3, B, H, C, D]
        cos, sin = self.cos[:context], self.sin[:context]
        query, key = rotate(qkv[:2], cos, sin).unbind(0)
        y = F.scaled_dot_product_attention(query, key, qkv[2], is_causal=True)  # [B, H, C, D]
        return self.out(y.transpose(1, 2).reshape(batch, context, width))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, W] -> [B, C, W]
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [B, C, F] each
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, W] -> [B, C, W]
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The language model: bytes in, logits of the next byte out.

    Example:
        >>> import torch
        >>> from octavo.train import GPT, ModelConfig
        >>> model = GPT(ModelConfig(width=32, layers=1, heads=2, context=16))
        >>> model(torch.zeros(2, 16, dtype=torch.uint8)).shape
        torch.Size([2, 16, 256])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of variance 1 / fan-in, the two that write to the residual stream smaller by √(2 × layers)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.normal_(self.head.weight, std=0.5 * self.config.width**-0.5)
        for block in self.blocks:
            for writer in (block.attention.out, block.mlp.down):  # type: ignore[union-attr]
                with torch.no_grad():
                    writer.weight /= math.sqrt(2 * self.config.layers)  # type: ignore[union-attr,operator]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next byte.

        Args:
            tokens: bytes as integers of any dtype, [B, C].

        Returns:
            [B, C, 256], the Linear layers' output dtype.
        """
        x = self.embedding(tokens.int())  # [B, C, W]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a byte, computed in float32.

    Args:
        logits: [B, C, 256].
        targets: the bytes that follow, integers, [B, C].

    Returns:
        A float32 scalar.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten().long())
