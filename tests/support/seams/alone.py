"""Situations of one process: training loops, conversions and copies of a model, faults, and writes by hand."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import octavo
from octavo import recipes
from octavo.errors import UnsupportedOpError
from tests.support.freed import Zero3
from tests.support.helpers import every_layer, thread_pool
from tests.support.seams.features import HEADS_LOSS, KNOWN, LLAMA, LORA, KnownPart
from tests.support.seams.situations import Documented, Refused, Sound, situation
from tests.support.seams.training_run import TrainingRun, evaluating, values_of
from tests.support.seams.twins import TwinLinear, twin_of

HIGH = recipes.high_precision()
LOOP, MEMORY, COMPILED = "The loop", "Recomputation", "torch.compile and torch.export"
STORED = ("FP8 weights", "FP8 weights in blocks", "Muon")
DELAYED = ("delayed", "recording", "schedule", "shared inputs, delayed", KNOWN[1], LLAMA[1], HEADS_LOSS[1])

ALL_AT_ONCE = Refused(UnsupportedOpError, "clip", "the global norm needs all gradients at once")
KNOWN_LATE = Refused(RuntimeError, "bf16", "whether to step is known only when all gradients are")

situation("as it is", LOOP)(TrainingRun.train)
situation("accumulation", LOOP)(functools.partial(TrainingRun.train, micro=3))
situation("zero_grad(set_to_none=False)", LOOP)(functools.partial(TrainingRun.train, zero_to_none=False))
situation(
    "clipping",
    LOOP,
    exceptions={
        "FP8 gradients": Sound(10, "the factor goes to the scales, the norm is summed in another order"),
        "updates in backward": ALL_AT_ONCE,
    },
)(TrainingRun.train_clipped)


def _evaluated(run: TrainingRun, mode: Callable[[], Any]) -> None:
    for step in range(3):
        run.train(1)
        with evaluating(run), mode():
            run.note(f"evaluation {step}", run.call(4 * run.data(step, 5)))


LARGER = ("evaluation",)  # inputs of 4 times the size, which the history shall not see
situation("evaluation between steps", LOOP, grows=LARGER)(functools.partial(_evaluated, mode=torch.no_grad))
situation("inference mode between steps", LOOP, grows=LARGER)(functools.partial(_evaluated, mode=torch.inference_mode))


@situation("a forward before the optimizer is made", LOOP)
def looks_first(run: TrainingRun) -> None:
    """Call the library's model before its optimizer exists, without gradients, in training and in evaluation."""
    if run.is_library:
        with torch.no_grad():
            run.call(run.data(7))
            with evaluating(run):
                run.call(run.data(7))
    run.train()


@situation("two optimizers", LOOP)
def two_optimizers(run: TrainingRun) -> None:
    """Train with an optimizer for each part."""
    run.begin(lambda make: [make(part.parameters()) for part in run.model])
    run.train()


def _often(run: TrainingRun, module: Any, times: int = 8) -> Callable[[Tensor], Tensor]:
    return lambda x: functools.reduce(lambda y, _: module(y), range(times), x)


@situation(
    "one module called 8 times",
    LOOP,
    exceptions={
        HEADS_LOSS[1]: Documented(
            "concepts/delayed-scaling.md#what-changes-it",
            "each call's loss is added to what the next reads, so inputs grow by more than a history knows",
        )
    },
)
def called_often(run: TrainingRun) -> None:
    """Call one part 8 times in one forward, as a recurrent cell is."""
    run.train(2, call=_often(run, run.model[0]))


@situation("backward twice", LOOP)
def backward_twice(run: TrainingRun) -> None:
    """Take gradients of two losses of one forward, by retain_graph."""

    def twice(y: Tensor) -> None:
        with run.accumulating(more=True):
            run.loss(y).backward(retain_graph=True)
        run.loss(2 * y).backward()

    run.train(backward=twice)


@situation("two losses, the second larger", LOOP)
def two_losses(run: TrainingRun) -> None:
    """An auxiliary loss first, over the same graph: gradients of the second are a hundred times larger."""

    def both(y: Tensor) -> None:
        with run.accumulating(more=True):
            (run.loss(y) / 100).backward(retain_graph=True)
        run.loss(y).backward()

    run.train(backward=both)


@situation(
    "plain tensors as weights",
    LOOP,
    exceptions={
        (KNOWN[1], LLAMA[1]): Documented(
            "concepts/delayed-scaling.md#what-changes-it",
            "four layers of weights 4 times as large make inputs 256 times as large, which no history knows",
        ),
        "checkpoint_in_fp8": Refused(
            RuntimeError,
            "different metadata",
            "backward computes again with the module's weights, as torch's checkpoint",
        ),
    },
)
def plain_weights(run: TrainingRun) -> None:
    """Call with larger weights of the first part, by torch.func.functional_call, between steps."""
    for step in range(3):
        run.train(1)
        larger = {f"0.{name}": 4 * values_of(weight) for name, weight in run.model[0].named_parameters()}
        x = run.data(step, 5).requires_grad_()
        y = torch.func.functional_call(run.model, larger, (x,))
        run.note(f"output of others {step}", y)
        run.note(f"input's gradient of others {step}", torch.autograd.grad(run.loss(y), x)[0])


@situation("an optimizer made before convert", LOOP)
def optimizer_first(run: TrainingRun) -> None:
    """Give the optimizer the plain model's parameters, then convert the model."""

    def begin(make: Any) -> list[Any]:
        plain = run.plain()
        optimizers = [make(plain.parameters())]
        run.model = run.call = run.converted(plain)
        return optimizers

    run.begin(begin if run.is_library else None)
    run.train()


for name, overflows in {"GradScaler": False, "GradScaler, an overflow": True}.items():
    add = situation(name, LOOP, exceptions={"updates in backward": KNOWN_LATE})
    add(functools.partial(TrainingRun.train_scaled, overflows=overflows))


@situation(
    "a recipe set between forward and backward",
    LOOP,
    exceptions={
        "checkpoint_in_fp8": Documented(
            "modules.md#what-checkpointed-layers-keep", "a region is computed again by the recipe that is set then"
        ),
        HEADS_LOSS: Sound(15, "in high precision the loss's factor multiplies products, not the gradient of logits"),
        "experts": Sound(20, "in high precision products are a BLAS's, whose sums depend on its number of rows"),
    },
)
def recipe_between(run: TrainingRun) -> None:
    """Set a recipe between forward and backward; the graph keeps the one that it was built with."""
    changes = iter([None, HIGH, run.feature.recipe, None])

    def backward(y: Tensor) -> None:
        if (recipe := next(changes)) is not None:
            run.set_recipe(recipe)
        run.loss(y).backward()

    run.train(4, backward=backward)


@situation("another default dtype and device", LOOP)
def other_defaults(run: TrainingRun) -> None:
    """Lightning's bf16-true sets the dtype in every step; users set the device."""
    usual = torch.get_default_dtype()
    with torch.device("meta" if run.is_library else "cpu"):
        torch.set_default_dtype(torch.bfloat16 if run.is_library else usual)
        try:
            run.train()
        finally:
            torch.set_default_dtype(usual)


@situation("octavo.using between steps", LOOP, grows=("input's gradient in", "output in"))  # inputs of 4 times the size
def using(run: TrainingRun) -> None:
    """A gradient of the input under the same recipe, and an output in high precision; the history sees neither."""
    for step in range(3):
        run.train(1)
        with run.using(run.feature.recipe):
            x = (4 * run.data(step, 5)).requires_grad_()
            run.note(f"input's gradient in {step}", torch.autograd.grad(run.loss(run.call(x)), x)[0])
        with run.using(HIGH), torch.no_grad():
            run.note(f"output in {step}", run.call(run.data(step, 6)))


READS = "What several layers read, and what is fused in place"
KEPT = Refused(RuntimeError, "inplace operation", "backward reads that tensor, and torch sees the write")
ONCE = Sound(8, "what lies between the layers is rounded once, to codes; a twin's rounds it to bfloat16 before")


@situation(
    "a tensor written between two reads",
    READS,
    exceptions={("rowwise_with_gw_hp", "fused modules", *KNOWN, *LLAMA, *LORA): KEPT},
)
def written_between(run: TrainingRun) -> None:
    """Write a tensor between the reads of both parts."""

    def call(x: Tensor) -> Tensor:
        read = x + 0
        first = run.model[0](read)
        # torch's own product in float64 reads the tensor in backward
        return first + run.model[1](3 * read if run.role == "float64" else read.mul_(3))

    run.train(call=call)


@situation("views of one storage", READS)
def views(run: TrainingRun) -> None:
    """Halves of a tensor, all of it by another view, and itself."""

    def call(x: Tensor) -> Tensor:
        read, half = x + 0, len(x) // 2
        first, second = run.model
        return torch.cat([first(read[:half]), second(read[half:])]) + second(read.view_as(read)) - first(read)

    run.train(call=call)


@situation("autocast", READS, exceptions={("fused modules", "experts", *KNOWN, *LLAMA): ONCE})
def autocast(run: TrainingRun) -> None:
    """Compute under autocast to bfloat16; each layer casts its own input."""

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=run.role != "float64"):
            return run.model(x)

    run.train(call=call)


@situation(
    "hooks that return another tensor",
    READS,
    exceptions={"fused modules": Sound(8, "parts run one after the other, the norm by torch's own kernel")},
)
def hooked(run: TrainingRun) -> None:
    """Multiply the input by a hook before every second linear layer."""
    layers = [one for one in run.model.modules() if isinstance(one, nn.Linear | octavo.nn.Linear | TwinLinear)]
    for layer in layers[::2]:
        layer.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    run.train()


@situation("two threads", READS)
def two_threads(run: TrainingRun) -> None:
    """Compute a forward of the same tensor in each thread; then one backward of both."""

    def call(x: Tensor) -> Tensor:
        read = x.detach() + 0
        with thread_pool(2) as pool:
            first, second = (pool.map if run.is_library else map)(run.model, [read, read])
        return first + 2 * second

    run.train(call=call)


@situation(
    "feed-forwards and norms fused",
    READS,
    exceptions={
        "FP8 moments": ONCE,
        (*LORA, "dynamic_with_output_hp"): Documented(
            "modules.md#models-as-they-come",
            "a last layer that is adapted, or has `output` in high precision, runs by itself",
        ),
    },
)
def fused(run: TrainingRun) -> None:
    """The models of convert(fuse=True) in the place of each feature's."""
    torch.manual_seed(0)
    model = run.feature.convert(nn.Sequential(KnownPart(), KnownPart()).to(run.feature.dtype))
    octavo.convert(model, run.feature.recipe, every_layer, fuse=True)
    run.take(model if run.is_library else twin_of(model, exact=run.role == "float64"))
    run.train()


# --- recomputation ----------------------------------------------------------------------------------------------------


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "matmul" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed(run: TrainingRun, **options: Any) -> None:
    def call(x: Tensor) -> Tensor:
        return functools.reduce(lambda y, part: checkpoint(part, y, **options), run.model, x)

    run.train(micro=2, call=call if run.is_library else None)


def _shared(run: TrainingRun, reentrant: bool) -> None:
    """Recomputed after another call's backward has committed."""
    part = run.model[0]
    call = functools.partial(checkpoint, part, use_reentrant=reentrant) if run.is_library else part
    run.train(3, call=_often(run, call, 3))


def _two_ahead(run: TrainingRun, recompute: bool) -> None:
    """Compute two forwards, then two backwards; each forward may be a region."""
    run.begin()
    for step in range(3):
        call = run.call
        if recompute and run.is_library:
            call = functools.partial(checkpoint, run.model, use_reentrant=False)
        (a, first), (b, second) = (run.forward(f"{step}.{n}", run.data(step, n), call) for n in range(2))
        with run.accumulating(more=True):
            run.loss(first).backward()
        run.loss(second).backward()
        run.note(f"input's gradient {step}.0", a.grad)
        run.note(f"input's gradient {step}.1", b.grad)
        run.round()
        run.update()


ONCE_EACH = Documented(
    "#recomputation",
    "each region's backward is a pass of its own, and a region that is computed again reads the scales that the one "
    "after it wrote; `use_reentrant=False`",
)
READS_NEXT = Documented(
    "#recomputation",
    "the second backward computes again with the scales that the first one wrote; no checkpointing there, or a dynamic "
    "recipe",
)
REGION_BY_REGION = {
    DELAYED: ONCE_EACH,
    "updates in backward": Refused(UnsupportedOpError, "use_reentrant=False", "gradients come region by region"),
    "FP8 gradients": Refused(UnsupportedOpError, r"accumulate\(\)", "they are complete region by region"),
}
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _keep_products)
for name, program, options, exceptions in (
    ("checkpointing", _recomputed, {"use_reentrant": False}, {}),
    ("reentrant checkpointing", _recomputed, {"use_reentrant": True}, {}),
    ("one module in three checkpoints", _shared, {"reentrant": False}, {}),
    ("one module in three reentrant checkpoints", _shared, {"reentrant": True}, REGION_BY_REGION),
    ("two forwards, then two backwards", _two_ahead, {"recompute": False}, {}),
    ("the same, checkpointed", _two_ahead, {"recompute": True}, {DELAYED: READS_NEXT}),
    ("selective checkpointing", _recomputed, {"use_reentrant": False, "context_fn": SELECTIVE}, {}),
):
    situation(name, MEMORY, exceptions=exceptions)(functools.partial(program, **options))


# --- compilers --------------------------------------------------------------------------------------------------------


def _compiled(run: TrainingRun, tokens: tuple[int, ...] = (16, 16, 16), **options: Any) -> None:
    torch._dynamo.reset()
    if run.is_library:
        run.call = torch.compile(run.model, **options)
    for run.tokens in tokens:
        run.train(1)


ROUNDED = Sound(10, "inductor's fused sums are rounded otherwise")
IN_EAGER = functools.partial(_compiled, backend="aot_eager")
BREAKS = Refused(
    RuntimeError, "in checkpoint_in_fp8", "the graph breaks there: `fullgraph=False`, or `block.compile()`"
)
situation("torch.compile", COMPILED, exceptions={"checkpoint_in_fp8": BREAKS})(
    functools.partial(IN_EAGER, fullgraph=True)
)
situation("torch.compile(dynamic=True)", COMPILED)(functools.partial(IN_EAGER, tokens=(16, 24, 40), dynamic=True))
situation("torch.compile with inductor", COMPILED, verdict=ROUNDED, slow=True)(_compiled)


@situation("torch.export", COMPILED)
def exported(run: TrainingRun) -> None:
    """The model in evaluation, after training."""
    run.train(2)
    with evaluating(run), torch.no_grad():
        x = run.data(7)
        call = torch.export.export(run.model, (x,)).module() if run.is_library else run.call
        run.note("output exported", call(x))


@situation(
    "torch.jit.trace",
    COMPILED,
    exceptions={
        (*STORED, *LORA): Refused(UnsupportedOpError, "torch.export", "a file of TorchScript holds no weight in FP8")
    },
)
def traced(run: TrainingRun) -> None:
    """The model in evaluation, after training, saved and loaded; gradients are on, as users leave them."""
    run.train(2)
    x = run.data(7)
    with evaluating(run), warnings.catch_warnings(action="ignore", category=torch.jit.TracerWarning):
        call = run.call
        if run.is_library:
            file = io.BytesIO()
            torch.jit.save(torch.jit.trace(run.model, x), file)
            file.seek(0)
            call = torch.jit.load(file)
        run.note("output traced", call(x))
        larger = 1 if run.feature.has_history else 4  # than an amax that a trace may hold, or a history knows
        run.note("output of another batch", call(larger * run.data(8)))


@situation(
    "torch.jit.script",
    COMPILED,
    verdict=Refused(UnsupportedOpError, r"torch\.jit\.trace", "TorchScript compiles no autograd function in Python"),
)
def scripted(run: TrainingRun) -> None:
    """Script the model as it is."""
    run.note("output scripted", torch.jit.script(run.model)(run.data(7)))


# --- copies and files -------------------------------------------------------------------------------------------------

COPIES, FAULTS, WRITES = "Copies and files", "Faults", "Writes by hand"
FROM_CODES = Sound(15, "a state dict holds codes, so masters begin as these read")


@situation("deepcopy", COPIES)
def deep_copy(run: TrainingRun) -> None:
    """Train, and go on with a copy and a new optimizer; a twin has a new optimizer only."""
    run.train(2)
    run.take(copy.deepcopy(run.model) if run.is_library else run.model)
    run.train(2)


@situation("a pickled module", COPIES)
def pickled(run: TrainingRun) -> None:
    """Save the whole module by torch.save, and load it, before training."""
    if run.is_library:
        file = io.BytesIO()
        torch.save(run.model, file)
        file.seek(0)
        run.take(torch.load(file, weights_only=False))
    run.train()


def _load(run: TrainingRun, assign: bool) -> None:
    """Go back to a saved state after a step; a twin takes no such step."""
    if run.is_library:
        state = copy.deepcopy(run.model.state_dict())
        run.train(1, seed=9)
        run.model.load_state_dict(state, assign=assign)
        run.step_number, run.trace = 0, {}
        run.take(run.model)
    run.train()


for name, assign in {"load_state_dict": False, "load_state_dict(assign=True)": True}.items():
    situation(name, COPIES, exceptions={STORED: FROM_CODES})(functools.partial(_load, assign=assign))


@situation(
    "an exponential moving average",
    COPIES,
    exceptions={(*STORED, *LORA): Refused(UnsupportedOpError, r"dequantize", "codes and scales average to no weight")},
)
def averaged(run: TrainingRun) -> None:
    """Evaluate torch's AveragedModel at the end."""
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        run.train(1)
        average.update_parameters(run.model)
    with torch.no_grad():
        run.note("output of the average", average.eval()(run.data(7)))


@situation("meta, to_empty, reset_parameters", COPIES)
def from_meta(run: TrainingRun) -> None:
    """A model without memory, then with, then initialised."""

    def initialised(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    if run.is_library:
        with torch.device("meta"):
            model = run.converted(run.plain())
        run.take(initialised(model.to_empty(device="cpu")))
    else:
        run.take(run.converted(initialised(run.plain())))
    run.train()


# --- faults -----------------------------------------------------------------------------------------------------------


def _fail(*_: Any) -> None:
    raise MemoryError("out of memory")


@situation("an exception in forward", FAULTS)
def fails_in_forward(run: TrainingRun) -> None:
    """Fail after the first part; then go on with the next batch."""
    run.train(1)
    if run.is_library:
        handle = run.model[0].register_forward_hook(_fail)
        with contextlib.suppress(MemoryError):
            run.call(run.data(9))
        handle.remove()
        run.model.zero_grad()
    run.train(2)


@situation(
    "an exception in backward",
    FAULTS,
    exceptions={"updates in backward": Sound(10, "weights whose gradients came before the fault have been updated")},
)
def fails_in_backward(run: TrainingRun) -> None:
    """Fail after the second part's backward, whose history rolls; then zero_grad, and on with the next batch."""
    run.train(1)

    def between(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        x = args[0].view_as(args[0])
        x.register_hook(_fail)
        return (x,)

    handle = run.model[1].register_forward_pre_hook(between)
    with contextlib.suppress(MemoryError):
        run.loss(run.call(run.data(9))).backward()
    handle.remove()
    run.model.zero_grad()
    run.train(2)


@situation(
    "a batch with a NaN",
    FAULTS,
    exceptions={
        "updates in backward": Documented("weights.md#updates-during-backward", "its gradients have been used")
    },
)
def not_a_number(run: TrainingRun) -> None:
    """Drop the gradients of a batch that has a NaN in one row, as a loop that looks at the loss does."""
    run.train(1)
    x = run.data(9)
    x[3, 5] = torch.nan
    run.loss(run.call(x)).backward()
    run.model.zero_grad()
    run.train(2)


# --- writes by hand ---------------------------------------------------------------------------------------------------

NOT_BY_HAND = {
    STORED: Refused(
        UnsupportedOpError, r"\.copy_\(values\)", "a weight in FP8 is written as codes and scales together"
    ),
    "FP8 gradients": Refused(UnsupportedOpError, r"\.grad\.dequantize", "a gradient in FP8 is not read by itself"),
    "updates in backward": Refused(UnsupportedOpError, "update_in_backward", "the gradient was used in backward"),
}
UNSEEN = Documented(
    "#writes-by-hand",
    "what `cast()` wrote last is what counts: call it, or `octavo.nn.invalidate(model)`, after the write; "
    "after any write, where a compiled or captured graph reads it",
)


SATURATES = Documented(
    "limits.md",
    "no counter moves: the next forward in training casts by the old weight's history; `octavo.nn.invalidate`",
)


def _by_data(parameter: Any, change: Tensor) -> None:
    parameter.data.sub_(change)


def _by_foreach(parameter: Any, change: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_sub_([parameter], [change])


def _invalidate(run: TrainingRun) -> None:
    if run.is_library:
        octavo.nn.invalidate(run.model)
    run.wrote()


def _descend(run: TrainingRun, write: Any, seen: Callable[[TrainingRun], None] = lambda run: None) -> None:
    """Plain descent by hand, without an optimizer; then twice the weights, after one has stepped."""
    run.train(1)
    for seed in (5, 6):
        run.gradients(seed=seed)
        for parameter in run.with_gradients():
            write(parameter, 0.05 * parameter.grad)
        run.model.zero_grad()
        seen(run)
    run.train(1)
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            write(parameter, -parameter.detach())
    run.model.zero_grad()
    seen(run)
    run.train(2)


for name, options, exceptions in (
    ("descent through .data", {"write": _by_data}, {"KeptWeights": UNSEEN, DELAYED: SATURATES}),
    ("descent through .data, octavo.nn.invalidate", {"write": _by_data, "seen": _invalidate}, {}),
    ("descent through torch._foreach_", {"write": _by_foreach, "seen": TrainingRun.wrote}, {}),
):
    # twice the weights make all else larger, at most 30 times; gradients grow again once nothing is clipped
    larger = "output 2", "input's gradient 2", "input's gradient 3"
    add = situation(name, WRITES, exceptions=NOT_BY_HAND | exceptions, grows=larger)
    add(functools.partial(_descend, **options))


@situation(
    "DeepSpeed ZeRO-3, emulated",
    WRITES,
    exceptions={
        (*STORED, *LORA): Refused(UnsupportedOpError, "FSDP2", "a weight is freed by itself, codes have scales"),
        "KeptWeights": Refused(ValueError, "shard can't be kept", "the weight is freed between forward and backward"),
    },
)
def zero3(run: TrainingRun) -> None:
    """Free and gather weights as tests/support/freed.py describes; the step and the trace have whole parameters."""
    if not run.is_library:
        return run.train()
    parameters, hooks = Zero3(run.model), list[Any]()

    def before_update(*_: Any) -> None:
        parameters.gather()
        parameters.writes_back = True

    def before_step() -> None:  # a recorded step runs forwards, with weights that it moves, before the update
        parameters.gather()
        parameters.writes_back = False
        if not hooks:
            hooks.extend(each.register_step_pre_hook(before_update) for each in run.optimizers)

    run.train(complete=before_step)


@situation(
    "fewer rows through .data",
    WRITES,
    exceptions={(*STORED, *LORA): Refused(UnsupportedOpError, r"dequantize", "codes and scales are cut together")},
    grows=("input's gradient 2",),  # of a mean over fewer elements
)
def fewer_rows(run: TrainingRun) -> None:
    """The last layer loses half its rows, and has a new optimizer."""
    run.train(2)
    for parameter, rows in run.feature.half(run.model):
        parameter.data = parameter.data[rows].clone()
    run.take(run.model)
    run.train(2)
