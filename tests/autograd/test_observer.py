"""Tests: observers count what float64 says of the tensors that were cast."""

from pathlib import Path

import pytest
import torch

import octavo
from octavo import PerTensor, recipes
from octavo.autograd.casts import CastRequest, cast_role
from octavo.autograd.observer import Observer
from octavo.autograd.products import Layer, linear
from octavo.kernels.arguments import Counted
from octavo.scaling.recipe import WEIGHT

np = pytest.importorskip("numpy")


def test_what_is_recorded_is_what_tensors_say(tmp_path: Path) -> None:
    layer = octavo.nn.Linear(32, 48, recipe=recipes.dynamic())
    x, grad = torch.randn(40, 32) * torch.logspace(0, -9, 32), torch.randn(40, 48)
    x.requires_grad_()
    with octavo.inspect.record(layer, tmp_path) as recorder:
        layer(x).backward(grad)
        recorder.step()
    record = octavo.inspect.load(tmp_path)
    assert [row.role for row in record.rows] == ["input", "weight", "grad_output"]
    for place, (tensor, cast) in enumerate(zip((x, layer.weight, grad), recipes.dynamic().casts, strict=True)):
        numbers = tensor.detach().double()
        read = octavo.quantize(tensor.detach(), cast.as_is.format, PerTensor()).dequantize().double()
        expected = {
            "flushed": float(((read == 0) & (numbers != 0)).sum() / (numbers != 0).sum()),
            "sqnr": float(10 * torch.log10(numbers.square().sum() / (numbers - read).square().sum())),
            "amax": float(numbers.abs().max()),
            "clipped": 0.0,
            "nonfinite": 0.0,
            "assumed": 1.0,
        }
        for name, value in expected.items():
            assert record.measures[name][0, place] == pytest.approx(value, rel=1e-6), name
        exponents = np.floor(np.log2(numbers.abs().numpy())).astype(int)
        counted = np.bincount(np.clip(exponents - Counted.lowest, 0, 63).ravel(), minlength=64)
        assert (record.exponents[0, place] == counted).all()
    assert record.measures["flushed"][0, 0] > 0.1


@pytest.mark.parametrize(
    ("needs", "noted"), [((True, True), [1, 40]), ((True, False), [1, 40]), ((False, True), [1, 48])], ids=str
)
def test_a_fault_of_a_gradient_is_noted_once(needs: tuple[bool, bool], noted: list[int]) -> None:
    """By the product that reads its rows; where the input needs no gradient, by the one that reads its columns."""
    of_input, of_gradient = (
        (torch.tensor([7]).int(), torch.zeros(len(Counted.faults)), torch.zeros(1).int()) for _ in range(2)
    )
    x, weight = (torch.randn(rows, 32, requires_grad=need) for rows, need in zip((40, 48), needs, strict=True))
    operands = cast_role(weight.detach(), CastRequest(recipes.dynamic(), WEIGHT, True, True), None)
    layer = Layer(operands, recipes.dynamic(), None, True, (Observer(notes=(of_input, of_gradient)),))
    grad = torch.randn(40, 48)
    grad[3, 5] = torch.nan
    linear(x, weight, None, layer).backward(grad)
    assert of_input[1][:2].tolist() == [0, 40] and int(of_input[2]) == 0
    assert of_gradient[1][:2].tolist() == noted and int(of_gradient[2]) == 7
