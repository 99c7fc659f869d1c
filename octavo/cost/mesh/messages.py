"""The messages between the ranks of a mesh in a micro-batch: their bytes, seconds and when they travel.

| parallelism | what travels | when |
|---|---|---|
| FSDP2 | weights; their gradients | before each use of a block; after its backward |
| replicas | gradients of the shards, added up | after backward of a block |
| tensor | inputs and gradients of a block's layers | between its products, which wait |
| expert | tokens to their experts and back | between its products, which wait |

Collectives take no SMs. The exchange of keys and values of context parallelism and the activations between stages of a
pipeline hide behind compute, so that neither is counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from octavo import recipes
from octavo.cost.mesh.rank import Rank
from octavo.cost.mesh.shapes import BF16, CODE, FLOAT, Weight
from octavo.cost.rates import IN_BF16
from octavo.granularity import BLOCK, Granularity

MOST_SERVERS = 4.0  # whose experts a token visits (arXiv 2412.19437, section 3.2.2)
SENT_PAIR = CODE + 1 / BLOCK  # bytes of a code and its share of the exponent that is a block's scale


@functools.cache
def weight_scales(recipe: str) -> list[tuple[Granularity, int]]:
    """Return (which elements share a scale, its bytes) of each pair that a recipe makes of a weight as it lies."""
    as_is, transposed, coincide = getattr(recipes, recipe)().weight_casts
    pairs = [(as_is, as_is.granularity)] if as_is else []
    pairs += [(transposed, transposed.granularity.transposed())] if transposed and not coincide else []
    return [(granularity, cast.scale_inv_dtype.itemsize) for cast, granularity in pairs]


def gather_bytes(weights: Sequence[Weight], recipe: str, ranks: int, param_bytes: int = BF16) -> tuple[float, float]:
    """Return the bytes of one gather of weights over so many ranks, and of the amaxes that ranks share before it.

    Each rank has as many rows of a weight (the last one's padded): as bf16, or, of a converted one, a byte an element
    for each pair, and its scales. These are sent beside the codes where no scale is of several ranks' rows and each
    rank has as many: 4 bytes each, powers of two of ``mx`` one. Else ranks share an amax of 4 bytes for each.
    """
    total = amaxes = 0.0
    for weight in weights:
        shard_rows = math.ceil(weight.rows / ranks)
        matrices = weight.share * weight.held
        elements = matrices * shard_rows * ranks * weight.cols
        pairs = 0.0
        is_converted = weight.converted and recipe != IN_BF16
        for granularity, scale_bytes in weight_scales(recipe) if is_converted else ():
            scales = matrices * math.prod(granularity.scale_shape((weight.rows, weight.cols)))
            height, _ = granularity.tile  # -1: all rows
            is_sent = height > 0 and weight.rows == shard_rows * ranks and shard_rows % height == 0
            pairs += elements + scale_bytes * scales if is_sent else elements
            amaxes += 0 if is_sent else FLOAT * scales
        total += pairs if is_converted and ranks > 1 else elements * param_bytes
    return total, amaxes


class Wait(NamedTuple):
    """Collectives of a kind of parallelism: seconds, those of them that nothing hides, and their slowest wires."""

    seconds: float
    exposed: float
    link: str

    def times(self, count: int) -> Wait:
        """Return this many such collectives."""
        return Wait(count * self.seconds, count * self.exposed, self.link)


def fsdp(rank: Rank, forward: float, backward: float) -> Wait:
    """Return a round of the collectives of FSDP2 and of HSDP's replicas, some of which hide behind a micro-batch.

    Forward gathers the root, then each block; backward gathers blocks again and scatters sums of gradients, the root's
    at the end. Replicas add their shards of gradients by an all-reduce. One block is prefetched: gathers hide behind
    forward, gathers and scatters, on the same wires, behind backward, and so do replicas' all-reduces. Nothing hides
    the first gathers (the root's and block 0's) and the root's scatter at the end.

    ``forward``, ``backward``: seconds that the rank computes.
    """
    layout, hardware = rank.layout, rank.hardware
    recipe = rank.precision.recipe if rank.precision.gathers else IN_BF16
    reduction = rank.precision.reduction
    replica_stride = layout.tensor * layout.shard_ranks
    exposed = in_forward = in_backward = 0.0
    links = [(0.0, "NVLink")]
    for shapes, ranks, stride in rank.shards:
        if ranks * layout.replicate == 1:
            continue
        gather = functools.partial(hardware.wire, ranks=ranks, stride=stride)
        root, _ = gather_bytes(shapes.root, IN_BF16, ranks)
        block, amaxes = gather_bytes(shapes.block, recipe, ranks)
        gradients, _ = gather_bytes(shapes.block, IN_BF16, ranks)
        scatter_of_root, scatter = (
            gather(size)
            if reduction == "bf16"
            else hardware.exchange(size * SENT_PAIR / BF16, ranks, stride, reduction == "by server")
            for size in (root, shapes.layers * gradients + root)
        )
        first_gathers = gather(root + block)
        gather_again = gather(shapes.layers * block) * layout.reshards
        replicas = 2 * hardware.wire(BF16 * shapes.parameters / ranks, layout.replicate, replica_stride)
        exposed += first_gathers + scatter_of_root + hardware.latency * (ranks > 1 and amaxes > 0)
        in_forward += gather(shapes.layers * block + root) - first_gathers
        in_backward += gather_again + scatter - scatter_of_root + replicas
        links.append((gather_again + scatter, hardware.link(ranks, stride)))
        links.append((replicas, hardware.link(layout.replicate, replica_stride)))
    seconds = exposed + in_forward + in_backward
    exposed += max(0.0, in_forward - forward) + max(0.0, in_backward - backward)
    return Wait(seconds, exposed, max(links, key=lambda link: link[0])[1])


def tensor(rank: Rank) -> Wait:
    """Return tensor parallelism's collectives, which products wait for, as for torch's functional collectives.

    A split of the features out gathers its input in forward, by ``Precision.as_megatron`` also in backward for the
    weight's gradient (arXiv 2205.05198, section 4.2.2), and scatters the sum of its input's gradient; a split of the
    features in scatters the sum of its output and gathers that output's gradient.
    """
    layout, hardware = rank.layout, rank.hardware
    operand_bytes = rank.precision.operand_bytes
    seconds = 0.0
    for weight in rank.model_shapes.block:
        if layout.tensor > 1 and weight.split in ("in", "out"):
            elements = rank.tokens * (weight.cols if weight.split == "out" else weight.rows)
            gathers = 2 if weight.split == "out" and rank.precision.as_megatron else 1
            seconds += weight.share * gathers * hardware.wire(elements * operand_bytes, layout.tensor, 1)
            seconds += weight.share * hardware.wire(elements * BF16, layout.tensor, 1)  # the sum
            seconds += weight.share * hardware.latency * rank.precision.pairs  # of the scale
    seconds *= rank.rank_shapes.layers
    return Wait(seconds, seconds, hardware.link(layout.tensor, 1))


def expert(rank: Rank) -> Wait:
    """Return expert parallelism's all-to-alls, which products wait for: tokens there and back, forward and backward.

    A token goes to each of its experts; by ``Precision.as_megatron`` once to each server that has some, and on to them
    over NVLink. Experts are as likely on any server, of which at most MOST_SERVERS are chosen.
    """
    layout, hardware = rank.layout, rank.hardware
    experts = [weight for weight in rank.model_shapes.block if weight.split == "experts"]
    link = hardware.link(layout.expert, 1, directly=True)
    if layout.expert == 1 or not experts:
        return Wait(0.0, 0.0, link)
    used = experts[0].used
    servers = max(1.0, layout.expert / hardware.server)
    visited = min(MOST_SERVERS, servers * (1 - (1 - 1 / servers) ** used)) if rank.precision.as_megatron else used
    here = min(layout.expert, hardware.server)
    layers = rank.rank_shapes.layers * experts[0].share
    token_elements = rank.tokens / layout.tensor * rank.model_shapes.width * layers
    slowest = max(visited * (1 - 1 / servers) / hardware.network, used * (1 - 1 / here) / hardware.nvlink)
    waits = (4 + 2 * rank.precision.pairs) * layers * hardware.latency  # also of the scales
    # forward dispatches tokens and combines results, backward the gradients of both
    seconds = token_elements * 2 * (rank.precision.operand_bytes + BF16) * slowest + waits
    return Wait(seconds, seconds, link)
