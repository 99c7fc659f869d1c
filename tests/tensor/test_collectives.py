import torch
import torch.distributed as dist

from octavo.tensor.collectives import all_gather


def gathered(mesh, waits):
    whole, part = torch.empty(2 * 3, dtype=torch.uint8), torch.full((3,), 10 + dist.get_rank(), dtype=torch.uint8)
    work = all_gather(whole, part, mesh.get_group(), async_op=waits)
    if waits:
        work.wait()
    return whole.tolist()


def test_parts_lie_in_the_order_of_ranks(pool):
    for waits in (False, True):
        assert pool.run(gathered, (2,), waits) == [[10, 10, 10, 11, 11, 11]] * 2
