"""Formulas for the bytes and calls that a training step of a transformer sends under FSDP2.

They are exact for what octavo does: ``communication.py`` checks them against a counter.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cost.mesh.messages import gather_bytes
from octavo.cost.mesh.shapes import Shapes, Weight

RECIPES = ("bf16", "dynamic", "delayed", "rowwise", "blockwise", "mx")


def transformer(name: str, width: int, hidden: int, layers: int, kv_width: int, vocabulary: int) -> Shapes:
    """Return shapes of octavo.nn.TransformerBlock (query, key, value in one matrix, gate and up in another) and a GPT.

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
    """Return the weights outside of blocks; the head is the last."""
    return Weight(vocabulary, width), Weight(width), Weight(vocabulary, width)


# Llama 3 herd of models, arXiv 2407.21783, table 3; 8 key-value heads of 128
LLAMA = (
    transformer("8B", 4096, 14336, 32, 1024, 128256),
    transformer("70B", 8192, 28672, 80, 1024, 128256),
    transformer("405B", 16384, 53248, 126, 1024, 128256),
)


def deepseek_v3() -> Shapes:
    """Return DeepSeek-V3 (arXiv 2412.19437, section 4.2); its first three, dense layers are taken as the others.

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

    @property
    def gathered(self) -> int:
        """Bytes gathered in forward and in backward."""
        return self.gathered_forward + self.gathered_backward


def traffic(shapes: Shapes, recipe: str, ranks: int, param_bytes: int = 2, reduce_bytes: int = 2) -> Traffic:
    """Return the bytes and calls that one step sends, of one micro-batch.

    Source: FSDP2 as torch 2.13 does it. ``fully_shard`` of each block and of the model: a block is gathered in forward
    and again in backward, the root's own parameters once; each gradient is scattered once; parameters are padded to as
    many rows a rank. octavo finds what ranks agree on in one all-reduce of an fp32 each.
    What depends on the way a recipe's weights are gathered is in octavo's ``sent``, as for its plan.

    Args:
        shapes: of the model.
        recipe: one of RECIPES.
        ranks: that the parameters are sharded over.
        param_bytes: of an element that is gathered in high precision.
        reduce_bytes: of a gradient's element.
    """
    block, amaxes = gather_bytes(shapes.block, recipe, ranks, param_bytes)
    converted, _ = gather_bytes([weight for weight in shapes.block if weight.converted], recipe, ranks, param_bytes)
    root, _ = gather_bytes(shapes.root, "bf16", ranks, param_bytes)
    block_gradients, _ = gather_bytes(shapes.block, "bf16", ranks, reduce_bytes)
    root_gradients, _ = gather_bytes(shapes.root, "bf16", ranks, reduce_bytes)
    scales = shapes.layers * amaxes
    return Traffic(
        gathered_forward=shapes.layers * block + root,
        gathered_backward=shapes.layers * block,
        scattered=shapes.layers * block_gradients + root_gradients,
        reduced=scales,
        gathers=2 * shapes.layers + 1,
        scatters=shapes.layers + 1,
        reduces=int(scales > 0),
        weights=2 * shapes.layers * converted,
    )
