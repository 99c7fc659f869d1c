"""The MLP of a block as a mixture of experts: a norm, a router in float32, and octavo.nn.Experts.

The experts' load is balanced as DeepSeek-V3 does, without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664): a
bias an expert, which decides who is chosen and not what it counts for, rises by a constant after a step in which the
expert had fewer bytes than the mean, and falls after one in which it had more.

Shapes: T bytes of a batch, W width, E experts, k experts a byte.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.distributed.ranks import Ranks
from octavo.nn import Experts, RMSNorm
from octavo.recipes import high_precision
from octavo.train.config import ModelConfig

SPEED = 0.01  # of a bias a step; DeepSeek-V3's is 0.001, of some hundred times as many steps


class Router(nn.Linear):
    """Scores [..., E] of what it reads [..., W]: sigmoids in float32, also in autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """See Router."""
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float()).sigmoid()


class Mixture(nn.Module):
    """``experts(norm(x))``, each byte by the k experts that its router scores highest.

    Scores are sigmoids, and those of the chosen ones are divided by their sum (DeepSeek-V3, arXiv 2412.19437, eq. 13).
    The router computes in float32, also in autocast: near ties decide which experts compute.

    Attributes:
        bias: [E] float32, added to the scores for the choice alone; a part of the model, so that it is in checkpoints.
        load: [E] int64, how many times each expert was chosen in training since the last ``balance``.

    Example:
        >>> import torch
        >>> from octavo.train import ModelConfig
        >>> from octavo.train.mixture import Mixture
        >>> mixture = Mixture(ModelConfig(width=32, heads=2, experts=4, top_k=2))
        >>> mixture(torch.randn(2, 16, 32)).shape, int(mixture.load.sum())
        (torch.Size([2, 16, 32]), 64)
    """

    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k = config.top_k
        self.norm = RMSNorm(config.width)
        self.router = Router(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.hidden, recipe=high_precision())
        self.register_buffer("bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., W] -> [..., W]."""
        h = self.norm(x)
        scores = self.router(h.flatten(0, -2))  # [T, E]
        index = (scores.detach() + self.bias).topk(self.k).indices
        weights = scores.gather(1, index)
        if self.training:
            with torch.no_grad():
                self.load += F.one_hot(index, len(self.load)).sum((0, 1))
        return self.experts(h, index, weights / weights.sum(-1, keepdim=True))


@torch.no_grad()
def balance(mixtures: Iterable[Mixture], ranks: Ranks) -> Tensor:
    """After a step: moves every bias by what all ranks chose since the last time, and forgets that.

    Returns:
        The largest load of an expert of any of the mixtures, by the mean of its mixture's; on the device.
    """
    mixtures = list(mixtures)
    loads = ranks.sum(torch.stack([mixture.load for mixture in mixtures])).float()  # [mixtures, E]
    means = loads.mean(1, keepdim=True)
    for mixture, step in zip(mixtures, SPEED * torch.sign(means - loads), strict=True):
        mixture.bias += step - step.mean()  # as torchtitan: what all biases share decides nothing, and would drift
        mixture.load.zero_()
    return (loads / means).max()
