"""README's tables, made of the results that are committed, for ``report``."""

from __future__ import annotations

from benchmarks.common.pages import markdown, read, signed
from benchmarks.training.memory_kinds import KINDS
from benchmarks.training.quality_study import OWN, Gap, Runs

SIZE, RECIPES = "0.5M", ("dynamic", "delayed", "rowwise", "blockwise", "mx")
BESIDE = {"dynamic": "tensorwise", "rowwise": "rowwise_with_gw_hp"}  # torchao's recipes beside ours


def numbers_list() -> str:
    """Return a list of the main results: loss, memory, proof."""
    means = [gap.mean for gap in _gaps().values()]
    first, *_, last = (sum(int(row[kind]) for kind in KINDS) / 1e9 for row in read("memory_kinds"))
    emulated = read("emulated")
    right, architectures = (
        sum(row["right"] == "yes" for row in emulated),
        len({row["architecture"] for row in emulated}),
    )
    lines = (
        f"**{signed(min(means), 1)} to {signed(max(means), 1)} %**: a small GPT's final validation loss beside bf16's",
        f"**{last:.0f} GB instead of {first:.0f}** to train the blocks of Llama 3 8B, all in FP8, by tensors' sizes",
        f"**{right} of {len(emulated)}** kernels' results are the reference's, "
        f"run as PTX of {architectures} GPU architectures",
    )
    return "".join(f"- {line}.\n" for line in lines)


def recipes_table() -> str:
    """Return a table of final losses, and of steps by high precision's, eager and compiled, torchao's in brackets."""
    keys = ("width", "mode", "base", "variant")
    steps = {tuple(row[key] for key in keys): f"{float(row['by_base']):.2f}" for row in read("cpu_step")}
    groups, rows = list(dict.fromkeys(group[:3] for group in steps)), []
    for recipe, gap in _gaps().items():
        cells = [f"`{recipe}`", f"{signed(gap.mean)} ± {gap.error:.2f} %", str(len(gap.gaps))]
        for group in groups:
            theirs = steps.get((*group, f"torchao {BESIDE.get(recipe)}"))
            cells.append(steps[*group, f"octavo {recipe}"] + (f" ({theirs})" if theirs else ""))
        rows.append(cells)
    head = ("recipe", "loss above bf16's, mean ± standard error", "seeds")
    return markdown((*head, *(f"step {int(width):,} wide, {mode}, {base} = 1" for width, mode, base in groups)), rows)


def _gaps() -> dict[str, Gap]:
    runs = Runs(read("quality"))
    gaps = {recipe: runs.gap([recipe], SIZE, OWN) for recipe in RECIPES}
    return {recipe: gap for recipe, gap in gaps.items() if gap is not None}


TABLES = {"numbers": numbers_list, "recipes": recipes_table}
