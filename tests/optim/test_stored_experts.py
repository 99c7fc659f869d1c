"""Experts in FP8 are stepped as the weights of linear layers are, each by its own scales."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from octavo import E4M3, E5M2, PerBlock, PerTensor
from octavo.kernels import devices
from octavo.kernels.reference import optimizer_step as steps
from octavo.optim import AdamW, Moment
from octavo.optim.conversion import Conversion
from octavo.optim.masters import FP8_MASTERS
from octavo.optim.state import as_fp32, convert_moment
from octavo.tensor.stored_gradient import StoredGradient
from octavo.weights.stored import StoredWeight

SHAPE = (3, 160, 200)
each_granularity = pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(128, 128)], ids=str)
ONE = (Moment(E4M3, granularity=PerTensor()), Moment(E5M2, root=True, granularity=PerTensor(), scale="previous"))


# with as many blocks in all of an expert as in each of its rows, though these are others; and shapes on either side
SHAPES = [(2, 2, 65), (2, 2, 127), (2, 3, 90), (2, 9, 120), (2, 15, 120), (2, 16, 120), (2, 15, 121), (2, 2, 255)]
SHAPES += [(2, 3, 384), (1, 15, 120), (3, 1, 120), (2, 5, 7)]


@contextmanager
def same_bits() -> Iterator[None]:
    """Have all steps be the reference's, and round by the same random bits."""
    of_step = mock.patch.object(steps, "random_bits", lambda _, index: torch.full_like(index, 0x1234567).int())
    with of_step, mock.patch.object(devices, "step_in_place", lambda *_: False):
        yield


def together_and_apart(granularity: Any, shape: Any = SHAPE) -> tuple[nn.Parameter, list[nn.Parameter]]:
    values = torch.randn(shape) * torch.tensor([1.0, 100, 1e-3])[: shape[0]].view(-1, 1, 1)
    return (
        nn.Parameter(StoredWeight.cast(values, granularity, keep_extra_bits=True)),
        [nn.Parameter(StoredWeight.cast(one, granularity, keep_extra_bits=True)) for one in values],
    )


def backward(weight: Any, grad: Tensor) -> None:
    (weight.dequantize() if isinstance(weight, StoredWeight) else weight).mul(grad).sum().backward()


def assert_same(weight: Any, matrices: Any, optimizer: Any, other: Any) -> None:
    for expert, one in enumerate(matrices):
        assert torch.equal(weight.qdata[expert].view(torch.uint8), one.qdata.view(torch.uint8))
        assert torch.equal(weight.scale_inv[expert], one.scale_inv)
        state, its = optimizer.state[weight], other.state[one]
        for name in its.keys() - {"step", "master_kind"}:
            assert torch.equal(state[name][expert].view(its[name].shape), its[name]), name
        assert state["step"] == its["step"]


def assert_trained_alike(weight: Any, matrices: list[nn.Parameter], optimizer: Any, other: Any) -> None:
    with same_bits():
        for factor in (1.0, 0.0, 30.0):
            grad = torch.randn(weight.shape) * factor
            grad[1] = 0
            backward(weight, grad)
            assert optimizer.gradient_storage is None or isinstance(weight.grad, StoredGradient)
            for one, its in zip(matrices, grad, strict=True):
                backward(one, its)
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
    assert_same(weight, matrices, optimizer, other)


@pytest.mark.covering(1)
@each_granularity
@pytest.mark.parametrize("master", FP8_MASTERS, ids=str)
@pytest.mark.parametrize(("moments", "gradients"), [("fp32", None), ("fp8", "fp8"), (ONE, None)], ids=str)
def test_as_weights_of_their_own(granularity: Any, master: str | None, moments: Any, gradients: str | None) -> None:
    """Experts are trained as matrices by themselves, here with equal random bits: these go by a weight's number."""
    weight, matrices = together_and_apart(granularity)
    options: Any = {"lr": 0.01, "master": master, "moments": moments, "gradient_storage": gradients}
    assert_trained_alike(weight, matrices, AdamW([weight], **options), AdamW(matrices, **options))


@each_granularity
@pytest.mark.parametrize("master", ["fp32", "split24"])
def test_stored_and_restored_in_training(granularity: Any, master: str) -> None:
    """A master's values stay within 20 bits of float32; moments keep their values where their blocks stay so."""
    values = (torch.rand(SHAPE) + 1 / 64).mul_(torch.randn(SHAPE).sign())
    weight = nn.Parameter(values.clone())
    optimizer = AdamW([weight], lr=0.01, moments="fp32", master="fp32")
    weight.grad = torch.randn(SHAPE)
    optimizer.step()
    before, moment = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
    Conversion(optimizer.settings._replace(master=master), {weight: granularity}).apply(nn.Module(), optimizer)
    assert isinstance(weight, StoredWeight) and weight.scale_inv.shape[0] == len(SHAPE)
    assert weight.granularity == granularity and torch.equal(optimizer.state[weight]["exp_avg"], moment)
    Conversion(optimizer.settings._replace(master="fp32"), {weight: None}).apply(nn.Module(), optimizer)
    assert type(weight) is nn.Parameter
    torch.testing.assert_close(weight.detach(), before, rtol=0 if master == "fp32" else 2**-19, atol=0)


def as_matrices(values: Tensor, storage: Any) -> list[Tensor]:
    """Return experts as the optimizer sees them: stored ones are a matrix each, plain ones the rows of one."""
    return [values.flatten(1)] if storage is None else list(values)


def adamw_of(matrices: list[Tensor], storage: Any, moments: Any) -> AdamW:
    stored = [one.clone() if storage is None else StoredWeight.cast(one) for one in matrices]
    return AdamW([nn.Parameter(one) for one in stored], lr=0.01, moments=moments)


def read(optimizer: AdamW) -> dict[str, Tensor]:
    """The values of all moments, one weight after the other."""
    return {
        name: torch.cat([as_fp32(name, moment, optimizer.state[one]).flatten() for one in optimizer.all_params()])
        for name, moment in zip(optimizer.names, optimizer.moments, strict=True)
    }


def assert_reads(optimizer: AdamW, expected: dict[str, Tensor]) -> None:
    for name, values in read(optimizer).items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("moments", ["fp8", ONE], ids=["fp8", "one scale"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("storage", [None, PerTensor()], ids=["plain", "stored"])
def test_moments_are_read_and_converted_as_those_of_matrices(storage: Any, shape: Any, moments: Any) -> None:
    """Blocks of a plain weight lie along all of an expert, of a stored one along each of its rows."""
    values, grad = torch.randn(shape), torch.randn(shape) * torch.logspace(-3, 2, shape[2])
    optimizer, other = (adamw_of([values], storage, moments), adamw_of(as_matrices(values, storage), storage, moments))
    (weight,) = optimizer.all_params()
    weight.grad = grad
    for one, its in zip(other.all_params(), as_matrices(grad, storage), strict=True):
        one.grad = its
    with same_bits():
        optimizer.step()
        other.step()
    assert_reads(optimizer, before := read(other))
    saved, after = copy.deepcopy(optimizer.state_dict()), PerTensor() if storage is None else None
    Conversion(optimizer.settings, {weight: after}).apply(nn.Module(), optimizer)
    # as matrices of the other storage load these values
    expected = adamw_of(as_matrices(values, after), after, moments)
    for name, moment in zip(other.names, other.moments, strict=True):
        parts = as_matrices(before[name].view(shape), after)
        for one, part in zip(expected.all_params(), parts, strict=True):
            expected.state[one] |= convert_moment(one, name, Moment("fp32"), moment, {name: part})
    coincide = shape[0] == 1 if moments == ONE else shape[1] == 1 or shape[2] % 128 == 0
    assert_reads(optimizer, wanted := before if coincide else read(expected))
    loaded = adamw_of([values], after, moments)
    with warnings.catch_warnings(action="ignore"):
        loaded.load_state_dict(saved)
    assert_reads(loaded, wanted)


@each_granularity
def test_gradients_in_codes_belong_to_the_storage(granularity: Any) -> None:
    """Gradients are added to zeroed ones; codes from before the storage changed are refused, with as many scales."""
    shape = (2, 15, 120)
    weight = nn.Parameter(StoredWeight.cast(torch.randn(shape), granularity))
    optimizer = AdamW([weight], moments="fp8", gradient_storage="fp8")
    for storage in (None, granularity):
        grad = torch.randn(shape)
        backward(weight, grad)
        first = weight.grad.dequantize()
        optimizer.zero_grad(set_to_none=False)
        backward(weight, grad)
        assert torch.equal(weight.grad.dequantize(), first)
        optimizer.step()
        Conversion(optimizer.settings, {weight: storage}).apply(nn.Module(), optimizer)
        with pytest.raises(RuntimeError, match=r"experts were stored in FP8, or back .* do it before backward"):
            optimizer.step()
        optimizer.zero_grad()
