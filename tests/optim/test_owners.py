import torch

from octavo.optim.owners import owners_of


def test_owners_have_about_the_same_work() -> None:
    """What they exchange is tested with Muon, in test_muon.py."""
    shapes = [torch.Size(shape) for shape in [(2, 2), (16, 16), (8, 8), (8, 8), (32, 4)]]
    assert owners_of(shapes, 2) == [1, 0, 1, 1, 1]
    assert owners_of(shapes, 1) == [0] * 5
