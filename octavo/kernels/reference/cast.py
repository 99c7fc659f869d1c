"""amax, and casts from bf16, fp16 or fp32 to codes, their scale_inv and the amax. Contracts are in signatures.py.

All ops cast with ``write``, for which another device may pass a tuned function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.formats import E2M1
from octavo.granularity import ALL, MX, scale_shape, tiles_along
from octavo.kernels.arguments import (
    Castable,
    CastLists,
    CastSource,
    CastTarget,
    Commit,
    NormSource,
    Output,
    RotaryHeads,
    Scaling,
    new_cast,
    new_scales,
    no_codes,
)
from octavo.kernels.backward_pass import scales_of_pass
from octavo.kernels.groups import check_offsets, places
from octavo.kernels.layouts import as_tiles, is_small_block, swizzled
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.codes import encode
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.kernels.reference.norm import normalise
from octavo.kernels.reference.nvfp4 import write_packed
from octavo.kernels.reference.rotary import rotary
from octavo.numerics import scale_inv_dtype, scale_inv_from_scale

Write = Callable[[Castable, Sequence[CastTarget], Sequence[Tensor], CastTarget | None], None]


def amax_of(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Return the amax of each tile, float32."""
    shape = scale_shape(x.shape, tile)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    x_RC = torch.where(x.isfinite(), x, 0).to(torch.float32).abs_().view(-1, x.shape[-1])
    return as_tiles(x_RC, tile).amax(dim=(1, 3)).view(shape)


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Compute the op ``octavo::amax``; its contract is in signatures.py."""
    return new_scales(x, x.shape, (tile[0], tile[1])).copy_(amax_of(x, tile))


def write(
    source: Castable, targets: Sequence[CastTarget], besides: Sequence[Tensor] = (), recast: CastTarget | None = None
) -> None:
    """Write each target and, into those of ``besides`` that are not empty, column sums or a norm's mean, rstd and y.

    ``recast``: the target of the activation whose gradient the source is, if that is cast too.
    """
    if recast is not None:
        assert isinstance(source, CastSource) and source.preactivation is not None
        write(CastSource(source.preactivation, source.activation), [recast])
    if isinstance(source, NormSource):
        values, *extras = normalise(*source)
        extras.append(values)
    else:
        values = rotary(source).view(source.shape) if isinstance(source, RotaryHeads) else produced(*source)
        extras = [values.sum(0) for sums in besides if sums.numel()]  # torch adds in float32 and rounds once
    for out, result in zip(besides, extras, strict=False):
        if out.numel():
            out.copy_(result)
    for target in targets:
        scaling, codes, transposed, scale_inv, amax = target
        if scaling.dtype is E2M1.dtype:
            amax.copy_(amax_of(values, (ALL, ALL)))
            write_packed(values, target)
            continue
        scale = scaling.scale_of(amax.copy_(amax_of(values, scaling.tile)))
        scale_inv.copy_(scale_inv_from_scale(scale))
        code_bytes = encode(values, scale, scaling.tile, scaling.dtype).view(torch.uint8)
        for out, raw in ((codes, code_bytes), (transposed, code_bytes.t())):
            if out.numel():  # where its rows are longer, they end with zero codes
                out.view(torch.uint8).copy_(F.pad(raw, (0, out.shape[1] - raw.shape[1])))


def cast(
    source: Castable,
    first: Scaling,
    second: Scaling | None,
    output: Output,
    offsets: Tensor | None = None,
    write: Write = write,
) -> tuple[Tensor, ...]:
    """Compute the op ``octavo::cast``; its contract is in signatures.py."""
    if first.swizzles:
        plain = first._replace(swizzles=False), None if second is None else second._replace(swizzles=False)
        return _with_swizzled_scales(cast(source, *plain, output, write=write), first, second, output)
    results = new_cast(source, first, second, output, offsets)
    is_norm = isinstance(source, NormSource)
    sums_or_statistics = results[4:] if is_norm else results[4:5]
    if offsets is not None:
        assert isinstance(source, CastSource)
        _write_groups(source, CastTarget(first, *results), output.pad, offsets, write)
    elif second is None:
        codes, transposed, scale_inv, amax, *_ = results
        recast = None
        if output.recast is not None:  # nobody reads its scale_inv
            unread = scale_inv.new_empty((1, 1), dtype=torch.float32)
            recast = _target_in_one_layout(output.recast, results[-1], unread, output.recast_transposed)
        write(source, [CastTarget(first, codes, transposed, scale_inv, amax)], sums_or_statistics, recast)
        if output.keep and not is_norm:
            kept_scale = results[5]
            kept_scale.copy_(first.scale_of(amax).view(1))
    else:
        codes, second_codes, scale_inv, second_scale_inv, *_ = results
        second_scales = second_scale_inv.t() if output.transpose else second_scale_inv
        first_target = _target_in_one_layout(first, codes, scale_inv)
        second_target = _target_in_one_layout(second, second_codes, second_scales, output.transpose)
        write(source, [first_target, second_target], sums_or_statistics, None)
    return results


def _target_in_one_layout(
    scaling: Scaling, codes: Tensor, scale_inv: Tensor, is_transposed: bool = False
) -> CastTarget:
    """Return a target that has these codes, as the matrix lies or transposed, alone, and whose amax nobody reads."""
    none = no_codes(codes, scaling.dtype)
    layouts = (none, codes) if is_transposed else (codes, none)
    amax_shape = (1, 1) if scaling.dtype is E2M1.dtype else scale_inv.shape  # of E2M1 it is one number
    return CastTarget(scaling, *layouts, scale_inv, scale_inv.new_empty(amax_shape, dtype=torch.float32))


def _with_swizzled_scales(
    results: Sequence[Tensor], first: Scaling, second: Scaling | None, output: Output
) -> tuple[Tensor, ...]:
    """Return a cast's results with each scale_inv laid as its operand is, and swizzled."""
    _, _, scale_inv, second_scale_inv, *_ = results = list(results)
    results[2] = swizzled(scale_inv if first.tile == MX else scale_inv.t())
    if second is not None:
        results[3] = swizzled(second_scale_inv if output.transpose or second.tile == MX else second_scale_inv.t())
    return tuple(results)


def _write_groups(source: CastSource, target: CastTarget, pad: int, offsets: Tensor, write: Write) -> None:
    """Cast each group of rows by itself."""
    scaling, codes, transposed, scale_inv, amax = target
    rows, cols = source.shape
    ends = check_offsets(offsets, rows)
    for out in (codes, transposed):
        out.view(torch.uint8).zero_()
    scale_inv.fill_(1.0)
    amax.zero_()
    for place, input_place in zip(places(ends, scaling.tile[0], pad), places(ends, source.h_tile[0]), strict=True):
        if place.rows.start == place.rows.stop and scaling.delayed_scale is None:
            continue  # the fills above wrote its scale, 1, and its amax, 0
        outputs = codes[place.rows, :cols], transposed[:, place.columns]
        scales = scale_inv[place.scale_rows], amax[place.scale_rows]
        write(source.part(input_place.rows, input_place.scale_rows), [CastTarget(scaling, *outputs, *scales)], (), None)


def cast_and_commit(
    source: Castable, scaling: Scaling, commit: Commit, output: Output, write: Write = write
) -> tuple[Tensor, ...]:
    """Compute the op ``octavo::cast_and_commit``; its contract is in signatures.py."""
    in_pass = scaling._replace(delayed_scale=scales_of_pass(commit.delayed_scale, commit.delayed_before))
    q, t, scale_inv, amax, sums, *recast_codes = cast(source, in_pass, None, output, write=write)
    delayed_update(commit, amax)
    return q, t, scale_inv, sums, *(recast_codes or [no_codes(q, q.dtype)])


def sizes_of_casts(lists: CastLists, role: int, tile: Sequence[int], power_of_two: bool) -> tuple[tuple[int, ...], ...]:
    """Return (R, C, row strides of x, of its codes, of the transposed ones or 0) of each tensor, after checking all.

    Raises:
        ValueError: for tensors that one launch can't cast, and outputs that are not dense or too small.
    """
    xs, qdata, transposed, scale_inv, amax, delayed_scales = lists
    outputs_and_scales = (qdata, scale_inv, amax, transposed or xs, delayed_scales or xs)  # the last two may be empty
    if any(len(tensors) != len(xs) for tensors in outputs_and_scales):
        raise ValueError(f"the lists are {[len(tensors) for tensors in lists]} long; give each tensor its outputs")
    is_whole = tuple(tile) == (ALL, ALL)
    if not is_whole and not is_small_block(tile):
        raise ValueError(f"tile={tuple(tile)}: many are cast per tensor or by blocks of powers of two up to 128")
    for name, tensors in (("xs", xs), ("qdata", qdata)):
        if len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"{name} have the dtypes {sorted(map(str, dtypes))}; make a call for each")
    expected_dtype = scale_inv_dtype(tile, power_of_two)
    if wrong := {str(one.dtype) for one in scale_inv if one.dtype != expected_dtype}:
        raise ValueError(f"scale_inv of {sorted(wrong)}: tiles of {tuple(tile)} have {expected_dtype}")
    if any(scale.numel() <= role or not scale.is_contiguous() for scale in delayed_scales):
        raise ValueError(f"delayed_scales of {[list(scale.shape) for scale in delayed_scales]}: none has role {role}")
    sizes: list[tuple[int, ...]] = []
    for x, codes, laid, scales, amaxes in zip(xs, qdata, transposed or qdata, scale_inv, amax, strict=True):
        shape, strides, (height, width), grid = x.shape, x.stride(), codes.shape, scales.shape
        if len(shape) != 2 or strides[1] != 1:
            raise ValueError(f"xs[{len(sizes)}] of shape {tuple(shape)}, strides {strides}: needs contiguous rows")
        rows, cols = shape
        laid_height, laid_width = laid.shape if transposed else (cols, rows)
        tiles = (1, 1) if is_whole else (-(-rows // tile[0]), -(-cols // tile[1]))
        has_room = height == rows and width >= cols and laid_height == cols and laid_width >= rows
        # memory of a shard's scales may have more rows
        if not has_room or grid != amaxes.shape or grid[0] < tiles[0] or grid[1] != tiles[1]:
            outputs = [list(one.shape) for one in (codes, laid, scales, amaxes)]
            raise ValueError(f"outputs {outputs} of {list(shape)}: codes have as many rows, scales are {tiles}")
        sizes.append((rows, cols, strides[0], width, laid_width if transposed else 0))
    if not all(map(Tensor.is_contiguous, (*qdata, *transposed, *scale_inv, *amax))):
        raise ValueError("codes, scale_inv and amax are written as they lie in memory: make them contiguous")
    return tuple(sizes)


def multi_tensor_cast(
    lists: CastLists,
    role: int,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    skip: Tensor | None = None,
    write: Write = write,
) -> None:
    """Compute the op ``octavo::multi_tensor_cast``; its contract is in signatures.py."""
    sizes_of_casts(lists, role, tile, power_of_two)
    xs, qdata, transposed, scale_inv, amax, delayed_scales = lists
    if skip is not None and bool(skip):
        return
    for index, x in enumerate(xs):
        delayed_scale = delayed_scales[index] if delayed_scales else None
        codes = qdata[index]
        laid = transposed[index] if transposed else no_codes(codes, codes.dtype)
        scaling = Scaling(codes.dtype, (tile[0], tile[1]), power_of_two, margin, delayed_scale, role)
        grid = slice(tiles_along(x.shape[0], tile[0]))  # there may be room for more rows
        write(CastSource(x), [CastTarget(scaling, codes, laid, scale_inv[index][grid], amax[index][grid])], (), None)
    written = [x for x in (*qdata, *transposed, *scale_inv, *amax) if not x.is_inference()]
    torch.autograd.graph.increment_version(written)  # writes by C++ count no version
