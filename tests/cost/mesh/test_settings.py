"""A mesh as a flag says it."""

from __future__ import annotations

import pytest

from octavo.cost.mesh.settings import MeshLayout, mesh_of
from octavo.cost.rates import PlanError


def test_a_mesh_of_a_flag_has_as_many_ranks_as_gpus() -> None:
    for mesh, says in (
        ("fsdp=4,tensor=2", "fsdp=8 or --gpus 8 would do"),
        ("data=16", "'data=16' is not KIND=RANKS; kinds are fsdp, replicate"),
        ("fsdp=\u00b2", "is not KIND=RANKS"),
        ("fsdp=2,fsdp=16", "fsdp is named twice"),
    ):
        with pytest.raises(PlanError, match=says):
            mesh_of(mesh, 16)


def test_micro_batches_are_counted_whatever_their_size_was() -> None:
    layout = MeshLayout(8, 64, 1024, micro_batch_size=2)
    assert layout.in_micro_batches(layout.micro_batches) == layout and layout.in_micro_batches(2).micro_batch_size == 4
