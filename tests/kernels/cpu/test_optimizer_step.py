"""Adam's step in C++ against the reference: every way to keep a weight, any values, the same bits."""

import random
from typing import Any

import pytest
import torch

from octavo.formats import E4M3, E4M4, E5M2
from octavo.kernels.cpu import library as libraries
from octavo.kernels.cpu.library import library
from octavo.kernels.cpu.optimizer_step import step_in_place
from octavo.kernels.layouts import blocks_of
from octavo.kernels.reference.optimizer_state import Fp8Weight, Master, MasterWeight, MomentTensors
from octavo.kernels.reference.optimizer_step import AdamGroup, BitNumbers, WeightUpdate, optimizer_step
from tests.support.optimizer_both import differences, moved

CPU = torch.device("cpu")
FAULTS = [float("nan"), float("inf"), -float("inf"), 1e30, 1e-40, -0.0]
MASTERS = "weight split32 split24 stochastic fp8_split16 fp8_split24 fp8_fp16 fp8_fp32 fp8_stochastic".split()


def master(draw: random.Random, values: torch.Tensor) -> Master:
    kind, shape = draw.choice(MASTERS), tuple(values.shape)
    rests = {
        **dict.fromkeys(("split32", "fp8_split24"), torch.randint(-32768, 32767, shape, dtype=torch.int16)),
        **dict.fromkeys(("split24", "fp8_split16"), torch.randint(-128, 127, shape, dtype=torch.int8)),
        "fp8_fp16": (values * 100).half(),
        "fp8_fp32": values.clone(),
    }
    if not kind.startswith("fp8"):
        return MasterWeight(values if kind == "weight" else values.bfloat16(), kind, rests.get(kind))
    grid = draw.choice([(1, 1), (blocks_of(shape[0]), blocks_of(shape[1]))])
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return Fp8Weight(codes, kind, torch.full(grid, 2.0**-7), rests.get(kind), torch.full(grid, 3.5))


def moment(draw: random.Random, shape: tuple[int, int], is_second: bool) -> MomentTensors:
    kind = draw.choice(["float32", "bfloat16", "blocks", "blocks", "one scale", "previous amax"])
    if kind in ("float32", "bfloat16"):
        data = torch.rand(shape).to(getattr(torch, kind))
        return MomentTensors(data, stochastic=kind == "bfloat16" and draw.random() < 0.5)
    fmt = draw.choice([E4M3, E5M2, E4M4] if is_second else [E4M3, E5M2])
    codes = torch.randint(0, 128 if is_second and fmt.signed else 256, shape, dtype=torch.uint8)
    scale_inv = torch.rand((shape[0], blocks_of(shape[1])) if kind == "blocks" else (1, 1)) * 0.01
    amax = torch.rand(1, 1) * 5 if kind == "previous amax" else None
    root, stochastic = is_second and draw.random() < 0.7, draw.random() < 0.6
    return MomentTensors(codes, fmt, scale_inv, amax, root, stochastic)


def random_update(seed: int) -> tuple[WeightUpdate, AdamGroup, torch.Tensor | None]:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    shape = draw.choice([(1, 1), (1, 300), (3, 128), (130, 256), (200, 300), (64, 384), (5, 1000)])
    values, gradient = torch.randn(shape), torch.randn(shape) * 10 ** draw.uniform(-6, 3)
    for tensor in (values, gradient):
        if draw.random() < 0.3:
            tensor[draw.randrange(shape[0]), draw.randrange(shape[1])] = draw.choice(FAULTS)
    gradient, scale_inv = gradient.to(draw.choice([torch.float32, torch.bfloat16, torch.float16])), None
    if draw.random() < 0.2:
        gradient = torch.randint(0, 256, shape, dtype=torch.uint8)
        scale_inv = torch.rand(draw.choice([(shape[0], blocks_of(shape[1]))]))
    kept, step = master(draw, values), torch.tensor(float(draw.choice([0, 1, 50])))
    moments = (moment(draw, shape, False), moment(draw, shape, True))
    bits = BitNumbers(
        draw.randrange(1 << 32), draw.choice([0, 7]), draw.choice([0, 128]), draw.choice([0, 5000, 1 << 30])
    )
    lr, beta1, beta2 = draw.choice([1e-3, 0.0, 0.3]), draw.choice([0.9, 0.3]), draw.choice([0.999, 0.95])
    decay, maximize, decoupled = draw.choice([0.0, 0.1]), draw.random() < 0.2, draw.random() < 0.7
    group = AdamGroup(lr, beta1, beta2, 1e-8, decay, maximize, decoupled, clip=True)
    grad_scale = torch.tensor(draw.choice([1.0, 8.0, 3.0])) if draw.random() < 0.5 else None
    return WeightUpdate(kept, moments, gradient, step, bits, 0, scale_inv), group, grad_scale


def test_any_update_has_the_bits_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library("optimizer_step") is not None
    taken: list[bool] = []

    def recorded(*given: Any) -> bool:
        taken.append(step_in_place(*given))
        return taken[-1]

    monkeypatch.setattr(libraries, "_SHARE", 100)
    for seed in range(150):
        update, group, grad_scale = random_update(seed)
        ours, theirs = moved(update, CPU), moved(update, CPU)
        optimizer_step([theirs], [group], None, grad_scale)
        with monkeypatch.context() as patch:
            if seed < 20:  # threads change nothing
                patch.setattr(torch, "get_num_threads", lambda: 3)
            optimizer_step([ours], [group], None, grad_scale, None, recorded)
        assert differences([ours], [theirs]) == [], seed
    assert taken == [True] * 150
