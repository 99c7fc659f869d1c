"""The count of optimizer steps in this process, which rises when weights may have been written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class _SeenWrites:
    """Writes to a parameter: the last step of an optimizer that owns it, its version then, the number of others."""

    def __init__(self, step: int, version: int) -> None:
        self.step, self.version, self.by_hand = step, version, 0


class _OptimizerSteps:
    """The counter of the steps of every torch.optim.Optimizer in the process, from the first ``watch`` on.

    It is watched for KeptWeights, weights under a delayed recipe in training, and weights that FSDP2 shards.

    ``count``: of all optimizers' steps, since an optimizer may write weights that it does not own (through masters of
    its own).
    """

    def __init__(self) -> None:
        self.count = 0
        self._watching = False
        # by id: weak references to parameters would keep torch from swapping them
        self._known: dict[int, _SeenWrites] = {}

    def watch(self) -> None:
        """Start counting; more calls change nothing."""
        if not self._watching:
            register_optimizer_step_pre_hook(self._before_step)
            register_optimizer_step_post_hook(self._after_step)
            self._watching = True

    def of(self, parameter: Tensor) -> int:
        """Return a number that rises with each step of an optimizer that owns this parameter, and only then.

        It does from the first call on, on all ranks together, though their numbers may differ.
        """
        return self._of(parameter).step

    def writes_to(self, parameter: Tensor) -> _SeenWrites:
        """Return the writes to a parameter; ``by_hand`` counts those in place by anything but its optimizer."""
        writes, version = self._of(parameter), version_of(parameter)
        if writes.version != version:
            writes.version, writes.by_hand = version, writes.by_hand + 1
        return writes

    @contextmanager
    def writing(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Keep an optimizer's writes to its parameters, outside of its ``step``, from counting as writes by hand."""
        watched = [parameter for parameter in parameters if id(parameter) in self._known]
        for parameter in watched:
            self.writes_to(parameter)
        yield
        for parameter in watched:
            self._of(parameter).version = version_of(parameter)

    def _of(self, parameter: Tensor) -> _SeenWrites:
        if (writes := self._known.get(id(parameter))) is None:
            writes = self._known[id(parameter)] = _SeenWrites(self.count, version_of(parameter))
        return writes

    def _watched(self, optimizer: Any) -> Iterator[Tensor]:
        groups = optimizer.param_groups if self._known else ()
        return (parameter for group in groups for parameter in group["params"] if id(parameter) in self._known)

    def _before_step(self, optimizer: Any, *args: Any) -> None:
        for parameter in self._watched(optimizer):
            self.writes_to(parameter)

    def _after_step(self, optimizer: Any, *args: Any) -> None:
        self.count += 1
        for parameter in self._watched(optimizer):
            writes = self._of(parameter)
            writes.step, writes.version = self.count, version_of(parameter)


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor, which an in-place write raises; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


OPTIMIZER_STEPS = _OptimizerSteps()
