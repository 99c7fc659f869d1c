"""A transformer as a mesh divides it: ``Shapes`` are a block's matrices, those of the root, and traffic a token.

``shapes_of`` reads them from a model and from the work of one step, without memory; ``Shapes.divided`` gives a rank's
part under tensor, pipeline and expert parallelism.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from octavo.cost.rates import PlanError
from octavo.cost.work import ATTENTION_FLOP, Blocks, Work

BF16, CODE, FLOAT = 2, 1, 4  # bytes
# how octavo.train.GPT's matrices split; transformers' configurations say it of theirs
GPT_SPLITS = {"attention.qkv": "colwise", "attention.out": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}


@dataclass(frozen=True)
class Weight:
    """A parameter of a block, or of the rest of a model: a matrix, or a vector of one column."""

    rows: int
    cols: int = 1
    converted: bool = False
    split: Literal["in", "out", "experts", None] = None  # the features that tensor parallelism divides; whole experts
    held: int = 1  # how many of these matrices there are
    used: float = 1  # by how many of them a token is multiplied
    share: float = 1  # the share of blocks that have it

    @property
    def elements(self) -> float:
        """Elements of all these matrices."""
        return self.share * self.held * self.rows * self.cols


@dataclass(frozen=True)
class Shapes:
    """A transformer whose blocks are sharded one by one, the rest (embedding, last norm, head) with the root.

    ``elementwise_elements``: those that a block's forward reads or writes for a token between its products (norms,
    residuals, rotation, activation). ``saved_bytes``: of what a block saves for a token; None: its products' operands
    as they read them, and what attention and the activation read, in bf16.
    """

    name: str
    width: int
    layers: int
    block: tuple[Weight, ...]
    root: tuple[Weight, ...]
    attention_features: float  # features of a head's queries and values, the mean of both, times heads
    elementwise_elements: float
    bytes_a_logit: float = 4 * BF16  # that a step moves
    launches: float = 0  # kernels of a block between products, if the device waits for their launches
    saved_bytes: float | None = None
    heads: tuple[int, ...] = ()  # numbers of heads of queries and of keys; tensor parallelism divides each

    @property
    def parameters(self) -> float:
        """Number of the model's parameters."""
        return self.layers * sum(w.elements for w in self.block) + sum(w.elements for w in self.root)

    @property
    def head(self) -> Weight:
        """The matrix that computes logits."""
        return self.root[-1]

    def flop(self, sequence: int) -> float:
        """Return FLOP of a token: 6 a parameter that multiplies it, and causal attention, without recomputation."""
        converted = self.layers * sum(w.share * w.used * w.rows * w.cols for w in self.block if w.converted)
        return 6.0 * (converted + self.head.elements + sequence * self.attention_features * self.layers)

    def divided(self, tensor: int, pipeline: int, expert: int) -> Shapes:
        """Return a rank's shapes before FSDP2 shards them; stages of a pipeline have equal parts of embedding, head."""

        def part(weight: Weight) -> Weight:
            if weight.split == "experts":
                return replace(weight, held=weight.held // expert)
            rows, cols = (tensor if weight.split == side else 1 for side in ("out", "in"))
            return replace(weight, rows=weight.rows // rows, cols=weight.cols // cols)

        root = tuple(replace(w, rows=math.ceil(w.rows / (tensor * pipeline))) if w.cols > 1 else w for w in self.root)
        return replace(self, layers=math.ceil(self.layers / pipeline), block=tuple(map(part, self.block)), root=root)


def shapes_of(model: nn.Module, work: Work, context: int, saved: Mapping[str, int] | None) -> Shapes:
    """Return a model's Shapes; layers that read one input are one matrix, and all layers in blocks are converted.

    ``work`` is that of a step of one sequence of ``context`` tokens; ``saved``: the bytes by kind that its forward
    saves in eager, where each operation is a launch; None: it is compiled.
    """
    if work.blocks is None:
        raise PlanError("--gpus: the model has no list of blocks, by which it could be divided")
    name, count = work.blocks.name, work.blocks.size
    block = _matrices(model, work, work.blocks, context)
    parameters_of_blocks = sum(p.numel() for p in model.get_submodule(name).parameters())
    vectors = parameters_of_blocks / count - sum(weight.elements for weight in block)
    if not (outside := [linear for linear in work.linears if not linear.name.startswith(f"{name}.")]):
        raise PlanError("--gpus: the model has no linear layer after its blocks, whose output would be logits")
    head = max(outside, key=lambda linear: linear.sizes.weight)
    other_parameters = sum(p.numel() for p in model.parameters()) - parameters_of_blocks - head.sizes.weight
    embedding = Weight(max(0, other_parameters // head.in_features), head.in_features)
    saved_bytes = sum(size for kind, size in (saved or {}).items() if kind not in ("logits and loss", "weights"))
    traffic = work.traffic, work.blocks.traffic
    moved, moved_in_blocks = (each.compiled if saved is None else each.bytes for each in traffic)
    return Shapes(
        name=type(model).__name__,
        width=head.in_features,
        layers=count,
        block=(*block, Weight(max(0, round(vectors)))),
        root=(embedding, Weight(head.out_features, head.in_features)),
        attention_features=work.other_flop / (sum(ATTENTION_FLOP) * context**2 * count),
        elementwise_elements=moved_in_blocks / (6 * context * count),  # of bf16, and backward as twice forward
        bytes_a_logit=(moved - moved_in_blocks) / (context * head.out_features),
        launches=0 if saved is None else work.blocks.traffic.ops / count,
        saved_bytes=saved_bytes / context / count if saved_bytes else None,
        heads=_heads(model),
    )


def _matrices(model: nn.Module, work: Work, blocks: Blocks, context: int) -> list[Weight]:
    """Return the matrices of an average block: layers side by side that read as many features are one matrix."""
    tensor_plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or GPT_SPLITS
    style_of = {key.split("*.")[-1]: style for key, style in tensor_plan.items()}
    out_features: Counter[Any] = Counter()  # by block, parent module and what such layers have in common
    for linear in work.linears:
        if linear.name.startswith(f"{blocks.name}."):
            index, suffix = linear.name.removeprefix(f"{blocks.name}.").split(".", 1)
            style = style_of.get(suffix, style_of.get(suffix.removesuffix(".linear")))
            split = "experts" if linear.groups > 1 else {"colwise": "out", "rowwise": "in"}.get(str(style))
            common = (linear.in_features, split, linear.groups, linear.tokens / context)
            out_features[index, suffix.rpartition(".")[0], *common] += linear.out_features
    times = Counter((features, *key[2:]) for key, features in out_features.items())
    return [
        Weight(rows, cols, True, split, held, used, count / blocks.size)
        for (rows, cols, split, held, used), count in times.items()
    ]


def _heads(model: nn.Module) -> tuple[int, ...]:
    """Return the numbers of heads of queries and of keys, as the model's configuration says."""
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    names = ("num_attention_heads", "num_key_value_heads", "heads")  # the last: octavo.train.GPT's
    return tuple(number for name in names if (number := getattr(text, name, None)))
