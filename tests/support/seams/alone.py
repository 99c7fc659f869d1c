"""Situations of one process: how it trains; copies.py has what else befalls a model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octavo import recipes
from octavo.errors import UnsupportedOpError
from tests.support.seams.made import Made, evaluating
from tests.support.seams.situations import situation
from tests.support.seams.verdicts import Documented, Refused, Sound

HIGH = recipes.high_precision()
LOOP, MEMORY, COMPILED = "The loop", "Recomputation", "torch.compile and torch.export"


@situation("as it is", LOOP)
def as_it_is(made: Made) -> None:
    """Forward, backward, step."""
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


@situation("a recipe set between forward and backward", LOOP)
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


def _recomputed(made: Made, **options: Any) -> None:
    def call(x: torch.Tensor) -> Any:
        for part in made.model:
            x = checkpoint(part, x, **options)
        return x

    made.train(micro=2, call=call if made.is_library else None)


@situation("checkpointing", MEMORY)
def checkpointing(made: Made) -> None:
    """torch.utils.checkpoint, not reentrant."""
    _recomputed(made, use_reentrant=False)


@situation("reentrant checkpointing", MEMORY)
def reentrant(made: Made) -> None:
    """The older kind."""
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
        ("delayed", "recording", "schedule"): ONCE_EACH,
        "updates in backward": Refused(UnsupportedOpError, "use_reentrant=False", "gradients come region by region"),
        "FP8 gradients": Refused(UnsupportedOpError, r"accumulate\(\)", "they are complete region by region"),
    },
)
def shared_reentrant(made: Made) -> None:
    """The older kind."""
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
    """As pipelines do."""
    _two_ahead(made, recompute=False)


READS_NEXT = Documented(
    "#recomputation",
    "the second backward computes again with the scales that the first one wrote; no checkpointing there, or a dynamic "
    "recipe",
)


@situation("the same, checkpointed", MEMORY, exceptions={("delayed", "recording", "schedule"): READS_NEXT})
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
