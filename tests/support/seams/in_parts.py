"""Situations on ranks that share each batch: tensor, expert and pipeline parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel

import octavo
from octavo import distributed as ours
from tests.support.seams.features import MixturePart
from tests.support.seams.made import TOKENS, Made
from tests.support.seams.on_ranks import (
    CUT,
    FOUR,
    FUSED,
    MULTIPLIED,
    NOT_KEPT,
    OF_FSDP2,
    REDUCTION,
    SHARED,
    TWO,
    WITH_NORM,
    shard,
)
from tests.support.seams.situations import NO_MATRICES, Documented, Refused, Sound, situation
from tests.support.seams.twins import casts_of

PARTS, PIPELINES = "Parts of a layer on each rank", "Pipelines"

ORDER = Sound(15, "sums over ranks are added in another order")
NONE_KEPT = Refused(ValueError, "stored in FP8", "what ranks share, and experts, are cast at each forward")
BY_COLUMNS = Refused(ValueError, "share by rows", "Muon takes whole columns of a matrix")
NOT_AVERAGED = Documented("communication.md#gradients-in-fp8", "ranks share each batch, and average no gradients")


def by_tokens(made: Made, mesh: Any) -> Callable[[Tensor], Tensor]:
    """The model of all ranks, which have some tokens each, as a function of all tokens."""

    def call(x: Tensor) -> Tensor:
        own = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        return DTensor.from_local(made.model(own), mesh, [Shard(0)]).full_tensor()

    return call


def _split(made: Made, mesh: Any, styles: Any, tokens: Any) -> None:
    """The first layer by rows, the second by columns; between parts ``tokens``. Experts by themselves."""
    plan: dict[str, Any] = {}
    for name, module in made.model.named_modules():
        if isinstance(module, nn.Linear | octavo.nn.Linear):
            chains = made.feature.name != "LoRA over FP8"
            first, second = name.endswith(("fc1", "gate_proj", "up_proj")), name.endswith(("fc2", "down_proj"))
            if first or (name.startswith("0.") and not second):
                after = {} if chains else {"output_layouts": tokens}
                plan[name] = styles.ColwiseParallel(input_layouts=tokens, **after)
            else:
                before = {} if chains else {"input_layouts": tokens}
                plan[name] = styles.RowwiseParallel(output_layouts=tokens, **before)
        elif name.endswith("norm") and tokens != Replicate():
            plan[name] = styles.SequenceParallel(sequence_dim=0)
    torch_parallel.parallelize_module(made.model, mesh, plan)
    if made.feature.name == "experts":
        _where_tokens_begin(made, mesh)
        ours.expert_parallel(made.model, mesh, average=False)


def _tensor_parallel(made: Made, styles: Any = ours, tokens: Any = Shard(0), shards: bool = False) -> None:  # noqa: B008
    """Between the layers tokens are divided, or on all ranks; ``shards``: on a mesh of two dimensions, under FSDP2."""
    mesh, replicas = (made.mesh["shard"], made.mesh["replicate"]) if shards else (made.mesh, None)
    made.divide(replicas)
    if made.is_library:
        _split(made, mesh, styles, tokens)
        if shards:
            shard(made, replicas)
        if tokens == Shard(0):
            made.call = by_tokens(made, mesh)
    made.train()


BY_FEATURES = {"FP8 reduction": NOT_AVERAGED, "KeptWeights": NONE_KEPT, WITH_NORM: FUSED, "Muon": BY_COLUMNS}
DIVIDED = Documented("mixture-of-experts.md#on-several-ranks", "experts are divided by expert_parallel")
ON_TWO_DIMENSIONS = {
    "FP8 reduction": REDUCTION,
    "KeptWeights": NOT_KEPT,
    WITH_NORM: FUSED,
    ("FP8 weights in blocks", "Muon"): CUT,
    SHARED: MULTIPLIED,
}
for name, ranks, exceptions, options in (
    (
        "tensor parallel, torch's styles",
        TWO,
        BY_FEATURES | {"experts": DIVIDED},
        {"styles": torch_parallel, "tokens": Replicate()},
    ),
    ("tensor parallel, octavo's styles", TWO, BY_FEATURES, {}),
    ("tensor parallel and FSDP2", FOUR, ON_TWO_DIMENSIONS, {"shards": True}),
):
    situation(name, PARTS, ranks, ORDER, exceptions)(functools.partial(_tensor_parallel, **options))


def _where_tokens_begin(made: Made, mesh: Any) -> None:
    for part in made.model:
        part.first_token = mesh.get_local_rank() * TOKENS // mesh.size()


TWICE = Sound(15, "rows that were sent are scaled a second time, for grad_weight: exact=True sends them again")


class _Times(torch.autograd.Function):
    """The identity, with a factor in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


@situation(
    "expert parallel",
    PARTS,
    TWO,
    exceptions={
        ("rowwise", "blockwise", "mx", "FP8 weights in blocks", "schedule"): TWICE,
        "FP8 reduction": NOT_AVERAGED,
        "KeptWeights": NONE_KEPT,
        "Muon": NO_MATRICES,
    },
)
def expert_parallel(made: Made) -> None:
    """Experts in the place of each feature's layers; each rank has a loss of its own tokens."""
    made.divide(None)
    torch.manual_seed(0)
    parts = [MixturePart(made.feature.recipe) for _ in range(2)]
    made.take(made.converted(nn.Sequential(*parts).to(made.feature.dtype)))
    if made.is_library:
        _where_tokens_begin(made, made.mesh)
        ours.expert_parallel(made.model, made.mesh)
        all_tokens = by_tokens(made, made.mesh)
        made.call = lambda x: _Times.apply(all_tokens(_Times.apply(x, 0.5)), 2.0)
    made.train()


# --- pipelines --------------------------------------------------------------------------------------------------------

MICRO = 4


def _piped(made: Made, of_stages: Callable[..., Any], places: Sequence[int], shards: bool = False) -> None:
    """Train a stage a part, each on the rank that ``places`` names, no shapes given; a twin by the same schedule.

    ``shards``: each stage is under FSDP2 on the mesh's first dimension, whose ranks have batches of their own.
    """
    pipe = made.mesh["shard"] if shards else made.mesh
    made.divide(made.mesh["replicate"] if shards else None)
    parts = nn.ModuleList(made.model)
    if len(places) > len(parts):
        torch.manual_seed(0)
        parts = made.converted(nn.ModuleList([*made.feature.plain(), *made.feature.plain()]).to(made.feature.dtype))
    own = [number for number, place in enumerate(places) if place == pipe.get_local_rank()]
    made.take(nn.ModuleDict({str(number): parts[number] for number in own}))
    for part in made.model.values() if shards and made.is_library else ():
        fully_shard(part, mesh=made.mesh["replicate"])
    group, cpu = pipe.get_group(), torch.device("cpu")
    stages = []
    for number, part in zip(own, made.model.values(), strict=True):
        entering = made.data(0).requires_grad_(number > 0)
        known = {} if made.is_library else {"input_args": entering, "output_args": made.data(0).requires_grad_()}
        stages.append(PipelineStage(part, number, len(parts), cpu, group=group, **known))
    schedule = of_stages(
        stages, n_microbatches=MICRO, loss_fn=lambda y, target: made.loss(y) / MICRO, scale_grads=False
    )
    made.feature.wrapped(made)
    made.begin()
    for step in range(2):
        for casts in casts_of(made.model) if shards and made.role == "twin" else ():
            casts.gathered = []  # a stage stays gathered from a step's first micro-batch to its last
        batch = torch.cat([made.data(step, number, made.batch) for number in range(MICRO)])
        inputs = [batch] if pipe.get_local_rank() == places[0] else []
        target = {"target": batch} if pipe.get_local_rank() == places[-1] else {}
        with made.accumulating(more=True):
            y = schedule.step(*inputs, **target)
        y = torch.empty_like(batch) if y is None else y.detach().clone()
        torch.distributed.broadcast(y, group=group, group_src=places[-1])
        made.note(f"output {step} of rank {made.batch}", y)
        made.average()
        made.update()


def _single(stages: list[Any], **options: Any) -> Any:
    return Schedule1F1B(stages[0], **options)


for name, of_stages, places in (  # a stage a rank, or two
    ("pipeline, 1F1B", _single, (0, 1)),
    ("pipeline, zero-bubble", ScheduleInterleavedZeroBubble, (0, 1)),
    ("pipeline, zero-bubble V", ScheduleZBVZeroBubble, (0, 1, 1, 0)),
    ("pipeline, 1F1B, stages under FSDP2", _single, (0, 1)),
    ("pipeline, zero-bubble V, stages under FSDP2", ScheduleZBVZeroBubble, (0, 1, 1, 0)),
):
    shards = "FSDP2" in name
    ranks, exceptions = (FOUR, OF_FSDP2) if shards else (TWO, {"FP8 reduction": NOT_AVERAGED})
    how = {"of_stages": of_stages, "places": places, "shards": shards}
    situation(name, PIPELINES, ranks, exceptions=exceptions)(functools.partial(_piped, **how))
