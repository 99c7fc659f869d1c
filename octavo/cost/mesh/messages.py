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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octavo import recipes
from octavo.cost.mesh.rank import Rank
from octavo.cost.mesh.shapes import BF16, CODE, FLOAT, Weight
from octavo.cost.rates import IN_BF16
from octavo.granularity import BLOCK, Granularity

SENT_PAIR = CODE + 1 / BLOCK  # bytes of a code and its share of the exponent that is a block's scale


class Scales(NamedTuple):
    """The scales of a weight's pair: which elements share one, of the weight as it lies, and its bytes."""

    granularity: Granularity
    size: int


@functools.cache
def weight_scales(recipe: str) -> list[Scales]:
    """Return the Scales of each pair that a recipe of octavo.recipes makes of a weight."""
    as_is, transposed, once = getattr(recipes, recipe)().weight_casts
    pairs = [(as_is, as_is.granularity)] if as_is else []
    pairs += [(transposed, transposed.granularity.transposed())] if transposed and not once else []
    return [Scales(granularity, cast.scale_inv_dtype.itemsize) for cast, granularity in pairs]


def gather_bytes(weights: Sequence[Weight], recipe: str, ranks: int, param_bytes: int = BF16) -> tuple[float, float]:
    """Return the bytes of one gather of weights over so many ranks, and of the amaxes that ranks share before it.

    Each rank has as many rows of a weight (the last one's padded): as bf16, or, of a converted one, a byte an element
    for each pair, and its scales. These are sent beside the codes where no scale is of several ranks' rows and each
    rank has as many: 4 bytes each, powers of two of ``mx`` one. Else ranks share an amax of 4 bytes for each.
    """
    total: float = 0
    amaxes: float = 0
    for weight in weights:
        shard_rows, matrices = math.ceil(weight.rows / ranks), weight.share * weight.held
        elements, pairs = matrices * shard_rows * ranks * weight.cols, 0.0
        is_converted = weight.converted and recipe != IN_BF16
        for granularity, scale_bytes in weight_scales(recipe) if is_converted else ():
            scales = matrices * math.prod(granularity.scale_shape((weight.rows, weight.cols)))
            height, _ = granularity.tile  # -1: all rows
            is_sent = height > 0 and weight.rows == shard_rows * ranks and shard_rows % height == 0
            pairs += elements + scale_bytes * scales if is_sent else elements
            amaxes += 0 if is_sent else FLOAT * scales
        total += pairs if is_converted and ranks > 1 else elements * param_bytes
    return total, amaxes


class ShardMessages(NamedTuple):
    """Seconds of FSDP2's collectives for a group of shards, by the compute that may hide them; seconds by link."""

    first: float  # nothing hides them: the gathers before the first block's products, the scatter after the last
    in_forward: float
    in_backward: float
    links: tuple[tuple[str, float], ...]


def fsdp(rank: Rank) -> Iterator[ShardMessages]:
    """Yield a round of the collectives of FSDP2 and of HSDP's replicas, for each group of shards that has ranks.

    Forward gathers the root, then each block; backward gathers blocks again and scatters sums of gradients, the root's
    at the end. Replicas add their shards of gradients by an all-reduce.
    """
    layout, hardware = rank.layout, rank.hardware
    recipe, levels = rank.precision.recipe if rank.precision.gathers else IN_BF16, rank.precision.reduction
    apart = layout.tensor * layout.sharded
    for shapes, ranks, stride in rank.shards:
        if ranks * layout.replicate == 1:
            continue
        gather = functools.partial(hardware.wire, ranks=ranks, stride=stride)
        root, _ = gather_bytes(shapes.root, IN_BF16, ranks)
        block, amaxes = gather_bytes(shapes.block, recipe, ranks)
        gradients, _ = gather_bytes(shapes.block, IN_BF16, ranks)
        scatter_of_root, scatter = (
            hardware.exchange(size * SENT_PAIR / BF16, ranks, stride, levels) if levels else gather(size)
            for size in (root, shapes.layers * gradients + root)
        )
        first_gathers = gather(root + block)
        gather_again = gather(shapes.layers * block) * layout.resharded
        replicas = 2 * hardware.wire(BF16 * shapes.parameters / ranks, layout.replicate, apart)
        yield ShardMessages(
            first=first_gathers + scatter_of_root + hardware.latency * (ranks > 1 and amaxes > 0),
            in_forward=gather(shapes.layers * block + root) - first_gathers,
            in_backward=gather_again + scatter - scatter_of_root + replicas,
            links=(
                (hardware.link(ranks, stride), gather_again + scatter),
                (hardware.link(layout.replicate, apart), replicas),
            ),
        )


def tensor(rank: Rank) -> float:
    """Return seconds of tensor parallelism's collectives.

    A split of the features out gathers its input in forward, elsewhere also in backward for the weight's gradient
    (arXiv 2205.05198, section 4.2.2), and scatters the sum of its input's gradient; a split of the features in
    scatters the sum of its output and gathers that output's gradient.
    """
    layout, hardware, bytes_gathered = rank.layout, rank.hardware, rank.precision.operand_bytes
    if layout.tensor == 1:
        return 0.0
    seconds = 0.0
    for weight in rank.whole.block:
        if weight.split in ("in", "out"):
            elements = rank.tokens * (weight.cols if weight.split == "out" else weight.rows)
            gathers = 2 if weight.split == "out" and rank.precision.elsewhere else 1
            seconds += weight.share * gathers * hardware.wire(elements * bytes_gathered, layout.tensor, 1)
            seconds += weight.share * hardware.wire(elements * BF16, layout.tensor, 1)  # the sum
            seconds += weight.share * hardware.latency * (bytes_gathered == CODE)  # of the scale
    return rank.shapes.layers * seconds


def expert(rank: Rank) -> float:
    """Return seconds of expert parallelism's all-to-alls: tokens there and back, in forward and in backward.

    A token goes to each of its experts; elsewhere once to each server that has some and on to them over NVLink.
    Experts are as likely on any server, of which at most 4 are chosen (arXiv 2412.19437, section 3.2.2).
    """
    layout, hardware = rank.layout, rank.hardware
    experts = [weight for weight in rank.whole.block if weight.split == "experts"]
    if layout.expert == 1 or not experts:
        return 0.0
    used, servers = experts[0].used, max(1.0, layout.expert / hardware.server)
    visited = min(4.0, servers * (1 - (1 - 1 / servers) ** used)) if rank.precision.elsewhere else used
    here = min(layout.expert, hardware.server)
    layers = rank.shapes.layers * experts[0].share
    numbers = rank.tokens / layout.tensor * rank.whole.width * layers
    slowest = max(visited * (1 - 1 / servers) / hardware.network, used * (1 - 1 / here) / hardware.nvlink)
    waits = (4 + 2 * rank.precision.pairs) * layers * hardware.latency  # also of the scales
    return numbers * 2 * (rank.precision.operand_bytes + BF16) * slowest + waits
