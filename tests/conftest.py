import pytest
import torch

torch.set_num_threads(1)  # a worker a core; and small tensors gain nothing by two


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
