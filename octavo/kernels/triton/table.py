"""A launch's table on the device: a row of int64 for each tensor, with its addresses, sizes and first program.

A program finds its tensor by bisection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Triton's dtypes of what the addresses point to
DTYPES = {dtype: getattr(tl, str(dtype)[6:]) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8)}
DTYPES |= {torch.int16: tl.int16, torch.int8: tl.int8}


@triton.constexpr_function
def bisection_steps(count):
    """Return in how many steps a bisection finds one of ``count`` tensors."""
    return (count - 1).bit_length()


@triton.jit
def find_tensor(table_ptr, program, COUNT: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """Find the tensor that a program works on, the last whose first program is not beyond it: (its index, its row).

    COUNT: of the table's tensors; WIDTH: of a row; FIRST: the column of the first program.
    """
    STEPS: tl.constexpr = bisection_steps(COUNT)
    low = 0
    for step in tl.static_range(STEPS):
        middle = low + (1 << (STEPS - 1 - step))
        inside = middle < COUNT
        first = tl.load(table_ptr + tl.where(inside, middle, 0) * WIDTH + FIRST)
        low = tl.where(inside & (first <= program), middle, low)
    return low, table_ptr + low * WIDTH


@triton.jit
def pointer(row_ptr, COLUMN: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address of the table as a pointer to dtype."""
    return to_pointer(tl.load(row_ptr + COLUMN), dtype, ALIGNED)


@triton.jit
def to_pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address as a pointer to dtype."""
    result = address.to(tl.pointer_type(dtype))
    return tl.multiple_of(result, 16) if ALIGNED else result


@triton.jit
def row_of(row_ptr, COLUMNS: tl.constexpr):
    """Load a row's first columns, each once: in a loop that writes to memory, a load is made again each time."""
    row = (tl.load(row_ptr),)
    for column in tl.static_range(1, COLUMNS):
        row += (tl.load(row_ptr + column),)  # type: ignore[assignment]
    return row


@triton.jit
def size(row_ptr, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a size of the table."""
    value = tl.load(row_ptr + COLUMN).to(tl.int32)
    return tl.multiple_of(value, 16) if ALIGNED else value
