"""Bytes that a transformer's parts move besides products, attention and casts: as transformers writes them, and fused.

A table, so that a kernel that computes a part in fewer bytes changes one row. tests/cost/test_parts.py holds the rows
against the operations of a block of transformers' Llama, before and after ``octavo.convert(..., fuse=True)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from octavo.cost.work import Work
from octavo.nn.known_forwards import fused_modules


class Moved(NamedTuple):
    """Bytes that are read and written for an element, in forward and in backward, and by how many launches."""

    forward: float = 0
    backward: float = 0
    forward_launches: int = 0
    backward_launches: int = 0


class Part(NamedTuple):
    """Traffic of a part as its library writes it, and where octavo fuses it; the same where it doesn't."""

    plain: Moved = Moved()
    fused: Moved = Moved()


def by_launch(forward: Sequence[int], backward: Sequence[int] = (), tensors: int = 1) -> Moved:
    """Return the Moved of launches, by the bytes that each reads and writes for an element.

    ``tensors``: as many have the part's elements together, and each has such launches of its own.
    """
    return Moved(sum(forward), sum(backward), tensors * len(forward), tensors * len(backward))


READ, WRITE = 2, 2  # bytes in bf16 of a tensor of an element each; of two tensors, such as gate and up, twice as many
_GATED = by_launch([4, 6], [6, 6, 6])  # the activation of gate, times up
_LOSS = by_launch([6, 8, 4], [8, 12, 6])  # to float32, log-softmax, the loss
# By part, for each element of what its comment names: 2 bytes in bf16, 4 in float32, 1 of a code; 0 of a launch that
# reads rows alone. Casts are counted elsewhere. A row has only the bytes that a fused cast reads beyond a cast alone
# (written a - b: b is the cast alone), and negative launches where fusing saves casts. A block has two norms, Qwen3's
# two more of heads, and one of all others but losses.
PARTS = {
    # its input
    "norm": Part(
        by_launch(
            [6, 8, 4, 0, 0, 8, 6, 4],  # to float32, pow, mean, add, rsqrt, mul, to bf16, mul by gamma
            # mul, mul and sum (gamma's gradient), to float32, mul, mul, sum, pow, mul, mul, div, pow, mul, mul, add, to
            # bf16
            [4, 6, 2, 6, 12, 8, 4, 0, 0, 0, 8, 8, 8, 12, 12, 6],
        ),
        by_launch([4], [6]),
    ),
    # The product of gate and up. Fused casts of it and of its gradient read gate and up; the codes that the former
    # leaves to the latter are written once all the same.
    "gated feed-forward": Part(_GATED, Moved(forward=2 * READ - READ, backward=3 * READ - 2 * READ)),
    # the same: gate and up are put side by side first, and their gradients are computed in bf16
    "gated feed-forward, apart": Part(_GATED, by_launch([2 * (READ + WRITE) + 2 * READ - READ], [6, 6, 4, 6])),
    # the activation; fused, the cast of its gradient reads its input too
    "feed-forward": Part(by_launch([4], [6]), Moved(backward=2 * READ - READ)),
    # the input of both, whose gradients are added up; joined they have one cast of weights, and one of gradients
    "gate and up": Part(by_launch([], [6]), Moved(forward_launches=-1, backward_launches=-1)),
    "query, key and value": Part(by_launch([], [6, 6]), Moved(forward_launches=-2, backward_launches=-2)),  # as well
    "weights side by side": Part(fused=by_launch([4])),  # the weights of layers that are joined
    # Queries and keys: times cos, half of them negated, halves exchanged, times sin, the sum. Fused they are one
    # launch, and the cast of the joined product's gradient turns it back.
    "rotary embedding": Part(by_launch([4, 2, 4, 4, 6], [4, 2, 3, 3, 6, 4, 6], tensors=2), by_launch([4])),
    "values": Part(fused=Moved(forward=4)),  # which that launch copies
    # queries and keys, which norms read each by itself; in backward a launch turns back, another joins norms' gradients
    "norms of heads": Part(fused=Moved(forward=4, forward_launches=2, backward=4, backward_launches=2)),
    "heads side by side": Part(fused=by_launch([], [4, 4])),  # queries, keys and values
    # a block's input, and two sums; fused, the norm behind attention also reads the residual and writes the first sum
    # (no launch of its own), a launch adds the second, and the gradients of both norms read the residual's
    "residual": Part(
        by_launch([6, 6], [6, 6]),
        Moved(forward=(READ + WRITE) + (2 * READ + WRITE), backward=2 * READ, forward_launches=1),
    ),
    "loss": Part(_LOSS, by_launch([2], [4])),  # the logits
    # The logits, computed with the head: a chunk's are read for the loss and for their gradient, which is written as
    # codes, as they lie and transposed; the launches of one chunk.
    "chunked loss": Part(_LOSS, by_launch([2, 2 + 1 + 1])),
}
OCTAVO_KERNELS = {name: part.fused for name, part in PARTS.items()}
# parts that Liger-Kernel computes by a kernel each in bf16; others as their library writes them, no products joined
BF16_KERNELS = {name: PARTS[name].fused for name in ("norm", "loss")} | {"rotary embedding": by_launch([4], [4])}
BF16_KERNELS |= dict.fromkeys(("gated feed-forward", "gated feed-forward, apart"), by_launch([6], [10]))
# parts that are fused in high precision too, in which a model's traffic is counted
COUNTED = ("norm", "residual")
# bytes a logit that a loss has at a time
LOSS = 3 * 4  # log-probabilities and two gradients in float32
FUSED_LOSS = 2 * 2  # a gradient and the logits
CHUNKED_LOSS = 1  # the transposed codes of the gradient
CHUNK = 2 + 1  # besides, of one chunk's logits alone: they and the codes as they lie


class FusedPart(NamedTuple):
    """A part of a model that octavo fuses: its module, its name in PARTS, and how many elements it has."""

    module: str
    part: str
    elements: float


def fused_parts(model: nn.Module, work: Work, are_stored: bool = False) -> Iterator[FusedPart]:
    """Yield the parts of each module that octavo.convert(..., fuse=True) has given its own forward.

    ``are_stored``: weights will lie in FP8, so that none of them are joined.
    """
    linears = {linear.name: linear for linear in work.linears}
    for module in fused_modules(model):
        name, prefix = module.name, f"{module.name}." * bool(module.name)
        is_joined = module.is_joined and not are_stored
        if module.kind == "loss":
            yield FusedPart(f"{name}.loss_function", "loss", work.logits)
            continue
        if module.kind in ("norm", "residual"):
            yield FusedPart(name, module.kind, work.inputs.get(name, 0))
            continue
        if (down := linears.get(f"{prefix}{module.down}")) is not None:
            gated = "gated feed-forward" if is_joined else "gated feed-forward, apart"
            yield FusedPart(name, gated if len(module.input_layers) == 2 else "feed-forward", down.sizes.input)
        layers = [linears[path] for child in module.input_layers if (path := f"{prefix}{child}") in linears]
        if not is_joined or len(layers) < max(2, len(module.input_layers)):
            continue
        is_attention = module.kind == "attention"
        yield FusedPart(name, "query, key and value" if is_attention else "gate and up", layers[0].sizes.input)
        yield FusedPart(name, "weights side by side", sum(layer.sizes.weight for layer in layers))
        if is_attention:
            queries, keys, values = (layer.sizes.output for layer in layers)
            yield FusedPart(name, "rotary embedding", queries + keys)
            yield FusedPart(name, "values", values)
            if module.norms_heads:
                yield FusedPart(name, "norms of heads", queries + keys)
                yield FusedPart(name, "heads side by side", queries + keys + values)
