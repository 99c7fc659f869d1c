import copy
import pickle

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import recipes
from tests.support.helpers import to_fp8


def test_copies_find_their_scales_in_a_group_of_their_own():
    model = to_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), recipes.dynamic())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        groups = {id(m.gather.group) for m in copied}
        assert len(groups) == 1 and groups != {id(model[0].gather.group)}


def two_in_flight(mesh):
    """The error of an input's gradient, of a forward whose weight was cast by another scale since."""
    torch.manual_seed(0)
    layer = octavo.convert(nn.Sequential(nn.Linear(256, 64)), recipes.delayed(), select=lambda module, name: True)
    fully_shard(layer, mesh=mesh)
    layer(torch.randn(8, 256)).sum().backward()
    layer.zero_grad()
    layer[0].delayed_scale[1] /= 4  # codes are smaller than the weight's own amax would make them
    x = torch.randn(8, 256, requires_grad=True)
    first = layer(x)
    layer[0].reset_delayed_state()
    layer(x)
    (grad,) = torch.autograd.grad(first.sum(), x)
    wanted = torch.ones(8, 64) @ layer[0].weight.full_tensor()
    return float((grad - wanted).norm() / wanted.norm())


def test_backward_reads_a_scale_with_its_codes(pool):
    assert max(pool.run(two_in_flight, (2,))) < 0.1
