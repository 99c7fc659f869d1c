"""A byte-level GPT: octavo's transformer blocks (RMSNorm, rotary positions, causal attention, SwiGLU), without biases.

Its MLPs may be mixtures of experts.

Shapes: B sequences, C positions (context), W width, V = 256 bytes; in a mixture T bytes, E experts, k for each byte.
The blocks are built in high precision, where they compute as plain torch does; `octavo.convert` gives them a recipe.
Nothing else here depends on FP8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.distributed.ranks import Ranks
from octavo.nn import Experts, GroupedLinear, RMSNorm, TransformerBlock, rotary_table
from octavo.recipes import high_precision
from octavo.train.config import VOCABULARY, ModelConfig

HEAD, ROUTER = "head", "router"  # the output layer's name; the end of the names of layers that choose experts

SPEED = 0.01  # change of a bias in a step; DeepSeek-V3 has 0.001 and about a hundred times as many steps


class Router(nn.Linear):
    """A layer that scores experts: sigmoids [..., E] for an input [..., W], in float32, also in autocast."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float()).sigmoid()


class Mixture(nn.Module):
    """The MLP of a block as experts, ``experts(norm(x))``: the k experts with the highest scores compute each byte.

    Scores are sigmoids, and those of the chosen ones are divided by their sum (DeepSeek-V3, arXiv 2412.19437, eq. 13).
    The router computes in float32, also in autocast: near ties decide which experts compute.

    Attributes:
        bias: [E] float32, added to the scores for the choice alone; a buffer that checkpoints save.
        load: [E] int64, how many times each expert was chosen in training since the last ``balance``.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k = config.top_k
        self.norm = RMSNorm(config.width)
        self.router = Router(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.hidden, recipe=high_precision())
        self.register_buffer("bias", torch.zeros(config.experts, dtype=torch.float32))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the chosen experts, x [..., W] -> [..., W]."""
        h = self.norm(x)
        scores = self.router(h.flatten(0, -2))  # [T, E]
        index = (scores.detach() + self.bias).topk(self.k).indices
        weights = scores.gather(1, index)
        if self.training:
            with torch.no_grad():
                self.load += F.one_hot(index, len(self.load)).sum((0, 1))
        return self.experts(h, index, weights / weights.sum(-1, keepdim=True))


@torch.no_grad()
def balance(mixtures: Iterable[Mixture], ranks: Ranks) -> None:
    """Move every bias by the choices of all ranks since the last call, and count anew; call it after a step.

    This balances loads as DeepSeek-V3 does, without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664). An expert's
    bias, which changes whether it is chosen and not the weight of its output, rises by a constant if the expert had
    fewer bytes than the mean, and falls if it had more.
    """
    mixtures = list(mixtures)
    loads = ranks.sum(torch.stack([mixture.load for mixture in mixtures])).float()  # [mixtures, E]
    for mixture, step in zip(mixtures, SPEED * torch.sign(loads.mean(1, keepdim=True) - loads), strict=True):
        mixture.bias += step - step.mean()  # as in torchtitan: the biases' mean has no effect, and would drift
        mixture.load.zero_()


class GPT(nn.Module):
    """The language model: bytes in, logits of the next byte out."""

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
        for name, table in zip(("cos", "sin"), rotary_table(config.context, config.head_width), strict=True):
            self.register_buffer(name, table, persistent=False)  # [C, D/2], for all blocks
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal weights of variance 1 / fan-in; divide those that add to the residual stream by √(2 × layers)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | GroupedLinear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.normal_(self.head.weight, std=0.5 * self.config.width**-0.5)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for layer in (block.attention.out, block.mlp.experts.down if self.mixtures else block.mlp.fc2):
                with torch.no_grad():
                    layer.weight /= math.sqrt(2 * self.config.layers)

    @property
    def mixtures(self) -> list[Mixture]:
        """The mixtures of experts, one for each block, or none."""
        return [block.mlp for block in self.blocks if isinstance(block.mlp, Mixture)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, C, 256] of each next byte, in the Linear layers' output dtype, from integers [B, C]."""
        x = self.embedding(tokens.int())  # [B, C, W]
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [B, C, 256] and the next bytes [B, C]: nats a byte, a float32 scalar."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten().long())
