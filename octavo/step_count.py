"""The count of optimizer steps in this process, which rises when weights may have been written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class SeenWrites:
    """Writes to one parameter, counted while anybody holds this object.

    Attributes:
        last_step: OPTIMIZER_STEPS.count at the last step of an optimizer that owns the parameter, or where the count of
            writes began. On all ranks it changes at the same steps, though their numbers may differ.
        by_hand: how often anything but its optimizer wrote it in place, up to the last call of ``count_others``.
    """

    def __init__(self, parameter: Tensor, last_step: int) -> None:
        self.parameter_id, self.last_step, self.by_hand = id(parameter), last_step, 0
        self._version = version_of(parameter)

    def count_others(self, parameter: Tensor) -> None:
        """Count a write by hand if the parameter's version has changed."""
        if self._version != (version := version_of(parameter)):
            self._version, self.by_hand = version, self.by_hand + 1

    def take_version_as_seen(self, parameter: Tensor) -> None:
        """Take the parameter's version as it is, so that no write by hand is counted: its optimizer wrote it."""
        self._version = version_of(parameter)


class _OptimizerSteps:
    """The counter of the steps of every torch.optim.Optimizer in the process, from the first ``watch`` on.

    It is watched for KeptWeights, weights under a delayed recipe in training, and weights that FSDP2 shards.

    ``count`` counts the steps of all optimizers together, since an optimizer may write weights that it does not own
    (through masters of its own).
    """

    def __init__(self) -> None:
        self.count = 0
        self._watching = False
        # The keys are parameters' ids: weak references to parameters would keep torch from swapping them. The layers
        # that ask hold the counts, so that these go with the layers, whose parameters may leave their ids to others.
        self._seen: dict[int, ReferenceType[SeenWrites]] = {}

    def watch(self) -> None:
        """Start counting; more calls change nothing."""
        if not self._watching:
            register_optimizer_step_pre_hook(self._before_step)
            register_optimizer_step_post_hook(self._after_step)
            self._watching = True

    def writes_to(self, parameter: Tensor) -> SeenWrites:
        """Return the writes to a parameter, which are counted as long as the caller, or another one, holds them."""
        if watched := self._watched([parameter]):
            return watched[0][1]
        writes, seen = SeenWrites(parameter, self.count), self._seen

        def forget(reference: ReferenceType[SeenWrites], key: int = writes.parameter_id) -> None:
            if seen.get(key) is reference:
                del seen[key]

        seen[writes.parameter_id] = ref(writes, forget)
        return writes

    @contextmanager
    def writing(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Keep an optimizer's writes to its parameters, outside of its ``step``, from counting as writes by hand."""
        watched = self._watched(parameters)
        for parameter, writes in watched:
            writes.count_others(parameter)
        yield
        for parameter, writes in watched:
            writes.take_version_as_seen(parameter)

    def _watched(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, SeenWrites]]:
        """Return (parameter, its writes) for those parameters whose writes anybody holds."""
        seen = ((parameter, reference()) for parameter in parameters if (reference := self._seen.get(id(parameter))))
        return [(parameter, writes) for parameter, writes in seen if writes is not None]

    def _before_step(self, optimizer: Any, *args: Any) -> None:
        for parameter, writes in self._watched(self._parameters_of(optimizer)):
            writes.count_others(parameter)

    def _after_step(self, optimizer: Any, *args: Any) -> None:
        self.count += 1
        for parameter, writes in self._watched(self._parameters_of(optimizer)):
            writes.last_step = self.count
            writes.take_version_as_seen(parameter)

    def _parameters_of(self, optimizer: Any) -> Iterator[Tensor]:
        groups = optimizer.param_groups if self._seen else ()
        return (parameter for group in groups for parameter in group["params"])


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor, which an in-place write raises; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


OPTIMIZER_STEPS = _OptimizerSteps()
