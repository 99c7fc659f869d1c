"""What a product's result says of faults in its operand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.reference.note_faults import FOUND
from tests.support.combinations import each_pair
from tests.support.triton_cases import DTYPES, laid
from tests.support.triton_kernels import TritonKernels


def result(shape: tuple[int, int], dtype: torch.dtype, faults: str) -> Tensor:
    y = torch.randn(shape).to(dtype)
    if y.numel():
        y[0, 0] = torch.inf  # of itself, but where it is its whole row
        if faults == "rows":
            y[::3] = torch.nan
            y[-1, [0, -1]] = -torch.inf
    return y


@each_pair(shape=[(1, 1), (17, 2), (300, 3), (5, 0), (0, 5)], dtype=DTYPES, faults=["none", "rows"])
def test_the_reference_is_the_definition(case: dict[str, Any]) -> None:
    y = result(**case)
    found, first = torch.zeros(len(FOUND)), torch.zeros(1, dtype=torch.int32)
    for place in (5, 6):
        scale_inv = torch.tensor([[0.5, 3.0]])
        REFERENCE["note_faults"](y, scale_inv, None, torch.tensor([place]).int(), found, first)
    faulty = sum(all(not e for e in (row[0].isfinite(), row[-1].isfinite())) for row in y) if y.numel() else 0
    assert found.tolist() == ([2 * faulty, 2 * len(y), 3.0, 0.0] if y.numel() else [0.0] * 4)
    assert int(first) == (5 if faulty else 0)


@pytest.mark.gpu
@each_pair(
    shape=[(1, 1), (17, 2), (300, 3), (5, 0), (0, 5)],
    dtype=DTYPES,
    faults=["none", "rows"],
    scales=[None, 1, 9000],
    has_amax=[False, True],
    known=[0, 3],
)
def test_the_kernel_is_the_reference(kernels: TritonKernels, case: dict[str, Any]) -> None:
    y = result(case["shape"], case["dtype"], case["faults"])
    scale_inv = None if case["scales"] is None else torch.rand(case["scales"], 1).t()
    amax = torch.tensor([[2.5]]) if case["has_amax"] else None
    outputs = []
    for device in (torch.device("cpu"), kernels.device):
        x = laid(y, "strided", device)
        place, first = (torch.tensor([at], dtype=torch.int32, device=device) for at in (7, case["known"]))
        found = torch.tensor([1.0, 2.0, 0.25, 0.0], device=device)
        given = [None if t is None else t.to(device) for t in (scale_inv, amax)]
        call = REFERENCE["note_faults"] if not outputs else kernels.note_faults
        call(x, *given, place, found, first)
        outputs.append([*found.tolist(), int(first)])
    assert outputs[0] == outputs[1]
