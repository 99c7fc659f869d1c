import math

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import octavo
from octavo import PerTensor, RecipeMap, recipes
from octavo.optim import Moment, conversion
from octavo.optim.state import data_of
from octavo.schedule import Phase
from octavo.schedule.phase import fp8_weights, phase_targets, switch
from octavo.weights.stored import StoredWeight
from tests.support.helpers import every_layer
from tests.support.schedule_situations import HIGH, LOW, loss_of, net, optimizer_of


def test_it_says_what_it_was_told():
    phase = Phase(HIGH, master=None, weight_storage=None, from_tokens=5)
    assert repr(phase) == "Phase(high_precision, master=None, weight_storage=None, from_tokens=5)"
    assert phase.trigger == "from_tokens" and Phase(HIGH).trigger is None
    assert repr(Phase(RecipeMap(HIGH))) == "Phase(map of high_precision)"
    a, b = (Phase(recipes.dynamic(), moments=(Moment("fp32"), Moment("bf16")), from_step=3) for _ in range(2))
    assert a == b and hash(a) == hash(b)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "no octavo.Recipe"),
        ((HIGH, "same", "same", "fp4"), ValueError, "weight_storage='fp4'"),
        ((HIGH, "same", "same", "same", 0), ValueError, "from_step=0 must be a whole number above 0"),
        ((HIGH, "same", "same", "same", 1.5), ValueError, "from_step=1.5"),
        ((HIGH, "same", "same", "same", True), ValueError, "from_step=True"),
        ((HIGH, "same", "same", "same", None, -3), ValueError, "from_tokens=-3"),
        ((HIGH, "same", "same", "same", None, None, 0.0), ValueError, "when_lr_below=0.0 must be a number above 0"),
        ((HIGH, "same", "same", "same", None, None, math.nan), ValueError, "when_lr_below=nan"),
        ((HIGH, "same", "same", "same", None, None, None, math.inf), ValueError, "when_update_below_resolution=inf"),
        ((HIGH, "same", "same", "same", 5, 6), ValueError, "from_step and from_tokens: a phase begins by one"),
    ],
)
def test_what_it_can_not_be(arguments, error, message):
    with pytest.raises(error, match=message):
        Phase(*arguments)


def begun(**options):
    model = net(**options)
    optimizer = optimizer_of(model, master="auto")
    loss_of(model, 0).backward()
    optimizer.step()
    return model, optimizer


def test_same_is_what_the_phase_before_had():
    model, optimizer = begun()
    phases = [Phase(LOW, master="split16", weight_storage="fp8"), Phase(LOW, moments="fp32", from_step=1)]
    phases.append(Phase(HIGH, weight_storage=None, from_step=2))
    first, second, third = phase_targets(model, optimizer, phases)
    assert [t.settings.master for t in (first, second, third)] == ["split16"] * 3
    assert first.settings.moments == optimizer.moments
    assert second.settings.moments == third.settings.moments == optimizer.moments_of("fp32")
    assert [t.storage for t in (first, second, third)] == [(PerTensor(), PerTensor())] * 2 + [(None, None)]
    assert phase_targets(model, optimizer, phases[1:2], after=first)[0] == second


def test_weights_become_codes_and_plain_again_wherever_they_are():
    model = net()
    tied = nn.ModuleList([model, octavo.nn.Linear(64, 160, bias=False, recipe=LOW, dtype=torch.bfloat16)])
    tied[1].weight = model[0].weight
    optimizer = optimizer_of(tied, master="auto")
    loss_of(model, 0).backward()
    optimizer.step()
    phases = [Phase(LOW, master="split16", weight_storage="fp8"), Phase(HIGH, weight_storage=None)]
    there, back = phase_targets(tied, optimizer, phases)
    for target in (there, back):
        switch(tied, optimizer, target)
        weight = model[0].weight
        assert tied[1].weight is weight and isinstance(weight, StoredWeight) == (target is there)
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert owned == {id(p) for p in tied.parameters()} == {id(p) for p in optimizer.state}
        loss_of(model, 1).backward()
        optimizer.step()
    assert model[0].recipe == HIGH


@pytest.mark.parametrize("storage", ["fp8", None])
def test_no_more_than_one_old_weight_is_there_beside_the_new_ones(storage, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).bfloat16()
    octavo.convert(model, LOW, select=lambda *_: True, weight_storage=None if storage else "fp8")
    optimizer = optimizer_of(model, master="auto")
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    model(x).square().sum().backward()
    optimizer.step()
    old = [StorageWeakRef(data_of(layer.weight).untyped_storage()) for layer in model]
    states = [
        StorageWeakRef(value.untyped_storage())
        for layer in model
        for name, value in optimizer.state[layer.weight].items()
        if name.startswith("master_")
    ]
    left = []

    def take_shard(*_):  # as soon as a weight is converted
        left.append(sum(not weight.expired() for weight in old))

    monkeypatch.setattr(conversion, "take_shard", take_shard)
    (target,) = phase_targets(model, optimizer, [Phase(LOW, weight_storage=storage)])
    switch(model, optimizer, target)
    assert left == [5, 4, 3, 2, 1, 0]
    assert all(weight.expired() for weight in old) and all(state.expired() for state in states)
    model(x).square().sum().backward()
    optimizer.step()


def test_frozen_weights_change_their_storage_too():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = octavo.optim.AdamW([p for p in model.parameters() if p.requires_grad], master="auto")
    (target,) = phase_targets(model, optimizer, [Phase(LOW, weight_storage="fp8")])
    switch(model, optimizer, target)
    assert isinstance(model[0].weight, StoredWeight) and not model[0].weight.requires_grad
    assert fp8_weights(model) == [model[0].weight, model[2].weight]


def test_delayed_state_begins_anew_after_a_spell_and_goes_on_from_the_last_amax_else():
    delayed, longer = recipes.delayed(history_length=4), recipes.delayed(history_length=8)
    model, optimizer = begun(recipe=delayed)
    scale, history = model[0].delayed_scale.clone(), model[0].delayed_amax_history.clone()
    assert (scale > 0).all()
    to_longer, away, back = phase_targets(model, optimizer, [Phase(longer), Phase(HIGH), Phase(delayed)])
    switch(model, optimizer, to_longer)
    assert torch.equal(model[0].delayed_scale, scale)
    assert torch.equal(model[0].delayed_amax_history[:, 0], history[:, 0])
    assert not model[0].delayed_amax_history[:, 1:].any()
    switch(model, optimizer, away)
    switch(model, optimizer, back)
    assert not model[0].delayed_scale.any() and not model[0].delayed_amax_history.any()


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([Phase(LOW), Phase(recipes.rowwise(), weight_storage="fp8")], "phase 1, .*rowwise.*can't be stored in FP8"),
        ([Phase(LOW, weight_storage="fp8"), Phase(recipes.rowwise())], "phase 1, .*can't read weights"),
        ([Phase(LOW, weight_storage="fp8"), Phase(recipes.blockwise())], "phase 1, .*stores them anew"),
        ([Phase(LOW, moments="fp4")], "phase 0, .*moments='fp4'"),
        ([Phase(LOW, master="fp4")], "phase 0, .*master='fp4'"),
        ([Phase(LOW, weight_storage="fp8", master="split32")], "phase 0, .*weights stored in FP8 take"),
    ],
)
def test_what_can_not_be_is_named_before_anything_changes(phases, message):
    model, optimizer = begun()
    with pytest.raises(ValueError, match=message):
        phase_targets(model, optimizer, phases)
    assert model[0].recipe == LOW


def test_an_optimizer_of_torchs_changes_recipes_only():
    model = net(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    (target,) = phase_targets(model, optimizer, [Phase(HIGH)])
    switch(model, optimizer, target)
    assert model[0].recipe == HIGH
    for phase in (Phase(LOW, moments="fp8"), Phase(LOW, master="fp32"), Phase(LOW, weight_storage="fp8")):
        with pytest.raises(ValueError, match=r"changes with an optimizer of octavo.optim only, not AdamW"):
            phase_targets(model, optimizer, [phase])
    with pytest.raises(ValueError, match=r"is measured by the optimizers of octavo.optim only"):
        phase_targets(model, optimizer, [Phase(LOW), Phase(HIGH, when_update_below_resolution=1.0)])


def test_a_model_without_octavo_modules():
    plain = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="convert"):
        phase_targets(plain, octavo.optim.AdamW(plain.parameters()), [Phase(LOW)])


def test_ddp_goes_on_where_the_only_buffers_were_delayed_state(lone_mesh):
    model = octavo.convert(nn.Sequential(nn.Linear(32, 32)), recipes.delayed(), select=every_layer)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for target in phase_targets(model, optimizer, [Phase(recipes.dynamic()), Phase(recipes.delayed(), from_step=1)]):
        parallel(torch.randn(4, 32)).sum().backward()
        switch(model, optimizer, target)
    parallel(torch.randn(4, 32)).sum().backward()
