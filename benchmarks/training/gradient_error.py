"""What one cast to FP8 does to the gradient: a product, an operand, a format, a kind of layer at a time.

From weights of a run in bf16 (quality's, on the way and at its end) the gradient of the same batches is computed in
float32, exactly and with roundings (benchmarks/training/gradient_rounding.py). For exact gradients g, those with FP8
g + e, and E the mean over batches, a row of results/gradient_error-<device>.csv has, in percent but for the cosine:

    cosine, error    mean over batches of the cosine of g and g + e, and of |e| / |g|
    bias             |E e| / |E g|: what no larger batch averages away
    along            E e . E g / |E g|^2: how much too long (or, below 0, too short) the mean gradient is
    noise            (E|e|^2 - |E e|^2) / (E|g|^2 - |E g|^2): rounding's variance beside that of the batches
    loss             E of the loss of these batches, relative to the exact forward's
    steps            of the descent along E g that steps of the same length bring, the part that is lost
    predicted        loss + DESCENT x steps: how much higher the trained model's loss will be, as octavo.inspect has it

Squares of means are products of the means of two halves of the batches, so that the batches' own noise adds no bias.
Those of a mean that is nearly 0 may come out below 0, which is written as 0. All but cosine and error are in Adam's
metric, coordinates divided by the fourth root of E g^2: g . g' is what Adam's step for g' gains along g. ``steps`` is,
to first order, 1 - (E g . E(g + e) / rms|g + e|) / (E g . E g / rms|g|). Columns _se are standard errors over batches.

``--scales`` compares instead how scales of 1x32 blocks are rounded to powers of two, on random tensors and those of a
run of SHORT steps in float32 (size 0.5M). results/gradient_error_scales-<device>.csv has the SQNR in dB, the mean over
tensors, and which share of elements lies above the format's largest number once it is scaled, in percent.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.measure import ROOT, provenance, table, write_results
from benchmarks.common.pages import markdown, read
from benchmarks.training.gradient_rounding import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    Products,
    RoundedProducts,
    Rounding,
    rounded,
    scaled,
)
from benchmarks.training.gradient_rounding import products_of as of
from benchmarks.training.quality import results_path, rows_of
from benchmarks.training.quality_experiments import BATCH, SIZES, STEPS, TOY, TOY_STEPS, Task, config_of
from octavo import E5M2, PerBlock, PerRow, recipes
from octavo.inspect.what_if import DESCENT
from octavo.train import BASELINE, GPT, Batches, Hooks, load_corpus, next_byte_loss, run
from octavo.train.checkpoint import StepRow
from octavo.train.model import HEAD
from octavo.train.trainer import build_model
from octavo.tune.agreement import sqnr

TAKES = "40 minutes"
MEASURES = ("octavo/numerics.py", "octavo/formats.py", "octavo/train")

STATE = ROOT / "runs/gradient_error"  # weights of the runs; not in git
AT = (300, 1500, 3000)  # steps, of 3,000
SHORT = 300
_E4M3, _E5M2 = Rounding(), Rounding(E5M2)
_LAYOUTS = {
    "per tensor": {},
    "per tensor, powers of two": {"powers": "down"},
    "rows": {"granularity": PerRow()},
    "1x128": {"granularity": PerBlock(1, 128)},
    "1x128, powers of two": {"granularity": PerBlock(1, 128), "powers": "down"},
    "1x32, powers of two": {"granularity": PerBlock(1, 32), "powers": "down"},
    "1x32, powers of two as OCP": {"granularity": PerBlock(1, 32), "powers": "ocp"},
}
DYNAMIC = of(recipes.dynamic())
BLOCKS = "blocks."  # all layers but the head


@dataclasses.dataclass(frozen=True)
class Variant:
    """Which layers, by a part of their names, round what; products None: all is computed in bf16, as in training."""

    group: str
    name: str
    products: Products | None
    layers: tuple[str, ...] = (BLOCKS,)


def gradients_by(how: Rounding) -> Products:
    """The gradients alone are rounded, in both their products."""
    return {GRAD_INPUT: (how, None), GRAD_WEIGHT: (how, None)}


def variants() -> Iterator[Variant]:
    """All that is compared."""
    yield Variant("recipe", "bf16", None)
    for name in ("dynamic", "rowwise", "rowwise_with_gw_hp", "blockwise", "mx"):
        yield Variant("recipe", name, of(getattr(recipes, name)()))
    yield Variant("recipe", "dynamic, E4M3 gradients", dict.fromkeys(DYNAMIC, (_E4M3, _E4M3)))
    yield Variant("recipe", "dynamic, head too", DYNAMIC, (BLOCKS, HEAD))
    for product, how in DYNAMIC.items():
        yield Variant("product", product, {product: how})
    roles = {OUTPUT: ("input", "weight"), GRAD_INPUT: ("gradient", "weight"), GRAD_WEIGHT: ("gradient", "input")}
    for product, (first, second) in roles.items():
        how = DYNAMIC[product]
        yield Variant("operand", f"{first} in {product}", {product: (how[0], None)})
        yield Variant("operand", f"{second} in {product}", {product: (None, how[1])})
    layers = {"attention": ("attention",), "mlp": ("mlp",), "first block": ("blocks.0.",), "head": (HEAD,)}
    for name, own in layers.items():
        yield Variant("layers", f"dynamic, {name} alone", DYNAMIC, own)
    yield Variant("layers", "rowwise, head alone", of(recipes.rowwise()), (HEAD,))
    yield Variant("layers", "E4M3 gradients per tensor, head alone", gradients_by(_E4M3), (HEAD,))
    yield Variant("layers", "E5M2 gradients per tensor, head alone", gradients_by(_E5M2), (HEAD,))
    yield Variant("layers", "output alone, head alone", {OUTPUT: DYNAMIC[OUTPUT]}, (HEAD,))
    for layout, options in _LAYOUTS.items():
        for name, base in {"E4M3": _E4M3, "E5M2": _E5M2}.items():
            how = dataclasses.replace(base, **options)
            yield Variant("gradients", f"{name} {layout}", gradients_by(how))
            if name == "E4M3" or layout == "per tensor":
                yield Variant("inputs", f"{name} {layout}", {OUTPUT: (how, None), GRAD_WEIGHT: (None, how)})
                yield Variant("weights", f"{name} {layout}", {OUTPUT: (None, how), GRAD_INPUT: (None, how)})
    for name, base in {"E4M3": _E4M3, "E5M2": _E5M2}.items():
        stochastic = dataclasses.replace(base, stochastic=True)
        yield Variant("rounding", f"{name} gradients, stochastic", gradients_by(stochastic))
        mixed = dataclasses.replace(base, hadamard=True), dataclasses.replace(_E4M3, hadamard=True)
        yield Variant("rounding", f"{name} grad_weight", {GRAD_WEIGHT: (base, _E4M3)})
        yield Variant("rounding", f"{name} grad_weight, Hadamard", {GRAD_WEIGHT: mixed})
        both = dataclasses.replace(mixed[0], stochastic=True), mixed[1]
        yield Variant("rounding", f"{name} grad_weight, Hadamard, stochastic gradients", {GRAD_WEIGHT: both})


def weights_of(task: Task, steps: tuple[int, ...], state: Path) -> dict[int, dict[str, Tensor]]:
    """A bf16 run's weights after these steps; trained once and kept in ``state``."""
    path, found, models = state / f"{task.folder}.pt", dict[int, dict[str, Tensor]](), list[GPT]()
    if path.exists():
        kept: dict[int, dict[str, Tensor]] = torch.load(path, weights_only=True)
        if set(steps) <= kept.keys():
            return kept

    def on_step(row: StepRow) -> None:
        if row.step in steps:
            found[row.step] = {name: value.clone() for name, value in models[0].state_dict().items()}

    run(config_of(task), BASELINE, hooks=Hooks(on_model=models.append, on_step=on_step))
    state.mkdir(parents=True, exist_ok=True)
    torch.save(found, path)
    return found


class Gradient:
    """A model's gradient with the roundings of a variant.

    Args:
        model: in float32.
        variant: what is rounded; None: nothing.
    """

    def __init__(self, model: GPT, variant: Variant | None) -> None:
        self.model, self.in_bf16, self.how = model, False, dict[nn.Parameter, Products]()
        if variant is not None and variant.products is None:
            self.in_bf16 = True
        elif variant is not None and variant.products is not None:
            named = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name}
            chosen = [p for name, p in named.items() if any(part in name for part in variant.layers)]
            self.how = dict.fromkeys(chosen, variant.products)

    def of(self, batch: tuple[Tensor, Tensor], seed: int) -> tuple[float, Tensor]:
        """(loss, gradient [all weights], float32) of a batch."""
        mode: Any = RoundedProducts(self.how, seed) if self.how else nullcontext()
        with mode, torch.autocast("cpu", torch.bfloat16, enabled=self.in_bf16):
            loss = next_byte_loss(self.model(batch[0]), batch[1])
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return float(loss.detach()), torch.cat([gradient.flatten() for gradient in gradients])


class Sums:
    """What a variant's batches add up to, beside their exact gradients.

    Args:
        halves: the mean exact gradient of each half of the batches, [2, all weights].
        square: the mean of |g|^2.
        metric: of the scalar product.
    """

    def __init__(self, halves: Tensor, square: float, metric: Tensor) -> None:
        self.halves, self.exact_square, self.metric = halves, square, metric
        self.mean = self._dot(halves[0], halves[1])
        self.errors = torch.zeros_like(halves)
        self.rows: list[tuple[float, ...]] = []  # of each batch

    def _dot(self, a: Tensor, b: Tensor) -> float:
        return float(torch.dot(a * self.metric, b))

    def add(self, exact: Tensor, found: Tensor, loss: float) -> None:
        """A batch's gradients, exact and not, and the relative change of its loss; halves take turns."""
        error, half = found - exact, len(self.rows) % 2
        self.errors[half] += error
        along = self._dot(error, self.halves[1 - half]) / self.mean
        longer = (self._dot(found, found) - self._dot(exact, exact)) / self.exact_square
        cosine = float(nn.functional.cosine_similarity(exact, found, dim=0))
        squared = self._dot(error, error)
        relative = float(error.norm() / exact.norm())
        self.rows.append((cosine, 100 * relative, squared, 100 * along, 100 * loss, 100 * (longer / 2 - along)))

    def row(self) -> dict[str, float]:
        """The columns, those that are chance with their standard errors over batches."""
        found = torch.tensor(self.rows, dtype=torch.float64)
        predicted = found[:, 4] + DESCENT * found[:, 5]
        means, deviations = (x.tolist() for x in (found.mean(0), found.std(0) / len(found) ** 0.5))
        cosine, error, squared, along, loss, steps = means
        bias = self._dot(*(self.errors / (len(found) / 2)).unbind())
        return {
            "cosine": cosine,
            "error": error,
            "bias": 100 * math.sqrt(max(bias, 0.0) / self.mean),
            "along": along,
            "along_se": deviations[3],
            "noise": 100 * (squared - bias) / (self.exact_square - self.mean),
            "loss": loss,
            "loss_se": deviations[4],
            "steps": steps,
            "steps_se": deviations[5],
            "predicted": float(predicted.mean()),
            "predicted_se": float(predicted.std()) / len(found) ** 0.5,
        }


def compare(
    weights: Mapping[str, Tensor], task: Task, chosen: list[Variant], batches: int, windows: int
) -> list[dict[str, float]]:
    """A row for each variant at these weights; ``windows``: of a batch."""
    config = config_of(task)
    model = build_model(config.model, BASELINE, task.seed)
    model.load_state_dict(weights)
    data = Batches(load_corpus(), config.model.context, windows, task.seed)
    # those of steps that the run has not come to
    drawn = [data.training(2 * task.steps + number) for number in range(batches)]
    exactly = Gradient(model, None)
    exact = [exactly.of(batch, 0) for batch in drawn]
    size = exact[0][1].numel()
    means, second = torch.zeros(2, size), torch.zeros(size)
    for number, (_, gradient) in enumerate(exact):
        means[number % 2] += gradient / (batches / 2)
        second.addcmul_(gradient, gradient, value=1 / batches)
    metric = torch.where(second > 0, second.clamp(min=1e-30).rsqrt(), 0)
    square = sum(float(torch.dot(g * metric, g)) for _, g in exact) / batches
    rows = []
    for variant in chosen:
        rounding, sums = Gradient(model, variant), Sums(means, square, metric)
        for number, (batch, (loss, gradient)) in enumerate(zip(drawn, exact, strict=True)):
            other, found = rounding.of(batch, number)
            sums.add(gradient, found, other / loss - 1)
        rows.append(sums.row())
    return rows


def samples(task: Task) -> dict[str, list[Tensor]]:
    """Matrices by kind: random ones, and what the layers' products of a batch read after a short run in float32."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, 4096, 256, generator=generator)
    found = {"normal": [normal[0]], "Student's t, 3 degrees": [normal[0] / normal[1:].square().mean(0).sqrt()]}
    config = config_of(task)
    model = build_model(config.model, BASELINE, task.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
    data = Batches(load_corpus(), config.model.context, BATCH, task.seed)

    def backward(step: int) -> None:
        batch = data.training(step)
        optimizer.zero_grad()
        next_byte_loss(model(batch[0]), batch[1]).backward()

    for step in range(task.steps):
        backward(step)
        optimizer.step()
    layers = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != HEAD]
    kinds: tuple[list[Tensor], ...] = ([], [], [layer.weight.detach() for layer in layers])
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, inputs: kinds[0].append(inputs[0].detach().flatten(0, -2)))
        layer.register_full_backward_hook(lambda layer, dx, dy: kinds[1].append(dy[0].flatten(0, -2)))
    backward(task.steps)
    return found | dict(zip(("inputs", "gradients", "weights"), kinds, strict=True))


def scale_rows(task: Task) -> list[dict[str, Any]]:
    """What each rounding of scales loses."""
    rows, generator = [], torch.Generator()
    for kind, tensors in samples(task).items():
        for base in (_E4M3, _E5M2):
            for powers in ("down", "ocp"):
                how = dataclasses.replace(base, granularity=PerBlock(1, 32), powers=powers)
                clipped = sum(int((scaled(x, how)[0].abs() > how.format.max).sum()) for x in tensors)
                found = [sqnr(rounded(x, how, generator), x.double()) for x in tensors]
                row = {"size": task.size, "tensors": kind, "count": len(tensors)}
                row |= {"format": how.format.name, "scales": powers}
                row |= {"sqnr_db": f"{sum(found) / len(found):.2f}"}
                rows.append(row | {"clipped_percent": f"{100 * clipped / sum(x.numel() for x in tensors):.3f}"})
    return rows


def scales_table() -> str:
    """Of docs/study/training-quality.md."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in read("gradient_error_scales"):
        cells = rows.setdefault((row["tensors"], row["format"]), [])
        cells += [f"{float(row['sqnr_db']):.1f}", f"{float(row['clipped_percent']):.2f}"]
    header = ("tensors", "format", "down: SQNR, dB", "clipped, %", "as OCP: SQNR, dB", "clipped, %")
    return markdown(header, ([*names, *cells] for names, cells in rows.items()))


TABLES = {"scales": scales_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gradient_error",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", default="2.5M", choices=SIZES)
    parser.add_argument("--batches", type=int, default=32, help="an even number")
    parser.add_argument("--windows", type=int, default=BATCH, help="in a batch (default: as in training)")
    parser.add_argument("--at", type=int, nargs="+", default=AT, help="after which steps")
    parser.add_argument("--groups", nargs="+", choices=list(dict.fromkeys(v.group for v in variants())))
    parser.add_argument("--state", type=Path, default=STATE, help="folder of the run's weights")
    parser.add_argument("--output", type=Path, help="another results file")
    parser.add_argument("--scales", action="store_true", help="only how scales of 1x32 blocks are rounded; a minute")
    parser.add_argument("--toy", action="store_true", help="a tiny model, 20 steps; needs --output")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task, steps = Task("bf16", options.size, 0, STEPS), tuple(options.at)
    if options.toy:
        task, steps = Task("bf16", TOY, 0, TOY_STEPS), (TOY_STEPS,)
    rows: list[dict[str, Any]] = []
    if options.scales:
        rows = scale_rows(task._replace(steps=SHORT))
        print(table(rows))
        write_results("gradient_error_scales", rows, options.output)
        return 0
    chosen = [v for v in variants() if options.groups is None or v.group in options.groups]
    found = weights_of(task, steps, options.state)
    rows = []
    path = results_path("gradient_error", options.output)
    for step in steps:
        made = compare(found[step], task, chosen, options.batches, options.windows)
        for variant, row in zip(chosen, made, strict=True):
            numbers = {name: f"{value:.6f}" if name == "cosine" else f"{value:.4f}" for name, value in row.items()}
            named = {"size": task.size, "windows": options.windows, "step": step}
            named |= {"group": variant.group, "variant": variant.name}
            rows.append(named | numbers | {"batches": options.batches} | provenance())
        print(table(rows[-len(chosen) :]), flush=True)
        if options.output or not options.toy:
            write_results("gradient_error", merged(rows, path), path, origin={})
    return 0


def merged(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Rows beside those of other sizes and batches that are there, small ones first."""
    ran = {(row["size"], str(row["windows"])) for row in rows}
    others = [row for row in rows_of(path) if (row["size"], row["windows"]) not in ran]
    return sorted([*others, *rows], key=lambda row: (int(row["windows"]), row["size"]))
