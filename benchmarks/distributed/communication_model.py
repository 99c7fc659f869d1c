"""Formulas: what FP8 products, gathers, reduction and pairs each bring on 8 to 16,384 H100.

Nothing is measured: parallel_step.py has the formulas and names its assumptions. Step times that others have published
of the same models on the same layouts are printed beside the formulas', and nothing was fitted to them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.pages import markdown, read
from benchmarks.distributed.fsdp_traffic import DEEPSEEK, LLAMA, Shapes
from benchmarks.distributed.parallel_step import Hardware, Layout, Precision, Stage, Step, model_flop, step

TAKES = "10 seconds"
MEASURES = (
    "benchmarks/distributed/communication_model.py",
    "benchmarks/distributed/parallel_step.py",
    "benchmarks/distributed/fsdp_traffic.py",
    "octavo/cost/rates.py",
)

LLAMA_8B, LLAMA_70B, LLAMA_405B = LLAMA
LADDER = (  # each adds to the one before
    Precision("bf16", products=False),
    Precision("products"),
    Precision("+ gathers", gathers=True),
    Precision("+ reduction at one level", gathers=True, reduction=1),  # which the next does at two
    Precision("+ reduction", gathers=True, reduction=2),
    Precision("+ pairs", gathers=True, reduction=2, pairs=True),
)
BF16 = LADDER[0]
# Transformer Engine's FP8: weights and tensor parallelism's inputs are gathered as codes, gradients reduced in bf16
MEGATRON = Precision("Transformer Engine", gathers=True, pairs=True, elsewhere=True)
MEGATRON_BF16 = replace(BF16, elsewhere=True)
GPUS = (8, 64, 256, 1024, 4096, 16384)
SHOWN = (8, 64, 1024, 16384)  # in the page
SEQUENCES = 2048  # of 8,192 tokens: Llama 3 405B's batch
ORIGIN = "formulas of parallel_step.py, not measured"


class Published(NamedTuple):
    """A training step that others have timed: ``tokens`` a second and GPU."""

    shapes: Shapes
    layout: Layout
    precision: Precision
    tokens: float
    source: str

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Within which the formulas' rate by the published one must lie."""
        return None if self.source == TORCHAO else UPPER if self.shapes is DEEPSEEK else HELD


# Dense models: 15 %, as the same layout of the same library has given 292 and 328 tokens/s in releases half a year
# apart, and the rates of products differ by as much with a GPU's power. Mixtures of experts: the formulas know neither
# the host, nor unequal stages, nor unequal experts, so they are an upper bound.
HELD, UPPER = (0.85, 1.15), (0.95, 1.5)
BRIDGE = "Megatron-Bridge {}".format  # its performance summary of that release, DGX-H100, FP8 with current scaling
HERD = "Llama 3, table 4"  # arXiv 2407.21783
HERD_TFLOP = model_flop(LLAMA_405B, 8192) / 1e12  # a token's: the paper gives TFLOP/s
V3 = "DeepSeek-V3, table 1"  # arXiv 2412.19437: 14.8T tokens in 2.664M hours of H800
TORCHAO = "torchao's README"  # torch.compile and selective recomputation, which the formulas do not know
LAYOUT_8B = Layout(8, 128, resharded=True, recomputed=5 / 32)
LAYOUT_70B = Layout(64, 128, tensor=4, pipeline=8, chunks=5)
LAYOUT_405B = Layout(1024, 512, tensor=8, pipeline=8, context=2, chunks=8)
LAYOUT_HERD = Layout(8192, SEQUENCES, tensor=8, pipeline=16, chunks=8)
LAYOUT_V3 = Layout(1024, 8192, 4096, tensor=2, pipeline=8, expert=64, chunks=4)
PUBLISHED = (
    Published(LLAMA_8B, LAYOUT_8B, MEGATRON, 14451, BRIDGE("25.11")),
    Published(LLAMA_70B, LAYOUT_70B, MEGATRON, 1602, BRIDGE("25.11")),
    Published(LLAMA_70B, replace(LAYOUT_70B, sequences=256), MEGATRON, 1639, BRIDGE("26.02.01")),
    Published(LLAMA_405B, LAYOUT_405B, MEGATRON, 292, BRIDGE("25.11")),
    Published(LLAMA_405B, replace(LAYOUT_405B, sequences=1536), MEGATRON, 328, BRIDGE("26.04.01")),
    Published(LLAMA_405B, LAYOUT_HERD, MEGATRON_BF16, 430 / HERD_TFLOP, HERD),
    Published(LLAMA_405B, replace(LAYOUT_HERD, gpus=16384), MEGATRON_BF16, 400 / HERD_TFLOP, HERD),
    Published(DEEPSEEK, LAYOUT_V3, MEGATRON, 1297, BRIDGE("25.09")),
    Published(DEEPSEEK, Layout(2048, 15360, 4096, pipeline=16, expert=64), MEGATRON, 14.8e12 / (2.664e6 * 3600), V3),
    Published(LLAMA_8B, Layout(8, 8, resharded=True), BF16, 6150, TORCHAO),
)


def published_rows(hardware: Hardware) -> list[dict[str, object]]:
    """The formulas beside each published number."""
    rows: list[dict[str, object]] = []
    for shapes, layout, precision, tokens, source in PUBLISHED:
        found = step(shapes, layout, precision, hardware)
        flop = model_flop(shapes, layout.sequence) / 1e12
        rows.append(
            {"model": shapes.name, "gpus": layout.gpus, "precision": precision.name}
            | {"layout": in_words(layout), "tokens_a_step": layout.sequences * layout.sequence}
            | {"published_tokens": f"{tokens:.0f}", "modelled_tokens": f"{found.tflops / flop:.0f}"}
            | {"published_tflops": f"{tokens * flop:.0f}", "modelled_tflops": f"{found.tflops:.0f}"}
            | {"modelled_by_published": f"{found.tflops / flop / tokens:.3f}", "published": source}
        )
    return rows


def in_words(layout: Layout) -> str:
    """Such as TP 8, PP 16."""
    kinds = {"TP": layout.tensor, "PP": layout.pipeline, "CP": layout.context, "EP": layout.expert}
    return ", ".join(f"{name} {ranks}" for name, ranks in kinds.items() if ranks > 1) or "FSDP"


def layouts(shapes: Shapes, gpus: int) -> Iterator[Layout]:
    """Ways to divide a step: two sequences a GPU, as long as that is no more than SEQUENCES."""
    expert_ranks = (8, 16, 32, 64) if any(w.split == "experts" for w in shapes.block) else (1,)
    ways = (1, 2, 4, 8), (1, 2, 4, 8, 16), expert_ranks, (0, 0.25, 0.5, 1)
    for tensor, pipeline, expert, recomputed in itertools.product(*ways):
        made = Layout(
            gpus,
            min(2 * gpus, SEQUENCES),
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            chunks=max(1, min(8, shapes.layers // pipeline)) if pipeline > 1 else 1,
            resharded=pipeline == 1,
            recomputed=recomputed,
        )
        data = gpus // (tensor * pipeline)
        if data and made.sequences % data == 0 and gpus // pipeline % expert == 0 and made.micro_batches >= pipeline:
            yield made


def fastest(shapes: Shapes, gpus: int, hardware: Hardware) -> Layout | None:
    """The layout with the shortest step in bf16 of those that fit into memory, where one does."""
    found = [
        (step(shapes, layout, BF16, hardware).seconds, place, layout)
        for place, layout in enumerate(layouts(shapes, gpus))
        if Stage(shapes, layout, BF16, hardware).state <= hardware.memory
    ]
    return min(found)[2] if found else None


def modelled_rows(hardware: Hardware) -> list[dict[str, object]]:
    """One row for each model, number of GPUs on which it fits, and precision, all on one layout."""
    rows = []
    for shapes, gpus in itertools.product((*LLAMA, DEEPSEEK), GPUS):
        layout = fastest(shapes, gpus, hardware)
        if layout is None:
            continue
        base = step(shapes, layout, BF16, hardware)
        for precision in LADDER:
            found = step(shapes, layout, precision, hardware)
            state = Stage(shapes, layout, precision, hardware).state
            rows.append(
                {"model": shapes.name, "gpus": gpus, "layout": in_words(layout), "precision": precision.name}
                | {"sequences": layout.sequences, "recomputed": layout.recomputed, "gb_a_gpu": f"{state / 1e9:.0f}"}
                | columns(found)
                | {"modelled_speedup": f"{base.seconds / found.seconds:.3f}"}
            )
    return rows


def columns(found: Step) -> dict[str, object]:
    """A step's columns."""
    parts = ("compute", "tensor", "expert", "bubble", "data", "optimizer", "seconds")
    seconds = {f"modelled_{part}_s": f"{getattr(found, part):.4f}" for part in parts}
    return seconds | {"modelled_tflops": f"{found.tflops:.0f}"}


def published_table() -> str:
    """The formulas beside what is published."""
    lines = []
    for row in read("communication_model_published"):
        numbers = [row[name] for name in ("published_tflops", "modelled_tflops")]
        lines.append(
            [
                f"{row['model']}, {row['gpus']}, {row['layout']}",
                *numbers,
                row["modelled_by_published"],
                row["published"],
            ]
        )
    return markdown(["model, GPUs, layout", "published TFLOP/s a GPU", "by the formulas", "ratio", "source"], lines)


def ladder_table() -> str:
    """TFLOP/s by what is in FP8."""
    lines: dict[str, list[str]] = {}
    for row in read("communication_model"):
        if row["gpus"] in map(str, SHOWN):
            line = lines.setdefault(f"{row['model']}, {row['gpus']}", [row["layout"]])
            line.append(row["modelled_tflops"])
    return markdown(["model, GPUs", "layout", *(p.name for p in LADDER)], ([key, *line] for key, line in lines.items()))


TABLES = {"published": published_table, "ladder": ladder_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks communication_model", description=__doc__)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    hardware = Hardware()
    print(Hardware.__doc__)
    published, modelled = published_rows(hardware), modelled_rows(hardware)
    for name, rows in (("communication_model_published", published), ("communication_model", modelled)):
        print(f"\n{name}\n{table(rows)}")
        if not options.no_write:
            print(f"written to {write_results(name, rows, origin={'source': ORIGIN, 'commit': commit()})}")
    return 0
