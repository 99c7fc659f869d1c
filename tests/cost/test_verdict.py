"""Whether FP8 pays for a model: tables, what to choose, to leave out and to change; ``octavo plan`` says so."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from octavo import cli, recipes
from octavo.cost import steps, verdict
from octavo.cost.estimate import FUSED_BF16, Estimate, estimate
from octavo.cost.from_flags import tokens_of
from octavo.cost.rates import IN_BF16, PRODUCT_KINDS, PUBLISHED, PlanError, device_label, with_attention
from octavo.cost.verdict import FEATURES, TOKENS, change_that_fits, describe_plan, describe_rates, pays, tables
from octavo.cost.work import work_of

H200 = PUBLISHED["H200"]


def two_steps(tokens: int, *sizes: int) -> list[Estimate]:
    """Return plans of linear layers from each size to the next, in bf16 and delayed."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(a, b, dtype=torch.bfloat16) for a, b in itertools.pairwise(sizes)))
    x = (torch.empty(tokens, sizes[0], dtype=torch.bfloat16, device="meta"),)
    work = work_of(layers, x)
    return [estimate(layers, x, recipe, H200, work=work) for recipe in (None, recipes.delayed())]


def plan(*sizes: int) -> str:
    """Return the text about such layers, of so many tokens."""
    return describe_plan(two_steps(*sizes), H200)


def test_large_layers_pay_and_small_ones_do_not() -> None:
    text = plan(16384, 8192, 8192, 8192)
    assert "delayed is the fastest: 0." in text and "leave out" not in text and "Don't" not in text
    assert "All of these steps fit the 139 GiB of NVIDIA H200." in text
    assert "Don't: no recipe takes less than 97% of bf16's time here" in plan(512, 512, 512, 512)
    assert "delayed: leave out, as fast in bf16 or faster: 1 of 512 x 8192 (1)" in plan(1024, 16384, 8192, 512)


def test_bf16_with_the_same_fusions_is_a_row_beside_which_the_best_is_named() -> None:
    bf16, fp8 = two_steps(16384, 8192, 8192)
    rates = PUBLISHED["H100"]
    fused = replace(bf16, name=FUSED_BF16, other=bf16.other - 0.1 * bf16.products, host=(), device=())
    text = describe_plan([bf16, fused, fp8], rates)
    assert "delayed is the fastest" in text and f"\n{FUSED_BF16} " in text
    assert f"delayed takes {fp8.total / fused.total:.2f} of bf16's time with the same fusions" in text
    assert "same fusions" not in describe_plan([bf16, fp8], rates)
    for kernel, rate in (("flash", "228"), ("cudnn", "334")):
        lines = describe_plan([bf16, fp8], with_attention(rates, kernel)).splitlines()
        assert lines[1].startswith(f"causal attention by {kernel}: {rate} TFLOP/s with heads of 64 and")
        assert "(published: arXiv 2407.08608)" in lines[1]
    with pytest.raises(PlanError, match="no rate of cudnn attention is published of NVIDIA B200; of H100, H200"):
        with_attention(PUBLISHED["B200"], "cudnn")


def test_whether_a_step_fits() -> None:
    text = plan(16384, *[65536] * 7)
    assert "None of these steps fits the 139 GiB of NVIDIA H200: the smallest needs 2" in text
    assert "the fastest" not in text and "Too large" not in text
    # in between, the fastest of the meshes that fit
    bf16, fp8 = two_steps(16384, 8192, 8192)
    larger = replace(fp8, name="larger", products=0.0, memory=replace(fp8.memory, weights=1 << 40))
    text = describe_plan([bf16, larger, fp8], replace(H200, memory=float(max(bf16.peak, fp8.peak))))
    assert re.search(r"Too large for the \d+ GiB of NVIDIA H200: larger\.", text) and "delayed is the fastest" in text


def test_why_fp8_does_not_pay() -> None:
    """Each of three reasons; where bf16 alone fits, and the recipes would be faster, nothing is chosen."""
    bf16, fp8 = two_steps(16384, 8192, 8192)
    work = 0.9 * bf16.total
    for products, casts, says in (
        (0.2 * bf16.total, 0.0, "products are only 20% of the step, and the rest is not made faster"),
        (work, 0.0, "this device's FP8 products are no faster than its bf16 ones"),
        (0.5 * work, 0.25 * work, "casts take 50% of what the products gain"),
    ):
        first = products if says.startswith("products") else work
        stand_ins = SimpleNamespace(products=first, total=bf16.total), SimpleNamespace(products=products, casts=casts)
        assert verdict._why_not(*stand_ins) == says  # type: ignore[arg-type]
    between = replace(H200, memory=bf16.peak)
    assert fp8.peak > bf16.peak and fp8.total < 0.97 * bf16.total
    assert "the fastest" not in (text := describe_plan([bf16, fp8], between)) and "Don't" not in text
    unknown = describe_plan([bf16, fp8], replace(H200, memory=0))
    assert "fit the" not in unknown and "delayed is the fastest" in unknown


def test_the_fastest_recipe_in_eager_is_another_than_the_fastest_compiled() -> None:
    """FP8 is advised against only if no recipe is faster in either."""
    step = two_steps(16384, 8192, 8192)[0]
    bf16 = replace(step, products=1.0, casts=0.0, other=1.0, optimizer=0.0, other_compiled=0.1, device=(), host=())
    eager = replace(bf16, name="delayed", products=0.8, casts=0.19)
    compiled = replace(bf16, name="rowwise", products=0.4, casts=0.3, other=1.9)
    assert (eager.total / bf16.total, compiled.total / bf16.total) == pytest.approx((0.995, 1.3))
    text = describe_plan([bf16, eager, compiled], H200)
    assert "delayed is the fastest in eager: 0.99 of bf16's time in eager, 0.99 compiled.\n" in text
    assert "rowwise is the fastest compiled: 1.30 of bf16's time in eager, 0.73 compiled." in text
    assert "Don't" not in text
    slow = replace(compiled, products=0.8)
    assert "Don't: no recipe takes less than 97% of bf16's time here" in describe_plan([bf16, eager, slow], H200)


def test_where_fp8_products_are_far_faster_each_size_pays() -> None:
    products = {kind: ((1.0, 1e12 if kind == IN_BF16 else 1e18),) for kind in PRODUCT_KINDS}
    rates = replace(H200, products=products, copy=1e30, launch=0.0, casts={}, host={})
    assert set(pays(recipes.dynamic(), rates).values()) == {min(FEATURES)}


def test_tables_fit_a_line() -> None:
    """A table of large numbers has at most 100 characters a line; a wider one goes on below."""
    bf16, fp8 = two_steps(16384, 8192, 8192)
    slow = [replace(fp8, name=name, products=5.0, casts=1.0, other=2.0) for name in ("blockwise", FUSED_BF16)]
    lines = tables([bf16, *slow]).splitlines()
    assert max(map(len, lines)) <= 100 and [len(line.split()) for line in lines[1:3]] == [14, 10]
    assert lines[3].split()[5] == f"{1e3 * slow[0].total:.2f}"
    *kinds, _, _ = verdict.MEMORY  # all that is counted has a column
    assert sum(column.number(fp8, bf16) for column in kinds) * verdict.GIB == pytest.approx(fp8.memory.total)


def test_the_smallest_change_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are tried from those that change least on; the bytes here are made up, and each change saves some.

    A change that the other flags do not allow is passed over.
    """
    refused: list[str] = []

    def step(name: str, model: Any, inputs: Any, rates: Any, work: Any, **options: Any) -> Any:
        if options.get("head") and any(options.get(option) for option in refused):
            raise PlanError("weights can't be stored in FP8")
        state = 100 if options.get("weight_storage") else {"fp32": 1000, "fp8": 500}[options["optimizer"]["moments"]]
        return SimpleNamespace(peak=state + inputs[0].numel() * (0.9 if options.get("fuse") else 1))

    monkeypatch.setattr(verdict, "step_in", step)
    monkeypatch.setattr(verdict, "work_of", lambda model, inputs: None)
    monkeypatch.setattr(verdict, "optimizer_of", lambda model, **options: options)

    def change(room: float, head: str | None = None) -> str:
        rates, state = replace(H200, memory=room), {"algorithm": "adamw", "moments": "fp32", "master": "auto"}
        inputs = tokens_of(1024, 256)
        return change_that_fits(nn.Linear(2, 2), inputs, rates, state, optimizer={"moments": "fp32"}, head=head)

    in_fp8 = "--weight-storage fp8 --moments fp8 --master split16 --update-in-backward 64MB"
    for room, flags in (
        (1950, "--fuse"), (1600, "--tokens 512, with as many more micro-batches"), (1300, "--tokens 256, with as many"),
        (1200, in_fp8), (400, f"{in_fp8} --fuse --tokens 256. delayed takes 0 GiB then."),
    ):  # fmt: skip
        assert change(room).startswith(f"The smallest change that fits: {flags}")
    too_large = f"Not even {in_fp8} --fuse --tokens 256 is enough (0 GiB). Plan for several devices: --gpus 4 or more."
    assert change(100) == too_large
    refused.append("weight_storage")
    without_head = f"{in_fp8} --fuse --tokens 256, without --head gw_hp"
    assert change(400, "gw_hp") == f"The smallest change that fits: {without_head}. delayed takes 0 GiB then."
    assert change(100, "gw_hp").startswith(f"Not even {without_head} is enough")


def test_where_fp8_pays_grows_with_the_tokens() -> None:
    sizes_of_tokens = pays(recipes.delayed(), H200)
    sizes = [sizes_of_tokens[tokens] for tokens in TOKENS]
    assert sizes == sorted(sizes, reverse=True)  # type: ignore[type-var]
    assert set(pays(recipes.mx(), H200).values()) == {None}
    text = describe_rates(H200)
    assert "at 16384 tokens from 1024 features on" in text and "copy 4.3 TB/s" in text


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    size = ["--width", "64", "--layers", "1", "--heads", "2", "--context", "32", "--tokens", "128"]
    assert cli.main(["plan", *size]) == 2
    assert "octavo: error: the rates of this device" in capsys.readouterr().err
    rates_of_cpu = replace(H200, device=device_label(torch.device("cpu")))
    monkeypatch.setattr("octavo.cost.measure", lambda: rates_of_cpu)
    assert cli.main(["info", "--measure"]) == 0
    assert "at 16384 tokens from 1024 features on" in capsys.readouterr().out
    monkeypatch.setattr(steps, "COMPARED", ("dynamic", "mx"))
    assert cli.main(["plan", *size, "--algorithm", "muon", "--moments", "fp8", "--master", "split24"]) == 0
    text = capsys.readouterr().out
    assert "4 sequences of 32 tokens" in text and "Don't" in text and "by muon, moments fp8, master split24" in text
    assert "dynamic, mx: no layer is faster than in bf16: 1 of 192 x 64 (blocks.0.attention.qkv.linear), 1 of" in text
    stored = ["--weight-storage", "fp8", "--moments", "fp8", "--master", "split16", "--update-in-backward", "1KB"]
    assert cli.main(["plan", *size, *stored]) == 0
    text = capsys.readouterr().out
    assert "master split16, weights in FP8 under the recipes, updates in backward by 1KB\n" in text
    assert "\ndynamic " in text and "\nmx " not in text  # whose weights can't be stored
    options = ["--device", "H100", "--attention", "cudnn", "--loss", "chunked"]
    assert cli.main(["plan", *size, *options]) == 2  # so small a head is not converted
    assert "a chunked loss: the gradients of head are no products in FP8" in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path), "--device", "H200"]) == 2
    assert "no configuration of a causal language model" in capsys.readouterr().err
