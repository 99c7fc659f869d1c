import torch
from torch import Tensor

from octavo.optim.base import Kept, has_moved, was_written
from octavo.tensor.stored_shards import part_of
from octavo.tensor.stored_weight import StoredWeight


def kept_of(held: Tensor) -> Kept:
    return Kept(None, held, held.data_ptr(), held._version, ())  # type: ignore[arg-type]


def test_a_plain_weight_is_known_by_its_address_and_version():
    weight = torch.ones(4, 4)
    kept = kept_of(weight)
    assert not has_moved(kept, weight, weight) and not was_written(kept, weight, weight)
    weight.add_(1)
    assert was_written(kept, weight, weight)
    other = weight.clone()
    assert has_moved(kept, other, other) and not was_written(kept, other, other)


def test_a_part_is_known_by_its_codes():
    part = part_of(StoredWeight.cast(torch.randn(8, 16)), 0, 4)
    kept = kept_of(part.qdata)
    assert not has_moved(kept, part, part.qdata) and not was_written(kept, part, part.qdata)
    again = part.qdata.clone()
    assert has_moved(kept, part, again) and not was_written(kept, part, again)
    again.view(torch.uint8)[0, 0] ^= 1
    assert was_written(kept, part, again)
    part.qdata.view(torch.uint8).add_(0)
    assert was_written(kept, part, part.qdata)
