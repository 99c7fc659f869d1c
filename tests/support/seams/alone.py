"""Situations of one process: how it trains; what is made of a model, what fails, and what is written by hand."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import octavo
from octavo import recipes
from octavo.errors import UnsupportedOpError
from tests.support.helpers import every_layer
from tests.support.seams.features import KNOWN, KnownPart
from tests.support.seams.made import Made, evaluating
from tests.support.seams.situations import NO_MATRICES, Documented, Refused, Sound, situation
from tests.support.seams.twins import TwinLinear, twin_of

HIGH = recipes.high_precision()
LOOP, MEMORY, COMPILED = "The loop", "Recomputation", "torch.compile and torch.export"


@situation("as it is", LOOP)
def as_it_is(made: Made) -> None:
    made.train()


@situation("accumulation", LOOP)
def accumulation(made: Made) -> None:
    """Three micro-batches a step."""
    made.train(micro=3)


@situation("zero_grad(set_to_none=False)", LOOP)
def zero_in_place(made: Made) -> None:
    """Gradients stay, as zeros."""
    made.begin()
    for step in range(3):
        made.gradients(step)
        made.update(zero_to_none=False)


@situation(
    "clipping",
    LOOP,
    exceptions={
        "FP8 gradients": Sound(10, "the factor goes to the scales, the norm is summed in another order"),
        "updates in backward": Refused(UnsupportedOpError, "clip", "the global norm needs all gradients at once"),
    },
)
def clipping(made: Made) -> None:
    """By the global norm."""
    made.begin()
    for step in range(3):
        made.gradients(step)
        nn.utils.clip_grad_norm_(made.model.parameters(), 1e-3)
        made.update()


@situation("evaluation between steps", LOOP)
def evaluation(made: Made) -> None:
    """In evaluation, without gradients."""
    for step in range(3):
        made.train(1)
        with evaluating(made), torch.no_grad():
            made.note(f"evaluation {step}", made.call(4 * made.data(step, 5)))


@situation("inference mode between steps", LOOP)
def inference(made: Made) -> None:
    """In evaluation, in inference mode."""
    for step in range(3):
        made.train(1)
        with evaluating(made), torch.inference_mode():
            made.note(f"evaluation {step}", made.call(4 * made.data(step, 5)))


@situation("a forward before the optimizer is made", LOOP)
def looks_first(made: Made) -> None:
    """Without gradients, in training and in evaluation; a twin does not look."""
    if made.is_library:
        with torch.no_grad():
            made.call(made.data(7))
            with evaluating(made):
                made.call(made.data(7))
    made.train()


@situation("two optimizers", LOOP)
def two_optimizers(made: Made) -> None:
    """One for each part."""
    made.begin(lambda make: [make(part.parameters()) for part in made.model])
    made.train()


@situation("one module called 64 times", LOOP)
def called_often(made: Made) -> None:
    """In one forward, as a recurrent cell is."""

    def call(x: torch.Tensor) -> Any:
        for _ in range(64):
            x = made.model[0](x)
        return x

    made.train(2, call=call)


@situation("backward twice", LOOP)
def backward_twice(made: Made) -> None:
    """By retain_graph: two losses of one forward."""
    made.begin()
    for step in range(3):
        x, y = made.forward(f"{step}", made.data(step))
        with made.accumulating(more=True):
            made.loss(y).backward(retain_graph=True)
        made.loss(2 * y).backward()
        made.note(f"input's gradient {step}", x.grad)
        if made.role == "twin":
            made.feature.rounded(made)
        made.update()


@situation("an optimizer made before convert", LOOP)
def optimizer_first(made: Made) -> None:
    """Of the plain model's parameters."""

    def begin(make: Any) -> list[Any]:
        plain = made.plain()
        optimizers = [make(plain.parameters())]
        made.model = made.call = made.converted(plain)
        return optimizers

    made.begin(begin if made.is_library else None)
    made.train()


@situation(
    "GradScaler",
    LOOP,
    exceptions={
        "updates in backward": Refused(RuntimeError, "bf16", "whether to step is known only when all gradients are")
    },
)
def grad_scaler(made: Made) -> None:
    """By a power of two."""
    made.begin()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if made.is_library else None
    for step in range(3):
        _, y = made.forward(f"{step}", made.data(step))
        loss = made.loss(y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if made.role == "twin":
            made.feature.rounded(made)
        made.update(by=None if scaler is None else scaler.step)
        if scaler is not None:
            scaler.update()


@situation(
    "a recipe set between forward and backward",
    LOOP,
    exceptions={
        "checkpoint_in_fp8": Documented(
            "modules.md#what-checkpointed-layers-keep", "a region is computed again by the recipe that is set then"
        )
    },
)
def recipe_between(made: Made) -> None:
    """The graph keeps the recipe that it was built with."""
    made.begin()
    own = made.feature.recipe
    for step, (before, after) in enumerate([(own, own), (own, HIGH), (HIGH, own), (own, own)]):
        x, y = made.forward(f"{step}", made.data(step))
        if after is not before:
            made.set_recipe(after)
        made.loss(y).backward()
        made.note(f"input's gradient {step}", x.grad)
        if made.role == "twin":
            made.feature.rounded(made)
        made.update()


@situation("octavo.using between steps", LOOP)
def using(made: Made) -> None:
    """A gradient of the input under the same recipe, and an output in high precision; the history sees neither."""
    for step in range(3):
        made.train(1)
        with made.using(made.feature.recipe):
            x = (4 * made.data(step, 5)).requires_grad_()
            made.note(f"input's gradient in {step}", torch.autograd.grad(made.loss(made.call(x)), x)[0])
        with made.using(HIGH), torch.no_grad():
            made.note(f"output in {step}", made.call(made.data(step, 6)))


READS = "What several layers read, and what is fused in place"
KEPT = Refused(RuntimeError, "inplace operation", "backward reads that tensor, and torch sees the write")
ONCE = Sound(8, "what lies between the layers is rounded once, to codes; a twin's rounds it to bfloat16 before")


@situation(
    "a tensor written between two reads",
    READS,
    exceptions={("rowwise_with_gw_hp", "fused modules", *KNOWN, "LoRA over FP8"): KEPT},
)
def written_between(made: Made) -> None:
    """Both parts read it, the second after a write."""

    def call(x: torch.Tensor) -> Any:
        read = x + 0
        first = made.model[0](read)
        return first + made.model[1](read.mul_(3))

    made.train(call=call)


@situation("views of one storage", READS)
def views(made: Made) -> None:
    """Halves of a tensor, all of it by another view, and itself."""

    def call(x: torch.Tensor) -> Any:
        read, half = x + 0, len(x) // 2
        first, second = made.model
        return torch.cat([first(read[:half]), second(read[half:])]) + second(read.view_as(read)) - first(read)

    made.train(call=call)


@situation("autocast", READS, exceptions={("fused modules", "experts", *KNOWN): ONCE})
def autocast(made: Made) -> None:
    """To bfloat16, which each layer does by itself."""

    def call(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=made.role != "float64"):
            return made.model(x)

    made.train(call=call)


@situation(
    "hooks that return another tensor",
    READS,
    exceptions={"fused modules": Sound(8, "parts run one after the other, the norm by torch's own kernel")},
)
def hooked(made: Made) -> None:
    """Before every second linear layer."""
    layers = [one for one in made.model.modules() if isinstance(one, nn.Linear | octavo.nn.Linear | TwinLinear)]
    for layer in layers[::2]:
        layer.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    made.train()


@situation("two threads", READS)
def two_threads(made: Made) -> None:
    """Each computes a forward of the same tensor; one backward of both."""

    def call(x: torch.Tensor) -> Any:
        read = x.detach() + 0
        with ThreadPoolExecutor(2) as pool:
            first, second = (pool.map if made.is_library else map)(made.model, [read, read])
        return first + 2 * second

    made.train(call=call)


@situation(
    "feed-forwards and norms fused",
    READS,
    exceptions={
        "FP8 moments": ONCE,
        "Muon": NO_MATRICES,
        "LoRA over FP8": Documented("modules.md#models-as-they-come", "a last layer that is adapted runs by itself"),
    },
)
def fused(made: Made) -> None:
    """The models of convert(fuse=True) in the place of each feature's."""
    torch.manual_seed(0)
    model = made.feature.convert(nn.Sequential(KnownPart(), KnownPart()).to(made.feature.dtype))
    octavo.convert(model, made.feature.recipe, every_layer, fuse=True)
    made.take(model if made.is_library else twin_of(model, exact=made.role == "float64"))
    made.train()


def _recomputed(made: Made, **options: Any) -> None:
    def call(x: torch.Tensor) -> Any:
        for part in made.model:
            x = checkpoint(part, x, **options)
        return x

    made.train(micro=2, call=call if made.is_library else None)


@situation("checkpointing", MEMORY)
def checkpointing(made: Made) -> None:
    _recomputed(made, use_reentrant=False)


@situation("reentrant checkpointing", MEMORY)
def reentrant(made: Made) -> None:
    _recomputed(made, use_reentrant=True)


def _shared(made: Made, reentrant: bool) -> None:
    def call(x: torch.Tensor) -> Any:
        for _ in range(3):
            x = checkpoint(made.model[0], x, use_reentrant=reentrant) if made.is_library else made.model[0](x)
        return x

    made.train(3, call=call)


ONCE_EACH = Documented(
    "#recomputation",
    "each region's backward is a pass of its own, so the history rolls once a region, and a region that is computed "
    "again reads what the one after it wrote; `use_reentrant=False`",
)


@situation("one module in three checkpoints", MEMORY)
def shared(made: Made) -> None:
    """Recomputed after another call's backward has committed."""
    _shared(made, reentrant=False)


@situation(
    "one module in three reentrant checkpoints",
    MEMORY,
    exceptions={
        ("delayed", "recording", "schedule", "shared inputs, delayed", KNOWN[1]): ONCE_EACH,
        "updates in backward": Refused(UnsupportedOpError, "use_reentrant=False", "gradients come region by region"),
        "FP8 gradients": Refused(UnsupportedOpError, r"accumulate\(\)", "they are complete region by region"),
    },
)
def shared_reentrant(made: Made) -> None:
    _shared(made, reentrant=True)


def _two_ahead(made: Made, recompute: bool) -> None:
    made.begin()
    for step in range(3):
        call = made.call
        if recompute and made.is_library:
            call = functools.partial(checkpoint, made.model, use_reentrant=False)
        (a, first), (b, second) = (made.forward(f"{step}.{n}", made.data(step, n), call) for n in range(2))
        with made.accumulating(more=True):
            made.loss(first).backward()
        made.loss(second).backward()
        made.note(f"input's gradient {step}.0", a.grad)
        made.note(f"input's gradient {step}.1", b.grad)
        if made.role == "twin":
            made.feature.rounded(made)
        made.update()


@situation("two forwards, then two backwards", MEMORY)
def two_ahead(made: Made) -> None:
    _two_ahead(made, recompute=False)


READS_NEXT = Documented(
    "#recomputation",
    "the second backward computes again with the scales that the first one wrote; no checkpointing there, or a dynamic "
    "recipe",
)


@situation(
    "the same, checkpointed",
    MEMORY,
    exceptions={("delayed", "recording", "schedule", "shared inputs, delayed", KNOWN[1]): READS_NEXT},
)
def two_ahead_recomputed(made: Made) -> None:
    """Each forward is a region."""
    _two_ahead(made, recompute=True)


@situation("selective checkpointing", MEMORY)
def selective(made: Made) -> None:
    """FP8 products are kept, casts are computed again."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "matmul" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    _recomputed(made, use_reentrant=False, context_fn=contexts)


def _compiled(made: Made, tokens: tuple[int, ...], **options: Any) -> None:
    torch._dynamo.reset()
    if made.is_library:
        made.call = torch.compile(made.model, **options)
    for made.tokens in tokens:
        made.train(1)


@situation("torch.compile", COMPILED)
def compiled(made: Made) -> None:
    """Without inductor, whose own sums are rounded otherwise."""
    _compiled(made, (16, 16, 16), backend="aot_eager")


@situation("torch.compile(dynamic=True)", COMPILED)
def compiled_dynamic(made: Made) -> None:
    """Another number of tokens each time."""
    _compiled(made, (16, 24, 40), backend="aot_eager", dynamic=True)


@situation(
    "torch.compile with inductor",
    COMPILED,
    verdict=Sound(10, "inductor's fused sums are rounded otherwise"),
    slow=True,
)
def inductor(made: Made) -> None:
    """As a user calls it."""
    _compiled(made, (16, 16, 16))


@situation("torch.export", COMPILED)
def exported(made: Made) -> None:
    """The model in evaluation, after training."""
    made.train(2)
    with evaluating(made), torch.no_grad():
        x = made.data(7)
        call = torch.export.export(made.model, (x,)).module() if made.is_library else made.call
        made.note("output exported", call(x))


COPIES, FAULTS, WRITES = "Copies and files", "Faults", "Writes by hand"
STORED = ("FP8 weights", "FP8 weights in blocks", "Muon")
FROM_CODES = Sound(15, "a state dict holds codes, so masters begin as these read")
NOT_BY_HAND = {
    STORED: Refused(
        UnsupportedOpError, r"\.copy_\(values\)", "a weight in FP8 is written as codes and scales together"
    ),
    "FP8 gradients": Refused(UnsupportedOpError, r"\.grad\.dequantize", "a gradient in FP8 is not read by itself"),
    "updates in backward": Refused(UnsupportedOpError, "update_in_backward", "the gradient was used in backward"),
}


@situation("deepcopy", COPIES)
def deep_copy(made: Made) -> None:
    """Train, and go on with a copy and a new optimizer; a twin has a new optimizer only."""
    made.train(2)
    model = made.model
    made.take(copy.deepcopy(model) if made.is_library else model)
    made.train(2)


@situation("a pickled module", COPIES)
def pickled(made: Made) -> None:
    """torch.save of the whole module before training."""
    if made.is_library:
        file = io.BytesIO()
        torch.save(made.model, file)
        file.seek(0)
        made.take(torch.load(file, weights_only=False))
    made.train()


def _load(made: Made, assign: bool) -> None:
    """Back to what was saved, after a step; a twin takes no such step."""
    if made.is_library:
        state = copy.deepcopy(made.model.state_dict())
        made.begin()
        made.loss(made.call(made.data(9, rank=1))).backward()
        made.update()
        made.model.load_state_dict(state, assign=assign)
        made.step_number = 0
        made.take(made.model)
    made.train()


situation("load_state_dict", COPIES, exceptions={STORED: FROM_CODES})(functools.partial(_load, assign=False))
situation("load_state_dict(assign=True)", COPIES, exceptions={STORED: FROM_CODES})(
    functools.partial(_load, assign=True)
)


@situation(
    "an exponential moving average",
    COPIES,
    exceptions={
        (*STORED, "LoRA over FP8"): Refused(UnsupportedOpError, r"dequantize", "codes and scales average to no weight")
    },
)
def averaged(made: Made) -> None:
    """torch's AveragedModel, evaluated at the end."""
    average = AveragedModel(made.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        made.train(1)
        average.update_parameters(made.model)
    with torch.no_grad():
        made.note("output of the average", average.eval()(made.data(7)))


@situation("meta, to_empty, reset_parameters", COPIES)
def from_meta(made: Made) -> None:
    """A model without memory, then with, then initialised."""

    def initialise(model: nn.Module) -> None:
        torch.manual_seed(1)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    if made.is_library:
        with torch.device("meta"):
            model = made.converted(made.plain())
        initialise(model.to_empty(device="cpu"))
    else:
        plain = made.plain()
        initialise(plain)
        model = made.converted(plain)
    made.take(model)
    made.train()


@situation("an exception in forward", FAULTS)
def fails_in_forward(made: Made) -> None:
    """After the first part; then on with the next batch."""
    made.train(1)
    if made.is_library:
        handle = made.model[0].register_forward_hook(_fail)
        try:
            made.call(made.data(9))
        except MemoryError:
            handle.remove()
        made.model.zero_grad()
    made.train(2)


def _fail(*_: Any) -> None:
    raise MemoryError("out of memory")


@situation(
    "an exception in backward",
    FAULTS,
    exceptions={
        "updates in backward": Sound(10, "weights whose gradients came before the fault have been updated"),
    },
)
def fails_in_backward(made: Made) -> None:
    """After the second part's, whose history rolls; then zero_grad, and on with the next batch."""
    made.train(1)
    handle = made.model[1].register_forward_pre_hook(lambda module, x: (_Fails.apply(x[0]),))
    with contextlib.suppress(MemoryError):
        made.loss(made.call(made.data(9))).backward()
    handle.remove()
    made.model.zero_grad()
    made.train(2)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise MemoryError("out of memory")


@situation(
    "a batch with a NaN",
    FAULTS,
    exceptions={
        "updates in backward": Documented("weights.md#updates-during-backward", "its gradients have been used"),
    },
)
def not_a_number(made: Made) -> None:
    """In one row; its gradients are dropped, as by a loop that looks at the loss."""
    made.train(1)
    x = made.data(9)
    x[3, 5] = torch.nan
    made.loss(made.call(x)).backward()
    made.model.zero_grad()
    made.train(2)


def _descend(made: Made, write: Any, seen: Any = None) -> None:
    """Plain descent by hand, without an optimizer; then twice the weights, after one has stepped."""

    def wrote() -> None:
        made.model.zero_grad()
        if seen is not None:
            seen(made)

    made.train(1)
    for step in (5, 6):
        made.gradients(step)
        for parameter in made.model.parameters():
            if parameter.grad is not None:
                write(parameter, 0.05 * parameter.grad)
        wrote()
    made.train(1)
    for parameter in made.model.parameters():
        if parameter.requires_grad:
            write(parameter, -parameter.detach())
    wrote()
    made.train(2)


@situation(
    "descent through .data",
    WRITES,
    exceptions={
        **NOT_BY_HAND,
        "KeptWeights": Documented(
            "#writes-by-hand",
            "what `cast()` wrote last is what counts: call it, or `octavo.nn.invalidate(model)`, after the write; "
            "after any write, where a compiled or captured graph reads it",
        ),
    },
)
def descent_by_data(made: Made) -> None:
    """p.data -= lr * p.grad."""
    _descend(made, lambda parameter, change: parameter.data.sub_(change))


@situation("descent through .data, octavo.nn.invalidate", WRITES, exceptions=NOT_BY_HAND)
def descent_and_invalidate(made: Made) -> None:

    def invalidate(made: Made) -> None:
        if made.is_library:
            octavo.nn.invalidate(made.model)
        made.wrote()

    _descend(made, lambda parameter, change: parameter.data.sub_(change), invalidate)


@situation("descent through torch._foreach_", WRITES, exceptions=NOT_BY_HAND)
def descent_by_foreach(made: Made) -> None:
    _descend(made, lambda parameter, change: torch.no_grad()(torch._foreach_sub_)([parameter], [change]), Made.wrote)


@situation(
    "fewer rows through .data",
    WRITES,
    exceptions={
        (*STORED, "LoRA over FP8"): Refused(UnsupportedOpError, r"dequantize", "codes and scales are cut together")
    },
)
def fewer_rows(made: Made) -> None:
    """The last layer loses half its rows, and has a new optimizer."""
    made.train(2)
    for parameter, kept in made.feature.half(made.model):
        parameter.data = parameter.data[kept].clone()
    made.take(made.model)
    made.train(2)
