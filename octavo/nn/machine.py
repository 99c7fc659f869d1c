"""The kernels that casts, products and attention of this machine's devices run by, as lines for `octavo info`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend

from octavo import recipes
from octavo.kernels.capability import compute_capability, runs_natively
from octavo.kernels.cpu import library
from octavo.kernels.devices import triton_kernels
from octavo.nn.where import kernels_and_loss
from octavo.private import fused_sdp_choice, sdp_priority_order


def described_on(devices: Sequence[torch.device]) -> list[str]:
    """Return lines that say what computes recipes, products and attention on devices, and how tiles were chosen."""
    lines = [line for device in devices for line in recipes_on(device) + products_of(device)]
    return [*lines, *attention_on([device for device in devices if device.type in ("cpu", "cuda")]), *configurations()]


def recipes_on(device: torch.device) -> list[str]:
    """Return lines that say what casts on a CPU; whose kernels multiply for each recipe, and what slows it most."""
    words_by_name = {"casts": library.describe()} if device.type == "cpu" else {}
    capability = compute_capability(device)
    for name in recipes.NAMED:
        words_by_name[name] = "; lost: ".join(kernels_and_loss(recipes.as_recipe(name).of(""), capability))
    width = max(map(len, words_by_name))
    return ["", f"recipes on {device}", *(f"  {name:<{width}}  {words}" for name, words in words_by_name.items())]


def products_of(device: torch.device) -> list[str]:
    """Return lines that say which FP8 products torch computes on a device, by a test now, and which octavo's kernel."""
    if not runs_natively(device) or triton_kernels() is None:
        return []
    from octavo.kernels.triton.library_matmul import library_kinds

    is_library = library_kinds(device)
    width = max(map(len, is_library))
    owners = {True: "torch's product", False: "octavo's Triton kernel: torch's is not there, or not right"}
    return ["", f"products on {device}", *(f"  {kind:<{width}}  {owners[right]}" for kind, right in is_library.items())]


def configurations() -> list[str]:
    """Return lines that say whether the Triton kernels' tiles were tuned on this GPU or are octavo's defaults."""
    if not any(runs_natively(torch.device("cuda", index)) for index in range(torch.cuda.device_count())):
        return []
    from octavo.kernels.triton.launch import TileTable

    if (path := TileTable.tuned_file()) is not None and path.exists():
        return ["", f"kernels' tiles: tuned on this GPU, {path}"]
    return ["", "kernels' tiles: octavo's own; `octavo tune` measures the best ones for this GPU in 10 minutes"]


def attention_on(devices: Sequence[torch.device]) -> list[str]:
    """Return which attention torch has enabled, which it trains with on each device, and how to choose cuDNN's."""
    enabled = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    order = [backend for value in sdp_priority_order() if enabled.get(backend := SDPBackend(value))]
    lines = ["", "attention (scaled_dot_product_attention: causal, bfloat16, 2048 tokens, forward and backward)"]
    lines.append(f"  enabled, a GPU takes the first that it can: {', '.join(map(_called, order))}")
    cudnn_waits = False
    for device in devices:
        taken = []
        for size in (64, 128):
            q = torch.empty(1, 1, 2048, size, dtype=torch.bfloat16, device=device, requires_grad=True)
            choice = SDPBackend(fused_sdp_choice(q, q, q, is_causal=True))
            taken.append(f"{_called(choice)} with heads of {size}")
            if torch.cuda.is_available():  # a CUDA build of torch asks the driver, and raises an error without one
                has_cudnn = torch.backends.cuda.can_use_cudnn_attention(SDPAParams(q, q, q, None, 0.0, True, False))
                cudnn_waits |= has_cudnn and choice != SDPBackend.CUDNN_ATTENTION
        lines.append(f"  {device}: {', '.join(taken)}")
    if cudnn_waits:
        order_of_two = "[SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True"
        lines.append(f"  cuDNN's, published as faster on Hopper: with torch.nn.attention.sdpa_kernel({order_of_two}):")
    if not any(device.type == "cuda" for device in devices):
        lines.append("  there is no CUDA device here: whether cuDNN's can be chosen is seen on one")
    return lines


def _called(backend: SDPBackend) -> str:
    """Return a backend's name as torch's documentation abbreviates it."""
    return str(backend.name).removesuffix("_ATTENTION").lower()
