"""A device's highest rates: bytes and floating-point operations a second, measured here or published by others."""

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
from typing import Any, NamedTuple

import torch

from octavo import recipes
from octavo.autograd.timed import TimedCalls
from octavo.cache import cache_folder
from octavo.distributed.files import replacing
from octavo.errors import OctavoError
from octavo.granularity import PerBlock, PerRow
from octavo.kernels.capability import runs_natively
from octavo.reading import read_json
from octavo.scaling.recipe import Cast, Delayed, Recipe

IN_BF16 = "bf16"  # the name of what is without FP8: a step, a product, a launch of the host, a mesh's recipe
FORMS = ("tensor", "row", "block", "mx")  # of a cast's scales
# {kind of product, which is the form of its operand with the finer scales: its name in a table}
KIND_NAMES = {
    IN_BF16: "bf16",
    "tensor": "FP8, a scale a tensor",
    "row": "FP8, a scale a row",
    "block": "FP8, a scale in 128",
    "vector": "FP8, a scale in 128 of both",  # of a row of each; the other operand of a "block" has square blocks
    "mx": "FP8, a scale in 32",
}
PRODUCT_KINDS = tuple(KIND_NAMES)
RATES_FILE = "rates.json"
# rows and columns of a product's result, and the length that it contracts over
SIZES_ON_GPU = ((4096, 1024, 1024), (4096, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 14336, 4096))
SIZES_ON_CPU = ((256, 128, 128), (512, 256, 256), (1024, 512, 512), (1024, 1024, 1024), (2048, 1024, 2048))
_CAST_SHAPE = {True: (8192, 8192), False: (1024, 1024)}  # of the tensor whose casts are timed; True: on a GPU


class PlanError(OctavoError, ValueError):
    """Nothing can be predicted for this device or model; the message says why, and what to do."""


class HostTime(NamedTuple):
    """Seconds that the host takes to launch a layer's forward with all its casts, its backward, and one of the casts.

    Of an operation between layers: its forward and its backward.
    """

    forward: float
    backward: float
    cast: float = 0.0


@dataclass(frozen=True)
class Rates:
    """A device's rates.

    Attributes:
        device: its name.
        source: who measured, or where it is published.
        copy: bytes a second, read and written together.
        launch: seconds that an op takes besides its arithmetic.
        products: FLOP a second by kind, one of PRODUCT_KINDS: points (FLOP of a product, rate), smallest first.
        casts: seconds an element for codes in both layouts, by form, or "delayed" for a scale that exists before; if
            empty, ``copy`` and the bytes that casts move give their time.
        memory: bytes that the device has; 0: unknown.
        attention: FLOP a second of causal attention, forward and backward together, by the size of a head; if empty, it
            has the rate of bf16 products and computes what the mask hides too.
        host: a HostTime by what it launches: a Linear in "bf16", with FP8 scales of one of FORMS or "delayed", or
            "operation"; if empty, the host is always ahead of the device.

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
    attention: Mapping[int, float] = dataclasses.field(default_factory=dict)
    host: Mapping[str, HostTime] = dataclasses.field(default_factory=dict)

    def product_seconds(self, kind: str, flop: float, moved: float = 0.0) -> float:
        """Return seconds of a product and its launch; the rate is interpolated between the two nearest points.

        ``moved``: bytes of operands and result, whose time is the least that the product takes.
        """
        points = self.products[kind]
        rate = points[0][1] if flop <= points[0][0] else points[-1][1]
        for (low, low_rate), (high, high_rate) in itertools.pairwise(points):
            if low < flop <= high:
                share = (math.log2(flop) - math.log2(low)) / (math.log2(high) - math.log2(low))
                rate = low_rate + share * (high_rate - low_rate)
        return max(flop / rate, moved / self.copy) + self.launch

    def attention_seconds(self, flop: Mapping[int, float], causal: bool) -> float:
        """Return seconds of attention's ``flop`` by size of a head, half of them hidden if it is causal."""
        if not self.attention:
            return sum(self.product_seconds(IN_BF16, each) for each in flop.values())
        nearest = {size: min((abs(known - size), rate) for known, rate in self.attention.items())[1] for size in flop}
        return sum(each / (1 + causal) / nearest[size] for size, each in flop.items())

    def cast_seconds(self, cast: Cast, elements: float, both: bool) -> float:
        """Return seconds of a cast into one layout or both.

        Without a measurement it is the time of the bytes: each launch reads two an element, and each layout writes one.
        The amax of a whole tensor takes one more launch, unless the cast is Delayed; the amaxes of columns take two.
        """
        form = form_of(cast)
        delayed = isinstance(cast.rule, Delayed)
        launches = {"tensor": 1 if delayed else 2, "row": 3 if both else 1}.get(form, 1)
        element_seconds = self.casts.get("delayed" if delayed else form, (2 * launches + 1 + both) / self.copy)
        return elements * element_seconds + self.launch * launches


def form_of(cast: Cast) -> str:
    """Return the form, one of FORMS, of a cast's scales."""
    granularity = cast.granularity
    if isinstance(granularity, PerBlock):
        return "mx" if min(size for size in granularity.tile if size > 1) <= 32 else "block"
    return "row" if isinstance(granularity, PerRow) else "tensor"


def product_kind(casts: tuple[Cast, Cast] | None) -> str:
    """Return the kind of a product with such casts, one of PRODUCT_KINDS."""
    if casts is None:
        return IN_BF16
    form = max(map(form_of, casts), key=FORMS.index)
    return "vector" if form == "block" and all(1 in cast.tile for cast in casts) else form


def product_kinds(recipe: Recipe) -> list[str]:
    """Return the kinds of a recipe's three products: output, grad_input, grad_weight."""
    return [product_kind(casts) for casts in (recipe.output, recipe.grad_input, recipe.grad_weight)]


def host_kind(recipe: Recipe) -> str:
    """Return the kind of a layer in ``Rates.host``."""
    if recipe.delayed is not None:
        return "delayed"
    return min((kind for kind in product_kinds(recipe) if kind != IN_BF16), key=PRODUCT_KINDS.index, default=IN_BF16)


def _tflops(**rates: float) -> dict[str, tuple[tuple[float, float]]]:
    """Return ``products`` with one rate for all sizes, from TFLOP/s by kind."""
    return {kind: ((1.0, rates[kind] * 1e12),) for kind in PRODUCT_KINDS}


# An H100's rates are of benchmarks/results, and tests/integration/test_planned_step.py computes them again:
# - products: of layers, alone; bf16's is the median of all readings beside FP8's. On Hopper, those of 32-element blocks
#   are octavo's Triton kernel.
# - casts: of 16,384 x 8,192 into both layouts.
# - host: gpu_host_planned's; an operation takes 0.27 of the time of nn.Linear's forward, as in a Llama block on a CPU.
# - attention: published at 2,048 tokens (ATTENTION_SOURCE, figures 5 and 6; backward without a mask, and taken to lose
#   as much by one as forward); "flash" is FlashAttention-2, torch's choice.
# - launch: 4 us, as in eager PyTorch.
# - memory: what torch finds on the device.
ATTENTION = {"flash": {64: 228e12, 128: 254e12}, "cudnn": {64: 334e12, 128: 392e12}}
ATTENTION_SOURCE = "arXiv 2407.08608"
# HostTime's fields in microseconds
_HOST_US = {IN_BF16: (27, 49), "delayed": (203, 304, 18), "tensor": (172, 255, 19), "row": (241, 229, 25),
            "block": (218, 260, 25), "mx": (214, 212, 25), "operation": (7, 7)}  # fmt: skip
_HOST = {kind: HostTime(*(1e-6 * us for us in times)) for kind, times in _HOST_US.items()}
PUBLISHED = {
    "H100": Rates(
        "NVIDIA H100 SXM",
        "measured: docs/kernels.md",
        copy=3.0e12,
        launch=4e-6,
        products=_tflops(bf16=718, tensor=1309, row=1248, block=1084, vector=814, mx=235),
        casts={"delayed": 1.50e-12, "tensor": 2.31e-12, "row": 2.35e-12, "block": 1.72e-12, "mx": 1.48e-12},
        memory=79 << 30,
        attention=ATTENTION["flash"],
        host=_HOST,
    ),
    "H200": Rates(
        "NVIDIA H200",
        "published: bf16 790 TFLOP/s and a copy at 4.3 TB/s on an H200; FP8 by the ratios of an H100 (pytorch/ao#2784)",
        copy=4.3e12,
        launch=4e-6,
        products=_tflops(bf16=790, tensor=1480, row=1480, block=1320, vector=990, mx=380),
        memory=139 << 30,
        attention=ATTENTION["flash"],
        host=_HOST,
    ),
    "B200": Rates(
        "NVIDIA B200",
        "NVIDIA's datasheet, times the share that an H200 reaches of its own (0.8 of FLOP, 0.9 of memory)",
        copy=6.9e12,
        launch=4e-6,
        products=_tflops(bf16=1800, tensor=3600, row=3600, block=1800, vector=1800, mx=3600),
        memory=178 << 30,
        host=_HOST,
    ),
}
"""Rates of large products by device, each with its source."""
# of these very cards, by torch's names; an H100 PCIe, a GH200 and the like have other rates
_PUBLISHED_OF = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA B200": "B200"}
# GPUs of data centres that are asked about, and have no FP8 hardware
WITHOUT_FP8 = frozenset("P100 V100 T4 A2 A10 A10G A16 A30 A40 A100 A800 A4000 A5000 A6000 MI100 MI210 MI250".split())


def with_attention(rates: Rates, kernel: str) -> Rates:
    """Return the rates with attention by another kernel, a name of ATTENTION; PlanError where none is published."""
    if not rates.attention:
        devices = ", ".join(name for name, published in PUBLISHED.items() if published.attention)
        raise PlanError(f"no rate of {kernel} attention is published of {rates.device}; of {devices} there is one")
    return dataclasses.replace(rates, attention=ATTENTION[kernel])


def device_label(device: torch.device) -> str:
    """Return the name of a device with the versions that its rates depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def _published_of(label: str) -> Rates | None:
    """Return what is published of the very card that has such a label; None of a card that is only named alike."""
    return PUBLISHED.get(_PUBLISHED_OF.get(label.partition(", torch ")[0], ""))


def keep(rates: Rates) -> Path:
    """Write measured rates to the user's cache folder, beside those of other devices and versions."""
    path = cache_folder(make=True) / RATES_FILE
    rates_by_device = _read(path) | {rates.device: dataclasses.asdict(rates)}
    with replacing(path) as file:
        file.write(json.dumps(rates_by_device, indent=1).encode())
    return path


def _read(path: Path) -> dict[str, Any]:
    """Return the fields of the rates in a file by device; none if there is no file, or a damaged one."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(read_json(path))
    return {}


def _of_file(fields: Any) -> Rates:
    """Return the rates of a file's fields; raise KeyError, TypeError, ValueError or OverflowError if they are none.

    The file's attention and host are not read: those are published, and ``_with_published`` adds this version's.
    """
    rates = Rates(**fields)

    def number(value: Any, least: float = math.ulp(0.0)) -> float:
        if not least <= float(value) < math.inf:
            raise ValueError(f"{value!r} is no rate or time")
        return float(value)

    products = {kind: tuple((number(x), number(y)) for x, y in rates.products[kind]) for kind in PRODUCT_KINDS}
    if not all(products.values()):
        raise ValueError("products without a rate")
    casts = {form: number(seconds) for form, seconds in dict(rates.casts).items()}
    copy, launch, memory = number(rates.copy), number(rates.launch, 0), number(rates.memory, 0)
    return Rates(str(rates.device), str(rates.source), copy, launch, products, casts, memory)


def memory_of(device: torch.device) -> int:
    """Return bytes of a device's memory; 0 if they can't be found."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    has_size = device.type == "cpu" and hasattr(os, "sysconf")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if has_size else 0


def rates_of(name: str | None = None, device: torch.device | None = None) -> Rates:
    """Return the rates to plan with.

    Args:
        name: one of PUBLISHED; None for those measured on ``device``, or else published for it.
        device: default: the CUDA device, if there is one, or the CPU.

    Raises:
        PlanError: for a GPU without FP8 hardware, a name without published rates, or a device without any.

    Example:
        >>> rates_of("H200").device
        'NVIDIA H200'
    """
    if name is not None:
        model = name.upper().removeprefix("NVIDIA").strip()
        if not WITHOUT_FP8.isdisjoint(model.replace("-", " ").split()):
            raise _no_fp8_hardware(name)
        if model not in PUBLISHED:
            raise PlanError(f"nothing is published of {name!r} here; known: {', '.join(PUBLISHED)}")
        return PUBLISHED[model]
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    label = device_label(device)
    # no rates were stored, or by another octavo, or the file is damaged
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        rates = _of_file(_read(cache_folder() / RATES_FILE)[label])
        return _with_published(dataclasses.replace(rates, memory=rates.memory or memory_of(device)))
    if (published := _published_of(label)) is not None:
        return published
    if device.type == "cuda" and not runs_natively(device):
        raise _no_fp8_hardware(label)
    raise PlanError(
        f"the rates of this device ({label}) are not known: run `octavo info --measure` here, or take those of another "
        f"device (`--device` in the command), of {', '.join(PUBLISHED)}"
    )


def _no_fp8_hardware(name: str) -> PlanError:
    """Return the error that answers a plan for a GPU without FP8 hardware."""
    return PlanError(
        f"{name} has no FP8 hardware: octavo emulates FP8 there, exactly but slower than bf16, so FP8 does not pay; "
        f"plan for {', '.join(PUBLISHED)}"
    )


def _with_published(rates: Rates) -> Rates:
    """Return measured rates with the published attention and host times of such a device, which are not measured."""
    published = _published_of(rates.device) or rates
    return dataclasses.replace(rates, attention=published.attention, host=published.host)


def measure(device: torch.device | None = None, seconds: float = 0.05) -> Rates:
    """Measure a device, in about 40 times ``seconds`` and the compilation of the kernels it uses.

    Args:
        device: default: the CUDA device, if there is one, or the CPU.
        seconds: how long each timing runs; the median of its readings counts.

    Returns:
        its rates; nothing is written.

    Example:
        >>> from octavo.cost import estimate, measure
        >>> estimate(model, inputs, recipe, measure()).total  # doctest: +SKIP
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
    in_fp8 = recipes.dynamic(), recipes.rowwise(), recipes.blockwise(), recipes.mx()
    recipe_of = {product_kind(each.output): each for each in in_fp8}
    products: dict[str, list[tuple[float, float]]] = {kind: [] for kind in PRODUCT_KINDS}
    for rows, cols, terms in SIZES_ON_GPU if on_gpu else SIZES_ON_CPU:
        flop = 2.0 * rows * cols * terms
        x, weight = (torch.randn(size, terms, device=device, dtype=torch.bfloat16) for size in (rows, cols))
        for kind, points in products.items():
            recipe = recipe_of.get("block" if kind == "vector" else kind)
            plain = functools.partial(torch.nn.functional.linear, x, weight)
            call = TimedCalls(recipe).product(x, weight, "input" if kind == "vector" else "weight") if recipe else plain
            points.append((flop, flop / time(call)))
    x = torch.randn(_CAST_SHAPE[on_gpu], device=device, dtype=torch.bfloat16)
    recipe_of["delayed"] = recipes.delayed()
    casts = {kind: time(TimedCalls(recipe).cast(x)) / x.numel() for kind, recipe in recipe_of.items()}
    launch = time(TimedCalls(recipe_of["delayed"]).cast(x[:16, :16]))
    sorted_points = {kind: tuple(sorted(points)) for kind, points in products.items()}
    rates = Rates(device_label(device), "measured", copy, launch, sorted_points, casts, memory_of(device))
    return _with_published(rates)
