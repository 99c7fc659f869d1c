"""Checkpoints of layers with named splits, which tensor parallelism parts, are read by any layout of ranks."""

import pytest
import torch

import octavo
from octavo.distributed.joined_parts import Joined, join, names_of, part, renamed
from tests.support import layout_tasks as tasks

LAYOUTS = [(2, 2), (4, 1), (1, 4)]  # data x tensor, of all ranks of the pool


@pytest.mark.parametrize("saved", [LAYOUTS[0], *(pytest.param(saved, marks=pytest.mark.full) for saved in LAYOUTS[1:])])
def test_from_any_layout_to_any(pool, saved, tmp_path):
    """Weights and the optimizer's moments bit for bit, on these ranks and on one."""
    wanted = pool.run(tasks.save, saved, str(tmp_path), "delayed")[0]
    found = [answer for layout in LAYOUTS for answer in pool.run(tasks.load, layout, str(tmp_path), "delayed")]
    for loaded, _ in [*found, tasks.load(None, str(tmp_path), "delayed")]:
        assert loaded.keys() == wanted.keys() and "attention.qkv.linear.weight exp_avg" in loaded
        assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def test_names_and_states_go_together_and_apart():
    names = {"a.weight": ["a.q.weight", "a.k.weight"]}
    q, k = torch.zeros(2, 3), torch.ones(1, 3)
    state = {own: {"m": value, "step": torch.tensor(2.0)} for own, value in zip(names["a.weight"], (q, k), strict=True)}
    joined = join({"b": {"m": q}, **state}, names)
    assert set(joined) == {"a.weight", "b"} and joined["a.weight"]["m"].shape == (3, 3)
    again = part(joined, names)
    assert all(again[own]["m"] is state[own]["m"] and again[own]["step"] == 2 for own in state)
    assert again["a.q.weight"]["step"] is not again["a.k.weight"]["step"]
    groups = [{"params": ["a.q.weight", "a.k.weight", "b"], "lr": 1.0}]
    assert renamed(groups, names, True) == [{"params": ["a.weight", "b"], "lr": 1.0}]
    assert renamed(renamed(groups, names, True), names, False) == groups
    assert names_of(octavo.nn.Linear(8, {"q": 4, "k": 4})) == {}


def test_joined_parts_are_not_computed_with():
    with pytest.raises(octavo.UnsupportedOpError, match="read the parts"):
        Joined([torch.ones(2, 3), torch.ones(1, 3)]) + 1
