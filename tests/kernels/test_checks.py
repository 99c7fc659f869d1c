"""Tensors of wrong sizes are refused by every implementation, before it reads or writes beyond one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.checks import check_sizes
from octavo.scaling.delayed import State
from tests.kernels.conftest import Ops
from tests.support.casts import ALL, E4M3, update_args

SQUARE, ROWS = (128, 128), (1, -1)
X, CODES = torch.randn(256, 160), torch.randn(256, 160).to(E4M3)
SCALES, COUNTS = torch.ones(2, 2), (torch.zeros(71, dtype=torch.float64), torch.zeros(3))
STATE = State.empty(4)
TARGET, LSE = torch.zeros(256).long(), torch.zeros(256)


def product(a_scale_inv: Tensor, b: Tensor = CODES, bias: Tensor | None = None) -> tuple[Any, ...]:
    return CODES, a_scale_inv, ROWS, b, torch.ones(256, 1), ROWS, bias, torch.float32, False


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape).to(E4M3)


CASES: list[tuple[str, tuple[Any, ...], str]] = [
    ("dequantize", (CODES, torch.ones(1, 1), SQUARE, torch.float32), r"scale_inv of shape \[1, 1\] needs \[2, 2\]"),
    ("dequantize", (CODES, SCALES.bfloat16(), SQUARE, torch.float32), "scale_inv of torch.bfloat16: it is float32, or"),
    ("dequantize", (CODES, torch.ones(8).to(torch.float8_e8m0fnu), (1, 32), torch.float32), r"\[8\] needs \[2048\]"),
    ("matmul", product(torch.ones(255, 1)), r"a's scale_inv of shape \[255, 1\] needs \[256, 1\]"),
    ("matmul", product(torch.ones(256, 1), codes(256, 96)), "contract over last dimensions that differ"),
    ("matmul", product(torch.ones(256, 1), bias=torch.ones(1)), r"bias of shape \[1\] needs \[256\]"),
    ("cast", (X, torch.ones(3), 3, E4M3, ALL, False, 0), "role 3 is no element"),
    ("cast", (CODES, None, 0, E4M3, ALL, False, 0, False, 1, False, "silu", None, SCALES[:1], SQUARE), "h_scale_inv"),
    ("cast_statistics", (X[:9], CODES, SCALES, SQUARE, *COUNTS), r"x of shape \[9, 160\] needs \[256, 160\]"),
    ("cast_statistics", (X, CODES, SCALES, SQUARE, COUNTS[0][:70], COUNTS[1]), r"sums of shape \[70\]"),
    ("note_faults", (X, CODES[:9], None, None, *torch.zeros(3, 4)), r"y of shape \[256, 160\] needs \[9, 160\]"),
    ("delayed_update", (STATE[0], STATE[1][:2], STATE[2], None, None, X[:1, :1], *update_args("max")), "delayed state"),
    ("delayed_update", (*STATE, None, None, X[:0], *update_args("max")), "delayed state and amaxes"),
    ("cross_entropy_backward", (X, TARGET, -100, 0.0, 0.0, LSE, LSE[:1]), r"grad of shape \[1\] needs \[T\]"),
    ("cross_entropy_codes", (X, TARGET, -100, 0.0, 0.0, LSE, codes(9, 160), codes(0, 0), 0), "codes of shape"),
    ("cross_entropy_codes", (X, TARGET, -100, 0.0, 0.0, LSE, codes(0, 0), codes(160, 256), 16), "transposed of shape"),
    ("norm_backward", (X, X, X[0], LSE, LSE[:1], "layer_norm", False, True), r"rstd of shape \[1\] needs \[R\]"),
    ("multi_tensor_cast", ([X], [codes(1, 160)], [], [SCALES], [SCALES], [], 0, SQUARE, False, 0), "as many rows"),
    ("multi_tensor_cast", ([X], [CODES], [], [SCALES[:1]], [SCALES[:1]], [], 0, SQUARE, False, 0), "scales are"),
    ("multi_tensor_cast", ([X], [CODES], [], [SCALES], [SCALES.t()], [], 0, SQUARE, False, 0), "make them contiguous"),
]


@pytest.mark.parametrize(("op", "arguments", "said"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_sizes_are_refused(ops: Ops, op: str, arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ops.of(op)(*arguments)


def test_dimensions_of_one_letter_have_one_size() -> None:
    check: Callable[..., None] = check_sizes
    check(x=(torch.ones(2, 3), "RC"), gamma=(torch.ones(3), "C"), beta=(None, "C"))
    for wrong in (torch.ones(2), torch.ones(3, 1), torch.ones(())):
        with pytest.raises(ValueError, match=r"gamma of shape .* needs \[C\], where {'R': 2, 'C': 3}"):
            check(x=(torch.ones(2, 3), "RC"), gamma=(wrong, "C"))
