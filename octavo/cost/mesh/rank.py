"""A rank of a mesh and what it holds: its part of the model and of a micro-batch's tokens, and the bytes of its memory.

``Rank`` is a transformer's Shapes, divided by a MeshLayout among the GPUs of given servers; it refuses a division that
leaves a remainder.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.settings import MeshLayout, Precision
from octavo.cost.mesh.shapes import BF16, CODE, FLOAT, Shapes, Weight
from octavo.cost.parts import LOSS
from octavo.cost.rates import IN_BF16, PlanError
from octavo.granularity import BLOCK

PAIR = CODE + FLOAT / BLOCK  # bytes of a code and its share of a block's scale


class StateBytes(NamedTuple):
    """Bytes an element of a weight, of the master beside it, and of Adam's two moments: octavo.optim.AdamW's."""

    weight: float
    master: float
    moments: float


STATE_BYTES = {"float32": StateBytes(BF16, FLOAT, 2 * FLOAT), "FP8": StateBytes(PAIR, 1, 2 * PAIR)}


class ShardGroup(NamedTuple):
    """Parameters that FSDP2 shards over the same ranks."""

    shapes: Shapes  # of this rank before they are sharded
    ranks: int
    stride: int  # GPUs from one of these ranks to the next


@dataclass(frozen=True)
class Rank:
    """One rank of a mesh, all of which hold and compute as much: what it has of a model and of a micro-batch."""

    model_shapes: Shapes
    layout: MeshLayout
    precision: Precision
    hardware: Hardware

    def __post_init__(self) -> None:
        """Raise PlanError for a layout by which the model does not divide, with one that does."""
        faults = itertools.chain(self._undivided_features_and_experts(), self._undivided_ranks())
        if (fault := next(faults, None)) is not None:
            raise PlanError(fault)

    def _undivided_ranks(self) -> Iterator[str]:
        """Yield a line for each kind of ranks by which layers, GPUs, sequences or experts do not divide."""
        layout = self.layout
        if self.precision.algorithm == "muon" and layout.tensor > 1:
            yield f"tensor={layout.tensor}: Muon takes whole columns, which these ranks divide: tensor=1 would do"
        if layout.pipeline > self.model_shapes.layers:
            yield f"pipeline={layout.pipeline}: there are {self.model_shapes.layers} layers, and each stage needs one"
        if layout.gpus % (layout.tensor * layout.pipeline * layout.context) or layout.data_ranks % layout.replicate:
            yield f"{layout.gpus} GPUs do not divide by the ranks of {layout.ranks}: no fsdp would make it so"
        at_once = layout.data_ranks * layout.micro_batch_size
        if layout.sequences % at_once:
            yield (
                f"the step's {layout.sequences} sequences do not divide by {layout.data_ranks} ranks of data "
                f"parallelism and {layout.micro_batch_size} a micro-batch: "
                f"{at_once * math.ceil(layout.sequences / at_once)} sequences would"
            )
        if layout.shard_ranks * layout.tensor % layout.expert:
            most = math.gcd(layout.shard_ranks * layout.tensor, layout.expert)
            yield f"expert={layout.expert}: experts divide among ranks of fsdp and tensor: expert={most} would do"

    def _undivided_features_and_experts(self) -> Iterator[str]:
        """Yield a line if tensor, and if expert parallelism would split a head, a feature or an expert."""
        block = self.model_shapes.block
        features = [w.cols if w.split == "in" else w.rows for w in block if w.split in ("in", "out")]
        heads_and_features = [*self.model_shapes.heads, *features] if features else []
        experts = [w.held for w in block if w.split == "experts"]
        for kind, words, counts in ("tensor", "heads and features", heads_and_features), ("expert", "experts", experts):
            ranks = getattr(self.layout, kind)
            common = math.gcd(*counts) or 1
            if common % ranks:
                divisors = ", ".join(str(each) for each in range(1, min(common, 1024) + 1) if common % each == 0)
                sizes = ", ".join(map(str, sorted(set(counts)))) or "none known"
                yield f"{kind}={ranks} does not divide the model's {words} ({sizes}): {kind} may be {divisors}"

    @functools.cached_property
    def rank_shapes(self) -> Shapes:
        """The rank's shapes before FSDP2 shards them."""
        return self.model_shapes.divided(self.layout.tensor, self.layout.pipeline, self.layout.expert)

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes an element of what the optimizer updates."""
        return STATE_BYTES[self.precision.state]

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank of context parallelism."""
        return self.layout.micro_batch_size * self.layout.sequence_length / self.layout.context

    @functools.cached_property
    def shards(self) -> list[ShardGroup]:
        """The groups of parameters by the ranks that they are sharded over: all, or experts apart from the others.

        Experts are sharded over the ranks that hold the same ones, as far apart as a server has ranks of experts.
        """
        layout, shapes = self.layout, self.rank_shapes
        if layout.expert == 1:
            return [ShardGroup(shapes, layout.shard_ranks, layout.tensor)]
        dense = tuple(w for w in shapes.block if w.split != "experts")
        experts_only = replace(shapes, block=tuple(w for w in shapes.block if w.split == "experts"), root=(Weight(0),))
        ranks = layout.shard_ranks * layout.tensor // layout.expert
        return [
            ShardGroup(replace(shapes, block=dense), layout.shard_ranks, layout.tensor),
            ShardGroup(experts_only, ranks, min(layout.expert, self.hardware.server)),
        ]

    @functools.cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of a GPU by kind.

        The loss has what one device's has: three tensors of the logits' size in float32.
        """
        logits = LOSS * self.tokens * self.model_shapes.head.rows / self.layout.tensor
        return {**self._weights_and_state(), "activations": self._activations(), "logits": logits}

    @property
    def bytes_needed(self) -> float:
        """Bytes of a GPU, of all kinds."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the GPU has this memory."""
        return self.bytes_needed <= (self.hardware.memory or math.inf)

    def moments(self, part: Shapes) -> float:
        """Return bytes of moments a parameter of a part: AdamW keeps two, and Muon one of a block's matrices."""
        matrices = part.layers * sum(w.elements for w in part.block if w.cols > 1)
        muons_share = matrices / part.parameters * (self.precision.algorithm == "muon")
        return self.state_bytes.moments * (1 - muons_share / 2)

    def _weights_and_state(self) -> Counter[str]:
        """Return bytes of weights, masters, moments, gradients (float32), and what FSDP2 has gathered at a time.

        The latter are two blocks' weights and gradients.
        """
        layout, state_bytes = self.layout, self.state_bytes
        bytes_by_kind: Counter[Any] = Counter()
        for part, ranks, _ in self.shards:
            shard = part.parameters / ranks
            resident = shard if layout.reshards else part.parameters
            largest = max(sum(w.elements for w in weights) for weights in (part.block, part.root))
            sizes = {"weights": state_bytes.weight * resident, "masters": state_bytes.master * shard}
            sizes |= {"moments": self.moments(part) * shard, "gradients": FLOAT * resident}
            bytes_by_kind.update(sizes | {"gathered": 4 * BF16 * largest * layout.reshards})
        return bytes_by_kind

    def _activations(self) -> float:
        """Return bytes that forward saves for backward.

        A pipeline keeps them for as many micro-batches as interleaved 1F1B has on their way. A layer that is recomputed
        keeps its input, and one such layer at a time has all.
        """
        layout, recomputed = self.layout, self.layout.recomputed
        input_bytes = self.precision.region_bytes * self.tokens * self.model_shapes.width / layout.tensor
        saved = self._saved_by_layer()
        under_way = layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.chunks))
        layers = self.rank_shapes.layers * min(under_way, layout.micro_batches)
        return layers * ((1 - recomputed) * saved + recomputed * input_bytes) + math.ceil(recomputed) * saved

    def _saved_by_layer(self) -> float:
        """Return bytes that a layer saves for a micro-batch: ``Shapes.saved_bytes``, or operands and what follows."""
        layout, precision = self.layout, self.precision
        operand = BF16 if precision.recipe == IN_BF16 else CODE
        operands, from_other_ranks = 0.0, 0.0  # the latter: of inputs that are kept as gathered
        for w in self.model_shapes.block:
            is_gathered = w.split == "out" and not precision.as_megatron
            rows = BF16 * w.rows if w.split != "in" else 0
            operands += w.share * w.used * w.converted * (operand * w.cols + rows)
            gathered = min(operand, precision.operand_bytes) * w.share * w.used * w.converted * w.cols
            from_other_ranks += gathered * (layout.tensor - 1) * is_gathered
        saved = operands if self.model_shapes.saved_bytes is None else self.model_shapes.saved_bytes
        return self.tokens / layout.tensor * (saved + from_other_ranks)
