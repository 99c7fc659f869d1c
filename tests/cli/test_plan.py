import logging

import torch

from octavo import cli


def test_nothing_is_said_before_a_plan(folder, capsys, monkeypatch):
    def build(path):
        logging.getLogger("torchao").warning("Failed to load")
        return torch.nn.Sequential(torch.nn.Embedding(64, 64, device="meta"), torch.nn.Linear(64, 64, device="meta"))

    logging.getLogger("torchao").addHandler(handler := logging.StreamHandler())
    monkeypatch.setattr("octavo.cost.from_flags.from_hugging_face", build)
    assert cli.main(["plan", "config.json", "--context", "64", "--device", "H100"]) == 0
    logging.getLogger("torchao").removeHandler(handler)
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[0].endswith(" B parameters, 256 sequences of 64 tokens")
