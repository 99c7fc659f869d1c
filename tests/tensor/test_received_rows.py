import pytest
import torch

from octavo.errors import UnsupportedOpError
from octavo.tensor.received_rows import ReceivedRows


def test_products_alone_read_them():
    codes, offsets = torch.ones(3, 4).to(torch.float8_e4m3fn), torch.tensor([1, 3], dtype=torch.int32)
    rows = ReceivedRows(codes, torch.ones(2, 1), (-1, -1), offsets, None, torch.bfloat16)
    assert rows.detach().qdata is codes and rows.to(torch.bfloat16) is rows
    assert rows.isnan().shape == (3, 4) and not rows.isnan().any()
    with torch.inference_mode():
        assert rows.to(torch.bfloat16) is rows
    with pytest.raises(UnsupportedOpError, match="another rank sent in FP8"):
        rows + 1
