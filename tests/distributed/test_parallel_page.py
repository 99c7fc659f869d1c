"""docs/tensor-parallel.md: its matrix has every recipe, and says what is counted."""

from pathlib import Path

import pytest
import torch

from octavo import recipes
from octavo.autograd.gather_input import why_not_gathered
from tests.support import parallel_tasks as tasks

PAGE = (Path(__file__).parents[2] / "docs" / "tensor-parallel.md").read_text(encoding="utf-8")
CALLS = {
    "`dynamic()`": "dynamic",
    "`delayed()`": "delayed",
    "`rowwise(power_of_two=True)`": "rowwise",
    "`rowwise_with_gw_hp()`": "gw_hp",
    "`blockwise()`": "blockwise",
    "`mx()`": "mx",
    "`high_precision()`": "high_precision",
}
BF16 = 2 * 512 * 256


def matrix():
    lines = [line for line in PAGE.splitlines() if (line.startswith("| `") and "()" in line) or "power_of_two" in line]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}


def test_no_recipe_is_left_out():
    found = matrix()
    assert found.keys() == CALLS.keys()
    named = {call.strip("`").partition("(")[0] for call in found}
    assert named == set(recipes.__all__) - {"default"}  # which is one of them
    for call, (gathered, _, _, *others) in found.items():
        sent = why_not_gathered(tasks.RECIPES[CALLS[call]], 256) is None
        assert gathered == ("in FP8" if sent else "in its dtype")
        assert others == ["yes", "yes", "refused"]


@pytest.mark.full
@pytest.mark.parametrize("call", CALLS)
def test_bytes(pool, call):
    answer = pool.run(tasks.sequence_parallel, (2,), CALLS[call], True, torch.bfloat16)[0]
    (_, forward), (_, backward) = answer[1:]
    assert matrix()[call][1:3] == [f"{forward / BF16:.3f}", f"{(backward - BF16) / BF16:.3f}"]
