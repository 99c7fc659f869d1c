"""``octavo plan`` beside the rows that an H100 gave, and the rates that it plans with beside theirs."""

from __future__ import annotations

import importlib
import re
import statistics

import pytest

from octavo.cost.rates import IN_BF16, PRODUCT_KINDS, PUBLISHED

pytest.importorskip("transformers")
step, pages = (importlib.import_module(f"benchmarks.{name}") for name in ("training.planned_step", "common.pages"))
H100 = PUBLISHED["H100"]


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_plan_holds_against_an_h100(full: bool) -> None:
    """Time and peak within 10 %, and whether FP8 is faster, by the host's times of the commit that was timed."""
    took, rates = step.measured(), step.rates(then=True)
    assert {name for name in took if not name.startswith("torchao")} == step.VARIANTS.keys()
    variants = {name: variant for name, variant in step.VARIANTS.items() if full or name != step.STATE}
    plans = {name: step.planned(variant, rates) for name, variant in variants.items()}
    for name, plan in plans.items():
        assert 1e3 * plan.total == pytest.approx(float(took[name]["ms"]), rel=0.1), name
        assert plan.peak / 2**30 == pytest.approx(float(took[name]["peak_gib"]), rel=0.1), name
        faster = float(took[name]["ms"]) < float(took["bf16"]["ms"])
        assert (plan.total < plans["bf16"].total) is faster, name
    waits = [plans[f"octavo {name}"].waits for name in ("delayed", "rowwise")]
    assert plans["bf16"].waits == 0 < waits[0] < waits[1]  # the more the host does, the longer the GPU waits


def test_products_are_those_of_layers() -> None:
    rate = {kind: H100.products[kind][0][1] for kind in PRODUCT_KINDS}
    rows = {row["variant"]: float(row["ms"]) for row in pages.read("layer") if row["shape"] == "4 layers"}
    shapes = {row["shape"] for row in pages.read("layer")} - {"4 layers"}
    tokens, *_ = (int(size) for size in next(iter(shapes)).split("x"))
    flop = 6.0 * tokens * sum(int(a) * int(b) for _, a, b in (shape.split("x") for shape in shapes))
    for kind, name in (("tensor", "tensor"), ("row", "rowwise")):
        assert rate[kind] == pytest.approx(1e3 * flop / rows[f"{name} products only"], rel=0.01)
    blocks = 3 / (2 / rate["block"] + 1 / rate["vector"])
    assert blocks == pytest.approx(1e3 * flop / rows["blockwise products only"], rel=0.01)
    kernels = {row["op"]: row for row in pages.read("kernels") if row["shape"] == "8192x8192x8192"}
    alone = {op: float(row["us"]) for op, row in kernels.items()}
    by_product = alone["1x128 . 128x128, torch, fast"] / alone["1x128 . 1x128, torch, fast"]
    assert rate["vector"] / rate["block"] == pytest.approx(by_product, rel=0.01)
    assert rate["mx"] == pytest.approx(2e6 * 8192**3 / alone["1x32 . 1x32, Triton, fast"], rel=0.01)
    bf16 = [2e6 * 8192**3 / float(row["inductor_us"]) for row in kernels.values()]
    assert rate[IN_BF16] == pytest.approx(statistics.median(bf16), rel=0.01)


def test_casts_are_those_of_kernels_and_the_hosts_times_gpu_hosts() -> None:
    us = {row["op"]: float(row["us"]) for row in pages.read("kernels") if row["shape"] == "16384x8192"}
    both = {"delayed": "cast+transpose delayed", "tensor": "cast+transpose dynamic", "row": "cast rows + columns"}
    both |= {"block": "cast 1x128 + 128x1", "mx": "cast 1x32 + 32x1"}
    for form, op in both.items():
        assert H100.casts[form] == pytest.approx(1e-6 * us[op] / (16384 * 8192), rel=0.01)
    for kind, times in step.host_times(step.microseconds("gpu_host_planned")).items():
        assert [*H100.host[kind]] == pytest.approx([*times], rel=0.06), kind


def test_a_block_moves_what_the_account_says() -> None:
    (_, one), (_, two) = step.models()
    moved = two.blocks.traffic.bytes - one.blocks.traffic.bytes
    said = float(re.findall(r"together \| ([\d.]+)", step.account_table())[0])
    assert 1e-9 * moved == pytest.approx(said, rel=0.06)  # a CPU copies its keys and values for attention
