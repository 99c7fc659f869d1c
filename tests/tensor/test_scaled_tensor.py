import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo import E2M1, E4M3, E5M2, PerBlock, PerRow, PerTensor, ScaledTensor, UnsupportedOpError, quantize
from octavo.formats import Format
from octavo.granularity import Granularity
from tests.support import definitions
from tests.support.combinations import dealt
from tests.support.definitions import same_bits
from tests.support.helpers import saved_and_loaded, sqnr

TENSOR, ROW, COLUMN, BLOCK, WIDE = PerTensor(), PerRow(), PerRow(dim=-2), PerBlock(3, 5), PerBlock(1, 5)
BY_PARTS = [ROW, COLUMN, BLOCK, WIDE]
ALL = [TENSOR, *BY_PARTS]
each_granularity = pytest.mark.parametrize("granularity", ALL, ids=str)
each_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)


def pair(granularity: Granularity = BLOCK, fmt: Format = E4M3, shape: tuple[int, ...] = (7, 11)) -> ScaledTensor:
    q = quantize(torch.randn(shape), fmt, granularity, power_of_two=granularity == WIDE)
    if granularity == WIDE:  # what holds of one dtype of scales holds of the other
        q = ScaledTensor(q.qdata, q.scale_inv.to(torch.float8_e8m0fnu), granularity, q.dtype)
    return q


def assert_twins(a: ScaledTensor, b: ScaledTensor) -> None:
    assert type(a) is type(b) is ScaledTensor
    assert same_bits(a.qdata, b.qdata) and same_bits(a.scale_inv, b.scale_inv)
    for name in ("shape", "dtype", "device", "format", "granularity", "requires_grad"):
        assert getattr(a, name) == getattr(b, name), name
    assert a.stride() == b.stride() == a.qdata.stride() == b.qdata.stride()
    b.validate()


def test_what_does_not_fit_is_refused_with_both_values() -> None:
    codes = torch.zeros(4, 6, dtype=torch.float8_e4m3fn)
    scale_inv = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"scale_inv has shape \(1, 1\); PerRow\(\) of qdata \(4, 6\) needs \(4, 1\)"):
        ScaledTensor(codes, scale_inv, PerRow())
    with pytest.raises(ValueError, match=r"\(\); PerTensor\(\) .*needs \(1, 1\)"):
        ScaledTensor(codes, torch.ones(()), PerTensor())
    with pytest.raises(TypeError, match=r"scale_inv is torch.float64; .*torch.float32"):
        ScaledTensor(codes, scale_inv.double(), PerTensor())
    with pytest.raises(
        TypeError, match=r"torch.uint8 .*torch.float8_e4m3fn, torch.float8_e5m2 or torch.float4_e2m1fn_x2"
    ):
        ScaledTensor(codes.view(torch.uint8), scale_inv, PerTensor())
    with pytest.raises(TypeError, match=r"float32, not torch.float64"):
        ScaledTensor(codes, scale_inv, PerTensor(), torch.float64)
    with pytest.raises(TypeError, match=r"granularity=\(1, 128\) .*PerTensor\(\), PerRow\(\) or PerBlock"):
        ScaledTensor(codes, scale_inv, (1, 128))
    with pytest.raises(ValueError, match="qdata is on cpu, scale_inv on meta"):
        ScaledTensor(codes, scale_inv.to("meta"), PerTensor())


def test_validate_finds_a_pair_that_was_broken_later() -> None:
    q = pair(PerRow())
    q.scale_inv = q.scale_inv[:3]
    with pytest.raises(ValueError, match=r"\(3, 1\).*\(7, 1\)"):
        q.validate()


@pytest.mark.parametrize("strided", [lambda t: t.t(), lambda t: t[2:, ::2]], ids=["transposed", "part"])
def test_shape_and_strides_are_those_of_the_codes(strided: Callable[[Tensor], Tensor]) -> None:
    codes = strided(pair(PerTensor()).qdata)
    q = ScaledTensor(codes, torch.ones(1, 1), PerTensor())
    assert (q.shape, q.stride(), q.storage_offset()) == (codes.shape, codes.stride(), codes.storage_offset())
    assert same_bits(q.dequantize(), codes.to(torch.bfloat16))


@each_granularity
@each_format
def test_files_and_copies_of_any_layout(fmt: Format, granularity: Granularity) -> None:
    """Files and copies of any layout; tests/tensor/test_pair.py has those of all pairs."""
    q = pair(granularity, fmt)
    for original in (q.to(torch.bfloat16), q.t(), pair(granularity, fmt, (0, 5)), pair(granularity, fmt, (2, 6, 10))):
        assert_twins(original, saved_and_loaded(original))
        assert_twins(original, copy.deepcopy(original))
    a, b = saved_and_loaded([q, q])
    assert a is b


def test_a_file_with_parts_that_do_not_fit_is_refused() -> None:
    q = pair(PerRow())
    q.scale_inv = q.scale_inv[:3]
    with pytest.raises((ValueError, pickle.UnpicklingError), match="scale_inv has shape"):
        saved_and_loaded(q)


def test_as_a_parameter_that_moves_loads_and_copies() -> None:
    q = pair()
    parameter = nn.Parameter(q)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, ScaledTensor) and parameter.requires_grad
    assert parameter.qdata.data_ptr() == q.qdata.data_ptr() and not q.requires_grad
    module = nn.Module()
    module.weight = parameter
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    (parameter.dequantize() * 3).sum().backward()
    assert type(parameter.grad) is Tensor and bool((parameter.grad == 3).all())
    module.zero_grad()
    assert_twins(module.state_dict()["weight"], q)
    before = module.weight.detach().clone()
    module.to(torch.bfloat16)
    assert isinstance(module.weight, nn.Parameter) and module.weight.dtype == torch.bfloat16
    assert same_bits(module.weight.qdata, before.qdata)
    twin = copy.deepcopy(module)
    twin.weight.qdata.view(torch.uint8).zero_()
    assert same_bits(module.weight.qdata, before.qdata)
    twin.load_state_dict(module.state_dict())
    assert_twins(twin.weight.detach(), module.weight.detach())
    meta = copy.deepcopy(module).to("meta")
    assert meta.weight.is_meta and meta.weight.granularity == before.granularity


@each_granularity
def test_to(granularity: Granularity) -> None:
    q = pair(granularity)
    assert q.to(torch.float32) is q and q.to("cpu") is q and q.cpu() is q
    half = q.to(torch.float16)
    assert half.dtype == torch.float16 and same_bits(half.qdata, q.qdata) and same_bits(half.scale_inv, q.scale_inv)
    assert half.dequantize().dtype == torch.float16
    meta = q.to("meta")
    assert meta.is_meta and meta.qdata.is_meta and meta.scale_inv.is_meta
    assert (meta.shape, meta.dtype, meta.granularity) == (q.shape, q.dtype, granularity)
    both = q.to("meta", torch.bfloat16)
    assert both.is_meta and both.dtype == torch.bfloat16 and both.dequantize().dtype == torch.bfloat16
    for dtype in (torch.float64, torch.int8, torch.float8_e5m2):
        with pytest.raises(TypeError, match=f"float32, not {dtype}"):
            q.to(dtype)


def test_requires_grad() -> None:
    q = pair()
    assert q.requires_grad_() is q and q.requires_grad and q.detach().requires_grad is False
    assert not q.qdata.requires_grad and not q.scale_inv.requires_grad
    q.to(torch.bfloat16).t().dequantize().sum().backward()
    assert q.grad.shape == q.shape and q.grad.dtype == torch.float32


@each_granularity
@each_format
def test_repr_says_format_granularity_and_amax(fmt: Format, granularity: Granularity) -> None:
    q = quantize(torch.tensor([[1.0, 2.0, -4.0], [-8.0, 0.5, 0.25]]), fmt, granularity)
    text = repr(q)
    for part in (str(fmt), str(granularity), "shape=(2, 3)", "dtype=torch.float32"):
        assert part in text
    amax = {TENSOR: "amax 8", ROW: "amax 4 to 8", COLUMN: "amax 2 to 8", WIDE: "amax 4 to 8", BLOCK: "amax 8"}
    assert text.endswith(f", {amax[granularity]})")
    assert str(q) == f"{q}" == text


def test_repr_of_what_has_no_amax() -> None:
    assert "empty" in repr(pair(shape=(0, 3)))
    assert "amax unknown" in repr(pair().to("meta")) and "device=meta" in repr(pair().to("meta"))
    assert "requires_grad=True" in repr(nn.Parameter(pair()))
    assert "amax 2" in repr(quantize(torch.tensor([[float("nan"), 2.0]]), E4M3, PerTensor()))


def test_as_input_and_output_of_a_compiled_graph_which_another_granularity_makes_anew() -> None:
    def step(q: ScaledTensor, x: Tensor) -> tuple[ScaledTensor, ScaledTensor, ScaledTensor, Tensor]:
        return q.t(), q.to(torch.bfloat16), quantize(x, E4M3, BLOCK), x @ q.dequantize()

    f = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 7)
    for granularity in (PerRow(), BLOCK, PerRow()):
        q = pair(granularity)
        for eager, traced in zip(step(q, x), f(q, x), strict=True):
            if isinstance(eager, ScaledTensor):
                assert_twins(eager, traced)
            else:
                assert torch.equal(eager, traced)


def test_an_op_outside_the_table_raises_in_a_compiled_function_too() -> None:
    f = torch.compile(lambda q: q + 1, backend="aot_eager")
    with pytest.raises(Exception, match=r"aten.add.Tensor is not defined for a ScaledTensor"):
        f(pair())


# torch hides this warning of its own, but not where warnings are errors
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_quantize_compiles_with_its_gradient() -> None:
    x = torch.randn(7, 11, requires_grad=True)
    # in two graphs: torch traces the backward with a ScaledTensor for its gradient, which then is a plain tensor
    value = torch.compile(lambda x: quantize(x, E4M3, BLOCK).dequantize(), backend="aot_eager")(x)
    assert torch.equal(value, quantize(x, E4M3, BLOCK).dequantize())
    value.sum().backward()
    assert bool((x.grad == 1).all())


# --- Every row of the table: op then dequantize is dequantize then op, bit for bit; all else is refused by name.

aten = torch.ops.aten
Op = Callable[[Any], Any]

# (name, op, shape, granularities that it moves, those that it must refuse)
MOVES: list[tuple[str, Op, tuple[int, ...], list[Granularity], list[Granularity]]] = [
    ("detach", lambda q: q.detach(), (7, 11), ALL, []),
    ("alias", lambda q: aten.alias(q), (7, 11), ALL, []),
    ("clone", lambda q: q.clone(), (7, 11), ALL, []),
    ("clone channels", lambda q: q.t().clone(memory_format=torch.contiguous_format), (7, 11), ALL, []),
    ("contiguous", lambda q: q.mT.contiguous(), (2, 7, 11), ALL, []),
    ("t", lambda q: q.t(), (7, 11), ALL, []),
    ("t of one row", lambda q: q.t(), (11,), ALL, []),
    ("mT", lambda q: q.mT, (2, 3, 7, 11), ALL, []),
    ("transpose", lambda q: q.transpose(-1, -2), (2, 7, 11), ALL, []),
    ("transpose back", lambda q: q.transpose(0, 1).transpose(1, 0), (7, 11), ALL, []),
    ("transpose of one dimension", lambda q: q.transpose(1, -1), (7, 11), ALL, []),
    ("transpose of leading", lambda q: q.transpose(0, 1), (2, 3, 7, 11), ALL, []),
    ("transpose of rows", lambda q: q.transpose(0, 1), (2, 7, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("transpose of the outer two", lambda q: q.transpose(0, 2), (2, 7, 11), [TENSOR], BY_PARTS),
    ("transpose of one block", lambda q: q.transpose(0, 1), (1, 2, 3), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("permute", lambda q: q.permute(1, 0, 3, 2), (2, 3, 7, 11), ALL, []),
    ("permute rows", lambda q: q.permute(2, 0, 1, 3), (2, 3, 7, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("permute round", lambda q: q.permute(2, 0, 1), (2, 7, 11), [TENSOR], BY_PARTS),
    ("view", lambda q: q.view(7, 11), (7, 11), ALL, []),
    ("add a dimension", lambda q: q.view(1, 7, 11), (7, 11), ALL, []),
    ("merge leading", lambda q: q.view(6, 7, 11), (2, 3, 7, 11), ALL, []),
    ("merge rows", lambda q: q.view(-1, 11), (2, 7, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    (
        "merge a copy's rows",
        lambda q: q.transpose(0, 1).contiguous().view(-1, 11),
        (2, 7, 11),
        [TENSOR, ROW, WIDE],
        [COLUMN, BLOCK],
    ),
    ("merge a copy's leading", lambda q: q.transpose(0, 1).contiguous().view(6, 7, 11), (2, 3, 7, 11), ALL, []),
    (
        "reshape of exchanged rows",
        lambda q: q.transpose(0, 1).reshape(-1, 11),
        (2, 7, 11),
        [TENSOR, ROW, WIDE],
        [COLUMN, BLOCK],
    ),
    (
        "flatten exchanged rows",
        lambda q: q.transpose(0, 1).flatten(0, 1),
        (2, 7, 11),
        [TENSOR, ROW, WIDE],
        [COLUMN, BLOCK],
    ),
    ("split rows", lambda q: q.view(2, 3, 11), (6, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("flatten", lambda q: q.flatten(), (6, 10), [TENSOR], BY_PARTS),
    ("other columns", lambda q: q.view(12, 5), (6, 10), [TENSOR], BY_PARTS),
    ("reshape", lambda q: q.reshape(2, 3, 11), (6, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("reshape with a copy", lambda q: q.mT.reshape(-1, 7), (2, 7, 11), [TENSOR, COLUMN], [ROW, BLOCK, WIDE]),
    ("unsafe view", lambda q: aten._unsafe_view(q, [1, 7, 11]), (7, 11), ALL, []),
    ("slice between tiles", lambda q: q[3:6], (7, 11), ALL, []),
    ("slice to a ragged end", lambda q: q[3:5], (7, 11), ALL, []),
    ("slice from the end", lambda q: q[-4:], (7, 11), ALL, []),
    ("slice of nothing", lambda q: q[7:], (7, 11), ALL, []),
    ("slice backwards", lambda q: q[5:2], (7, 11), ALL, []),
    ("slice columns", lambda q: q[:, 5:], (7, 11), ALL, []),
    ("slice both", lambda q: q[3:, 5:10], (7, 11), ALL, []),
    ("slice of a vector", lambda q: q[5:], (11,), ALL, []),
    ("slice of leading", lambda q: q[1:], (3, 7, 11), ALL, []),
    ("slice of leading by two", lambda q: q[::2], (3, 7, 11), ALL, []),
    ("slice through rows", lambda q: q[1:], (7, 11), [TENSOR, ROW, COLUMN, WIDE], [BLOCK]),
    ("slice of every other row", lambda q: q[::2], (7, 11), [TENSOR, ROW, COLUMN, WIDE], [BLOCK]),
    ("slice through columns", lambda q: q[:, 1:], (7, 11), [TENSOR, ROW, COLUMN], [BLOCK, WIDE]),
    ("slice of every other column", lambda q: q[..., ::2], (7, 11), [TENSOR, ROW, COLUMN], [BLOCK, WIDE]),
    ("narrow", lambda q: q.narrow(0, 3, 3), (7, 11), ALL, []),
    ("split", lambda q: q.split(3), (7, 11), ALL, []),
    ("split columns", lambda q: q.split(5, -1), (7, 11), ALL, []),
    ("split of nothing", lambda q: q.split(3), (0, 11), ALL, []),
    ("split by sizes", lambda q: q.split([3, 0, 4]), (7, 11), ALL, []),
    ("split through rows", lambda q: q.split(2), (7, 11), [TENSOR, ROW, COLUMN, WIDE], [BLOCK]),
    ("chunk", lambda q: q.chunk(3), (7, 11), ALL, []),
    ("as_strided as it is", lambda q: q.as_strided((7, 11), (11, 1)), (7, 11), ALL, []),
    ("as_strided as it is, offset", lambda q: q[3:].as_strided((4, 11), (11, 1), 33), (7, 11), ALL, []),
    ("as_strided", lambda q: q.as_strided((3, 2), (2, 5), 4), (7, 11), [TENSOR], BY_PARTS),
    ("as_strided from its offset", lambda q: q[3:].as_strided((2,), (3,)), (7, 11), [TENSOR], BY_PARTS),
    ("to another dtype", lambda q: q.to(torch.bfloat16), (7, 11), ALL, []),
    ("to with a copy", lambda q: q.to("cpu", copy=True), (7, 11), ALL, []),
]
CASES = [(op, shape, g) for _, op, shape, moved, _ in MOVES for g in moved]
CASE_IDS = [f"{name}-{g}" for name, _, _, moved, _ in MOVES for g in moved]
REFUSED = [(op, shape, g) for _, op, shape, _, refused in MOVES for g in refused]
REFUSED_IDS = [f"{name}-{g}" for name, _, _, _, refused in MOVES for g in refused]


def tiles_of(shape: tuple[int, ...], granularity: Granularity = BLOCK) -> ScaledTensor:
    """A pair whose tiles all have another scale."""
    x = torch.randn(shape) * (10.0 ** torch.linspace(-3, 3, max(1, shape[-1])) if shape else 1)
    return quantize(x, E4M3, granularity)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize(("op", "shape", "granularity"), CASES, ids=CASE_IDS)
def test_a_move_reads_back_as_the_move_of_its_values(op: Op, shape: tuple[int, ...], granularity: Granularity) -> None:
    q = tiles_of(shape, granularity)
    before = q.clone()
    results, expected = tree_leaves(op(q)), tree_leaves(op(q.dequantize()))
    assert len(results) == len(expected)
    for result, plain in zip(results, expected, strict=True):
        assert type(result) is ScaledTensor
        result.validate()
        assert (result.shape, result.dtype, result.format) == (plain.shape, plain.dtype, E4M3)
        assert result.shape == result.qdata.shape and result.stride() == result.qdata.stride()
        assert result.storage_offset() == result.qdata.storage_offset()
        assert same_bits(result.dequantize(), plain)
    assert same_bits(q.qdata, before.qdata) and same_bits(q.scale_inv, before.scale_inv)
    with torch.inference_mode():  # composite ops such as mT and chunk arrive whole there
        results = tree_leaves(op(q.clone()))
    assert all(same_bits(result.dequantize(), plain) for result, plain in zip(results, expected, strict=True))


@pytest.mark.parametrize(("op", "shape", "granularity"), REFUSED, ids=REFUSED_IDS)
def test_a_move_through_the_tiles_is_refused(op: Op, shape: tuple[int, ...], granularity: Granularity) -> None:
    with pytest.raises(UnsupportedOpError, match=r"tiles of Per(Row|Block).*or call .dequantize\(\) first"):
        op(tiles_of(shape, granularity))


def test_each_row_of_the_table_is_tried() -> None:
    seen = set()
    original = dict(ScaledTensor.RULES)
    try:
        for op in original:
            ScaledTensor.RULES[op] = lambda func, *a, **k: (seen.add(func), original[func](func, *a, **k))[1]
        for op, shape, granularity in CASES:
            op(tiles_of(shape, granularity))
    finally:
        ScaledTensor.RULES.update(original)
    assert set(original) - seen == {aten.copy_.default}


def test_an_empty_pair_is_viewed_with_another_number_of_tiles() -> None:
    q = quantize(torch.zeros(4, 0), E4M3, PerRow())
    for shape in ((0, 0), (2, 2, 0), (7, 0)):
        view = q.view(shape)
        view.validate()
        assert view.shape == shape and view.scale_inv.shape == (*shape[:-1], 1)
        assert view.dequantize().shape == shape


@each_granularity
def test_views_share_both_parts(granularity: Granularity) -> None:
    q = tiles_of((6, 10), granularity)
    for view in (q.detach(), q.t(), q.view(1, 6, 10), q[3:], q.split(3)[1], q.as_strided((6, 10), (10, 1)), q.T):
        assert shares_storage(view.qdata, q.qdata) and shares_storage(view.scale_inv, q.scale_inv)
    for new in (q.clone(), q.t().contiguous(), q.to(torch.bfloat16), q.to("cpu", copy=True)):
        assert not shares_storage(new.qdata, q.qdata) and not shares_storage(new.scale_inv, q.scale_inv)


def test_impossible_moves_raise_torchs_own_errors() -> None:
    q = tiles_of((6, 10), PerTensor())
    for op in (
        lambda t: t.view(7, 9),
        lambda t: t.t().view(60),
        lambda t: t.transpose(0, 2),
        lambda t: t.split(-1),
        lambda t: t.split([3, 8]),
        lambda t: t[::-1],
        lambda t: t.permute(0, 0),
    ):
        with pytest.raises((RuntimeError, IndexError, ValueError)) as of_plain:
            op(q.dequantize())
        with pytest.raises(of_plain.type, match=re.escape(str(of_plain.value)[:30])):
            op(q)


def test_a_pair_made_outside_of_inference_mode_is_read_inside() -> None:
    # torch cannot make views of one there, of no wrapper subclass ("Cannot set version_counter for inference tensor")
    q = tiles_of((6, 10))
    with torch.inference_mode():
        assert same_bits(q.clone().dequantize(), q.dequantize())
        assert q.to(torch.bfloat16).dtype == torch.bfloat16


@each_granularity
def test_copy_writes_both_parts(granularity: Granularity) -> None:
    target, source = tiles_of((7, 11), granularity), tiles_of((7, 11), granularity).to(torch.bfloat16)
    qdata, scale_inv = target.qdata, target.scale_inv
    assert target.copy_(source) is target
    assert target.qdata is qdata and target.scale_inv is scale_inv
    assert same_bits(qdata, source.qdata) and same_bits(scale_inv, source.scale_inv)
    assert target.dtype == torch.float32 and source.dtype == torch.bfloat16
    assert not shares_storage(qdata, source.qdata)


def test_copy_into_a_view_writes_its_base() -> None:
    target, source = tiles_of((6, 10)), tiles_of((3, 10))
    last = target[:3].dequantize()
    target[3:].copy_(source)
    assert same_bits(target.dequantize(), torch.cat((last, source.dequantize())))


def test_copy_of_the_same_layout_but_other_strides() -> None:
    target, source = tiles_of((6, 10)), tiles_of((10, 6), PerBlock(5, 3)).t()
    assert same_bits(target.copy_(source).dequantize(), source.dequantize())


@pytest.mark.parametrize(
    ("source", "values"),
    [
        (tiles_of((6, 5)), r"shape is .*6, 10.* and .*6, 5"),
        (tiles_of((1, 10)), r"shape is .*6, 10.* and .*1, 10"),
        (tiles_of((6, 10), PerRow()), r"granularity is PerBlock\(3, 5\) here and PerRow\(\)"),
        (quantize(torch.randn(6, 10), E5M2, BLOCK), "format is E4M3 here and E5M2"),
    ],
    ids=["shape", "broadcast", "granularity", "format"],
)
def test_copy_of_what_does_not_fit_names_both_values(source: ScaledTensor, values: str) -> None:
    target = tiles_of((6, 10))
    before = target.clone()
    with pytest.raises(ValueError, match=values):
        target.copy_(source)
    assert same_bits(target.qdata, before.qdata) and same_bits(target.scale_inv, before.scale_inv)


def test_copy_from_and_to_plain_tensors_is_refused() -> None:
    q, x = tiles_of((6, 10)), torch.randn(6, 10)
    with pytest.raises(UnsupportedOpError, match=r"octavo.quantize\(source"):
        q.copy_(x)
    with pytest.raises(UnsupportedOpError, match=r"source.dequantize\(\)"):
        x.copy_(q)


UNKNOWN: list[tuple[str, Callable[[ScaledTensor], Any]]] = [
    ("aten.add.Tensor", lambda q: q + 1),
    ("aten.add.Tensor", lambda q: torch.ones(6, 10) + q),
    ("aten.mm.default", lambda q: torch.nn.functional.linear(torch.randn(2, 10), q)),
    ("aten.select.int", lambda q: q[0]),
    ("aten.cat.default", lambda q: torch.cat((q, q))),
    ("aten.zero_.default", lambda q: q.zero_()),
    ("aten.view.dtype", lambda q: q.view(torch.uint8)),
    ("aten.unsqueeze.default", lambda q: q.unsqueeze(0)),
    ("aten._local_scalar_dense.default", lambda q: quantize(torch.ones(1), E4M3, ROW).item()),
    ("aten.isfinite.default|aten.abs.default|aten.eq.Tensor", lambda q: torch.isfinite(q)),
    ("aten.uniform_.default", lambda q: torch.nn.init.uniform_(q)),
]


@pytest.mark.parametrize(("name", "op"), UNKNOWN, ids=[name for name, _ in UNKNOWN])
def test_ops_that_are_not_in_the_table_raise_by_name(name: str, op: Callable[[ScaledTensor], Any]) -> None:
    q = tiles_of((6, 10))
    before = q.clone()
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), pytest.raises(UnsupportedOpError, match=rf"({name}) is not defined .*call .dequantize\(\)"):
            op(q)
    assert same_bits(q.qdata, before.qdata) and same_bits(q.scale_inv, before.scale_inv)


@pytest.mark.parametrize("escape", [lambda q: q.numpy(), lambda q: q.tolist(), lambda q: memoryview(q)])
def test_no_other_way_reads_values_silently(escape: Callable[[ScaledTensor], Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        escape(tiles_of((6, 10)))


def test_gradients_of_moves() -> None:
    x = torch.randn(6, 10, requires_grad=True)
    parts = quantize(x, E4M3, BLOCK)[3:].t().split(5)
    weights = torch.randn(2, 5, 3)
    sum((part.dequantize() * w).sum() for part, w in zip(parts, weights, strict=True)).backward()
    expected = torch.zeros(6, 10)
    expected[3:] = weights.reshape(10, 3).t()
    assert torch.equal(x.grad, expected)


# --- quantize, against its definition

TILED = [*ALL, PerBlock(1, 128), PerBlock(128, 128)]
SHAPES = [
    (),
    (0,),
    (7,),
    (130,),
    (0, 5),
    (5, 0),
    (1, 1),
    (7, 130),
    (2, 6, 10),  # rows that fill the blocks
    (2, 7, 11),  # and that don't: the blocks of one matrix end with it
    (3, 1, 4),
    (2, 3, 4, 5),
    (0, 4, 5),
    (2, 0, 5),
    (2, 4, 0),
    (2, 0, 4, 5),
]


def expected_pair(x: Tensor, fmt: Format, granularity: Granularity, *how: Any) -> tuple[Tensor, Tensor]:
    """Codes as uint8 and scale_inv, one matrix after the other."""
    shape = granularity.scale_shape(x.shape)
    flat = x.reshape(1, -1) if x.ndim < 2 or granularity == PerTensor() else x
    matrices = flat.reshape(math.prod(flat.shape[:-2]), *flat.shape[-2:])
    codes, scales = torch.empty(matrices.shape, dtype=torch.uint8), []
    for i, matrix in enumerate(matrices):
        codes[i], scale_inv, _ = definitions.cast(matrix, fmt.dtype, granularity.tile, *how)
        scales.append(scale_inv)
    return codes.view(x.shape), (torch.stack(scales) if scales else torch.ones(shape)).view(shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x.clone(),
    "strided": lambda x: torch.stack((x, x), -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape) if x.ndim else x.clone(),
}


@pytest.mark.parametrize("seed", range(4))
def test_quantize_and_back(seed: int) -> None:
    torch.manual_seed(seed)
    options = {"fmt": [E4M3, E5M2], "power_of_two": [False, True], "margin": [0, 3], "layout": [*LAYOUTS]}
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    for case in dealt(seed, 64, shape=SHAPES, granularity=TILED, dtype=dtypes, **options):
        shape, how = case["shape"], (case["fmt"], case["granularity"], case["power_of_two"], case["margin"])
        # matrices of different size, so that a scale from the wrong one is seen
        x = torch.randn(shape) * (torch.rand((*shape[:-2], 1, 1)) * 100 if len(shape) > 2 else 1)
        x = LAYOUTS[case["layout"]](x.to(case["dtype"]))
        q, (codes, scale_inv) = quantize(x, *how), expected_pair(x, *how)
        assert (q.shape, q.dtype, q.format, q.granularity) == (shape, case["dtype"], *how[:2])
        assert q.qdata.is_contiguous() and not q.requires_grad and q.is_leaf
        assert same_bits(q.qdata.view(torch.uint8), codes) and same_bits(q.scale_inv, scale_inv)
        value, wide = q.dequantize(), q.to(torch.float32).dequantize()
        assert type(value) is Tensor and value.shape == shape and torch.equal(value, wide.to(case["dtype"]))
        if len(shape) == 2:
            assert torch.equal(wide, definitions.dequantize(q.qdata, q.scale_inv, how[1].tile).float())
        if value.numel():
            assert sqnr(wide, x.double()) > 18


@pytest.mark.parametrize("granularity", TILED, ids=str)
@each_format
def test_the_gradient_is_straight_through_and_zero_at_faults(fmt: Format, granularity: Granularity) -> None:
    x = torch.randn(2, 7, 11)
    x[0, 1, 2], x[1, 3, 4], x[1, 6, 10] = math.nan, math.inf, -math.inf
    x.requires_grad_()
    q = quantize(x, fmt, granularity)
    assert q.requires_grad
    weights = torch.randn(2, 11, 7)
    q.transpose(1, 2).dequantize().backward(weights)
    assert torch.equal(x.grad, torch.where(torch.isfinite(x), weights.mT, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_gradient_has_the_inputs_dtype_and_passes_at_the_largest_element(dtype: torch.dtype) -> None:
    x = torch.nn.Parameter(torch.tensor([[1.0, -3.0, 0.0], [1e-5, 2e4, 5.0]], dtype=dtype))
    for granularity in TILED:  # a scale from the tensor's own amax clips nothing
        quantize(x, E4M3, granularity).to(torch.float32).dequantize().sum().backward()
    assert x.grad.dtype == dtype and bool((x.grad == len(TILED)).all())
    with torch.no_grad():
        assert not quantize(x, E4M3, PerTensor()).requires_grad
    assert not quantize(x.detach(), E4M3, PerTensor()).requires_grad


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"bfloat16, float16 and float32 .*not {dtype}"):
        quantize(torch.zeros(2, 2).to(dtype), E4M3, PerTensor())


def test_wrong_arguments_are_refused_by_name() -> None:
    x = torch.randn(2, 2)
    with pytest.raises(TypeError, match="not list"):
        quantize([1.0], E4M3, PerTensor())
    with pytest.raises(TypeError, match=r"'e4m3': use octavo\.E4M3, octavo\.E5M2 or octavo\.E2M1"):
        quantize(x, "e4m3", PerTensor())
    with pytest.raises(TypeError, match=r"float8_e4m3fn: use octavo\.E4M3"):
        quantize(x, torch.float8_e4m3fn, PerTensor())
    with pytest.raises(TypeError, match=r"PerTensor.*: use octavo.PerTensor\(\), PerRow\(\) or PerBlock"):
        quantize(x, E4M3, PerTensor)
    with pytest.raises(TypeError, match=r"\(1, 128\): use octavo.PerTensor"):
        quantize(x, E4M3, (1, 128))
    for margin in (-1, 65, 1.5, "2"):
        with pytest.raises(ValueError, match=r"margin=.* integer from 0 to 64"):
            quantize(x, E4M3, PerTensor(), margin=margin)


@pytest.mark.parametrize("block", [PerBlock(1, 16), PerBlock(16, 16)], ids=str)
def test_two_numbers_in_a_byte(block: Granularity) -> None:
    """Each E2M1 value comes back, and views cut rows: of columns two would share a byte."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    row = torch.cat((magnitudes, -magnitudes, 4 * magnitudes, -4 * magnitudes))
    rows = block.tile[0]
    values = row * 2.0 ** (torch.arange(64) // rows % 8)[:, None]
    q = quantize(values, E2M1, block, power_of_two=True)
    assert (q.shape, q.qdata.shape, q.qdata.element_size()) == ((64, 32), (64, 16), 1)
    assert q.format == E2M1 and q.granularity == block and torch.equal(q.dequantize(), values)
    for part, expected in (
        (q[rows : 3 * rows], values[rows : 3 * rows]),
        (q.split(rows)[3], values[3 * rows : 4 * rows]),
        (q.view(64, 32)[2 * rows :], values[2 * rows :]),
    ):
        assert part.format == E2M1 and torch.equal(part.dequantize(), expected)
    empty = quantize(values[:0], E2M1, block, power_of_two=True)
    assert empty.shape == (0, 32) and empty.qdata.shape == (0, 16)
    refusals = {"t": lambda: q.t(), "slice": lambda: q[:, :16], "split": lambda: q.split(16, 1)}
    for name, refused in (refusals | {"view": lambda: q.view(-1)}).items():
        with pytest.raises(UnsupportedOpError, match=rf"aten\.{name}.* is not defined for a ScaledTensor"):
            refused()


def test_what_has_no_two_numbers_in_a_byte_is_refused() -> None:
    x, block = torch.randn(16, 32), PerBlock(1, 16)
    for granularity, power_of_two in ((PerTensor(), True), (PerBlock(1, 32), True), (block, False)):
        with pytest.raises(ValueError, match=r"E2M1 by Per.*: use PerBlock\(1, 16\) or PerBlock\(16, 16\), power"):
            quantize(x, E2M1, granularity, power_of_two)
    for shape in ((2, 16, 32), (16, 24), (32,)):
        with pytest.raises(ValueError, match=rf"shape {re.escape(str([*shape]))}: give a matrix \[R, C\] whose C"):
            quantize(torch.randn(shape), E2M1, block, True)


def test_a_pair_is_not_quantized_again() -> None:
    q = quantize(torch.randn(2, 2), E4M3, PerTensor())
    with pytest.raises(TypeError, match=r"ScaledTensor already; quantize x.dequantize\(\)"):
        quantize(q, E5M2, PerRow())
    assert isinstance(quantize(q.dequantize(), E5M2, PerRow()), ScaledTensor)
