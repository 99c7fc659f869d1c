"""An optimizer's state saved, loaded, converted, and over several ranks."""

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import octavo
from octavo import recipes
from octavo.optim import SGD, Adam, AdamW, Muon
from octavo.optim.masters import FP8_MASTERS
from octavo.optim.moment import NAMED_MOMENTS
from octavo.weights.stored import StoredWeight, local_stored
from tests.support.helpers import stepped
from tests.support.trained import MOMENTS, moments_of, parameter, train

OPTIONS = {AdamW: {"foreach": False}, SGD: {"foreach": False, "momentum": 0.9}, Muon: {}}


@pytest.mark.parametrize("ours", OPTIONS, ids=lambda kind: kind.__name__)
def test_torchs_state_goes_on_and_goes_back(ours):
    options, torchs = OPTIONS[ours], getattr(torch.optim, ours.__name__)
    params = [parameter(3, 300), parameter(5, 1)]
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    exact, theirs = ours(params, lr=0.01, moments="fp32", **options), torchs(copies, lr=0.01, **options)
    for seed in range(3):
        for optimizer in (exact, theirs):
            train(optimizer, 2, seed)
        assert all(map(torch.equal, params, copies))
        saved = copy.deepcopy(exact.state_dict()), copy.deepcopy(theirs.state_dict())
        if seed == 0:
            with pytest.warns(UserWarning, match="converted: from torch's"):
                ours(params, moments="fp8", **options).load_state_dict(copy.deepcopy(saved[1]))
        exact, theirs = ours(params, moments="fp32", **options), torchs(copies, **options)
        with warnings.catch_warnings(action="error"):
            exact.load_state_dict(saved[1])
        theirs.load_state_dict(saved[0])
        assert theirs.param_groups[0]["lr"] == exact.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("first", MOMENTS)
@pytest.mark.parametrize("second", MOMENTS)
def test_other_moments_are_converted_and_masters_kept(first, second):
    p = parameter(3, 300, dtype=torch.bfloat16)
    before = AdamW([p], lr=0.01, moments=MOMENTS[first], master="split24")
    train(before, 3)
    after = AdamW([p], moments=MOMENTS[second], master="split24")
    if first == second:
        after.load_state_dict(before.state_dict())
    else:
        with pytest.warns(UserWarning, match=r"converted: from \(Moment.*, master split24 to \(Moment"):
            after.load_state_dict(before.state_dict())
    assert torch.equal(after.state[p]["master_rest"], before.state[p]["master_rest"])
    for a, b in zip(moments_of(after, p), moments_of(before, p), strict=True):
        assert float((a - b).norm() / b.norm()) < 0.06


WEIGHTS = [("fp8", master) for master in FP8_MASTERS] + [(None, master) for master in ("auto", "split24", None)]
CLASSES = {AdamW: WEIGHTS, Adam: WEIGHTS[:2], Muon: WEIGHTS, SGD: WEIGHTS[-3:]}


@pytest.mark.parametrize("moments", NAMED_MOMENTS)
@pytest.mark.parametrize(("kind", "weights"), [(kind, one) for kind, some in CLASSES.items() for one in some])
def test_what_is_saved_before_the_first_step_goes_on_bit_for_bit(kind, weights, moments):
    storage, master = weights

    def built(seed):
        torch.manual_seed(seed)
        layers = nn.Linear(32, 150, bias=False), nn.Linear(150, 3, bias=False)
        model = octavo.convert(nn.Sequential(*layers).bfloat16(), recipes.dynamic(), lambda *_: True, storage)
        return model, kind(model.parameters(), lr=0.01 + seed, moments=moments, master=master)

    def parts_after(model, optimizer, steps):
        for step in range(steps):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            stepped(optimizer, model(x).float().square().mean())
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    saved, other = built(0), built(1)
    torch.save(parts_after(*saved, 0), file := io.BytesIO())
    saved[1].load_state_dict(saved[1].state_dict())  # as accelerate's prepare does: training has still not begun
    assert not saved[1].state
    file.seek(0)
    for part, loaded in zip(other, torch.load(file, weights_only=True).values(), strict=True):
        part.load_state_dict(loaded)
    expected, actual = (torch.utils._pytree.tree_flatten(parts_after(*one, 2)) for one in (saved, other))
    assert expected[1] == actual[1]
    for a, b in zip(expected[0], actual[0], strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_a_state_that_does_not_fit_is_refused():
    p, optimizer = parameter(3, 300), AdamW([parameter(4, 300)])
    train(optimizer, 1)
    with pytest.raises(ValueError, match=r"shape \(4, 300\) does not fit a weight of \(3, 300\)"):
        AdamW([p]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, and the optimizer has groups of \[2\]"):
        AdamW([p, parameter(3)]).load_state_dict(optimizer.state_dict())
    momentum = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    train(momentum, 1)
    state = momentum.state_dict()
    state["state"][0]["step"] = torch.tensor(1.0)
    with pytest.raises(ValueError, match="neither exp_avg nor exp_avg_codes"):
        AdamW([p]).load_state_dict(state)
    ours = SGD([p], momentum=0.9)
    train(ours, 1)
    with pytest.raises(ValueError, match="this optimizer keeps exp_avg, exp_avg_sq"):
        AdamW([p]).load_state_dict(ours.state_dict())


def test_moments_of_unknown_blocks_are_refused():
    p, optimizer = parameter(3, 300), AdamW([parameter(3, 300)])
    train(optimizer, 1)
    state = optimizer.state_dict()
    state["param_groups"][0]["octavo"]["moments"]["exp_avg"]["granularity"] = "PerBlock(7, 7)"
    with pytest.raises(ValueError, match=r"the state's moments are in 'PerBlock\(7, 7\)', which none here is: Per"):
        AdamW([p]).load_state_dict(state)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("master", ["split32", "split24"])
def test_it_goes_through_torchs_state_dicts_of_names(master, moments, flat):
    net, other = (nn.Linear(300, 4, dtype=torch.bfloat16) for _ in range(2))
    options = {"lr": 0.01, "moments": MOMENTS[moments], "master": master}
    optimizer, loaded = AdamW(net.parameters(), seed=7, **options), AdamW(other.parameters(), **options)
    train(optimizer, 2)
    names = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=names))
    other.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other, loaded, saved, options=names)
    for o in (optimizer, loaded):
        train(o, 2, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 64, bias=False)


def stored(model: nn.Module) -> nn.Module:
    return octavo.convert(model, recipes.dynamic(), lambda *_: True, weight_storage="fp8")


def test_an_optimizer_made_before_the_weights_were_stored_bounds_its_updates():
    model = linear()
    optimizer = AdamW(model.parameters(), 0.1, moments="fp32")
    assert not optimizer.clip_update
    stored(model)
    optimizer.load_state_dict(optimizer.state_dict())
    stepped(optimizer, model(torch.ones(4, 64)).square().sum())
    assert optimizer.clip_update


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda params: torch.optim.AdamW(params), octavo.UnsupportedOpError, "Optimize it with octavo"),
        (lambda params: SGD(params, 0.1), ValueError, "use octavo.optim.AdamW"),
        (lambda params: AdamW(params, betas=(0.99, 0.9)), ValueError, "the largest update grows"),
        (lambda params: AdamW(params, clip_update=False), ValueError, "clip_update on"),
    ],
)
def test_an_optimizer_that_can_not_write_stored_weights_says_so_at_its_next_step(make, error, message):
    model = linear()
    optimizer = make(model.parameters())
    with pytest.raises(error, match=message):
        stepped(optimizer, stored(model)(torch.ones(4, 64)).square().sum())


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_betas_set_between_steps_are_checked_before_codes_are_written(kind):
    """A scale of an update without a bound grows until nearly all codes are 0."""
    model = stored(linear())
    optimizer = kind([{"params": [*model.parameters()], "algorithm": "adamw"}])
    stepped(optimizer, model(torch.ones(4, 64)).square().sum())
    before = local_stored(model.weight).qdata.clone().view(torch.uint8)
    optimizer.param_groups[0]["betas"] = 0.99, 0.5
    with pytest.raises(ValueError, match="the largest update grows"):
        stepped(optimizer, model(torch.ones(4, 64)).square().sum())
    assert torch.equal(local_stored(model.weight).qdata.view(torch.uint8), before)


@pytest.mark.parametrize("master", ["auto", "split16", "fp16_scaled"])
def test_a_state_is_of_the_storage_it_was_made_for(master):
    model = linear().bfloat16()
    optimizer = AdamW(model.parameters(), master=master)
    for change in (stored, octavo.restore):
        step_with_ones(model, optimizer)
        change(model)
        before = model.state_dict()["weight"].clone()
        with pytest.raises(RuntimeError, match="not stored as it was"):
            step_with_ones(model, optimizer)
        assert torch.equal(model.state_dict()["weight"].view(torch.uint8), before.view(torch.uint8))
        optimizer.state.clear()


def step_with_ones(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.weight.grad = torch.ones(64, 64).to(model.weight.dtype)
    optimizer.step()


@pytest.mark.parametrize(("first", "second"), [("bf16", "stored"), ("stored", "bf16")])
@pytest.mark.parametrize("master", ["fp16_scaled", "split16"])
def test_a_master_of_another_storage_is_not_taken_as_it_is(master, first, second):
    """A master of another storage is not taken, though names, shapes and dtypes are the same."""
    values = torch.randn(64, 128).bfloat16()
    of = {"bf16": lambda: nn.Parameter(values.clone()), "stored": lambda: nn.Parameter(StoredWeight.cast(values))}
    before, after = (AdamW([of[how]()], lr=1e-5, weight_decay=0.0, master=master) for how in (first, second))
    train(before, 3)
    with pytest.warns(UserWarning, match="masters that were .* begin anew"):
        after.load_state_dict(before.state_dict())
    train(after, 1)
    (weight,) = after.param_groups[0]["params"]
    end = weight.dequantize() if second == "stored" else weight
    assert float((end.detach() - values).norm() / values.norm()) < 0.04


def test_hooks_see_what_is_loaded_and_saved_and_may_replace_it():
    p = parameter(3)
    saved, loaded = AdamW([p], moments="fp32"), AdamW([p], moments="fp32")
    train(saved, 1)
    seen = []

    def before(optimizer, state):
        seen.append(len(state["state"]))
        return {**state, "state": {0: state["state"][0] | {"exp_avg": torch.full((3,), 7.0)}}}

    loaded.register_load_state_dict_pre_hook(before)
    loaded.register_load_state_dict_post_hook(lambda optimizer: seen.append(float(optimizer.state[p]["exp_avg"][0])))
    saved.register_state_dict_post_hook(lambda optimizer, state: seen.append("octavo" in state["param_groups"][0]))
    loaded.load_state_dict(saved.state_dict())
    assert seen == [True, 1, 7.0]


def test_a_state_that_does_not_fit_changes_nothing():
    p, q = parameter(4), parameter(6)
    saved, optimizer = AdamW([p, q], lr=0.5, seed=3), AdamW([p, parameter(5)])
    train(saved, 1)
    with pytest.raises(ValueError, match="does not fit"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-3 and optimizer.seed == 0
    state = saved.state_dict()
    del state["param_groups"][0]["octavo"]
    with pytest.raises(ValueError, match="groups no 'octavo', which says how"):
        AdamW([p, q]).load_state_dict(state)


@pytest.mark.parametrize(("ours", "torchs"), [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)])
def test_options_that_a_state_lacks_stay_the_optimizers(ours, torchs):
    """Options stay the optimizer's where a state lacks them: one of another library, or of an older torch."""
    p = parameter(4)
    saved = torchs([p], lr=0.5)
    train(saved, 1)
    for option, default in (ours([p]).defaults | {"maximize": True}).items():
        optimizer, state = ours([p], moments="fp32", **{option: default}), saved.state_dict()
        del state["param_groups"][0][option]
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0][option] == default
        train(optimizer, 1)


def test_a_state_whose_options_do_not_fit_changes_nothing():
    saved = AdamW([parameter(4)], betas=(0.9, 0.5))
    train(saved, 1)
    optimizer = AdamW([nn.Parameter(StoredWeight.cast(torch.ones(128, 128)))])
    with pytest.raises(ValueError, match="use a larger beta2"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state and optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_state_dict_that_raises_begins_no_state():
    stored, frozen = (nn.Parameter(StoredWeight.cast(torch.ones(128, 128))) for _ in range(2))
    optimizer = AdamW([stored, frozen])
    frozen.scale_inv.mul_(3)  # as one that was loaded while it was frozen
    with pytest.raises(ValueError, match="no powers of two"):
        optimizer.state_dict()
    assert not optimizer.state
