"""Activation checkpointing whose regions keep their input as a pair: half of bf16's bytes, a quarter of float32's.

torch saves a region's arguments as the region begins, and runs it again in backward. Saved-tensor hooks around that
call see its arguments alone: what is computed inside has torch's own hooks, or no graph. So both of torch's ways,
selective policies and wrappers work as they did. Hooks around a whole model would catch what other layers save too.

Scales are powers of two: a code is then exact in bf16, and a later cast by powers of two, of whatever tiles, rounds it
to what it would have rounded the input to, where neither cast is below E4M3's normal numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo.formats import E4M3, HIGH_PRECISION
from octavo.granularity import PerRow
from octavo.nn.candidates import MIXTURE, ROUTER, is_called_like
from octavo.private import FakeTensor, top_hooks, tracing_state, untraced
from octavo.tensor.scaled_tensor import ScaledTensor, quantize

LEAST_FEATURES = 32  # a row's scale is 4 bytes
LEAST_ELEMENTS = 1024  # a smaller tensor is not worth a kernel
CHECKPOINTERS = "checkpoint_fn", "_gradient_checkpointing_func"  # of torch's CheckpointWrapper, transformers' modules


def checkpoint_in_fp8(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """torch.utils.checkpoint.checkpoint, whose region keeps its input for backward as a pair by rows.

    Forward is exact. Backward computes the region again from the input rounded to E4M3 with a power-of-two scale a row,
    so the region's gradients differ by that rounding; not where only casts in E4M3 with powers of two read the input,
    as ``recipes.rowwise(power_of_two=True)`` and ``blockwise()`` make, and no element is below their normal numbers.

    In FP8 is the first positional argument that can be: a bf16, fp16 or fp32 tensor that requires a gradient, of 32
    features and 1,024 elements at least. As they are stay integers, masks and tables (no gradient flows to them),
    parameters, further arguments, keyword arguments; and all arguments of a module that holds a router or experts,
    whose tokens another value could send elsewhere. ``octavo.summary(model, *inputs)`` counts both.

    Args:
        function: what to compute again, as torch's.
        args: its arguments; the input is [..., features].
        use_reentrant, options: torch's, ``context_fn`` say; and keyword arguments of a function that isn't reentrant.

    Returns:
        the function's result. torch.compile breaks its graph here: compile the function. For a library's regions there
        is octavo.nn.checkpoint_model_in_fp8.

    Example:
        >>> import torch, octavo
        >>> block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> x = torch.randn(32, 64, requires_grad=True)
        >>> torch.equal(octavo.checkpoint_in_fp8(block, x), block(x))
        True
    """
    return _run_region(checkpoint, function, *args, use_reentrant=use_reentrant, **options)


def checkpoint_model_in_fp8(model: nn.Module) -> nn.Module:
    """Make the regions of torch's checkpoint_wrapper and of transformers keep inputs as octavo.checkpoint_in_fp8 does.

    Args:
        model: a model whose checkpointing is on; changed in place, and once however often this is called.

    Returns:
        the model.

    Raises:
        ValueError: if no module of it has a region.

    Example:
        >>> import torch, octavo
        >>> from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        >>> model = torch.nn.Sequential(*(checkpoint_wrapper(torch.nn.Linear(64, 64)) for _ in range(2)))
        >>> model = octavo.nn.checkpoint_model_in_fp8(model)
    """
    regions = [(module, name) for module in model.modules() for name in CHECKPOINTERS if vars(module).get(name)]
    if not regions:
        raise ValueError(
            "no module has checkpointed regions: before, call model.gradient_checkpointing_enable(), or wrap layers by "
            "torch's checkpoint_wrapper; in code of your own, call octavo.checkpoint_in_fp8"
        )
    for module, name in regions:
        checkpointer = getattr(module, name)
        if getattr(checkpointer, "func", None) not in (_run_region, checkpoint_in_fp8):
            setattr(module, name, functools.partial(_run_region, checkpointer))
    return model


# torch 2.14 asks whether hooks see what a selective region keeps, and warns where nobody says. A region's own see its
# arguments alone.
_HOOKS_OPTION = {"respect_saved_tensors_hooks": False} if "respect_saved" in str(inspect.signature(checkpoint)) else {}
_in_fp8: bool = True
_counts: dict[str, tuple[int, int, int]] | None = None  # those of ``region_counts``


@untraced
def _run_region(checkpointer: Callable[..., Any], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a checkpoint function so that its region keeps its input as a pair."""
    region = _Region(_why_exact(function))
    hooks = torch.autograd.graph.saved_tensors_hooks(region.pack, region.unpack)
    if "context_fn" in {**getattr(checkpointer, "keywords", {}), **options}:
        options = {**_HOOKS_OPTION, **options}
    with hooks if _in_fp8 and tracing_state() is None else contextlib.nullcontext():  # a trace has no backward
        return checkpointer(function, *args, **options)


class _Region:
    """Hooks of one region: keep its first input that can be a pair; outer hooks, which may move or count, come next."""

    def __init__(self, why_exact: str) -> None:
        self.outer = top_hooks(True) or (lambda tensor: tensor,) * 2
        self.why_exact = why_exact  # why the input stays as it is; "" if it may be rounded

    def pack(self, x: Tensor) -> tuple[torch.dtype | None, list[Any]]:  # the dtype of what was rounded
        parts = [x]
        if not (why := _why_not_rounded(x) or self.why_exact):
            pair = quantize(x.detach(), E4M3, PerRow(), power_of_two=True)
            parts = [pair.qdata, pair.scale_inv]
            self.why_exact = "not the first"
        if _counts is not None and x.numel():  # torch 2.11 saves an empty tensor too
            count, plain_bytes, kept_bytes = _counts.get(why, (0, 0, 0))
            _counts[why] = count + 1, plain_bytes + x.nbytes, kept_bytes + sum(part.nbytes for part in parts)
        return None if why else x.dtype, [self.outer[0](part) for part in parts]

    def unpack(self, dtype_and_parts: tuple[torch.dtype | None, list[Any]]) -> Tensor:
        dtype, parts = dtype_and_parts
        qdata, *scale_inv = map(self.outer[1], parts)
        return qdata if dtype is None else ScaledTensor(qdata, scale_inv[0], PerRow(), dtype).dequantize()


def _why_not_rounded(x: Tensor) -> str:
    """Return why an argument stays as it is; "" if it can be a pair."""
    if x.dtype not in HIGH_PRECISION:
        return str(x.dtype).removeprefix("torch.")
    if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
        return "a parameter"
    if not x.requires_grad:
        return "needs no gradient"
    if type(x) not in (Tensor, FakeTensor):
        return f"a {type(x).__name__}"
    return "small" if x.ndim < 2 or x.shape[-1] < LEAST_FEATURES or x.numel() < LEAST_ELEMENTS else ""


def _why_exact(function: Any) -> str:
    """Return why no argument of a region may be rounded; "" if one may, or if the function hides its module."""
    parts = [function.func, *function.args] if isinstance(function, functools.partial) else [function]
    parts += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    modules = [module for part in parts if isinstance(module := getattr(part, "__self__", part), nn.Module)]
    kinds = (kind for module in modules for part in module.modules() for kind in type(part).__mro__)
    return next((f"a {kind.__name__} chooses by it" for kind in kinds if is_called_like(kind, ROUTER + MIXTURE)), "")


@contextlib.contextmanager
def region_counts(in_fp8: bool = True) -> Iterator[dict[str, tuple[int, int, int]]]:
    """Yield counts of what regions keep meanwhile, as summary's ``regions``; ``in_fp8``: whether they keep pairs."""
    global _in_fp8, _counts
    previous = _in_fp8, _counts
    _in_fp8, _counts = in_fp8, {}
    try:
        yield _counts
    finally:
        _in_fp8, _counts = previous
