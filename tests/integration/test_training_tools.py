"""What people put around a training step: loss scaling, other threads, compiled optimizers.

Clipping, averages and accumulation are situations of tests/support/seams.
"""

import copy

import pytest
import torch
from torch import nn

import octavo
from tests.support.helpers import FP8_RECIPES, assert_equal, gradients, to_fp8

each_recipe = pytest.mark.parametrize("name", FP8_RECIPES)


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return to_fp8(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), FP8_RECIPES[name]()).to(dtype)


@each_recipe
def test_grad_scaler_skips_a_step_that_overflowed(name):
    net = make(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    stepped, scales = [], []
    for step in range(4):
        before = copy.deepcopy(net.state_dict())
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.randn(8, 32)).float().square().mean()
        if step == 1:
            loss = loss * torch.inf
        state = octavo.nn.delayed_state_dict(net)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stepped.append(not torch.equal(net[0].weight, before["0.weight"]))
        scales.append(scaler.get_scale())
        if step == 1:  # nothing finite: the gradient's scale stays
            assert all(
                torch.equal(octavo.nn.delayed_state_dict(net)[k][2], v[2]) for k, v in state.items() if "scale" in k
            )
    assert stepped == [True, False, True, True]
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


@each_recipe
def test_an_infinite_activation_gradient_reaches_the_scaler(name):
    """float16 gradients that overflow between two layers: the codes must carry it to every weight before."""
    net = make(name, torch.float16)
    y = net(torch.randn(8, 32, dtype=torch.float16))
    grad = torch.zeros_like(y)
    grad[0, 0] = torch.inf
    y.backward(grad)
    assert not any(p.grad.isfinite().all() for n, p in net.named_parameters() if n != "2.bias")


@each_recipe
def test_backward_in_another_thread(name):
    import threading

    net = make(name)
    other = copy.deepcopy(net)
    x = torch.randn(8, 32)
    thread = threading.Thread(target=lambda: net(x).sum().backward())
    thread.start()
    thread.join()
    other(x).sum().backward()
    assert_equal(gradients(net), gradients(other))


@each_recipe
def test_anomaly_detection(name):
    net = make(name)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        net(torch.randn(8, 32)).sum().backward()
