import logging

import pytest
import torch

from octavo.kernels import capability
from octavo.kernels.capability import runs_natively, warn_once_if_emulated


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_warned", set())


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((7, 5), False),
        ((8, 0), False),
        ((8, 6), False),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 0), True),
        ((12, 0), True),
    ],
)
def test_what_is_native(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert runs_natively(torch.device("cuda")) is native
    assert not runs_natively(torch.device("cpu"))


def test_one_warning_a_device_type(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with caplog.at_level(logging.WARNING, logger="octavo"):
        for device in ("cpu", "cpu", "cuda:0", "cuda:1", "cpu"):
            warn_once_if_emulated(torch.device(device))
    assert [record.name for record in caplog.records] == ["octavo", "octavo"]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "no FP8 hardware on cpu",
        "no FP8 hardware on cuda",
    ]


def test_no_warning_where_it_is_native_or_nothing_runs(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with caplog.at_level(logging.WARNING, logger="octavo"):
        warn_once_if_emulated(torch.device("cuda"))
        warn_once_if_emulated(torch.device("meta"))
    assert not caplog.records
