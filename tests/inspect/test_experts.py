"""Layers of experts, recorded and traced: each expert as a linear layer alone would be."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import E4M3, Cast, Dynamic, PerTensor, recipes
from octavo.distributed.ranks import Ranks
from octavo.inspect.rows import Table
from octavo.inspect.weight_updates import count_weights
from tests.support.expert_models import H, built
from tests.support.helpers import FP8_RECIPES, observers

np = pytest.importorskip("numpy")

SIZES = [3, 0, 130, 17, 1]  # rows of each expert
ENDS = torch.tensor(SIZES).cumsum(0).to(torch.int32)
SAVED = dataclasses.replace(recipes.dynamic(), saved=Cast(E4M3, PerTensor(), Dynamic()))


def rows_of(size: float = 1.0) -> Tensor:
    """Return rows, those of the fourth expert spread wide."""
    torch.manual_seed(1)
    x = torch.randn(sum(SIZES), 40)
    x[ENDS[2] : ENDS[3]] *= torch.logspace(0, -9, 40)
    return (size * x).requires_grad_()


def grads() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(sum(SIZES), 48)


def layer_of(recipe: Any) -> octavo.nn.GroupedLinear:
    torch.manual_seed(0)
    return octavo.nn.GroupedLinear(len(SIZES), 40, 48, bias=False, recipe=recipe)


def alone(layer: octavo.nn.GroupedLinear) -> nn.ModuleList:
    """Return each expert as a linear layer."""
    twins = [octavo.nn.Linear(40, 48, bias=False, recipe=layer.recipe) for _ in SIZES]
    for twin, weight in zip(twins, layer.weight, strict=True):
        twin.weight.data.copy_(weight)
    return nn.ModuleList(twins)


def run_alone(twins: nn.ModuleList) -> None:
    for twin, x, g in zip(twins, rows_of().split(SIZES), grads().split(SIZES), strict=True):
        if len(x):
            twin(x.detach().requires_grad_()).backward(g)


@pytest.mark.parametrize("name", [*FP8_RECIPES, "gw_hp"])
def test_each_expert_is_counted_as_a_layer_alone(name: str) -> None:
    recipe = {**FP8_RECIPES, "gw_hp": recipes.rowwise_with_gw_hp}[name]()
    layer = layer_of(recipe)
    twins, tables = alone(layer), []
    for model in (layer, twins):
        table = Table(model)
        count_weights(table.layers, Ranks())
        table.attach(True)
        layer(rows_of(), ENDS).backward(grads()) if model is layer else run_alone(twins)
        tables.append(table)
    counted, expected = tables
    for name in ("sums", "extremes"):
        by_expert = getattr(counted, name).unflatten(0, (len(counted.rows), len(SIZES)))
        twin = getattr(expected, name).unflatten(0, (len(SIZES), len(counted.rows))).transpose(0, 1)
        torch.testing.assert_close(by_expert, twin, rtol=1e-9, atol=0)


def test_the_worst_expert_is_kept_and_named(tmp_path: Path) -> None:
    layer = layer_of(recipes.dynamic())
    twins = alone(layer)
    with octavo.inspect.record(layer, tmp_path / "experts") as recorder:
        layer(rows_of(), ENDS).backward(grads())
        recorder.step()
    with octavo.inspect.record(twins, tmp_path / "alone") as recorder:
        run_alone(twins)
        recorder.step()
    record, expected = (octavo.inspect.load(tmp_path / name) for name in ("experts", "alone"))
    of_experts = record.experts
    assert of_experts is not None
    assert of_experts.tokens[""].tolist() == [SIZES]
    assert of_experts.worst_expert[0, 0] == 3 and of_experts.beyond[0, 0] == 1
    (place,) = (at for at, row in enumerate(expected.rows) if (row.layer, row.role) == ("3", "input"))
    for name, values in expected.measures.items():
        assert of_experts.measures[name][0, 0] == pytest.approx(values[0, place], rel=1e-9)
    assert (of_experts.exponents[0, 0] == expected.exponents[0, place]).all()
    first, *_ = octavo.inspect.diagnose(record)
    (twin, *_) = octavo.inspect.diagnose(expected)
    assert first.cause.startswith("expert 3 of 5 (17 tokens): ") and first.cause.endswith(twin.cause)
    assert first.rules[""] == twin.rules["3"]
    assert first.numbers["expert"] == 3
    assert record.measures["flushed"][0, 0] < twin.numbers["flushed"] / 4  # of all experts together


FUSED = {**FP8_RECIPES, "saved": lambda: SAVED}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_activation_is_counted_as_alone(name: str) -> None:
    index, weights = torch.randint(4, (24, 2)), torch.rand(24, 2)
    tables = []
    for hooked in (False, True):
        torch.manual_seed(0)
        experts = octavo.nn.Experts(4, H, 48, recipe=FUSED[name]())
        if hooked:
            experts.down.register_forward_pre_hook(lambda *_: None)
        table = Table(experts)
        table.attach(True)
        x = torch.linspace(-3, 3, 24 * H).view(24, H).requires_grad_()
        experts(x, index, weights).square().sum().backward()
        tables.append(table)
    fused, parts = (table.sums[:, :5].view(len(table.rows), 4, 5) for table in tables)
    near = 0.02 * parts[..., :1]  # rounded to bfloat16 or not, now and then a number is flushed or not
    exact = near if name == "saved" else torch.where(parts == parts, near * 0.05, 0)
    assert ((fused - parts).abs() <= exact).all() and (parts[..., 0].sum(1) > 0).sum() > 0


@pytest.mark.parametrize(
    ("kind", "how", "recipe"),
    [
        ("stored transposed", "checkpointed", "mx"),
        ("octavo bias", "checkpointed", "delayed"),
        pytest.param("octavo bias", "compiled", "delayed", marks=pytest.mark.full),
        pytest.param("stored", "compiled", "mx", marks=pytest.mark.full),
    ],
)
def test_ways_to_train_leave_the_same_record(kind: str, how: str, recipe: str, tmp_path: Path) -> None:
    records = []
    for name in ("eager", "other"):
        net = built(kind, recipe, chosen=3)
        called: Any = net
        if name == "other" and how == "compiled":
            called = torch.compile(net, backend="aot_eager", fullgraph=True)
        elif name == "other":
            called = lambda x, net=net: checkpoint(net, x, use_reentrant=False)  # noqa: E731
        with octavo.inspect.record(net, tmp_path / name, every=1) as recorder:
            for step in range(2):
                torch.manual_seed(step)
                called(torch.randn(24, H)).square().mean().backward()
                net.zero_grad()  # else eager layers would keep the weights cast in the first step, compiled ones not
                recorder.step()
        records.append(octavo.inspect.load(tmp_path / name))
    eager, other = records
    assert {row.layer for row in eager.rows} == {"experts.gate_up", "experts.down"}
    for name, values in eager.measures.items():
        np.testing.assert_allclose(other.measures[name], values, rtol=1e-3, atol=1e-3, err_msg=name)
    for layer, tokens in eager.experts.tokens.items():
        assert (other.experts.tokens[layer] == tokens).all() and (tokens.sum(1) == 48).all() and not tokens[:, 3].any()
    assert not observers(net)


NAMES = ["dynamic", "delayed", "rowwise", "blockwise", "mx", "rowwise_with_gw_hp"]
PLACES = ["input", "grad_output", "grad_output of a first layer", "weight"]


@pytest.mark.full
@pytest.mark.parametrize(("where", "recipe"), list(zip(PLACES, NAMES, strict=False)))
def test_a_fault_names_its_expert_compiled(where: str, recipe: str) -> None:
    test_a_fault_names_its_expert(where, recipe, "compiled")


@pytest.mark.covering(1)
@pytest.mark.parametrize(("where", "recipe"), [(where, recipe) for recipe in NAMES for where in PLACES])
def test_a_fault_names_its_expert(where: str, recipe: str, how: str = "eager") -> None:
    layer = layer_of(getattr(recipes, recipe)())
    called: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if how == "compiled" else layer
    at = int(ENDS[2]) + 5  # of the fourth expert
    with octavo.inspect.trace_faults(layer, raises=False) as trace:
        for step in range(3):
            x, g = rows_of().detach(), grads()
            if step == 1 and where == "input":
                x[at, 7] = math.nan
            elif step == 1 and where != "weight":
                g[at, 7] = math.inf
            called(x.requires_grad_("first" not in where), ENDS).backward(g)
            if step == 0 and where == "weight":
                with torch.no_grad():
                    layer.weight[3, -1, 2] = math.nan
            trace.step()
    fault = trace.fault
    assert fault is not None
    role = where.split()[0]
    assert (fault.role, fault.expert, fault.step) == (role, 3, 1)
    if role != "weight":
        assert fault.share == pytest.approx(1 / sum(SIZES))
    assert f"the {role} of expert 3 of the model at step 1" in fault.where
    assert fault.before[0]["input scale_inv"] < 0.1  # not the 1 of an expert without rows


def test_without_a_recorder_nothing_is_counted() -> None:
    from tests.support.helpers import CountOps

    layer = layer_of(recipes.delayed())
    calls = []
    for watched in (False, True):
        table, layer.weight.grad = Table(layer), None
        table.attach(watched)
        with CountOps() as ops:
            layer(rows_of(), ENDS).backward(grads())
        calls.append(dict(ops.calls))
    assert calls[1] == {**calls[0], "cast_statistics": 2}


@pytest.mark.parametrize("name", ["dynamic", "blockwise"])
def test_experts_that_live_in_fp8(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = getattr(recipes, name)()
    layer = octavo.nn.GroupedLinear(3, 4, 80, bias=False, dtype=torch.bfloat16, recipe=recipe)  # all are looked at
    with torch.no_grad():
        layer.weight.mul_(torch.tensor([1.0, 64.0, 0.02]).view(3, 1, 1))
    octavo.convert(layer, recipe, lambda *_: True, weight_storage="fp8")
    optimizer = octavo.optim.AdamW(layer.parameters(), 1e-2)
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)
    with octavo.inspect.record(layer, tmp_path, every=1, optimizer=optimizer) as recorder:
        layer(torch.randn(12, 4, dtype=torch.bfloat16), ends).square().sum().backward()
        before = layer.weight.dequantize().double()
        optimizer.step()
        recorder.step()
    record = octavo.inspect.load(tmp_path)
    place = next(at for at, row in enumerate(record.rows) if row.role == "weight")
    assert np.isposinf(record.measures["sqnr"][0, place])  # its codes are the weight
    moved = layer.weight.dequantize().double() - before
    assert record.weights["update"][0, 0] == pytest.approx(moved.square().mean().sqrt().item(), rel=1e-6)
    assert record.weights["changed"][0, 0] == pytest.approx((moved != 0).double().mean().item())
