import pytest
import torch
from torch import Tensor

from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

WIDTH, FIRST = 3, 2


def owners(programs: list[int], kernels: TritonKernels) -> tuple[Tensor, Tensor]:
    """The tensor of each program, and the first column of its row, where tensors have so many programs each."""
    first = [sum(programs[:i]) for i in range(len(programs))]
    table = torch.tensor([[1000 + i, -7, begin] for i, begin in enumerate(first)], device=kernels.device)
    tensors, rows = torch.full((2, sum(programs)), -1, device=kernels.device).unbind()
    searched = kernels.module("table").Tensors(len(programs))
    kernels.launch("find_kernel", sum(programs), table, tensors, rows, searched, WIDTH, FIRST)
    return tensors.cpu(), rows.cpu()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 127, 128, 300])
def test_each_program_finds_its_tensor(count: int, kernels: TritonKernels) -> None:
    programs = [1 + (i * i) % 3 if count < 100 else 1 + (i % 97 == 5) for i in range(count)]
    tensors, rows = owners(programs, kernels)
    expected = torch.arange(count).repeat_interleave(torch.tensor(programs))
    assert torch.equal(tensors, expected)
    assert torch.equal(rows, 1000 + expected)


def test_tensors_without_programs_are_passed_over(kernels: TritonKernels) -> None:
    for programs in ([0, 2, 0, 0, 1, 0], [0, 0, 3], [2, 0, 0, 0], [0, 1]):
        expected = torch.arange(len(programs)).repeat_interleave(torch.tensor(programs))
        assert torch.equal(owners(programs, kernels)[0], expected)


def test_search_takes_enough_steps(kernels: TritonKernels) -> None:
    tensors = kernels.module("table").Tensors
    for count in (1, 2, 3, 4, 5, 127, 128, 129, 300):
        assert 1 << tensors(count).steps >= count > (1 << tensors(count).steps) // 2


@pytest.mark.parametrize("aligned", [True, False])
def test_columns_are_addresses_and_sizes(aligned: bool, kernels: TritonKernels) -> None:
    x = torch.randn(32, device=kernels.device)[0 if aligned else 1 :]
    row = torch.tensor([0, x.data_ptr(), 4096], device=kernels.device)
    out = torch.zeros(2, device=kernels.device)
    kernels.launch("pointer_kernel", 1, row, out, aligned)
    assert out.tolist() == [float(x[0]), 4096.0]
