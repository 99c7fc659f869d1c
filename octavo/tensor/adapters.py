"""Adapters merged into a weight that lives in FP8: ``weight.data += delta``, as PEFT does it."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo import kernels
from octavo.errors import UnsupportedOpError
from octavo.formats import E4M3
from octavo.kernels.layouts import multiply_tiles_
from octavo.kernels.moment_codes import encode_moment
from octavo.numerics import scale_from_amax, scale_inv_from_scale


def add_adapter(weight: Any, delta: Tensor, alpha: float = 1) -> Any:
    """Add to a StoredWeight in place: values are added in float32, then rounded to codes of a new scale.

    Rounded stochastically, by torch's seed: an adapter moves most elements by less than half a code's step, and to
    nearest these would not move at all: of a delta of 1 % of the weight, rms, less than half would be left.

    Args:
        weight: a StoredWeight [N, K], whole and not trained, or experts' [E, N, K].
        delta: of its shape, or one that is expanded to it, of any float dtype.
        alpha: multiplies it.

    Warns:
        UserWarning: that weights are rounded once more.

    Source:
        stochastic rounding: Gupta et al., arXiv 1502.02551, section 4.
    """
    warnings.warn(
        "an adapter is merged into weights that are stored in FP8, which rounds them once more (stochastically, as "
        "torch's seed has it); octavo.restore(model) before merging keeps what the weights' own dtype can hold",
        stacklevel=2,
    )
    tile, parts = weight.granularity.tile, (weight.qdata, weight.scale_inv, delta.expand(weight.shape))
    for codes, scale_inv, change in zip(*parts, strict=True) if weight.ndim == 3 else [parts]:
        values = kernels.dequantize(codes, scale_inv, tile, torch.float32).add_(change, alpha=alpha)
        scale = scale_from_amax(kernels.amax(values, tile), E4M3.max, True, 0)
        bits16 = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device)
        codes.view(torch.uint8).copy_(encode_moment(multiply_tiles_(values, scale, tile), E4M3, bits16))
        scale_inv.copy_(scale_inv_from_scale(scale))
    if weight.rest is not None:  # which an optimizer waits for
        weight.rest.zero_()
    torch.autograd.graph.increment_version([weight.qdata])
    return weight


def refuse_subtraction() -> NoReturn:
    """Raise UnsupportedOpError for ``weight.data -= delta`` of a frozen weight."""
    raise UnsupportedOpError(
        "an adapter can't be taken out of a weight that is stored in FP8, which was rounded when it was merged: load "
        "the weights again, or merge into a copy of the model"
    )
