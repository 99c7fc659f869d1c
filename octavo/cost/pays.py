"""A device's rates as text, and the sizes from which on a layer is faster in FP8 by them: ``octavo info --measure``."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.cost.rates import ATTENTION, ATTENTION_SOURCE, HIGH_PRECISION, PRODUCTS, Rates
from octavo.cost.steps import RECIPES
from octavo.cost.text import columns
from octavo.cost.work import LinearWork
from octavo.recipes import high_precision
from octavo.scaling.recipe import Recipe

TOKENS = (1024, 4096, 16384)  # sizes of a step that ``pays`` looks at
FEATURES = tuple(1 << power for power in range(8, 15))
WORTH = 0.97  # share of bf16's time, from which on FP8 is not worth what it costs in quality and care
# {kind of FP8 product: what shares a scale}
SCALES = {"tensor": "a scale each", "row": "a scale a row", "block": "a scale in 128", "mx": "a scale in 32"}
SCALES["vector"] = "a scale in 128 of both"


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
    for kind in PRODUCTS:
        name = f"FP8, {SCALES[kind]}" if kind in SCALES else kind
        table.append([name, *(f"{rate / 1e12:.3g}" for _, rate in rates.products[kind])])
    lines += [columns(table), "", *describe_attention(rates)]
    lines += ["", "a layer's step is faster in FP8 than in bf16"]
    for name, make in RECIPES.items():
        thresholds = [
            f"at {tokens} tokens {'never' if size is None else f'from {size} features on'}"
            for tokens, size in pays(make(), rates).items()
        ]
        lines.append(f"  {name:<10} {', '.join(thresholds)}")
    return "\n".join(lines)


def describe_attention(rates: Rates) -> list[str]:
    """Return a line that says whose attention the rates have, how fast it is, and where that is published."""
    sizes = " and ".join(f"{rate / 1e12:.3g} TFLOP/s with heads of {size}" for size, rate in rates.attention.items())
    kernels = [kernel for kernel, published in ATTENTION.items() if published == rates.attention]
    return [f"causal attention by {kernel}: {sizes} (published: {ATTENTION_SOURCE})" for kernel in kernels]
