"""Tiles of a tensor: each element is one's alone. test_optimizer_step.py compares what is read and written."""

import pytest
import torch

from octavo.kernels.layouts import blocks_of
from tests.support.triton_cases import row_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (1, 31), (1, 128), (3, 31), (5, 128), (2, 300), (7, 16), (4, 256), (1, 2064)]


@pytest.mark.parametrize("large", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_element_is_in_one_tile(shape: tuple[int, int], large: bool, kernels: TritonKernels) -> None:
    row = row_of(kernels, ROWS=shape[0], COLS=shape[1])
    blocks = shape[0] * blocks_of(shape[1])
    of_row = torch.arange(shape[1]) // 128
    expected = 1 + of_row + blocks_of(shape[1]) * torch.arange(shape[0])[:, None]
    for even in {False, (shape[0] == 1 or shape[1] % 128 == 0) and shape[0] * shape[1] % 16 == 0}:
        for tile in (4, 16):
            room = torch.zeros(3, 4096, dtype=torch.int32, device=kernels.device)
            kernels.launch("place_kernel", -(-blocks // tile), row, *room, tile, even, large)
            elements, counts, owner = room.cpu()
            assert elements.sum() == shape[0] * shape[1] and (elements[: shape[0] * shape[1]] == 1).all()
            assert counts.sum() == blocks and (counts[:blocks] == 1).all()
            assert torch.equal(owner[: expected.numel()].view(shape), expected.int())
