import pytest
import torch

from octavo import E4M3, E5M2, PerTensor
from octavo.optim import E4M4, SGD, Moment
from tests.optim.test_muon import matrices, steps


def params():
    return matrices(shapes=[(40, 200), (300,), (3, 5, 7), ()])


def test_each_group_has_its_own_momentum_and_may_change_it():
    """Momenta are torch's bit for bit: one that a group has alone, that begins later, that rests, that ends."""
    changes = {2: (0.0, 0.9, 0.5, 0.9), 4: (0.9, 0.9, 0.0, 0.0), 6: (0.9, 0.5, 0.9, 0.0)}
    weights_of_kinds = []
    for kind, options in ((SGD, {"moments": "fp32"}), (torch.optim.SGD, {"foreach": False})):
        weights = params()
        groups = [{"params": [p], "momentum": m} for p, m in zip(weights, (0.9, 0.0, 0.0, 0.9), strict=True)]
        del groups[3]["momentum"]
        optimizer = kind(groups, lr=0.1, momentum=0.9, dampening=0.5, **options)
        for step in range(8):
            for group, momentum in zip(optimizer.param_groups, changes.get(step, ()), strict=False):
                group["momentum"] = momentum
            steps(optimizer, weights, 1, step)
        weights_of_kinds.append(weights)
        saved = optimizer.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(*weights_of_kinds, strict=True))
    again = SGD([{"params": [p]} for p in params()], momentum=0.9, moments="fp32")
    again.load_state_dict(saved)  # torch's, of which the last group's buffer rests
    steps(again, [p for group in again.param_groups for p in group["params"]], 1)


MOMENTS = "fp8", "bf16", Moment(E5M2), Moment(E4M3, granularity=PerTensor()), Moment("bf16")


@pytest.mark.parametrize("moments", MOMENTS, ids=str)
def test_few_bytes_stay_near(moments):
    ours, torchs = params(), params()
    steps(SGD(ours, lr=0.1, momentum=0.9, moments=moments), ours, 10)
    steps(torch.optim.SGD(torchs, lr=0.1, momentum=0.9), torchs, 10)
    for a, b, c in zip(ours, torchs, params(), strict=True):
        assert (a - b).norm() < 0.15 * (b - c).norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"nesterov": True}, "nesterov=True needs"),
        ({"momentum": 0.9, "moments": "fp9"}, "moments='fp9'"),
        ({"momentum": 0.9, "moments": Moment(E4M4)}, "has no sign"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SGD(params(), **options)


def test_a_pair_of_moments_is_no_momentum():
    with pytest.raises(TypeError, match=r"octavo\.optim\.Moment"):
        SGD(params(), momentum=0.9, moments=(Moment("fp32"), Moment("fp32")))
