import math

import pytest
import torch
from torch import Tensor

from octavo import E4M3, E5M2, PerBlock, quantize
from octavo.formats import E4M4
from octavo.granularity import BLOCK
from octavo.kernels.layouts import as_matrix_shape, blocks_in_row
from octavo.kernels.reference import optimizer_state
from octavo.kernels.reference.optimizer_state import PIECE, MomentTensors, finite_amax, pieces
from octavo.kernels.reference.optimizer_step import WeightUpdate
from tests.support.fp8_weights import codes_of, random32, read

COLS = [1, 31, 127, 128, 129, 4095]
CPU = torch.device("cpu")


def write(moment: MomentTensors, values: Tensor, scale: Tensor | None = None, amax: Tensor | None = None) -> None:
    for piece in pieces(*values.shape):
        wide = piece.of(values.clone())
        bits = random32(wide.shape) if moment.is_random else None
        moment.scale, moment.amax_written = scale, amax
        moment.write(piece, wide, bits)


def check_cover(rows: int, cols: int, first_row: int = 0) -> None:
    index = torch.full((rows, cols), -1, dtype=torch.int64)
    blocks = torch.full((rows, blocks_in_row(cols)), -1, dtype=torch.int64)
    for piece in pieces(rows, cols, first_row):
        view = piece.of(index)
        assert (view == -1).all() and view.shape[2] <= BLOCK
        assert view.numel() <= max(PIECE, BLOCK)
        view.copy_(piece.index(CPU))
        assert torch.equal(piece.index(CPU).view(-1)[0], torch.tensor(piece.start))
        scales = piece.scales_of(blocks)
        assert scales.shape == (*view.shape[:2], 1) or blocks.numel() == 1
        # the block of each element is that of its scale
        columns = view.sub(first_row * cols).remainder(cols)
        scales.copy_(columns[..., :1] // BLOCK)
        assert torch.equal((columns // BLOCK).expand(view.shape), scales.expand(view.shape))
    assert torch.equal(index, torch.arange(first_row * cols, (first_row + rows) * cols).view(rows, cols))
    assert torch.equal(blocks, torch.arange(blocks_in_row(cols)).expand(rows, -1))


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("first_row", [0, 3])
def test_pieces_cover_each_element_once(rows, cols, first_row):
    check_cover(rows, cols, first_row)


def test_pieces_of_long_rows_and_of_many(monkeypatch):
    for shape in ((2, PIECE + 129), (2, 2 * PIECE), (PIECE // 64 + 3, 64), (0, 0), (4, 0)):
        check_cover(*shape)
    monkeypatch.setattr(optimizer_state, "PIECE", 512)
    for shape in ((7, 200), (3, 1000), (3, 1024), (9, 129), (600, 1), (1, 513)):
        check_cover(*shape)
    monkeypatch.setattr(optimizer_state, "PIECE", 300)  # no whole number of blocks
    check_cover(3, 1000)


def test_an_index_past_two_to_the_32_does_not_wrap():
    first_row = (1 << 32) // 200 + 1
    indices = torch.cat([p.index(CPU).flatten() for p in pieces(2, 200, first_row)]).sort().values
    assert torch.equal(indices, torch.arange(first_row * 200, (first_row + 2) * 200))


# (format, root) -> the largest relative error of what is stored, and the rms of that of sqrt(v), both to nearest
ERRORS = {(E4M3, False): (2**-4, 0.013), (E5M2, False): (2**-3, 0.027), (E4M3, True): (2**-4, 0.027)}
ERRORS |= {(E5M2, True): (2**-3, 0.053), (E4M4, True): (2**-5, 0.013)}


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize(("fmt", "root"), ERRORS, ids=str)
def test_codes_to_nearest_are_as_near_as_the_format_allows(fmt, root, cols):
    most, rms = ERRORS[fmt, root]
    v = torch.randn(5, cols).square() * torch.randn(5, 1).mul(10).exp()  # each row has its own size
    v[1] = 0
    if not root:
        v[::2] *= -1
    moment = codes_of(fmt, v.shape, root)
    write(moment, v)
    stored, read_back = (v.sqrt(), read(moment).sqrt()) if root else (v, read(moment))
    amax = torch.stack([part.abs().amax(1) for part in stored.split(BLOCK, 1)], 1)
    assert torch.allclose(moment.scale_inv, torch.where(amax == 0, 1, amax / fmt.max), rtol=1e-6, atol=0)
    smallest = moment.scale_inv.repeat_interleave(BLOCK, 1)[:, :cols] * fmt.smallest_normal
    normal = stored.abs() >= smallest
    error = (read_back - stored).abs()
    assert (error[normal] <= stored[normal].abs() * (most * 1.001)).all()
    assert (error[~normal] <= (smallest * 2**-fmt.mantissa_bits)[~normal] * 0.501).all()
    if cols == 4095:
        relative = (read(moment).abs().sqrt() / v.abs().sqrt() - 1)[normal]
        assert float(relative.square().mean().sqrt()) == pytest.approx(rms, rel=0.12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("fault", [0, 200, 259])
@pytest.mark.parametrize(("fmt", "root"), [(E4M3, False), (E5M2, True), (E4M4, True)], ids=str)
def test_a_fault_stays_alone(fmt, root, fault, value):
    v = torch.rand(3, 260) + 0.1
    clean = codes_of(fmt, v.shape, root)
    v[1, fault] = v[1, fault - 1] / 2  # not the block's largest, on which its scale depends
    write(clean, v)
    v[1, fault] = value
    moment = codes_of(fmt, v.shape, root)
    write(moment, v)
    expected = read(clean)
    expected[1, fault] = math.nan
    assert torch.equal(moment.scale_inv, clean.scale_inv)
    assert torch.equal(read(moment).nan_to_num(nan=-1), expected.nan_to_num(nan=-1))


def test_finite_amax():
    x = torch.tensor([[[1.0, -3.0], [0.0, -0.0]], [[math.nan, -2.0], [-math.inf, math.inf]]])
    assert finite_amax(x).tolist() == [[[3.0], [0.0]], [[2.0], [0.0]]]
    assert finite_amax(torch.full((3, 1, 2), 3e38)).tolist() == [[[torch.tensor(3e38).item()]]] * 3  # the sum overflows


@pytest.mark.parametrize("root", [False, True])
def test_one_scale_and_the_previous_amax(root):
    v = torch.rand(4, 300) + 0.5
    stored = v.sqrt() if root else v
    moment = codes_of(E5M2, v.shape, root, per_tensor=True, previous=2.0)
    assert not moment.needs_amax_first
    assert codes_of(E5M2, v.shape, root, per_tensor=True).needs_amax_first
    assert not codes_of(E5M2, v.shape, root).needs_amax_first
    amax, scale = torch.zeros(1, 1), torch.full((1, 1), 57344.0 / 2)
    write(moment, v, scale, amax)
    assert torch.equal(amax, stored.max().view(1, 1))
    assert (moment.scale_inv == 1).all()  # whoever gave the scale writes it, once all is read
    moment.scale_inv.copy_(1 / scale)
    back = read(moment).sqrt() if root else read(moment)
    assert ((back - stored).abs() <= stored / 8).all()
    write(moment, torch.full_like(v, 1e6), scale, amax)  # more than the scale is for saturates
    assert torch.allclose(read(moment), torch.tensor(4.0 if root else 2.0))
    assert float(amax) == (1e3 if root else 1e6)


def test_bf16_and_float32():
    x = torch.randn(2000, 130)[:1].repeat(2000, 1)
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    plain = MomentTensors(torch.zeros(x.shape))
    write(plain, x)
    assert torch.equal(read(plain).nan_to_num(7.0), x.nan_to_num(7.0))
    assert plain.read(next(iter(pieces(*x.shape)))).data_ptr() == plain.data.data_ptr()
    near = MomentTensors(torch.zeros(x.shape, dtype=torch.bfloat16))
    write(near, x)
    assert torch.equal(near.data.float().nan_to_num(7.0), x.bfloat16().float().nan_to_num(7.0))
    random = MomentTensors(torch.zeros(x.shape, dtype=torch.bfloat16), rounding="stochastic")
    write(random, x)
    assert random.data[0, 0].isnan() and random.data[0, 1:3].tolist() == [math.inf, -math.inf]
    read_back, x = read(random)[1:], x[1:]
    assert ((read_back - x).abs() <= x.abs() * 2.0**-7).all()
    assert ((read_back.mean(0) - x[0]).abs() <= 4.5 * x[0].abs() * 2.0**-8 / 2000**0.5).all()
    assert (read_back != read_back[0]).any()


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (2, 300), (5, 256), (1, 5000), (300, 1)], ids=str)
@pytest.mark.parametrize("vector", [False, True], ids=["matrix", "vector in rows of one"])
def test_a_gradient_in_codes(shape, vector):
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    values[-1, -1] = math.inf  # which E4M3 has as NaN
    pair = quantize(values.view(1, -1) if vector else values, E4M3, PerBlock(1, BLOCK))
    expected = pair.dequantize()
    rows = (expected.numel(), 1) if vector else shape
    codes = pair.qdata.view(torch.uint8).view(rows)
    update = WeightUpdate(None, (), codes, None, None, 0, pair.scale_inv)  # type: ignore[arg-type]
    gradient = torch.empty(rows)
    for piece in pieces(*rows, first_row=7):
        piece.of(gradient).copy_(update.gradient_of(piece, 1.0, False))
        third = update.gradient_of(piece, 3.0, True)
        assert torch.equal(third.nan_to_num(), -(update.gradient_of(piece, 1.0, False) / 3.0).nan_to_num())
    assert torch.equal(gradient.view(expected.shape).nan_to_num(), expected.nan_to_num())
    assert int(gradient.isnan().sum()) == 1


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((), (1, 1)), ((5,), (1, 5)), ((2, 3), (2, 3)), ((2, 3, 4), (2, 12)), ((0,), (1, 0)), ((3, 0), (3, 0))],
)
def test_a_tensor_as_a_matrix(shape, matrix):
    assert as_matrix_shape(shape) == as_matrix_shape(torch.Size(shape)) == matrix
