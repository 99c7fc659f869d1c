"""A small transformer on 64 GPUs, whose layout and precision a test changes; sizes of another, for transformers."""

from __future__ import annotations

from dataclasses import replace

from octavo.cost.mesh.servers import Hardware
from octavo.cost.mesh.settings import MeshLayout, Precision
from octavo.cost.mesh.shapes import Shapes, Weight
from octavo.cost.mesh.step import RankStep

BLOCK = (Weight(3 * 1024, 1024, True, "out"), Weight(1024, 1024, True, "in"), Weight(4096, 1024, True, "experts", 8, 2))
SHAPES = Shapes("", 1024, 4, BLOCK, (Weight(512, 1024), Weight(512, 1024)), 1024, 20480, heads=(8, 4))
BF16, FP8 = Precision("bf16", "bf16"), Precision("dynamic", gathers=True, pairs=True)
LAYOUT = MeshLayout(64, 128, 1024)
LLAMA = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"vocab_size": 96, "max_position_embeddings": 64, "use_cache": False}


def rank_step(precision: Precision = BF16, **layout: int | float) -> RankStep:
    """Return the step of LAYOUT with these changes."""
    return RankStep(SHAPES, replace(LAYOUT, **layout), precision, Hardware())  # type: ignore[arg-type]
