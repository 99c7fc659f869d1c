"""Tiles of a tensor: each element is one's alone; what is read and written is as the reference has it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import E4M3, E5M2
from octavo.formats import E4M4
from octavo.kernels.layouts import blocks_of
from octavo.kernels.reference.optimizer_state import MomentTensors, pieces
from octavo.numerics import scale_from_amax
from tests.support.correct_roots import correct_roots
from tests.support.triton_cases import row_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (1, 31), (1, 128), (3, 31), (5, 128), (2, 300), (7, 16), (4, 256), (1, 2064)]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float16]


def is_even(rows: int, cols: int) -> bool:
    return (rows == 1 or cols % 128 == 0) and rows * cols % 16 == 0


def launch(kernels: TritonKernels, name: str, shape: tuple[int, int], blocks: int, *args: Any) -> None:
    """A program for each tile of so many blocks."""
    kernels.launch(name, -(-shape[0] * blocks_of(shape[1]) // blocks), *args)


@pytest.mark.parametrize("large", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_element_is_in_one_tile(shape: tuple[int, int], large: bool, kernels: TritonKernels) -> None:
    row = row_of(kernels, ROWS=shape[0], COLS=shape[1])
    blocks = shape[0] * blocks_of(shape[1])
    of_row = torch.arange(shape[1]) // 128
    expected = 1 + of_row + blocks_of(shape[1]) * torch.arange(shape[0])[:, None]
    for even in {False, is_even(*shape)}:
        for tile in (4, 16):
            room = torch.zeros(3, 4096, dtype=torch.int32, device=kernels.device)
            launch(kernels, "place_kernel", shape, tile, row, *room, tile, even, large)
            elements, counts, owner = room.cpu()
            assert elements.sum() == shape[0] * shape[1] and (elements[: shape[0] * shape[1]] == 1).all()
            assert counts.sum() == blocks and (counts[:blocks] == 1).all()
            assert torch.equal(owner[: expected.numel()].view(shape), expected.int())


def stored(fmt: Any, shape: tuple[int, int], options: Any, dtype: torch.dtype = torch.float32) -> MomentTensors:
    """A moment that holds any values, small beside those of new ones."""
    if fmt is None:
        return MomentTensors(torch.rand(shape).to(dtype), stochastic=options.get("stochastic", False))
    per_tensor = "amax" in options or options.pop("per_tensor", False)
    scale_inv = torch.rand((1, 1) if per_tensor else (shape[0], blocks_of(shape[1]))) + 0.1
    codes = torch.randint(0, 0x7B, shape, dtype=torch.uint8)
    return MomentTensors(codes, fmt, scale_inv, **options)


def cases() -> list[Any]:
    found = []
    for fmt, root in ((E4M3, False), (E5M2, False), (E4M4, True), (E5M2, True)):
        for stochastic in (False, True):
            found += [(fmt, {"root": root, "stochastic": stochastic}, scale) for scale in (0, 1, 2)]
    return [*found, (None, {}, 0), (torch.bfloat16, {}, 0), (torch.bfloat16, {"stochastic": True}, 0)]


@pytest.mark.parametrize("shape", [(3, 31), (4, 256), (2, 300)], ids=str)
@pytest.mark.parametrize(("fmt", "options", "scale"), cases(), ids=str)
def test_a_moment(fmt: Any, options: Any, scale: int, shape: tuple[int, int], kernels: TritonKernels) -> None:
    dtype = fmt if fmt is torch.bfloat16 else torch.float32
    fmt, options = None if fmt is torch.bfloat16 else fmt, dict(options)
    if scale:
        options |= {"amax": torch.rand(1, 1)} if scale == 1 else {"per_tensor": True}
    theirs = stored(fmt, shape, options, dtype)
    data = theirs.data.to(kernels.device, copy=True)
    inv = None if theirs.scale_inv is None else theirs.scale_inv.to(kernels.device, copy=True)
    wide = torch.empty(shape, device=kernels.device)
    new = torch.rand(shape) if options.get("root") or fmt is None else torch.randn(shape)
    new[0, 1], new[-1, 3:] = 1e30, 0.0
    bits = torch.randint(0, 1 << 16, shape, dtype=torch.int32)
    one = scale_from_amax(torch.tensor([[2.0]]), 448.0, False, 0)
    columns = {"SECOND": data} | ({} if inv is None else {"SECOND_plus_1": inv})
    row = row_of(kernels, ROWS=shape[0], COLS=shape[1], **columns)
    found = torch.full((64,), -1.0, device=kernels.device)
    given = [x.to(kernels.device) for x in (new, bits, one)]
    flags = kernels.module("optimizer_state").MomentClass.of(theirs), is_even(*shape), 4
    launch(kernels, "moment_kernel", shape, 4, row, wide, *given, found, *flags)
    amax = torch.zeros(1, 1)
    with correct_roots():
        for piece in pieces(*shape):
            assert torch.equal(piece.of(wide.cpu()), theirs.read(piece))
            theirs.scale, theirs.found = (one, amax if scale == 1 else None) if scale else (None, None)
            theirs.write(piece, piece.of(new.clone()).clone(), piece.of(bits))
    assert torch.equal(data.cpu(), theirs.data)
    assert inv is None or torch.equal(inv.cpu(), theirs.scale_inv)
    assert float(found.max()) == float(amax)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
def test_a_gradient(dtype: torch.dtype, coupled: bool, even: bool, kernels: TritonKernels) -> None:
    shape = (4, 128) if even else (4, 131)
    weight, grad, scale_inv = torch.randn(shape), torch.randn(shape).to(dtype), None
    wide = grad.float()
    state = kernels.module("optimizer_state")
    stored_as = state.DTYPES[torch.uint8 if dtype == torch.float8_e4m3fn else dtype]
    of = state.TensorClass(stored_as, None, even=even)
    if dtype == torch.float8_e4m3fn:
        scale_inv = torch.rand(4, blocks_of(shape[1])) + 0.1
        wide = grad.float() * scale_inv.repeat_interleave(128, 1)[:, : shape[1]]
    for scale, maximize, decay in ((None, False, 0.25), (3.0, True, 0.25), (3.0, False, 0.0)):
        expected = wide if scale is None else wide / torch.tensor(scale)
        expected = -expected if maximize else expected
        if coupled and decay:
            expected = expected.add(weight, alpha=decay)
        args: list[Tensor] = [x.to(kernels.device) for x in (weight, grad, scale_inv) if x is not None]
        row = row_of(kernels, ROWS=shape[0], COLS=shape[1], WEIGHT_COLUMN=args[0])
        group = torch.tensor([1, 0.9, 0.9, 0, decay, maximize, 0.9, 0], dtype=torch.float64, device=kernels.device)
        out = torch.empty(shape, device=kernels.device)
        address = torch.tensor([x.data_ptr() for x in args[1:]], device=kernels.device)
        divisor = None if scale is None else torch.tensor(scale, device=kernels.device)
        launch(kernels, "gradient_kernel", shape, 4, row, address, group, divisor, out, of, coupled)
        assert torch.equal(out.cpu(), expected)
