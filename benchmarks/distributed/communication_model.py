"""Formulas: what FP8 products, gathers, reduction and pairs each bring on 8 to 16,384 H100.

Nothing is measured: octavo/cost/mesh has the formulas and names its assumptions. Step times that others have
published of the same models on the same layouts are printed beside the formulas', and nothing was fitted to them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import transformers

from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.pages import markdown, read
from benchmarks.distributed.fsdp_traffic import DEEPSEEK, LLAMA
from octavo.cost.mesh.plan import plan
from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.settings import MeshLayout, Precision
from octavo.cost.mesh.shapes import Shapes
from octavo.cost.mesh.step import RankStep, Step
from octavo.cost.rates import rates_of

TAKES = "20 seconds"
MEASURES = (
    "benchmarks/distributed/communication_model.py",
    "benchmarks/distributed/fsdp_traffic.py",
    "octavo/cost/mesh/settings.py",
    "octavo/cost/mesh/step.py",
    "octavo/cost/mesh/plan.py",
    "octavo/cost/mesh/messages.py",
    "octavo/cost/mesh/rank.py",
    "octavo/cost/rates.py",
    "octavo/cost/mesh/servers.py",
    "octavo/cost/mesh/shapes.py",
)

LLAMA_8B, LLAMA_70B, LLAMA_405B = LLAMA
LADDER = (  # each adds to the one before
    Precision("bf16", "bf16"),
    Precision("products"),
    Precision("+ gathers", gathers=True),
    Precision("+ reduction at one level", gathers=True, reduction="one all-to-all"),  # which the next does at two
    Precision("+ reduction", gathers=True, reduction="by server"),
    Precision("+ pairs", gathers=True, reduction="by server", pairs=True),
)
BF16 = LADDER[0]
# Transformer Engine's FP8: weights and tensor parallelism's inputs are gathered as codes, gradients reduced in bf16
MEGATRON = Precision("Transformer Engine", gathers=True, pairs=True, as_megatron=True)
MEGATRON_BF16 = replace(BF16, as_megatron=True)
GPUS = (8, 64, 256, 1024, 4096, 16384)
SHOWN = (8, 64, 1024, 16384)  # in the page
SEQUENCES = 2048  # of 8,192 tokens: Llama 3 405B's batch
ORIGIN = "formulas of octavo/cost/mesh, not measured"


class Published(NamedTuple):
    """A training step that others have timed: ``tokens`` a second and GPU; GiB of a GPU, where they say it.

    ``shapes``: TRACED, to take those of ``octavo plan``, with these ``kernels``. ``bounds``: within which the formulas'
    rate by the published one must lie; None: what the formulas leave out is known, and more.
    """

    shapes: Shapes
    layout: MeshLayout
    precision: Precision
    tokens: float
    source: str
    bounds: tuple[float, float] | None
    gib: float | None = None
    hardware: Hardware = Hardware()
    kernels: str = "compiled"  # as Megatron's are taken, which are fused by hand

    @property
    def stage(self) -> RankStep:
        """The stage that the formulas compute for the published step."""
        shapes = self.shapes
        if shapes is TRACED:
            shapes = replace(
                traced()[self.kernels, self.precision.name], saved_bytes=None
            )  # nothing between products is saved
        return RankStep(shapes, self.layout, self.precision, self.hardware)


@functools.cache
def traced() -> dict[tuple[str, str], Shapes]:
    """Return Llama 3 8B as ``octavo plan`` reads it from transformers, by kernels and recipe."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    asked = {"gpus": 8, "mesh": "fsdp=8", "sequences": 8, "context": 8192, "micro_batches": 1, "recompute": 0.0}
    steps = plan(model, rates_of("H100"), fuse=False, algorithm="adamw", checkpoint_in_fp8=False, **asked).steps
    return {(kernels, stage.precision.name): stage.model_shapes for kernels, each in steps.items() for stage in each}


TRACED = replace(LLAMA_8B, name="8B ")
# Dense models: 15 %, as the same layout of the same library has given 292 and 328 tokens/s in releases half a year
# apart, and the rates of products differ by as much with a GPU's power. Mixtures of experts: the formulas know neither
# the host, nor unequal stages, nor unequal experts, so they are an upper bound.
HELD, UPPER = (0.85, 1.15), (0.95, 1.5)
BRIDGE = "Megatron-Bridge {}".format  # its performance summary of that release, DGX-H100, FP8 with current scaling
HERD = "Llama 3, table 4"  # arXiv 2407.21783
HERD_TFLOP = LLAMA_405B.flop(8192) / 1e12  # a token's: the paper gives TFLOP/s
V3 = "DeepSeek-V3, table 1"  # arXiv 2412.19437: 14.8T tokens in 2.664M hours of H800
TORCHAO = "torchao's README"  # torch.compile and selective recomputation, which the formulas do not know
LAYOUT_8B = MeshLayout(8, 128, recomputed=5 / 32)
LAYOUT_70B = MeshLayout(64, 128, tensor=4, pipeline=8, chunks=5)
LAYOUT_405B = MeshLayout(1024, 512, tensor=8, pipeline=8, context=2, chunks=8)
LAYOUT_HERD = MeshLayout(8192, SEQUENCES, tensor=8, pipeline=16, chunks=8)
LAYOUT_V3_2048 = MeshLayout(2048, 15360, 4096, pipeline=16, expert=64)
LAYOUT_V3 = MeshLayout(1024, 8192, 4096, tensor=2, pipeline=8, expert=64, chunks=4)
PUBLISHED = (
    Published(LLAMA_8B, LAYOUT_8B, MEGATRON, 14451, BRIDGE("25.11"), HELD),
    Published(LLAMA_70B, LAYOUT_70B, MEGATRON, 1602, BRIDGE("25.11"), HELD),
    Published(LLAMA_70B, replace(LAYOUT_70B, sequences=256), MEGATRON, 1639, BRIDGE("26.02.01"), HELD),
    Published(LLAMA_405B, LAYOUT_405B, MEGATRON, 292, BRIDGE("25.11"), HELD),
    Published(LLAMA_405B, replace(LAYOUT_405B, sequences=1536), MEGATRON, 328, BRIDGE("26.04.01"), HELD),
    Published(LLAMA_405B, LAYOUT_HERD, MEGATRON_BF16, 430 / HERD_TFLOP, HERD, HELD),
    Published(LLAMA_405B, replace(LAYOUT_HERD, gpus=16384), MEGATRON_BF16, 400 / HERD_TFLOP, HERD, HELD),
    Published(DEEPSEEK, LAYOUT_V3, MEGATRON, 1297, BRIDGE("25.09"), UPPER),
    Published(DEEPSEEK, LAYOUT_V3_2048, MEGATRON, 14.8e12 / (2.664e6 * 3600), V3, UPPER),
    Published(LLAMA_8B, MeshLayout(8, 8), BF16, 6150, TORCHAO, None),
)
# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 4, but for AsyncTP, unknown here.
# H100 of 96 GB at 2.4 TB/s and 500 W: the memory rate is theirs, what power takes of products is not published, and so
# the formulas are an upper bound. torch's attention was FlashAttention-2, at 35 % of 989 TFLOP/s (arXiv 2407.08608,
# abstract). Selective recomputation is of every second product and of all between them: taken as half of the layers'.
_H100, _FLASH_2 = Hardware().rates, 0.35 * 989e12
SLOWER = Hardware(  # 3.35 TB/s: the datasheet's of 80 GB
    replace(_H100, copy=_H100.copy * 2.4 / 3.35),
    attention_forward=_FLASH_2,
    attention_backward=0.8 * _FLASH_2,
    memory=96e9,
)
TITAN_FP8 = Precision("dynamic", gathers=True, pairs=True)


def titan(
    layout: MeshLayout,
    precision: Precision,
    tokens: float,
    gib: float,
    kernels: str = "compiled",
    shapes: Shapes = TRACED,
) -> Published:
    return Published(shapes, layout, precision, tokens, "torchtitan, 12/2024", None, gib, SLOWER, kernels)


TITAN = (
    *(
        titan(MeshLayout(gpus, 2 * gpus, recomputed=0.5, micro_batch_size=2), *row)
        for gpus, rows in (
            (8, ((BF16, 5762, 82.4, "eager"), (BF16, 6667, 77.0), (TITAN_FP8, 8532, 76.8))),
            (128, ((BF16, 5605, 67.0, "eager"), (BF16, 6514, 62.0), (TITAN_FP8, 8380, 61.8))),
        )
        for row in rows
    ),
    *(
        titan(MeshLayout(8, 8 // ranks, 32768 * ranks, context=ranks, recomputed=1), TITAN_FP8, tokens, gib)
        for ranks, tokens, gib in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5))
    ),
    titan(MeshLayout(256, 512, tensor=8, micro_batch_size=16, recomputed=1), TITAN_FP8, 829, 71.9, shapes=LLAMA_70B),
)


def published_rows() -> list[dict[str, object]]:
    """Return rows of the formulas' results beside each published number."""
    rows: list[dict[str, object]] = []
    for each in (*PUBLISHED, *TITAN):
        shapes, layout, precision, tokens, source = each[:5]
        step, size = each.stage.step, each.stage.bytes_needed / (1 << 30)
        flop = shapes.flop(layout.sequence_length) / 1e12
        rows.append(
            {"model": shapes.name.strip(), "gpus": layout.gpus, "precision": precision.name, "kernels": each.kernels}
            | {"layout": in_words(layout), "tokens_a_step": layout.sequences * layout.sequence_length}
            | {"published_tokens": f"{tokens:.0f}", "modelled_tokens": f"{step.tflops / flop:.0f}"}
            | {"published_tflops": f"{tokens * flop:.0f}", "modelled_tflops": f"{step.tflops:.0f}"}
            | {"modelled_by_published": f"{step.tflops / flop / tokens:.3f}"}
            | {"published_gib": each.gib or "", "modelled_gib": f"{size:.1f}" if each.gib else "", "published": source}
        )
    return rows


def in_words(layout: MeshLayout) -> str:
    """Return a layout in words, such as TP 8, PP 16."""
    kinds = {"TP": layout.tensor, "PP": layout.pipeline, "CP": layout.context, "EP": layout.expert}
    return ", ".join(f"{name} {ranks}" for name, ranks in kinds.items() if ranks > 1) or "FSDP"


def layouts(shapes: Shapes, gpus: int) -> Iterator[MeshLayout]:
    """Yield ways to divide a step: two sequences a GPU, as long as that is no more than SEQUENCES."""
    expert_ranks = (8, 16, 32, 64) if any(w.split == "experts" for w in shapes.block) else (1,)
    ways = (1, 2, 4, 8), (1, 2, 4, 8, 16), expert_ranks, (0, 0.25, 0.5, 1)
    for tensor, pipeline, expert, recomputed in itertools.product(*ways):
        layout = MeshLayout(
            gpus,
            min(2 * gpus, SEQUENCES),
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            chunks=max(1, min(8, shapes.layers // pipeline)) if pipeline > 1 else 1,
            recomputed=recomputed,
        )
        data = gpus // (tensor * pipeline)
        if (
            data
            and layout.sequences % data == 0
            and gpus // pipeline % expert == 0
            and layout.micro_batches >= pipeline
        ):
            yield layout


def fastest(shapes: Shapes, gpus: int, hardware: Hardware) -> MeshLayout | None:
    """Return the layout with the shortest step in bf16 of those that fit into memory; None if none fits."""
    candidates = [
        (RankStep(shapes, layout, BF16, hardware).step.seconds, place, layout)
        for place, layout in enumerate(layouts(shapes, gpus))
        if RankStep(shapes, layout, BF16, hardware).bytes_needed <= hardware.memory
    ]
    return min(candidates)[2] if candidates else None


def modelled_rows(hardware: Hardware) -> list[dict[str, object]]:
    """Return one row for each model, number of GPUs on which it fits, and precision, all on one layout."""
    rows = []
    for shapes, gpus in itertools.product((*LLAMA, DEEPSEEK), GPUS):
        layout = fastest(shapes, gpus, hardware)
        if layout is None:
            continue
        base = RankStep(shapes, layout, BF16, hardware).step
        for precision in LADDER:
            step = RankStep(shapes, layout, precision, hardware).step
            state = RankStep(shapes, layout, precision, hardware).bytes_needed
            rows.append(
                {"model": shapes.name, "gpus": gpus, "layout": in_words(layout), "precision": precision.name}
                | {"sequences": layout.sequences, "recomputed": layout.recomputed, "gb_a_gpu": f"{state / 1e9:.0f}"}
                | columns(step)
                | {"modelled_speedup": f"{base.seconds / step.seconds:.3f}"}
            )
    return rows


def columns(step: Step) -> dict[str, object]:
    """Return a step's columns."""
    waits = {kind: wait.exposed for kind, wait in step.waits.items()}
    parts = {
        "compute": sum(step.seconds_by_kind.values()),
        "tensor": waits["tensor"],
        "expert": waits["expert"],
        "bubble": step.bubble,
    }
    parts |= {"data": waits["fsdp"], "optimizer": step.optimizer, "seconds": step.seconds}
    seconds = {f"modelled_{part}_s": f"{value:.4f}" for part, value in parts.items()}
    return seconds | {"modelled_tflops": f"{step.tflops:.0f}"}


def published_table() -> str:
    """Return a table of the formulas' results beside published ones."""
    lines = []
    for row in read("communication_model_published"):
        error = float(row["modelled_by_published"]) - 1
        sizes = [row["published_gib"], row["modelled_gib"]]
        of_size = f"{float(sizes[1]) / float(sizes[0]) - 1:+.0%}" if sizes[0] else ""
        what = f"{row['model']}, {row['gpus']}, {row['layout']}"
        numbers = [row["published_tokens"], row["modelled_tokens"], f"{error:+.0%}", *sizes, of_size]
        lines.append([what, f"{row['precision']}, {row['kernels']}", *numbers, row["published"]])
    header = ["model, GPUs, layout", "precision", "published tokens/s a GPU", "planned", "error"]
    return markdown([*header, "published GiB", "planned", "error", "source"], lines)


def ladder_table() -> str:
    """Return a table of TFLOP/s by the parts of a step that are in FP8."""
    lines: dict[str, list[str]] = {}
    for row in read("communication_model"):
        if row["gpus"] in map(str, SHOWN):
            line = lines.setdefault(f"{row['model']}, {row['gpus']}", [row["layout"]])
            line.append(row["modelled_tflops"])
    return markdown(["model, GPUs", "layout", *(p.name for p in LADDER)], ([key, *line] for key, line in lines.items()))


TABLES = {"ladder": ladder_table}
PLAN_TABLES = {"published": published_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks communication_model", description=__doc__)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    hardware = Hardware()
    print(Hardware.__doc__)
    published, modelled = published_rows(), modelled_rows(hardware)
    for name, rows in (("communication_model_published", published), ("communication_model", modelled)):
        print(f"\n{name}\n{table(rows)}")
        if not options.no_write:
            print(f"written to {write_results(name, rows, origin={'source': ORIGIN, 'commit': commit()})}")
    return 0
