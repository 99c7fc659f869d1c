"""Norms of a step's gradients as they come, beside the last step's: what a clip knows before all of them are there.

Squared norms stay on the device, one number a parameter, so nothing waits for the host and a CUDA graph can replay it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.optim import state as states
from octavo.optim.layout import sharded_dims

_TO_COME = -1.0  # stands for the square of a gradient that has not come; NaN gradients must stay NaN
_TINY = torch.finfo(torch.float32).tiny


class GradientNorms:
    """The squared 2-norm of each parameter's gradient, of this step and of the last."""

    def __init__(self) -> None:
        self._numbers: dict[nn.Parameter, int] = {}
        self._now = self._last = torch.empty(0)
        self._cells: tuple[Tensor, ...] = ()  # of self._now

    def add(self, params: list[nn.Parameter]) -> None:
        """These parameters' gradients have come."""
        squares = squared_norms([param.grad for param in params if param.grad is not None])
        if new := [param for param in params if param not in self._numbers]:
            self._numbers |= {param: len(self._numbers) + number for number, param in enumerate(new)}
            ends = squares.new_full((len(new),), _TO_COME), squares.new_zeros(len(new))
            self._now, self._last = (
                torch.cat([old.to(end), end]) for old, end in zip((self._now, self._last), ends, strict=True)
            )
            self._cells = self._now.unbind()
        torch._foreach_copy_([self._cells[self._numbers[param]] for param in params], list(squares.unbind()))

    def state(self, params: list[nn.Parameter]) -> dict[str, Any]:
        """The last step's squares, and of which of ``params`` they are: sums depend on the order."""
        places = {param: place for place, param in enumerate(params)}
        return {"order": [places[param] for param in self._numbers], "squares": self._last.cpu()}

    def load(self, state: dict[str, Any], params: list[nn.Parameter]) -> None:
        """Go on from such a state."""
        device = states.local(params[0].detach()).device
        self._numbers = {params[place]: number for number, place in enumerate(state["order"])}
        self._last = state["squares"].to(device, copy=True)
        self._now = torch.full_like(self._last, _TO_COME)
        self._cells = self._now.unbind()

    def last(self) -> Tensor:
        """The last step's global norm; 0 before there is one."""
        return self._last.sum().sqrt()

    def estimate(self) -> Tensor:
        """This step's global norm as far as it can be known: exact once all gradients have come.

        What has come counts as it is. The rest is the last step's, times a power of the growth of what has come: the
        square root of the part that this was of the last step's squares, so that a small part says little of the rest.
        """
        come = self._now != _TO_COME
        now, before, rest = self._now * come, (self._last * come).sum(), (self._last * ~come).sum()
        growth = (now * (self._last > 0)).sum() / before.clamp(min=_TINY)
        part = before / (before + rest).clamp(min=_TINY)
        return (now.sum() + rest * growth.pow(part.sqrt())).sqrt()

    def end_step(self) -> Tensor:
        """The step is over: its global norm, which is the last one's from now on."""
        self._last.copy_(self._now * (self._now != _TO_COME))
        self.drop()
        return self.last()

    def drop(self) -> None:
        """Forget what has come since the last step."""
        self._now.fill_(_TO_COME)


def squared_norms(gradients: list[Tensor]) -> Tensor:
    """Each gradient's squared 2-norm in float32; of sharded ones the whole one's, in one collective for all alike."""
    norms = torch._foreach_norm([states.local(gradient) for gradient in gradients], 2.0, torch.float32)
    squares = torch.stack([norm.to(norms[0].device) for norm in norms]).square()
    alike: dict[Any, list[Tensor]] = {}
    for square, gradient in zip(squares.unbind(), gradients, strict=True):
        if dims := tuple(dim for _, dim, _ in sharded_dims(gradient)):
            alike.setdefault((gradient.device_mesh, dims), []).append(square)  # type: ignore[attr-defined]
    for (mesh, dims), parts in alike.items():
        whole = torch.stack(parts).to(mesh.device_type)
        for dim in dims:
            torch.distributed.all_reduce(whole, group=mesh.get_group(dim))
        torch._foreach_copy_(parts, list(whole.unbind()))
    return squares
