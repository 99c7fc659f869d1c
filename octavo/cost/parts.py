"""What a transformer's parts move besides products, attention and casts: as transformers writes them, and fused.

A table, so that a kernel that computes a part in fewer bytes changes one row. tests/cost/test_parts.py holds the rows
against the operations of a block of transformers' Llama, before and after ``octavo.convert(..., fuse=True)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from octavo.nn.known_forwards import FeedForward, LeanRMSNorm


class Moved(NamedTuple):
    """Bytes that are read and written for an element, in forward and in backward, and by how many launches."""

    forward: float
    backward: float
    forward_launches: int
    backward_launches: int


class Part(NamedTuple):
    """What a part moves as its library writes it, and where octavo fuses it; the same where it doesn't."""

    plain: Moved
    fused: Moved


# Elements are those of a norm's input, of the product of gate and up, of an activation, of what gate and up, or query,
# key and value, read (their gradients of it are added up), of queries and keys, of a block's input, and of the logits.
PARTS = {
    "norm": Part(Moved(36, 96, 8, 16), Moved(40, 6, 10, 1)),
    # fused, gate and up are put side by side, and the cast of their product reads both
    "gated feed-forward": Part(Moved(10, 18, 2, 3), Moved(10, 22, 1, 4)),
    "feed-forward": Part(Moved(4, 6, 1, 1), Moved(0, 6, 0, 1)),
    "gate and up": Part(Moved(0, 6, 0, 1), Moved(0, 6, 0, 1)),
    "query, key and value": Part(Moved(0, 12, 0, 2), Moved(0, 12, 0, 2)),
    "rotary embedding": Part(Moved(20, 28, 10, 14), Moved(20, 28, 10, 14)),
    "residual": Part(Moved(12, 12, 2, 2), Moved(12, 12, 2, 2)),
    "loss": Part(Moved(18, 26, 3, 3), Moved(18, 26, 3, 3)),
}
"""By part; a block has two norms, and one of all others but the loss."""
LOSS = 3 * 4  # bytes a logit that the loss has at a time: log-probabilities and two gradients, in float32


def fused_parts(model: nn.Module, norms: Mapping[str, int], linears: Iterable[Any]) -> Iterator[tuple[str, str, float]]:
    """Yield (module, part, elements) for each module that octavo.convert(..., fuse=True) has given its own forward.

    ``norms``: elements of each norm's input, by its name; ``linears``: LinearWork of all linear layers.
    """
    inputs = {linear.name: linear.sizes[0] for linear in linears}
    for name, module in model.named_modules():
        if isinstance(module, LeanRMSNorm):
            yield name, "norm", norms.get(name, 0)
        elif isinstance(module, FeedForward):
            down = f"{name}.{module.parts.down}"
            part = "gated feed-forward" if module.parts.up else "feed-forward"
            yield name, part, inputs.get(down.removeprefix("."), 0)
