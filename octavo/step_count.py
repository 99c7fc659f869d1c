"""The count of optimizer steps in this process: what moves when weights may have been written."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class _OptimizerSteps:
    """Counts the steps of every torch.optim.Optimizer in the process, from the first layer built on.

    ``count``: of all of them, since an optimizer may write weights that it does not own (through masters of its own).
    """

    def __init__(self) -> None:
        self.count = 0
        self._watching = False
        self._of: dict[int, int] = {}  # by id: weak references to parameters would keep torch from swapping them

    def watch(self) -> None:
        """Start counting; more calls change nothing."""
        if not self._watching:
            register_optimizer_step_post_hook(self._stepped)
            self._watching = True

    def of(self, parameter: Tensor) -> int:
        """What changes with each step of an optimizer that owns this parameter, and only then; from the first call on.

        Ranks see it change together, though the numbers may differ.
        """
        return self._of.setdefault(id(parameter), self.count)

    def _stepped(self, optimizer: Any, *args: Any) -> None:
        self.count += 1
        if self._of:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in self._of:
                        self._of[id(parameter)] = self.count


OPTIMIZER_STEPS = _OptimizerSteps()
