"""SGD whose momentum takes one or two bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.kernels.reference.optimizer_step import SgdGroup
from octavo.optim.base import CompactOptimizer, check_not_negative, refuse
from octavo.optim.moment import Moment
from octavo.optim.state import Settings


class SGD(CompactOptimizer):
    """torch.optim.SGD, its momentum in few bytes, on weights of any master.

    With ``moments="fp32"`` and float32 weights its results are torch's, bit for bit (foreach=False on a CPU).

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as torch's.
        moments: "fp8" (E4M3 in blocks of 128: 1.03 bytes an element, rounded stochastically), "bf16", "fp32", a Moment.
        master, seed, skip_nonfinite, gradient_storage, foreach, differentiable, fused: as AdamW's.

    Raises:
        TypeError, ValueError: for arguments out of range, or weights of a dtype that the master is not for.

    Example:
        >>> import torch, octavo
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> weight.grad = torch.ones(4)
        >>> octavo.optim.SGD([weight], lr=0.5, momentum=0.9).step()
        >>> weight.detach()
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    names = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        moments: str | Moment = "fp8",
        master: str | None = "auto",
        maximize: bool = False,
        seed: int = 0,
        skip_nonfinite: bool = False,
        gradient_storage: str | None = None,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        refuse(foreach=foreach, differentiable=differentiable, fused=fused)
        check_not_negative(lr=float(lr), momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum == 0.0 or dampening != 0.0):
            raise ValueError("nesterov=True needs a momentum and no dampening")
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, defaults, moments, master, seed, skip_nonfinite, gradient_storage)

    def names_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the name of the momentum; no name where the group has no momentum."""
        return self.names if group["momentum"] else ()

    def _settings_in(self, saved_state: dict[str, Any], group: dict[str, Any]) -> Settings:
        return self.settings.in_state(saved_state)

    def _options(self, group: dict[str, Any]) -> SgdGroup:
        momentum, dampening, decay = (float(group[name]) for name in ("momentum", "dampening", "weight_decay"))
        return SgdGroup(group["lr"], momentum, dampening, decay, group["nesterov"], group["maximize"])
