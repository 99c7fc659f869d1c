"""README's tables, made of the results that are committed, for ``report``."""

from __future__ import annotations

from benchmarks.common.pages import markdown, read, signed
from benchmarks.training.memory_kinds import KINDS
from benchmarks.training.quality_study import OWN, Gap, Runs

SIZE, RECIPES = "0.5M", ("dynamic", "delayed", "rowwise", "blockwise", "mx")
BESIDE_BF16 = ("bf16", "octavo delayed", "torchao tensorwise")  # columns of the H100's table
BESIDE = {"dynamic": "tensorwise", "rowwise": "rowwise_with_gw_hp"}  # torchao's recipes beside ours


def h100_table() -> str:
    """Return a table of times on the H100 beside bf16: linear layers, and a Llama's step with its memory."""
    layers = {row["variant"]: float(row["ms"]) for row in read("layer") if row["shape"] == "4 layers"}
    steps = {row["variant"]: row for row in read("llama_step") if row["mode"] == "eager"}

    def step(variant: str) -> str:
        return f"**{float(steps[variant]['by_bf16']):.2f}** ({float(steps[variant]['ms']):.0f} ms)"

    def layer(variant: str) -> str:
        return f"**{layers['bf16'] / layers[variant]:.2f}** ({layers[variant]:.1f} ms)"

    def peak(variant: str) -> str:
        return f"{float(steps[variant]['peak_gib']):.1f} GiB"

    rows = [
        ["layers, eager", *map(layer, BESIDE_BF16)],
        ["layers, compiled", *(layer(f"{name} compiled") for name in BESIDE_BF16)],
        ["a step, eager", *map(step, BESIDE_BF16)],
        ["its memory", *map(peak, BESIDE_BF16)],
    ]
    stored = "octavo fp8 state"
    about = (
        "Layers: forward and backward of the four of a 4,096-wide block, 15,872 tokens. Step: of a Llama of 1.53 "
        f"billion parameters, 16,384 tokens, its head in bf16; with weights and moments in FP8 too, {step(stored)} and "
        f"{peak(stored)}. Octavo's recipe is `delayed()`. torchao is made to be compiled, but there was no time to "
        "compile the step. Times of equal work differ by up to 12 % on that machine. "
        f"[All rows](docs/kernels.md#measured-on-an-h100), commit {steps['bf16']['commit']}.\n"
    )
    return markdown(["", "bf16", "octavo", "torchao"], rows) + "\n" + about


def numbers_list() -> str:
    """Return a list of the main results besides speed: memory, loss, kernels."""
    means = [gap.mean for gap in _gaps().values()]
    first, *_, last = (sum(int(row[kind]) for kind in KINDS) / 1e9 for row in read("memory_kinds"))
    emulated = read("emulated")
    right = sum(row["right"] == "yes" for row in emulated)
    architectures = len({row["architecture"] for row in emulated})
    every = "All" if right == len(emulated) else f"{right} of"
    lines = (
        f"**Memory: {last:.0f} GB instead of {first:.0f}** for the blocks of Llama 3 8B, with weights, masters and "
        "moments in 8 bits and updates in backward; counted, not measured",
        f"**Loss: {signed(min(means), 1)} to {signed(max(means), 1)} %** beside bf16's, for a small GPT",
        f"**Kernels: {every.lower()} {len(emulated)} cases**, on {architectures} GPU architectures, give the PyTorch "
        "reference's result in an emulator of PTX",
    )
    return "".join(f"- {line}.\n" for line in lines)


def since_list() -> str:
    """Return what is predicted of today's code for the Llama's step that was timed."""
    rows = {row["variant"]: row for row in read("planned_step")}
    plain = float(rows["bf16"]["now_ms"])

    def times(variant: str) -> str:
        ms = float(rows[variant]["now_ms"])
        return f"{ms:.0f} ms, {plain / ms:.2f} times plain bf16's speed"

    return (
        f"[Predicted](docs/plan.md#everything-on) for today's code, **not measured**: the same step takes "
        f"{times('octavo delayed')}; with `fuse=True` {times('octavo delayed, fused')}, where bf16 with such fusions "
        f"takes {times('bf16, fused')}.\n"
    )


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


TABLES = {"h100": h100_table, "numbers": numbers_list, "since": since_list, "recipes": recipes_table}
