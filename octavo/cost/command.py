"""What ``octavo plan`` and ``octavo info --measure`` print: tables of rates and of predicted steps, and what to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.cost.estimate import Estimate, LayerTime, LinearWork
from octavo.cost.rates import FORMS, HIGH_PRECISION, PlanError, Rates
from octavo.nn.saved import KINDS
from octavo.recipes import high_precision
from octavo.scaling.recipe import Recipe

RECIPES = {name: getattr(recipes, name) for name in ("dynamic", "delayed", "rowwise", "blockwise", "mx")}
TOKENS = (1024, 4096, 16384)  # sizes of a step that ``pays`` looks at
FEATURES = tuple(1 << power for power in range(8, 15))
WORTH = 0.97  # share of bf16's time, from which on FP8 is not worth what it costs in quality and care
GIB = 1 << 30


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as columns, right-aligned except the first."""
    rows = list(rows)
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in rows)


def pays(recipe: Recipe, rates: Rates) -> Mapping[int, int | None]:
    """For each number of tokens, the features (in and out) from which on a layer is faster in FP8; None: never."""
    found: dict[int, int | None] = {}
    for tokens in TOKENS:
        found[tokens] = None
        for size in reversed(FEATURES):
            work = LinearWork("", tokens, size, size, True, True)
            if sum(work.seconds(recipe, rates)) >= WORTH * work.seconds(high_precision(), rates)[0]:
                break
            found[tokens] = size
    return found


def describe_rates(rates: Rates) -> str:
    """All rates, and where FP8 pays by them."""
    lines = [
        f"{rates.device} ({rates.source})",
        f"copy {rates.copy / 1e12:.3g} TB/s, a launch {rates.launch * 1e6:.1f} us",
        "",
    ]
    kinds = (HIGH_PRECISION, *FORMS)
    sizes = [flop for flop, _ in rates.products[HIGH_PRECISION]]
    table = [["products, TFLOP/s", *(f"{flop / 1e9:.3g} GFLOP" if flop > 1 else "any size" for flop in sizes)]]
    table += [[_called(kind), *(f"{rate / 1e12:.3g}" for _, rate in rates.products[kind])] for kind in kinds]
    lines += [columns(table), "", "a layer's step is faster in FP8 than in bf16"]
    for name, make in RECIPES.items():
        ways = [
            f"at {tokens} tokens {'never' if size is None else f'from {size} features on'}"
            for tokens, size in pays(make(), rates).items()
        ]
        lines.append(f"  {name:<10} {', '.join(ways)}")
    return "\n".join(lines)


def _called(kind: str) -> str:
    words = {"tensor": "a scale each", "row": "a scale a row", "block": "a scale in 128", "mx": "a scale in 32"}
    return f"FP8, {words[kind]}" if kind in words else kind


def describe_plan(estimates: Sequence[Estimate], rates: Rates) -> str:
    """The predicted steps, of which the first is without FP8, and what to do."""
    first, *others = estimates
    eager, compiled = ((f"other, {way}", f"total, {way}", "of bf16") for way in ("eager", "compiled"))
    times = [["ms a step", "products", "casts", "optimizer", *eager, *compiled]]
    sizes = [["GiB", "weights", "masters", "moments", "gradients", "activations", "total", "of bf16"]]
    for found in estimates:
        line = [found.name, *(f"{1e3 * seconds:.2f}" for seconds in (found.products, found.casts, found.optimizer))]
        for other, total, base in (
            (found.other, found.total, first.total),
            (found.fused, found.compiled, first.compiled),
        ):
            line += [f"{1e3 * other:.2f}", f"{1e3 * total:.2f}", f"{total / base:.2f}"]
        times.append(line)
        memory = found.memory
        kept = memory.weights, memory.masters, memory.moments, memory.gradients, memory.activations or 0, memory.total
        share = f"{memory.total / first.memory.total:.2f}"
        sizes.append([found.name, *(f"{size / GIB:.2f}" for size in kept), share])
    lines = [f"by the rates of {rates.device} ({rates.source})", "", columns(times), "", columns(sizes), ""]
    saved = [["GiB of activations", *(found.name for found in estimates)]]
    for kind in KINDS:
        of_kind = [(found.memory.saved or {}).get(kind, 0) / GIB for found in estimates]
        saved += [[kind, *(f"{size:.2f}" for size in of_kind)]] * any(of_kind)
    lines += [columns(saved), ""]
    room = rates.memory or math.inf
    too_large = [found.name for found in estimates if found.memory.total > room]
    if rates.memory:
        what = f"step in {', '.join(too_large)} does not fit" if too_large else "step in any of them fits"
        lines.append(f"A {what} the {room / GIB:.0f} GiB of {rates.device}.")
    fitting = [found for found in others if found.memory.total <= room]
    best = min(fitting or others, key=lambda found: found.total, default=first)
    shares = best.total / first.total, best.compiled / first.compiled
    if not fitting and first.memory.total > room:
        least = min(found.memory.total for found in estimates) / GIB
        lines.append(f"None fits one device: it needs {least:,.0f} GiB at least. Plan for several: --gpus N.")
    elif min(shares) >= WORTH:
        lines.append(f"Don't: no recipe takes less than {WORTH:.0%} of bf16's time here; {_why(first, best)}.")
    else:
        lines.append(f"{best.name} is the fastest: {shares[0]:.2f} of bf16's time in eager, {shares[1]:.2f} compiled.")
    for found in others:
        if found.slower and len(found.slower) < len(found.layers):
            lines.append(f"{found.name}: leave out, as fast in bf16 or faster: {_grouped(found.slower)}")
    none = [found.name for found in others if len(found.slower) == len(found.layers)]
    lines += [f"no layer is faster than in bf16: {', '.join(none)}"] * bool(none)
    return "\n".join(lines)


def _why(bf16: Estimate, best: Estimate) -> str:
    """Why FP8 does not pay."""
    if bf16.products < 0.3 * bf16.total:
        return f"products are only {bf16.products / bf16.total:.0%} of the step, and the rest is not made faster"
    if best.products >= bf16.products:
        return "this device's FP8 products are no faster than its bf16 ones"
    return f"casts take {best.casts / (bf16.products - best.products):.0%} of what the products gain"


def _grouped(layers: Sequence[LayerTime]) -> str:
    """Layers by shape: how many have it, and the first one's name."""
    counts = Counter(layer.work.shape for layer in layers)
    names = {layer.work.shape: layer.work.name for layer in reversed(layers)}
    return ", ".join(f"{count} of {shape} ({names[shape]})" for shape, count in counts.items())


def from_hugging_face(path: Path) -> nn.Module:
    """A causal language model from its configuration file, in bfloat16, without memory.

    Args:
        path: a config.json, or a folder that has one.

    Raises:
        PlanError: without transformers, or for a file that is not such a configuration.
    """
    if not path.exists():  # transformers would look for a model of this name on its hub
        raise PlanError(f"{path} does not exist: give a config.json, or a folder that has one")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise PlanError("a Hugging Face configuration needs transformers: pip install transformers") from error
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(
            f"{path} is no configuration of a causal language model: {str(error).splitlines()[0]}"
        ) from error
    model.config.use_cache = False
    return model


def context_of(model: nn.Module) -> int:
    """The longest sequence of a Hugging Face model, by its configuration.

    Raises:
        PlanError: if the configuration does not say.
    """
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr,operator]
    if not found:
        raise PlanError("the configuration does not say how long a sequence is: give --context")
    return int(found)


def tokens_of(tokens: int | None, context: int) -> tuple[Tensor]:
    """A step's input, [sequences, context], without memory.

    Args:
        tokens: in all; None: as many sequences as 16,384 tokens make, but at least one.
        context: tokens of a sequence.

    Raises:
        PlanError: unless the tokens make one or more whole sequences.
    """
    wanted = TOKENS[-1] if tokens is None else tokens
    whole = max(wanted // context, 1) * context
    if tokens not in (None, whole):
        raise PlanError(f"--tokens {tokens} must be a multiple of the context, {context}, such as {whole}")
    return (torch.empty(whole // context, context, dtype=torch.int64, device="meta"),)


def parameters_of(model: nn.Module) -> str:
    """How many elements its parameters have, as text."""
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.3g} B parameters"
