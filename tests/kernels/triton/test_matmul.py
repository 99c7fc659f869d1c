"""Which product of two pairs a case goes to; tests/kernels/test_matmul.py has any product."""

from typing import Any
from unittest import mock

import pytest
import torch

from octavo.granularity import Tile
from octavo.kernels.triton.launch import LIBRARY
from tests.support.casts import ALL, E4M3, E5M2
from tests.support.product_cases import BLOCK, MX, ROWS, SQUARE, operands
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


def chosen(kernels: TritonKernels, *args: Any, right: bool = True) -> str:
    """Return the name of the product that ``matmul`` goes to, on a device whose own is right or not."""
    module = kernels.module("matmul")
    library = kernels.module("library_matmul")
    with (
        mock.patch.object(module, "library_matmul", return_value="torch"),
        mock.patch.object(library, "_known", {}),
        mock.patch.object(library, "_agrees", return_value=right),
        mock.patch.object(module, "triton_matmul", return_value="Triton"),
        mock.patch.object(module, "reference_matmul", return_value="reference"),
        mock.patch.object(kernels.module("replay"), "REPLAYS", {}),
    ):
        name: str = kernels.matmul(*args)
        return name


def test_the_choice(kernels: TritonKernels) -> None:
    bf16 = torch.bfloat16
    both, pair = (ALL, ALL), (E4M3, E4M3)
    even = operands((32, 48, 64), both, pair)
    assert chosen(kernels, *even, None, bf16, True) == chosen(kernels, *even, None, torch.float32, False) == "torch"
    assert chosen(kernels, *even, None, bf16, True, right=False) == "Triton"
    assert chosen(kernels, *even, torch.ones(48), bf16, True) == "torch"
    assert chosen(kernels, *even, torch.ones(48), torch.float32, True) == "Triton"  # torch's has no such bias
    assert chosen(kernels, *operands((17, 48, 64), both, pair), None, bf16, True) == "torch"
    for odd in ((32, 47, 64), (32, 48, 63), (0, 48, 64)):
        assert chosen(kernels, *operands(odd, both, pair), None, bf16, True) == "Triton"
    assert chosen(kernels, *operands((32, 48, 64), both, (E5M2, E5M2)), None, bf16, True) == "Triton"
    assert chosen(kernels, *operands((32, 48, 60), ((1, 20), (1, 20)), pair), None, bf16, True) == "reference"
    scaled = operands((32, 48, 64), (MX, MX), pair)
    assert chosen(kernels, *scaled, None, bf16, False) == "torch"
    assert chosen(kernels, *scaled, None, bf16, False, right=False) == "Triton"
    wide = *scaled[:1], scaled[1].float(), *scaled[2:]  # another cast's: torch's takes E8M0 of both
    for args in ((*scaled, None, torch.float32), (*wide, None, bf16)):
        assert chosen(kernels, *args, False) == "Triton"


@pytest.mark.parametrize("tiles", [(ROWS, ROWS), (BLOCK, SQUARE), (BLOCK, BLOCK)], ids=str)
def test_the_choice_is_the_table_s(tiles: tuple[Tile, Tile], kernels: TritonKernels) -> None:
    module = kernels.module("matmul")
    args = (*operands((32, 64, 256), tiles, (E4M3, E4M3)), None, torch.bfloat16, False)
    for table, expected in (({(*tiles, False)}, "torch"), ({(*tiles, True)}, "Triton"), (set(), "Triton")):
        with mock.patch.object(module, "LIBRARY", table):
            assert chosen(kernels, *args) == expected
    with mock.patch.object(module, "LIBRARY", {(*tiles, False)}):
        half = (*operands((32, 64, 192), tiles, (E4M3, E4M3)), None, torch.bfloat16, False)
        assert chosen(kernels, *half) == ("torch" if tiles[0] == ROWS else "Triton")  # half a block
        short = (*operands((30, 64, 256), tiles, (E4M3, E4M3)), None, torch.bfloat16, False)
        assert chosen(kernels, *short) == ("torch" if tiles[0] == ROWS else "Triton")  # scales not in sixteens
    assert (ALL, ALL, True) in LIBRARY
