"""The settings of a step on a mesh: how many ranks of each kind divide it, and what is in FP8."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from octavo.cost.mesh.shapes import BF16, CODE
from octavo.cost.rates import PlanError

RANKS = ("fsdp", "replicate", "tensor", "pipeline", "context", "expert")


@dataclass(frozen=True)
class MeshLayout:
    """A step's division among GPUs."""

    gpus: int
    sequences: int  # of a step
    sequence_length: int = 8192  # tokens of one sequence
    tensor: int = 1  # ranks of each kind of parallelism; of this kind with sequence parallelism
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # among the ranks of data parallelism
    chunks: int = 1  # that the layers of a stage come in (interleaved 1F1B)
    recomputed: float = 0.0  # the share of layers whose forward runs again in backward
    replicate: int = 1  # groups of ranks of data parallelism that each hold all weights (HSDP, DDP)
    micro_batch_size: int = 1  # sequences of a micro-batch

    @property
    def reshards(self) -> bool:
        """Whether FSDP2 frees weights after each use, gathers them twice a micro-batch, and reduces gradients in each.

        A pipeline does so once a step: a stage keeps its weights, and masters and moments are sharded (ZeRO-1, or FSDP2
        with reshard_after_forward=False).
        """
        return self.pipeline == 1

    @property
    def data_ranks(self) -> int:
        """Ranks of data parallelism."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.sequences // (self.data_ranks * self.micro_batch_size)

    @property
    def shard_ranks(self) -> int:
        """Ranks that the weights of a stage are sharded over."""
        return self.data_ranks * self.context // self.replicate

    @property
    def ranks(self) -> dict[str, int]:
        """{kind of RANKS: number of ranks}."""
        return {"fsdp": self.shard_ranks // self.context} | {kind: getattr(self, kind) for kind in RANKS[1:]}

    def in_micro_batches(self, count: int | None) -> MeshLayout:
        """Return the layout with so many micro-batches, PlanError if sequences don't divide by them; None: as it is."""
        if count is None:
            return self
        layout = replace(self, micro_batch_size=max(1, self.micro_batches * self.micro_batch_size // max(1, count)))
        if layout.micro_batches != count:
            rank_sequences = self.sequences // self.data_ranks
            raise PlanError(f"--micro-batches {count} does not divide the {rank_sequences} sequences of a rank")
        return layout

    def __str__(self) -> str:
        return ",".join(f"{kind}={ranks}" for kind, ranks in self.ranks.items() if ranks > 1) or "fsdp=1"


def mesh_of(text: str, gpus: int) -> dict[str, int]:
    """Return ranks by kind, from a text such as "fsdp=8,tensor=8"."""
    ranks_by_kind: dict[str, int] = {}
    for part in text.split(","):
        kind, _, ranks = (word.strip() for word in part.partition("="))
        if kind not in RANKS or not ranks.isdecimal() or int(ranks) < 1:
            raise PlanError(f"--mesh {text}: {part!r} is not KIND=RANKS; kinds are {', '.join(RANKS)}")
        if kind in ranks_by_kind:
            raise PlanError(f"--mesh {text}: {kind} is named twice")
        ranks_by_kind[kind] = int(ranks)
    ranks_by_kind = dict.fromkeys(RANKS, 1) | ranks_by_kind
    product = math.prod(ranks for kind, ranks in ranks_by_kind.items() if kind != "expert")
    if product != gpus:
        others = product // ranks_by_kind["fsdp"]
        remedy = f"fsdp={gpus // others} or " if gpus % others == 0 else ""
        raise PlanError(
            f"--mesh {text} has {product} ranks, --gpus says {gpus}: {remedy}--gpus {product} would do; expert does "
            "not count, as experts are divided among ranks of fsdp and tensor"
        )
    return ranks_by_kind


@dataclass(frozen=True)
class Precision:
    """The products and messages that are in FP8; each is octavo's way unless said otherwise.

    ``reduction``: gradients are reduce-scattered in "bf16", or sent in FP8: by "one all-to-all" of all ranks, or "by
    server", in one inside each, then one between servers. In FP8 they are pairs in blocks of 128
    (``octavo.distributed.Fp8Reduction``), and the time of casts and sums is left out. ``pairs``: inputs and gradients
    that tensor and sequence parallelism gather, and tokens and gradients that expert parallelism dispatches, are codes,
    whose scale ranks share first. Gathered tensors are kept for backward; sums over ranks stay in bf16.
    ``as_megatron``: Megatron's and DeepSeek's way: forward keeps this rank's part of an input, which is gathered again
    in backward; a token is cast and sent over the network once for all its experts of a server.
    """

    name: str
    recipe: str = "dynamic"  # of the products, by its name in octavo.recipes; "bf16": none
    gathers: bool = False  # FSDP2 gathers weights in FP8, else in bf16
    reduction: Literal["bf16", "one all-to-all", "by server"] = "bf16"
    pairs: bool = False
    as_megatron: bool = False
    state: str = "float32"  # "float32": bf16 weights, float32 masters and moments; "FP8": codes, see rank.STATE_BYTES
    region_bytes: float = BF16  # of each element of the input that a recomputed layer keeps
    algorithm: str = "adamw"  # "muon": of the blocks' matrices

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element of an input or a gradient that is gathered or dispatched."""
        return CODE if self.pairs else BF16
