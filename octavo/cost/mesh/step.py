"""A step on a mesh: what a rank computes, what it waits for, and what of that hides behind compute."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from octavo.cost.mesh import messages
from octavo.cost.mesh.compute import forward_and_backward, update
from octavo.cost.mesh.rank import Rank


class Wait(NamedTuple):
    """Collectives of a kind of parallelism: seconds, those of them that nothing hides, and their slowest wires."""

    seconds: float
    exposed: float
    link: str

    def times(self, count: int) -> Wait:
        """Return this many such collectives."""
        return Wait(count * self.seconds, count * self.exposed, self.link)


@dataclass(frozen=True)
class Step:
    """Seconds of a step on each GPU: ``kinds`` of compute, and what nothing hides; TFLOP/s that the model needs."""

    kinds: Mapping[str, float]
    waits: Mapping[str, Wait]
    bubble: float
    optimizer: float
    seconds: float
    tflops: float


class Stage(Rank):
    """A rank's compute and waits for a micro-batch, and its step; all stages of a pipeline are equally long."""

    @functools.cached_property
    def kinds(self) -> dict[str, float]:
        """Seconds of forward and backward by kind."""
        return forward_and_backward(self)

    @property
    def compute(self) -> float:
        """Seconds of forward, a third of them, and backward."""
        return sum(self.kinds.values())

    @functools.cached_property
    def fsdp(self) -> Wait:
        """A round of the collectives of FSDP2 (and of HSDP's replicas), of which a micro-batch's compute hides some.

        One block is prefetched: gathers hide behind forward, gathers and scatters, on the same wires, behind backward,
        and so do replicas' all-reduces. Nothing hides the first gathers (the root's and block 0's) and the root's
        scatter at the end.
        """
        exposed = in_forward = in_backward = 0.0
        slowest, most = "NVLink", 0.0
        for shards in messages.fsdp(self):
            exposed += shards.first
            in_forward += shards.in_forward
            in_backward += shards.in_backward
            for link, seconds in shards.links:
                slowest, most = (link, seconds) if seconds > most else (slowest, most)
        total = exposed + in_forward + in_backward
        exposed += max(0.0, in_forward - self.compute / 3) + max(0.0, in_backward - 2 * self.compute / 3)
        return Wait(total, exposed, slowest)

    @functools.cached_property
    def tensor(self) -> Wait:
        """Tensor parallelism's collectives, which products wait for, as they do for torch's functional collectives."""
        seconds = messages.tensor(self)
        return Wait(seconds, seconds, self.hardware.link(self.layout.tensor, 1))

    @functools.cached_property
    def expert(self) -> Wait:
        """Expert parallelism's collectives, which products wait for."""
        seconds = messages.expert(self)
        return Wait(seconds, seconds, self.hardware.link(self.layout.expert, 1, directly=True))

    @functools.cached_property
    def optimizer(self) -> float:
        """Seconds of the optimizer's update."""
        return update(self)

    @functools.cached_property
    def step(self) -> Step:
        """The Step of all micro-batches and of the optimizer; a pipeline's stages wait for its first and last ones."""
        layout, count = self.layout, self.layout.micro_batches
        waits = {"fsdp": self.fsdp.times(count if layout.resharded else 1)}
        waits |= {"tensor": self.tensor.times(count), "expert": self.expert.times(count)}
        kinds = {kind: count * seconds for kind, seconds in self.kinds.items()}
        bubble = (layout.pipeline - 1) / layout.chunks * (self.compute + self.tensor.seconds + self.expert.seconds)
        total = sum(kinds.values()) + sum(wait.exposed for wait in waits.values()) + bubble + self.optimizer
        flop = layout.sequences * layout.sequence * self.whole.flop(layout.sequence) / layout.gpus
        return Step(kinds, waits, bubble, self.optimizer, total, flop / total / 1e12)
