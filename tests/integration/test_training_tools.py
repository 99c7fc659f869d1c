"""What people put around a training step: loss scaling that overflows, anomaly detection.

Clipping, averages, accumulation, threads and a scaler's steps are situations of tests/support/seams.
"""

import copy

import pytest
import torch
from torch import nn

import octavo
from tests.support.helpers import FP8_RECIPES, to_fp8


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_grad_scaler_skips_a_step_that_overflowed(name):
    net = to_fp8(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), FP8_RECIPES[name]())
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
            after = octavo.nn.delayed_state_dict(net)
            assert all(torch.equal(after[key][2], value[2]) for key, value in state.items() if "scale" in key)
    assert stepped == [True, False, True, True]
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        net(torch.randn(8, 32)).sum().backward()
