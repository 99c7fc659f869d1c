import pytest
import torch


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """Transformer Engine's layers are made on the GPU where there is one; these tests are a CPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
