import math

import pytest
import torch

from octavo import recipes
from octavo.schedule import Phase, Recovery
from octavo.schedule.recovery import FINITE, SPIKE, Watch, said

PHASE = Phase(recipes.high_precision())
ONE = torch.tensor(1.0)


def watch(**options) -> Watch:
    return Watch(Recovery(PHASE, **{"window": 8} | options))


def look(own: Watch, loss: float, largest: float = 1.0, spikes: bool = True) -> bool:
    found = bool(own.look(torch.tensor(loss), torch.tensor(largest), spikes))
    own.count(is_scaled=False)
    return found


def test_a_spike_is_many_median_deviations_above_the_median():
    own = watch(spike=6.0)
    for loss in (2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0, 2.1):
        assert not look(own, loss, spikes=False)
    deviations = [0.0, 0.1, 0.1, 0.0, 0.05, 0.05, 0.0, 0.1]
    spread = 1.4826 * sorted(deviations)[3]  # torch's median is the lower one
    assert look(own, 2.0 + 6.1 * spread) and not look(own, 2.0 + 5.9 * spread)
    assert not look(own, 0.1)  # a loss that falls is none
    assert own.read() == SPIKE and own.read() == 0


def test_spikes_are_judged_from_half_a_window_on_and_faults_stay_out_of_it():
    own = watch()
    assert [look(own, loss) for loss in (1.0, 9.0, 1.0, 1.01)] == [False] * 4
    assert look(own, 1000.0) and look(own, 1000.0)
    assert int(own.seen) == 4 and own.losses.isnan().sum() == 4
    assert not look(own, 1000.0, spikes=False)


def test_the_window_moves():
    own = watch(spike=6.0)
    for loss in [10.0] * 8 + [1.0] * 8:
        look(own, loss)
    assert (own.losses == 1.0).all() and look(own, 10.0)


def test_a_constant_loss_has_no_spikes_in_its_last_digits():
    own = watch(spike=6.0)
    for _ in range(8):
        look(own, 2.0)
    assert not look(own, 2.01) and look(own, 2.02)


@pytest.mark.parametrize(("loss", "largest"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_what_is_not_finite_is_a_fault_at_once(loss, largest):
    own = watch(spike=None)
    assert look(own, loss, largest) and own.read() == FINITE
    assert not look(own, 1.0)


def test_its_state_is_all_that_it_knows():
    a, b = watch(), watch()
    for step in range(12):
        look(a, 2.0 + 0.1 * math.sin(step))
    look(a, math.nan)
    b.load(a.state())
    for step in range(12):
        loss = 2.0 + 0.05 * step
        assert look(a, loss) == look(b, loss)
    assert a.read() == b.read()
    with pytest.raises(ValueError, match="window=8, not 16"):
        watch(window=16).load(a.state())


def test_faults_in_words():
    assert said(FINITE | SPIKE) == "a gradient or the loss is not finite and the loss is a spike"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"phase": recipes.dynamic()}, TypeError, "no octavo.schedule.Phase"),
        ({"phase": Phase(recipes.dynamic(), from_step=3)}, ValueError, "begins by a fault, not by from_step"),
        ({"steps": 0}, ValueError, "steps=0"),
        ({"window": 7}, ValueError, "window=7 must be a whole number of at least 8"),
        ({"attempts": 0}, ValueError, "attempts=0"),
        ({"check_every": 1.5}, ValueError, "check_every=1.5"),
        ({"spike": -1.0}, ValueError, "spike=-1.0"),
    ],
)
def test_what_it_can_not_be(options, error, message):
    with pytest.raises(error, match=message):
        Recovery(**{"phase": PHASE} | options)


def test_attempts_without_end():
    assert Recovery(PHASE, attempts=None).attempts is None
