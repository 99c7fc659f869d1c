"""A rank's compute: seconds of products, casts, attention and the rest of a micro-batch, and of the optimizer.

Backward takes twice what forward takes. Products have octavo.cost's rate whatever their size, those of experts together
that of one of all their rows.
"""

from __future__ import annotations

from octavo import recipes
from octavo.cost.estimate import orthogonalising
from octavo.cost.mesh.rank import STATE_BYTES, Rank
from octavo.cost.mesh.shapes import BF16, FLOAT, Weight
from octavo.cost.rates import IN_BF16, product_kinds
from octavo.cost.work import LinearWork
from octavo.scaling.recipe import Recipe


def forward_and_backward(rank: Rank) -> dict[str, float]:
    """Return seconds of a micro-batch's forward and backward by kind; the head's products are in bf16."""
    layout, rates, whole, hardware = rank.layout, rank.hardware.rates, rank.whole, rank.hardware
    layers = [linear(rank, weight) for weight in rank.shapes.block if weight.converted]
    other = 3 * BF16 * whole.elementwise * rank.tokens / layout.tensor / rates.copy + whole.launches * rates.launch
    flop = 2.0 * rank.tokens * layout.sequence * whole.attention / layout.tensor
    attention = flop / hardware.attention_forward + 2.5 * flop / hardware.attention_backward
    passes = rank.shapes.layers * (1 + layout.recomputed / 3)  # forward runs again in recomputed layers
    logits = rank.tokens * whole.root[-1].rows / (layout.tensor * layout.pipeline)
    head = 3 * rates.product_seconds(IN_BF16, 2 * logits * whole.root[-1].cols)
    return {
        "products": passes * sum(products for products, _ in layers) + head,
        "casts": passes * sum(casts for _, casts in layers),
        "attention": passes * attention,
        "other": passes * other + whole.logits * logits / rates.copy,
    }


def linear(rank: Rank, weight: Weight) -> tuple[float, float]:
    """Return seconds of a converted weight's products and casts, forward and backward."""
    rates, name = rank.hardware.rates, rank.precision.recipe
    recipe: Recipe = getattr(recipes, "high_precision" if name == IN_BF16 else name)()
    # under tensor parallelism a split layer reads all tokens, another this rank's part of them
    rows = rank.tokens * weight.used / (1 if weight.split in ("in", "out") else rank.layout.tensor)
    work = LinearWork("", round(rows), weight.cols, weight.rows, True, True)
    products, casts = sum(rates.product_seconds(kind, work.flop) for kind in product_kinds(recipe)), 0.0
    if not recipe.is_high_precision:
        for role, elements in zip(recipe.casts, cast_elements(rank, weight, work.tokens), strict=True):
            if (cast := role.as_is or role.transposed) is not None:
                casts += rates.cast_seconds(cast, elements, True)
    return weight.share * products, weight.share * casts


def cast_elements(rank: Rank, weight: Weight, rows: int) -> tuple[float, float, float]:
    """Return elements of a layer's input (of so many rows), weight and output's gradient that this rank casts.

    A tensor that is sent as pairs is cast before it is sent: the input of a first layer, the gradient of a second one's
    output. Each rank casts its part of a tensor that tensor parallelism gathers; by ``Precision.elsewhere`` a token is
    cast once for all its experts. Other tensors are cast as a whole. A weight is cast where it is sharded if it is
    gathered in FP8, else as a whole; once a step if it stays gathered.
    """
    layout, precision = rank.layout, rank.precision
    elements = weight.elements / weight.share / (layout.sharded if precision.gathers else 1)
    elements /= 1 if layout.resharded else layout.micro_batches
    divisor: float = 1
    if precision.pairs and weight.split in ("in", "out"):
        divisor = layout.tensor
    elif precision.pairs and precision.elsewhere and weight.split == "experts":
        divisor = weight.used
    is_first = weight.split == "out" or (weight.split == "experts" and weight.cols == rank.whole.width)
    divisors = (divisor, 1) if is_first else (1, divisor)
    return rows * weight.cols / divisors[0], elements, rows * weight.rows / divisors[1]


def update(rank: Rank) -> float:
    """Return seconds of the optimizer's update of this rank's shards.

    It reads and writes state, reads gradients and writes bf16 weights. Muon's owners have equal shares of the products;
    matrices but those of experts travel to them and back in bf16.
    """
    master, seconds, hardware = STATE_BYTES[rank.precision.state][0], 0.0, rank.hardware
    for part, ranks, stride in rank.shards:
        moved = 2 * (master + rank.moments(part)) + FLOAT + BF16
        seconds += moved * part.parameters / ranks / hardware.rates.copy
        for w in part.block if rank.precision.algorithm == "muon" else ():
            if w.cols > 1:
                products = orthogonalising((w.share * w.held, w.rows, w.cols), hardware.rates)
                sent = BF16 * w.elements / ranks * (w.split != "experts")
                seconds += part.layers * (products / ranks + 2 * hardware.wire(sent, ranks, stride, directly=True))
    return seconds
