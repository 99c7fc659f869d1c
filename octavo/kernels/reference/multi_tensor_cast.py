"""Many casts as one op, into outputs that are there already: the definition is one cast after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.granularity import ALL
from octavo.kernels.arguments import CastSource, Output, Scaling
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.cast import cast


def check_multi_tensor_cast(groups: Sequence[Sequence[Tensor]], tile: Sequence[int]) -> None:
    """Refuse, by a ValueError, what one launch can't do; groups: the op's lists, in their order."""
    xs, qdata, transposed, scale_inv, amax, delayed_scales = groups
    lengths = [len(group) for group in (qdata, scale_inv, amax)]
    lengths += [len(group) for group in (transposed, delayed_scales) if group]
    if any(length != len(xs) for length in lengths):
        raise ValueError(f"the lists are {[len(group) for group in groups]} long; give each tensor its outputs")
    if tuple(tile) != (ALL, ALL) and not is_small_block(tile):
        raise ValueError(f"tile={tuple(tile)}: many are cast per tensor or by blocks of powers of two up to 128")
    for name, tensors in (("xs", xs), ("qdata", qdata)):
        dtypes = sorted({str(tensor.dtype) for tensor in tensors})
        if len(dtypes) > 1:
            raise ValueError(f"{name} have the dtypes {dtypes}; make a call for each")
    for index, x in enumerate(xs):
        if x.ndim != 2 or x.stride(1) != 1:
            raise ValueError(f"xs[{index}] of shape {tuple(x.shape)}, strides {x.stride()}: needs contiguous rows")


def multi_tensor_cast(
    xs: Sequence[Tensor],
    qdata: Sequence[Tensor],
    transposed: Sequence[Tensor],
    scale_inv: Sequence[Tensor],
    amax: Sequence[Tensor],
    delayed_scales: Sequence[Tensor],
    role: int,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    skip: Tensor | None = None,
    cast: Callable[..., tuple[Tensor, ...]] = cast,
) -> None:
    """``octavo::multi_tensor_cast``."""
    check_multi_tensor_cast((xs, qdata, transposed, scale_inv, amax, delayed_scales), tile)
    if skip is not None and bool(skip):
        return
    for index, x in enumerate(xs):
        delayed_scale = delayed_scales[index] if delayed_scales else None
        dtype = qdata[index].dtype
        scaling = Scaling(dtype, (tile[0], tile[1]), power_of_two, margin, delayed_scale, role)
        codes, other, scales, found, _ = cast(CastSource(x), scaling, None, Output(bool(transposed)))
        copy_codes(qdata[index], codes)
        if transposed:
            copy_codes(transposed[index], other)
        scale_inv[index].copy_(scales)
        amax[index].copy_(found)


def copy_codes(out: Tensor, codes: Tensor) -> None:
    """Write codes to ``out``, whose rows may be longer, with zero codes at their end."""
    padding = out.shape[1] - codes.shape[1]
    out.view(torch.uint8).copy_(F.pad(codes.view(torch.uint8), (0, padding)))
