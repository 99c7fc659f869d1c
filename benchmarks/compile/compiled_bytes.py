"""Bytes that a Llama moves besides products and attention: eager and compiled, with convert(fuse=True) and without.

Counted on fake tensors for an H100, see scheduled.py: a block of the Llama of llama_step, of 16,384 tokens, under
``delayed``, and the loss of its logits. Written to results/compiled_bytes.csv.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import octavo
from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.pages import Row, markdown, read

TAKES = "two minutes"
MEASURES = ("octavo/nn", "octavo/autograd", "octavo/kernels/signatures.py", "benchmarks/compile")
SOURCE = "torch._inductor's scheduler for an H100, not measured"

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 16}
BATCH, CONTEXT, VOCABULARY = 8, 2048, 128256
BATCH_OF_LOSS = 2  # Inductor counts at most 10^9 numbers of a tensor


class Form(NamedTuple):
    """A way to compute a model: whether it is converted, with fuse=True, and compiled."""

    converted: bool
    fuse: bool
    compiled: bool


FUSED = "fuse=True, compiled"
FORMS = {
    "fuse=True, eager": Form(True, True, False),
    FUSED: Form(True, True, True),
    "converted, compiled": Form(True, False, True),
    "bf16, compiled": Form(False, False, True),
}
NORMS, ROTARY, CASTS, SWIGLU = "norms, residual", "rotary positions", "attention's casts", "SwiGLU, its layers' casts"
PARTS, LOSS = (NORMS, ROTARY, CASTS, SWIGLU), "loss of 4,096 tokens"
Parts = list[tuple[str, int]]  # each launch's part and bytes


def part_of(launch: Any) -> str | None:
    """Return which part of a block a launch computes, the first if several; None for products and attention."""

    def computes(*names: str) -> bool:
        return any(op.startswith(names) for op in launch.ops)

    turns = computes("aten.mul.", "octavo.rotary")
    if not turns and not computes("aten.add.", "octavo.cast", "octavo.norm") and computes(*APART):
        return None
    modules = [name.partition(".block.")[2] for name in launch.modules]
    if not modules or any(not name or name.endswith("layernorm") for name in modules):
        return NORMS
    if any(name.startswith("mlp") for name in modules):
        return SWIGLU
    return ROTARY if turns else CASTS


APART = ("octavo.matmul", "aten.mm", "aten._scaled_dot_product")


def block_launches(form: Form) -> Iterator[tuple[str, Parts]]:
    """Yield (direction, [(part, bytes)]) of a block's launches besides products and attention."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    from benchmarks.compile.scheduled import launches
    from octavo.nn.saved import twin_of

    config = LlamaConfig(**SIZES, attn_implementation="sdpa")
    model = nn.Module()
    with torch.device("meta"):
        model.block = LlamaDecoderLayer(config, 0).bfloat16().train()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = twin_of(model, mode)
        if form.converted:
            octavo.convert(model, octavo.recipes.delayed(), select=lambda module, name: True, fuse=form.fuse)
        x = torch.randn(BATCH, CONTEXT, SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(CONTEXT)[None])

        def step(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return model.block(x, position_embeddings=(cos, sin))  # type: ignore[operator]

        both = launches(step, x, cos, sin, by_inductor=form.compiled)
    for direction, launched in zip(("forward", "backward"), both, strict=True):
        parts = [(part_of(launch), launch.bytes) for launch in launched]
        yield direction, [(part, size) for part, size in parts if part is not None]


def loss_launches(form: Form) -> Iterator[tuple[str, Parts]]:
    """Yield (direction, [(part, bytes)]) of the loss of a causal language model, transformers' or octavo's."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.loss.loss_utils import ForCausalLMLoss

    from benchmarks.compile.scheduled import launches
    from octavo.nn.loss import causal_lm_loss

    loss: Any = causal_lm_loss if form.fuse else ForCausalLMLoss
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.randn(BATCH_OF_LOSS, CONTEXT, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(BATCH_OF_LOSS, CONTEXT, dtype=torch.int64)
        both = launches(
            lambda logits, labels: loss(logits, labels, VOCABULARY), logits, labels, by_inductor=form.compiled
        )
    for direction, launched in zip(("forward", "backward"), both, strict=True):
        yield direction, [(LOSS, launch.bytes) for launch in launched]


def rows_of(name: str, *counted: Callable[[Form], Iterable[tuple[str, Parts]]]) -> list[Row]:
    """Return a form's bytes and launches, a row for each part and direction, of a block and the loss or ``counted``."""
    from octavo.autograd import casts
    from octavo.kernels import layouts

    rows = []
    with contextlib.ExitStack() as stack:
        for module in (casts, layouts):
            stack.enter_context(mock.patch.object(module, "needs_transposed_codes", lambda device: True))  # Hopper's
        for count in counted or (block_launches, loss_launches):
            for direction, parts in count(FORMS[name]):
                for part in dict(parts):
                    sizes = [size for other, size in parts if other == part]
                    row = {"form": name, "part": part, "direction": direction}
                    rows.append(row | {"gb": f"{1e-9 * sum(sizes):.3f}", "launches": str(len(sizes))})
    return rows


def gigabytes(rows: list[Row], form: str, *parts: str, direction: str = "") -> float:
    """Return the sum over a form's rows of these parts, of one direction or both."""
    chosen = (row for row in rows if row["form"] == form and row["part"] in parts)
    return sum(float(row["gb"]) for row in chosen if direction in ("", row["direction"]))


def bytes_table() -> str:
    """Return the table of docs/compile.md: GB forward + backward of each part, by form."""
    rows = read("compiled_bytes")

    def cell(form: str, *parts: str) -> str:
        return " + ".join(f"{gigabytes(rows, form, *parts, direction=one):.2f}" for one in ("forward", "backward"))

    lines = [[part, *(cell(form, part) for form in FORMS)] for part in PARTS]
    lines.append(["a block", *(f"{gigabytes(rows, form, *PARTS):.2f}" for form in FORMS)])
    launches = {form: [row for row in rows if row["form"] == form and row["part"] in PARTS] for form in FORMS}
    lines.append(["its launches", *(str(sum(int(row["launches"]) for row in launches[form])) for form in FORMS)])
    lines.append([LOSS, *(cell(form, LOSS) for form in FORMS)])
    return markdown(["GB", *FORMS], lines)


TABLES = {"compiled bytes": bytes_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compiled_bytes", description=__doc__)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows = [row for form in FORMS for row in rows_of(form)]
    print(table(rows))
    if not options.no_write:
        origin = {"source": SOURCE, "torch": torch.__version__, "commit": commit()}
        print(f"written to {write_results('compiled_bytes', rows, origin=origin)}")
    return 0
