"""Many casts as one op, each beside a single one."""

import re
import weakref
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from octavo.granularity import scale_shape
from octavo.kernels.layouts import padded_size
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.numerics import scale_inv_dtype
from tests.kernels.conftest import Ops
from tests.support.casts import ALL, E4M3, E5M2, poisoned_memory, to, values_of
from tests.support.definitions import same_bits
from tests.support.triton_cases import assert_counters_are_zero, use_small_tiles
from tests.support.triton_kernels import TritonKernels

SHAPES = [(64, 64), (17, 127), (0, 5), (130, 70), (5, 0), (1, 1)]
WEIGHT = 1


class Outputs(NamedTuple):
    qdata: list[Tensor]
    transposed: list[Tensor]
    scale_inv: list[Tensor]
    amax: list[Tensor]


def outputs(tile: tuple[int, int], fmt: torch.dtype, pad: int = 1, transpose: bool = True) -> Outputs:
    """Memory for the results, filled with NaN."""
    with poisoned_memory():
        return Outputs(
            [torch.empty(r, padded_size(c, pad), dtype=fmt) for r, c in SHAPES],
            [torch.empty(c, padded_size(r, pad), dtype=fmt) for r, c in SHAPES] if transpose else [],
            [torch.empty(scale_shape(shape, tile), dtype=scale_inv_dtype(tile, True)) for shape in SHAPES],
            [torch.empty(scale_shape(shape, tile)) for shape in SHAPES],
        )


def weights(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    kinds = ["varied", "faults", "zeros", "edge", "varied", "varied"]
    return [values_of(kind, shape, dtype) for kind, shape in zip(kinds, SHAPES, strict=True)]


def states(scales: str) -> list[Tensor]:
    """A delayed scale a tensor: none, all, or some of them 0."""
    if scales == "dynamic":
        return []
    scales_of_tensors = [torch.tensor([0.0, 2.5, 1.0]) for _ in SHAPES]
    if scales == "mixed":
        for state in scales_of_tensors[::2]:
            state[WEIGHT] = 0
    return scales_of_tensors


CASES = [
    (ALL, "dynamic", 16, E4M3, torch.bfloat16),
    (ALL, "dynamic", 1, E5M2, torch.float32),
    (ALL, "delayed", 16, E4M3, torch.float16),
    (ALL, "mixed", 1, E4M3, torch.bfloat16),
    ((128, 128), "dynamic", 16, E4M3, torch.bfloat16),
    ((1, 32), "dynamic", 1, E5M2, torch.float32),
    ((4, 16), "dynamic", 1, E4M3, torch.float16),
]


def check(case: Any, ops: Ops, transpose: bool = True) -> None:
    """Check each tensor's results against a cast of it alone."""
    tile, scales, pad, fmt, dtype = case
    xs = weights(dtype)
    delayed, out = states(scales), outputs(tile, fmt, pad, transpose)
    ops.of("multi_tensor_cast")(xs, *out, delayed, WEIGHT, tile, True, 1, None)
    for index, x in enumerate(xs):
        how = delayed[index] if delayed else None, WEIGHT, fmt, tile, True, 1, True, pad
        alone = REFERENCE["cast"](x, *how)[:4]
        for name, group, expected in zip(Outputs._fields, out, alone, strict=True):
            assert not group or same_bits(group[index], expected), f"{name} of {SHAPES[index]}"


@pytest.mark.parametrize("transpose", [True, False], ids=["transposed", "as it lies"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_is_cast_as_if_alone(case: Any, transpose: bool, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    if ops.kernels:
        use_small_tiles(ops.kernels, monkeypatch)
    check(case, ops, transpose)
    if ops.kernels:
        assert_counters_are_zero(ops.kernels)


@pytest.mark.parametrize(("tile", "scales"), [(ALL, "mixed"), ((128, 128), "dynamic")])
def test_the_flag_leaves_everything_as_it_is(tile: tuple[int, int], scales: str, ops: Ops) -> None:
    xs, delayed, out = weights(), states(scales), outputs(tile, E4M3)
    run, before = ops.of("multi_tensor_cast"), to("cpu", out)
    skip = torch.ones(1, dtype=torch.int32)
    run(xs, *out, delayed, WEIGHT, tile, True, 0, skip)
    for ours, theirs in zip(out, before, strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    run(xs, *out, delayed, WEIGHT, tile, True, 0, skip.zero_())
    assert not same_bits(out.qdata[0], before.qdata[0])


@pytest.mark.gpu
def test_the_table_is_made_once_for_the_same_tensors(kernels: TritonKernels) -> None:
    table_of = kernels.module("multi_tensor_cast")._table_of
    xs, out = weights()[-2:], Outputs(*(group[-2:] for group in outputs(ALL, E4M3)))
    kernels.multi_tensor_cast(xs, *out, [], WEIGHT, ALL, True, 0, None)
    misses = table_of.cache_info().misses
    kernels.multi_tensor_cast(xs, *out, [], WEIGHT, ALL, True, 0, None)
    assert table_of.cache_info().misses == misses
    kernels.multi_tensor_cast(xs[1:], *(group[1:] for group in out), [], WEIGHT, ALL, True, 0, None)
    assert table_of.cache_info().misses == misses + 1


def test_none_and_what_one_launch_cannot_do(ops: Ops) -> None:
    run, xs, out = ops.of("multi_tensor_cast"), weights(), outputs(ALL, E4M3)
    run([], [], [], [], [], [], WEIGHT, ALL, True, 0, None)
    for tile in ((1, -1), (3, 5), (256, 256)):
        with pytest.raises(ValueError, match=re.escape(f"tile={tile}: many are cast per tensor or by blocks")):
            run(xs, *out, [], WEIGHT, tile, True, 0, None)
    with pytest.raises(ValueError, match=r"xs have the dtypes .*bfloat16.*float32"):
        run([xs[0].float(), *xs[1:]], *out, [], WEIGHT, ALL, True, 0, None)
    with pytest.raises(ValueError, match=r"xs\[0\] of shape \(64, 64\), strides \(1, 64\): needs contiguous rows"):
        run([xs[0].t(), *xs[1:]], *out, [], WEIGHT, ALL, True, 0, None)
    codes, transposed, scale_inv, amax = out
    with pytest.raises(ValueError, match=r"scale_inv of .'torch.float16'.: tiles of \(-1, -1\) have torch.float32"):
        run(xs, codes, transposed, [one.half() for one in scale_inv], amax, [], WEIGHT, ALL, True, 0, None)
    with pytest.raises(ValueError, match=r"the lists are \[5, 6, 6, 6, 6, 0\] long"):
        run(xs[1:], *out, [], WEIGHT, ALL, True, 0, None)


def test_memory_of_scales_may_have_more_rows(ops: Ops) -> None:
    x, codes = torch.randn(130, 70), torch.empty(130, 70, dtype=E4M3)
    scale_inv, amax = torch.full((2, 3, 1), -1.0)
    ops.of("multi_tensor_cast")([x], [codes], [], [scale_inv], [amax], [], WEIGHT, (128, 128), True, 0)
    for written, expected in zip(
        (scale_inv, amax), REFERENCE["cast"](x, None, 0, E4M3, (128, 128), True, 0)[2:4], strict=True
    ):
        assert same_bits(written[:2], expected) and written[2] == -1.0


@pytest.mark.gpu
def test_a_tuned_row_of_two_tiles_a_program_leaves_no_block_out(kernels: TritonKernels) -> None:
    launch, x, tile = kernels.module("launch"), torch.randn(256, 128), (128, 128)
    tile_r, tile_c, _, num_warps = launch.config("cast_blocks_transpose", launch.LARGE)
    codes, scale_inv, amax = torch.empty(256, 128, dtype=E4M3), *torch.empty(2, 2, 1)
    with launch.TileTable.using({"cast_blocks_transpose": [[64, tile_r, tile_c, 2, num_warps]]}):
        kernels.multi_tensor_cast([x], [codes], [], [scale_inv], [amax], [], WEIGHT, tile, True, 0)
    for ours, theirs in zip((codes, scale_inv), REFERENCE["cast"](x, None, 0, E4M3, tile, True, 0)[:3:2], strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.gpu
def test_a_table_that_a_graph_reads_outlives_all_others(kernels, monkeypatch):
    module, capturing = kernels.module("multi_tensor_cast"), False
    monkeypatch.setattr(module, "is_capturing", lambda: capturing)
    monkeypatch.setattr(module, "launch", lambda *_: None)
    monkeypatch.setattr(module, "_captured", set())

    tensors = [(torch.empty(rows, 16), torch.empty(rows, 16, dtype=E4M3), torch.empty(1, 1)) for rows in range(80)]

    def cast(rows: int) -> None:
        x, q, scale_inv = tensors[rows]
        kernels.multi_tensor_cast([x], [q], [], [scale_inv], [scale_inv], [], WEIGHT, ALL, True, 0)

    cast(2)
    capturing = True
    cast(2)
    capturing = False
    table = weakref.ref(next(iter(module._captured)).table)
    for rows in range(3, 80):
        cast(rows)
    assert table() is not None


@pytest.mark.gpu
def test_another_stream_waits_until_the_table_is_there(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, other, event, table = mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock()
    launch_table = kernels.module("multi_tensor_cast")._LaunchTable(table, 1, True, (sender, event))
    for current in (sender, other):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, current=current: current)
        launch_table.use()
    sender.wait_event.assert_not_called()
    other.wait_event.assert_called_once_with(event)
    table.record_stream.assert_called_once_with(other)  # or its memory would be given away too early
