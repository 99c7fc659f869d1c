"""The text of ``octavo plan`` and ``octavo info --measure``: rates, predicted steps, on a mesh too, and what to do."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo import recipes
from octavo.cost.estimate import FUSED_BF16, Estimate, LayerTime, estimate
from octavo.cost.mesh import BF16, RANKS, Hardware, MeshLayout, Precision, Shapes, Stage, Weight
from octavo.cost.rates import ATTENTION, ATTENTION_SOURCE, HIGH_PRECISION, PRODUCTS, PlanError, Rates
from octavo.cost.work import COMPARED, LinearWork, Work, blocks_of, head_of, on_meta, work_of
from octavo.optim import AdamW, Muon, update_in_backward
from octavo.optim.base import CompactOptimizer
from octavo.recipes import high_precision
from octavo.scaling.recipe import Recipe, RecipeMap

RECIPES = {name: getattr(recipes, name) for name in COMPARED}
TOKENS = (1024, 4096, 16384)  # sizes of a step that ``pays`` looks at
FEATURES = tuple(1 << power for power in range(8, 15))
WORTH = 0.97  # share of bf16's time, from which on FP8 is not worth what it costs in quality and care
GIB = 1 << 30
# how octavo.train.GPT's matrices split; transformers' configurations say it of theirs
OWN_SPLITS = {"attention.qkv": "colwise", "attention.out": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
SOME = 8  # blocks that are traced in place of all
STORED = ("dynamic", "delayed", "blockwise")  # recipes whose weights can live in FP8
WAITING = 64 << 20  # bytes of gradients that wait for an update in backward, as update_in_backward has by default
WIDTH = 100  # characters of a line of a table
WORTH_NAMING = 1.02  # of the speed, from which on a change is worth naming


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of text as columns, right-aligned except the first."""
    rows = list(rows)
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows)


def folded(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns, or as several tables of at most WIDTH that repeat the first column."""

    def between(begin: int, end: int) -> str:
        return columns([row[0], *row[begin:end]] for row in rows)

    tables, begin, count = [], 1, len(rows[0])
    while begin < count:
        wide = (end for end in range(begin + 2, count + 1) if max(map(len, between(begin, end).splitlines())) > WIDTH)
        end = next(wide, count + 1) - 1
        tables.append(between(begin, end))
        begin = end
    return "\n\n".join(tables)


def pays(recipe: Recipe, rates: Rates) -> Mapping[int, int | None]:
    """Return {number of tokens: features (in and out) from which on a layer is faster in FP8, or None: never}."""
    features_by_tokens: dict[int, int | None] = {}
    for tokens in TOKENS:
        features_by_tokens[tokens] = None
        for size in reversed(FEATURES):
            work = LinearWork("", tokens, size, size, True, True)
            if sum(work.seconds(recipe, rates)) >= WORTH * work.seconds(high_precision(), rates)[0]:
                break
            features_by_tokens[tokens] = size
    return features_by_tokens


def describe_rates(rates: Rates) -> str:
    """Return a text of all rates, and of the sizes at which FP8 pays by them."""
    lines = [
        f"{rates.device} ({rates.source})",
        f"copy {rates.copy / 1e12:.3g} TB/s, a launch {rates.launch * 1e6:.1f} us",
        "",
    ]
    sizes = [flop for flop, _ in rates.products[HIGH_PRECISION]]
    table = [["products, TFLOP/s", *(f"{flop / 1e9:.3g} GFLOP" if flop > 1 else "any size" for flop in sizes)]]
    table += [[_called(kind), *(f"{rate / 1e12:.3g}" for _, rate in rates.products[kind])] for kind in PRODUCTS]
    lines += [columns(table), ""]
    lines += _attention(rates)
    lines += ["", "a layer's step is faster in FP8 than in bf16"]
    for name, make in RECIPES.items():
        thresholds = [
            f"at {tokens} tokens {'never' if size is None else f'from {size} features on'}"
            for tokens, size in pays(make(), rates).items()
        ]
        lines.append(f"  {name:<10} {', '.join(thresholds)}")
    return "\n".join(lines)


def _attention(rates: Rates) -> list[str]:
    """Return a line that says whose attention the rates have, how fast it is, and where that is published."""
    sizes = " and ".join(f"{rate / 1e12:.3g} TFLOP/s with heads of {size}" for size, rate in rates.attention.items())
    kernels = [kernel for kernel, published in ATTENTION.items() if published == rates.attention]
    return [f"causal attention by {kernel}: {sizes} (published: {ATTENTION_SOURCE})" for kernel in kernels]


def _called(kind: str) -> str:
    words = {"tensor": "a scale each", "row": "a scale a row", "block": "a scale in 128", "mx": "a scale in 32"}
    words["vector"] = "a scale in 128 of both"
    return f"FP8, {words[kind]}" if kind in words else kind


def step_in(
    name: str,
    model: nn.Module,
    inputs: Sequence[Any],
    rates: Rates,
    work: Work,
    head: str | None = None,
    **options: Any,
) -> Estimate:
    """Return the step in the recipe of this name in RECIPES.

    Args:
        head: the name of a recipe for the layer that computes logits; None: as the others.
        options: other arguments of ``estimate``.
    """
    if head is not None and head_of(work) is None:
        raise PlanError(f"--head {head}: no layer of this model computes logits")
    rules = {} if head is None else {head_of(work).name: getattr(recipes, head)()}  # type: ignore[union-attr]
    step = estimate(model, inputs, RecipeMap(RECIPES[name](), rules), rates, work=work, **options)
    return replace(step, name=name)


def estimates(
    model: nn.Module,
    inputs: Sequence[Any],
    rates: Rates,
    head: str | None = None,
    chunked_loss: bool = False,
    weight_storage: Literal["fp8"] | None = None,
    **options: Any,
) -> list[Estimate]:
    """Return the steps in bf16, with ``fuse`` also in bf16 with the same fusions, and in each of RECIPES.

    Args:
        head: as for ``step_in``.
        chunked_loss, weight_storage: as for ``estimate``, under the recipes; with "fp8" those of STORED.
        options: other arguments of ``estimate``.
    """
    work = work_of(model, inputs)
    bf16_options = [{**options, "fuse": fuse} for fuse in sorted({False, options.get("fuse", False)})]
    steps = [estimate(model, inputs, None, rates, work=work, **fusing) for fusing in bf16_options]
    fp8_options = {**options, "head": head, "chunked_loss": chunked_loss, "weight_storage": weight_storage}
    names = [name for name in RECIPES if weight_storage is None or name in STORED]
    return [*steps, *(step_in(name, model, inputs, rates, work, **fp8_options) for name in names)]


def tables(estimates: Sequence[Estimate]) -> str:
    """Return tables of the predicted steps, of which the first is without FP8: times, memory, activations."""
    first = estimates[0]
    times = [["", "", "", "", "eager", "", "", "compiled", "", ""]]
    times.append(["ms a step", "products", "casts", "optimizer", *("other", "total", "of bf16") * 2])
    sizes = [["GiB", "weights", "masters", "moments", "gradients", "activations", "at a time", "of bf16"]]
    for step in estimates:
        line = [step.name, *(f"{1e3 * seconds:.2f}" for seconds in (step.products, step.casts, step.optimizer))]
        line += [f"{1e3 * (step.other + step.waits):.2f}", f"{1e3 * step.total:.2f}"]
        line += [f"{step.total / first.total:.2f}", f"{1e3 * step.fused:.2f}", f"{1e3 * step.compiled:.2f}"]
        times.append([*line, f"{step.compiled / first.compiled:.2f}"])
        memory = step.memory
        kinds = memory.weights, memory.masters, memory.moments, memory.gradients, memory.activations or 0, step.peak
        share = f"{step.peak / first.peak:.2f}"
        sizes.append([step.name, *(f"{size / GIB:.2f}" for size in kinds), share])
    table_of_saved = [["GiB of activations", *(step.name for step in estimates)]]
    for kind in dict.fromkeys(kind for step in estimates for kind in step.memory.saved or ()):
        of_kind = [(step.memory.saved or {}).get(kind, 0) / GIB for step in estimates]
        table_of_saved += [[kind, *(f"{size:.2f}" for size in of_kind)]] * any(of_kind)
    waits = ", ".join(f"{1e3 * step.waits:.2f} in {step.name}" for step in estimates if step.waits >= 5e-6)
    lines = [folded(times)]
    lines += [f"Of other in eager the device waits for the host: {waits}."] * bool(waits)
    return "\n".join([*lines, "", folded(sizes), "", folded(table_of_saved)])


def describe_plan(estimates: Sequence[Estimate], rates: Rates) -> str:
    """Return a text of the predicted steps, of which the first is without FP8, and of what to do."""
    first = estimates[0]
    others = [other for other in estimates[1:] if other.name != FUSED_BF16]
    lines = [f"by the rates of {rates.device} ({rates.source})", *_attention(rates), "", tables(estimates), ""]
    room = rates.memory or math.inf
    too_large = [step.name for step in estimates if step.peak > room]
    if rates.memory:
        verdict = f"step in {', '.join(too_large)} does not fit" if too_large else "step in any of them fits"
        lines.append(f"A {verdict} the {room / GIB:.0f} GiB of {rates.device}.")
    fitting = [step for step in others if step.peak <= room]
    best = min(fitting or others, key=lambda step: step.total, default=first)
    shares = best.total / first.total, best.compiled / first.compiled
    if not fits(estimates, rates):
        lines.append(f"None fits one device: it needs {min(step.peak for step in estimates) / GIB:,.0f} GiB at least.")
    elif min(shares) >= WORTH:
        lines.append(f"Don't: no recipe takes less than {WORTH:.0%} of bf16's time here; {_why(first, best)}.")
    elif fitting:
        lines.append(f"{best.name} is the fastest: {shares[0]:.2f} of bf16's time in eager, {shares[1]:.2f} compiled.")
    for step in estimates:
        if step.name == FUSED_BF16:
            of_fused = f"{best.total / step.total:.2f} of bf16's time with the same fusions"
            lines.append(f"{best.name} takes {of_fused}, a kernel each as Liger-Kernel computes them.")
    for step in others:
        if step.slower and len(step.slower) < len(step.layers):
            lines.append(f"{step.name}: leave out, as fast in bf16 or faster: {_grouped(step.slower)}")
    never_faster = [step for step in others if step.slower and len(step.slower) == len(step.layers)]
    if never_faster:
        layers = _grouped(never_faster[0].slower)
        lines.append(f"{', '.join(step.name for step in never_faster)}: no layer is faster than in bf16: {layers}")
    return "\n".join(lines)


def fits(estimates: Iterable[Estimate], rates: Rates) -> bool:
    """Return whether any of these steps fits the device's memory, or the memory is unknown."""
    return any(step.peak <= (rates.memory or math.inf) for step in estimates)


def change_that_fits(
    model: nn.Module, inputs: tuple[Tensor], rates: Rates, state: Mapping[str, Any], **settings: Any
) -> str:
    """Return the flags that bring a step which is too large into the device's memory: the first that suffice.

    They are tried from those that change least on: fused operations, fewer sequences at a time, then moments, masters,
    weights and updates in FP8.

    Args:
        state: the arguments of ``optimizer_of``, where a change is one of these.
        settings: other arguments of ``step_in``, with the optimizer of the step.
    """
    name, context, tokens = "delayed", inputs[0].shape[1], inputs[0].numel()
    in_fp8 = {"moments": "fp8", "master": "split16", "outstanding": WAITING}
    flags_in_fp8 = "--weight-storage fp8 --moments fp8 --master split16 --update-in-backward 64MB"
    fewer = [context << power for power in range(tokens.bit_length()) if context << power < tokens]
    fused, stored = {"fuse": True}, {"weight_storage": "fp8"}
    ways: list[tuple[str, int, Mapping[str, Any], Mapping[str, Any]]] = [("--fuse", tokens, {}, fused)]
    ways += [(f"--tokens {count}, with as many more micro-batches", count, {}, {}) for count in reversed(fewer)]
    ways += [("--moments fp8 --master split24", tokens, {"moments": "fp8", "master": "split24"}, {})]
    ways += [(flags_in_fp8, tokens, in_fp8, stored)]
    ways += [(f"{flags_in_fp8} --fuse --tokens {context}", context, in_fp8, fused | stored)]
    work = functools.cache(lambda count: work_of(model, tokens_of(count, context)))
    for flags, count, changed_state, changed_settings in ways:
        options = {**settings, **changed_settings}
        if changed_state:
            options["optimizer"] = optimizer_of(model, **{**state, **changed_state})
        step = step_in(name, model, tokens_of(count, context), rates, work(count), **options)
        if fits([step], rates):
            return f"The smallest change that fits: {flags}. {name} takes {step.peak / GIB:,.0f} GiB then."
    devices = 1 << math.ceil(math.log2(step.peak / rates.memory))
    return (
        f"Not even {flags} is enough ({step.peak / GIB:,.0f} GiB). Plan for several devices: --gpus {devices} or more."
    )


def _why(bf16: Estimate, best: Estimate) -> str:
    """Return the reason why FP8 does not pay."""
    if bf16.products < 0.3 * bf16.total:
        return f"products are only {bf16.products / bf16.total:.0%} of the step, and the rest is not made faster"
    if best.products >= bf16.products:
        return "this device's FP8 products are no faster than its bf16 ones"
    return f"casts take {best.casts / (bf16.products - best.products):.0%} of what the products gain"


def _grouped(layers: Sequence[LayerTime]) -> str:
    """Return a text of layers by shape: how many have it, and the first one's name."""
    counts = Counter(layer.work.shape for layer in layers)
    names = {layer.work.shape: layer.work.name for layer in reversed(layers)}
    return ", ".join(f"{count} of {shape} ({names[shape]})" for shape, count in counts.items())


def from_hugging_face(path: Path) -> nn.Module:
    """Return a causal language model from a config.json, or a folder that has one, in bfloat16, without memory."""
    if not path.exists():  # transformers would look for a model of this name on its hub
        raise PlanError(f"{path} does not exist: give a config.json, or a folder that has one")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise PlanError(
            f"{path} is a Hugging Face configuration, which transformers reads: pip install transformers; or plan the "
            "GPT of octavo train, by --width, --layers, --heads"
        ) from error
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
    """Return the longest sequence of a Hugging Face model, by its configuration."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr,operator]
    if not positions:
        raise PlanError("the configuration does not say how long a sequence is: give --context")
    return int(positions)


def optimizer_of(
    model: nn.Module, algorithm: str, moments: str, master: str | None, outstanding: int | None = None
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return a function from parameters to the optimizer that these options name; Muon has the blocks' matrices.

    ``outstanding``: the bytes of gradients that wait for an update in backward; None: updates come after backward.
    """
    make = _maker(model, algorithm, {"moments": moments, "master": master})

    def optimizer(params: Iterable[nn.Parameter]) -> Optimizer:
        of_params = make(params)
        if outstanding is not None:
            update_in_backward(of_params, outstanding)
        return of_params

    return optimizer


def _maker(
    model: nn.Module, algorithm: str, state_options: Any
) -> Callable[[Iterable[nn.Parameter]], CompactOptimizer]:
    """Return a function from parameters to AdamW or Muon with these formats of state."""
    if algorithm == "adamw":
        return functools.partial(AdamW, **state_options)
    if (blocks := blocks_of(model)) is None:
        raise PlanError("--algorithm muon: the model has no list of blocks, whose matrices Muon would have")
    others = {param.shape for name, param in model.named_parameters() if not name.startswith(f"{blocks}.")}

    def muon_of(params: Iterable[nn.Parameter]) -> Muon:
        groups: dict[str, list[nn.Parameter]] = {"muon": [], "adamw": []}
        for param in params:
            groups["muon" if param.ndim in (2, 3) and param.shape not in others else "adamw"].append(param)
        return Muon([{"params": group, "algorithm": name} for name, group in groups.items()], **state_options)

    return muon_of


def tokens_of(tokens: int | None, context: int) -> tuple[Tensor]:
    """Return a step's input, [sequences, context], without memory; by default 16,384 tokens, at least one sequence."""
    wanted = TOKENS[-1] if tokens is None else tokens
    whole = max(wanted // context, 1) * context
    if tokens not in (None, whole):
        raise PlanError(f"--tokens {tokens} must be a multiple of the context, {context}, such as {whole}")
    return (torch.empty(whole // context, context, dtype=torch.int64, device="meta"),)


def shortened(model: nn.Module) -> nn.Module:
    """Return a copy without memory, of at most SOME blocks if all have the same parameters, so as to predict faster."""
    twin, name = on_meta(model), blocks_of(model)
    if name is None:
        raise PlanError("--gpus: the model has no list of blocks, by which it could be divided")
    blocks: Any = twin.get_submodule(name)
    if len({str([(key, p.shape) for key, p in block.named_parameters()]) for block in blocks}) == 1:
        del blocks[SOME:]
    return twin


def shapes_of(model: nn.Module, work: Work, context: int, saved: Mapping[str, int] | None) -> Shapes:
    """Return a model's Shapes; layers that read one input are one matrix, and all layers in blocks are converted.

    ``work`` is that of a step of one sequence of ``context`` tokens, of the model or its ``shortened``; ``saved``: the
    bytes by kind that its forward saves in eager, where each operation is a launch; None: it is compiled.
    """
    assert work.blocks is not None  # of ``shortened``
    name, count = work.blocks[:2]
    layers = sum(1 for _ in model.get_submodule(name).children())
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    plan = {
        key.split("*.")[-1]: side for key, side in (getattr(config, "base_model_tp_plan", None) or OWN_SPLITS).items()
    }
    rows: Counter[Any] = Counter()
    for each in work.linears:
        if each.name.startswith(f"{name}."):
            index, suffix = each.name.removeprefix(f"{name}.").split(".", 1)
            side = plan.get(suffix, plan.get(suffix.removesuffix(".linear")))
            split = "experts" if each.groups > 1 else {"colwise": "out", "rowwise": "in"}.get(str(side))
            read = (each.in_features, split, each.groups, each.tokens / context)
            rows[index, suffix.rpartition(".")[0], *read] += each.out_features
    shapes = Counter((out_features, *key[2:]) for key, out_features in rows.items())
    block = [Weight(out_features, in_features, True, split, groups, used, times / count)
             for (out_features, in_features, split, groups, used), times in shapes.items()]  # fmt: skip
    inside = sum(p.numel() for p in model.get_submodule(name).parameters())
    block.append(Weight(max(0, round(inside / layers - sum(weight.elements for weight in block)))))
    heads = [one for one in work.linears if not one.name.startswith(f"{name}.")]
    if not heads:
        raise PlanError("--gpus: the model has no linear layer after its blocks, whose output would be logits")
    head = max(heads, key=lambda one: one.sizes[1])
    other_parameters = sum(p.numel() for p in model.parameters()) - inside - head.sizes[1]
    root = (
        Weight(max(0, other_parameters // head.in_features), head.in_features),
        Weight(head.out_features, head.in_features),
    )
    saved_bytes = sum(size for kind, size in (saved or {}).items() if kind not in ("logits and loss", "weights"))
    moved, of_blocks = (one.other.fused if saved is None else one.other.bytes for one in (work, work.blocks))
    counts = [getattr(text, key, None) for key in ("num_attention_heads", "num_key_value_heads")]
    gpt_heads = getattr(text, "heads", None)  # octavo.train.GPT's
    return Shapes(
        name=type(model).__name__,
        width=head.in_features,
        layers=layers,
        block=tuple(block),
        root=root,
        attention=work.other_flop / (14 * context**2 * count),  # 4 forward and 10 backward, not causal
        elementwise=of_blocks / (6 * context * count),  # of bf16, and backward as twice forward
        logits=(moved - of_blocks) / (context * head.out_features),
        launches=0 if saved is None else work.blocks.other.ops / count,
        saved=saved_bytes / context / count if saved_bytes else None,
        heads=tuple(each for each in (*counts, gpt_heads) if each),
    )


def order(stage: Stage) -> tuple[bool, float]:
    """Return a key that is largest for the fastest step that fits; if none fits, for the smallest."""
    return stage.fits, stage.step.tflops if stage.fits else -stage.size


def in_pairs(width: int) -> float:
    """Return the bytes an element that octavo.checkpoint_in_fp8 keeps: a code, and its share of a row's scale."""
    return 1 + 4 / width


def changed(stage: Stage, precision: Mapping[str, Any] | None = None, **layout: Any) -> Iterator[Stage]:
    """Yield the step with these changes, if the model divides so."""
    with contextlib.suppress(PlanError, ZeroDivisionError):
        other = replace(stage.precision, **precision or {})
        yield replace(stage, layout=replace(stage.layout, **layout), precision=other)


def searched(stage: Stage) -> Stage:
    """Return the best step on all meshes of powers of two, with and without recomputation."""
    powers, stages = [1 << power for power in range(7)], [stage]
    experts = powers if any(weight.split == "experts" for weight in stage.whole.block) else [1]
    choices: dict[str, Sequence[Any]] = {"tensor": powers[:4], "pipeline": powers[:5], "expert": experts}
    choices |= {"batch": powers[:4], "recomputed": (0.0, 1.0)}
    for values in itertools.product(*choices.values()):
        kinds = dict(zip(choices, values, strict=True))
        for replicate in {1, max(1, stage.layout.gpus // (kinds["pipeline"] * stage.hardware.server))}:
            stages += changed(stage, replicate=replicate, context=1, **kinds)
    return max(stages, key=order)


def better(stage: Stage) -> list[tuple[str, Stage]]:
    """Return changes, best first: those that make a step fit, or smaller; faster, if it fits already."""
    now, ranks, recipe = stage.layout, stage.layout.ranks, stage.precision.recipe
    stages_by_words = {
        "checkpoint activations (--recompute 1)": changed(stage, recomputed=1.0),
        "keep activations (--recompute 0)": changed(stage, recomputed=0.0),
        "octavo.checkpoint_in_fp8 in the place of torch's": changed(stage, {"regions": in_pairs(stage.whole.width)}),
        f"micro-batches of {2 * now.batch} sequences": changed(stage, batch=2 * now.batch),
        f"micro-batches of {now.batch // 2} sequences": changed(stage, batch=now.batch // 2),
        "twice as many tokens a step": changed(stage, sequences=2 * now.sequences),
        "gradients reduced in FP8 (octavo.distributed.Fp8Reduction)": changed(stage, {"reduction": 2}),
        "weights, masters and moments in FP8": changed(stage, {"state": "FP8"}) if recipe in STORED else (),
    }
    for more, fewer in itertools.permutations(RANKS[:-1], 2):
        if ranks[fewer] % 2 == 0:
            kinds: dict[str, Any] = ranks | {more: 2 * ranks[more], fewer: ranks[fewer] // 2}
            words = f"more {more} ranks ({more}={kinds[more]}, {fewer}={kinds[fewer]})"
            stages_by_words[words] = changed(stage, **{kind: count for kind, count in kinds.items() if kind != "fsdp"})
    changes = [
        (words, other) for words, others in stages_by_words.items() for other in others if order(other) > order(stage)
    ]
    changes = [
        change for change in changes if not stage.fits or change[1].step.tflops > WORTH_NAMING * stage.step.tflops
    ]
    return sorted(changes, key=lambda change: order(change[1]), reverse=True)[:3]


def limit(stage: Stage) -> str:
    """Return a text of what takes longest, and of the link that ranks wait for."""
    step = stage.step
    times = {**step.kinds, "bubble": step.bubble, "optimizer": step.optimizer}
    times |= {f"{kind}'s collectives": wait.exposed for kind, wait in step.waits.items()}
    longest, (kind, wait) = max(times, key=times.__getitem__), max(step.waits.items(), key=lambda item: item[1].exposed)
    link_name = {"NVLink": "NVLink inside a server", "network": "the network between servers"}[wait.link]
    share = f"{times[longest] / step.seconds:.0%} of the step is {longest}"
    if (waits := wait.exposed / step.seconds) < 0.01:
        return f"{share}; no link limits"
    return f"{share}; the link that limits is {link_name}, on which ranks wait for {kind} {waits:.0%} of the step"


class MeshPlan(NamedTuple):
    """A step on a mesh in each recipe, compiled and in eager; the best that is compiled; what to change, best first.

    ``other``: a mesh on which a compiled step fits, if none does on the one that was asked for.
    """

    steps: Mapping[str, Sequence[Stage]]
    best: Stage
    changes: Sequence[tuple[str, Stage]]
    other: Stage | None

    def text(self) -> str:
        """Return tables, whether the step fits, what limits it, and what to change."""
        best, now, rates = self.best, self.best.layout, self.best.hardware.rates
        kinds, waits = list(best.step.kinds), [kind for kind, wait in best.step.waits.items() if wait.seconds]
        header = ["ms a step", *kinds, *(f"{kind}: waits of all" for kind in waits), "bubble", "optimizer"]
        times = [[*header, "total", "of bf16", "TFLOP/s"]]
        sizes = [["GiB a rank", *best.memory, "total", "fits"]]
        for kernels, stages in self.steps.items():
            for stage in stages:
                step = stage.step
                line = [f"{1e3 * step.kinds[kind]:.1f}" for kind in kinds]
                line += [
                    f"{1e3 * step.waits[kind].exposed:.1f} of {1e3 * step.waits[kind].seconds:.1f}" for kind in waits
                ]
                line += [f"{1e3 * seconds:.1f}" for seconds in (step.bubble, step.optimizer, step.seconds)]
                line += [f"{step.seconds / stages[0].step.seconds:.2f}", f"{step.tflops:.0f}"]
                times.append([f"{stage.precision.name} {kernels}", *line])
                numbers = [f"{size / GIB:.2f}" for size in (*stage.memory.values(), stage.size)]
                sizes.append([f"{stage.precision.name} {kernels}", *numbers, "yes" if stage.fits else "no"])
        name = best.precision.name
        says = f"{name}, compiled, is the fastest that fits" if best.fits else f"None fits: {name} is the smallest"
        lines = [
            f"{flags(best)}, micro-batches of {now.batch} sequences, by the rates of {rates.device} ({rates.source})",
            *("", folded(times), "", folded(sizes), ""),
            f"{says}: it needs {best.size / GIB:,.0f} GiB, {rates.device} has {best.hardware.memory / GIB:.0f}.",
            f"{name}, compiled: {limit(best)}.",
        ]
        for words, other in self.changes:
            gain = f"{other.step.tflops / best.step.tflops:.2f} of the speed, {other.size / GIB:,.0f} GiB"
            lines.append(f"change first: {words}: {gain}{'' if other.fits else ', still too much'}")
        if self.other is not None:
            lines.append(f"{self.other.precision.name} fits with {flags(self.other)}: {self.other.size / GIB:.0f} GiB")
        return "\n".join(lines)


def flags(stage: Stage) -> str:
    """Return the command's flags for a step."""
    now = stage.layout
    in_fp8 = " --checkpoint-in-fp8" * (stage.precision.regions < BF16)
    return f"--mesh {now} --micro-batches {now.micro_batches} --recompute {now.recomputed:g}{in_fp8}"


def mesh_of(text: str, gpus: int) -> dict[str, int]:
    """Return ranks by kind, from a text such as "fsdp=8,tensor=8"."""
    ranks_by_kind = dict.fromkeys(RANKS, 1)
    for part in text.split(","):
        kind, _, ranks = (word.strip() for word in part.partition("="))
        if kind not in RANKS or not ranks.isdigit() or int(ranks) < 1:
            raise PlanError(f"--mesh {text}: {part!r} is not KIND=RANKS; kinds are {', '.join(RANKS)}")
        ranks_by_kind[kind] = int(ranks)
    product = math.prod(ranks for kind, ranks in ranks_by_kind.items() if kind != "expert")
    if product != gpus:
        others = product // ranks_by_kind["fsdp"]
        remedy = f"fsdp={gpus // others} or " if gpus % others == 0 else ""
        raise PlanError(
            f"--mesh {text} has {product} ranks, --gpus says {gpus}: {remedy}--gpus {product} would do; expert does "
            "not count, as experts are divided among ranks of fsdp and tensor"
        )
    return ranks_by_kind


def plan(model: nn.Module, rates: Rates, **options: Any) -> MeshPlan:
    """Return a step in each recipe, eager and compiled, on the mesh of the options or on the fastest that fits.

    ``options``: gpus, mesh (text or None), sequences of a step, context (their tokens), micro_batches, recompute, fuse,
    checkpoint_in_fp8, algorithm.
    """
    gpus, sequences, context, mesh = (options[name] for name in ("gpus", "sequences", "context", "mesh"))
    if gpus < 1 or not 0 <= options["recompute"] <= 1:
        raise PlanError(
            f"--gpus {gpus} --recompute {options['recompute']:g}: one GPU at least, and a share from 0 to 1"
        )
    hardware, ranks = Hardware.of(rates), mesh_of(mesh, gpus) if mesh else dict.fromkeys(RANKS, 1)
    del ranks["fsdp"]
    layout = MeshLayout(gpus, sequences, context, recomputed=options["recompute"], **ranks)
    if (count := options["micro_batches"]) is not None:
        layout = replace(layout, batch=max(1, layout.micro_batches // max(1, count)))
        if layout.micro_batches != count:
            raise PlanError(
                f"--micro-batches {count} does not divide the {sequences // layout.data} sequences of a rank"
            )
    short, inputs = shortened(model), tokens_of(context, context)
    work = work_of(short, inputs)

    def stage(name: str, compiled: bool) -> Stage:
        recipe, saved = None if name == HIGH_PRECISION else RECIPES[name](), None
        if not compiled:
            fuse = recipe is not None and options["fuse"]
            saved = estimate(short, inputs, recipe, rates, work=work, fuse=fuse).memory.saved
        shapes = shapes_of(model, work, context, saved)
        precision_options: dict[str, Any] = {"algorithm": options["algorithm"]}
        precision_options |= {"regions": in_pairs(shapes.width)} if options["checkpoint_in_fp8"] else {}
        precision = Precision(name, name, gathers=recipe is not None, pairs=recipe is not None, **precision_options)
        return Stage(shapes, layout, precision, hardware)

    compiled, other = [stage(name, True) for name in (HIGH_PRECISION, *RECIPES)], None
    if not mesh or not any(each.fits for each in compiled):
        other = max(map(searched, compiled), key=order)
        if not mesh:
            layout, other = other.layout, None
            compiled = [replace(each, layout=layout) for each in compiled]
    steps = {"compiled": compiled, "eager": [stage(each.precision.name, False) for each in compiled]}
    best = max(compiled, key=order)
    return MeshPlan(steps, best, better(best), other if other and other.fits else None)
