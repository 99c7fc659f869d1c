"""Measure a device's rates: products by kind at five shapes, casts, copy bandwidth, the time of a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from octavo import kernels, recipes
from octavo.autograd.casts import GRAD_OUTPUT, INPUT, WEIGHT, State, cast_role
from octavo.cost.rates import HIGH_PRECISION, Rates, device_label, memory_of, product_form
from octavo.scaling.recipe import Recipe

ProductShape = tuple[int, int, int]  # rows and columns of a product's result, and the length that it contracts over
ON_GPU: tuple[ProductShape, ...] = (
    (4096, 1024, 1024),
    (4096, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 14336, 4096),
)
ON_CPU: tuple[ProductShape, ...] = (
    (256, 128, 128),
    (512, 256, 256),
    (1024, 512, 512),
    (1024, 1024, 1024),
    (2048, 1024, 2048),
)
_SECONDS = 0.05  # a measurement
_CAST = {True: (8192, 8192), False: (1024, 1024)}  # what is cast, on a GPU and elsewhere


def measure(device: torch.device | None = None, seconds: float = _SECONDS) -> Rates:
    """Measure a device, in about 40 times ``seconds`` and the compilation of the kernels it uses.

    Args:
        device: default: the CUDA device, if there is one, or the CPU.
        seconds: how long each timing runs; the median of its readings counts.

    Returns:
        its rates; nothing is written.
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


def _product(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe | None) -> Callable[[], Any]:
    """The output product of a recipe, of operands that were cast before; for None torch's in bf16."""
    if recipe is None:
        return lambda: F.linear(x, weight)
    a, b = (cast_role(t, recipe, role, True, False, None).as_is for t, role in ((x, INPUT), (weight, WEIGHT)))
    assert a is not None and b is not None and recipe.output is not None
    (first, second), dtype = recipe.output, x.dtype
    return lambda: kernels.matmul(*a, first.tile, *b, second.tile, None, dtype, True)


def _cast(x: torch.Tensor, recipe: Recipe) -> Callable[[], Any]:
    """A recipe's cast of a gradient in both layouts; a Delayed one has a scale already."""
    state = None
    if (rule := recipe.delayed) is not None:
        state = State.empty(rule.history_length, x.device)
        state.scale.fill_(1.0)
    return lambda: cast_role(x, recipe, GRAD_OUTPUT, True, True, state)
