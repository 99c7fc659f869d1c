"""Checkpoints of many ranks: written by all of them, readable by any number, replaced as a whole or not at all.

    path/latest                   the name of the folder that counts: one line, replaced in one piece
    path/save-00000007/
        .metadata, __0_0.distcp   torch.distributed.checkpoint: the model's tensors and the optimizer's
        octavo.pt                 the rest: names, groups of the optimizer, delayed state of each rank, ``extra``

A save that is cut off anywhere leaves `latest` as it was, and so the checkpoint before; the next save takes away what
it left. Nothing that is read can run code: octavo.pt and the tensors are read with ``weights_only=True``. DCP's own
.metadata is a pickle; it holds sizes and places, and is read by an unpickler that knows their classes and no others.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from octavo.distributed import joined_parts
from octavo.distributed.files import reason_of, replacing
from octavo.distributed.joined_parts import Joined
from octavo.distributed.ranks import CheckpointError, RankError, Ranks, lost_ranks
from octavo.errors import first_line
from octavo.nn.agreement import told_of
from octavo.nn.recipe_module import RecipeModule
from octavo.optim.layout import place_of
from octavo.optim.moment import Moment
from octavo.optim.state import moment_from
from octavo.scaling.delayed import delayed_state_dict, load_delayed_state_dict
from octavo.tensor.collectives import agree
from octavo.tensor.fsdp2 import like_sharded, on_this_rank

__all__ = ["save_checkpoint", "load_checkpoint", "load_extra"]

FORMAT = 1
LATEST = "latest"
CONTENT = "octavo.pt"
Places = dict[str, tuple[Any, str]]  # where each tensor of a checkpoint lies: a dict, and its name in that
SCALE, HISTORY = "delayed_scale", "delayed_amax_history"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    ranks: Ranks | None = None,
) -> None:
    """Saves model, optimizer and delayed state; every rank calls it.

    Args:
        path: a folder that all ranks see. It holds the last checkpoint only.
        model: under fully_shard, DistributedDataParallel or neither.
        optimizer: its optimizer; None: a checkpoint without one.
        extra: what else to keep; tensors, numbers, strings, and lists and dicts of these. Rank 0's is saved.
        ranks: who saves (default: the ranks of the default process group, or this process alone).

    Raises:
        CheckpointError: on all ranks, where it failed on any. The checkpoint before is still there.

    Example:
        >>> import tempfile, torch
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 4)
        >>> save_checkpoint(folder, model, torch.optim.AdamW(model.parameters()), {"step": 120})
        >>> load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))
        {'step': 120}
    """
    root, ranks, model = Path(path), ranks or Ranks.of_process(), unwrapped(model)
    with _told(f"cannot write a checkpoint to {root}", "what was saved before is kept"):
        folder = ranks.first(lambda: _new_folder(root))
        own = get_model_state_dict(model)  # where ranks may find one scale for a weight in FP8
        with ranks.together():
            tensors, content = _collect(model, own, optimizer)
        content |= {"octavo_distributed": FORMAT, "delayed": gather_delayed(model, ranks), "extra": extra}
        ranks.first(lambda: _write_content(folder, content))
        dcp.save(tensors, storage_writer=Writer(folder), process_group=ranks.group, no_dist=ranks.group is None)
        ranks.first(lambda: _finish(folder))


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ranks: Ranks | None = None,
) -> Any:
    """Goes back to the last checkpoint; every rank calls it. Gradients are dropped.

    On as many ranks as saved it, each rank gets its own delayed state back, and training goes on bit for bit. On
    another number each role takes the largest amax over all ranks at each place of its history, and the smallest scale
    that one of them had: no tensor of any rank is beyond it. Layers whose recipe has no such state in the checkpoint
    start with an empty one. Delayed state that the model has no place for is passed over.

    Args:
        path: the folder that was saved to.
        model: of the same names and shapes, converted or not; under fully_shard, DistributedDataParallel or neither.
        optimizer: its optimizer, or None to leave the saved one's state alone.
        ranks: as for save_checkpoint.

    Returns:
        ``extra`` as it was saved.

    Raises:
        CheckpointError: on all ranks, where it failed on any. Where tensors were damaged, the model and the optimizer
            hold a part of them.

    Example:
        >>> import tempfile, torch
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 4)
        >>> save_checkpoint(folder, model, extra={"step": 120})
        >>> load_checkpoint(folder, torch.nn.Linear(4, 4))
        {'step': 120}
    """
    root, ranks, model = Path(path), ranks or Ranks.of_process(), unwrapped(model)
    with _told(
        f"cannot read the checkpoint in {root}", "give the folder of a whole one, and the model it was saved from"
    ):
        folder = ranks.first(lambda: _latest(root))
        with ranks.together():
            content, reader = _read_content(folder), MetadataReader(folder)
        own = get_model_state_dict(model)  # where ranks may find one scale for a weight in FP8
        with ranks.together():
            state, places = _model_to_fill(model, own, content)
        if optimizer is not None and content["states"] is not None:
            optimizer.zero_grad()
            begun = get_optimizer_state_dict(model, optimizer)  # steps a new one, where ranks agree on amaxes
            with ranks.together():
                state["optimizer"], state["codes"], more = _optimizer_to_fill(model, optimizer, begun, content, reader)
                places |= more
        tensors = {name: part[key] for name, (part, key) in places.items()}
        group, alone = ranks.group, ranks.group is None
        dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), process_group=group, no_dist=alone)
        with ranks.together():
            joined_parts.share(state["model"], joined_parts.names_of(model))
            set_model_state_dict(model, state["model"])
            if optimizer is not None and state["optimizer"] is None:  # it was saved before its first step
                optimizer.state.clear()
            elif optimizer is not None:
                for own, name, moment in state["codes"]:
                    own[name] = _read(moment, own.pop(f"{name}_codes"), own.pop(f"{name}_scale_inv"))
                own = state["optimizer"]["state"]
                state["optimizer"]["state"] = joined_parts.part(own, joined_parts.names_of(model))
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
            load_delayed(model, content["delayed"], ranks)
    return content["extra"]


def load_extra(path: str | os.PathLike[str]) -> Any:
    """The last checkpoint's ``extra``, read by this process alone.

    Args:
        path: the folder that was saved to.

    Raises:
        CheckpointError: there is none, or it is damaged.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, torch.nn.Linear(4, 4), extra={"step": 120})
        >>> load_extra(folder)
        {'step': 120}
    """
    with _told(f"cannot read the checkpoint in {path}", "give the folder of a whole one"):
        return _read_content(_latest(Path(path)))["extra"]


@contextlib.contextmanager
def _told(what: str, remedy: str) -> Iterator[None]:
    """Raises any failure as a CheckpointError; silences torch's warning that there is no process group."""
    try:
        with lost_ranks(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is .*")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank} failed: {reason_of(cause)}; {remedy}") from error
    except (RankError, OSError, RuntimeError, ValueError, TypeError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{what}: {reason_of(error)}; {remedy}") from error


# --- folders ----------------------------------------------------------------------------------------------------------


def _new_folder(root: Path) -> str:
    """Removes what saves left that were cut off, and makes the folder of the next one."""
    root.mkdir(parents=True, exist_ok=True)
    kept = _pointed(root)
    for other in root.glob("save-*"):
        if other.name != kept:
            shutil.rmtree(other)
    number = 1 + (int(kept.removeprefix("save-")) if kept else 0)
    folder = root / f"save-{number:08}"
    folder.mkdir()
    return str(folder)


def _pointed(root: Path) -> str | None:
    """The name in `latest`, or None where there is none yet."""
    try:
        name = (root / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    if not name.removeprefix("save-").isdecimal():
        raise CheckpointError(f"{root / LATEST} is damaged: write into it the name of the folder to load")
    return name


def _latest(root: Path) -> str:
    name = _pointed(root)
    if name is None:
        raise CheckpointError(f"{root} holds no checkpoint: give the folder that save_checkpoint was given")
    if not (root / name / METADATA).is_file():
        raise CheckpointError(f"{root / name} is gone or damaged: write into {root / LATEST} another folder's name")
    return str(root / name)


def _finish(folder: str) -> None:
    """Makes the folder the last checkpoint, and takes away the others."""
    root = Path(folder).parent
    with replacing(root / LATEST) as pointer:
        pointer.write(f"{Path(folder).name}\n".encode())
    for other in root.glob("save-*"):
        if other != Path(folder):
            shutil.rmtree(other, ignore_errors=True)


# --- what is in them --------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, whose prefixes torch leaves on weight_scale_inv."""
    while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, DistributedDataParallel) else model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def _collect(model: nn.Module, own: Any, optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors, by name, and the rest."""
    tensors, others = dict[str, Any](), dict[str, Any]()
    parted = joined_parts.names_of(model)
    for name, value in joined_parts.join(own, parted).items():
        (tensors if isinstance(value, Tensor) else others)[f"model.{name}"] = value
    content: dict[str, Any] = {"model": sorted([*tensors, *others]), "others": others, "states": None, "groups": []}
    if optimizer is not None and optimizer.state:  # torch would step one that has no state yet
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
        content["groups"], content["states"] = joined_parts.renamed(state["param_groups"], parted, True), {}
        for name, values in joined_parts.join(state["state"], parted).items():
            content["states"][name] = sorted(values)
            for key, value in values.items():
                (tensors if isinstance(value, Tensor) else others)[f"optimizer.{name}.{key}"] = value
    return tensors, content


def _model_to_fill(model: nn.Module, own: Any, content: dict[str, Any]) -> tuple[dict[str, Any], Places]:
    """The state dicts to fill, as yet the model's alone, and where in them each tensor lies that the checkpoint names.

    An optimizer that was saved before its first step has None.
    """
    parted = joined_parts.names_of(model)
    whole = joined_parts.join(own, parted) if parted else own
    places = {f"model.{name}": (whole, name) for name in whole}
    missing, unexpected = sorted(places.keys() - content["model"]), sorted(content["model"] - places.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"the checkpoint holds another model: it has no {missing[:3]}, and {unexpected[:3]} besides; build the "
            "model that was saved (converting it changes no name)"
        )
    for name in content["others"].keys() & places.keys():
        own[places.pop(name)[1]] = content["others"][name]
    return {"model": own, "optimizer": None, "codes": []}, places


def _optimizer_to_fill(
    model: nn.Module, optimizer: Optimizer, begun: Any, content: dict[str, Any], reader: MetadataReader
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], str, Moment]], Places]:
    """The state dict of an optimizer that has ``begun``, places as above, and those moments that come in other codes.

    Each of these with the state that is to have it in float32, and its name.
    """
    parted, codes, places = joined_parts.names_of(model), list[tuple[dict[str, Any], str, Moment]](), Places()
    own, kept = joined_parts.join(begun["state"], parted), dict[str, Any]()
    names, described = getattr(optimizer, "names", ()), content["groups"][0].get("octavo", {"moments": ()})
    moments = dict(zip(names, map(moment_from, described["moments"]), strict=False))
    for name, keys in content["states"].items():
        here, sizes = own.get(name, {}), {key: reader.size(f"optimizer.{name}.{key}") for key in keys}
        others = {one: _moment_to_fill(one, here, sizes) for one in names}
        for tensors in others.values():
            here = here | tensors
        if not set(keys) <= here.keys():
            raise CheckpointError(
                f"its optimizer kept {keys} of {name}, which this one does not: give an optimizer of the same "
                "class and the same parameters"
            )
        kept[name] = {key: here[key] for key in keys}
        codes += [(kept[name], one, moments[one]) for one, tensors in others.items() if f"{one}_codes" in tensors]
        places |= {f"optimizer.{name}.{key}": (kept[name], key) for key in keys}
    for name in content["others"].keys() & places.keys():
        part, key = places.pop(name)
        part[key] = content["others"][name]
    groups = joined_parts.renamed(content["groups"], parted, False)
    return {"state": kept, "param_groups": groups}, codes, places


def _write_content(folder: str, content: dict[str, Any]) -> None:
    """Writes octavo.pt, unless `weights_only` could not read it.

    Raises:
        CheckpointError: ``extra`` or a group of the optimizer holds other objects.
    """
    written = io.BytesIO()
    try:
        torch.save(content, written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"extra, or a group of the optimizer, holds more than tensors, numbers, strings, lists and dicts: "
            f"{first_line(error)}"
        ) from error
    with replacing(Path(folder) / CONTENT) as file:
        file.write(written.getbuffer())


def _read_content(folder: str) -> dict[str, Any]:
    try:
        content = torch.load(Path(folder) / CONTENT, map_location="cpu", weights_only=True)
        if content["octavo_distributed"] != FORMAT:
            raise ValueError("another format")
    except Exception as error:  # whatever a damaged file makes torch raise
        raise CheckpointError(
            f"{Path(folder) / CONTENT} is damaged or not octavo's ({reason_of(error)}): load another checkpoint"
        ) from error
    return content


# --- moments that were saved in other codes than they have here, or in none where they have some ----------------------


def _moment_to_fill(name: str, own: dict[str, Any], sizes: dict[str, torch.Size]) -> dict[str, Any]:
    """Tensors for a moment as it was saved, of a parameter whose state ``own`` has it otherwise; else none.

    ``sizes``: of all that was saved of the parameter.
    """
    codes, scales = f"{name}_codes", f"{name}_scale_inv"
    like, saved = own.get(codes, own.get(name)), [key for key in (name, codes, scales) if key in sizes]
    if like is None or all(key in own and own[key].shape == sizes[key] for key in saved):
        return {}
    if name in sizes:
        return {name: _empty(like, torch.float32)}
    return {codes: _empty(like, torch.uint8), scales: _scales(like, sizes[scales])}


def _empty(like: Any, dtype: torch.dtype) -> Any:
    """A tensor of another dtype, in the same parts on the same ranks."""
    if isinstance(like, Joined):
        return Joined([_empty(part, dtype) for part in like.parts])
    own = torch.empty_like(on_this_rank(like), dtype=dtype)
    return like_sharded(own, like, like.shape) if hasattr(like, "placements") else own


def _scales(like: Any, size: torch.Size) -> Any:
    """The scales of this rank's rows, in all columns; of a vector all."""
    if like.ndim < 2 or size.numel() == 1:
        return torch.empty(size, device=like.device)
    if isinstance(like, Joined):
        return Joined([_scales(part, torch.Size((part.shape[0], *size[1:]))) for part in like.parts])
    own = torch.empty(on_this_rank(like).shape[0], *size[1:], device=like.device)
    if not hasattr(like, "placements"):
        return own
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate() if one.is_shard(1) else one for one in like.placements]
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(own, like.device_mesh, placements, run_check=False, shape=size, stride=stride)


def _read(moment: Moment, codes: Any, scales: Any, first: int = 0) -> Any:
    """The values in float32, as the codes lie, which begin with element ``first`` of a row."""
    if isinstance(codes, Joined):
        own = scales.parts if isinstance(scales, Joined) else [scales] * len(codes.parts)
        starts = [start if codes.ndim < 2 else 0 for start, _ in codes.pieces()]
        return Joined([_read(moment, *of_part) for of_part in zip(codes.parts, own, starts, strict=True)])
    place = place_of(codes)
    first += place.first_row if codes.ndim < 2 else place.first_col
    wide = moment.read_codes(on_this_rank(codes), on_this_rank(scales), first)
    return like_sharded(wide, codes, codes.shape) if hasattr(codes, "placements") else wide


# --- delayed state ----------------------------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """A module's or a tensor's name in a plain model, of one in a model parts of which may be wrapped."""
    return re.sub(r"(_orig_mod|_checkpoint_wrapped_module)\.", "", name)


def _delayed(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Delayed state by its names in a plain model, each with its name in this one."""
    return {plain_name(name): (name, value) for name, value in delayed_state_dict(model).items()}


def gather_delayed(model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """The delayed state of all ranks, each of which calls it, for ``load_delayed``."""
    values = {name: value for name, (_, value) in _delayed(model).items()}
    shapes = {name: list(value.shape) for name, value in values.items()}
    if ranks.group is not None:
        told: dict[str, object] = {}
        for name, module in model.named_modules():
            if isinstance(module, RecipeModule):
                told |= told_of(module, plain_name(name))
        agree(told, [ranks.group])
    flat = torch.cat([value.flatten() for value in values.values()]) if values else torch.empty(0)
    return {"shapes": shapes, "ranks": ranks.gather(flat).cpu()}


def load_delayed(model: nn.Module, saved: dict[str, Any], ranks: Ranks) -> None:
    """Load what ``gather_delayed`` returned, each rank its own; of another number of ranks, a state for all.

    Where a layer's history has another length than the saved one, or none was saved, its state is emptied.
    """
    shapes = {name: torch.Size(shape) for name, shape in saved["shapes"].items()}
    rows = saved["ranks"].split([shape.numel() for shape in shapes.values()], dim=1)  # each [ranks that saved, n]
    parts = dict(zip(shapes, rows, strict=True))
    own, found = _delayed(model), {}
    for name, (mine, there) in own.items():
        history = name.replace(SCALE, HISTORY)
        if history not in shapes or shapes[history] != own[history][1].shape:
            found[mine] = torch.zeros_like(there)
        elif len(parts[name]) == ranks.size:
            found[mine] = parts[name][ranks.rank].reshape(shapes[name])
        else:
            found[mine] = _of_all_ranks(name, parts[name]).reshape(shapes[name])
    load_delayed_state_dict(model, found)


def _of_all_ranks(name: str, values: Tensor) -> Tensor:
    """One row for all: the largest amax, the smallest scale that was set."""
    if name.endswith(HISTORY):
        return values.amax(dim=0)
    least = torch.where(values > 0, values, torch.inf).amin(dim=0)
    return torch.where(least.isinf(), 0.0, least)


METADATA = ".metadata"  # DCP's name


class Writer(dcp.FileSystemWriter):
    """Says why it failed: an error that travels to other ranks loses its cause."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise CheckpointError(reason_of(error)) from error


class _Unpickler(pickle.Unpickler):
    """Loads the classes that DCP's metadata is made of, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return PurePath
        found = super().find_class(module, name) if module.partition(".")[0] == "torch" else None
        known = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if known and isinstance(found, type) and found.__module__ == module:
            return found
        if isinstance(found, torch.dtype) or (module, name) in _KNOWN:
            return found
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs")


_KNOWN = {("torch", "Size"), ("torch.serialization", "_get_layout")}


class MetadataReader(dcp.FileSystemReader):
    """Reads the metadata at once, by the unpickler above."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        path = Path(folder) / METADATA
        try:
            with open(path, "rb") as file:
                self._metadata = _Unpickler(file).load()
            self._metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # whatever a damaged file makes pickle raise
            raise CheckpointError(f"{path} is damaged ({reason_of(error)}): load another checkpoint") from error

    def size(self, name: str) -> torch.Size:
        """A saved tensor's; of anything else none."""
        return getattr(self._metadata.state_dict_metadata.get(name), "size", torch.Size())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._metadata


class TensorPlanner(dcp.DefaultLoadPlanner):
    """Reads tensors only."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor in this checkpoint: it was not saved by octavo")
