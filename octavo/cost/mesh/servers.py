"""The servers of a mesh, and the seconds that bytes take between their GPUs: all that is assumed of hardware.

Nothing here is measured. Products, casts and the memory's bandwidth are those of a device's Rates; each other number
has its source beside it. None of it was fitted to the published steps that docs/plan.md holds the results against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from octavo.cost.rates import IN_BF16, PUBLISHED, PlanError, Rates, rates_of

# Of the rate of products that a lone GPU reached for seconds, the share that others publish for training: 600 TFLOP/s
# where 718 were measured in bf16, 1,125 where 1,309 in FP8 (pytorch/FBGEMM#2546, pytorch/ao#2784).
SUSTAINED = 0.84


def sustained(rates: Rates) -> Rates:
    """Return rates that servers sustain: products at SUSTAINED of measured rates; published ones as they are."""
    products = {kind: tuple((flop, SUSTAINED * rate) for flop, rate in each) for kind, each in rates.products.items()}
    return replace(rates, products=products) if rates.casts else rates


@dataclass(frozen=True)
class Hardware:
    """H100 SXM servers of 8 GPUs with a network card of 400 Gb/s a GPU. None of these is measured here."""

    rates: Rates = field(default_factory=lambda: sustained(rates_of("H100")))  # they name their sources
    attention_forward: float = 614e12  # FLOP/s: causal, 8,192 tokens, heads of 128 (pytorch/benchmark#2391)
    attention_backward: float = 490e12  # which computes 2.5 times the FLOP. Assumed: 0.8 of forward's
    nvlink: float = 370e9  # bytes/s each way of a GPU in NCCL's all-gathers inside a server (nccl-tests#212)
    network: float = 47e9  # bytes/s each way of a GPU's card (nccl-tests#290: 46 to 48 of 50 GB/s)
    server: int = 8  # GPUs in one
    latency: float = 20e-6  # seconds that a collective takes before its first byte. Assumed
    memory: float = PUBLISHED["H100"].memory  # bytes of a GPU

    @classmethod
    def of(cls, rates: Rates) -> Hardware:
        """Return servers of another device, assumed: attention faster as bf16 products are, NVLink of its generation.

        Raises:
            PlanError: for a device that is no GPU.
        """
        if "CPU" in rates.device:
            raise PlanError("--gpus: a mesh is planned of GPUs: add --device H100, H200 or B200")
        here, rates = cls(), sustained(rates)
        speed = rates.products[IN_BF16][-1][1] / here.rates.products[IN_BF16][-1][1]
        forward, backward = here.attention_forward * speed, here.attention_backward * speed
        return cls(rates, forward, backward, here.nvlink * (1 + ("B200" in rates.device)), memory=rates.memory)

    def wire(self, size: float, ranks: int, stride: int, directly: bool = False) -> float:
        """Return seconds of an all-gather or a reduce-scatter of so many bytes in all, each rank ``stride`` GPUs apart.

        Each GPU takes in (n - 1) / n of the bytes over NVLink. Over the network a ring takes each byte into a server
        once, over the cards of the group's ranks there; the slower of the two counts. ``directly``: an all-to-all, in
        which each rank's card takes in the bytes that all ranks elsewhere have for it.
        """
        if ranks == 1:
            return 0.0
        here = self.ranks_in_server(ranks, stride)
        inside = size * (here - 1 if directly else ranks - 1) / ranks / self.nvlink * (here > 1)
        servers = ranks / here
        arriving = (ranks - here) / ranks if directly else (servers - 1) / servers / here
        return max(inside, size * arriving / self.network) + self.latency

    def ranks_in_server(self, ranks: int, stride: int) -> int:
        """Return how many of a group's ranks, ``stride`` GPUs apart, are in one server."""
        return max(1, min(ranks, self.server // stride))

    def exchange(self, size: float, ranks: int, stride: int, by_server: bool) -> float:
        """Return seconds of all-to-alls that reduce so many bytes: of one, or in each server and then between them."""
        if not by_server:
            return self.wire(size, ranks, stride, directly=True)
        here = self.ranks_in_server(ranks, stride)
        inside = self.wire(size, here, stride, directly=True)
        return inside + self.wire(size / here, ranks // here, self.server, directly=True)

    def link(self, ranks: int, stride: int, directly: bool = False) -> str:
        """Return the wires on which such a group waits longest."""
        inside = replace(self, network=math.inf).wire(1e12, ranks, stride, directly)
        return "NVLink" if self.wire(1e12, ranks, stride, directly) == inside else "network"
