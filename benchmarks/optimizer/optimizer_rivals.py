"""Schemes for an optimizer's state whose own kernels need a GPU, written down after their authors' description."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # elements, in the order of the flat tensor


class Companded:
    """FlashOptim's 8-bit store of a moment (arXiv 2602.23349; flashoptim 0.1.4): groups of 32, a float16 scale each.

    A first moment x, by its group's amax in [-1, 1], is spread by 2x / (1 + |x|) and stored as round(127 x); a second
    moment is stored as round(255 sqrt(v)), by its group's amax in [0, 1]. To nearest, halves up. Codes are made by the
    amax in float32 and read by its float16.

    Args:
        size: elements.
        second: whether it is a second moment.
    """

    def __init__(self, size: int, second: bool) -> None:
        groups = -(-size // GROUP)
        self.size, self.second = size, second
        self.codes = torch.zeros(groups, GROUP, dtype=torch.uint8 if second else torch.int8)
        self.scales = torch.zeros(groups, 1, dtype=torch.float16)

    def read(self) -> Tensor:
        """Return the values [size], float32."""
        wide = self.codes.float()
        if self.second:
            wide = wide.div_(255).mul_(self.scales.float()).square_()
        else:
            wide = wide.div_(127)
            wide = wide.div_(2 - wide.abs()).mul_(self.scales.float())
        return wide.flatten()[: self.size]

    def write(self, wide: Tensor) -> None:
        """Store [size] float32."""
        wide = F.pad(wide, (0, self.codes.numel() - self.size)).view(-1, GROUP)
        wide = wide.sqrt() if self.second else wide
        amax = wide.abs().amax(1, keepdim=True).clamp_(min=1e-12)
        wide = wide / amax
        spread = wide.mul_(255) if self.second else (254 * wide).div_(1 + wide.abs())
        self.codes.copy_(spread.add_(0.5).floor_())
        self.scales.copy_(amax)


class FlashAdamW(torch.optim.Optimizer):
    """FlashOptim's AdamW on float32 weights, which it keeps as they are: both moments Companded, nothing clipped.

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW's.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[param], param.grad.flatten()
        if not state:
            state |= {"step": 0, "first": Companded(param.numel(), False), "second": Companded(param.numel(), True)}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        m = state["first"].read().lerp_(gradient, 1 - beta1)
        v = state["second"].read().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (v.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] / (1 - beta1 ** state["step"])
        param.addcdiv_(m.view_as(param), denominator.view_as(param), value=-rate)
        state["first"].write(m)
        state["second"].write(v)
