"""A training that a bad recipe breaks: rescued by a Recovery, lost without.

Gradients in E4M3 with a margin of 8, and delayed scaling by the largest of 512 amaxes: one outlier in one layer's input
at step 100 leaves all that the layer reads in the steps after it below E4M3's smallest number.
"""

import statistics

import pytest
from torch import Tensor, nn

from octavo import E4M3, Cast, Delayed, PerTensor, Recipe, recipes
from octavo.schedule import Phase, PrecisionSchedule, Recovery
from tests.support.schedule_situations import loss_of, net, optimizer_of

RULE = Delayed(history_length=512)
CAST, GRADIENT = Cast(E4M3, PerTensor(), RULE), Cast(E4M3, PerTensor(), RULE, margin=8)
BAD = Recipe((CAST, CAST), (GRADIENT, CAST), (GRADIENT, CAST), name="bad")
OUTLIER_AT, STEPS = 100, 200


def trained(recovery: Recovery | None, outlier: bool, seed: int) -> tuple[float, PrecisionSchedule]:
    """The mean loss of the last 20 steps."""
    model = net(recipe=BAD, seed=seed)
    optimizer = optimizer_of(model)
    schedule = PrecisionSchedule(model, optimizer, [Phase(BAD)], recovery)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        hook = model[2].register_forward_pre_hook(with_outlier) if outlier and step == OUTLIER_AT else None
        loss = loss_of(model, step)
        loss.backward()
        if hook is not None:
            hook.remove()
        if recovery is not None:
            schedule.observe(loss)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return statistics.mean(losses[-20:]), schedule


def with_outlier(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = inputs[0].clone()
    x[0, 0] = 1e6
    return (x,)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_an_outlier_is_survived_with_a_recovery_and_not_without(seed: int) -> None:
    """A training without faults is left alone."""
    policy = Recovery(Phase(recipes.high_precision()), steps=60)
    (clean, _), (lost, _) = trained(None, False, seed), trained(None, True, seed)
    watched, untouched = trained(policy, False, seed)
    rescued, schedule = trained(policy, True, seed)
    assert watched == clean and len(untouched.switches) == 1
    assert lost > 1.5 * clean  # 2.1 to 2.3 over five seeds
    assert rescued < 1.25 * clean  # 1.00 to 1.18 over the same
    first, rescue, back = schedule.switches
    assert OUTLIER_AT < rescue.step <= OUTLIER_AT + 5 and rescue.reason == "the loss is a spike"
    assert back.name == "bad" and back.step == rescue.step + 60 and first.step == 0
