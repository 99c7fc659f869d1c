import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.optim import SGD, AdamW
from octavo.optim.state import for_kernel, new_state
from octavo.tensor.stored_weight import StoredWeight


@pytest.mark.parametrize("moments", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [(5, 200), (7,), (2, 3, 4), ()])
def test_a_state_has_the_tensors_that_a_step_begins_with(moments, shape):
    weight = nn.Parameter(torch.randn(shape).bfloat16())
    optimizer = AdamW([weight], moments=moments, master="split24")
    mine = new_state(weight, optimizer.settings)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    begun = optimizer.state[weight]
    assert {name: (value.dtype, value.shape) for name, value in mine.items()} == {
        name: (value.dtype, value.shape) for name, value in begun.items()
    }


def test_stores_are_over_the_states_own_tensors():
    weight = nn.Parameter(StoredWeight.cast(torch.randn(130, 70).bfloat16()))
    optimizer = AdamW([weight], master="split16")
    state = new_state(weight, optimizer.settings)
    master, moments = for_kernel(weight, weight.detach(), state, optimizer.settings)
    assert master.weight.data_ptr() == weight.qdata.data_ptr() and master.amax is state["master_amax"]
    assert master.rest.data_ptr() == state["master_rest"].data_ptr()
    codes = [state["exp_avg_codes"].data_ptr(), state["exp_avg_sq_codes"].data_ptr()]
    assert [moment.data.data_ptr() for moment in moments] == codes


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[Tensor]:
    for step in range(steps):
        model(torch.full((4, 64), 0.1 * step + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.view(torch.uint8) for value in model.state_dict().values()]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 64, bias=False)


def stored(model: nn.Module) -> nn.Module:
    return octavo.convert(model, recipes.dynamic(), lambda *_: True, weight_storage="fp8")


def test_an_optimizer_made_before_the_weights_were_stored_trains_them_as_one_made_after():
    model = linear()
    optimizer = AdamW(model.parameters(), 0.1, moments="fp32")
    assert not optimizer.clip_update
    trained = stepped(stored(model), optimizer)
    assert optimizer.clip_update
    again = stored(linear())
    expected = stepped(again, AdamW(again.parameters(), 0.1, moments="fp32"))
    assert all(map(torch.equal, trained, expected))


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
        stepped(stored(model), optimizer)


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
