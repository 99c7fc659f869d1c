"""A region of activation checkpointing whose input is rounded by hand, in plain torch."""

from typing import Any

import torch
from torch import Tensor


def by_hand(x: Tensor) -> Tensor:
    """The input [..., K], rounded to E4M3 by rows with scales that are powers of two."""
    scale = torch.exp2(torch.floor(torch.log2(448 / x.float().abs().amax(-1, keepdim=True))))
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


class ByHand(torch.autograd.Function):
    """A region that is computed again from its rounded input."""

    @staticmethod
    def forward(ctx: Any, region: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.region = by_hand(x), region
        return region(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(ctx.region(x), grads)
        return None, x.grad
