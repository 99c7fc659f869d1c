"""Bytes that a transformer's parts move besides products, attention and casts: as transformers writes them, and fused.

A table, so that a kernel that computes a part in fewer bytes changes one row. tests/cost/test_parts.py holds the rows
against the operations of a block of transformers' Llama, before and after ``octavo.convert(..., fuse=True)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from octavo.cost.work import Work
from octavo.nn.known_forwards import fused_modules


class Moved(NamedTuple):
    """Bytes that are read and written for an element, in forward and in backward, and by how many launches."""

    forward: float
    backward: float
    forward_launches: int
    backward_launches: int


class Part(NamedTuple):
    """Traffic of a part as its library writes it, and where octavo fuses it; the same where it doesn't."""

    plain: Moved
    fused: Moved


# By part, for each element of what its comment names. Launches that fewer casts need are below 0. A block has two
# norms, Qwen3's two more of heads, and one of all others but the losses.
PARTS = {
    "norm": Part(Moved(36, 96, 8, 16), Moved(4, 6, 1, 1)),  # its input
    # The product of gate and up. The casts of it and of its gradient read gate and up; the codes that the former leaves
    # to the latter are written once all the same.
    "gated feed-forward": Part(Moved(10, 18, 2, 3), Moved(2, 2, 0, 0)),
    "gated feed-forward, apart": Part(Moved(10, 18, 2, 3), Moved(10, 22, 1, 4)),  # the same, put side by side first
    "feed-forward": Part(Moved(4, 6, 1, 1), Moved(0, 2, 0, 0)),  # the activation
    "gate and up": Part(Moved(0, 6, 0, 1), Moved(0, 0, -1, -1)),  # their input, whose gradients are added up
    "query, key and value": Part(Moved(0, 12, 0, 2), Moved(0, 0, -2, -2)),  # their input, as well
    "weights side by side": Part(Moved(0, 0, 0, 0), Moved(4, 0, 1, 0)),  # the weights of layers that are joined
    # queries and keys; the cast of the joined product's gradient turns it back
    "rotary embedding": Part(Moved(20, 28, 10, 14), Moved(4, 0, 1, 0)),
    "values": Part(Moved(0, 0, 0, 0), Moved(4, 0, 0, 0)),
    # queries and keys, which norms read each by itself; in backward a launch turns back, another joins norms' gradients
    "norms of heads": Part(Moved(0, 0, 0, 0), Moved(4, 4, 2, 2)),
    "heads side by side": Part(Moved(0, 0, 0, 0), Moved(0, 8, 0, 2)),  # queries, keys and values
    # a block's input; the norm behind attention writes the sum, and norms' gradients read the residual's
    "residual": Part(Moved(12, 12, 2, 2), Moved(10, 4, 1, 0)),
    "loss": Part(Moved(18, 26, 3, 3), Moved(2, 4, 1, 1)),  # the logits
    # The logits, computed with the head: a chunk's are read for the loss and for their gradient, which is written as
    # codes, as they lie and transposed; the launches of one chunk.
    "chunked loss": Part(Moved(18, 26, 3, 3), Moved(6, 0, 2, 0)),
}
# parts that Liger-Kernel computes by a kernel each in bf16; others as their library writes them, no products joined
BF16_KERNELS = {part: PARTS[part].fused for part in ("norm", "loss")} | {"rotary embedding": Moved(4, 4, 1, 1)}
BF16_KERNELS |= dict.fromkeys(("gated feed-forward", "gated feed-forward, apart"), Moved(6, 10, 1, 1))
# parts that are fused in high precision too, in which a model's traffic is counted
COUNTED = ("norm", "residual")
# bytes a logit that a loss has at a time
LOSS = 3 * 4  # log-probabilities and two gradients in float32
FUSED_LOSS = 2 * 2  # a gradient and the logits
CHUNKED_LOSS = 1  # the transposed codes of the gradient
OF_CHUNK = 2 + 1  # besides, of one chunk's logits alone: they and the codes as they lie


class FusedPart(NamedTuple):
    """A part of a model that octavo fuses: its module, its name in PARTS, and how many elements it has."""

    module: str
    part: str
    elements: float


def fused_parts(model: nn.Module, work: Work) -> Iterator[FusedPart]:
    """Yield the parts of each module that octavo.convert(..., fuse=True) has given its own forward."""
    linears = {linear.name: linear for linear in work.linears}
    for module in fused_modules(model):
        name, names, prefix = module.name, module.readers, f"{module.name}." * bool(module.name)
        if module.kind == "loss":
            yield FusedPart(f"{name}.loss_function", "loss", work.logits)
            continue
        if module.kind in ("norm", "residual"):
            yield FusedPart(name, module.kind, work.inputs.get(name, 0))
            continue
        readers = [linears[f"{prefix}{child}"] for child in names if f"{prefix}{child}" in linears]
        is_attention, is_gated = module.kind == "attention", len(names) == 2
        if (down := linears.get(f"{prefix}{module.down}")) is not None:
            gated = "gated feed-forward" if module.is_joined else "gated feed-forward, apart"
            yield FusedPart(name, gated if is_gated else "feed-forward", down.sizes[0])
        if not module.is_joined or len(names) == 1 or len(readers) < len(names):
            continue
        yield FusedPart(name, "query, key and value" if is_attention else "gate and up", readers[0].sizes[0])
        yield FusedPart(name, "weights side by side", sum(reader.sizes[1] for reader in readers))
        if is_attention:
            yield FusedPart(name, "rotary embedding", readers[0].sizes[2] + readers[1].sizes[2])
            yield FusedPart(name, "values", readers[2].sizes[2])
        if module.norms_heads:
            yield FusedPart(name, "norms of heads", readers[0].sizes[2] + readers[1].sizes[2])
            yield FusedPart(name, "heads side by side", sum(reader.sizes[2] for reader in readers))
