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
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
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

from octavo.distributed.dcp_files import METADATA, Reader, TensorPlanner, Writer, reason_of
from octavo.distributed.errors import CheckpointError, RankError
from octavo.distributed.ranks import Ranks, lost_ranks
from octavo.errors import first_line
from octavo.scaling.delayed import delayed_state_dict, load_delayed_state_dict

FORMAT = 1
LATEST = "latest"
CONTENT = "octavo.pt"
SCALE, HISTORY = ".delayed_scale", ".delayed_amax_history"


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
    root, ranks = Path(path), ranks or Ranks.of_process()
    with _told(f"cannot write a checkpoint to {root}", "what was saved before is kept"):
        folder = ranks.first(lambda: _new_folder(root))
        with ranks.together():
            tensors, content = _collect(_unwrapped(model), optimizer)
        content |= {"octavo_distributed": FORMAT, "delayed": _gather_delayed(model, ranks), "extra": extra}
        ranks.first(lambda: _require_plain(content))
        dcp.save(
            tensors,
            storage_writer=Writer(folder),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
        ranks.first(lambda: _finish(root, folder, content))


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
    """
    root, ranks = Path(path), ranks or Ranks.of_process()
    with _told(
        f"cannot read the checkpoint in {root}", "give the folder of a whole one, and the model it was saved from"
    ):
        folder = ranks.first(lambda: _latest(root))
        with ranks.together():
            content = _read_content(folder)
            tensors, state = _places(_unwrapped(model), optimizer, content)
            reader = Reader(folder)
        dcp.load(
            tensors,
            storage_reader=reader,
            planner=TensorPlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
        with ranks.together():
            set_model_state_dict(_unwrapped(model), state["model"])
            if optimizer is not None:
                _set_optimizer(_unwrapped(model), optimizer, state["optimizer"])
            _load_delayed(model, content["delayed"], ranks)
    return content["extra"]


def load_extra(path: str | os.PathLike[str]) -> Any:
    """The last checkpoint's ``extra``, read by this process alone.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    with _told(f"cannot read the checkpoint in {path}", "give the folder of a whole one"):
        return _read_content(_latest(Path(path)))["extra"]


@contextlib.contextmanager
def _told(what: str, remedy: str) -> Iterator[None]:
    """Any failure as a CheckpointError; torch's remark that it works alone is left out."""
    try:
        with lost_ranks(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is .*")
            yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank} failed: {reason_of(cause)}; {remedy}") from error
    except (RankError, OSError, RuntimeError, ValueError, TypeError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{what}: {reason_of(error)}; {remedy}") from error


# --- folders ----------------------------------------------------------------------------------------------------------


def _new_folder(root: Path) -> str:
    """Makes the folder of the next save, once what cut-off saves left is gone."""
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


def _finish(root: Path, folder: str, content: dict[str, Any]) -> None:
    """Makes the folder the last checkpoint, and takes away the one before."""
    with open(Path(folder) / CONTENT, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial = root / f"{LATEST}.partial"
    with open(partial, "w") as pointer:
        pointer.write(Path(folder).name + "\n")
        pointer.flush()
        os.fsync(pointer.fileno())
    os.replace(partial, root / LATEST)
    for other in root.glob("save-*"):
        if other != Path(folder):
            shutil.rmtree(other, ignore_errors=True)


# --- what is in them --------------------------------------------------------------------------------------------------


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile, whose names torch leaves on weight_scale_inv."""
    while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, DistributedDataParallel) else model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def _collect(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors, by name, and the rest."""
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in get_model_state_dict(model).items():
        (tensors if isinstance(value, Tensor) else others)[f"model.{name}"] = value
    content: dict[str, Any] = {"model": sorted([*tensors, *others]), "others": others, "states": None, "groups": []}
    if optimizer is not None and optimizer.state:  # torch would step one that has no state yet
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
        content["groups"], content["states"] = state["param_groups"], {}
        for name, values in state["state"].items():
            content["states"][name] = sorted(values)
            for key, value in values.items():
                (tensors if isinstance(value, Tensor) else others)[f"optimizer.{name}.{key}"] = value
    return tensors, content


def _places(
    model: nn.Module, optimizer: Optimizer | None, content: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where the checkpoint's tensors go, by name, and the state dicts that they are part of."""
    state: dict[str, Any] = {"model": get_model_state_dict(model), "optimizer": None}
    places = {f"model.{name}": value for name, value in state["model"].items()}
    missing, unexpected = sorted(places.keys() - content["model"]), sorted(content["model"] - places.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"the checkpoint holds another model: it has no {missing[:3]}, and {unexpected[:3]} besides; build the "
            "model that was saved (converting it changes no name)"
        )
    if optimizer is not None and content["states"] is not None:
        optimizer.zero_grad()
        own: Any = get_optimizer_state_dict(model, optimizer)["state"]
        strange = [name for name, keys in content["states"].items() if not set(keys) <= own.get(name, {}).keys()]
        if strange:
            raise CheckpointError(
                f"its optimizer kept {content['states'][strange[0]]} of {strange[0]}, which this one does not: give an "
                "optimizer of the same class and the same parameters"
            )
        wanted = {name: {key: own[name][key] for key in keys} for name, keys in content["states"].items()}
        state["optimizer"] = {"state": wanted, "param_groups": content["groups"]}
        places |= {f"optimizer.{name}.{key}": value for name, keys in wanted.items() for key, value in keys.items()}
    for name, value in content["others"].items():
        part, _, rest = name.partition(".")
        places.pop(name, None)
        if part == "model":
            state["model"][rest] = value
        elif state["optimizer"] is not None:
            parameter, _, key = rest.rpartition(".")
            state["optimizer"]["state"][parameter][key] = value
    return places, state


def _set_optimizer(model: nn.Module, optimizer: Optimizer, state: dict[str, Any] | None) -> None:
    if state is None:  # it was saved before its first step
        optimizer.state.clear()
        return
    set_optimizer_state_dict(model, optimizer, state)


def _require_plain(content: dict[str, Any]) -> None:
    """Raises CheckpointError where `weights_only` could not read it."""
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


# --- delayed state ----------------------------------------------------------------------------------------------------


def _delayed(model: nn.Module) -> dict[str, str]:
    """The names of delayed state, as plain models have them and as this one does."""
    wrapped = isinstance(model, DistributedDataParallel)
    names = {}
    for name in delayed_state_dict(model):
        parts = name.split(".")[1:] if wrapped else name.split(".")
        names[".".join(part for part in parts if part not in ("_orig_mod", "_checkpoint_wrapped_module"))] = name
    return names


def _gather_delayed(model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    own, names = delayed_state_dict(model), _delayed(model)
    shapes = {name: list(own[mine].shape) for name, mine in names.items()}
    flat = torch.cat([own[mine].flatten() for mine in names.values()]) if names else torch.empty(0)
    return {"shapes": shapes, "ranks": ranks.gather(flat).cpu()}


def _load_delayed(model: nn.Module, saved: dict[str, Any], ranks: Ranks) -> None:
    values, parts = saved["ranks"], {}
    sizes = [torch.Size(shape) for shape in saved["shapes"].values()]
    for (name, _), size, part in zip(
        saved["shapes"].items(), sizes, values.split([size.numel() for size in sizes], dim=1), strict=True
    ):
        one = part[ranks.rank] if len(values) == ranks.size else _of_all_ranks(name, part)
        parts[name] = one.reshape(size)
    own = delayed_state_dict(model)
    for name, mine in _delayed(model).items():
        module = name.removesuffix(SCALE).removesuffix(HISTORY)
        history, there = parts.get(module + HISTORY), own[mine]
        fits = history is not None and _history(own, mine).shape == history.shape
        own[mine] = parts[name] if fits else torch.zeros_like(there)
    load_delayed_state_dict(model, own)


def _history(own: Mapping[str, Tensor], name: str) -> Tensor:
    return own[name.removesuffix(SCALE).removesuffix(HISTORY) + HISTORY]


def _of_all_ranks(name: str, values: Tensor) -> Tensor:
    """One row for all: the largest amax, the smallest scale that was set."""
    if name.endswith(HISTORY.lstrip(".")):
        return values.amax(dim=0)
    least = torch.where(values > 0, values, torch.inf).amin(dim=0)
    return torch.where(least.isinf(), 0.0, least)
