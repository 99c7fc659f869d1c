"""Casts and products of rows in groups, against each group's alone."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.autograd.casts import CastRequest, cast_role
from octavo.autograd.grouped import (
    group_of_rows,
    group_sums,
    grouped_linear,
    grouped_mm,
    rows_of_codes,
    scales_of_rows,
    transposed_codes,
)
from octavo.kernels import cast, dequantize
from octavo.scaling.recipe import WEIGHT
from tests.support.definitions import same_bits
from tests.support.groups import SIZES, offsets_of, slices_of
from tests.support.helpers import FP8_RECIPES, delayed_state


class CountCalls(TorchDispatchMode):
    """Counts grouped products in high precision."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.octavo.grouped_mm.default
        return func(*args, **(kwargs or {}))


each_sizes = pytest.mark.parametrize(("sizes", "ungrouped"), SIZES, ids=str)


@each_sizes
def test_rows_know_their_group(sizes: list[int], ungrouped: int) -> None:
    expected = [group for group, size in enumerate([*sizes, ungrouped]) for _ in range(size)]
    assert group_of_rows(offsets_of(sizes), sum(sizes) + ungrouped).tolist() == expected


@each_sizes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(32, 16), (17, 9), (1, 8)])
def test_products_in_high_precision_are_those_of_each_group(sizes, ungrouped, dtype, inner, outer):
    rows, groups, offsets = sum(sizes) + ungrouped, len(sizes), offsets_of(sizes)
    x, b = torch.randn(rows, inner, dtype=dtype), torch.randn(groups, inner, outer, dtype=dtype)
    grad = torch.randn(rows, outer, dtype=dtype)
    y, dw = grouped_mm(x, b, offsets), grouped_mm(grad.t(), x, offsets)
    assert y.shape == (rows, outer) and dw.shape == (groups, outer, inner)
    assert not y[sum(sizes) :].any()
    for group, of in enumerate(slices_of(sizes)):
        torch.testing.assert_close(y[of], x[of] @ b[group])
        torch.testing.assert_close(dw[group], grad[of].t() @ x[of])
        assert of.stop > of.start or not dw[group].any()
    torch.testing.assert_close(group_sums(grad, offsets), torch.stack([grad[of].sum(0) for of in slices_of(sizes)]))
    ones = torch.ones((), dtype=dtype).expand(rows, outer)  # as the gradient of a sum, of any strides
    assert group_sums(ones, offsets)[:, 0].tolist() == sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_bias_is_summed_in_float32(dtype: torch.dtype) -> None:
    """A sum in bf16 of so many numbers stands at 256."""
    sizes, inner, outer = [3000, 0, 1000], 8, 5
    x, weight, grad = (torch.rand(shape, dtype=dtype) for shape in ((4001, inner), (3, outer, inner), (4001, outer)))
    bias = torch.rand(3, outer, dtype=dtype, requires_grad=True)
    y = grouped_linear(x, weight, bias, offsets_of(sizes))
    y.backward(grad)
    for group, of in enumerate(slices_of(sizes)):
        torch.testing.assert_close(y[of], x[of] @ weight[group].t() + bias[group])
        torch.testing.assert_close(bias.grad[group], grad[of].double().sum(0).to(dtype))
    assert not y[4000:].any()


def test_gradients_of_gradients_in_high_precision() -> None:
    groups, ends = slices_of([3, 0, 4]), offsets_of([3, 0, 4])

    def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if b.ndim == 3:
            return grouped_mm(a, b, ends), torch.cat([a[of] @ one for of, one in zip(groups, b, strict=True)])
        return grouped_mm(a, b, ends), torch.stack([a[:, of] @ b[of] for of in groups])

    x, b, a = torch.randn(7, 4), torch.randn(3, 4, 2), torch.randn(2, 7)
    for operands in ((x, b), (a, x)):
        derivatives = []
        for which in range(2):
            leaves = [operand.clone().requires_grad_() for operand in operands]
            first = torch.autograd.grad(both(*leaves)[which].square().sum(), leaves, create_graph=True)
            derivatives.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
        torch.testing.assert_close(derivatives[0], derivatives[1])


@pytest.mark.parametrize("name", FP8_RECIPES)
@pytest.mark.parametrize("stored", ["[G, N, K]", "[G, K, N]"])
def test_matrices_are_cast_as_each_alone(name: str, stored: str) -> None:
    recipe, weight = FP8_RECIPES[name](), torch.randn(3, 130, 70)
    if stored == "[G, K, N]":
        weight = weight.mT.contiguous().mT
    for layouts in ((True, True), (True, False), (False, True)):
        operands = cast_role(weight, CastRequest(recipe, WEIGHT, *layouts), delayed_state(recipe))
        alone = [cast_role(one, CastRequest(recipe, WEIGHT, *layouts), delayed_state(recipe)) for one in weight]
        for pair, expected in zip(operands[:2], zip(*(one[:2] for one in alone), strict=True), strict=True):
            assert (pair is None) == (expected[0] is None)
            for group, one in enumerate(expected if pair is not None else ()):
                assert same_bits(pair[0][group], one[0]) and same_bits(pair[1][group], one[1])
        if recipe.delayed is not None:
            assert torch.equal(operands.amax, torch.stack([one.amax for one in alone]).amax(0))


@each_sizes
@pytest.mark.parametrize("tile", [(-1, -1), (1, -1), (-1, 1), (1, 32), (16, 16)], ids=str)
def test_scales_of_rows_read_every_group_back(sizes: list[int], ungrouped: int, tile: tuple[int, int]) -> None:
    x, offsets = torch.randn(sum(sizes) + ungrouped, 40), offsets_of(sizes)
    q, _, scale_inv, _ = cast(x, None, 0, torch.float8_e4m3fn, tile, True, 0, offsets=offsets)
    values = dequantize(q, *scales_of_rows(scale_inv, tile, offsets, len(x)), torch.float32)
    for of in slices_of(sizes):
        assert torch.allclose(values[of], x[of], rtol=2**-3, atol=2**-9 * x[of].abs().sum().item())


def test_a_gradient_that_nobody_asks_for_is_not_computed() -> None:
    x, b, sizes = torch.randn(7, 4), torch.randn(3, 4, 2), [3, 0, 4]
    both = [x.clone().requires_grad_(), b.clone().requires_grad_()]
    expected = torch.autograd.grad(grouped_mm(*both, offsets_of(sizes)).square().sum(), both)
    for index in range(2):
        operands = [x, b]
        operands[index] = operands[index].clone().requires_grad_()
        with CountCalls() as calls:
            grouped_mm(*operands, offsets_of(sizes)).square().sum().backward()
        assert torch.equal(operands[index].grad, expected[index]) and calls.count == 2


def test_products_in_high_precision_are_counted() -> None:
    from octavo.nn.summary import forward_flops

    layer = torch.nn.Module()
    layer.forward = lambda x: grouped_mm(x, torch.randn(3, 8, 16), offsets_of([2, 0, 3]))  # type: ignore[method-assign]
    assert forward_flops(layer, (torch.randn(5, 8),), {})[0] == (0, 2 * 5 * 8 * 16)


@each_sizes
@pytest.mark.parametrize("pad", [1, 16])
def test_codes_are_transposed_as_the_cast_does(sizes: list[int], ungrouped: int, pad: int) -> None:
    offsets = offsets_of(sizes)
    x = torch.randn(sum(sizes) + ungrouped, 24)
    x[sum(sizes) :] = 0
    q, expected, *_ = cast(x, None, 0, torch.float8_e4m3fn, (-1, -1), False, 0, True, pad, offsets=offsets)
    codes = transposed_codes(q[: sum(sizes), :24], offsets, pad)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)[:, : codes.shape[1]])
    assert not expected.view(torch.uint8)[:, codes.shape[1] :].any()
    rows = rows_of_codes(expected, offsets, len(x), pad)[: sum(sizes)]
    assert torch.equal(rows.view(torch.uint8), q[: sum(sizes), :24].view(torch.uint8))
