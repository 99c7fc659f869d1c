"""Formulas: what a training step of a transformer sends under FSDP2, and how long it takes. Nothing here is measured.

The bytes are exact for what octavo does (``communication.py`` checks them against a counter). The times rest
on the constants of ``Hardware``, which are assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BLOCK = 128  # of the recipe "blockwise"
RECIPES = ("bf16", "dynamic", "delayed", "rowwise", "blockwise", "mx")
PER_TENSOR = ("dynamic", "delayed")


@dataclass(frozen=True)
class Weight:
    """A parameter: a matrix, or a vector of one column."""

    rows: int
    cols: int = 1
    converted: bool = False


@dataclass(frozen=True)
class Shapes:
    """A transformer whose blocks are sharded one by one, the rest (embedding, last norm, head) with the root."""

    name: str
    width: int
    layers: int
    block: tuple[Weight, ...]
    root: tuple[Weight, ...]

    @property
    def products(self) -> tuple[int, int]:
        """Weights that each token is multiplied by: in converted layers, and in the head."""
        converted = sum(weight.rows * weight.cols for weight in self.block if weight.converted)
        return self.layers * converted, self.root[-1].rows * self.root[-1].cols

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        parts = self.layers * sum(w.rows * w.cols for w in self.block), sum(w.rows * w.cols for w in self.root)
        return sum(parts)


def transformer(name: str, width: int, hidden: int, layers: int, kv_width: int, vocabulary: int) -> Shapes:
    """Shapes of octavo.nn.TransformerBlock (query, key and value in one matrix, gate and up in another) and a GPT.

    Args:
        name: for tables.
        width: of the residual stream.
        hidden: of SwiGLU.
        layers: how many blocks.
        kv_width: features of the keys, fewer than ``width`` where heads share them.
        vocabulary: rows of the embedding and of the head, which aren't converted.
    """
    linear = ((width + 2 * kv_width, width), (width, width), (2 * hidden, width), (width, hidden))
    block = (*(Weight(rows, cols, True) for rows, cols in linear), Weight(width), Weight(width))
    return Shapes(name, width, layers, block, (Weight(vocabulary, width), Weight(width), Weight(vocabulary, width)))


# Llama 3 herd of models, arXiv 2407.21783, table 3; 8 key-value heads of 128
LLAMA = (
    transformer("8B", 4096, 14336, 32, 1024, 128256),
    transformer("70B", 8192, 28672, 80, 1024, 128256),
    transformer("405B", 16384, 53248, 126, 1024, 128256),
)


def sent(weight: Weight, recipe: str, ranks: int, param_bytes: int = 2) -> int:
    """Bytes of one gather of a weight over so many ranks, each of which has as many rows (the last one's padded).

    Per tensor: a byte an element. 128x128 blocks, where each rank has whole ones: also 4 bytes a block. Else as bf16.
    """
    rows = math.ceil(weight.rows / ranks) * ranks
    if weight.converted and recipe in PER_TENSOR and ranks > 1:
        return rows * weight.cols
    if weight.converted and recipe == "blockwise" and ranks > 1 and weight.rows % (ranks * BLOCK) == 0:
        return rows * weight.cols + 4 * (rows // BLOCK) * math.ceil(weight.cols / BLOCK)
    return rows * weight.cols * param_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes and calls of one step's collectives, as byte_counter.ByteCounter counts them: of whole tensors."""

    gathered_forward: int
    gathered_backward: int
    scattered: int
    reduced: int  # amax
    gathers: int
    scatters: int
    reduces: int
    weights: int  # of the gathered bytes, those of converted weights
    block_gather: int  # one of the gathers
    root_gather: int
    root_scatter: int

    @property
    def gathered(self) -> int:
        """Of forward and backward."""
        return self.gathered_forward + self.gathered_backward


def traffic(shapes: Shapes, recipe: str, ranks: int, param_bytes: int = 2, reduce_bytes: int = 2) -> Traffic:
    """What one step sends, of one micro-batch.

    Source: FSDP2 as torch 2.13 does it. ``fully_shard`` of each block and of the model: a block is gathered in forward
    and again in backward, the root's own parameters once; each gradient is scattered once; parameters are padded to as
    many rows a rank. octavo finds the scales of all weights that are cast per tensor in one all-reduce of an fp32 each.
    What depends on the way a recipe's weights are gathered is in ``sent``.

    Args:
        shapes: of the model.
        recipe: one of RECIPES.
        ranks: that the parameters are sharded over.
        param_bytes: of an element that is gathered in high precision.
        reduce_bytes: of a gradient's element.
    """
    block = sum(sent(weight, recipe, ranks, param_bytes) for weight in shapes.block)
    converted = sum(sent(weight, recipe, ranks, param_bytes) for weight in shapes.block if weight.converted)
    root = sum(sent(weight, "bf16", ranks, param_bytes) for weight in shapes.root)
    block_gradients = sum(sent(weight, "bf16", ranks, reduce_bytes) for weight in shapes.block)
    root_gradients = sum(sent(weight, "bf16", ranks, reduce_bytes) for weight in shapes.root)
    scales = shapes.layers * sum(weight.converted for weight in shapes.block) if recipe in PER_TENSOR else 0
    return Traffic(
        gathered_forward=shapes.layers * block + root,
        gathered_backward=shapes.layers * block,
        scattered=shapes.layers * block_gradients + root_gradients,
        reduced=4 * scales,
        gathers=2 * shapes.layers + 1,
        scatters=shapes.layers + 1,
        reduces=int(scales > 0),
        weights=2 * shapes.layers * converted,
        block_gather=block,
        root_gather=root,
        root_scatter=root_gradients,
    )


@dataclass(frozen=True)
class Hardware:
    """H100 SXM servers of 8. None of these is measured here.

    Args:
        train_rate: bf16 FLOP/s that a whole training step reaches, without waiting for others.
        gemm_rate: bf16 FLOP/s of its large matrix products alone; with train_rate it says what share of the time they
            are. Assumed.
        gemm_speedup: FP8 products and their casts against bf16 products; for every recipe the same.
        nvlink: bytes/s each way of a GPU inside its server (NVIDIA's data sheet: 900 GB/s both ways).
        network: bytes/s each way of a GPU's share of the network: 400 Gb/s.
        node: GPUs in a server.
        latency: seconds that a small all-reduce keeps all waiting. Assumed; it grows with the number of GPUs.
    """

    train_rate: float = 400e12
    gemm_rate: float = 600e12
    gemm_speedup: float = 1.7
    nvlink: float = 450e9
    network: float = 50e9
    node: int = 8
    latency: float = 50e-6


def wire_seconds(whole: int, ranks: int, hardware: Hardware) -> float:
    """How long an all-gather or a reduce-scatter of so many bytes in all takes, bandwidth alone.

    Each GPU takes in (n - 1) / n of the bytes over NVLink; each of N servers (N - 1) / N of them over all its network
    cards; the slower of the two counts.
    """
    inside = whole * (ranks - 1) / ranks / hardware.nvlink
    nodes = math.ceil(ranks / hardware.node)
    return max(inside, whole * (nodes - 1) / nodes / (hardware.node * hardware.network))


@dataclass(frozen=True)
class Step:
    """Seconds of a step."""

    compute: float
    wire: float  # all collectives, hidden or not
    exposed: float  # of these, what compute does not hide

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def step(
    shapes: Shapes,
    recipe: str,
    ranks: int,
    tokens: int,
    hardware: Hardware,
    reduce_bytes: int = 4,
    bf16_compute: float | None = None,
) -> Step:
    """A step of one sequence of ``tokens`` a GPU.

    Assumes: FLOPs 6 a weight and token in products, 6 x tokens x width x layers a token in causal attention, no
    recomputation; a third of the compute is forward. FSDP2 prefetches one block: gathers hide behind forward, gathers
    and scatters (on the same wires) behind backward, except for the first gathers (root and block 0) and the root's
    scatter at the end. Collectives take no SMs from compute and the optimizer no time. Gradients are reduced in fp32.

    Args:
        shapes: of the model.
        recipe: one of RECIPES.
        ranks: GPUs; parameters are sharded over all of them.
        tokens: a GPU and step.
        hardware: constants.
        reduce_bytes: of a gradient's element.
        bf16_compute: seconds of bf16's compute, where known; else from FLOPs and ``train_rate``.
    """
    converted, head = shapes.products
    attention = 6 * tokens * shapes.width * shapes.layers
    if bf16_compute is None:
        bf16_compute = tokens * (6 * (converted + head) + attention) / hardware.train_rate
    saved = 0.0 if recipe == "bf16" else tokens * 6 * converted / hardware.gemm_rate * (1 - 1 / hardware.gemm_speedup)
    compute = bf16_compute - saved

    moved = traffic(shapes, recipe, ranks, reduce_bytes=reduce_bytes)

    def seconds(whole: int) -> float:
        return wire_seconds(whole, ranks, hardware)

    first, last = seconds(moved.root_gather + moved.block_gather), seconds(moved.root_scatter)
    forward = seconds(moved.gathered_forward) - first
    backward = seconds(moved.gathered_backward + moved.scattered) - last
    amax = moved.reduces * hardware.latency
    hidden = max(0.0, forward - compute / 3) + max(0.0, backward - compute * 2 / 3)
    return Step(compute, first + forward + backward + last + amax, first + last + amax + hidden)
