import re
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import E4M3, E5M2, PerBlock, PerRow, PerTensor
from octavo.kernels.reference.optimizer_state import pieces
from octavo.optim import E4M4, Moment
from octavo.optim.moment import NAMED_MOMENTS, ROUNDINGS, moments_of
from tests.support.fp8_weights import random32, read


def test_names_and_pairs():
    for name, pair in NAMED_MOMENTS.items():
        assert moments_of(name) is pair
    first, second = NAMED_MOMENTS["fp8"]
    assert (first.format, second.format, second.root) == (E4M3, E4M4, True)
    assert first.rounding == second.rounding == "stochastic"
    pair = (Moment(E4M3), Moment("bf16"))
    assert moments_of(pair) is pair


@pytest.mark.parametrize("moments", [None, ("fp8", "fp8"), (Moment("fp32"),), [Moment("fp32")] * 2, 8], ids=str)
def test_what_is_no_pair(moments):
    with pytest.raises(TypeError, match=r"moments=.*: use 'fp32', 'bf16', 'fp8' or a pair of octavo.optim.Moment"):
        moments_of(moments)


@pytest.mark.parametrize("first", [Moment(E4M4), Moment(E4M3, root=True)], ids=str)
def test_a_first_moment_has_a_sign(first):
    with pytest.raises(ValueError, match=re.escape(f"{first} has no sign: it is for second moments")):
        moments_of((first, Moment("fp32")))
    moments_of((Moment("fp32"), first))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"format": "fp8"}, TypeError, "format='fp8': use 'fp32', 'bf16', E4M3, E5M2 or E4M4"),
        ({"format": torch.float8_e4m3fn}, TypeError, "use 'fp32', 'bf16'"),
        ({"format": E4M3, "rounding": "up"}, ValueError, "'up' of E4M3: use 'nearest', 'stochastic', 'hybrid'"),
        ({"format": "fp32", "rounding": "stochastic"}, ValueError, "rounding='stochastic' of fp32: use 'nearest'"),
        ({"format": E4M3, "granularity": PerRow()}, ValueError, r"granularity=PerRow.*: use PerBlock\(1, 128\) or"),
        ({"format": E4M3, "granularity": PerBlock(1, 64)}, ValueError, "granularity=PerBlock"),
        ({"format": E4M3, "scale": "next"}, ValueError, "scale='next': use 'block' or 'previous'"),
        ({"format": E4M3, "scale": "previous"}, ValueError, r"needs granularity=PerTensor\(\)"),
        ({"format": "bf16", "granularity": PerTensor(), "scale": "previous"}, ValueError, "is the amax of codes"),
        ({"format": "bf16", "root": True}, ValueError, "root=True is for codes"),
    ],
    ids=str,
)
def test_what_cannot_be(options, kind, message):
    with pytest.raises(kind, match=message):
        Moment(**options)


def test_repr():
    written = repr(Moment(E5M2, True, PerTensor(), "nearest", "previous"))
    assert written == "Moment(E5M2, root, PerTensor(), nearest, previous amax)"
    assert repr(Moment("fp32")) == "Moment(fp32, nearest)"


def test_a_new_state_reads_zeros():
    cpu, shape = torch.device("cpu"), torch.Size((3, 300))
    for moment in (Moment("fp32"), Moment("bf16"), Moment(E4M3), Moment(E4M4, True, PerTensor(), scale="previous")):
        stored = moment.for_kernel("m", moment.new_state("m", shape, cpu))
        assert stored.data.shape == shape and (stored.data == 0).all()
        assert stored.fmt in (None, moment.format) and (stored.root, stored.rounding) == (moment.root, "nearest")
        assert (stored.amax is not None) == (moment.scale == "previous")
        scales = {"bf16": None, "fp32": None}.get(str(moment.format), (1, 1) if stored.amax is not None else (3, 3))
        assert (None if stored.scale_inv is None else tuple(stored.scale_inv.shape)) == scales
    assert Moment("bf16", rounding="stochastic").for_kernel("m", {"m": torch.zeros(2)}).rounding == "stochastic"


def test_codes_are_read_by_their_blocks():
    """All of a row of 300, a part of it beside all of its scales, and rows of experts that have blocks each."""
    moment, codes = Moment(E4M3), torch.randint(0, 127, (2, 300), dtype=torch.uint8)
    scales = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    values = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)[:, :300]
    for first, end in ((0, 300), (0, 75), (75, 100), (75, 150), (128, 300), (150, 300), (300, 300)):
        assert torch.equal(moment.read_codes(codes[:, first:end], scales, 0, first), values[:, first:end])
        assert torch.equal(moment.read_codes(codes[1:, first:end], scales, 1, first), values[1:, first:end])
    assert torch.equal(moment.read_codes(codes[0, 75:], scales[:1], 0, 75), values[0, 75:])
    assert torch.equal(moment.read_codes(codes.view(1, 2, 300), scales.view(1, 2, 3)), values.view(1, 2, 300))
    one = Moment(E4M3, granularity=PerTensor())
    assert torch.equal(one.read_codes(codes, scales[:1, :1], 1, 150), codes.view(torch.float8_e4m3fn).float())


def errors_of(rounding: Any, noise: float) -> Tensor:
    """Return how far a momentum in codes lies above float64's after each of 30 gradients of mean 1 and this noise."""
    moment, shape = Moment(E4M3, rounding=rounding), torch.Size((4, 128))
    stored = moment.for_kernel("m", moment.new_state("m", shape, "cpu"))
    exact, errors = torch.zeros(shape, dtype=torch.float64), []
    for _ in range(90):
        gradient = 1 + noise * torch.randn(shape)
        gradient[:, 0] = 3.0  # the largest of its block, by which the scale moves alike in all runs
        exact = exact.lerp(gradient.double(), 0.05)
        for piece in pieces(*shape):
            wide = stored.read(piece).lerp(piece.of(gradient), 0.05)
            stored.write(piece, wide, random32(wide.shape))
        errors.append((read(stored).double() - exact)[:, 1:])
    return torch.stack(errors[60:])


def test_the_hybrid_follows_without_noise_and_is_closer_than_stochastic_rounding_with_it() -> None:
    means = {rounding: float(errors_of(rounding, 0.0).mean()) for rounding in ROUNDINGS}
    assert means["nearest"] < -0.02  # it stands still before it is there
    assert abs(means["hybrid"]) < 0.01 and abs(means["stochastic"]) < 0.01
    by_noise = {rounding: float(errors_of(rounding, 2.0).square().mean().sqrt()) for rounding in ROUNDINGS}
    assert by_noise["nearest"] < by_noise["hybrid"] < 0.9 * by_noise["stochastic"]
