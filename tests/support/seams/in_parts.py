"""Situations on ranks that share each batch: tensor, expert and pipeline parallelism."""

from __future__ import annotations

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
from tests.support.seams.on_ranks import CUT, FOUR, FUSED, NOT_KEPT, OF_FSDP2, REDUCTION, TWO, WITH_NORM, shard
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


@situation(
    "tensor parallel, torch's styles",
    PARTS,
    TWO,
    ORDER,
    {
        "FP8 reduction": NOT_AVERAGED,
        "KeptWeights": NONE_KEPT,
        WITH_NORM: FUSED,
        "Muon": BY_COLUMNS,
        "experts": Documented("mixture-of-experts.md#on-several-ranks", "experts are divided by expert_parallel"),
    },
)
def tensor_parallel_of_torch(made: Made) -> None:
    """Tokens are on all ranks."""
    made.divide(None)
    if made.is_library:
        _split(made, made.mesh, torch_parallel, Replicate())
    made.train()


@situation(
    "tensor parallel, octavo's styles",
    PARTS,
    TWO,
    ORDER,
    {"FP8 reduction": NOT_AVERAGED, "KeptWeights": NONE_KEPT, WITH_NORM: FUSED, "Muon": BY_COLUMNS},
)
def tensor_parallel(made: Made) -> None:
    """Tokens are divided between the layers."""
    made.divide(None)
    if made.is_library:
        _split(made, made.mesh, ours, Shard(0))
        made.call = by_tokens(made, made.mesh)
    made.train()


@situation(
    "tensor parallel and FSDP2",
    PARTS,
    FOUR,
    ORDER,
    {
        "FP8 reduction": REDUCTION,
        "KeptWeights": NOT_KEPT,
        WITH_NORM: FUSED,
        ("FP8 weights in blocks", "Muon"): CUT,
        ("shared inputs", "shared inputs, delayed"): Sound(8, "the same, and outputs of two layers are multiplied"),
    },
)
def two_dimensions(made: Made) -> None:
    """On a mesh of two dimensions."""
    made.divide(made.mesh["replicate"])
    if made.is_library:
        _split(made, made.mesh["shard"], ours, Shard(0))
        shard(made, made.mesh["replicate"])
        made.call = by_tokens(made, made.mesh["shard"])
    made.train()


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
Order = list[tuple[int, str, int]]  # of a rank: stage, kind of computation, micro-batch


def _piped(made: Made, of_stages: Callable[..., Any], places: Sequence[int], shards: bool = False) -> None:
    """Train a stage a part, each on the rank that ``places`` names, no shapes given; a twin follows the order alone.

    ``shards``: each stage is under FSDP2 on the mesh's first dimension, whose ranks have batches of their own.
    """
    pipe = made.mesh["shard"] if shards else made.mesh
    made.divide(made.mesh["replicate"] if shards else None)
    parts = list(made.model)
    if len(places) > len(parts):
        torch.manual_seed(0)
        made.take(made.converted(nn.Sequential(*made.feature.plain(), *made.feature.plain()).to(made.feature.dtype)))
        parts = list(made.model)
    own = [number for number, place in enumerate(places) if place == pipe.get_local_rank()]
    for part in (parts[number] for number in own if shards and made.is_library):
        fully_shard(part, mesh=made.mesh["replicate"])
    group, cpu = pipe.get_group(), torch.device("cpu")
    schedule = of_stages(
        [PipelineStage(parts[number], number, len(parts), cpu, group=group) for number in own],
        n_microbatches=MICRO,
        loss_fn=lambda y, target: made.loss(y) / MICRO,
        scale_grads=False,
    )
    if made.is_library:
        for number in range(len(parts)):
            if number not in own:
                del made.model._modules[str(number)]
    made.feature.wrapped(made)
    by_rank = [
        nn.ModuleList(part for part, place in zip(parts, places, strict=True) if place == rank) for rank in (0, 1)
    ]
    made.begin(None if made.is_library else lambda make: [make(own.parameters()) for own in by_rank])
    for step in range(2):
        batches = [made.data(step, number, made.batch) for number in range(MICRO)]
        if made.is_library:
            _step(made, step, schedule, batches, places, pipe)
        else:
            for casts in casts_of(made.model) if shards and made.role == "twin" else ():
                casts.gathered = []  # a stage stays gathered from a step's first micro-batch to its last
            _in_order(made, step, _orders(schedule, len(parts)), parts, batches)
            made.average()
        made.update()


def _step(made: Made, step: int, schedule: Any, batches: list[Tensor], places: Sequence[int], pipe: Any) -> None:
    inputs = [torch.cat(batches)] if pipe.get_local_rank() == places[0] else []
    target = {"target": torch.cat(batches)} if pipe.get_local_rank() == places[-1] else {}
    with made.accumulating(more=True):
        y = schedule.step(*inputs, **target)
    y = torch.empty_like(torch.cat(batches)) if y is None else y.detach().clone()
    torch.distributed.broadcast(y, group=pipe.get_group(), group_src=places[-1])
    for number, part in enumerate(y.chunk(MICRO)):
        made.note(f"output {step}.{number} of rank {made.batch}", part)


def _orders(schedule: Any, stages: int) -> list[Order]:
    """Those of all ranks; torch's of 1F1B names a micro-batch too many on its last rank."""
    if isinstance(schedule, Schedule1F1B):
        orders: list[Order] = []
        for stage in range(stages):
            ahead = stages - 1 - stage
            both = [((stage, "FORWARD", at), (stage, "FULL_BACKWARD", at - ahead)) for at in range(MICRO + ahead)]
            orders.append([action for pair in both for action in pair if 0 <= action[2] < MICRO])
        return orders
    return [
        [(action.stage_index, action.computation_type.name, action.microbatch_index) for action in order if action]
        for order in schedule.pipeline_order.values()
    ]


def _in_order(made: Made, step: int, orders: list[Order], parts: list[Any], batches: list[Tensor]) -> None:
    """What each rank does, in an order that all ranks' orders allow; a stage's backward at once."""
    entered: dict[Any, Tensor] = {}
    left: dict[Any, Tensor] = {(-1, number): batch for number, batch in enumerate(batches)}
    gradients: dict[Any, Tensor] = {}

    def done(stage: int, kind: str, number: int) -> bool:
        last, key = stage == len(parts) - 1, (stage, number)
        if kind == "FORWARD":
            if (stage - 1, number) not in left:
                return False
            entered[key] = left[stage - 1, number].detach().requires_grad_()
            left[key] = parts[stage](entered[key])
            if last:
                made.note(f"output {step}.{number} of rank {made.batch}", left[key])
        elif kind in ("FULL_BACKWARD", "BACKWARD_INPUT" if stage else "BACKWARD_WEIGHT"):
            if not last and (stage + 1, number) not in gradients:
                return False
            if last:
                (made.loss(left[key]) / MICRO).backward()
            else:
                left[key].backward(gradients[stage + 1, number])
            gradients[key] = entered[key].grad  # type: ignore[assignment]
        return True

    while left_over := sum(map(len, orders)):
        for order in orders:
            while order and done(*order[0]):
                order.pop(0)
        assert sum(map(len, orders)) < left_over


def _single(stages: list[Any], **options: Any) -> Any:
    return Schedule1F1B(stages[0], **options)


@situation("pipeline, 1F1B", PIPELINES, TWO, exceptions={"FP8 reduction": NOT_AVERAGED})
def pipeline(made: Made) -> None:
    """A stage a rank."""
    _piped(made, _single, (0, 1))


@situation("pipeline, zero-bubble", PIPELINES, TWO, exceptions={"FP8 reduction": NOT_AVERAGED})
def zero_bubble(made: Made) -> None:
    """Interleaved, a stage a rank: gradients of inputs come first, those of weights later."""
    _piped(made, ScheduleInterleavedZeroBubble, (0, 1))


@situation("pipeline, zero-bubble V", PIPELINES, TWO, exceptions={"FP8 reduction": NOT_AVERAGED})
def zero_bubble_v(made: Made) -> None:
    """Two stages a rank."""
    _piped(made, ScheduleZBVZeroBubble, (0, 1, 1, 0))


@situation("pipeline, 1F1B, stages under FSDP2", PIPELINES, FOUR, exceptions=OF_FSDP2)
def pipeline_of_shards(made: Made) -> None:
    """A stage on two ranks, which share its weights and have micro-batches of their own."""
    _piped(made, _single, (0, 1), shards=True)


@situation("pipeline, zero-bubble V, stages under FSDP2", PIPELINES, FOUR, exceptions=OF_FSDP2)
def zero_bubble_v_of_shards(made: Made) -> None:
    """Two stages on two ranks."""
    _piped(made, ScheduleZBVZeroBubble, (0, 1, 1, 0), shards=True)
