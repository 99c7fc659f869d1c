from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def two_ranks() -> Iterator[dist.device_mesh.DeviceMesh]:
    """A mesh of two ranks, of which this process is the second, and nobody the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
