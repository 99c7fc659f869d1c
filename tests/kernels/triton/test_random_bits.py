import pytest
import torch

from octavo.kernels.random_bits import key_of, random_bits
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

BLOCK = 256
KEYS = [0, 1, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF]


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("start", [0, 1, (1 << 31) - 100, (1 << 32) - 100, 3 << 32, (1 << 40) - 7])
def test_bits_are_the_references(start: int, wide: bool, kernels: TritonKernels) -> None:
    offsets = torch.arange(BLOCK) * 5 % 300  # not in a row
    given = offsets.to(torch.int64 if wide else torch.int32).to(kernels.device)
    for key in KEYS:
        expected = random_bits(key, torch.cat([start + offsets, torch.tensor([start + 300])]))[:-1]
        expected = expected.to(torch.int64) & 0xFFFFFFFF
        for large in (False, True):
            if start + 300 > 1 << 32 and not large:
                continue
            out = torch.empty(3, BLOCK, dtype=torch.int64, device=kernels.device)
            kernels.launch("random_bits_kernel", 1, given, key, start, out, large, BLOCK)
            assert torch.equal(out.cpu(), torch.stack([expected, expected & 0xFFFF, expected >> 16]))


@pytest.mark.parametrize(
    "numbers", [[0], [1], [-1], [1 << 32], [7, 3], [(1 << 63) - 1, 5, 1 << 31], [0xFFFFFFFF, 0]], ids=str
)
def test_a_key_is_of_its_numbers(numbers: list[int], kernels: TritonKernels) -> None:
    key = torch.tensor([0x243F6A88], device=kernels.device)
    kernels.launch("key_kernel", 1, key, torch.tensor(numbers, device=kernels.device), len(numbers))
    assert int(key) == key_of(*numbers)
