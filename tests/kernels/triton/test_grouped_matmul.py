"""Parts, wrong offsets and launches of products of groups; tests/kernels/test_matmul.py has any groups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.arguments import OperandPair
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.casts import ALL, poisoned_memory
from tests.support.product_cases import BLOCK, SQUARE, close, of_flat, rows_in_groups, terms_in_groups
from tests.support.triton_cases import count_launches
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


def product(kernels: TritonKernels) -> Callable[..., Tensor]:
    """Triton's, with the op's arguments."""
    return of_flat(kernels.module("grouped_matmul").triton_grouped_matmul, "grouped_matmul")


def check(kernels: TritonKernels, *args: Any, fast: bool = False) -> Tensor:
    with poisoned_memory():
        y = product(kernels)(*args)
    expected = REFERENCE["grouped_matmul"](*args)
    close(y, expected, kernels, fast)
    assert not y[(expected == 0).all(-1)].any()  # of rows in no group, and of groups without rows
    return y


@pytest.mark.parametrize("form", [rows_in_groups, terms_in_groups])
def test_parts_of_two_products(form, kernels, monkeypatch):
    """Large groups on Hopper, and faults or scales whose product float32 does not hold, are computed in two parts."""
    config = kernels.module("launch").Config(256, 128, 4, 16)
    if kernels.module("matmul")._architecture() in (89, 120):
        pytest.skip("such parts do not fit the shared memory of this GPU, which the library gives smaller ones")
    monkeypatch.setattr(kernels.module("grouped_matmul"), "grouped_config", lambda *_: config)
    args = list(form([0, 17, 140], 3, (BLOCK, SQUARE), 140, 144))
    for exponent in (0, 120):
        args[1], args[4] = args[1] * 2.0**exponent, args[4] * 2.0**-exponent
        check(kernels, *args, None, torch.float32, False, 16)


def test_only_large_groups_have_high_parts(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    module, high = kernels.module("grouped_matmul"), kernels.module("launch").Config(256, 128, 4, 16)
    monkeypatch.setattr(module, "product_config", lambda *_: high)
    a, b = (OperandPair(torch.empty(0), torch.empty(0), tile) for tile in (BLOCK, SQUARE))
    assert [module.grouped_config(a, b, (rows, 4096), 8).tile_r for rows in (8 * 1024 - 1, 8 * 1024)] == [128, 256]


@pytest.mark.parametrize("ends", [[3, 2, 40], [-1, 40, 40], [3, 41, 41], [0, 1 << 30, 40]], ids=str)
def test_wrong_offsets_make_products_nan(ends: list[int], kernels: TritonKernels) -> None:
    args = rows_in_groups([10, 20, 10], 0, (BLOCK, SQUARE), 24, 144)
    offsets = torch.tensor(ends, dtype=torch.int32)
    y = product(kernels)(*args[:6], offsets, None, torch.bfloat16, False)
    assert y.isnan().all()
    args = terms_in_groups([10, 20, 10], 0, (BLOCK, BLOCK), 24, 144)
    no_room = torch.tensor([40, 60, 80], dtype=torch.int32)  # for the padding, where rows beyond the end may be read
    for wrong in (offsets + 60 * (offsets == 41).int(), no_room):
        y = product(kernels)(*args[:6], wrong, None, torch.bfloat16, False, 16)
        assert y.isnan().all()


def test_one_launch(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(kernels, monkeypatch)
    check(kernels, *rows_in_groups([3, 4], 0, (ALL, ALL), 8, 16), None, torch.float32, False)
    check(kernels, *terms_in_groups([3, 4], 0, (ALL, ALL), 8, 16), None, torch.float32, False, 16)
    assert launches == ["rows_in_groups_kernel", "terms_in_groups_kernel"]
