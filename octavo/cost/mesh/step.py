"""A step on a mesh: how long a rank computes, what it waits for, and what of that hides behind compute.

Backward takes twice what forward takes. Products take the time of octavo.cost, those of experts together that of one of
all their rows by one expert's matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from octavo import recipes
from octavo.cost.estimate import orthogonalising_seconds
from octavo.cost.mesh import messages
from octavo.cost.mesh.messages import Wait
from octavo.cost.mesh.rank import Rank
from octavo.cost.mesh.shapes import BF16, FLOAT, Weight
from octavo.cost.rates import IN_BF16
from octavo.cost.work import ATTENTION_FLOP, LinearWork
from octavo.scaling.recipe import Recipe


@dataclass(frozen=True)
class Step:
    """Seconds of a step on each GPU: of compute by kind, and of what nothing hides; TFLOP/s that the model needs."""

    seconds_by_kind: Mapping[str, float]
    waits: Mapping[str, Wait]
    bubble: float
    optimizer: float
    seconds: float
    tflops: float


class RankStep(Rank):
    """A rank's compute and waits for a micro-batch, and its step; all stages of a pipeline are equally long."""

    @functools.cached_property
    def micro_batch_seconds(self) -> dict[str, float]:
        """Seconds of a micro-batch's forward and backward by kind; the head's products are in bf16."""
        layout, rates, model, hardware = self.layout, self.hardware.rates, self.model_shapes, self.hardware
        layers = [layer_seconds(self, weight) for weight in self.rank_shapes.block if weight.converted]
        moved = 3 * BF16 * model.elementwise_elements * self.tokens / layout.tensor  # backward as twice forward
        other = moved / rates.copy + model.launches * rates.launch
        flop = 2.0 * self.tokens * layout.sequence_length * model.attention_features / layout.tensor
        backward = ATTENTION_FLOP[1] / ATTENTION_FLOP[0] * flop
        attention = flop / hardware.attention_forward + backward / hardware.attention_backward
        # forward, a third of forward and backward, runs again in recomputed layers
        passes = self.rank_shapes.layers * (1 + layout.recomputed / 3)
        logits = self.tokens * model.head.rows / (layout.tensor * layout.pipeline)
        head = 3 * rates.product_seconds(IN_BF16, 2 * logits * model.head.cols)
        return {
            "products": passes * sum(products for products, _ in layers) + head,
            "casts": passes * sum(casts for _, casts in layers),
            "attention": passes * attention,
            "other": passes * other + model.bytes_a_logit * logits / rates.copy,
        }

    @property
    def compute_seconds(self) -> float:
        """Seconds of forward, a third of them, and backward."""
        return sum(self.micro_batch_seconds.values())

    @functools.cached_property
    def update_seconds(self) -> float:
        """Seconds of the optimizer's update of this rank's shards.

        It reads and writes state, reads gradients and writes bf16 weights. Muon's owners have equal shares of the
        products; matrices but those of experts travel to them and back in bf16.
        """
        seconds = 0.0
        hardware = self.hardware
        for part, ranks, stride in self.shards:
            moved = 2 * (self.state_bytes.master + self.moments(part)) + FLOAT + BF16
            seconds += moved * part.parameters / ranks / hardware.rates.copy
            for w in part.block if self.precision.algorithm == "muon" else ():
                if w.cols > 1:
                    products = orthogonalising_seconds((w.share * w.held, w.rows, w.cols), hardware.rates)
                    sent = BF16 * w.elements / ranks * (w.split != "experts")
                    seconds += part.layers * (products / ranks + 2 * hardware.wire(sent, ranks, stride, directly=True))
        return seconds

    @functools.cached_property
    def step(self) -> Step:
        """The Step of all micro-batches and of the optimizer; a pipeline's stages wait for its first and last ones."""
        layout, count = self.layout, self.layout.micro_batches
        fsdp = messages.fsdp(self, forward=self.compute_seconds / 3, backward=2 * self.compute_seconds / 3)
        tensor, expert = messages.tensor(self), messages.expert(self)
        waits = {"fsdp": fsdp.times(count if layout.reshards else 1)}
        waits |= {"tensor": tensor.times(count), "expert": expert.times(count)}
        seconds_by_kind = {kind: count * seconds for kind, seconds in self.micro_batch_seconds.items()}
        bubble = (layout.pipeline - 1) / layout.chunks * (self.compute_seconds + tensor.seconds + expert.seconds)
        total = (
            sum(seconds_by_kind.values()) + sum(wait.exposed for wait in waits.values()) + bubble + self.update_seconds
        )
        flop = layout.sequences * layout.sequence_length * self.model_shapes.flop(layout.sequence_length) / layout.gpus
        return Step(seconds_by_kind, waits, bubble, self.update_seconds, total, flop / total / 1e12)


def layer_seconds(rank: Rank, weight: Weight) -> tuple[float, float]:
    """Return seconds of a converted weight's products and casts, forward and backward."""
    rates, name = rank.hardware.rates, rank.precision.recipe
    recipe: Recipe = getattr(recipes, "high_precision" if name == IN_BF16 else name)()
    # under tensor parallelism a split layer reads all tokens, another this rank's part of them
    rows = rank.tokens * weight.used / (1 if weight.split in ("in", "out") else rank.layout.tensor)
    work = LinearWork("", round(rows), weight.cols, weight.rows, True, True)
    casts = work.cast_seconds(recipe, rates, cast_elements(rank, weight, work.tokens))
    return weight.share * sum(work.product_seconds(recipe, rates)), weight.share * sum(casts.values())


def cast_elements(rank: Rank, weight: Weight, rows: int) -> tuple[float, float, float]:
    """Return elements of a layer's input (of so many rows), weight and output's gradient that this rank casts.

    A tensor that is sent as pairs is cast before it is sent: the input of a first layer, the gradient of a second one's
    output. Each rank casts its part of a tensor that tensor parallelism gathers; by ``Precision.as_megatron`` a token
    is cast once for all its experts. Other tensors are cast as a whole. A weight is cast where it is sharded if it is
    gathered in FP8, else as a whole; once a step if it stays gathered.
    """
    layout, precision = rank.layout, rank.precision
    elements = weight.elements / weight.share / (layout.shard_ranks if precision.gathers else 1)
    elements /= 1 if layout.reshards else layout.micro_batches
    divisor: float = 1
    if precision.pairs and weight.split in ("in", "out"):
        divisor = layout.tensor
    elif precision.pairs and precision.as_megatron and weight.split == "experts":
        divisor = weight.used
    is_first = weight.split == "out" or (weight.split == "experts" and weight.cols == rank.model_shapes.width)
    input_divisor, gradient_divisor = (divisor, 1) if is_first else (1, divisor)
    return rows * weight.cols / input_divisor, elements, rows * weight.rows / gradient_divisor
