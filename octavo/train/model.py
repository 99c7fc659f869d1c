"""A byte-level GPT: octavo's transformer blocks (RMSNorm, rotary positions, causal attention, SwiGLU), without biases.

Its MLPs may be mixtures of experts (mixture.py).

Shapes: B sequences, C positions (context), W width, V = 256 bytes.
The blocks are built in high precision, where they compute as plain torch does; `octavo.convert` gives them a recipe.
Nothing else here knows about FP8.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn import GroupedLinear, RMSNorm, TransformerBlock, rotary_table
from octavo.recipes import high_precision
from octavo.train.config import VOCABULARY, ModelConfig
from octavo.train.mixture import Mixture

HEAD, ROUTER = "head", "router"  # the output layer's name; the last part of the names of layers that choose experts


class GPT(nn.Module):
    """The language model: bytes in, logits of the next byte out.

    Example:
        >>> import torch
        >>> from octavo.train import GPT, ModelConfig
        >>> model = GPT(ModelConfig(width=32, layers=1, heads=2, context=16))
        >>> model(torch.zeros(2, 16, dtype=torch.uint8)).shape
        torch.Size([2, 16, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(
            TransformerBlock(config.width, config.hidden, config.heads, recipe=high_precision())
            for _ in range(config.layers)
        )
        for block in self.blocks if config.experts else ():
            block.mlp = Mixture(config)
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        cos, sin = rotary_table(config.context, config.head_width)  # [C, D/2] each, for all blocks
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of variance 1 / fan-in, the two that write to the residual stream smaller by √(2 × layers)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | GroupedLinear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.normal_(self.head.weight, std=0.5 * self.config.width**-0.5)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for writer in (block.attention.out, block.mlp.experts.down if self.mixtures else block.mlp.fc2):
                with torch.no_grad():
                    writer.weight /= math.sqrt(2 * self.config.layers)

    @property
    def mixtures(self) -> list[Mixture]:
        """The mixtures of experts, one a block or none."""
        return [block.mlp for block in self.blocks if isinstance(block.mlp, Mixture)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, C, 256] of each next byte, in the Linear layers' output dtype; tokens: integers, [B, C]."""
        x = self.embedding(tokens.int())  # [B, C, W]
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits [B, C, 256] and the bytes that follow [B, C]; nats a byte, a float32 scalar."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten().long())
