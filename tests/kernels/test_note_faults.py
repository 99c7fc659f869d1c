"""Which rows of a product's operand have faults, found by the product's result."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.arguments import FOUND
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.combinations import each_pair
from tests.support.triton_cases import DTYPES, FORMATS, laid
from tests.support.triton_kernels import TritonKernels

SHAPES = [(1, 1, 4), (17, 2, 40), (300, 3, 17), (5, 0, 3), (0, 5, 3)]


def product(shape: tuple[int, int, int], dtype: torch.dtype, faults: str) -> tuple[Tensor, Tensor, Tensor]:
    """An operand, its product with another, and which rows of the operand have faults."""
    rows, cols, contracted = shape
    x = torch.randn(rows, contracted)
    if faults != "none":
        x[::3, -1] = torch.nan
        x[5::7, 0] = torch.inf
    x = x.to(dtype)
    other = torch.randn(cols, contracted)
    other[:, 1:2] += torch.inf if faults == "of both" else 0
    y = x.float() @ other.t()
    y[1:2] = torch.inf  # of itself
    return x, y.bfloat16(), ~x.float().isfinite().all(1)


@each_pair(shape=SHAPES, dtype=[*DTYPES, *FORMATS], faults=["none", "of one", "of both"])
def test_the_reference_is_the_definition(case: dict[str, Any]) -> None:
    x, y, faulty = product(**case)
    found, first = torch.zeros(len(FOUND)), torch.zeros(1, dtype=torch.int32)
    for place in (5, 6):
        scale_inv = torch.tensor([[0.5, 3.0]])
        REFERENCE["note_faults"](y, x, scale_inv, None, torch.tensor([place]).int(), found, first)
    assert found.tolist() == ([2 * faulty.sum(), 2 * len(y), 3.0, 0.0] if y.numel() else [0.0] * 4)
    assert int(first) == (5 if y.numel() and faulty.any() else 0)


ENDS = torch.tensor([0, 2, 2, 290, 290, 298], dtype=torch.int32)  # of groups; two rows more are in none


def of_groups() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in groups with a fault in the fourth and the sixth, the product, scales a group, and their largest."""
    x = torch.randn(300, 17)
    x[[289, 297], [3, 5]] = torch.nan
    scale_inv = torch.tensor([[9.0], [0.5], [9.0], [3.0], [9.0], [2.0]])  # of groups without rows the largest
    return x, x @ torch.randn(17, 3), scale_inv, torch.tensor(3.0)


def test_the_group_of_the_first_fault_is_found() -> None:
    x, y, scale_inv, largest = of_groups()
    found, first = torch.zeros(len(FOUND)), torch.zeros(1, dtype=torch.int32)
    REFERENCE["note_faults"](y, x, scale_inv, None, torch.tensor([20]).int(), found, first, ENDS)
    assert found.tolist() == [2, 300, largest, 0]
    assert int(first) == 20 + 3
    REFERENCE["note_faults"](y[295:], x[295:], None, None, torch.tensor([40]).int(), found, first, ENDS[:1])
    assert int(first) == 20 + 3  # it was the first


@pytest.mark.gpu
def test_the_kernel_finds_the_group(kernels: TritonKernels) -> None:
    x, y, scale_inv, largest = of_groups()
    for faults, groups in ((x, {3, 5}), (x[:297], {3})):  # two programs: whichever comes first
        found, first = torch.zeros(len(FOUND)), torch.zeros(1, dtype=torch.int32)
        given = y[: len(faults)], faults, scale_inv, None, torch.tensor([20]).int(), found, first, ENDS
        found, first = (t.to(kernels.device) for t in (found, first))
        on_device = [t if t is None else t.to(kernels.device) for t in given[:5]]
        kernels.note_faults(*on_device, found, first, ENDS.to(kernels.device))
        assert found.tolist() == [len(groups), len(faults), largest, 0] and int(first) - 20 in groups


@pytest.mark.gpu
@each_pair(
    shape=SHAPES,
    dtype=[*DTYPES, *FORMATS],
    faults=["none", "of one", "of both"],
    scales=[None, 1, 9000],
    has_amax=[False, True],
    known=[0, 3],
)
def test_the_kernel_is_the_reference(kernels: TritonKernels, case: dict[str, Any]) -> None:
    x, y, _ = product(case["shape"], case["dtype"], case["faults"])
    scale_inv = None if case["scales"] is None else torch.rand(case["scales"], 1).t()
    amax = torch.tensor([[2.5]]) if case["has_amax"] else None
    outputs = []
    for device in (torch.device("cpu"), kernels.device):
        on_device = [laid(t.view(torch.uint8) if t.itemsize == 1 else t, "strided", device) for t in (y, x)]
        on_device[1] = on_device[1].view(x.dtype)
        place, first = (torch.tensor([at], dtype=torch.int32, device=device) for at in (7, case["known"]))
        found = torch.tensor([1.0, 2.0, 0.25, 0.0], device=device)
        given = [None if t is None else t.to(device) for t in (scale_inv, amax)]
        call = kernels.note_faults if outputs else REFERENCE["note_faults"]
        call(*on_device, *given, place, found, first)
        outputs.append([*found.tolist(), int(first)])
    assert outputs[0] == outputs[1]
