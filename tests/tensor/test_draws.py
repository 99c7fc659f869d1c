import copy
import math

import pytest
import torch
from torch import nn

from octavo import UnsupportedOpError
from octavo.tensor.stored_weight import StoredWeight
from tests.tensor.test_stored_weight import K, N, each_granularity, parameter, same


def truncated_by_erfinv(x, std, bound=2.0):
    """torch.nn.init.trunc_normal_ before torch 2.13, and timm's."""
    reach = math.erf(bound / std / math.sqrt(2))
    with torch.no_grad():
        x.uniform_(-reach, reach).erfinv_().mul_(std * math.sqrt(2)).add_(0.0).clamp_(min=-bound, max=bound)


@each_granularity
def test_truncated_normals_are_the_plain_weights_then_cast(granularity):
    for init in (nn.init.trunc_normal_, truncated_by_erfinv):
        weight, plain = parameter(granularity=granularity), torch.empty(N, K, dtype=torch.bfloat16)
        for tensor in (weight, plain):
            torch.manual_seed(0)
            init(tensor, std=0.02)
        assert same(weight, StoredWeight.cast(plain, granularity))
        with torch.no_grad(), pytest.raises(UnsupportedOpError, match="mul_"):
            weight.mul_(2)  # which belongs to no draw


def test_what_follows_another_write_is_no_draw():
    weight = parameter()
    with torch.no_grad():
        for write in (weight.normal_, lambda: weight.uniform_().zero_(), lambda: weight.moved(torch.clone)):
            with pytest.raises(UnsupportedOpError, match="erfinv_"):
                write().erfinv_()
        with pytest.raises(UnsupportedOpError, match="mul_"):
            weight.uniform_().mul_(2)
        weight.uniform_()
        with pytest.raises(UnsupportedOpError, match="erfinv_"):
            copy.deepcopy(weight).erfinv_()
