"""The delayed state's update against a list of numbers a role."""

import pytest
import torch
from torch import Tensor

from octavo import kernels
from tests.support.definitions import same_bits, scale_of

LIMITS = [448.0, 448.0, 57344.0]


def expected_update(
    scale: list[float], history: list[list[float]], amaxes: list[float | None], powers: list[bool], margins: list[int]
) -> tuple[dict[str, list[float]], list[list[float]]]:
    """The next scales under each ``reduce``, and the rolled histories."""
    rolled = [h if a is None else [a, *h][: len(h)] for a, h in zip(amaxes, history, strict=True)]
    scales: dict[str, list[float]] = {"max": [], "most_recent": []}
    for role, amax in enumerate(amaxes):
        for reduce, reduced in (("max", max(rolled[role])), ("most_recent", rolled[role][0])):
            kept = scale[role]
            next_scale = scale_of(reduced, LIMITS[role], powers[role], margins[role], previous=kept)
            scales[reduce].append(kept if amax is None else next_scale)
    return scales, rolled


def tensor_of(amax: float | None) -> Tensor | None:
    return None if amax is None else torch.full((1, 1), amax)


@pytest.mark.parametrize("reduce", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 16])
@pytest.mark.parametrize("powers", [[False] * 3, [True] * 3, [True, False, True], [False, False, True]], ids=str)
def test_update(powers: list[bool], length: int, reduce: str) -> None:
    scale, history = torch.zeros(3), torch.zeros(3, length)
    for step in range(2 * length + 3):
        amaxes: list[float | None] = (torch.rand(3) * 10.0 ** float(torch.randint(-3, 3, ()))).tolist()
        if step % 3 == 1:
            amaxes[step % 2] = None
        if step % 4 == 3:
            amaxes[2] = 0.0
        margins = [0, 3, step % 2]
        scales, rolled = expected_update(scale.tolist(), history.tolist(), amaxes, powers, margins)
        before = (scale.data_ptr(), history.data_ptr())
        kernels.delayed_update(scale, history, *map(tensor_of, amaxes), LIMITS, powers, margins, reduce)
        assert same_bits(scale, torch.tensor(scales[reduce]))
        assert same_bits(history, torch.tensor(rolled))
        assert before == (scale.data_ptr(), history.data_ptr()), "the buffers are written in place"


@pytest.mark.parametrize("reduce", ["max", "most_recent"])
def test_nothing_was_cast(reduce: str) -> None:
    scale, history = torch.rand(3), torch.rand(3, 4)
    before = scale.clone(), history.clone()
    kernels.delayed_update(scale, history, None, None, None, LIMITS, [False] * 3, [0] * 3, reduce)
    assert torch.equal(scale, before[0]) and torch.equal(history, before[1])


@pytest.mark.parametrize("role", range(3))
def test_only_the_role_that_was_cast_moves(role: int) -> None:
    scale, history = torch.rand(3), torch.rand(3, 4)
    before = scale.clone(), history.clone()
    amaxes = [torch.full((1, 1), 2.0) if r == role else None for r in range(3)]
    kernels.delayed_update(scale, history, *amaxes, LIMITS, [False] * 3, [0] * 3, "most_recent")
    for r in range(3):
        assert (scale[r] == before[0][r]) == (r != role)
        assert torch.equal(history[r], before[1][r]) == (r != role)
    assert scale[role] == LIMITS[role] / 2.0


def test_an_amax_of_zero_keeps_the_scale_and_rolls() -> None:
    for reduce in ("max", "most_recent"):
        scale, history = torch.tensor([5.0, 0.0, 0.0]), torch.zeros(3, 2)
        zero = torch.zeros(1, 1)
        kernels.delayed_update(scale, history, zero, zero, None, LIMITS, [False] * 3, [0] * 3, reduce)
        assert scale.tolist() == [5.0, 0.0, 0.0], "0 is no history yet: the next cast uses its own amax"
    history = torch.tensor([[4.0, 1.0]]).repeat(3, 1)
    kernels.delayed_update(scale, history, zero, None, None, LIMITS, [False] * 3, [0] * 3, "most_recent")
    assert history[0].tolist() == [0.0, 4.0] and scale[0] == 5.0
    kernels.delayed_update(scale, history, zero, None, None, LIMITS, [False] * 3, [0] * 3, "max")
    assert history[0].tolist() == [0.0, 0.0] and scale[0] == 5.0


def test_the_largest_leaves_the_history_after_its_length() -> None:
    scale, history = torch.zeros(3), torch.zeros(3, 3)
    seen = []
    for amax in (8.0, 1.0, 2.0, 4.0, 1.0):
        kernels.delayed_update(
            scale, history, torch.full((1, 1), amax), None, None, LIMITS, [False] * 3, [0] * 3, "max"
        )
        seen.append(448.0 / scale[0].item())
    assert seen == [8.0, 8.0, 8.0, 4.0, 4.0]


@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-126, 3.4e38])
def test_edge_amax(amax: float) -> None:
    scale, history = torch.zeros(3), torch.zeros(3, 1)
    t = torch.full((1, 1), amax)
    kernels.delayed_update(scale, history, t, t, t, LIMITS, [False, True, False], [0, 0, 64], "max")
    expected = [scale_of(float(t), LIMITS[r], r == 1, 64 if r == 2 else 0) for r in range(3)]
    assert scale.tolist() == expected
