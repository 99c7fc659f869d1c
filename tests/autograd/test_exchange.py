"""The casts by which rows are sent, and the rows that come; tests/distributed/test_experts.py has them sent."""

import pytest
import torch

import octavo
from octavo import recipes
from octavo.autograd.exchange import Exchange, RowsToSend, dispatch
from octavo.distributed import expert_parallel
from tests.support.expert_models import batch, built
from tests.support.helpers import FP8_RECIPES, gradients, padded_as_on_gpu


def test_ranks_have_as_many_experts_each() -> None:
    exchange = Exchange("", size=2, rank=0)
    with pytest.raises(ValueError, match="3 experts can't be shared by 2 ranks"):
        dispatch(torch.ones(3, 4), torch.tensor([1, 2, 3]), exchange, RowsToSend(None, 0, reader=None))


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_layouts_that_a_gpu_wants(lone_mesh, name, monkeypatch):
    """Codes written transposed, contractions padded to 16: as without expert parallelism."""
    for module in ("autograd.casts", "autograd.grouped", "tensor.pair"):
        monkeypatch.setattr(f"octavo.{module}.needs_transposed_codes", lambda device: True)
    for module in ("autograd.casts", "autograd.products", "tensor.pair"):
        monkeypatch.setattr(f"octavo.{module}.contraction_multiple", padded_as_on_gpu)
    power_of_two = {"recipe": recipes.rowwise(power_of_two=True)} if name == "rowwise" else {}
    tensors_of_nets = []
    for parallel in (False, True):
        net = built("octavo", name, 4)
        for recipe in power_of_two.values():
            octavo.set_recipe(net, recipe)
        if parallel:
            expert_parallel(net, lone_mesh)
        y = net(batch(0, 0))
        y.sum().backward()
        of = gradients(net.experts)
        tensors_of_nets.append([y, *(of[key].full_tensor() if parallel else of[key] for key in sorted(of))])
    assert len(tensors_of_nets[0]) == 3
    for one, other in zip(*tensors_of_nets, strict=True):
        assert torch.equal(one, other)
