"""Which rows of a product's operand have faults, found by the product's result."""

from typing import Any

import torch

from octavo.kernels.arguments import Counted
from tests.kernels.conftest import Ops
from tests.support.casts import DTYPES, FORMATS, laid
from tests.support.combinations import dealt

OPTIONS: dict[str, Any] = {
    "shape": [(1, 1, 4), (17, 2, 40), (300, 3, 17), (5, 0, 3), (0, 5, 3)],
    "dtype": [*DTYPES, *FORMATS],
    "faults": ["none", "of one", "of both"],
    "scales": [None, 1, 9000],
    "amax": [None, 2.5],
    "known": [0, 3],
}


def test_any_product(ops: Ops) -> None:
    for case in dealt(0, 15, **OPTIONS):
        rows, cols, contracted = case["shape"]
        x, other = torch.randn(rows, contracted), torch.randn(cols, contracted)
        if case["faults"] != "none":
            x[::3, -1] = torch.nan
            x[5::7, 0] = torch.inf
        other[:, 1:2] += torch.inf if case["faults"] == "of both" else 0
        x = x.to(case["dtype"])
        y = x.float() @ other.t()
        y[1:2] = torch.inf  # of itself
        scale_inv = None if case["scales"] is None else torch.rand(case["scales"], 1).t()
        amax = None if case["amax"] is None else torch.tensor([[case["amax"]]])
        notes, faulty = torch.tensor([1.0, 2.0, 0.25, 0.0]), ~x.float().isfinite().all(1)
        written = torch.tensor([7]).int(), notes.clone(), torch.tensor([case["known"]]).int()
        ops.of("note_faults")(*[laid(t, "strided") for t in (y.bfloat16(), x)], scale_inv, amax, *written)
        first = case["known"]
        if y.numel():
            notes[:2] += torch.tensor([faulty.sum(), len(y)])
            notes[2] = notes[2] if scale_inv is None else scale_inv.max().clamp(min=0.25)
            notes[3] = case["amax"] or 0.0
            first = first or (7 if faulty.any() else 0)
        assert [*written[1].tolist(), int(written[2])] == [*notes.tolist(), first], case


ENDS = torch.tensor([0, 2, 2, 290, 290, 298], dtype=torch.int32)  # of groups; two rows more are in none


def test_the_group_of_a_fault_is_found(ops: Ops) -> None:
    """The group of the first fault is noted, in the kernel of whichever program comes first; an earlier note stays."""
    x = torch.randn(300, 17)
    x[[289, 297], [3, 5]] = torch.nan  # in the fourth and the sixth
    y, scale_inv = x @ torch.randn(17, 3), torch.tensor([[9.0], [0.5], [9.0], [3.0], [9.0], [2.0]])
    for rows, groups in ((300, {3, 5} if ops.kernels else {3}), (297, {3})):
        notes, first, place = torch.zeros(len(Counted.faults)), torch.zeros(1).int(), torch.tensor([20]).int()
        args = y[:rows], x[:rows], scale_inv, None, place, notes, first, ENDS
        ops.of("note_faults")(*args)
        assert notes.tolist() == [1 + (rows == 300), rows, 3.0, 0]  # of groups without rows the largest, 9, is no scale
        assert (at := int(first)) - 20 in groups
        ops.of("note_faults")(*args[:4], place + 20, *args[5:])
        assert int(first) == at
