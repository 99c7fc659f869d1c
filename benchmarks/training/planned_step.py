"""``octavo plan``'s times of the Llama of llama_step, beside its rows on an H100.

Nothing is fitted to these rows. Products, casts and attention are those of ``octavo.cost.rates``. The host's times are
of gpu_host, of the commit of the rows (gpu_host_earlier) and of the calls that are replayed since then
(gpu_host_planned, whose times ``octavo.cost`` takes), times how much slower the host of that GPU is: the median over
the smallest layer of ``layer``'s rows, where the host is slower than the GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import torch

import octavo
from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.pages import Row, markdown, read
from octavo.cost import PUBLISHED, Estimate, Rates, estimate
from octavo.cost.parts import PARTS, Moved
from octavo.cost.rates import IN_BF16, HostTime, with_attention
from octavo.cost.work import work_of

TAKES = "half a minute"
MEASURES = (
    "octavo/cost",
    "octavo/nn/saved.py",
    "octavo/schedule/plan.py",
    "benchmarks/results/gpu_host_planned-cpu-amd-epyc.csv",
)
ORIGIN = "octavo.cost, not measured"

LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
VOCABULARY, BATCH, CONTEXT = 128256, 8, 2048
SMALLEST = "15872x4096x4096"  # of ``layer``'s shapes
# of Rates.host: a recipe, its cast in gpu_host's rows, and whether its weight is kept there
FORMS = {
    "delayed": ("delayed", "cast_transpose delayed", True),
    "tensor": ("dynamic", "cast_transpose dynamic", True),
    "row": ("rowwise", "cast_two_scalings 1x128", False),
    "block": ("blockwise", "cast_two_scalings 1x128", True),
    "mx": ("mx", "cast_two_scalings 1x128", False),
}
OF_OTHERS = ("nn.Linear, forward", "nn.Linear, forward + backward", "no product, forward + backward",
             "torchao tensorwise, forward", "torchao tensorwise, forward + backward")  # fmt: skip
OPERATION = 0.27  # of the time of nn.Linear's forward; see octavo/cost/rates.py
STATE = "octavo fp8 state"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"recipe": None},
    **{f"octavo {name}": {"recipe": name} for name in ("delayed", "dynamic", "rowwise", "blockwise")},
    STATE: {
        "recipe": "delayed",
        "weight_storage": "fp8",
        "optimizer": functools.partial(octavo.optim.AdamW, moments="fp8", master=None),
    },
}


# with everything on, of today's code: fused, then with the head in FP8 (converted as the others, or by the recipe for
# heads), then with the loss in chunks; each by FlashAttention-2 and by cuDNN's attention
_FUSED: Mapping[str, Any] = {"recipe": "delayed", "fuse": True}
EVERYTHING: Mapping[str, Mapping[str, Any]] = {
    "bf16, fused": {"recipe": None, "fuse": True},
    "octavo delayed, fused": _FUSED,
    "octavo delayed, fused, head by dynamic_with_output_hp": {**_FUSED, "head": "dynamic_with_output_hp"},
    "octavo delayed, fused, head": {**_FUSED, "head": "delayed"},
    "octavo delayed, fused, head, chunked loss": {**_FUSED, "head": "delayed", "chunked_loss": True},
    "octavo blockwise, fused": {**_FUSED, "recipe": "blockwise"},
    "octavo blockwise, fused, head": {**_FUSED, "recipe": "blockwise", "head": "blockwise"},
}
# blocks' products at other rates in TFLOP/s: of 1x128 by 128x128, and of 1x128 by 1x128
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "octavo blockwise, products as fast as published of DeepGEMM": {"recipe": "blockwise", "products": (1350, 1350)},
    "octavo blockwise, fused, products so": {**_FUSED, "recipe": "blockwise", "products": (1350, 1350)},
    "octavo blockwise, fused, products by octavo's Triton kernel": {
        **_FUSED,
        "recipe": "blockwise",
        "products": (671, 614),
    },
}


def without_head(module: torch.nn.Module, name: str) -> bool:
    """Whether a layer is converted: all but the head."""
    return name != "lm_head"


def microseconds(subject: str) -> dict[str, float]:
    """Return the host's times by gpu_host's names."""
    return {row["what"]: float(row["us"]) for row in read(subject)}


def host_times(us: Mapping[str, float], slower: float = 1.0) -> dict[str, HostTime]:
    """Return the values of ``Rates.host``, from gpu_host's rows and how much slower a host is.

    A layer's backward is what its pass takes beyond that of a layer without a product, whose start of autograd a step
    has once.
    """

    def backward(name: str) -> float:
        both, forward = us[f"{name}, forward + backward"], us[f"{name}, forward"]
        return both - forward - (us["no product, forward + backward"] - us["no product, forward"])

    unit = 1e-6 * slower
    linear = us["nn.Linear, forward"]
    times = {IN_BF16: HostTime(unit * linear, unit * backward("nn.Linear"))}
    for form, (recipe, cast, weight_is_kept) in FORMS.items():
        name = f"Linear {recipe}"
        forward = us[f"{name}, forward"] + us[cast] * weight_is_kept
        times[form] = HostTime(unit * forward, unit * backward(name), unit * us[cast])
    return times | {"operation": HostTime(unit * OPERATION * linear, unit * OPERATION * linear)}


def slower_host(us: Mapping[str, float]) -> float:
    """Return the H100's host's time divided by that of such rows: the median over octavo's eager layers."""
    ratios = []
    for row in read("layer"):
        library, _, words = row["variant"].partition(" ")
        recipe, _, suffix = words.partition(" ")
        if row["shape"] == SMALLEST and library == "octavo" and suffix in ("", "kept"):
            form, cast = next((form, cast) for form, (name, cast, _) in FORMS.items() if name == recipe)
            took = us[f"Linear {recipe}, forward + backward"] + us[cast] * (FORMS[form][2] and not suffix)
            ratios.append(1e3 * float(row["ms"]) / took)
    return statistics.median(ratios)


@functools.cache
def rates(then: bool) -> Rates:
    """Return the rates of the H100 and its host, with the host's times of the commit of its rows, or with today's."""
    earlier, now = microseconds("gpu_host_earlier"), microseconds("gpu_host_planned")
    slower = slower_host(earlier)
    if then:
        return replace(PUBLISHED["H100"], host=host_times(earlier, slower))
    machine = statistics.median(earlier[name] / now[name] for name in OF_OTHERS)  # of another machine
    return replace(PUBLISHED["H100"], host=host_times(now, slower * machine))


def meta_llama(blocks: int) -> torch.nn.Module:
    """Return the model without memory, with ``blocks`` blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LARGE, num_key_value_heads=LARGE["num_attention_heads"] // 2, use_cache=False)
    config.vocab_size, config.num_hidden_layers = VOCABULARY, blocks
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()  # type: ignore[no-any-return]


TOKENS = (torch.empty(BATCH, CONTEXT, dtype=torch.int64, device="meta"),)


def _extended(one: Any, two: Any, blocks: int) -> Any:
    """Return an estimate's field for ``blocks`` blocks, if it is ``one`` for one block and ``two`` for two."""
    if isinstance(one, Mapping):
        return MappingProxyType({key: _extended(one[key], two[key], blocks) for key in one})
    if isinstance(one, tuple):
        return tuple(_extended(a, b, blocks) for a, b in zip(one, two, strict=True))
    if isinstance(one, int | float):
        return one + (blocks - 1) * (two - one)
    return one


@functools.cache
def models() -> Sequence[tuple[torch.nn.Module, Any]]:
    """Return models of one and of two blocks, and their work."""
    return [(model, work_of(model, TOKENS)) for model in map(meta_llama, (1, 2))]


def planned(variant: Mapping[str, Any], rates: Rates, **options: Any) -> Estimate:
    """Return the estimate of a step, in which every block takes as long as the second.

    ``variant``: ``estimate``'s arguments, with recipes by name; "head": the head's recipe, which is else in bf16;
    "products": TFLOP/s of blocks' products.
    """
    head, blocks = variant.get("head"), dict(zip(("block", "vector"), variant.get("products", ()), strict=False))
    rates = replace(rates, products={**rates.products, **{kind: ((1.0, 1e12 * at),) for kind, at in blocks.items()}})
    named = variant["recipe"] and octavo.recipes.as_recipe(
        {"default": variant["recipe"], "rules": {"lm_head": head}} if head else variant["recipe"]
    )
    options = {"select": None if head else without_head, **variant, **options, "recipe": named}
    options = {name: value for name, value in options.items() if name not in ("head", "products")}
    one, two = (estimate(model, TOKENS, rates=rates, work=work, **options) for model, work in models())
    values = {each.name: getattr(one, each.name) for each in fields(Estimate)}
    others = {name: getattr(two, name) for name in values} | {"layers": (), "memory": one.memory}
    values |= {"layers": (), "memory": one.memory}
    memory = {each.name: _extended(getattr(one.memory, each.name), getattr(two.memory, each.name), 16)
              for each in fields(one.memory)}  # fmt: skip
    extended = {name: _extended(values[name], others[name], LARGE["num_hidden_layers"]) for name in values}
    return Estimate(**extended | {"memory": replace(one.memory, **memory)})


def measured() -> dict[str, Row]:
    """Return the eager rows of llama_step, by variant."""
    return {row["variant"]: row for row in read("llama_step") if row["mode"] == "eager"}


def rows() -> list[dict[str, object]]:
    """Return each variant as measured, as planned with the host of that commit, and as planned of today's code."""
    measured_rows, planned_rows = measured(), []
    for name, variant in {**VARIANTS, **EVERYTHING, **BLOCKS}.items():
        now, cudnn = (
            planned(variant, variant_rates) for variant_rates in (rates(False), with_attention(rates(False), "cudnn"))
        )
        row: dict[str, object] = {"variant": name, "measured_ms": "", "planned_ms": "", "planned_waits_ms": ""}
        row |= {"measured_gib": "", "planned_gib": f"{now.peak / 2**30:.1f}", "now_ms": f"{1e3 * now.total:.1f}"}
        if name in measured_rows:
            then = planned(variant, rates(True))
            row |= {"measured_ms": measured_rows[name]["ms"], "planned_ms": f"{1e3 * then.total:.1f}"}
            row |= {"planned_waits_ms": f"{1e3 * then.waits:.1f}", "measured_gib": measured_rows[name]["peak_gib"]}
        planned_rows.append(row | {"now_waits_ms": f"{1e3 * now.waits:.1f}", "cudnn_ms": f"{1e3 * cudnn.total:.1f}"})
    return planned_rows


def planned_table() -> str:
    """Return docs/plan.md's table: rows of an H100 beside planned ones."""
    lines, measured_rows = [], [row for row in read("planned_step") if row["measured_ms"]]
    base = measured_rows[0]
    for row in measured_rows:
        took, plan, now = (float(row[column]) for column in ("measured_ms", "planned_ms", "now_ms"))
        shares = took / float(base["measured_ms"]), plan / float(base["planned_ms"])
        cells = [row["variant"], f"{took:.0f}", f"{plan:.0f}", f"{plan / took - 1:+.0%}"]
        cells += [f"{share:.2f}" for share in shares]
        lines.append(
            [*cells, row["measured_gib"], row["planned_gib"], f"{now:.0f}", f"{now / float(base['now_ms']):.2f}"]
        )
    header = ["step", "measured ms", "planned", "error", "of bf16's time, measured", "planned", "peak GiB, measured"]
    return markdown([*header, "planned", "planned ms of today's code", "of bf16's time"], lines)


def everything_table(names: Sequence[str] = ("bf16", *EVERYTHING)) -> str:
    """Return docs/plan.md's table: steps with everything on, beside plain bf16 and bf16 with the same fusions."""
    rows_by_name = {row["variant"]: row for row in read("planned_step")}
    base, like = rows_by_name["bf16"], rows_by_name["bf16, fused"]
    lines = []
    for name in names:
        row, cells = rows_by_name[name], [name]
        for column in ("now_ms", "cudnn_ms"):
            ms = float(row[column])
            cells += [f"{ms:.0f}", *(f"{float(reference[column]) / ms:.2f}" for reference in (base, like))]
        lines.append([*cells, row["planned_gib"], f"{float(row['planned_gib']) / float(base['planned_gib']):.2f}"])
    times = ["times bf16's speed", "times bf16's, fused"]
    header = ["step", "ms by FlashAttention-2", *times, "ms by cuDNN's attention", *times]
    return markdown([*header, "peak GiB", "of bf16's"], lines)


def elements() -> dict[str, tuple[int, int]]:
    """Return {part of a block: (its elements, how often the block has it)}."""
    tokens, width, heads = BATCH * CONTEXT, LARGE["hidden_size"], LARGE["num_attention_heads"]
    keys = width // heads * (heads // 2)
    once = {"gated feed-forward": LARGE["intermediate_size"], "gate and up": width, "query, key and value": width}
    once |= {"rotary embedding": width + keys, "residual": width}
    return {"norm": (tokens * width, 2), **{part: (tokens * wide, 1) for part, wide in once.items()}}


def account_table() -> str:
    """Return docs/plan.md's table: bytes that a block of this model moves besides products, attention, casts."""

    def cells(kind: str, size: int, times: int) -> list[str]:
        moved: Moved = getattr(PARTS[part], kind)
        launches = moved.forward_launches + moved.backward_launches
        return [f"{1e-9 * times * size * (moved.forward + moved.backward):.2f}", f"{times * launches}"]

    lines, total = [], {"plain": 0.0, "fused": 0.0}
    for part, (size, times) in elements().items():
        lines.append([part, *cells("plain", size, times), *cells("fused", size, times)])
        for kind in total:
            total[kind] += float(cells(kind, size, times)[0])
    lines.append(["together", f"{total['plain']:.2f}", "", f"{total['fused']:.2f}", ""])
    return markdown(["part of a block", "GB, as transformers writes it", "launches", "GB, fused", "launches"], lines)


def blocks_table() -> str:
    """Return docs/kernels.md's table: blocks as they are, and with other products."""
    names = ("bf16", "bf16, fused", "octavo blockwise", "octavo blockwise, fused", "octavo blockwise, fused, head")
    return everything_table((*names, *BLOCKS))


BLOCK_TABLES = {"blocks": blocks_table}
TABLES = {"planned": planned_table, "everything on": everything_table, "account": account_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks planned_step", description=__doc__)
    parser.add_argument("--no-write", action="store_true", help="print only")
    plans = rows()
    print(table(plans))
    if not parser.parse_args(arguments).no_write:
        print(f"written to {write_results('planned_step', plans, origin={'source': ORIGIN, 'commit': commit()})}")
    return 0
