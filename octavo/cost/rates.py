"""What a device does at best: bytes and floating-point operations a second, measured here or published by others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels, recipes
from octavo.autograd.casts import GRAD_OUTPUT, INPUT, WEIGHT, State, cast_role
from octavo.cache import cache_folder, make_cache_folder
from octavo.distributed.files import replacing
from octavo.errors import OctavoError
from octavo.granularity import PerBlock, PerRow
from octavo.reading import read_json
from octavo.scaling.recipe import Cast, Delayed, Recipe

HIGH_PRECISION = "bf16"
FORMS = ("tensor", "row", "block", "mx")  # of scales: one each, a row, 128 elements, 32 elements
KEPT = "rates.json"
# rows and columns of a product's result, and the length that it contracts over
ON_GPU = ((4096, 1024, 1024), (4096, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 14336, 4096))
ON_CPU = ((256, 128, 128), (512, 256, 256), (1024, 512, 512), (1024, 1024, 1024), (2048, 1024, 2048))
_CAST = {True: (8192, 8192), False: (1024, 1024)}  # what is cast, on a GPU and elsewhere


class PlanError(OctavoError, ValueError):
    """Nothing can be predicted for this device or model; the message says why, and what to do."""


@dataclass(frozen=True)
class Rates:
    """A device's rates.

    Attributes:
        device: its name.
        source: who measured, or where it is published.
        copy: bytes a second, read and written together.
        launch: seconds that an op takes besides its arithmetic.
        products: FLOP a second by kind, "bf16" or one of FORMS: points (FLOP of a product, rate), smallest first.
        casts: seconds an element for codes in both layouts, by form, or "delayed" for a scale that exists before; if
            empty, ``copy`` and the bytes that casts move give their time.
        memory: bytes that the device has; 0: unknown.

    Example:
        >>> rates = Rates("a GPU", "its datasheet", copy=3e12, launch=4e-6, products={"bf16": ((1.0, 1e15),)})
        >>> round(rates.product_seconds("bf16", 2e12), 6)
        0.002004
    """

    device: str
    source: str
    copy: float
    launch: float
    products: Mapping[str, tuple[tuple[float, float], ...]]
    casts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory: float = 0.0

    def product_seconds(self, kind: str, flop: float, moved: float = 0.0) -> float:
        """The time of a product and its launch; the rate is interpolated between the two nearest points.

        ``moved``: bytes of operands and result, whose time is the least that the product takes.
        """
        points = self.products[kind]
        size = math.log2(max(flop, 1.0))
        rate = points[0][1] if flop <= points[0][0] else points[-1][1]
        for (low, low_rate), (high, high_rate) in itertools.pairwise(points):
            if low < flop <= high:
                share = (size - math.log2(low)) / (math.log2(high) - math.log2(low))
                rate = low_rate + share * (high_rate - low_rate)
        return max(flop / rate, moved / self.copy) + self.launch

    def cast_seconds(self, cast: Cast, elements: float, both: bool) -> float:
        """The time of a cast into one layout or both.

        Without a measurement it is the time of the bytes: each launch reads two an element, and each layout writes one.
        The amax of a whole tensor takes one more launch, unless the cast is Delayed; the amaxes of columns take two.
        """
        form, delayed = form_of(cast), isinstance(cast.rule, Delayed)
        launches = {"tensor": 1 if delayed else 2, "row": 3 if both else 1}.get(form, 1)
        measured = self.casts.get("delayed" if delayed else form, (2 * launches + 1 + both) / self.copy)
        return elements * measured + self.launch * launches


def form_of(cast: Cast) -> str:
    """Which of FORMS a cast's scales have."""
    granularity = cast.granularity
    if isinstance(granularity, PerBlock):
        return "mx" if min(size for size in granularity.tile if size > 1) <= 32 else "block"
    return "row" if isinstance(granularity, PerRow) else "tensor"


def product_form(casts: tuple[Cast, Cast] | None) -> str:
    """The kind of a product with such casts: the form of its finer operand; "bf16" in high precision."""
    return HIGH_PRECISION if casts is None else max(map(form_of, casts), key=FORMS.index)


def forms_of(recipe: Recipe) -> list[str]:
    """The kinds of a recipe's three products: output, grad_input, grad_weight."""
    return [product_form(casts) for casts in (recipe.output, recipe.grad_input, recipe.grad_weight)]


def _constant(bf16: float, tensor: float, row: float, block: float, mx: float) -> dict[str, tuple[tuple[float, float]]]:
    """One rate for all sizes, in TFLOP/s."""
    kinds = (HIGH_PRECISION, *FORMS)
    return {kind: ((1.0, rate * 1e12),) for kind, rate in zip(kinds, (bf16, tensor, row, block, mx), strict=True)}


# Rates of libraries' large products; a launch of 4 us, as in eager PyTorch; the memory that torch finds on the device.
# On Hopper, products of 32-element blocks are octavo's Triton kernel, as fast as Triton's with 128-element blocks.
_H100_SOURCE = "published: pytorch/FBGEMM#2546 and pytorch/ao#2784 (8192 wide products), NVIDIA's datasheet (memory)"
PUBLISHED = {
    "H100": Rates(
        "NVIDIA H100 SXM", _H100_SOURCE, 3.0e12, 4e-6, _constant(600, 1125, 1125, 1005, 380), memory=79 << 30
    ),
    "H200": Rates(
        "NVIDIA H200",
        "published: bf16 790 TFLOP/s and a copy at 4.3 TB/s on an H200; FP8 by the ratios of an H100 (pytorch/ao#2784)",
        4.3e12,
        4e-6,
        _constant(790, 1480, 1480, 1320, 380),
        memory=139 << 30,
    ),
    "B200": Rates(
        "NVIDIA B200",
        "NVIDIA's datasheet, times the share that an H200 reaches of its own (0.8 of FLOP, 0.9 of memory)",
        6.9e12,
        4e-6,
        _constant(1800, 3600, 3600, 1800, 3600),
        memory=178 << 30,
    ),
}
"""Rates of large products by device, each with its source."""


def device_label(device: torch.device) -> str:
    """The name of a device with the versions that its rates depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def keep(rates: Rates) -> Path:
    """Write measured rates to the user's cache folder, beside those of other devices and versions."""
    path = make_cache_folder() / KEPT
    kept = _read(path) | {rates.device: dataclasses.asdict(rates)}
    with replacing(path) as file:
        file.write(json.dumps(kept, indent=1).encode())
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


def _of_file(kept: Any) -> Rates:
    """The rates with these fields; KeyError, TypeError, ValueError or OverflowError if there are none."""
    rates = Rates(**kept)

    def number(value: Any, least: float = math.ulp(0.0)) -> float:
        if not least <= float(value) < math.inf:
            raise ValueError(f"{value!r} is no rate or time")
        return float(value)

    kinds = (HIGH_PRECISION, *FORMS)
    products = {kind: tuple((number(flop), number(rate)) for flop, rate in rates.products[kind]) for kind in kinds}
    if not all(products.values()):
        raise ValueError("products without a rate")
    casts = {form: number(seconds) for form, seconds in dict(rates.casts).items()}
    copy, launch, memory = number(rates.copy), number(rates.launch, 0), number(rates.memory, 0)
    return Rates(str(rates.device), str(rates.source), copy, launch, products, casts, memory)


def memory_of(device: torch.device) -> int:
    """Bytes of a device's memory; 0 if they can't be found."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    has_size = device.type == "cpu" and hasattr(os, "sysconf")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if has_size else 0


def rates_of(name: str | None = None, device: torch.device | None = None) -> Rates:
    """The rates to plan with.

    Args:
        name: one of PUBLISHED; None for those measured on ``device``, or else published for it.
        device: default: the CUDA device, if there is one, or the CPU.

    Raises:
        PlanError: for a name without published rates, or a device without any.

    Example:
        >>> rates_of("H200").device
        'NVIDIA H200'
    """
    if name is not None:
        if name.upper() not in PUBLISHED:
            raise PlanError(f"nothing is published of {name!r} here; known: {', '.join(PUBLISHED)}")
        return PUBLISHED[name.upper()]
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    label = device_label(device)
    # none are kept, or by another octavo, or the file is damaged
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        rates = _of_file(_read(cache_folder() / KEPT)[label])
        return dataclasses.replace(rates, memory=rates.memory or memory_of(device))
    for published, rates in PUBLISHED.items():
        if published in label:
            return rates
    raise PlanError(
        f"the rates of this device ({label}) are not known: run `octavo info --measure` here, or name one of "
        f"{', '.join(PUBLISHED)}"
    )


def measure(device: torch.device | None = None, seconds: float = 0.05) -> Rates:
    """Measure a device, in about 40 times ``seconds`` and the compilation of the kernels it uses.

    Args:
        device: default: the CUDA device, if there is one, or the CPU.
        seconds: how long each timing runs; the median of its readings counts.

    Returns:
        its rates; nothing is written.

    Example:
        >>> octavo.cost.estimate(model, inputs, recipe, octavo.cost.measure()).total  # doctest: +SKIP
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"

    def time(call: Callable[[], Any]) -> float:
        from torch.utils.benchmark import Timer  # looks for CUDA's compiler as it is imported, and warns

        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=seconds).median)

    source, target = (torch.ones(1 << (30 if on_gpu else 26), dtype=torch.uint8, device=device) for _ in range(2))
    copy = 2 * source.numel() / time(functools.partial(target.copy_, source))
    del source, target
    kinds: dict[str, Recipe | None] = {HIGH_PRECISION: None}
    for each in (recipes.dynamic(), recipes.rowwise(), recipes.blockwise(), recipes.mx()):
        kinds[product_form(each.output)] = each
    products: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for rows, cols, terms in ON_GPU if on_gpu else ON_CPU:
        flop = 2.0 * rows * cols * terms
        x = torch.randn(rows, terms, device=device, dtype=torch.bfloat16)
        weight = torch.randn(cols, terms, device=device, dtype=torch.bfloat16)
        for kind, recipe in kinds.items():
            products[kind].append((flop, flop / time(_product(x, weight, recipe))))
    x = torch.randn(_CAST[on_gpu], device=device, dtype=torch.bfloat16)
    named = {kind: recipe for kind, recipe in kinds.items() if recipe is not None} | {"delayed": recipes.delayed()}
    casts = {kind: time(_cast(x, recipe)) / x.numel() for kind, recipe in named.items()}
    launch = time(_cast(x[:16, :16], named["delayed"]))
    points = {kind: tuple(sorted(found)) for kind, found in products.items()}
    return Rates(device_label(device), "measured", copy, launch, points, casts, memory_of(device))


def _product(x: Tensor, weight: Tensor, recipe: Recipe | None) -> Callable[[], Any]:
    """The output product of a recipe, of operands that were cast before; for None torch's in bf16."""
    if recipe is None:
        return lambda: F.linear(x, weight)
    a, b = (cast_role(t, recipe, role, True, False, None).as_is for t, role in ((x, INPUT), (weight, WEIGHT)))
    assert a is not None and b is not None and recipe.output is not None
    (first, second), dtype = recipe.output, x.dtype
    return lambda: kernels.matmul(*a, first.tile, *b, second.tile, None, dtype, True)


def _cast(x: Tensor, recipe: Recipe) -> Callable[[], Any]:
    """A recipe's cast of a gradient in both layouts; a Delayed one has a scale already."""
    state = None
    if (rule := recipe.delayed) is not None:
        state = State.empty(rule.history_length, x.device)
        state.scale.fill_(1.0)
    return lambda: cast_role(x, recipe, GRAD_OUTPUT, True, True, state)
