import copy
import gc
import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch

import octavo
from octavo import Recipe, RecipeMap, recipes
from octavo.optim.resolution import ratio_of
from octavo.schedule import Phase, PrecisionSchedule, Recovery
from octavo.schedule.schedule import NOT_FINITE, SPIKE, LossWatch
from octavo.weights.stored import StoredWeight
from tests.support.schedule_situations import HIGH, LOW, loss_of, net, optimizer_of, same, tensors, train

DELAYED = recipes.delayed(history_length=4)
UP = Phase(HIGH, moments="fp32", master="split32", weight_storage=None, from_step=4)
LOWEST = Phase(LOW, moments="fp8", master="split16", weight_storage="fp8")


def started(*phases, recovery=None, **options):
    model = net()
    optimizer = optimizer_of(model, **{"master": "auto"} | options)
    return model, optimizer, PrecisionSchedule(model, optimizer, phases, recovery)


def test_the_first_phase_begins_at_once_and_others_after_so_many_steps(caplog):
    model, optimizer, schedule = started(LOWEST, UP, Phase(DELAYED, from_step=6))
    assert isinstance(model[0].weight, StoredWeight) and schedule.phase is LOWEST
    names = []
    with caplog.at_level(logging.INFO, "octavo"):
        for step in range(8):
            train(model, optimizer, schedule, range(step, step + 1))
            names.append(model[0].recipe.name)
    assert "step 4: Phase(high_precision" in caplog.text and "since step 4" in caplog.text
    assert names == ["dynamic"] * 3 + ["high_precision"] * 2 + ["delayed"] * 3
    switches = [(0, 0, "dynamic"), (4, 1, "high_precision"), (6, 2, "delayed")]
    assert [(s.step, s.phase, s.name) for s in schedule.switches] == switches
    assert schedule.switches[1].reason == "step 4" and schedule.steps == 8 and schedule.index == 2
    assert optimizer.master == "split32" and type(model[0].weight) is torch.nn.Parameter


def test_phases_that_are_due_together_begin_one_after_the_other():
    model, optimizer, schedule = started(Phase(LOW), Phase(HIGH, from_tokens=64), Phase(DELAYED, from_step=2))
    train(model, optimizer, schedule, range(2))
    assert [s.name for s in schedule.switches] == ["dynamic", "high_precision", "delayed"]
    assert schedule.tokens == 64 and schedule.switches[1].reason == "64 tokens"


def test_the_learning_rate_counts_once_it_falls():
    model, optimizer, schedule = started(Phase(LOW), Phase(HIGH, when_lr_below=0.05))
    rates = [0.01, 0.04, 0.1, 0.08, 0.06, 0.04, 0.02]
    indices = []
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        train(model, optimizer, schedule, range(step, step + 1))
        indices.append(schedule.index)
    assert indices == [0, 0, 0, 0, 0, 1, 1]
    assert schedule.switches[-1].reason == "the learning rate fell to 0.04"


def test_the_resolution_is_the_updates_root_mean_square_over_the_grids_noise():
    model, optimizer, schedule = started(Phase(LOW), Phase(HIGH, when_update_below_resolution=1e-9), master="split32")
    train(model, optimizer, schedule, range(1))
    weights = [model[0].weight, model[2].weight]
    before = [w.detach().float().clone() for w in weights]
    optimizer.resolution.take()
    loss_of(model, 1).backward()
    optimizer.step()
    moved = sum(float((w.detach().float() - b).square().sum()) for w, b in zip(weights, before, strict=True))
    noise = sum(float((torch.exp2(torch.frexp(b)[1].float() - 4)).square().sum()) / 12 for b in before)
    ratio = ratio_of(*optimizer.resolution.take().wait())
    assert ratio == pytest.approx(math.sqrt(moved / noise), rel=0.05)  # weights are read in bf16 here


def test_a_resumed_schedule_reads_the_resolution_where_the_other_did():
    """A resumed schedule reads the resolution every tenth step, and no more once nothing waits for it."""
    phases = [LOWEST, Phase(HIGH, when_update_below_resolution=0.02)]

    def rated(model, optimizer, schedule, steps):
        for step in steps:
            optimizer.param_groups[0]["lr"] = 1e-2 * 0.6**step
            train(model, optimizer, schedule, range(step, step + 1))

    model, optimizer, schedule = started(*phases)
    assert optimizer.resolution is not None
    rated(model, optimizer, schedule, range(13))
    saved = copy.deepcopy((schedule.state_dict(), model.state_dict(), optimizer.state_dict()))
    rated(model, optimizer, schedule, range(13, 32))
    assert schedule.switches[-1].step == 30 and "of the weights' resolution" in schedule.switches[-1].reason
    assert optimizer.resolution is None
    again, other, resumed = started(*phases)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    other.load_state_dict(saved[2])
    rated(again, other, resumed, range(13, 32))
    assert schedule.index == 1 and resumed.switches == schedule.switches
    assert same(tensors(model, optimizer), tensors(again, other))


def faulty(model, schedule, optimizer, step: int, spoil) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    loss = spoil(model, loss)
    schedule.observe(loss)
    optimizer.step()
    schedule.step()


def spoil_gradient(model, loss):
    model[0].weight.grad[0, 0] = math.nan
    return loss


SPOILS = {"gradient": spoil_gradient, "loss": lambda _, loss: loss * math.nan, "spike": lambda _, loss: loss + 1000.0}


@pytest.mark.parametrize("kind", SPOILS)
def test_a_faulty_step_touches_nothing_and_begins_a_recovery_that_ends(kind):
    policy = Recovery(Phase(HIGH), steps=3, window=8, spike=6.0)
    model, optimizer, schedule = started(LOWEST, recovery=policy)
    train(model, optimizer, schedule, range(8))
    before = tensors(model, optimizer)
    faulty(model, schedule, optimizer, 8, SPOILS[kind])
    assert same(before, tensors(model, optimizer))
    assert schedule.phase is policy.phase and model[0].recipe == HIGH
    train(model, optimizer, schedule, range(9, 12))
    assert not same(before, tensors(model, optimizer))
    assert model[0].recipe == LOW and schedule.phase is LOWEST
    first, rescue, back = schedule.switches
    assert (rescue.step, rescue.phase, back.step) == (9, -1, 12) and first.step == 0
    assert rescue.reason == ("the loss is a spike" if kind == "spike" else "a gradient or the loss is not finite")
    assert back.reason == "3 steps of recovery are done"


def test_after_so_many_recoveries_it_stays():
    model, optimizer, schedule = started(Phase(LOW), recovery=Recovery(Phase(HIGH), steps=1, attempts=2, spike=None))
    for step in range(12):
        spoil = spoil_gradient if model[0].recipe == LOW else lambda model, loss: loss
        faulty(model, schedule, optimizer, step, spoil)
    assert [s.phase for s in schedule.switches] == [0, -1, 0, -1, 0, -1]
    assert schedule.switches[-1].reason.endswith("after 2 recoveries") and model[0].recipe == HIGH


def test_a_phase_that_is_due_during_a_recovery_follows_it():
    policy = Recovery(Phase(HIGH), steps=4, spike=None)
    model, optimizer, schedule = started(Phase(LOW), Phase(DELAYED, from_step=3), recovery=policy)
    train(model, optimizer, schedule, range(1))
    faulty(model, schedule, optimizer, 1, spoil_gradient)
    train(model, optimizer, schedule, range(2, 6))
    assert [s.name for s in schedule.switches] == ["dynamic", "high_precision", "delayed"]


def test_the_host_may_read_late_and_faulty_steps_still_do_nothing():
    policy = Recovery(Phase(HIGH), steps=3, check_every=4, spike=None)
    model, optimizer, schedule = started(Phase(LOW), recovery=policy)
    train(model, optimizer, schedule, range(4))
    before = tensors(model, optimizer)
    for step in range(4, 7):
        faulty(model, schedule, optimizer, step, spoil_gradient)
        assert same(before, tensors(model, optimizer)) and model[0].recipe == LOW
    train(model, optimizer, schedule, range(7, 8))
    assert model[0].recipe == HIGH and schedule.switches[-1].step == 8


PROMOTED = Phase(DELAYED, moments="fp32", master="split32", weight_storage=None, from_step=4)
THREE = [LOWEST, UP, Phase(DELAYED, moments="fp8", master="split16", weight_storage="fp8", from_step=6)]
RESUMED = {  # phases, the rescue of a fault in the third step, and the step that is resumed at
    **{f"step {at}": (THREE, None, at) for at in (4, 7)},
    "in a recovery": ([Phase(LOW)], Phase(HIGH, moments="fp32"), 5),
    "in a recovery, and the next phase is due": ([LOWEST, PROMOTED], Phase(HIGH), 5),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_training_resumes_bit_for_bit(case):
    phases, rescue, at = RESUMED[case]
    recovery = None if rescue is None else Recovery(rescue, steps=4, spike=None)
    model, optimizer, schedule = started(*phases, recovery=recovery)
    train(model, optimizer, schedule, range(2))
    if recovery is not None:
        faulty(model, schedule, optimizer, 2, spoil_gradient)
    train(model, optimizer, schedule, range(2 if recovery is None else 3, at))
    recipe, kind, index = model[0].recipe, type(model[0].weight), schedule.index
    saved = copy.deepcopy((schedule.state_dict(), model.state_dict(), optimizer.state_dict()))
    delayed = octavo.nn.delayed_state_dict(model)
    train(model, optimizer, schedule, range(at, 9))
    again, other, resumed = started(*phases, recovery=recovery)
    resumed.load_state_dict(saved[0])
    assert (again[0].recipe, type(again[0].weight), resumed.index) == (recipe, kind, index)
    again.load_state_dict(saved[1])
    other.load_state_dict(saved[2])
    octavo.nn.load_delayed_state_dict(again, delayed)
    train(again, other, resumed, range(at, 9))
    assert same(tensors(model, optimizer), tensors(again, other))
    assert resumed.switches == schedule.switches
    assert recovery is not None or resumed.state_dict() == schedule.state_dict()


@pytest.mark.parametrize("make", [octavo.optim.AdamW, torch.optim.AdamW], ids=["octavo", "torch"])
def test_gradients_that_overflow_under_a_scaler_are_no_faults_but_losses_are(make):
    model = net(dtype=torch.float32)
    optimizer = make(model.parameters(), 1e-3)
    schedule = PrecisionSchedule(model, optimizer, [Phase(LOW)], Recovery(Phase(HIGH), steps=2, spike=None))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4)
    scales, left_out = [], 0
    for step in range(12):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        loss = loss_of(model, step) * 100
        scaler.scale(loss).backward()
        schedule.observe(loss * math.nan if step == 11 else loss)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        scales.append(scaler.get_scale())
        left_out += torch.equal(before, model[0].weight)
    assert [s.phase for s in schedule.switches] == [0, -1] and schedule.switches[-1].step == 12
    fell = sum(later < earlier for earlier, later in itertools.pairwise([2.0**126, *scales]))
    assert fell >= 2 and left_out == fell + 1


def test_weights_that_ddp_holds_are_refused_before_they_would_move(lone_mesh):
    late = Phase(LOW, weight_storage="fp8", master="split16", from_step=9)
    model = net()
    parallel = [torch.nn.parallel.DistributedDataParallel(model)]
    optimizer = optimizer_of(model)
    with pytest.raises(RuntimeError, match="under it; use fully_shard"):
        PrecisionSchedule(model, optimizer, [Phase(LOW), late])
    PrecisionSchedule(model, optimizer, [Phase(LOW), Phase(HIGH, from_step=9)])
    model, optimizer, schedule = started(Phase(LOW), late)
    parallel.append(torch.nn.parallel.DistributedDataParallel(model))
    with pytest.raises(RuntimeError, match="under it; use fully_shard"):  # wrapped since: at once, not at step 9
        schedule.step()


def test_the_callers_list_of_parameters_stays_right():
    model, optimizer, schedule = started(LOWEST, UP)
    params, calls = list(model.parameters()), []
    params[0].register_post_accumulate_grad_hook(lambda param: calls.append(type(param)))
    train(model, optimizer, schedule, range(5))
    assert all(mine is its for mine, its in zip(params, model.parameters(), strict=True))
    assert calls == [StoredWeight] * 4 + [torch.nn.Parameter]


def test_tokens_have_to_be_counted():
    _, _, schedule = started(Phase(LOW), Phase(HIGH, from_tokens=64))
    with pytest.raises(RuntimeError, match=r"schedule.step\(tokens\) counts"):
        schedule.step()


@pytest.mark.parametrize("tokens", [-5, math.nan, math.inf])
def test_tokens_that_are_no_number_are_not_counted(tokens):
    _, _, schedule = started(Phase(LOW), Phase(HIGH, from_tokens=64))
    with pytest.raises(ValueError, match=r"tokens=.* must be a number of at least 0"):
        schedule.step(tokens)
    assert (schedule.steps, schedule.tokens) == (0, 0)


def test_a_state_of_another_window_changes_nothing():
    phases = [LOWEST, UP]
    model, optimizer, schedule = started(*phases, recovery=Recovery(Phase(HIGH), window=8))
    train(model, optimizer, schedule, range(5))
    _, _, other = started(*phases, recovery=Recovery(Phase(HIGH), window=16))
    before = copy.deepcopy((other.state_dict(), tensors(other.model, other.optimizer)))
    with pytest.raises(ValueError, match="window=8, not 16"):
        other.load_state_dict(schedule.state_dict())
    after = other.state_dict(), tensors(other.model, other.optimizer)
    assert other.switches[0].name == "dynamic" and other.index == 0 and other.phase is LOWEST
    assert after[0]["switches"] == before[0]["switches"] and same(after[1], before[1])


def test_hooks_go_with_the_schedule():
    model = net()
    optimizer = optimizer_of(model)
    for _ in range(3):
        schedule = PrecisionSchedule(model, optimizer, [Phase(LOW)], Recovery(Phase(HIGH)))
    gc.collect()
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    del schedule
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks


def test_what_is_out_of_order():
    model, optimizer, schedule = started(Phase(LOW), recovery=Recovery(Phase(HIGH)))
    with pytest.raises(RuntimeError, match="there are no gradients"):
        schedule.observe(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match=r"observe\(loss\) belongs before each"):
        schedule.step()
    plain = PrecisionSchedule(model, optimizer, [Phase(LOW)])
    with pytest.raises(RuntimeError, match="no recovery"):
        plain.observe(torch.tensor(1.0))
    octavo.optim.update_in_backward(optimizer)
    with pytest.raises(ValueError, match="update_in_backward"):
        PrecisionSchedule(model, optimizer, [Phase(LOW)], Recovery(Phase(HIGH)))
    with pytest.raises(ValueError, match="update_in_backward"):
        schedule.observe(torch.tensor(1.0))
    with pytest.raises(ValueError, match="recovery and the schedule has none"):
        plain.load_state_dict(schedule.state_dict() | {"phases": plain.state_dict()["phases"]})
    with pytest.raises(ValueError, match="is of the phases"):
        PrecisionSchedule(model, optimizer, [Phase(HIGH)]).load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("recipe", "other"),
    [
        (DELAYED, recipes.delayed(history_length=64)),
        (RecipeMap(DELAYED, {"0": None}), RecipeMap(DELAYED, {"2": None})),
    ],
)
def test_a_state_of_recipes_with_the_same_names(recipe, other):
    saved, (model, _, schedule) = started(Phase(recipe))[2].state_dict(), started(Phase(other))
    with pytest.raises(ValueError, match=r"the state's recipe in Phase.*delayed.* is .*, not .*"):
        schedule.load_state_dict(saved)
    renamed = replace(DELAYED, name="another name")
    one_name, other_name = (started(Phase(RecipeMap(HIGH, {"0": rule})))[2] for rule in (DELAYED, renamed))
    one_name.load_state_dict(other_name.state_dict())
    del saved["recipes"]  # as in checkpoints from before they were saved
    schedule.load_state_dict(saved)
    assert model[0].recipe == other if isinstance(other, Recipe) else model[2].recipe == HIGH


def test_a_state_of_something_else():
    with pytest.raises(ValueError, match=r"no state that PrecisionSchedule\.state_dict returned: it has no 'high"):
        started(Phase(LOW))[2].load_state_dict({})


@pytest.mark.parametrize(
    ("phases", "error", "message"),
    [
        ([], TypeError, "a list of octavo.schedule.Phase"),
        ([LOW], TypeError, "a list of octavo.schedule.Phase"),
        ([Phase(LOW, from_step=3)], ValueError, "the first begins at once, so it takes no from_step"),
        ([Phase(LOW), Phase(HIGH)], ValueError, "phase 1, .*needs from_step"),
        ([Phase(LOW), Phase(HIGH, from_step=5), Phase(LOW, from_step=5)], ValueError, "from_step is 5, 5"),
    ],
)
def test_phases_that_make_no_schedule(phases, error, message):
    with pytest.raises(error, match=message):
        started(*phases)


def watch(**options) -> LossWatch:
    return LossWatch(Recovery(Phase(HIGH), **{"window": 8} | options))


def look(watched: LossWatch, loss: float, largest: float = 1.0, spikes: bool = True) -> bool:
    has_spiked = bool(watched.look(torch.tensor(loss), torch.tensor(largest), spikes))
    watched.count(is_scaled=False)
    return has_spiked


def test_a_spike_is_many_median_deviations_above_the_median():
    watched = watch(spike=6.0)
    for loss in (2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0, 2.1):
        assert not look(watched, loss, spikes=False)
    deviations = [0.0, 0.1, 0.1, 0.0, 0.05, 0.05, 0.0, 0.1]
    spread = 1.4826 * sorted(deviations)[3]  # torch's median is the lower one
    assert look(watched, 2.0 + 6.1 * spread) and not look(watched, 2.0 + 5.9 * spread)
    assert not look(watched, 0.1)  # a loss that falls is none
    assert watched.read() == SPIKE and watched.read() == 0
    for loss in [10.0] * 8 + [2.0] * 8:  # the window moves
        look(watched, loss)
    assert (watched.losses == 2.0).all() and look(watched, 10.0)
    assert not look(watched, 2.01) and look(watched, 2.02)  # the last digits of a constant loss are no spike


def test_spikes_are_judged_from_half_a_window_on_and_faults_stay_out_of_it():
    watched = watch()
    assert [look(watched, loss) for loss in (1.0, 9.0, 1.0, 1.01)] == [False] * 4
    assert look(watched, 1000.0) and look(watched, 1000.0)
    assert int(watched.seen) == 4 and watched.losses.isnan().sum() == 4
    assert not look(watched, 1000.0, spikes=False)


@pytest.mark.parametrize(("loss", "largest"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_what_is_not_finite_is_a_fault_at_once(loss, largest):
    watched = watch(spike=None)
    assert look(watched, loss, largest) and watched.read() == NOT_FINITE
    assert not look(watched, 1.0)


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
        Recovery(**{"phase": Phase(HIGH)} | options)
