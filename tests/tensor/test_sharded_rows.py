import torch

from octavo.tensor.sharded_rows import gathered_whole, padded_rows, rows_on_each_rank


def test_padded_rows():
    x = torch.ones(2, 3)
    assert padded_rows(x, x.shape, 1) is x
    assert padded_rows(x, torch.Size((7, 3)), 2)[2:].abs().sum() == 0
    assert padded_rows(x[:0], torch.Size((1, 3)), 2).shape == (1, 3)


def test_what_ranks_send_is_the_whole():
    for rows in (1, 7, 8):
        whole = torch.randn(rows, 3, 2)
        sent = [
            padded_rows(part, whole.shape, 4)
            for part in [*whole.split(rows_on_each_rank(rows, 4)), *[whole[:0]] * 4][:4]
        ]
        assert torch.equal(gathered_whole(torch.cat(sent), whole.shape), whole)
    columns = torch.randn(5, 6)
    assert padded_rows(columns[:, :3], columns.shape, 2).shape == (5, 3)  # another dimension is sharded
