"""Situations on ranks: each computes a batch of its own, and gradients are averaged, or ranks share each batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import distributed as ours
from octavo.distributed.checkpoint import load_checkpoint, load_extra, save_checkpoint
from octavo.distributed.ranks import Ranks
from octavo.errors import RanksDifferError, UnsupportedOpError
from octavo.schedule import PrecisionSchedule
from tests.support.seams.features import HEADS_LOSS, KNOWN, LLAMA, LORA, OF_RECIPES, DecoderPart, MixturePart
from tests.support.seams.situations import EXACT, Documented, Exact, Refused, Sound, situation
from tests.support.seams.training_run import TOKENS, TrainingRun
from tests.support.seams.twins import casts_of, computing_apart

REPLICATED, SHARDED = "DistributedDataParallel", "FSDP2"
TWO, FOUR = (2,), (2, 2)
STORED = ("FP8 weights", "FP8 weights in blocks", "Muon", *LORA)

REDUCTION = Sound(10, "gradients are rounded twice on their way, by blocks that depend on how they are put together")
NOT_DDP = Refused(RuntimeError, "FSDP2|fully_shard", "DDP exchanges gradients after the hook that uses them has run")
OF_DDP = {("FP8 gradients", "updates in backward"): NOT_DDP, "FP8 reduction": REDUCTION}
WITH_NORM = ("fused modules", *KNOWN, *LLAMA)
FUSED = Sound(8, "the same, and the gradient went through two norms")
NOT_KEPT = Refused(ValueError, "convert the model", "what FSDP2 shards is cast for its gathers, once an unshard")
OF_FSDP2 = {"FP8 reduction": REDUCTION, "KeptWeights": NOT_KEPT}


def ddp(run: TrainingRun, **options: Any) -> None:
    if run.is_library:
        run.call = nn.parallel.DistributedDataParallel(run.model, process_group=run.mesh.get_group(), **options)
    run.feature.wrapped(run)


def _train(run: TrainingRun, wrap: Any, train: Any = TrainingRun.train, **options: Any) -> None:
    wrap(run, **options)
    train(run)


for name, options in {
    "DDP": {},
    "DDP, broadcast_buffers=False": {"broadcast_buffers": False},
    "DDP, static_graph=True": {"static_graph": True},
}.items():
    situation(name, REPLICATED, TWO, exceptions=OF_DDP)(functools.partial(_train, wrap=ddp, **options))


@situation("DDP, accumulation", REPLICATED, TWO, exceptions=OF_DDP)
def ddp_accumulates(run: TrainingRun) -> None:
    """Train with two micro-batches a step; each exchange has the accumulated gradients."""
    ddp(run)
    run.train(micro=2, after=lambda number: None if number else run.average())


@situation("DDP, no_sync", REPLICATED, TWO, exceptions=OF_DDP)
def ddp_without_sync(run: TrainingRun) -> None:
    """Train with two micro-batches a step and one exchange."""
    ddp(run)
    within = contextlib.ExitStack()

    def before(number: int) -> None:
        within.close()
        if run.is_library and number == 0:
            within.enter_context(run.call.no_sync())

    run.train(micro=2, before=before)


def another(run: TrainingRun) -> Any:
    """The same model with other, larger values."""
    torch.manual_seed(1)
    plain = run.feature.plain()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    return run.converted(plain)


@situation("DDP, ranks begin differently", REPLICATED, TWO, exceptions=OF_DDP)
def ddp_begins_differently(run: TrainingRun) -> None:
    """All get rank 0's values."""
    if run.is_library and run.rank:
        run.take(another(run))
    ddp(run)
    run.train()


def shard(run: TrainingRun, mesh: Any = None, **options: Any) -> None:
    """Shard the model by FSDP2, a part a group."""
    mesh = run.mesh if mesh is None else mesh
    if run.is_library:
        for part in run.model:
            fully_shard(part, mesh=mesh, **options)
        fully_shard(run.model, mesh=mesh, **options)
    run.feature.wrapped(run)


for name, ranks, options in (
    ("FSDP2", TWO, {}),
    ("FSDP2, reshard_after_forward=False", TWO, {"reshard_after_forward": False}),
    ("FSDP2, offload to the CPU", TWO, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ("FSDP2, replicas of shards (HSDP)", FOUR, {}),
):
    situation(name, SHARDED, ranks, exceptions=OF_FSDP2)(functools.partial(_train, wrap=shard, **options))


FLATTENED = Refused(UnsupportedOpError, "FSDP2", "FSDP1 makes one vector of weights, which has no scales")
OTHER_BLOCKS = Sound(10, "moments or gradients in FP8 are of blocks of FSDP1's vector")


@situation(
    "FSDP1 (FullyShardedDataParallel)",
    SHARDED,
    TWO,
    exceptions={
        STORED: FLATTENED,
        ("FP8 gradients", "FP8 moments"): OTHER_BLOCKS,
        "KeptWeights": Refused(ValueError, "shard can't be kept", "the weight is freed between forward and backward"),
        "FP8 reduction": Documented("communication.md#gradients-in-fp8", "FSDP1 averages gradients in their dtype"),
    },
)
def fsdp1(run: TrainingRun) -> None:
    """A part a group."""
    values: list[Tensor] = []
    if run.is_library:
        how: Any = {"process_group": run.mesh.get_group(), "device_id": torch.device("cpu"), "use_orig_params": True}
        for number, part in enumerate(run.model):
            run.model[number] = FullyShardedDataParallel(part, **how)
        run.call = run.model = FullyShardedDataParallel(run.model, **how)
    run.train()
    if run.is_library:
        with FullyShardedDataParallel.summon_full_params(run.model, writeback=False):
            values = [parameter.detach().clone() for parameter in run.model.parameters()]
        run.model = run.converted(run.feature.plain())
        with torch.no_grad():
            for parameter, value in zip(run.model.parameters(), values, strict=True):
                parameter.copy_(value)


@situation("FSDP2, accumulation", SHARDED, TWO, exceptions=OF_FSDP2)
def fsdp2_accumulates(run: TrainingRun) -> None:
    """Train with two micro-batches a step, each with its exchange, whose results are added."""
    shard(run)
    first: dict[Any, Any] = {}

    def after(number: int) -> None:
        if number == 0 and not run.is_library:
            run.average()
            first.update((p, p.grad) for p in run.with_gradients())
            run.model.zero_grad()

    def complete() -> None:
        for parameter, grad in first.items():
            parameter.grad += grad

    run.train(micro=2, after=after, complete=complete)


@situation("FSDP2, accumulation without exchange", SHARDED, TWO, exceptions=OF_FSDP2)
def fsdp2_without_sync(run: TrainingRun) -> None:
    """Train with two micro-batches a step and one exchange."""
    shard(run)

    def before(number: int) -> None:
        if run.is_library:
            run.model.set_requires_gradient_sync(number == 1)

    run.train(micro=2, before=before)


@situation("FSDP2, checkpointing", SHARDED, TWO, exceptions=OF_FSDP2)
def fsdp2_recomputes(run: TrainingRun) -> None:
    """Compute each part's forward again in backward."""
    if run.is_library:
        for part in run.model:
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
    shard(run)
    run.train()


CUT = Refused(UnsupportedOpError, "multiple of 128 rows", "a block lies on one rank")
CLIPPED = Sound(15, "the norm is summed over ranks in another order")
SHARED = ("shared inputs", "shared inputs, delayed")
NVFP4 = ("nvfp4", "nvfp4, delayed")
OF_FOUR_BITS = {NVFP4: Sound(5, "the same, and four bits have that noise: the twin itself has 6 dB")}
MULTIPLIED = Sound(8, "the same, and outputs of two layers are multiplied")


ALL_AT_ONCE = Refused(UnsupportedOpError, "clip", "the global norm needs all gradients at once")
KNOWN_LATE = Refused(RuntimeError, "GradScaler", "the scale is known to hold after backward only")
NOT_CLIPPED = OF_FSDP2 | OF_FOUR_BITS | {WITH_NORM: FUSED, SHARED: MULTIPLIED, "updates in backward": ALL_AT_ONCE}
for name, train, verdict, exceptions in (
    ("FSDP2, clipping", TrainingRun.train_clipped, CLIPPED, NOT_CLIPPED),
    ("FSDP2, GradScaler", TrainingRun.train_scaled, EXACT, OF_FSDP2 | {"updates in backward": KNOWN_LATE}),
):
    situation(name, SHARDED, TWO, verdict, exceptions)(functools.partial(_train, wrap=shard, train=train))


@situation(
    "FSDP2, ranks begin differently",
    SHARDED,
    TWO,
    exceptions={**OF_FSDP2, STORED: Sound(12, "a scale that ranks share is that of the larger part's whole weight")},
)
def fsdp2_begins_differently(run: TrainingRun) -> None:
    """Shard on each rank its own values."""
    if not run.is_library:
        for one, other in zip(run.model.parameters(), another(run).parameters(), strict=True):
            half = one.shape[0] // 2
            one.data[half:] = other.data[half:]
    elif run.rank:
        run.take(another(run))
    shard(run)
    run.train()


def _margin(recipe: octavo.Recipe) -> octavo.Recipe:
    def other(pair: Any) -> Any:
        return None if pair is None else tuple(dataclasses.replace(cast, margin=1) for cast in pair)

    return octavo.Recipe(other(recipe.output), other(recipe.grad_input), other(recipe.grad_weight))


WAIT = "ranks would compute with other codes, or wait for each other"
DIFFER = Refused(RanksDifferError, "recipe.output is", WAIT)
IN_GRADIENTS = {"dynamic_with_output_hp": Refused(RanksDifferError, "recipe.grad_input is", WAIT)}
NOBODY_ASKS = Documented("communication.md#limits-and-workarounds", "each rank computes by its own recipe")
SET_AGAIN = Exact("the schedule sets the recipe of its first phase on all ranks")


def _recipes_differ(run: TrainingRun, wrap: Any) -> None:
    if run.is_library and run.rank:
        octavo.set_recipe(run.model, _margin(run.feature.recipe))
    _train(run, wrap)


for name, group, wrap, verdict, exceptions in (
    ("DDP", REPLICATED, ddp, NOBODY_ASKS, {("FP8 gradients", "updates in backward"): NOT_DDP}),
    ("FSDP2", SHARDED, shard, DIFFER, {"KeptWeights": NOT_KEPT} | IN_GRADIENTS),
):
    add = situation(f"{name}, ranks with different recipes", group, TWO, verdict, exceptions | {"schedule": SET_AGAIN})
    add(functools.partial(_recipes_differ, wrap=wrap))


FILES = "State of ranks"
FROM_CODES = Sound(8, "a state dict holds codes, so masters begin as these read")


def _merged(run: TrainingRun, group: Any) -> None:
    """A twin's delayed state on another number of ranks: the largest amax, the smallest scale."""
    for casts in casts_of(run.model):
        casts.settle()
        if casts.own_history is not None:
            torch.distributed.all_reduce(casts.own_history.amaxes, torch.distributed.ReduceOp.MAX, group)
            torch.distributed.all_reduce(casts.own_history.scale, torch.distributed.ReduceOp.MIN, group)


def _moved(run: TrainingRun, saving: Any, loading: Any) -> None:
    """Train on one mesh's ranks, save, and go on on another's, or on None's: this alone."""
    everyone = Ranks(run.group)
    run.divide(saving)
    shard(run, saving)
    run.train(2)
    if run.is_library:
        with tempfile.TemporaryDirectory() as folder_of_rank:
            pair = Ranks(saving.get_group())
            extra = run.extra.state_dict() if isinstance(run.extra, PrecisionSchedule) else None
            save_checkpoint(pair.from_rank_0(lambda: folder_of_rank), run.model, run.optimizers[0], extra, ranks=pair)
            folder = everyone.from_rank_0(lambda: folder_of_rank)
            run.take(another(run))
            if loading is not None:
                shard(run, loading)
            run.begin()
            ranks = Ranks() if loading is None else everyone
            if extra is not None:
                run.extra.load_state_dict(load_extra(folder))
            load_checkpoint(folder, run.model, run.optimizers[0], ranks=ranks)
            everyone.any(False)  # nobody reads any more
    else:
        _merged(run, saving.get_group())
    run.divide(loading)
    with computing_apart(loading is not None):  # one process computes gate and up as one
        run.train(2)


@situation("FSDP2, a checkpoint of two ranks on one", FILES, TWO, exceptions=OF_FSDP2)
def on_one_rank(run: TrainingRun) -> None:
    """Optimizer and delayed state too."""
    _moved(run, run.mesh, None)


GROWS = Documented("concepts/delayed-scaling.md#what-changes-it", "gradients grow by more than a history knows")
UNSEEN = tuple(f"{name} 2.0 of rank {rank}" for name in ("output", "input's gradient") for rank in (2, 3))


@situation("FSDP2, a checkpoint of two ranks on four", FILES, FOUR, exceptions=OF_FSDP2, grows=UNSEEN)
def on_four_ranks(run: TrainingRun) -> None:
    """Train two by two alike; all ranks read the first two's file, as replicas of shards.

    The third and fourth rank's batches are larger than any that a history has seen.
    """
    _moved(run, run.mesh["shard"], run.mesh)


@situation("FSDP2, broadcast_from_rank0", FILES, FOUR, exceptions={**OF_FSDP2, STORED[:3]: FROM_CODES})
def fsdp2_broadcasts(run: TrainingRun) -> None:
    """Broadcast rank 0's values with torch's functions, which take all ranks of the process."""
    if run.is_library:
        values = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.take(another(run))
        shard(run)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(run.model, values if run.rank == 0 else {}, options=options)
    run.train()


@situation("FSDP2, from the meta device", FILES, TWO, exceptions={**OF_FSDP2, KNOWN[1]: GROWS})
def fsdp2_from_meta(run: TrainingRun) -> None:
    """Shard a model on the meta device, give it memory by to_empty, then values."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(p.shape, generator=generator) / 16 for p in run.model.parameters()]
    if run.is_library:
        with torch.device("meta"):
            run.take(run.converted(run.feature.plain()))
        shard(run)
        run.model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(run.model.parameters(), values, strict=True):
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    run.train()


# --- parts of a layer on each rank ------------------------------------------------------------------------------------

PARTS, PIPELINES = "Parts of a layer on each rank", "Pipelines"

ORDER = Sound(15, "sums over ranks are added in another order")
NONE_KEPT = Refused(ValueError, "stored in FP8", "what ranks share, and experts, are cast at each forward")
WHOLE_ROWS = "a row's scale is of one rank's codes"
BY_COLUMNS = Refused(ValueError, "share by rows", "Muon takes whole columns of a matrix")
NOT_AVERAGED = Documented("communication.md#gradients-in-fp8", "ranks share each batch, and average no gradients")


def by_tokens(run: TrainingRun, mesh: Any) -> Callable[[Tensor], Tensor]:
    """The model of all ranks, which have some tokens each, as a function of all tokens."""

    def call(x: Tensor) -> Tensor:
        x_of_rank = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        return DTensor.from_local(run.model(x_of_rank), mesh, [Shard(0)]).full_tensor()

    return call


def _split(run: TrainingRun, mesh: Any, styles: Any, tokens: Any) -> None:
    """The first layer by rows, the second by columns; between parts ``tokens``. Experts by themselves."""
    plan: dict[str, Any] = {}
    for name, module in run.model.named_modules():
        if isinstance(module, nn.Linear | octavo.nn.Linear):
            chains = run.feature.name not in LORA
            first = name.endswith(("fc1", "gate_proj", "up_proj", "q_proj", "k_proj", "v_proj"))
            second = name.endswith(("fc2", "down_proj", "o_proj"))
            if first or (name.startswith("0.") and not second):
                after = {} if chains else {"output_layouts": tokens}
                inside = Replicate() if "self_attn" in name else tokens
                plan[name] = styles.ColwiseParallel(input_layouts=inside, **after)
            else:
                before = {} if chains else {"input_layouts": tokens}
                plan[name] = styles.RowwiseParallel(output_layouts=tokens, **before)
        elif name.endswith("norm") and tokens != Replicate():
            plan[name] = styles.SequenceParallel(sequence_dim=tokens.dim)
        elif name.endswith("self_attn") and tokens != Replicate():
            layouts, whole = {"hidden_states": tokens}, {"hidden_states": Replicate()}
            how = {"input_kwarg_layouts": layouts, "desired_input_kwarg_layouts": whole}
            plan[name] = torch_parallel.PrepareModuleInput(**how)
    torch_parallel.parallelize_module(run.model, mesh, plan)
    if run.feature.name == "experts":
        _where_tokens_begin(run, mesh)
        ours.expert_parallel(run.model, mesh, average=False)


def _tensor_parallel(run: TrainingRun, styles: Any = ours, tokens: Any = Shard(0), shards: bool = False) -> None:  # noqa: B008
    """Train with tokens divided between layers, or on all ranks; ``shards``: under FSDP2 too, on a 2-D mesh."""
    mesh, replicas = (run.mesh["shard"], run.mesh["replicate"]) if shards else (run.mesh, None)
    run.divide(replicas)
    if run.is_library:
        in_sequence = isinstance(run.model[0], DecoderPart) and tokens != Replicate()
        _split(run, mesh, styles, Shard(1) if in_sequence else tokens)
        for part in run.model if in_sequence else ():
            part.ranks = mesh.size()
        if shards:
            shard(run, replicas)
        if tokens == Shard(0):
            run.call = by_tokens(run, mesh)
    run.train()


OF_DIVIDED_COLUMNS = {
    "cross_entropy": Documented("tensor-parallel.md#tested", "ranks have columns of logits: torch's `loss_parallel`"),
    HEADS_LOSS: Refused(ValueError, "loss_parallel", "a head whose columns are divided has not all logits of a row"),
}
BY_FEATURES = OF_DIVIDED_COLUMNS | OF_FOUR_BITS | {"FP8 reduction": NOT_AVERAGED, "KeptWeights": NONE_KEPT}
BY_FEATURES |= {WITH_NORM: FUSED, "Muon": BY_COLUMNS}
OF_TORCH = {"styles": torch_parallel, "tokens": Replicate()}
DIVIDED = Documented("mixture-of-experts.md#on-several-ranks", "experts are divided by expert_parallel")
ON_TWO_DIMENSIONS = OF_DIVIDED_COLUMNS | {
    NVFP4: Sound(5, OF_FOUR_BITS[NVFP4].why),
    "FP8 reduction": REDUCTION,
    "KeptWeights": NOT_KEPT,
    WITH_NORM: FUSED,
    ("FP8 weights in blocks", "Muon"): CUT,
    SHARED: MULTIPLIED,
    LORA[1]: Refused(ValueError, "shard it by rows", WHOLE_ROWS),
}
for name, ranks, exceptions, options in (
    (
        "tensor parallel, torch's styles",
        TWO,
        BY_FEATURES | {"experts": DIVIDED, LORA[1]: Refused(UnsupportedOpError, "shard it by rows", WHOLE_ROWS)},
        OF_TORCH,
    ),
    ("tensor parallel, octavo's styles", TWO, BY_FEATURES | {LORA[1]: ON_TWO_DIMENSIONS[LORA[1]]}, {}),
    ("tensor parallel and FSDP2", FOUR, ON_TWO_DIMENSIONS, {"shards": True}),
):
    situation(name, PARTS, ranks, ORDER, exceptions)(functools.partial(_tensor_parallel, **options))


def _where_tokens_begin(run: TrainingRun, mesh: Any) -> None:
    for part in run.model:
        part.first_token = mesh.get_local_rank() * TOKENS // mesh.size()


TWICE = Sound(15, "rows that were sent are scaled a second time, for grad_weight: exact=True sends them again")

BY_TWO_SCALES = tuple(  # recipes by which tokens have other scales in grad_weight than in output or grad_input
    name
    for name, recipe in OF_RECIPES.items()
    if any(
        casts.as_is and casts.transposed and not casts.coincide
        for casts in (recipe.input_casts, recipe.grad_output_casts)
    )
)


def _times(x: Tensor, factor: float) -> Tensor:
    """The identity, with a factor in backward."""
    y = x.view_as(x)
    y.register_hook(lambda grad: grad * factor)
    return y


@situation(
    "expert parallel",
    PARTS,
    TWO,
    exceptions={
        (*BY_TWO_SCALES, "FP8 weights in blocks", "schedule", *LORA[1:]): TWICE,
        "batch_invariant": Sound(15, "without vector instructions torch adds fewer rows in another order", True),
        NVFP4: Refused(ValueError, "give experts another recipe", "rows in groups have no E2M1"),
        "FP8 reduction": NOT_AVERAGED,
        "KeptWeights": NONE_KEPT,
    },
)
def expert_parallel(run: TrainingRun) -> None:
    """Experts in the place of each feature's layers; each rank has a loss of its own tokens."""
    run.divide(None)
    torch.manual_seed(0)
    run.take(run.converted(nn.Sequential(*[MixturePart(run.feature.recipe) for _ in range(2)]).to(run.feature.dtype)))
    if run.is_library:
        _where_tokens_begin(run, run.mesh)
        ours.expert_parallel(run.model, run.mesh)
        all_tokens = by_tokens(run, run.mesh)
        run.call = lambda x: _times(all_tokens(_times(x, 0.5)), 2.0)
    run.train()


# --- pipelines --------------------------------------------------------------------------------------------------------

MICRO = 4


def _piped(run: TrainingRun, of_stages: Callable[..., Any], places: Sequence[int], shards: bool = False) -> None:
    """Train a stage a part, each on the rank that ``places`` names, no shapes given; a twin by the same schedule.

    ``shards``: each stage is under FSDP2 on the mesh's first dimension, whose ranks have batches of their own.
    """
    pipe = run.mesh["shard"] if shards else run.mesh
    run.divide(run.mesh["replicate"] if shards else None)
    parts = nn.ModuleList(run.model)
    if len(places) > len(parts):
        torch.manual_seed(0)
        parts = run.converted(nn.ModuleList([*run.feature.plain(), *run.feature.plain()]).to(run.feature.dtype))
    stages_of_rank = [number for number, place in enumerate(places) if place == pipe.get_local_rank()]
    run.take(nn.ModuleDict({str(number): parts[number] for number in stages_of_rank}))
    for part in run.model.values() if shards and run.is_library else ():
        fully_shard(part, mesh=run.mesh["replicate"])
    group, cpu = pipe.get_group(), torch.device("cpu")
    stages = []
    for number, part in zip(stages_of_rank, run.model.values(), strict=True):
        entering = run.data(0).requires_grad_(number > 0)
        examples = {} if run.is_library else {"input_args": entering, "output_args": run.data(0).requires_grad_()}
        stages.append(pipelining.PipelineStage(part, number, len(parts), cpu, group=group, **examples))
    schedule = of_stages(stages, n_microbatches=MICRO, loss_fn=lambda y, target: run.loss(y) / MICRO, scale_grads=False)
    run.feature.wrapped(run)
    run.begin()
    for step in range(2):
        for casts in casts_of(run.model) if shards and run.is_twin else ():
            casts.gathered = []  # a stage stays gathered from a step's first micro-batch to its last
        batch = torch.cat([run.data(step, number, run.batch) for number in range(MICRO)])
        inputs = [batch] if pipe.get_local_rank() == places[0] else []
        target = {"target": batch} if pipe.get_local_rank() == places[-1] else {}
        with run.accumulating(more=True):
            y = schedule.step(*inputs, **target)
        y = torch.empty_like(batch) if y is None else y.detach().clone()
        torch.distributed.broadcast(y, group=group, group_src=places[-1])
        run.note(f"output {step} of rank {run.batch}", y)
        run.average()
        run.update()


def _single(stages: list[Any], **options: Any) -> Any:
    return pipelining.Schedule1F1B(stages[0], **options)


for name, of_stages, places in (  # a stage a rank, or two
    ("pipeline, 1F1B", _single, (0, 1)),
    ("pipeline, zero-bubble", pipelining.ScheduleInterleavedZeroBubble, (0, 1)),
    ("pipeline, zero-bubble V", pipelining.ScheduleZBVZeroBubble, (0, 1, 1, 0)),
    ("pipeline, 1F1B, stages under FSDP2", _single, (0, 1)),
    ("pipeline, zero-bubble V, stages under FSDP2", pipelining.ScheduleZBVZeroBubble, (0, 1, 1, 0)),
):
    shards = "FSDP2" in name
    ranks, exceptions = (FOUR, OF_FSDP2) if shards else (TWO, {"FP8 reduction": NOT_AVERAGED})
    how = {"of_stages": of_stages, "places": places, "shards": shards}
    situation(name, PIPELINES, ranks, exceptions=exceptions)(functools.partial(_piped, **how))
