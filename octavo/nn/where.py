"""The kernel that computes each of a recipe's products on a device, and the speed that is lost there.

Torch's products are those that the shipped configs.json names. Of products whose scales change along the contraction
torch has blocks of 128 on Hopper alone, and blocks of 32 in E8M0 on later GPUs. Whether they are right is tested on the
GPU itself (library_matmul.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from octavo import recipes
from octavo.granularity import ALL
from octavo.kernels.arguments import have_e8m0_blocks
from octavo.kernels.capability import FIRST_NATIVE, compute_capability, warn_once
from octavo.kernels.devices import triton_kernels
from octavo.scaling.recipe import PRODUCTS, Recipe

Capability = tuple[int, int] | None  # None: a CPU, or a GPU of another maker
ARCHITECTURES: dict[str, Capability] = {
    f"sm_{major}{minor}": (major, minor) for major, minor in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))
}
ARCHITECTURES["CPU"] = None
TORCH, TRITON, REFERENCE = "torch's", "octavo's Triton kernel", "the reference"
_HOPPER = 9


class Maker(NamedTuple):
    """A product's kernel, the loss by it in words, and whether the product is slower than another recipe's."""

    product: str
    kernel: str
    loss: str = ""
    is_slower: bool = False


def makers(recipe: Recipe, capability: Capability) -> Iterator[Maker]:
    """Yield the Maker of each FP8 product whose features are multiples of 16 and whose result is bfloat16.

    It is a forecast by the capability alone, for GPUs that are not here too: kernels/triton/matmul.py asks the device.
    """
    if capability is None or capability < FIRST_NATIVE or triton_kernels() is None:
        casts = [cast for pair in recipe.casts for cast in pair[:2] if cast is not None]
        exact = all(cast.power_of_two or cast.has_one_scale for cast in casts)
        loss = "FP8's speed: emulated" if exact else "FP8's speed and bfloat16's: emulated in float32"
        yield from (Maker(product, REFERENCE, loss) for product in PRODUCTS if getattr(recipe, product) is not None)
        return
    from octavo.kernels.triton.launch import SHIPPED_LIBRARY
    from octavo.kernels.triton.matmul import step_along

    major = capability[0]
    for product in PRODUCTS:
        if (casts := getattr(recipe, product)) is None:
            continue
        a, b = (cast.tile for cast in casts)
        changes, step = a[1] != ALL or b[1] != ALL, step_along(a, b)
        has_torchs = not changes or (major > _HOPPER if have_e8m0_blocks(*casts) else major == _HOPPER)
        if (a, b, product in recipe.fast_accum) in SHIPPED_LIBRARY and has_torchs:
            yield Maker(product, TORCH)
        elif step == 0:
            yield Maker(product, REFERENCE, "FP8's speed: no kernel has blocks that 32 does not divide", True)
        elif changes:
            also = " and a multiply" if b[0] == 1 else ""
            loss = f"a multiply-add{also} more per output element for every {step} terms"
            loss += " instead of the tensor cores' own scales" if step == 32 and major > _HOPPER else ""
            yield Maker(product, TRITON, loss, True)
        else:
            yield Maker(product, TRITON, "torch's product, which does not mix these two scales")


def kernels_and_loss(recipe: Recipe, capability: Capability) -> tuple[str, str]:
    """Return (whose kernels compute the three products, the loss of the first product that has one), in words."""
    all_makers = [*makers(recipe, capability)]
    owners = dict.fromkeys(PRODUCTS, "high precision") | {maker.product: maker.kernel for maker in all_makers}
    text = ", ".join(f"{product}: {owner}" for product, owner in owners.items())
    text = owners["output"] if len(set(owners.values())) == 1 else text
    if (first := next((maker for maker in all_makers if maker.loss), None)) is None:
        return text, "nothing"
    losses = {maker.loss for maker in all_makers}
    return text, first.loss if len(losses) == 1 else f"in {first.product} {first.loss}"


def warn_once_if_slower(recipe: Recipe, device: torch.device) -> None:
    """Log, once for each recipe and kind of GPU, that a product's kernel is slower there, and name a faster recipe."""
    capability = compute_capability(device)
    if capability is None or capability < FIRST_NATIVE or torch.compiler.is_compiling():
        return  # another warning has said that all FP8 is emulated there
    if (slower := next((maker for maker in makers(recipe, capability) if maker.is_slower), None)) is not None:
        both = (recipes.blockwise(), recipes.rowwise())
        faster = next(other.name for other in both if not any(maker.loss for maker in makers(other, capability)))
        where = f"{device} (sm_{capability[0]}{capability[1]})"
        warn_once(
            f"{recipe} on sm_{capability}",
            f"{recipe.name} on {where}: {slower.product} is made by {slower.kernel}, which costs {slower.loss}; "
            f"of octavo.recipes.{faster}() torch makes all products there",
        )
