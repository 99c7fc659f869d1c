import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from octavo.tensor.parameters import put_into
from octavo.tensor.stored_weight import StoredWeight


def test_the_parameter_its_hooks_its_gradient_and_its_attributes_stay_there_and_back():
    weight = nn.Parameter(torch.randn(128, 128))
    known, calls = weakref.ref(weight), []
    weight.owner = "layer 1"
    first = weight.register_hook(lambda gradient: calls.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(param is weight))
    weight.grad = torch.ones(128, 128)
    for tensor, kind in ((StoredWeight.cast(weight), StoredWeight), (torch.eye(128), nn.Parameter)):
        put_into(weight, tensor)
        assert type(weight) is kind and isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
        assert known() is weight and weight.owner == "layer 1" and float(weight.grad.sum()) == 128 * 128
        (weight.dequantize() if kind is StoredWeight else weight).sum().backward()
        assert calls == ["gradient", True] and float(weight.grad.sum()) == 2 * 128 * 128
        calls.clear()
        weight.grad = torch.ones(128, 128)
        copied = copy.deepcopy(weight)
        assert type(copied) is kind
    first.remove()
    (weight * 2).sum().backward()
    assert calls == [True] and vars(weight) == {"owner": "layer 1"}


def test_nothing_keeps_the_old_values():
    weight = nn.Parameter(torch.randn(64, 64))
    old = torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage())
    put_into(weight, StoredWeight.cast(weight))
    gc.collect()
    assert old.expired()


def test_a_backward_pass_of_the_old_values_is_refused():
    weight = nn.Parameter(torch.randn(64, 64))
    loss = (weight * 2).sum()
    put_into(weight, StoredWeight.cast(weight))
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


def test_a_sum_of_gradients_in_another_dtype_goes_on():
    weight = nn.Parameter(torch.randn(64, 64).bfloat16(), requires_grad=True)
    weight.grad_dtype = torch.float32
    weight.grad = torch.ones(64, 64)
    put_into(weight, StoredWeight.cast(weight))
    assert weight.grad_dtype == weight.grad.dtype == torch.float32


def test_a_frozen_parameter_stays_frozen():
    weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    put_into(weight, StoredWeight.cast(weight))
    assert not weight.requires_grad and weight.grad is None
