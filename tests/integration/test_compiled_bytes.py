"""The bytes that a Llama moves compiled with convert(fuse=True), beside eager and beside Inductor's own kernels."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("transformers")
subject, pages = (importlib.import_module(f"benchmarks.{name}") for name in ("compile.compiled_bytes", "common.pages"))

# torch's compiler looks at gradients of fake tensors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

# The parts that each known forward computes.
FORWARDS = {"decoder layer": (subject.NORMS,), "attention": (subject.ROTARY, subject.CASTS)}
FORWARDS |= {"feed-forward": (subject.SWIGLU,), "loss": (subject.LOSS,)}


def test_each_known_forward_moves_no_more_than_eager_or_inductors_own() -> None:
    rows = subject.rows_of(subject.FUSED, subject.block_launches)
    committed = pages.read("compiled_bytes")
    rows += [row for row in committed if row["part"] == subject.LOSS and row["form"] == subject.FUSED]
    others = [form for form in subject.FORMS if form not in (subject.FUSED, "bf16, compiled")]
    assert len(others) == 2
    for name, parts in FORWARDS.items():
        moved = subject.gigabytes(rows, subject.FUSED, *parts)
        assert 0 < moved <= min(subject.gigabytes(committed, form, *parts) for form in others), name


@pytest.mark.full
@pytest.mark.parametrize("form", subject.FORMS)
def test_the_rows_are_of_the_code(form: str) -> None:
    names = ("form", "part", "direction", "gb", "launches")
    rows = [{name: row[name] for name in names} for row in pages.read("compiled_bytes")]
    assert subject.rows_of(form) == [row for row in rows if row["form"] == form]
