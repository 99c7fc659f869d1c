"""Whether FP8 pays for a model on one device: tables of the steps, then what to do, a sentence for each decision.

``describe_rates`` is what ``octavo info --measure`` says of a device alone: its rates, and which layers gain by them.
``describe_plan`` and ``change_that_fits`` are the text of ``octavo plan`` without ``--gpus``, below its first line:

| sentence | is there | function |
|---|---|---|
| "All of these fit", "Too large: ...", "None of these fits" | where the memory is known | ``_whether_steps_fit`` |
| "Don't: ...", or "... is the fastest" (in eager, compiled) | if any fits | ``_what_to_choose`` |
| "... of bf16's time with the same fusions" | with ``--fuse`` | ``_beside_fused_bf16`` |
| "leave out", "no layer is faster than in bf16" | by ``Estimate.slower`` | ``_layers_to_leave_out`` |
| "The smallest change that fits" | if none fits | ``change_that_fits`` |
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from octavo import recipes
from octavo.cost.estimate import FUSED_BF16, Estimate, LayerTime
from octavo.cost.from_flags import optimizer_of, tokens_of
from octavo.cost.rates import ATTENTION, ATTENTION_SOURCE, IN_BF16, KIND_NAMES, PlanError, Rates
from octavo.cost.steps import step_in
from octavo.cost.text import GIB, columns, folded
from octavo.cost.work import COMPARED, LinearWork, work_of
from octavo.scaling.recipe import Recipe

TOKENS = (1024, 4096, 16384)  # sizes of a step that ``pays`` looks at
FEATURES = tuple(1 << power for power in range(14, 7, -1))
WORTH = 0.97  # share of bf16's time, from which on FP8 is not worth what it costs in quality and care
OUTSTANDING_MB = 64  # MiB of gradients that wait for an update in backward, as update_in_backward has by default


class Column(NamedTuple):
    """A table's column: its heading, a function (step, bf16's step) -> number, and the heading of its group."""

    heading: str
    number: Callable[[Estimate, Estimate], float]
    group: str = ""


TIMES = (
    Column("products", lambda step, bf16: 1e3 * step.products),
    Column("casts", lambda step, bf16: 1e3 * step.casts),
    Column("optimizer", lambda step, bf16: 1e3 * step.optimizer),
    Column("other", lambda step, bf16: 1e3 * (step.other + step.waits), "eager"),
    Column("total", lambda step, bf16: 1e3 * step.total),
    Column("of bf16", lambda step, bf16: step.total / bf16.total),
    Column("other", lambda step, bf16: 1e3 * step.other_compiled, "compiled"),
    Column("total", lambda step, bf16: 1e3 * step.compiled),
    Column("of bf16", lambda step, bf16: step.compiled / bf16.compiled),
)
MEMORY = (
    Column("weights", lambda step, bf16: step.memory.weights / GIB),
    Column("masters", lambda step, bf16: step.memory.masters / GIB),
    Column("moments", lambda step, bf16: step.memory.moments / GIB),
    Column("gradients", lambda step, bf16: step.memory.gradients / GIB),
    Column("activations", lambda step, bf16: (step.memory.activations or 0) / GIB),
    Column("peak", lambda step, bf16: step.peak / GIB),
    Column("of bf16", lambda step, bf16: step.peak / bf16.peak),
)


def describe_plan(estimates: Sequence[Estimate], rates: Rates) -> str:
    """Return a text of the predicted steps, of which the first is without FP8, and of what to do."""
    bf16 = estimates[0]
    steps = [step for step in estimates[1:] if step.name != FUSED_BF16]
    fitting = [step for step in steps if fits([step], rates)]
    choices = fitting or steps or [bf16]
    lines = [f"by the rates of {rates.device} ({rates.source})", *describe_attention(rates), "", tables(estimates), ""]
    lines += _whether_steps_fit(estimates, rates)
    if fits(estimates, rates):
        lines += _what_to_choose(bf16, choices, recipe_fits=bool(fitting))
    lines += _beside_fused_bf16(estimates, min(choices, key=lambda step: step.total))
    lines += _layers_to_leave_out(steps)
    return "\n".join(lines)


def fits(estimates: Iterable[Estimate], rates: Rates) -> bool:
    """Return whether any of these steps fits the device's memory, or the memory is unknown."""
    return any(step.peak <= (rates.memory or math.inf) for step in estimates)


def _whether_steps_fit(estimates: Sequence[Estimate], rates: Rates) -> Iterator[str]:
    """Yield the sentence that names the steps too large for the device, if its memory is known."""
    too_large = [step.name for step in estimates if not fits([step], rates)]
    if rates.memory:
        room = f"the {rates.memory / GIB:.0f} GiB of {rates.device}"
        if not too_large:
            yield f"All of these steps fit {room}."
        elif len(too_large) < len(estimates):
            yield f"Too large for {room}: {'; '.join(too_large)}."
        else:
            least = min(step.peak for step in estimates) / GIB
            yield f"None of these steps fits {room}: the smallest needs {least:,.0f} GiB."


def _what_to_choose(bf16: Estimate, steps: Sequence[Estimate], recipe_fits: bool) -> Iterator[str]:
    """Yield that FP8 gains too little and why, or how fast the best recipe is, or the best in eager and compiled."""
    eager, compiled = min(steps, key=lambda step: step.total), min(steps, key=lambda step: step.compiled)
    if min(eager.total / bf16.total, compiled.compiled / bf16.compiled) >= WORTH:
        yield f"Don't: no recipe takes less than {WORTH:.0%} of bf16's time here; {_why_not(bf16, eager)}."
    elif recipe_fits:
        for where, step in [("", eager)] if eager is compiled else [(" in eager", eager), (" compiled", compiled)]:
            share, share_compiled = step.total / bf16.total, step.compiled / bf16.compiled
            shares = f"{share:.2f} of bf16's time in eager, {share_compiled:.2f} compiled"
            yield f"{step.name} is the fastest{where}: {shares}."


def _why_not(bf16: Estimate, best: Estimate) -> str:
    """Return the reason why FP8 does not pay."""
    if bf16.products < 0.3 * bf16.total:
        return f"products are only {bf16.products / bf16.total:.0%} of the step, and the rest is not made faster"
    if best.products >= bf16.products:
        return "this device's FP8 products are no faster than its bf16 ones"
    return f"casts take {best.casts / (bf16.products - best.products):.0%} of what the products gain"


def _beside_fused_bf16(estimates: Sequence[Estimate], best: Estimate) -> Iterator[str]:
    """Yield how the best recipe compares with bf16 with the same fusions, if that is one of the steps."""
    for step in estimates:
        if step.name == FUSED_BF16:
            share = f"{best.total / step.total:.2f} of bf16's time with the same fusions"
            yield f"{best.name} takes {share}, a kernel each as Liger-Kernel computes them."


def _layers_to_leave_out(steps: Sequence[Estimate]) -> Iterator[str]:
    """Yield for each recipe the layers that are no faster than in bf16; together the recipes where none is faster."""
    for step in steps:
        if step.slower and len(step.slower) < len(step.layers):
            yield f"{step.name}: leave out, as fast in bf16 or faster: {_by_shape(step.slower)}"
    if never_faster := [step for step in steps if step.slower and len(step.slower) == len(step.layers)]:
        layers = _by_shape(never_faster[0].slower)
        yield f"{', '.join(step.name for step in never_faster)}: no layer is faster than in bf16: {layers}"


def _by_shape(layers: Sequence[LayerTime]) -> str:
    """Return a text of layers by shape: how many have it, and the first one's name."""
    counts = Counter(layer.work.shape for layer in layers)
    names = {layer.work.shape: layer.work.name for layer in reversed(layers)}
    return ", ".join(f"{count} of {shape} ({names[shape]})" for shape, count in counts.items())


def tables(estimates: Sequence[Estimate]) -> str:
    """Return tables of the predicted steps, of which the first is without FP8: times, memory, activations."""
    waits = ", ".join(f"{1e3 * step.waits:.2f} in {step.name}" for step in estimates if step.waits >= 5e-6)
    lines = [folded(_rows("ms a step", TIMES, estimates))]
    lines += [f"In eager the column other includes waits for the host, in ms: {waits}."] * bool(waits)
    return "\n".join([*lines, "", folded(_rows("GiB", MEMORY, estimates)), "", folded(_activations(estimates))])


def _rows(title: str, columns: Sequence[Column], estimates: Sequence[Estimate]) -> list[list[str]]:
    """Return a table's rows: the headings of groups, if there are any, the title and columns' headings, each step's."""
    groups = ["", *(column.group for column in columns)]
    rows = [[title, *(column.heading for column in columns)]]
    rows += [[step.name, *(f"{column.number(step, estimates[0]):.2f}" for column in columns)] for step in estimates]
    return [groups, *rows] if any(groups) else rows


def _activations(estimates: Sequence[Estimate]) -> list[list[str]]:
    """Return the rows of GiB that forward saves for backward, a kind a row, a step a column."""
    rows = [["GiB of activations", *(step.name for step in estimates)]]
    for kind in dict.fromkeys(kind for step in estimates for kind in step.memory.saved or ()):
        sizes = [(step.memory.saved or {}).get(kind, 0) / GIB for step in estimates]
        if any(sizes):
            rows.append([kind, *(f"{size:.2f}" for size in sizes)])
    return rows


class SmallerStep(NamedTuple):
    """Flags that make a step smaller, its tokens with them, and the arguments of ``step_in`` that they change."""

    flags: str
    tokens: int
    settings: dict[str, Any]


def changes(
    model: nn.Module, state: Mapping[str, Any], tokens: int, context: int, head: str | None = None
) -> Iterator[SmallerStep]:
    """Yield the changes to try for a step of so many tokens, first those that change least.

    They are fused operations, fewer sequences at a time, then moments, masters, weights and updates in FP8.

    Args:
        state: the arguments of ``optimizer_of``, where a change is one of these.
        head: the recipe of ``--head``, which is left out last: with some recipes a weight can't be stored in FP8.
    """
    yield SmallerStep("--fuse", tokens, {"fuse": True})
    fewer = [context << power for power in range(tokens.bit_length()) if context << power < tokens]
    for count in reversed(fewer):
        yield SmallerStep(f"--tokens {count}, with as many more micro-batches", count, {})
    compact = {**state, "moments": "fp8", "master": "split24"}
    yield SmallerStep("--moments fp8 --master split24", tokens, {"optimizer": optimizer_of(model, **compact)})
    in_fp8 = {**state, "moments": "fp8", "master": "split16", "outstanding": OUTSTANDING_MB << 20}
    flags = f"--weight-storage fp8 --moments fp8 --master split16 --update-in-backward {OUTSTANDING_MB}MB"
    settings: dict[str, Any] = {"optimizer": optimizer_of(model, **in_fp8), "weight_storage": "fp8"}
    yield SmallerStep(flags, tokens, settings)
    flags, settings = f"{flags} --fuse --tokens {context}", settings | {"fuse": True}
    yield SmallerStep(flags, context, settings)
    if head:
        yield SmallerStep(f"{flags}, without --head {head}", context, settings | {"head": None})


def change_that_fits(
    model: nn.Module, inputs: tuple[Tensor], rates: Rates, state: Mapping[str, Any], **settings: Any
) -> str:
    """Return the flags that bring a step which is too large into the device's memory: the first that suffice.

    Args:
        state: as for ``changes``.
        settings: other arguments of ``step_in``, with the optimizer of the step.
    """
    name = "delayed"
    context = inputs[0].shape[1]
    work = cache(lambda tokens: work_of(model, tokens_of(tokens, context)))
    for change in changes(model, state, inputs[0].numel(), context, settings.get("head")):
        options = {**settings, **change.settings}
        try:
            step = step_in(name, model, tokens_of(change.tokens, context), rates, work(change.tokens), **options)
        except PlanError:  # a head whose output is not in FP8 can't be stored so
            continue
        planned = change
        size = f"{step.peak / GIB:,.0f} GiB"
        if fits([step], rates):
            return f"The smallest change that fits: {change.flags}. {name} takes {size} then."
    devices = 1 << math.ceil(math.log2(step.peak / rates.memory))
    return f"Not even {planned.flags} is enough ({size}). Plan for several devices: --gpus {devices} or more."


def pays(recipe: Recipe, rates: Rates) -> Mapping[int, int | None]:
    """Return {number of tokens: features (in and out) from which on a layer is faster in FP8, or None: never}."""

    def is_faster(tokens: int, size: int) -> bool:
        work = LinearWork("", tokens, size, size, True, True)
        return sum(work.seconds(recipe, rates)) < WORTH * work.seconds(recipes.high_precision(), rates)[0]

    return {tokens: min(itertools.takewhile(partial(is_faster, tokens), FEATURES), default=None) for tokens in TOKENS}


def describe_rates(rates: Rates) -> str:
    """Return a text of all rates, and of the sizes at which FP8 pays by them."""
    copy_and_launch = f"copy {rates.copy / 1e12:.3g} TB/s, a launch {rates.launch * 1e6:.1f} us"
    lines = [f"{rates.device} ({rates.source})", copy_and_launch, ""]
    sizes = [flop for flop, _ in rates.products[IN_BF16]]
    table = [["products, TFLOP/s", *(f"{flop / 1e9:.3g} GFLOP" if flop > 1 else "any size" for flop in sizes)]]
    table += [[name, *(f"{rate / 1e12:.3g}" for _, rate in rates.products[kind])] for kind, name in KIND_NAMES.items()]
    lines += [columns(table), "", *describe_attention(rates)]
    lines += ["", "a layer's step is faster in FP8 than in bf16"]
    for name in COMPARED:
        thresholds = [
            f"at {tokens} tokens {'never' if size is None else f'from {size} features on'}"
            for tokens, size in pays(getattr(recipes, name)(), rates).items()
        ]
        lines.append(f"  {name:<10} {', '.join(thresholds)}")
    return "\n".join(lines)


def describe_attention(rates: Rates) -> list[str]:
    """Return a line that says whose attention the rates have, how fast it is, and where that is published."""
    sizes = " and ".join(f"{rate / 1e12:.3g} TFLOP/s with heads of {size}" for size, rate in rates.attention.items())
    kernels = [kernel for kernel, published in ATTENTION.items() if published == rates.attention]
    return [f"causal attention by {kernel}: {sizes} (published: {ATTENTION_SOURCE})" for kernel in kernels]
