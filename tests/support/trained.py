"""What the tests of octavo's optimizers train, and how they look at its state."""

import torch
from torch import Tensor, nn

from octavo import E4M3, PerTensor
from octavo.optim import E4M4, AdamW, Moment
from octavo.optim.state import as_fp32

MASTERS = ["split32", "split24", None]
ONE_SCALE = (
    Moment(E4M3, granularity=PerTensor(), rounding="stochastic"),
    Moment(E4M4, root=True, granularity=PerTensor(), rounding="stochastic", scale="previous"),
)
MOMENTS = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "one scale": ONE_SCALE}


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype))


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Steps with random gradients, some far from zero."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = (torch.randn(p.shape, generator=generator) + 0.3).to(p.dtype)
        optimizer.step()


def moments_of(optimizer: AdamW, p: nn.Parameter) -> list[Tensor]:
    """A parameter's, both in float32."""
    names, state = ("exp_avg", "exp_avg_sq"), optimizer.state[p]
    return [as_fp32(name, moment, state).clone() for name, moment in zip(names, optimizer.moments, strict=True)]
