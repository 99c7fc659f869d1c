"""Every row of the table: op then dequantize is dequantize then op, bit for bit; all else is refused by name."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from octavo import E4M3, E5M2, PerBlock, PerRow, PerTensor, ScaledTensor, UnsupportedOpError, quantize
from octavo.granularity import Granularity
from tests.support.definitions import same_bits

aten = torch.ops.aten
Op = Callable[[Any], Any]

TENSOR, ROW, COLUMN, BLOCK, WIDE = PerTensor(), PerRow(), PerRow(dim=-2), PerBlock(3, 5), PerBlock(1, 5)
ALL = [TENSOR, ROW, COLUMN, BLOCK, WIDE]

# (name, op, shape, granularities that it moves, those that it must refuse)
MOVES: list[tuple[str, Op, tuple[int, ...], list[Granularity], list[Granularity]]] = [
    ("detach", lambda q: q.detach(), (7, 11), ALL, []),
    ("alias", lambda q: aten.alias(q), (7, 11), ALL, []),
    ("clone", lambda q: q.clone(), (7, 11), ALL, []),
    ("clone channels", lambda q: q.t().clone(memory_format=torch.contiguous_format), (7, 11), ALL, []),
    ("contiguous", lambda q: q.mT.contiguous(), (2, 7, 11), ALL, []),
    ("t", lambda q: q.t(), (7, 11), ALL, []),
    ("t of one row", lambda q: q.t(), (11,), ALL, []),
    ("t of a number", lambda q: q.t(), (), ALL, []),
    ("T", lambda q: q.T, (7, 11), ALL, []),
    ("mT", lambda q: q.mT, (2, 3, 7, 11), ALL, []),
    ("transpose", lambda q: q.transpose(-1, -2), (2, 7, 11), ALL, []),
    ("transpose back", lambda q: q.transpose(0, 1).transpose(1, 0), (7, 11), ALL, []),
    ("transpose of one dimension", lambda q: q.transpose(1, -1), (7, 11), ALL, []),
    ("transpose of a number", lambda q: q.transpose(0, -1), (), ALL, []),
    ("transpose of leading", lambda q: q.transpose(0, 1), (2, 3, 7, 11), ALL, []),
    ("transpose of rows", lambda q: q.transpose(0, 1), (2, 7, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("transpose of the outer two", lambda q: q.transpose(0, 2), (2, 7, 11), [TENSOR], [ROW, COLUMN, BLOCK, WIDE]),
    ("transpose of one block", lambda q: q.transpose(0, 1), (1, 2, 3), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("permute", lambda q: q.permute(1, 0, 3, 2), (2, 3, 7, 11), ALL, []),
    ("permute nothing", lambda q: q.permute(0, -1), (7, 11), ALL, []),
    ("permute rows", lambda q: q.permute(2, 0, 1, 3), (2, 3, 7, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("permute round", lambda q: q.permute(2, 0, 1), (2, 7, 11), [TENSOR], [ROW, COLUMN, BLOCK, WIDE]),
    ("view", lambda q: q.view(7, 11), (7, 11), ALL, []),
    ("view with -1", lambda q: q.view(-1, 11), (7, 11), ALL, []),
    ("add a dimension", lambda q: q.view(1, 7, 11), (7, 11), ALL, []),
    ("merge leading", lambda q: q.view(6, 7, 11), (2, 3, 7, 11), ALL, []),
    ("merge rows", lambda q: q.view(-1, 11), (2, 7, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("split rows", lambda q: q.view(2, 3, 11), (6, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("flatten", lambda q: q.flatten(), (6, 10), [TENSOR], [ROW, COLUMN, BLOCK, WIDE]),
    ("other columns", lambda q: q.view(12, 5), (6, 10), [TENSOR], [ROW, COLUMN, BLOCK, WIDE]),
    ("reshape", lambda q: q.reshape(2, 3, 11), (6, 11), [TENSOR, ROW, WIDE], [COLUMN, BLOCK]),
    ("reshape with a copy", lambda q: q.mT.reshape(-1, 7), (2, 7, 11), [TENSOR, COLUMN], [ROW, BLOCK, WIDE]),
    ("unsafe view", lambda q: aten._unsafe_view(q, [1, 7, 11]), (7, 11), ALL, []),
    ("slice between tiles", lambda q: q[3:6], (7, 11), ALL, []),
    ("slice to a ragged end", lambda q: q[3:5], (7, 11), ALL, []),
    ("slice from the end", lambda q: q[-4:], (7, 11), ALL, []),
    ("slice beyond", lambda q: q[6:100], (7, 11), ALL, []),
    ("slice of nothing", lambda q: q[7:], (7, 11), ALL, []),
    ("slice backwards", lambda q: q[5:2], (7, 11), ALL, []),
    ("slice columns", lambda q: q[:, 5:], (7, 11), ALL, []),
    ("slice both", lambda q: q[3:, 5:10], (7, 11), ALL, []),
    ("slice of a vector", lambda q: q[5:], (11,), ALL, []),
    ("slice of leading", lambda q: q[1:], (3, 7, 11), ALL, []),
    ("slice of leading by two", lambda q: q[::2], (3, 7, 11), ALL, []),
    ("slice through rows", lambda q: q[1:], (7, 11), [TENSOR, ROW, COLUMN, WIDE], [BLOCK]),
    ("slice of every other row", lambda q: q[::2], (7, 11), [TENSOR, ROW, COLUMN, WIDE], [BLOCK]),
    ("slice of every third row", lambda q: q[1::3], (7, 11), [TENSOR, ROW, COLUMN, WIDE], [BLOCK]),
    ("slice through columns", lambda q: q[:, 1:], (7, 11), [TENSOR, ROW, COLUMN], [BLOCK, WIDE]),
    ("slice of every other column", lambda q: q[..., ::2], (7, 11), [TENSOR, ROW, COLUMN], [BLOCK, WIDE]),
    ("narrow", lambda q: q.narrow(0, 3, 3), (7, 11), ALL, []),
    ("split", lambda q: q.split(3), (7, 11), ALL, []),
    ("split columns", lambda q: q.split(5, -1), (7, 11), ALL, []),
    ("split of nothing", lambda q: q.split(3), (0, 11), ALL, []),
    ("split by sizes", lambda q: q.split([3, 0, 4]), (7, 11), ALL, []),
    ("split columns by sizes", lambda q: q.split([10, 1], dim=1), (7, 11), ALL, []),
    ("split through rows", lambda q: q.split(2), (7, 11), [TENSOR, ROW, COLUMN, WIDE], [BLOCK]),
    ("chunk", lambda q: q.chunk(3), (7, 11), ALL, []),
    ("as_strided as it is", lambda q: q.as_strided((7, 11), (11, 1)), (7, 11), ALL, []),
    ("as_strided as it is, offset", lambda q: q[3:].as_strided((4, 11), (11, 1), 33), (7, 11), ALL, []),
    ("as_strided", lambda q: q.as_strided((3, 2), (2, 5), 4), (7, 11), [TENSOR], [ROW, COLUMN, BLOCK, WIDE]),
    (
        "as_strided from its offset",
        lambda q: q[3:].as_strided((2,), (3,)),
        (7, 11),
        [TENSOR],
        [ROW, COLUMN, BLOCK, WIDE],
    ),
    ("to another dtype", lambda q: q.to(torch.bfloat16), (7, 11), ALL, []),
    ("half", lambda q: q.half(), (7, 11), ALL, []),
    ("to with a copy", lambda q: q.to("cpu", copy=True), (7, 11), ALL, []),
]
CASES = [(op, shape, g) for _, op, shape, moved, _ in MOVES for g in moved]
CASE_IDS = [f"{name}-{g}" for name, _, _, moved, _ in MOVES for g in moved]
REFUSED = [(op, shape, g) for _, op, shape, _, refused in MOVES for g in refused]
REFUSED_IDS = [f"{name}-{g}" for name, _, _, _, refused in MOVES for g in refused]


def pair(shape: tuple[int, ...], granularity: Granularity = BLOCK) -> ScaledTensor:
    """A pair whose tiles all have another scale."""
    x = torch.randn(shape) * (10.0 ** torch.linspace(-3, 3, max(1, shape[-1])) if shape else 1)
    return quantize(x, E4M3, granularity)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize(("op", "shape", "granularity"), CASES, ids=CASE_IDS)
def test_a_move_reads_back_as_the_move_of_what_it_reads(
    op: Op, shape: tuple[int, ...], granularity: Granularity
) -> None:
    q = pair(shape, granularity)
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


@pytest.mark.parametrize(("op", "shape", "granularity"), REFUSED, ids=REFUSED_IDS)
def test_a_move_through_the_tiles_is_refused(op: Op, shape: tuple[int, ...], granularity: Granularity) -> None:
    with pytest.raises(UnsupportedOpError, match=r"tiles of Per(Row|Block).*or call .dequantize\(\) first"):
        op(pair(shape, granularity))


def test_each_row_of_the_table_is_tried() -> None:
    seen = set()
    original = dict(ScaledTensor.RULES)
    try:
        for op in original:
            ScaledTensor.RULES[op] = lambda func, *a, **k: (seen.add(func), original[func](func, *a, **k))[1]
        for op, shape, granularity in CASES:
            op(pair(shape, granularity))
    finally:
        ScaledTensor.RULES.update(original)
    assert set(original) - seen == {aten.copy_.default}


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_views_share_both_parts(granularity: Granularity) -> None:
    q = pair((6, 10), granularity)
    for view in (q.detach(), q.t(), q.view(1, 6, 10), q[3:], q.split(3)[1], q.as_strided((6, 10), (10, 1)), q.T):
        assert shares_storage(view.qdata, q.qdata) and shares_storage(view.scale_inv, q.scale_inv)
    for copy in (q.clone(), q.t().contiguous(), q.to(torch.bfloat16), q.to("cpu", copy=True)):
        assert not shares_storage(copy.qdata, q.qdata) and not shares_storage(copy.scale_inv, q.scale_inv)


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_transposing_twice_is_nothing(granularity: Granularity) -> None:
    q = pair((7, 11), granularity)
    assert q.t().granularity == granularity.transposed() and q.t().t().granularity == granularity
    assert same_bits(q.t().t().qdata, q.qdata) and q.t().t().stride() == q.stride()


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_moves_of_transposed_pairs(granularity: Granularity) -> None:
    q = pair((10, 15), granularity).t()
    for op in (lambda t: t[5:], lambda t: t[:, 3:6], lambda t: t.clone(), lambda t: t.to(torch.float16)):
        try:
            result = op(q)
        except UnsupportedOpError:
            continue
        assert same_bits(result.dequantize(), op(q.dequantize()))


@pytest.mark.parametrize("sizes", [[3, 3], [3, 5], [8, -1]], ids=str)
def test_sizes_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    with pytest.raises(RuntimeError, match="split_with_sizes expects"):
        pair((7, 11)).split(sizes)


def test_impossible_moves_raise_torchs_own_errors() -> None:
    q = pair((6, 10), PerTensor())
    for op in (
        lambda t: t.view(7, 9),
        lambda t: t.t().view(60),
        lambda t: t.transpose(0, 2),
        lambda t: t.split(-1),
        lambda t: t[::-1],
        lambda t: t.permute(0, 0),
    ):
        with pytest.raises((RuntimeError, IndexError, ValueError)) as of_plain:
            op(q.dequantize())
        with pytest.raises(of_plain.type, match=re.escape(str(of_plain.value)[:30])):
            op(q)


@pytest.mark.parametrize(("op", "shape", "granularity"), CASES[:: len(ALL)], ids=CASE_IDS[:: len(ALL)])
def test_moves_in_inference_mode(op: Op, shape: tuple[int, ...], granularity: Granularity) -> None:
    # composite ops such as mT and chunk arrive whole there
    with torch.inference_mode():
        q = pair(shape, granularity)
        for result, plain in zip(tree_leaves(op(q)), tree_leaves(op(q.dequantize())), strict=True):
            assert same_bits(result.dequantize(), plain)


def test_a_pair_made_outside_of_inference_mode_is_read_inside() -> None:
    # torch cannot make views of one there, of no wrapper subclass ("Cannot set version_counter for inference tensor")
    q = pair((6, 10))
    with torch.inference_mode():
        assert same_bits(q.clone().dequantize(), q.dequantize())
        assert q.to(torch.bfloat16).dtype == torch.bfloat16


# copy_


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_copy_writes_both_parts(granularity: Granularity) -> None:
    target, source = pair((7, 11), granularity), pair((7, 11), granularity).to(torch.bfloat16)
    qdata, scale_inv = target.qdata, target.scale_inv
    assert target.copy_(source) is target
    assert target.qdata is qdata and target.scale_inv is scale_inv
    assert same_bits(qdata, source.qdata) and same_bits(scale_inv, source.scale_inv)
    assert target.dtype == torch.float32 and source.dtype == torch.bfloat16
    assert not shares_storage(qdata, source.qdata)


def test_copy_into_a_view_writes_its_base() -> None:
    target, source = pair((6, 10)), pair((3, 10))
    last = target[:3].dequantize()
    target[3:].copy_(source)
    assert same_bits(target.dequantize(), torch.cat((last, source.dequantize())))


def test_copy_of_the_same_layout_but_other_strides() -> None:
    target, source = pair((6, 10)), pair((10, 6), PerBlock(5, 3)).t()
    assert same_bits(target.copy_(source).dequantize(), source.dequantize())


@pytest.mark.parametrize(
    ("source", "values"),
    [
        (pair((6, 5)), r"shape is .*6, 10.* and .*6, 5"),
        (pair((1, 10)), r"shape is .*6, 10.* and .*1, 10"),
        (pair((6, 10), PerRow()), r"granularity is PerBlock\(3, 5\) here and PerRow\(\)"),
        (quantize(torch.randn(6, 10), E5M2, BLOCK), "format is E4M3 here and E5M2"),
    ],
    ids=["shape", "broadcast", "granularity", "format"],
)
def test_copy_of_what_does_not_fit_names_both_values(source: ScaledTensor, values: str) -> None:
    target = pair((6, 10))
    before = target.clone()
    with pytest.raises(ValueError, match=values):
        target.copy_(source)
    assert same_bits(target.qdata, before.qdata) and same_bits(target.scale_inv, before.scale_inv)


def test_copy_from_and_to_plain_tensors_is_refused() -> None:
    q, x = pair((6, 10)), torch.randn(6, 10)
    with pytest.raises(UnsupportedOpError, match=r"octavo.quantize\(source"):
        q.copy_(x)
    with pytest.raises(UnsupportedOpError, match=r"source.dequantize\(\)"):
        x.copy_(q)


# what isn't in the table

UNKNOWN: list[tuple[str, Callable[[ScaledTensor], Any]]] = [
    ("aten.add.Tensor", lambda q: q + 1),
    ("aten.add.Tensor", lambda q: torch.ones(6, 10) + q),
    ("aten.add_.Tensor", lambda q: torch.ones(6, 10).add_(q)),
    ("aten.mul_.Tensor", lambda q: q.mul_(2)),
    ("aten.mm.default", lambda q: torch.ones(2, 6) @ q),
    ("aten.mm.default", lambda q: torch.nn.functional.linear(torch.randn(2, 10), q)),
    ("aten.sum.default", lambda q: q.sum()),
    ("aten.eq.Tensor", lambda q: q == q),
    ("aten.select.int", lambda q: q[0]),
    ("aten.unbind.int", lambda q: list(q)),
    ("aten.cat.default", lambda q: torch.cat((q, q))),
    ("aten.zero_.default", lambda q: q.zero_()),
    ("aten.view.dtype", lambda q: q.view(torch.uint8)),
    ("aten.unsqueeze.default", lambda q: q.unsqueeze(0)),
    ("aten._local_scalar_dense.default", lambda q: quantize(torch.ones(1), E4M3, ROW).item()),
    ("aten.index.Tensor", lambda q: q[torch.tensor([1])]),
    ("aten.relu.default", lambda q: torch.relu(q)),
    ("aten.where.self", lambda q: torch.where(torch.ones(6, 10, dtype=torch.bool), q, q)),
    ("aten.isfinite.default|aten.abs.default|aten.eq.Tensor", lambda q: torch.isfinite(q)),
    ("aten.uniform_.default", lambda q: torch.nn.init.uniform_(q)),
]


@pytest.mark.parametrize(("name", "op"), UNKNOWN, ids=[name for name, _ in UNKNOWN])
def test_ops_that_are_not_in_the_table_raise_by_name(name: str, op: Callable[[ScaledTensor], Any]) -> None:
    q = pair((6, 10))
    before = q.clone()
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), pytest.raises(UnsupportedOpError, match=rf"({name}) is not defined .*call .dequantize\(\)"):
            op(q)
    assert same_bits(q.qdata, before.qdata) and same_bits(q.scale_inv, before.scale_inv)


@pytest.mark.parametrize("escape", [lambda q: q.numpy(), lambda q: q.tolist(), lambda q: memoryview(q)])
def test_no_other_way_reads_values_silently(escape: Callable[[ScaledTensor], Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        escape(pair((6, 10)))


def test_gradients_of_moves() -> None:
    x = torch.randn(6, 10, requires_grad=True)
    q = quantize(x, E4M3, BLOCK)
    parts = q[3:].t().split(5)
    weights = torch.randn(2, 5, 3)
    sum((part.dequantize() * w).sum() for part, w in zip(parts, weights, strict=True)).backward()
    expected = torch.zeros(6, 10)
    expected[3:] = weights.reshape(10, 3).t()
    assert torch.equal(x.grad, expected)
