"""Bytes that FSDP2 sends in a training step, counted, and compared with the formulas.

A small GPT on gloo processes of this machine, each block and the model sharded; every collective's bytes, and those
that go over a link inside a server or between two. The formulas (fsdp_traffic.py) must give the same bytes; what they
come to on many GPUs is communication_model.py's. A message's scales, and the host's time for it, are measured beside.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import markdown, read
from benchmarks.distributed.communication_ranks import on_ranks
from benchmarks.distributed.fsdp_traffic import RECIPES, Shapes, Traffic, traffic, transformer
from octavo import E4M3, kernels, recipes
from octavo.distributed import Fp8Reduction
from octavo.nn import TransformerBlock
from octavo.tensor.collectives import pack_message, unpack_message
from octavo.train.config import VOCABULARY, ModelConfig
from octavo.train.model import GPT, HEAD, next_byte_loss
from tests.support.byte_counter import BETWEEN, GATHER, INSIDE, OTHER, REDUCE, SCATTER, ByteCounter

TAKES = "2 minutes"
MEASURES = (
    "octavo/weights/gathered.py",
    "octavo/weights/ways.py",
    "octavo/weights/shard_cast.py",
    "octavo/distributed/fp8_reduce.py",
    "octavo/tensor/collectives.py",
)

WIDTH, LAYERS, HIDDEN, CONTEXT = 512, 2, 1024, 16  # on 2 and 4 ranks every shard is of whole 128x128 blocks
STEPS = 3
AIM = 0.52  # of bf16's bytes, of weights gathered in FP8
OF_TWO_PAIRS = 1.035
MASTERS = {"bfloat16": 2, "float32": 4}  # bytes of an element
AMAX_COLLECTIVES = {"dynamic": 1, "delayed": 1, "rowwise": 1, "blockwise": 0, "mx": 0}
LINKS, SERVERS = (INSIDE, BETWEEN), "aabb"  # of ranks 0 to 3
FLAT, REPLICAS = "FSDP", "HSDP"  # over both servers; a replica each
PLAIN, ONE_LEVEL, TWO_LEVELS = "in bf16", "FP8, one level", "FP8, two levels"


def sharded(
    mesh: Any, recipe: str, width: int, hidden: int, layers: int, dtype: torch.dtype = torch.bfloat16, ways: str = PLAIN
) -> nn.Module:
    """Return a GPT of parameters of this dtype, its blocks converted, and sharded; ``ways``: of its gradients."""
    from torch.distributed.fsdp import fully_shard

    model = GPT(ModelConfig(width=width, layers=layers, heads=4, context=CONTEXT))
    model.blocks = nn.ModuleList(
        TransformerBlock(width, hidden, 4, recipe=recipes.high_precision()) for _ in range(layers)
    )
    model.to(dtype)
    if recipe != "bf16":
        octavo.convert(model, getattr(recipes, recipe)(), select=lambda module, name: name != HEAD)
    scatter = Fp8Reduction(ranks_per_server=1 if ways == ONE_LEVEL else 2)
    shard_mesh = mesh["shard"] if ways != PLAIN and mesh.ndim == 2 else mesh
    for part in (*model.blocks, model):
        fully_shard(part, mesh=shard_mesh)
        if ways != PLAIN:
            part.set_custom_reduce_scatter(scatter)
        if shard_mesh is not mesh:
            part.set_all_reduce_hook(Fp8Reduction(group=mesh["replicate"].get_group(), ranks_per_server=1).all_reduce)
    return model


def count(mesh: Any, width: int, hidden: int, layers: int) -> dict[tuple[str, str], list[dict[str, int]]]:
    """Return calls and bytes of each of some steps but the first, in which ranks compare their settings."""
    tokens = torch.randint(0, VOCABULARY, (1, CONTEXT))
    counts: dict[tuple[str, str], list[dict[str, int]]] = {}
    for recipe, masters in itertools.product(RECIPES, MASTERS):
        model = sharded(mesh, recipe, width, hidden, layers, getattr(torch, masters))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        steps = counts[recipe, masters] = []
        for _ in range(STEPS):
            with ByteCounter() as counter:
                next_byte_loss(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
            steps.append(as_counts(counter.calls, counter.bytes))
        del steps[0]
    return counts


def count_links(mesh: Any, width: int, hidden: int, layers: int) -> list[dict[str, object]]:
    """Return the bytes that this rank sends in a step, by collective and link: a row for each of ``_runs``."""
    import torch.distributed as dist

    pair = dist.DeviceMesh("cpu", torch.arange(mesh.size()).view(2, -1), mesh_dim_names=("replicate", "shard"))
    tokens, rows = torch.randint(0, VOCABULARY, (1, CONTEXT)), []
    for layout, recipe, dtype, ways in _runs():
        model = sharded(pair if layout == REPLICAS else mesh, recipe, width, hidden, layers, dtype, ways)
        for _ in range(2):  # in the first step ranks compare their settings
            with ByteCounter(SERVERS) as counter:
                next_byte_loss(model(tokens), tokens).backward()
            model.zero_grad()
        row = {"layout": layout, "recipe": recipe, "masters": str(dtype).removeprefix("torch."), "gradients": ways}
        rows.append(row | {f"{kind}_{link}": counter.by_kind[kind, link] for kind in KINDS for link in LINKS})
    return rows


KINDS = (GATHER, SCATTER, REDUCE, OTHER)  # the last is all-to-alls


def _runs() -> list[tuple[str, str, torch.dtype, str]]:
    """Return (layout, recipe, masters, how gradients are reduced) of each run."""
    weights = itertools.product((FLAT, REPLICAS), RECIPES, (torch.bfloat16, torch.float32))
    gradients = ((FLAT, ONE_LEVEL), (FLAT, TWO_LEVELS), (REPLICAS, TWO_LEVELS))
    return [(*run, PLAIN) for run in weights] + [(layout, "bf16", torch.bfloat16, ways) for layout, ways in gradients]


def links_rows(hidden: int, layers: int) -> list[dict[str, object]]:
    """Return the bytes that all four ranks send: the sum of their ``count_links``."""
    every = on_ranks(count_links, len(SERVERS), WIDTH, hidden, layers)
    return [
        {
            name: value if isinstance(value, str) else sum(row[name] for row in of_ranks)
            for name, value in of_ranks[0].items()
        }
        for of_ranks in zip(*every, strict=True)
    ]


def wire_rows() -> list[dict[str, object]]:
    """Return rows of messages of 4096 x 1024 codes: bytes of scales, and the host's time to make and read one."""
    x, rows = torch.randn(4096, 1024), []
    for name, tile, power_of_two in (
        ("a scale a row", (1, -1), False),
        ("1 x 128", (1, 128), False),
        ("1 x 128, powers of two", (1, 128), True),
        ("1 x 32, powers of two", (1, 32), True),
    ):
        q, _, scale_inv, *_ = kernels.cast(x, None, 0, E4M3.dtype, tile, power_of_two, 0)
        message, codes = pack_message(q, scale_inv, power_of_two), q.view(torch.uint8)
        unpacked = unpack_message(message, x.shape[1], q.dtype, power_of_two, tile)
        assert unpacked[1].dtype == scale_inv.dtype and torch.equal(unpacked[1].float(), scale_inv.float())
        assert torch.equal(unpacked[0].view(torch.uint8), codes)
        rows.append(
            {"scales": name, "codes": codes.numel(), "message": message.numel()}
            | {"bytes_more": f"{message.numel() / codes.numel() - 1:.4f}"}
            | {"pack_us": _microseconds(lambda: pack_message(q, scale_inv, power_of_two))}  # noqa: B023
            | {"unpack_us": _microseconds(lambda: unpack_message(message, x.shape[1], q.dtype, power_of_two, tile))}  # noqa: B023
            | {"copy_us": _microseconds(codes.clone)}
        )
    return rows


def _microseconds(run: Callable[[], Any], times: int = 50) -> int:
    """Return the microseconds of the fastest of some runs, as other processes share this machine."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return round(1e6 * min(seconds))


def as_counts(calls: Any, bytes: Any) -> dict[str, int]:
    """Return the columns of one step."""
    return {
        f"{kind}_{what}": numbers[kind]
        for kind in (GATHER, SCATTER, REDUCE)
        for what, numbers in (("calls", calls), ("bytes", bytes))
    }


def modelled_counts(moved: Traffic) -> dict[str, int]:
    """Return the same columns by the formulas."""
    return as_counts(
        {GATHER: moved.gathers, SCATTER: moved.scatters, REDUCE: moved.reduces},
        {GATHER: moved.gathered, SCATTER: moved.scattered, REDUCE: moved.reduced},
    )


def measured_rows(ranks: int, shapes: Shapes, hidden: int) -> tuple[list[dict[str, object]], list[str]]:
    """Return a row for each recipe, and a line for each count that the formulas don't give."""
    rows, wrong, plain = [], [], {}
    counted = on_ranks(count, ranks, shapes.width, hidden, shapes.layers)
    for recipe, masters in itertools.product(RECIPES, MASTERS):
        every = [step for rank in counted for step in rank[recipe, masters]]
        counts, moved = every[-1], traffic(shapes, recipe, ranks, MASTERS[masters], MASTERS[masters])
        wrong += [
            f"{recipe}, {ranks} ranks: a step counts {other}, another {counts}" for other in every if other != counts
        ]
        if counts != modelled_counts(moved):
            wrong.append(f"{recipe}, {ranks} ranks: counted {counts}, by formula {modelled_counts(moved)}")
        weights = counts[f"{GATHER}_bytes"] - (moved.gathered - moved.weights)
        plain = plain or {"all": counts[f"{GATHER}_bytes"], "weights": weights}
        share = weights / plain["weights"]
        aim = OF_TWO_PAIRS if recipe in ("rowwise", "mx") else AIM
        if recipe in AMAX_COLLECTIVES and (share > aim or counts[f"{REDUCE}_calls"] != AMAX_COLLECTIVES[recipe]):
            wrong.append(
                f"{recipe}, {ranks} ranks: {share:.4f} of bf16's bytes, {counts[f'{REDUCE}_calls']} all-reduces"
            )
        rows.append(
            {"ranks": ranks, "recipe": recipe, "masters": masters}
            | counts
            | {"weight_bytes": weights, "weights_by_bf16": f"{share:.4f}"}
            | {"all_gathered_by_bf16": f"{counts[f'{GATHER}_bytes'] / plain['all']:.4f}"}
        )
    return rows, wrong


# --- the page's tables


def _sent(row: dict[str, str], kinds: Sequence[str]) -> dict[str, int]:
    """Return the bytes over each link."""
    return {link: sum(int(row[f"{kind}_{link}"]) for kind in kinds) for link in LINKS}


def _links() -> dict[tuple[str, ...], dict[str, str]]:
    names = "layout", "recipe", "masters", "gradients"
    return {tuple(row[name] for name in names): row for row in read("communication_links")}


def weights_table() -> str:
    """Return a table of gathers and shared amax: MiB inside servers and between them, with shares of bf16's."""
    rows, bytes_by_run = [], _links()
    for recipe, masters in itertools.product(RECIPES, MASTERS):
        cells = [f"`{recipe}`" if recipe != "bf16" else "without octavo", masters]
        for layout in (FLAT, REPLICAS):
            kinds = (GATHER, REDUCE)
            gradients = _sent(bytes_by_run[layout, "bf16", masters, PLAIN], (REDUCE,))  # of replicas
            weights_sent = {
                k: v - gradients[k] for k, v in _sent(bytes_by_run[layout, recipe, masters, PLAIN], kinds).items()
            }
            in_bf16 = _sent(bytes_by_run[layout, "bf16", "bfloat16", PLAIN], (GATHER,))
            cells += [_cell(weights_sent[link], in_bf16[link]) for link in LINKS]
        rows.append(cells)
    heads = [
        f"{layout}, {link} {place}" for layout in (FLAT, REPLICAS) for link, place in zip(LINKS, PLACES, strict=True)
    ]
    return markdown(["recipe", "masters", *heads], rows)


def gradients_table() -> str:
    """Return a table of gradients: MiB inside servers and between them, with shares of plain ones'."""
    rows, bytes_by_run = [], _links()
    for layout, ways in (
        (FLAT, PLAIN),
        (FLAT, ONE_LEVEL),
        (FLAT, TWO_LEVELS),
        (REPLICAS, PLAIN),
        (REPLICAS, TWO_LEVELS),
    ):
        weights = _sent(bytes_by_run[layout, "bf16", "bfloat16", PLAIN], (GATHER,))
        sent, plain = (
            {k: v - weights[k] for k, v in _sent(bytes_by_run[layout, "bf16", "bfloat16", way], KINDS).items()}
            for way in (ways, PLAIN)
        )
        rows.append([layout, ways, *(_cell(sent[link], plain[link]) for link in LINKS)])
    return markdown(
        ["layout", "gradients", *(f"{link} {place}" for link, place in zip(LINKS, PLACES, strict=True))], rows
    )


PLACES = "servers", "them"


def _cell(sent: int, plain: int) -> str:
    return f"{sent / 2**20:.2f} ({sent / plain:.3f})" if plain else "0" if not sent else f"{sent / 2**20:.2f}"


def wire_table() -> str:
    """Return a table of a message's bytes and the host's time for it."""
    rows = [
        [
            row["scales"],
            f"{float(row['bytes_more']):.2%}",
            *(row[f"{what}_us"] for what in ("pack", "unpack", "copy")),
        ]
        for row in read("communication_wire")
    ]
    return markdown(["scales", "bytes more", "µs to pack", "to unpack", "to copy the codes"], rows)


TABLES = {"weights": weights_table, "gradients": gradients_table, "wire": wire_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks communication", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # as each process does
    shapes = transformer("measured", WIDTH, HIDDEN, options.layers, WIDTH, VOCABULARY)
    rows, wrong = [], []
    for ranks in options.ranks:
        more, failures = measured_rows(ranks, shapes, HIDDEN)
        rows, wrong = rows + more, wrong + failures
    print(f"bytes and calls of a step, {shapes.parameters:,} bf16 parameters, gloo")
    print(table(rows))
    print("\n".join(f"WRONG: {line}" for line in wrong) or "ok: the formulas give every count exactly")
    links, wires = links_rows(HIDDEN, options.layers), wire_rows()
    print(f"\nbytes of a step over links, two servers of two ranks\n{table(links)}\n\na message\n{table(wires)}")
    if not options.no_write:
        for name, new_rows in (("communication", rows), ("communication_links", links), ("communication_wire", wires)):
            print(f"written to {write_results(name, new_rows)}")
    return int(bool(wrong))
