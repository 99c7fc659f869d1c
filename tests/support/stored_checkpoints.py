"""What ranks do for test_checkpoint.py with weights that live in FP8: save on some, go on on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from octavo.distributed import checkpoint
from octavo.distributed.checkpoint import load_checkpoint, save_checkpoint
from octavo.distributed.ranks import CheckpointError, Ranks
from tests.support.sharded_weights import adamw, differences, held, model, sharded, steps


def go_on(mesh: Any, recipe: str, kind: str, folder: str, first: int, last: int, save: bool) -> list[str]:
    """Load, if there is something, take steps and save; what differs from the whole model's uninterrupted steps."""
    ranks = Ranks(mesh.get_group())
    net = sharded(recipe, mesh, seed=first) if kind == "fsdp" else model(recipe, seed=first)
    optimizer = adamw(net)
    if first:
        load_checkpoint(folder, net, optimizer, ranks=ranks)
    steps(net, optimizer, first, last)
    if save:
        save_checkpoint(folder, net, optimizer, ranks=ranks)
    found, expected = held(net, optimizer), uninterrupted(recipe, last)
    return differences(found, expected, mesh) if kind == "fsdp" else differences_of_whole(found, expected)


def wrapped(mesh: Any, folder: str) -> list[str]:
    """What differs after a checkpoint of a model in DistributedDataParallel, then compiled, then in both."""
    found, ranks = [], Ranks(mesh.get_group())

    def parallel(net: nn.Module) -> Any:
        return DistributedDataParallel(net, process_group=mesh.get_group())

    for number, wrap in enumerate((parallel, torch.compile, lambda net: parallel(torch.compile(net)))):
        nets = [model("dynamic"), model("dynamic", seed=1)]
        optimizers = [adamw(net) for net in nets]
        steps(nets[0], optimizers[0], 0, 2)
        save_checkpoint(f"{folder}/{number}", wrap(nets[0]), optimizers[0], ranks=ranks)
        load_checkpoint(f"{folder}/{number}", wrap(nets[1]), optimizers[1], ranks=ranks)
        wholes = [held(*pair) for pair in zip(nets, optimizers, strict=True)]
        found += differences_of_whole(*wholes)
    return found


def one_fails(mesh: Any, folder: str, failing: int) -> tuple[list[str], list[str]]:
    """What each rank says where one can't load into an optimizer without a state; what differs once all can."""
    ranks = Ranks(mesh.get_group())
    saved, net = (sharded("dynamic", mesh, seed=seed) for seed in range(2))
    optimizers = adamw(saved), adamw(net)
    steps(saved, optimizers[0], 0, 1)
    save_checkpoint(folder, saved, optimizers[0], ranks=ranks)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError(2, "No such file")  # a node's view of the disk is old, say

    said = []
    for name in ("_read_content", "_model_to_fill", "_optimizer_to_fill", "set_optimizer_state_dict"):
        with pytest.MonkeyPatch.context() as patch:
            if mesh.get_rank() == failing:
                patch.setattr(checkpoint, name, fail)
            try:
                load_checkpoint(folder, net, adamw(net), ranks=ranks)
            except CheckpointError as error:
                said.append(str(error))
    load_checkpoint(folder, net, optimizers[1], ranks=ranks)
    return said, differences_of_whole(held(net, optimizers[1]), held(saved, optimizers[0]))


def differences_of_whole(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not value.equal(found[name])]


def uninterrupted(recipe: str, last: int) -> dict[str, Tensor]:
    net = model(recipe)
    optimizer = adamw(net)
    steps(net, optimizer, 0, last)
    return held(net, optimizer)
