"""Situations on ranks that write, send and take state."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from octavo.distributed.checkpoint import load_checkpoint, load_extra, save_checkpoint
from octavo.distributed.ranks import Ranks
from tests.support.seams.made import Made
from tests.support.seams.on_ranks import FOUR, OF_FSDP2, TWO, another, shard
from tests.support.seams.situations import situation
from tests.support.seams.twins import casts_of
from tests.support.seams.verdicts import Sound

FILES = "State of ranks"
FROM_CODES = Sound(8, "a state dict holds codes, so masters begin as these read")
STORED = ("FP8 weights", "FP8 weights in blocks")


def _merged(made: Made, group: Any) -> None:
    """A twin's delayed state on another number of ranks: the largest amax, the smallest scale."""
    for casts in casts_of(made.model):
        casts.settle()
        if casts.own is not None:
            torch.distributed.all_reduce(casts.own.amaxes, torch.distributed.ReduceOp.MAX, group)
            torch.distributed.all_reduce(casts.own.scale, torch.distributed.ReduceOp.MIN, group)


def _moved(made: Made, saving: Any, loading: Any) -> None:
    """Train on one mesh's ranks, save, and go on on another's, or on None's: this alone."""
    everyone = Ranks(made.group)
    made.divide(saving)
    shard(made, saving)
    made.train(2)
    if made.is_library:
        with tempfile.TemporaryDirectory() as own:
            pair = Ranks(saving.get_group())
            extra = made.schedule.state_dict() if hasattr(made, "schedule") else None
            save_checkpoint(pair.first(lambda: own), made.model, made.optimizers[0], extra, ranks=pair)
            folder = everyone.first(lambda: own)
            made.take(another(made))
            if loading is not None:
                shard(made, loading)
            made.begin()
            ranks = Ranks() if loading is None else everyone
            if extra is not None:
                made.schedule.load_state_dict(load_extra(folder))  # type: ignore[attr-defined]
            load_checkpoint(folder, made.model, made.optimizers[0], ranks=ranks)
            everyone.any(False)  # nobody reads any more
    else:
        _merged(made, saving.get_group())
    made.divide(loading)
    made.train(2)


@situation("FSDP2, a checkpoint of two ranks on one", FILES, TWO, exceptions=OF_FSDP2)
def on_one_rank(made: Made) -> None:
    """Optimizer and delayed state too."""
    _moved(made, made.mesh, None)


@situation("FSDP2, a checkpoint of two ranks on four", FILES, FOUR, exceptions=OF_FSDP2)
def on_four_ranks(made: Made) -> None:
    """Two by two train and write alike; what the first two wrote is read by all, as replicas of shards."""
    _moved(made, made.mesh["shard"], made.mesh)


@situation("FSDP2, broadcast_from_rank0", FILES, FOUR, exceptions={**OF_FSDP2, STORED: FROM_CODES})
def broadcast(made: Made) -> None:
    """Rank 0 has the values, the others get them with torch's functions, which take all ranks of the process."""
    if made.is_library:
        values = {name: value.clone() for name, value in made.model.state_dict().items()}
        made.take(another(made))
        shard(made)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(made.model, values if made.rank == 0 else {}, options=options)
    made.train()


@situation("FSDP2, from the meta device", FILES, TWO, exceptions=OF_FSDP2)
def from_meta(made: Made) -> None:
    """fully_shard, to_empty, and values."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(p.shape, generator=generator) / 16 for p in made.model.parameters()]
    if made.is_library:
        with torch.device("meta"):
            made.take(made.converted(made.feature.plain()))
        shard(made)
        made.model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(made.model.parameters(), values, strict=True):
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    made.train()
