import argparse
import dataclasses
import inspect
import logging

import torch

from octavo import cli
from octavo.cli import plan


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


def test_each_option_is_for_one_kind_of_step_and_read():
    of_any = ["model", "tokens", "device", "fuse", "gpus"]
    parser = argparse.ArgumentParser(add_help=False)
    plan.add_options(parser)
    sizes = [field.name for field in dataclasses.fields(plan.ModelConfig)]
    tables = [*of_any, *plan.OF_DEVICE, *plan.OF_MESH, *plan.STATE, *sizes]
    assert sorted(action.dest for action in parser._actions) == sorted(tables)
    source = inspect.getsource(plan)
    assert [name for name in (*of_any, *plan.OF_DEVICE) if f"options.{name}" not in source] == []
