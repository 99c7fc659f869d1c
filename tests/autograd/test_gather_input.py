"""Gathers in FP8, and sums; their bytes are in tests/distributed/test_tensor_parallel.py."""

import dataclasses
import functools
import math

import pytest
import torch

import octavo
from octavo import E4M3, PerBlock, kernels, recipes
from octavo.autograd.casts import CastRequest, cast_role
from octavo.autograd.gather_input import (
    GatheredGradient,
    GatheredInput,
    GatherReader,
    Wire,
    can_gather,
    gather_input,
    input_cast_arguments,
    scatter_output,
)
from octavo.distributed import Fp8Reduction
from octavo.distributed.tensor_parallel import _sum_in_fp8
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, Cast
from octavo.tensor.pair import Operands
from tests.support.helpers import padded_as_on_gpu
from tests.support.parallel_tasks import RECIPES, small

SQUARE = Cast(E4M3, PerBlock(128, 128))
SQUARES = dataclasses.replace(recipes.dynamic(), output=(SQUARE, SQUARE), grad_weight=(SQUARE, SQUARE))
ONCE = ("dynamic", "power of two", "delayed")


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_can_be_sent(recipe):
    reads_all, reads_output = (GatherReader(RECIPES[recipe], None, needs_dw) for needs_dw in (True, False))
    in_fp8, is_sent = recipe not in ("gw_hp", "high_precision", "nvfp4"), recipe not in ("high_precision", "nvfp4")
    for role in (INPUT, GRAD_OUTPUT):
        assert can_gather(reads_all, role, False) == in_fp8
        assert can_gather(reads_output, role, True) == is_sent
        assert can_gather(reads_all, role, True) == (recipe in ONCE)
    assert not can_gather(GatherReader(SQUARES, None, True), INPUT, False)
    assert not can_gather(GatherReader(SQUARES, None, True), INPUT, True)
    assert (input_cast_arguments(RECIPES[recipe]) == input_cast_arguments(recipes.dynamic())) == (recipe == "dynamic")


def as_cast_alone(x, recipe, role):
    """Return the pairs of a whole tensor [..., K] on one rank, the second cast from the values of the first's codes."""
    casts = recipe.casts[role]
    whole = cast_role(x.reshape(-1, x.shape[-1]), CastRequest(recipe, role, True, True), None)
    if casts.coincide:
        return whole
    values = kernels.dequantize(*whole.as_is, casts.as_is.tile, torch.float32)
    return whole._replace(transposed=cast_role(values, CastRequest(recipe, role, False, True), None).transposed)


def same(actual, expected):
    """Return whether codes and scales are equal, one by one."""
    pairs = zip((*actual.as_is, *actual.transposed), (*expected.as_is, *expected.transposed), strict=True)
    return [torch.equal(a.float(), b.float()) and a.shape == b.shape for a, b in pairs]


def gathered_as_cast_alone(mesh, recipe, shape, dim):
    """Whether pairs of a gathered input, and of a gradient that is gathered, are those of one rank."""
    x, rank, reader = torch.randn(shape), mesh.get_local_rank(), GatherReader(RECIPES[recipe], None, True)
    wire = Wire(mesh.get_group().group_name, 2, math.prod(shape[:dim]))
    x_of_rank = x.chunk(2, dim)[rank].contiguous()
    gathered = gather_input(x_of_rank, dim, reader, wire)
    answers = same(gathered.operands, as_cast_alone(x, reader.recipe, INPUT))
    y, seen = torch.zeros(shape, requires_grad=True), []
    y.register_hook(lambda grad: seen.append(grad.read()) or torch.zeros(shape))
    scatter_output(y, dim, reader, wire, True).backward(x_of_rank)
    answers += same(seen[0], as_cast_alone(x, reader.recipe, GRAD_OUTPUT))
    sums = x.reshape(-1, shape[-1]).sum(0)
    return gathered.shape == x.shape, [*answers, torch.allclose(seen[0].column_sum, sums, atol=1e-4)]


@pytest.mark.parametrize(("shape", "dim"), [((2, 256, 40), 1), ((256, 3, 40), 0), ((512, 130), 0)])
@pytest.mark.parametrize("recipe", ["dynamic", "rowwise", "blockwise", "mx"])
def test_pairs_are_those_of_the_whole(pool, recipe, shape, dim):
    for same_shape, answers in pool.run(gathered_as_cast_alone, (2,), recipe, shape, dim):
        assert same_shape and answers == [True] * 9


def test_blocks_may_reach_over_ranks(pool):
    """50 tokens a rank, in blocks of 128 and of 32."""
    for recipe in ("blockwise", "mx"):
        for _, answers in pool.run(gathered_as_cast_alone, (2,), recipe, (3, 100, 40), 1):
            assert answers == [True] * 9


def summed(mesh, shape, dim):
    """Return whether sums by an FP8 reduction, forward and backward, are those of ranks' terms rounded once."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    every = [torch.randn(shape) for _ in range(ranks)]
    how = functools.partial(_sum_in_fp8, Fp8Reduction())
    wire = Wire(mesh.get_group().group_name, ranks, math.prod(shape[:dim]), reduce=how)
    addends = []
    for x in every:  # a rank's parts one after the other, each in blocks of 128
        part = x.chunk(ranks, dim)[rank].contiguous()
        rounded = octavo.quantize(part.view(1, -1), E4M3, PerBlock(1, 128), power_of_two=True).dequantize()
        addends.append(rounded.view(part.shape))
    expected = torch.stack(addends).sum(0)
    forward = scatter_output(every[rank], dim, None, wire, False)
    x = torch.zeros_like(expected, requires_grad=True)
    gathered = gather_input(x, dim, GatherReader(RECIPES["dynamic"], None, True), wire)
    (backward,) = torch.autograd.grad(gathered.carrier, x, every[rank])
    return torch.equal(forward, expected), torch.equal(backward, expected)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sums_in_fp8(pool, ranks):
    for shape, dim in (((3, 64, 40), 1), ((64, 48), 0)):
        for answers in pool.run(summed, (ranks,), shape, dim):
            assert all(answers)


@pytest.mark.parametrize("recipe", ["dynamic", "rowwise", "blockwise", "mx"])
def test_layouts_that_a_gpu_wants(recipe, lone_mesh, monkeypatch):
    """Codes written transposed, contractions padded to 16: as of a tensor that was not gathered."""
    for where in ("autograd.casts", "tensor.pair"):
        monkeypatch.setattr(f"octavo.{where}.needs_transposed_codes", lambda device: True)
        monkeypatch.setattr(f"octavo.{where}.contraction_multiple", padded_as_on_gpu)
    x, wire = small(1000, 296), Wire(lone_mesh.get_group().group_name, 1, 1)
    operands = gather_input(x, 0, GatherReader(RECIPES[recipe], None, True), wire).operands
    expected = cast_role(x, CastRequest(RECIPES[recipe], INPUT, True, True), None)
    assert same(operands, expected) == [True] * 4
    strides = [[part.stride() for part in (*one.as_is, *one.transposed)] for one in (operands, expected)]
    assert strides[0] == strides[1]


# --- what stands for a gathered input or gradient

PAIR = torch.ones(4, 8).to(torch.float8_e4m3fn), torch.ones(1, 1)


@pytest.fixture
def gathered():
    carrier = torch.zeros((), dtype=torch.bfloat16).expand(2, 2, 8).requires_grad_()
    return GatheredInput(carrier, Operands(PAIR, PAIR), ("casts",), Wire("group", 2, 1))


def test_it_says_what_modules_ask_of_an_input(gathered):
    assert gathered.shape == (2, 2, 8) and gathered.ndim == gathered.dim() == 3 and gathered.size(-1) == 8
    assert (gathered.dtype, gathered.device.type, gathered.is_meta) == (torch.bfloat16, "cpu", False)
    assert gathered.requires_grad


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.relu(x),
        lambda x: torch.ones(2, 2, 8) + x,
        lambda x: x.view(4, 8),
        lambda x: torch.nn.functional.linear(x, torch.ones(3, 8)),
    ],
)
def test_nothing_else_reads_it(gathered, read):
    with pytest.raises(octavo.UnsupportedOpError, match=r"gathered in FP8: .* torch's own PrepareModuleInput"):
        read(gathered)
    assert not hasattr(gathered, "no_attribute_of_tensors")


def test_a_gradient_comes_to_the_products_as_rows():
    operands = Operands(PAIR, PAIR, None, torch.ones(8))
    facade = GatheredGradient(operands, (2, 2, 8), torch.bfloat16)
    rows = facade.view(4, 8)
    assert rows.shape == (4, 8) and rows.dtype == torch.bfloat16 and rows.read() == operands
    assert rows.isnan().shape == (4, 8) and not rows.isnan().any() and rows.to(rows.dtype) is rows
    assert facade.detach().shape == facade.shape
    with torch.inference_mode():
        assert rows.to(torch.bfloat16) is rows
    with pytest.raises(octavo.UnsupportedOpError):
        facade.view(2, 16)
    with pytest.raises(octavo.UnsupportedOpError):
        facade + 1
