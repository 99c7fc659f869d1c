"""Formulas: what a training step of a transformer sends under FSDP2, in bytes and calls.

They are exact for what octavo does: ``communication.py`` checks them against a counter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

BLOCK = 128  # of the recipe "blockwise"
RECIPES = ("bf16", "dynamic", "delayed", "rowwise", "blockwise", "mx")


@dataclass(frozen=True)
class Weight:
    """A parameter: a matrix, or a vector of one column.

    ``split``: which of its sides tensor parallelism divides, the features in or out; experts are divided among ranks as
    a whole. ``held``: how many of these matrices there are, and ``used``: by how many of them a token is multiplied.
    """

    rows: int
    cols: int = 1
    converted: bool = False
    split: Literal["in", "out", "experts", None] = None
    held: int = 1
    used: int = 1

    @property
    def elements(self) -> int:
        """Of all these matrices."""
        return self.held * self.rows * self.cols


@dataclass(frozen=True)
class Shapes:
    """A transformer whose blocks are sharded one by one, the rest (embedding, last norm, head) with the root.

    ``attention``: features of a head's queries and values, the mean of both, times heads. ``elementwise``: elements
    that a block's forward reads or writes for a token between its products (norms, residuals, rotation, activation).
    """

    name: str
    width: int
    layers: int
    block: tuple[Weight, ...]
    root: tuple[Weight, ...]
    attention: int
    elementwise: int

    @property
    def products(self) -> tuple[int, int]:
        """Weights that each token is multiplied by: in converted layers, and in the head."""
        converted = sum(weight.used * weight.rows * weight.cols for weight in self.block if weight.converted)
        return self.layers * converted, self.root[-1].rows * self.root[-1].cols

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return self.layers * sum(w.elements for w in self.block) + sum(w.elements for w in self.root)


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
    query_key, gate_up = width + 2 * kv_width, 2 * hidden
    block = (
        Weight(query_key, width, True, "out"),
        Weight(width, width, True, "in"),
        Weight(gate_up, width, True, "out"),
        Weight(width, hidden, True, "in"),
        *[Weight(width)] * 2,
    )
    elementwise = 2 * 2 * width + 2 * 3 * width + 2 * query_key + gate_up + hidden
    return Shapes(name, width, layers, block, embedding_and_head(width, vocabulary), width, elementwise)


def embedding_and_head(width: int, vocabulary: int) -> tuple[Weight, ...]:
    """The weights outside of blocks; the head is the last."""
    return Weight(vocabulary, width), Weight(width), Weight(vocabulary, width)


# Llama 3 herd of models, arXiv 2407.21783, table 3; 8 key-value heads of 128
LLAMA = (
    transformer("8B", 4096, 14336, 32, 1024, 128256),
    transformer("70B", 8192, 28672, 80, 1024, 128256),
    transformer("405B", 16384, 53248, 126, 1024, 128256),
)


def deepseek_v3() -> Shapes:
    """DeepSeek-V3 (arXiv 2412.19437, section 4.2), its first three layers, which are dense, taken as the others.

    A token is multiplied by as many numbers in both kinds. Without the multi-token prediction.
    """
    width, heads, queries, latent, expert = 7168, 128, 1536, 512, 2048
    block = (
        Weight(queries + latent + 64, width, True),
        Weight(heads * 192, queries, True, "out"),
        Weight(heads * 256, latent, True, "out"),
        Weight(width, heads * 128, True, "in"),
        Weight(2 * expert, width, True, "experts", 256, 8),
        Weight(width, expert, True, "experts", 256, 8),
        Weight(2 * expert, width, True),  # the expert of all tokens
        Weight(width, expert, True),
        Weight(256, width),  # the router
        *[Weight(width)] * 2,
    )
    rotated, sorted_and_back = 2 * heads * 64, 2 * 2 * 8 * width
    elementwise = 2 * 2 * width + 2 * 3 * width + 2 * (queries + latent) + rotated + 9 * 3 * expert + sorted_and_back
    return Shapes("DeepSeek-V3", width, 61, block, embedding_and_head(width, 129280), heads * 160, elementwise)


DEEPSEEK = deepseek_v3()


def layouts(weight: Weight, recipe: str, ranks: int) -> tuple[int, list[tuple[int, int]]]:
    """(Pairs that are sent of a converted weight, of each the bytes of scales sent and how many are agreed on).

    Scales are sent beside the codes where no scale is of several ranks' rows and each has as many rows: 4 bytes each,
    powers of two of ``mx`` one. Else ranks agree on an amax of 4 bytes for each.
    """
    tiles = {"rowwise": [(1, 0, 4), (0, 1, 4)], "blockwise": [(BLOCK, BLOCK, 4)], "mx": [(1, 32, 1), (32, 1, 1)]}
    part, found = math.ceil(weight.rows / ranks), []
    for rows, cols, size in tiles.get(recipe, [(0, 0, 4)]):
        count = math.ceil(weight.rows / (rows or weight.rows)) * math.ceil(weight.cols / (cols or weight.cols))
        apart = rows and weight.rows == part * ranks and part % rows == 0
        found.append((size * count, 0) if apart else (0, count))
    return len(found), found


def sent(weight: Weight, recipe: str, ranks: int, param_bytes: int = 2) -> int:
    """Bytes of one gather of a weight over so many ranks, each of which has as many rows (the last one's padded).

    A byte an element for each pair, and its scales; else as bf16.
    """
    elements = weight.held * math.ceil(weight.rows / ranks) * ranks * weight.cols
    if not weight.converted or recipe == "bf16" or ranks == 1:
        return elements * param_bytes
    pairs, scales = layouts(weight, recipe, ranks)
    return pairs * elements + weight.held * sum(size for size, _ in scales)


def agreed(weight: Weight, recipe: str, ranks: int) -> int:
    """Bytes of a converted weight's amaxes that ranks agree on."""
    counts = [count for _, count in layouts(weight, recipe, ranks)[1]]
    return 4 * weight.held * sum(counts) if recipe != "bf16" else 0


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
    many rows a rank. octavo finds what ranks agree on in one all-reduce of an fp32 each.
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
    scales = shapes.layers * sum(agreed(weight, recipe, ranks) for weight in shapes.block if weight.converted)
    return Traffic(
        gathered_forward=shapes.layers * block + root,
        gathered_backward=shapes.layers * block,
        scattered=shapes.layers * block_gradients + root_gradients,
        reduced=scales,
        gathers=2 * shapes.layers + 1,
        scatters=shapes.layers + 1,
        reduces=int(scales > 0),
        weights=2 * shapes.layers * converted,
        block_gather=block,
        root_gather=root,
        root_scatter=root_gradients,
    )


def divided(shapes: Shapes, tensor: int, pipeline: int, expert: int = 1) -> Shapes:
    """What one rank holds of a model under tensor, pipeline and expert parallelism, before FSDP2 shards it.

    Args:
        shapes: of the model.
        tensor: over how many ranks matrices are split; the embedding and the head by their rows.
        pipeline: how many stages of equally many layers; each is taken to hold as much of the embedding and the head.
        expert: over how many ranks experts are divided.
    """

    def part(weight: Weight) -> Weight:
        if weight.split == "experts":
            return replace(weight, held=weight.held // expert)
        rows, cols = (tensor if weight.split == side else 1 for side in ("out", "in"))
        return replace(weight, rows=weight.rows // rows, cols=weight.cols // cols)

    root = tuple(replace(w, rows=math.ceil(w.rows / (tensor * pipeline))) if w.cols > 1 else w for w in shapes.root)
    layers = math.ceil(shapes.layers / pipeline)
    return replace(shapes, layers=layers, block=tuple(map(part, shapes.block)), root=root)
