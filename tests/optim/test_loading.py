"""What of a loaded state is taken, converted or refused."""

import pytest
import torch
from torch import nn

from octavo.optim import SGD, AdamW
from octavo.tensor.stored_weight import StoredWeight
from tests.support.trained import parameter, train


@pytest.mark.parametrize(("first", "second"), [("bf16", "stored"), ("stored", "bf16")])
@pytest.mark.parametrize("master", ["fp16_scaled", "split16"])
def test_a_master_of_another_storage_is_not_taken_as_it_is(master, first, second):
    """Names, shapes and dtypes are the same: what is kept is not."""
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
    """Of another library, or of a torch that had none yet."""
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


def test_the_state_of_another_rule_is_refused():
    p = parameter(3, 300)
    momentum, adam = SGD([p], momentum=0.9), AdamW([p])
    train(momentum, 1)
    train(adam, 1)
    with pytest.raises(ValueError, match="this optimizer keeps exp_avg, exp_avg_sq"):
        AdamW([p]).load_state_dict(momentum.state_dict())


def test_a_master_that_weights_no_longer_have_begins_anew():
    p = parameter(2, 200, dtype=torch.bfloat16)
    before = AdamW([p])
    train(before, 1)
    saved = before.state_dict()
    saved["state"][0]["master_kind"] = torch.tensor(3, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="masters that were fp16_scaled begin anew as the weights are: split32"):
        AdamW([p]).load_state_dict(saved)
