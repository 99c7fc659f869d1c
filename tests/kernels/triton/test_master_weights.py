import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.layouts import blocks_of
from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_state import pieces
from tests.support.triton_cases import row_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

KINDS = ["weight", "split32", "split24", "stochastic"]


def numbers(shape: tuple[int, int], faults: bool) -> Tensor:
    """New masters: ones between two bf16 numbers too, and the largest that are not inf in bf16."""
    x = torch.randn(shape)
    flat = x.view(-1)
    flat[:6] = (
        torch.tensor([0x3F808000, 0x3F807FFF, 0x3F80FF80, 0x3F80FFFF, 0x00000001, 0x7F7F0000]).int().view(torch.float32)
    )
    if faults:
        flat[7:10] = torch.tensor([math.nan, math.inf, -math.inf])
    return x


def master(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> MasterWeight:
    weight = torch.randn(shape).to(dtype)
    rest: Tensor | None = None
    if kind == "split32":
        rest = torch.randint(-(1 << 15), 1 << 15, shape).to(torch.int16)
    if kind == "split24":
        rest = torch.randint(-128, 128, shape).to(torch.int8)
    return MasterWeight(weight, kind, rest)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


@pytest.mark.parametrize("faults", [False, True], ids=["finite", "faults"])
@pytest.mark.parametrize("shape", [(3, 31), (4, 256), (2, 300)], ids=str)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("weight", torch.float32), *((kind, torch.bfloat16) for kind in KINDS[1:])], ids=str
)
def test_a_master(kind: str, dtype: torch.dtype, shape: tuple[int, int], faults: bool, kernels: TritonKernels) -> None:
    theirs, new = master(kind, shape, dtype), numbers(shape, faults)
    weight = theirs.weight.to(kernels.device, copy=True)
    rest = None if theirs.rest is None else theirs.rest.to(kernels.device, copy=True)
    bits = torch.randint(0, 1 << 16, shape, dtype=torch.int32)
    scales = torch.tensor([2.0**-9, 2.0**12])
    columns: Any = {"WEIGHT_COLUMN": weight} | ({} if rest is None else {"REST": rest})
    row = row_of(kernels, ROWS=shape[0], COLS=shape[1], **columns)
    wide = torch.empty(shape, device=kernels.device)
    found = torch.full((64,), -1.0, device=kernels.device)
    given = [x.to(kernels.device) for x in (new, bits, scales)]
    even = shape == (4, 256)
    programs = -(-shape[0] * blocks_of(shape[1]) // 4)
    of = kernels.module("optimizer_state").MasterClass.of(theirs)
    kernels.launch("master_kernel", programs, row, wide, *given, found, of, even, 4)
    for piece in pieces(*shape):
        assert same(piece.of(wide.cpu()), theirs.read(piece))
        theirs.write(piece, piece.of(new).clone(), piece.of(bits))
    assert same(weight.cpu(), theirs.weight)
    assert rest is None or same(rest.cpu(), theirs.rest)
    assert found.max() == 0.0
