"""A layer whose casts and products are the Triton kernels', as on a GPU, beside one that runs the reference."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import octavo
from octavo import kernels as entries
from octavo.autograd import casts, linear_cross_entropy
from octavo.kernels.signatures import SCHEMAS
from tests.support import triton_kernels
from tests.support.helpers import FP8_RECIPES, sqnr
from tests.support.triton_kernels import in_place_of_reference

pytestmark = pytest.mark.gpu
AS_ON_CPU: Any = {"needs_transposed_codes": lambda device: False, "contraction_multiple": lambda device, *recipe: 1}


@pytest.fixture
def device(kernels: Any) -> Iterator[torch.device]:
    """The device where layers run Triton kernels; without a GPU they stand in for the reference, laid as on Hopper."""
    with in_place_of_reference(kernels) if kernels.gpu.type == "cpu" else nullcontext():
        yield kernels.gpu


def layer(recipe: octavo.Recipe, bias: bool, sizes: tuple[int, int], dtype: torch.dtype) -> octavo.nn.Linear:
    torch.manual_seed(1)
    return octavo.nn.Linear(*sizes, bias=bias, recipe=recipe, dtype=dtype)


def steps(module: octavo.nn.Linear, inputs: list[Tensor], grads: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return each step's output and gradients, and the delayed state after it."""
    module = module.to(device)
    tensors = []
    for x, grad in zip(inputs, grads, strict=True):
        x = x.to(device).requires_grad_()
        y = module(x)
        y.backward(grad.to(device))
        tensors += [y.detach(), x.grad, *(p.grad for p in module.parameters())]
        tensors += list(octavo.nn.delayed_state_dict(module).values())
        module.zero_grad()
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.covering(1)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("tokens", "sizes"), [(32, (64, 48)), (19, (45, 33))], ids=["even", "odd"])
@pytest.mark.parametrize("name", FP8_RECIPES)
def test_a_layer_is_that_of_the_reference(name: str, tokens: int, sizes: Any, bias: bool, device: torch.device) -> None:
    recipe = FP8_RECIPES[name]()
    count = 3 if recipe.delayed is not None else 1  # each step's scales are those of the steps before
    inputs = [torch.randn(tokens, sizes[0]) for _ in range(count)]
    grads = [torch.randn(tokens, sizes[1]) * 1e-3 for _ in range(count)]
    got = steps(layer(recipe, bias, sizes, torch.float32), inputs, grads, device)
    with (
        mock.patch.multiple(entries, **{op: getattr(torch.ops.octavo, op).default for op in SCHEMAS}),
        mock.patch.multiple(casts, **AS_ON_CPU),
    ):
        inputs = [x.detach().clone() for x in inputs]  # layers that read one tensor share its cast
        expected = steps(layer(recipe, bias, sizes, torch.float32), inputs, grads, torch.device("cpu"))
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        # the codes are the same, and the products round differently: on a GPU also by its tensor cores' short sums
        assert sqnr(ours, theirs) > (45 if device.type == "cuda" or triton_kernels.compiled_for else 110)
    if recipe.delayed is not None:
        for ours, theirs in zip(got[-2:], expected[-2:], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["delayed", "rowwise", "mx"])
def test_a_heads_loss_in_chunks_is_that_of_the_reference(name: str, device: torch.device, monkeypatch: Any) -> None:
    monkeypatch.setattr(linear_cross_entropy, "ROWS", 32)
    head, x, target = layer(FP8_RECIPES[name](), False, (64, 72), torch.float32), torch.randn(70, 64), torch.arange(70)
    target[::9] = -100

    def loss_and_gradients(on: torch.device) -> list[Tensor]:
        head_on_device, rows = copy.deepcopy(head).to(on), x.detach().clone().to(on).requires_grad_()
        loss = octavo.nn.linear_cross_entropy(rows, head_on_device, target.to(on))
        return [one.cpu() for one in (loss.detach(), *torch.autograd.grad(loss, [rows, head_on_device.weight]))]

    got = loss_and_gradients(device)
    with (
        mock.patch.multiple(entries, **{op: getattr(torch.ops.octavo, op).default for op in SCHEMAS}),
        mock.patch.multiple(casts, **AS_ON_CPU),
        mock.patch.multiple(linear_cross_entropy, **AS_ON_CPU),
    ):
        expected = loss_and_gradients(torch.device("cpu"))
    for ours, theirs in zip(got, expected, strict=True):
        # an exp that is rounded otherwise may give the next code
        assert sqnr(ours, theirs) > 40
