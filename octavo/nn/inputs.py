"""The check of products' inputs: errors for those that products can't take, and the dtype to compute in."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from octavo.autograd.gather_input import GatheredInput
from octavo.errors import HigherOrderGradientError, UnsupportedOpError
from octavo.formats import HIGH_PRECISION
from octavo.kernels.groups import check_offsets_kind
from octavo.private import functorch_is_active, in_forward_mode
from octavo.weights.operands import why_unreadable


def product_dtype(input: Any, weight_NK: Tensor) -> torch.dtype:
    """Return the dtype that products with ``input`` compute in: its own, or autocast's, which the meta device lacks."""
    if not isinstance(input, Tensor | GatheredInput):
        raise not_a_tensor_error(input)
    if weight_NK.is_meta and not input.is_meta:
        raise ValueError(
            "the weight is on the meta device and has no values: call model.to_empty(device=...), then load or "
            "initialise its parameters"
        )
    device_type = input.device.type
    autocast = not input.is_meta and torch.is_autocast_enabled(device_type)
    if not autocast and input.dtype != weight_NK.dtype:
        raise TypeError(
            f"input is {input.dtype} but the weight is {weight_NK.dtype}; convert one of them or use torch.autocast"
        )
    if input.ndim == 0 or input.shape[-1] != weight_NK.shape[-1]:
        raise ValueError(f"input of shape {tuple(input.shape)} needs in_features={weight_NK.shape[-1]} last")
    if autocast and input.dtype in HIGH_PRECISION:  # as autocast itself, which leaves float64 and integers alone
        return torch.get_autocast_dtype(device_type)
    return input.dtype


def grouped_dtype(input: Tensor, weight_ENK: Tensor, offsets: Tensor) -> torch.dtype:
    """Return the dtype that products of GroupedLinear compute in; raise the errors that its docstring lists."""
    dtype = product_dtype(input, weight_ENK)
    if input.ndim != 2:
        raise ValueError(f"input of shape {tuple(input.shape)}: rows sorted by expert are [T, K]")
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"experts compute in bfloat16, float16 or float32, not {dtype}")
    check_offsets_kind(offsets, input.device)
    if offsets.shape[0] != weight_ENK.shape[0]:
        raise ValueError(f"offsets of {offsets.shape[0]} experts, but the weight has {weight_ENK.shape[0]}")
    return dtype


def not_a_tensor_error(input: object) -> Exception:
    """Return the error for an input that is no tensor, as what torch.fx.symbolic_trace passes in place of one."""
    if isinstance(input, torch.fx.Proxy):
        return UnsupportedOpError(
            "torch.fx.symbolic_trace can't trace into octavo's modules: trace the model first and call octavo.convert "
            "with the traced one; or make them leaves, by a Tracer's is_leaf_module or, for torchvision's "
            "create_feature_extractor, tracer_kwargs={'leaf_modules': [octavo.nn.Linear]}; or use torch.export"
        )
    return TypeError(f"input is {type(input).__name__}, not a torch.Tensor")


# functions of torch.distributed.pipelining.stage: in torch 2.13, and before
_FINDS_SHAPES = ("_forward_metadata_inference", "_shape_inference")


def finds_shapes() -> bool:
    """Whether a pipeline's stage runs this forward only to find shapes, over memory that nobody wrote."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _FINDS_SHAPES:
        frame = frame.f_back
    return frame is not None


finds_shapes._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's own mark imports Triton


def refuse_for_fp8(input: Tensor, *parameters: Tensor | None) -> None:
    """Raise TypeError, UnsupportedOpError or HigherOrderGradientError for tensors that FP8 products can't take."""
    if isinstance(input, Tensor) and input.is_nested:
        raise UnsupportedOpError(
            "an FP8 product takes no nested tensor: give it the rows of all, x.values() of a jagged one, and make of "
            "the result torch.nested.nested_tensor_from_jagged(y, x.offsets())"
        )
    if input.dtype not in HIGH_PRECISION:
        raise TypeError(f"octavo casts bfloat16, float16 and float32 to FP8, not {input.dtype}")
    if torch.compiler.is_compiling():
        return
    remedy = "use torch.autograd's backward, or octavo.set_recipe(model, octavo.recipes.high_precision())"
    if functorch_is_active():
        raise HigherOrderGradientError(
            f"torch.func transforms (grad, vmap, jvp, ...) can't pass an FP8 product; {remedy}"
        )
    if in_forward_mode() and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in (input, *parameters)
    ):
        raise HigherOrderGradientError(f"forward-mode derivatives (dual numbers) can't pass an FP8 product; {remedy}")
    for tensor in parameters:
        if type(tensor) is not nn.Parameter and tensor is not None and (what := why_unreadable(tensor)):
            raise TypeError(f"an FP8 product can't read weights that are {what}")
