"""The count of optimizer steps in this process: what moves when weights may have been written."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class _OptimizerSteps:
    """Counts the steps of every torch.optim.Optimizer in the process, from the first layer built on."""

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watch(self) -> None:
        """Start counting; more calls change nothing."""
        if not self._watching:
            register_optimizer_step_post_hook(self._stepped)
            self._watching = True

    def _stepped(self, *args: Any) -> None:
        self.count += 1


OPTIMIZER_STEPS = _OptimizerSteps()
