"""A rank of a mesh and what it holds: its part of the model and of a micro-batch's tokens, and the bytes of its memory.

``MeshLayout`` says how a step is divided among GPUs, ``Precision`` what is in FP8; ``Rank`` is a transformer's Shapes
divided so on given servers, and refuses a division that leaves a remainder.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from octavo.cost.rates import HIGH_PRECISION, PlanError
from octavo.cost.servers import Hardware
from octavo.cost.shapes import BF16, CODE, FLOAT, Shapes, Weight

RANKS = ("fsdp", "replicate", "tensor", "pipeline", "context", "expert")
PAIR = 1 + 4 / 128  # bytes of a code and its share of 128's scale
# bytes an element of a master beside its bf16 weight, and of Adam's two moments: octavo.optim.AdamW's
STATES = {"float32": (4, 8), "FP8": (1, 2 * PAIR)}


@dataclass(frozen=True)
class Precision:
    """The products and messages that are in FP8; each is octavo's way unless said otherwise.

    ``reduction``: at how many levels gradients are reduced as pairs in blocks of 128
    (``octavo.distributed.Fp8Reduction``): by an all-to-all of all ranks, or by one of a server's ranks and one of
    servers. The time of casts and sums is left out. 0: a reduce-scatter of bf16. ``pairs``: inputs and gradients that
    tensor and sequence parallelism gather, and tokens and gradients that expert parallelism dispatches, are codes,
    whose scale ranks share first. Gathered tensors are kept for backward; sums over ranks stay in bf16.
    ``elsewhere``: Megatron's and DeepSeek's way: forward keeps this rank's part of an input, which is gathered again in
    backward; a token is cast and sent over the network once for all its experts of a server.
    """

    name: str
    recipe: str = "dynamic"  # of the products, by its name in octavo.recipes; "bf16": none
    gathers: bool = False  # FSDP2 gathers weights in FP8, else in bf16
    reduction: int = 0
    pairs: bool = False
    elsewhere: bool = False
    state: str = "float32"  # weights, masters and moments: one of STATES
    regions: float = BF16  # bytes of an element that a recomputed layer keeps
    algorithm: str = "adamw"  # "muon": of the blocks' matrices

    @property
    def sent(self) -> int:
        """Bytes of an element of an input or a gradient that is gathered or dispatched."""
        return CODE if self.pairs else BF16


@dataclass(frozen=True)
class MeshLayout:
    """A step's division among GPUs."""

    gpus: int
    sequences: int  # of a step
    sequence: int = 8192  # tokens of one
    tensor: int = 1  # ranks of each kind of parallelism; of this kind with sequence parallelism
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # among the ranks of data parallelism
    chunks: int = 1  # that the layers of a stage come in (interleaved 1F1B)
    recomputed: float = 0.0  # the share of layers whose forward runs again in backward
    replicate: int = 1  # groups of ranks of data parallelism that each hold all weights (HSDP, DDP)
    batch: int = 1  # sequences of a micro-batch

    @property
    def resharded(self) -> bool:
        """Whether FSDP2 frees weights after each use, gathers them twice a micro-batch, and reduces gradients in each.

        A pipeline does so once a step: a stage keeps its weights, and masters and moments are sharded (ZeRO-1, or FSDP2
        with reshard_after_forward=False).
        """
        return self.pipeline == 1

    @property
    def data(self) -> int:
        """Ranks of data parallelism."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.sequences // (self.data * self.batch)

    @property
    def sharded(self) -> int:
        """Ranks that the weights of a stage are sharded over."""
        return self.data * self.context // self.replicate

    @property
    def ranks(self) -> dict[str, int]:
        """{kind of RANKS: number of ranks}."""
        kinds = {kind: getattr(self, kind) for kind in RANKS[1:]}
        return {"fsdp": self.sharded // self.context} | kinds

    def __str__(self) -> str:
        return ",".join(f"{kind}={ranks}" for kind, ranks in self.ranks.items() if ranks > 1) or "fsdp=1"


@dataclass(frozen=True)
class Rank:
    """One rank of a mesh, all of which hold and compute as much: what it has of a model and of a micro-batch."""

    whole: Shapes
    layout: MeshLayout
    precision: Precision
    hardware: Hardware

    def __post_init__(self) -> None:
        """Raise PlanError for a layout by which the model does not divide, with one that does."""
        self._require_whole_features_and_experts()
        layout = self.layout
        if self.precision.algorithm == "muon" and layout.tensor > 1:
            raise PlanError(
                f"tensor={layout.tensor}: Muon takes whole columns, which these ranks divide: tensor=1 would do"
            )
        if layout.pipeline > self.whole.layers:
            raise PlanError(
                f"pipeline={layout.pipeline}: there are {self.whole.layers} layers, and each stage needs one"
            )
        if layout.gpus % (layout.tensor * layout.pipeline * layout.context) or layout.data % layout.replicate:
            raise PlanError(
                f"{layout.gpus} GPUs do not divide by the ranks of {layout.ranks}: no fsdp would make it so"
            )
        at_once = layout.data * layout.batch
        if layout.sequences % at_once:
            raise PlanError(
                f"the step's {layout.sequences} sequences do not divide by {layout.data} ranks of data parallelism and "
                f"{layout.batch} a micro-batch: {at_once * math.ceil(layout.sequences / at_once)} sequences would"
            )
        if layout.sharded * layout.tensor % layout.expert:
            most = math.gcd(layout.sharded * layout.tensor, layout.expert)
            raise PlanError(
                f"expert={layout.expert}: experts divide among ranks of fsdp and tensor: expert={most} would do"
            )

    def _require_whole_features_and_experts(self) -> None:
        """Raise PlanError if tensor or expert parallelism would split a head, a feature or an expert."""
        block = self.whole.block
        features = [w.cols if w.split == "in" else w.rows for w in block if w.split in ("in", "out")]
        heads_and_features = [*self.whole.heads, *features] if features else []
        experts = [w.held for w in block if w.split == "experts"]
        for kind, words, counts in (
            ("tensor", "heads and features", heads_and_features), ("expert", "experts", experts)
        ):  # fmt: skip
            ranks, common = getattr(self.layout, kind), math.gcd(*counts) or 1
            if common % ranks:
                divisors = ", ".join(str(each) for each in range(1, min(common, 1024) + 1) if common % each == 0)
                sizes = ", ".join(map(str, sorted(set(counts)))) or "none known"
                raise PlanError(
                    f"{kind}={ranks} does not divide the model's {words} ({sizes}): {kind} may be {divisors}"
                )

    @functools.cached_property
    def shapes(self) -> Shapes:
        """The rank's shapes before FSDP2 shards them."""
        return self.whole.divided(self.layout.tensor, self.layout.pipeline, self.layout.expert)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank of context parallelism."""
        return self.layout.batch * self.layout.sequence / self.layout.context

    @functools.cached_property
    def shards(self) -> list[tuple[Shapes, int, int]]:
        """(shapes that the rank holds, number of ranks that they are sharded over, GPUs that these are apart).

        Experts are sharded over the ranks that hold the same ones, as far apart as a server has ranks of experts.
        """
        layout, shapes = self.layout, self.shapes
        if layout.expert == 1:
            return [(shapes, layout.sharded, layout.tensor)]
        dense, experts = (
            tuple(w for w in shapes.block if (w.split == "experts") == is_expert) for is_expert in (False, True)
        )
        experts_only = replace(shapes, block=experts, root=(Weight(0),))
        ranks = layout.sharded * layout.tensor // layout.expert
        return [
            (replace(shapes, block=dense), layout.sharded, layout.tensor),
            (experts_only, ranks, min(layout.expert, self.hardware.server)),
        ]

    @functools.cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of a GPU by kind.

        The loss has three tensors of the logits' size in float32: its log-softmax and two gradients.
        """
        logits = 3 * FLOAT * self.tokens * self.whole.root[-1].rows / self.layout.tensor
        return {**self._weights_and_state(), "activations": self._activations(), "logits": logits}

    @property
    def size(self) -> float:
        """Bytes of a GPU, of all kinds."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the GPU has this memory."""
        return self.size <= (self.hardware.memory or math.inf)

    def moments(self, part: Shapes) -> float:
        """Return bytes of moments a parameter of a part: AdamW keeps two, and Muon one of a block's matrices."""
        _, moments = STATES[self.precision.state]
        matrices = part.layers * sum(w.elements for w in part.block if w.cols > 1)
        return moments * (1 - matrices / part.parameters / 2 * (self.precision.algorithm == "muon"))

    def _weights_and_state(self) -> Counter[str]:
        """Return bytes of weights, masters, moments, gradients (float32), and what FSDP2 has gathered at a time.

        The latter are two blocks' weights and gradients.
        """
        layout, state = self.layout, self.precision.state
        weight, (master, _) = BF16 if state == "float32" else PAIR, STATES[state]
        bytes_by_kind: Counter[Any] = Counter()
        for part, ranks, _ in self.shards:
            shard = part.parameters / ranks
            resident = shard if layout.resharded else part.parameters
            largest = max(sum(w.elements for w in weights) for weights in (part.block, part.root))
            sizes = {"weights": weight * resident, "masters": master * shard, "moments": self.moments(part) * shard}
            sizes |= {"gradients": FLOAT * resident, "gathered": 4 * BF16 * largest * layout.resharded}
            bytes_by_kind.update(sizes)
        return bytes_by_kind

    def _activations(self) -> float:
        """Return bytes that forward saves for backward.

        A pipeline keeps them for as many micro-batches as interleaved 1F1B has on their way. A layer that is recomputed
        keeps its input, and one such layer at a time has all.
        """
        layout, width = self.layout, self.precision.regions * self.tokens * self.whole.width / self.layout.tensor
        saved, recomputed = self._saved_by_layer(), layout.recomputed
        under_way = layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.chunks))
        layers = self.shapes.layers * min(under_way, layout.micro_batches)
        return layers * ((1 - recomputed) * saved + recomputed * width) + math.ceil(recomputed) * saved

    def _saved_by_layer(self) -> float:
        """Return bytes that a layer saves for a micro-batch: ``Shapes.saved``, or operands and what follows them."""
        layout, precision = self.layout, self.precision
        operand = BF16 if precision.recipe == HIGH_PRECISION else CODE
        operands, of_other_ranks = 0.0, 0.0  # the latter: of inputs that are kept as gathered
        for w in self.whole.block:
            is_gathered = w.split == "out" and not precision.elsewhere
            rows = BF16 * w.rows if w.split != "in" else 0
            operands += w.share * w.used * w.converted * (operand * w.cols + rows)
            gathered = min(operand, precision.sent) * w.share * w.used * w.converted * w.cols
            of_other_ranks += gathered * (layout.tensor - 1) * is_gathered
        saved = operands if self.whole.saved is None else self.whole.saved
        return self.tokens / layout.tensor * (saved + of_other_ranks)
