import pytest
import torch
from torch import nn

from octavo.optim import AdamW
from octavo.optim.stores import new_state, stores_of
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
    own = stores_of(weight, weight.detach(), state, optimizer.settings)
    assert (
        own.matrix.data_ptr() == weight.q.data_ptr() and own.master.rest.data_ptr() == state["master_rest"].data_ptr()
    )
    assert own.amax is state["master_amax"] and [m.data.data_ptr() for m in own.moments] == [
        state["exp_avg_codes"].data_ptr(),
        state["exp_avg_sq_codes"].data_ptr(),
    ]
