"""The plan of a whole training step with everything on, and that its committed table has the same numbers."""

from __future__ import annotations

import importlib

import pytest

from octavo.cost.rates import ATTENTION

pytest.importorskip("transformers")
step, pages = (importlib.import_module(f"benchmarks.{name}") for name in ("training.planned_step", "common.pages"))
BF16, FUSED, WHOLE = "bf16", "bf16, fused", "octavo delayed, fused, head"
CHUNKED = f"{WHOLE}, chunked loss"


def test_a_step_with_everything_on_beside_bf16() -> None:
    rows = {row["variant"]: row for row in pages.read("planned_step")}
    columns = ("now_ms", "cudnn_ms", "planned_gib")
    flash, cudnn, gib = ({name: float(row[column]) for name, row in rows.items()} for column in columns)
    assert flash[BF16] > 1.9 * cudnn[WHOLE] and cudnn[BF16] > 1.9 * cudnn[WHOLE]
    assert all(times[FUSED] > 1.35 * times[WHOLE] for times in (flash, cudnn))
    assert gib[WHOLE] < 0.65 * gib[BF16] and gib[CHUNKED] < 0.58 * gib[BF16]


@pytest.mark.parametrize("names", [(FUSED, WHOLE), pytest.param((BF16, CHUNKED), marks=pytest.mark.full)])
def test_the_table_is_what_is_planned(names: tuple[str, ...]) -> None:
    """The table has the planned times by FlashAttention-2 and by cuDNN's attention, as no step waits for its host."""
    rates, (one, two) = step.rates(then=False), (work.attention[64] for _, work in step.models())
    causal = (one + 15 * (two - one)) / 2
    saved = causal / ATTENTION["flash"][64] - causal / ATTENTION["cudnn"][64]
    rows = {row["variant"]: row for row in pages.read("planned_step")}
    for name in names:
        plan = step.planned(step.EVERYTHING.get(name, {"recipe": None}), rates)
        assert plan.waits == 0
        said = [float(rows[name][column]) for column in ("now_ms", "cudnn_ms", "planned_gib")]
        assert said == pytest.approx([1e3 * plan.total, 1e3 * (plan.total - saved), plan.peak / 2**30], rel=0.02)
