"""How many floating-point operations of a model's forward pass are in FP8, counted by torch's FlopCounterMode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from octavo.private import cpu_attention, grouped_mm

_Size = tuple[int, ...]


def _product(a: _Size, a_scale_inv: _Size, a_tile: Any, b: _Size, *_: Any, **__: Any) -> int:
    """Of octavo::matmul, a [M, K] · b [N, K]ᵀ: a multiplication and an addition each."""
    return 2 * a[0] * b[0] * a[1]


def _grouped(a: _Size, b: _Size, *_: Any, **__: Any) -> int:
    """Of a [T, K], each row times one of the experts' weights b [E, K, N]; or of a [N, T] and b [T, K], T in groups."""
    return 2 * math.prod(a) * b[-1]


def _grouped_product(a: _Size, a_scale_inv: _Size, a_tile: Any, b: _Size, *_: Any, **__: Any) -> int:
    """Of octavo::grouped_matmul, a [T, K], each row times one of the experts' weights b [E, N, K]."""
    return 2 * math.prod(a) * b[1]


def _attention(query: _Size, key: _Size, value: _Size, *_: Any, **__: Any) -> int:
    """Of query [B, H, S, D] and value [B, G, T, D], causal or not: of CPUs' own op, which torch doesn't count."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def formulas() -> dict[Any, Any]:
    """Of the ops that torch's counter doesn't know."""
    grouped = [grouped_mm, torch.ops.octavo.grouped_mm]
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # what transformers calls where torch's can't be used
        grouped.append(torch.ops.transformers.grouped_mm_fallback)
    attention = {cpu_attention: _attention}
    return {**_FP8, **dict.fromkeys(grouped, _grouped), **attention}


_FP8 = {torch.ops.octavo.matmul: _product, torch.ops.octavo.grouped_matmul: _grouped_product}


def forward_flops(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, int], set[str]]:
    """Runs ``model(*args, **kwargs)`` once, in evaluation mode and without gradients, and counts its products.

    Returns:
        the operations of products in FP8, and of all products: of matrices, attention and convolutions; the names of
        the modules that were called and computed any.
    """
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    training = {module: module.training for module in model.modules()}
    counter = FlopCounterMode(display=False, custom_mapping=formulas())
    try:
        with counter, torch.no_grad():
            model.eval()(*args, **kwargs)
    finally:
        for module, was in training.items():
            module.training = was
    counts = counter.get_flop_counts()
    total = counts.pop("Global", {})
    called = {name.partition(".")[2] for name in counts}  # after the model's class
    return (sum(total.get(op, 0) for op in _FP8), sum(total.values())), called
