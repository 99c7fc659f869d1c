"""Rates: between their points, by kind, kept from one process to the next, and refused where nothing is known."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo import recipes
from octavo.cost import rates
from octavo.cost.rates import (
    FORMS,
    IN_BF16,
    PRODUCT_KINDS,
    PUBLISHED,
    PlanError,
    Rates,
    device_label,
    host_kind,
    keep,
    memory_of,
    product_kinds,
    rates_of,
)
from octavo.granularity import PerBlock
from octavo.scaling.recipe import Cast
from tests.support.damage import damaged_json

CPU = torch.device("cpu")
POINTS = ((1e6, 1e9), (4e6, 3e9))
RATES = Rates("a device", "measured", 1e12, 0.0, dict.fromkeys(PRODUCT_KINDS, POINTS))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo"


@pytest.mark.parametrize(
    ("flop", "rate"), [(1.0, 1e9), (1e6, 1e9), (2e6, 2e9), (4e6, 3e9), (1e12, 3e9)], ids=lambda value: f"{value:g}"
)
def test_a_rate_lies_between_its_points(flop: float, rate: float) -> None:
    assert RATES.product_seconds("row", flop) == pytest.approx(flop / rate)


def test_kinds_of_products() -> None:
    names = ("dynamic", "delayed", "rowwise", "blockwise", "mx")
    kinds = {name: product_kinds(getattr(recipes, name)()) for name in names}
    assert [kind[0] for kind in kinds.values()] == ["tensor", "tensor", "row", "block", "mx"]
    assert kinds["blockwise"] == ["block", "block", "vector"]  # a weight has whole blocks, a gradient and an input rows
    assert product_kinds(recipes.rowwise_with_gw_hp()) == ["row", "row", "bf16"]
    assert product_kinds(recipes.high_precision()) == ["bf16"] * 3


def test_what_launches_a_layer() -> None:
    named = ("dynamic", "delayed", "rowwise", "blockwise", "mx", "high_precision", "rowwise_with_gw_hp")
    kinds = [host_kind(getattr(recipes, name)()) for name in named]
    assert kinds == ["tensor", "delayed", "row", "block", "mx", IN_BF16, "row"]
    assert {*kinds, "operation"} == PUBLISHED["H100"].host.keys()


def test_attention_by_the_size_of_a_head() -> None:
    known = dataclasses.replace(RATES, attention={64: 2e12, 128: 4e12})
    assert known.attention_seconds({64: 2e12, 80: 2e12, 256: 4e12}, causal=False) == 1 + 1 + 1
    assert known.attention_seconds({64: 2e12}, causal=True) == 0.5
    assert RATES.attention_seconds({64: 3e9}, causal=True) == RATES.product_seconds(IN_BF16, 3e9)


def test_what_a_cast_moves() -> None:
    one, elements = dataclasses.replace(RATES, copy=1.0), 10.0
    dynamic, delayed = (recipe.input_casts.as_is for recipe in (recipes.dynamic(), recipes.delayed()))
    assert dynamic is not None and delayed is not None
    assert one.cast_seconds(delayed, elements, both=False) == 10 * (2 + 1)
    assert one.cast_seconds(delayed, elements, both=True) == 10 * (2 + 2)
    assert one.cast_seconds(dynamic, elements, both=True) == 10 * (2 + 2 + 2)  # once more for the amax
    assert one.cast_seconds(Cast(dynamic.format, PerBlock(1, 128)), elements, both=True) == 10 * (2 + 2)
    assert dataclasses.replace(one, casts={"delayed": 7.0}).cast_seconds(delayed, elements, both=True) == 70


def test_measured_rates_are_kept_for_this_device_and_torch(cache: Path) -> None:
    with pytest.raises(ValueError, match="octavo info --measure"):
        rates_of(device=CPU)
    mine = dataclasses.replace(RATES, device=device_label(CPU), memory=1e9)
    assert keep(RATES) == keep(mine) == cache / "rates.json"
    assert rates_of(device=CPU) == mine
    rates_of_devices = json.loads((cache / "rates.json").read_text())
    of_cpu = rates_of_devices[mine.device]
    without = {name: value for name, value in of_cpu.items() if name != "memory"}  # as an older octavo kept it
    (cache / "rates.json").write_text(json.dumps({mine.device: without}))
    assert rates_of(device=CPU) == dataclasses.replace(mine, memory=memory_of(CPU)) and memory_of(CPU) > 1 << 30
    products = {kind: points for kind, points in of_cpu["products"].items() if kind != "mx"}
    for text in ("{", "[1]", *(json.dumps({mine.device: of_cpu | {name: products}}) for name in ("newer", "products"))):
        (cache / "rates.json").write_text(text)  # as another version, or a full disk, may leave it
        with pytest.raises(ValueError, match="are not known"):
            rates_of(device=CPU)
    for seed in range(80):
        (cache / "rates.json").write_bytes(damaged_json(rates_of_devices, seed))
        with contextlib.suppress(PlanError):
            for kind in ("bf16", "tensor", "mx"):
                assert 0 < rates_of(device=CPU).product_seconds(kind, 1e9, 1e6) < math.inf
    keep(mine)
    assert rates_of(device=CPU) == mine


def test_measured_rates_have_what_is_known_of_such_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rates have a known device's attention and host's times, which are not measured."""
    mine = dataclasses.replace(RATES, device="NVIDIA H100 80GB HBM3, torch 2", memory=1e9)
    keep(mine)
    monkeypatch.setattr(rates, "device_label", lambda device: mine.device)
    both, published = rates_of(device=CPU), PUBLISHED["H100"]
    assert (both.products, both.attention, both.host) == (mine.products, published.attention, published.host)


def test_rates_of_a_file_without_products_are_none() -> None:
    keep(RATES)
    fields = dataclasses.asdict(RATES)
    assert rates._of_file(fields) == RATES
    with pytest.raises(ValueError, match="products without a rate"):
        rates._of_file(fields | {"products": fields["products"] | {"row": ()}})


def test_a_gpu_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what is published of its kind, or the error says what it lacks; and its memory is asked of torch."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(rates, "device_label", lambda device: "NVIDIA H200, torch 2")
    assert rates_of(device=gpu) is PUBLISHED["H200"]
    monkeypatch.setattr(rates, "device_label", lambda device: "a GPU, torch 2")
    for native, says in ((False, "a GPU, torch 2 has no FP8 hardware"), (True, "rates of this device .a GPU")):
        monkeypatch.setattr(rates, "runs_natively", lambda device, native=native: native)
        with pytest.raises(PlanError, match=says):
            rates_of(device=gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**37))
    assert memory_of(gpu) == 2**37 and memory_of(torch.device("meta")) == 0


CARDS = ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA GB200")


@pytest.mark.parametrize("name", CARDS)
def test_a_card_that_is_only_named_alike_gets_no_rates_of_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataclasses.replace(RATES, device=f"{name}, torch 2", memory=1e9)
    monkeypatch.setattr(rates, "device_label", lambda device: mine.device)
    monkeypatch.setattr(rates, "runs_natively", lambda device: True)
    with pytest.raises(PlanError, match=f"the rates of this device .{name}, torch 2. are not known: run `octavo info"):
        rates_of(device=torch.device("cuda", 0))
    keep(mine)
    assert rates_of(device=CPU) == mine


def test_published_rates() -> None:
    assert rates_of("h200") is PUBLISHED["H200"]
    for each in PUBLISHED.values():
        assert set(each.products) == {*PRODUCT_KINDS} and each.source
        assert each.product_seconds("tensor", 1e12) < each.product_seconds(IN_BF16, 1e12)
    with pytest.raises(ValueError, match=r"nothing is published of 'A1' here; known: H100, H200, B200"):
        rates_of("A1")


@pytest.mark.parametrize("name", ["A100", "NVIDIA A100-SXM4-80GB", "v100", "RTX A6000", "NVIDIA A100 80GB PCIe"])
def test_a_gpu_without_fp8_hardware_is_answered(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no FP8 hardware.*FP8 does not pay; plan for H100, H200, B200"):
        rates_of(name)


def test_all_rates_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SIZES_ON_CPU", ((64, 32, 48), (16, 16, 16)))
    monkeypatch.setattr(rates, "_CAST_SHAPE", {False: (64, 64)})
    measured = rates.measure(torch.device("cpu"), seconds=0.001)
    assert measured.source == "measured" and measured.copy > 0 and measured.launch > 0
    assert set(measured.products) == {*PRODUCT_KINDS}
    for points in measured.products.values():
        assert [flop for flop, _ in points] == [2 * 16**3, 2 * 64 * 32 * 48]
        assert all(rate > 0 for _, rate in points)
    assert set(measured.casts) == {*FORMS, "delayed"} and min(measured.casts.values()) > 0
