"""Records of several ranks together equal one rank's of all their work."""

import errno
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import distributed as ours
from octavo import recipes
from octavo.inspect.record import RecordWriter
from tests.support.expert_models import batch, built
from tests.support.parallel_tasks import Pair, convert, small

np = pytest.importorskip("numpy")


# Each records into a folder, where rank 0 leaves the record; without a mesh one rank does the same work alone.


def group_of(mesh: Any) -> Any:
    return None if mesh is None else mesh.get_group()


def record_sharded(mesh: Any, name: str, folder: str) -> None:
    """Record two steps under FSDP2, each rank with its rows of one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    octavo.convert(model, getattr(recipes, name)(), select=lambda *_: True)
    ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = octavo.optim.AdamW(model.parameters(), 0.0)  # inputs are cast apart: gradients differ
    with octavo.inspect.record(model, folder, every=1, group=group_of(mesh), optimizer=optimizer) as recorder:
        for _ in range(2):
            model(torch.randn(16, 32).chunk(ranks)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def record_on_a_full_disk(mesh: Any, folder: str) -> list[str]:
    """Return the warnings where rank 0 can't write the record."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(RecordWriter, "write_arrays", side_effect=full),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        record_sharded(mesh, "dynamic", folder)
    return [str(each.message) for each in said if "recorded" in str(each.message)]


def record_tensor_parallel(mesh: Any, recipe: str, folder: str) -> None:
    """A step of two layers under tensor and sequence parallelism."""
    torch.manual_seed(0)
    model, columns = Pair(64, 96, True), slice(None)
    x, grad = small(3, 64, 64), small(3, 64, 64)
    convert(model, recipe)
    if mesh is not None:
        up = ours.ColwiseParallel(input_layouts=Shard(1), exact=True)
        parallelize_module(model, mesh, {"up": up, "down": ours.RowwiseParallel(output_layouts=Shard(1))})
        columns = slice(mesh.get_local_rank() * 64 // mesh.size(), (mesh.get_local_rank() + 1) * 64 // mesh.size())
    with octavo.inspect.record(model, folder, every=1, group=group_of(mesh)) as recorder:
        model(x[:, columns].clone().requires_grad_()).backward(grad[:, columns])
        recorder.step()


def record_experts(mesh: Any, recipe: str, folder: str, sharded: bool = False, storage: Any = None) -> tuple[Any, ...]:
    """Record a step of experts on several ranks; return the place to which a later fault of rank 1 is traced.

    ``sharded``: by FSDP2, and not computed by the ranks that have them; ``storage``: of their weights.
    """
    net, group = built("stored", recipe, 8, storage=storage), group_of(mesh)
    tokens = [batch(0, rank) for rank in (range(2) if mesh is None else [mesh.get_local_rank()])]
    if sharded:
        fully_shard(net, mesh=mesh)
    elif mesh is not None:
        ours.expert_parallel(net, mesh, exact=True)
    with octavo.inspect.record(net, folder, every=1, group=group) as recorder:
        net(torch.cat(tokens).requires_grad_()).square().sum().backward()
        recorder.step()
    if mesh is None:
        return ()
    (x,), trace = tokens, octavo.inspect.trace_faults(net, raises=False, group=group)
    x[3, 5] += torch.nan if mesh.get_local_rank() == 1 else 0
    net(x.requires_grad_()).square().sum().backward()
    trace.step()
    trace.close()
    chosen = built("stored", recipe, 8).router(batch(0, 1)).topk(2).indices[3].tolist()
    return trace.fault.layer, trace.fault.role, trace.fault.expert in chosen


def faulty_matrix(mesh: Any) -> tuple[Any, ...]:
    """The fault found in the weight of a layer of one expert, which rank 0 has."""
    layer = octavo.nn.GroupedLinear(1, 32, 48, bias=False, recipe=recipes.dynamic())
    fully_shard(layer, mesh=mesh)
    trace = octavo.inspect.trace_faults(layer, raises=False, group=mesh.get_group())
    with torch.no_grad():
        layer.weight.to_local().fill_(torch.nan)
    for _ in range(2):
        trace.step()
    trace.close()
    return trace.fault.layer, trace.fault.role, trace.fault.expert


@pytest.mark.parametrize("recipe", ["dynamic", pytest.param("blockwise", marks=pytest.mark.full)])
def test_a_sharded_training_leaves_the_record_of_one_rank(recipe: str, pool: Any, tmp_path: Path) -> None:
    record_sharded(None, recipe, str(tmp_path / "alone"))
    pool.run(record_sharded, (2,), recipe, str(tmp_path / "ranks"))
    alone, ranks = (octavo.inspect.load(tmp_path / name) for name in ("alone", "ranks"))
    assert (ranks.steps, ranks.rows) == (alone.steps, alone.rows)
    first_input, weights = 0, [at for at, row in enumerate(alone.rows) if row.role == "weight"]
    for name, values in alone.measures.items():  # the scale of a rank's own rows is not that of all
        np.testing.assert_allclose(ranks.measures[name][0, weights], values[0, weights], rtol=1e-6, err_msg=name)
    assert ranks.measures["amax"][:, first_input].tolist() == alone.measures["amax"][:, first_input].tolist()
    assert (ranks.exponents[:, first_input] == alone.exponents[:, first_input]).all()


def test_a_full_disk_of_one_rank_holds_up_no_other(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(record_on_a_full_disk, (2,), str(tmp_path / "ranks"))
    assert len(first) == 1 and "No space left on device; the training goes on" in first[0] and second == []


@pytest.mark.parametrize(
    "recipe",
    [
        "power of two",
        "rowwise",
        pytest.param("mx", marks=pytest.mark.full),
    ],
)
def test_tensor_parallel_ranks_leave_the_record_of_one(recipe: str, pool: Any, tmp_path: Path) -> None:
    """Inputs that are gathered in FP8 are counted by each rank's own tokens; what each rank has whole, by each rank.

    Rows that are scaled in two ways are gathered in their dtype here, under exact=True.
    """
    record_tensor_parallel(None, recipe, str(tmp_path / "alone"))
    pool.run(record_tensor_parallel, (2,), recipe, str(tmp_path / "ranks"))
    alone, ranks = (octavo.inspect.load(tmp_path / name) for name in ("alone", "ranks"))
    assert ranks.rows == alone.rows
    same = [
        at for at, row in enumerate(alone.rows) if recipe == "power of two" or (row.layer, row.role) == ("up", "input")
    ]
    assert len(same) == (6 if recipe == "power of two" else 2)
    for name, values in alone.measures.items():
        if name != "elements":  # what each rank has whole, each rank counts
            np.testing.assert_allclose(ranks.measures[name][0, same], values[0, same], rtol=1e-9, err_msg=name)
    gathered = [at for at in same if (alone.rows[at].layer, alone.rows[at].role) == ("up", "input")]
    times = 1 if recipe == "power of two" else 2
    assert (ranks.exponents[0, gathered] == times * alone.exponents[0, gathered]).all()
    assert np.isfinite(ranks.measures["amax"]).all()


@pytest.mark.parametrize(
    ("recipe", "storage"),
    [
        ("dynamic", None),
        ("mx", None),
        pytest.param("delayed", None, marks=pytest.mark.full),
        pytest.param("dynamic", "fp8", marks=pytest.mark.full),
    ],
)
def test_experts_on_ranks_leave_the_record_of_one(recipe: str, storage: Any, pool: Any, tmp_path: Path) -> None:
    record_experts(None, recipe, str(tmp_path / "alone"), False, storage)
    faults = pool.run(record_experts, (2,), recipe, str(tmp_path / "ranks"), False, storage)
    alone, ranks = (octavo.inspect.load(tmp_path / name) for name in ("alone", "ranks"))
    assert ranks.rows == alone.rows
    for one, other in zip((alone, alone.of_worst), (ranks, ranks.of_worst), strict=True):
        for name, values in one.measures.items():
            np.testing.assert_allclose(other.measures[name], values, rtol=1e-9, err_msg=name)
        assert (other.exponents == one.exponents).all()
    assert (ranks.experts.worst_expert == alone.experts.worst_expert).all()
    for layer, tokens in alone.experts.tokens.items():
        assert (ranks.experts.tokens[layer] == tokens).all()
    assert faults == [("experts.gate_up", "input", True)] * 2


def test_experts_under_fsdp_have_their_weights_counted_once(pool: Any, tmp_path: Path) -> None:
    record_experts(None, "rowwise", str(tmp_path / "alone"))
    faults = pool.run(record_experts, (2,), "rowwise", str(tmp_path / "ranks"), True)
    alone, ranks = (octavo.inspect.load(tmp_path / name) for name in ("alone", "ranks"))
    as_they_lie = [at for at, row in enumerate(alone.rows) if row.role == "weight" or row.products == ("output",)]
    assert len(as_they_lie) == 6
    for name, values in alone.of_worst.measures.items():
        measured = ranks.of_worst.measures[name][0, as_they_lie]
        np.testing.assert_allclose(measured, values[0, as_they_lie], rtol=1e-9, err_msg=name)
    assert (ranks.exponents[0, as_they_lie] == alone.exponents[0, as_they_lie]).all()
    for layer, tokens in alone.experts.tokens.items():
        assert (ranks.experts.tokens[layer] == tokens).all()
    assert faults == [("experts.gate_up", "input", True)] * 2


def test_a_fault_in_a_matrix_that_one_rank_has(pool: Any) -> None:
    assert pool.run(faulty_matrix, (2,)) == [("", "weight", 0)] * 2
