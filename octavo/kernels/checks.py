"""Checks of the shapes of ops' tensors: kernels read and write memory by them, and by none of their own.

What is traced, whose sizes may be symbols, is checked when it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from octavo.formats import E2M1
from octavo.granularity import MX, Tile, scale_shape
from octavo.kernels.groups import grouped_scale_shape
from octavo.kernels.layouts import swizzled_size, unpacked_shape
from octavo.numerics import E8M0

WITH_MEMORY = Tensor, Parameter  # else it is traced
ShapeAndDtype = tuple[Sequence[int], torch.dtype]  # of a tensor
OperandKinds = tuple[Sequence[int], torch.dtype, Sequence[int], torch.dtype, Tile]  # of codes, of scales; the tile


def check_shape(name: str, tensor: Tensor | None, shape: Sequence[int], is_dense: bool = False) -> None:
    """Raise ValueError for a tensor of another shape, or, where it has to be dense, of other strides."""
    if tensor is None or type(tensor) not in WITH_MEMORY:
        return
    if tuple(tensor.shape) != tuple(shape) or (is_dense and not tensor.is_contiguous()):
        sizes = f"{list(tensor.shape)}, strides {tensor.stride()}," if is_dense else f"{list(tensor.shape)}"
        raise ValueError(f"{name} of shape {sizes} needs {list(shape)}{', contiguous' * is_dense}")


@functools.lru_cache(maxsize=4096)  # training asks for the same shapes again and again, without a call of Python
def check_grid(name: str, codes: ShapeAndDtype, scales: ShapeAndDtype, tile: Tile, groups: int | None) -> None:
    """Check the scales, plain or swizzled, by which codes are read, whose rows are in so many groups or in none.

    Raises:
        ValueError: for scales that are not one for each tile, or of a dtype that no cast writes.
    """
    shape = unpacked_shape(*codes)
    grid = scale_shape(shape, tile) if groups is None else grouped_scale_shape((shape[0], shape[1]), groups, tile)
    if len(scales[0]) == 1 and tile in (MX, MX[::-1]) and groups is None and len(shape) == 2:
        grid = (swizzled_size(grid, tile),)
    if tuple(scales[0]) != grid:
        where = f"codes {list(codes[0])} in tiles of {tile}" + ("" if groups is None else f", {groups} groups")
        raise ValueError(f"{name} of shape {list(scales[0])} needs {list(grid)}: {where}")
    if scales[1] not in (torch.float32, E8M0) and codes[1] is not E2M1.dtype:
        raise ValueError(f"{name} of {scales[1]}: it is float32, or E8M0")


def check_terms(a: ShapeAndDtype, b: ShapeAndDtype) -> None:
    """Raise ValueError for the codes of operands that have different numbers of terms."""
    if unpacked_shape(*a)[-1] != unpacked_shape(*b)[-1]:
        raise ValueError(f"operands of shapes {list(a[0])} and {list(b[0])} contract over last dimensions that differ")


@functools.lru_cache(maxsize=4096)
def check_product(a: OperandKinds, b: OperandKinds, bias: Sequence[int] | None) -> None:
    """Raise ValueError for operands whose scales, numbers of terms, or bias don't fit."""
    for name, operand in (("a's scale_inv", a), ("b's scale_inv", b)):
        check_grid(name, operand[:2], operand[2:4], operand[4], None)
    check_terms(a[:2], b[:2])
    if bias is not None and tuple(bias) != tuple(b[0][:1]):
        raise ValueError(f"bias of shape {list(bias)} needs {list(b[0][:1])}, one for each row of b")


def check_sizes(**tensors: tuple[Tensor | None, str]) -> None:
    """Raise ValueError unless dimensions of one letter have one size: ``check_sizes(x=(x, "RC"), gamma=(gamma, "C"))``.

    None, and what is traced, is left out.
    """
    size_of: dict[str, int] = {}
    for name, (tensor, letters) in tensors.items():
        if tensor is None or type(tensor) not in WITH_MEMORY:
            continue
        sizes = [size_of.setdefault(letter, size) for letter, size in zip(letters, tensor.shape, strict=False)]
        if len(letters) != tensor.ndim or tuple(tensor.shape) != tuple(sizes):
            raise ValueError(f"{name} of shape {list(tensor.shape)} needs [{', '.join(letters)}], where {size_of}")


def check_state(scale: Tensor, history: Tensor, before: Tensor, *amaxes: Tensor | None) -> None:
    """Raise ValueError for a delayed state of other shapes than three roles', or an amax that is not one number."""
    is_dense = scale.is_contiguous() and history.is_contiguous() and before.is_contiguous()
    sizes = [amax.numel() for amax in amaxes if amax is not None]
    if not is_dense or (scale.numel(), history.shape[0], before.numel(), *sizes) != (3, 3, 9, *[1] * len(sizes)):
        shapes = [x if x is None else list(x.shape) for x in (scale, history, before, *amaxes)]
        raise ValueError(f"a delayed state and amaxes of {shapes} need [3], [3, length], [3, 3], dense; and one number")


def check_norm(x: Tensor, kind: str, gamma: Tensor, **tensors: tuple[Tensor | None, str]) -> None:
    """Raise ValueError for another kind of norm of x [R, C], or parameters, rows or results of other sizes."""
    if kind not in ("layer_norm", "rms_norm"):
        raise ValueError(f"kind={kind!r}: use 'layer_norm' or 'rms_norm'")
    check_sizes(x=(x, "RC"), gamma=(gamma, "C"), **tensors)


def check_codes_of_loss(logits: Tensor, codes: Tensor, transposed: Tensor, first: int) -> None:
    """Raise ValueError where a gradient [T, V] has no room in codes, or from a column on in transposed ones."""
    rows, cols = logits.shape
    if codes.numel():
        check_shape("codes", codes, (rows, max(cols, codes.shape[1])), is_dense=True)
    if transposed.numel():
        width = max(first + rows, transposed.shape[1])
        check_shape("transposed", transposed, (cols, width))
        check_shape("a row of transposed", transposed[0], (width,), is_dense=True)
