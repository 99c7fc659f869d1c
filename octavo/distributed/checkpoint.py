"""Checkpoints of many ranks: written by all of them, readable by any number, each there as a whole or not at all.

    path/save-00000007/           the last one: of those that have a .metadata, the one with the largest number
        .metadata, __0_0.distcp   torch.distributed.checkpoint: the model's tensors and the optimizer's
        octavo.pt                 names, groups of the optimizer, delayed state of each rank, ``extra``
    path/save-00000008.partial/   the next one; renamed once all ranks have written it

A save that fails removes its folder, and what a killed one has left the next save removes. No file can run code when it
is read: octavo.pt and the tensors are read with ``weights_only=True``. DCP's .metadata, a pickle of sizes and places,
is read by an unpickler that loads their classes and no others.

Damage is found as a file is read, on each rank in what that rank reads: octavo.pt and each tensor's shard are archives
of torch.save, with a CRC-32 a record, and octavo.pt has that of .metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import pickle
import re
import shutil
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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

from octavo.distributed.files import PARTIAL, reason_of, replacing
from octavo.distributed.ranks import CheckpointError, Ranks
from octavo.errors import OctavoError, first_line
from octavo.nn.linear import Linear, SeparateSplits
from octavo.nn.recipe_module import RecipeModule
from octavo.reading import check_records, file_inside
from octavo.scaling.delayed import HISTORY, delayed_state_dict, load_delayed_state_dict
from octavo.tensor.collectives import check_ranks_agree
from octavo.weights.files import SCALE_INV
from octavo.weights.fsdp2 import like_sharded, on_this_rank, own_slices, without_hooks
from octavo.weights.gathered import settings_of

__all__ = ["save_checkpoint", "async_save_checkpoint", "load_checkpoint", "load_extra"]

FORMAT = 1
CONTENT = "octavo.pt"
REASSURANCE = "what was saved before is kept"
REMEDY = "remove its folder to load the checkpoint before"
SEPARATE = "octavo.nn.separate_splits(model)"
METADATA_CRC32 = "metadata_crc32"  # in octavo.pt
# the entries of state dicts to fill, as (state dict, key), with each value of a checkpoint: several where splits are
# separate in the model and one Linear in the checkpoint
Places = dict[str, list[tuple[dict[str, Any], str]]]
SplitRows = dict[str, dict[str, int]]  # for each parameter of such a Linear: the splits' parameters, and their rows


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    ranks: Ranks | None = None,
    keep: int = 1,
) -> None:
    """Save model, optimizer and delayed state; every rank calls it.

    Args:
        path: a folder that all ranks see.
        model: under fully_shard, DistributedDataParallel or neither.
        optimizer: the model's; None: a checkpoint without one.
        extra: what else to save; tensors, numbers, strings, and lists and dicts of these. Rank 0's is saved.
        ranks: the ranks that save (default: those of the default process group, or this process alone).
        keep: how many checkpoints stay in the folder, this one included; older ones are removed.

    Raises:
        CheckpointError: on all ranks, if the save failed on any. The checkpoints before are still there.
        ValueError: for ``keep`` below 1.

    Example:
        >>> import tempfile, torch
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 4)
        >>> save_checkpoint(folder, model, torch.optim.AdamW(model.parameters()), {"step": 120})
        >>> load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))
        {'step': 120}
    """
    ranks = ranks or Ranks.of_process()
    tensors, writer = _begin(Path(path), model, optimizer, extra, ranks, keep)
    _write(tensors, writer, ranks)


def async_save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    *,
    ranks: Ranks,
    keep: int = 1,
) -> Future[None]:
    """Copy what `save_checkpoint` saves to the CPU, and write it while training goes on; every rank calls it.

    Args:
        path, model, optimizer, extra, keep: as for save_checkpoint. They may change once this has returned.
        ranks: the ranks that save: ``Ranks()`` for this process alone, else of a process group that nothing else uses
            until the save has ended, such as ``Ranks(dist.new_group())``, made once. At most one save may run.

    Returns:
        Its ``result()`` waits for the checkpoint to be there, and raises the CheckpointError of a save that failed.

    Raises:
        CheckpointError: on all ranks, if what to save could not be collected on any.
        ValueError: ``ranks`` are of the default process group, which training uses; or for ``keep`` below 1.

    Example:
        >>> import tempfile, torch
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 4)
        >>> saving = async_save_checkpoint(folder, model, extra={"step": 120}, ranks=Ranks())
        >>> saving.result()
        >>> load_extra(folder)
        {'step': 120}
    """
    if ranks.group is not None and ranks.group is torch.distributed.group.WORLD:
        raise ValueError("training uses the default process group meanwhile: give Ranks(torch.distributed.new_group())")
    tensors, writer = _begin(Path(path), model, optimizer, extra, ranks, keep)
    # sharded alike
    copies = {name: without_hooks(value).detach().to("cpu", copy=True) for name, value in tensors.items()}
    executor = ThreadPoolExecutor(1, "octavo-save")
    saving = executor.submit(_write, copies, writer, ranks)
    executor.shutdown(wait=False)
    return saving


def _begin(
    root: Path, model: nn.Module, optimizer: Optimizer | None, extra: Any, ranks: Ranks, keep: int
) -> tuple[dict[str, Any], Writer]:
    """Return the tensors of a checkpoint, which are the model's own, and the Writer of its files."""
    if keep < 1:
        raise ValueError(f"keep={keep!r} must be at least 1: the checkpoint that is saved")
    model = PlainModel(model).module
    with _as_checkpoint_errors(f"cannot write a checkpoint to {root}", REASSURANCE, ranks):
        model_state = get_model_state_dict(model)  # outside of together(): ranks may agree on a scale in it
        with _without_first_step(optimizer):  # likewise
            optimizer_state = None if optimizer is None else get_optimizer_state_dict(model, optimizer)
        with ranks.together():
            tensors, content = _collect(model_state, optimizer_state)
        content |= {"octavo_distributed": FORMAT, "delayed": PlainModel(model).gather_delayed(ranks), "extra": extra}
        with ranks.together():
            content_copy = _copy_content(content) if ranks.rank == 0 else {}
        return tensors, Writer(ranks.from_rank_0(lambda: _new_folder(root)), content_copy, keep)


def _write(tensors: dict[str, Any], writer: Writer, ranks: Ranks) -> None:
    """Write and publish a checkpoint; if that fails anywhere, remove what was written."""
    folder = Path(writer.path)
    try:
        with _as_checkpoint_errors(f"cannot write a checkpoint to {folder.parent}", REASSURANCE, ranks):
            dcp.save(tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, ranks: Ranks | None = None
) -> Any:
    """Load the last checkpoint; every rank calls it. Gradients of an optimizer whose state is loaded are dropped.

    On as many ranks as saved it, each rank gets its own delayed state back, and training continues bit for bit. On
    another number of ranks, all get the same state for a role: the largest amax of any rank at each place of the
    history, and the smallest scale of any rank, which has room for all their tensors. A layer whose delayed state is
    not in the checkpoint starts with an empty one; state of layers that are not delayed here is ignored.

    Args:
        path: the folder that was saved to.
        model: of the same names and shapes, converted or not; under fully_shard, DistributedDataParallel or neither.
        optimizer: the model's; None: the saved optimizer's state is not loaded.
        ranks: as for save_checkpoint.

    Returns:
        ``extra`` as it was saved.

    Raises:
        CheckpointError: on all ranks, if the load failed on any. If tensors were damaged, some of the model's and the
            optimizer's are loaded and others are not.

    Example:
        >>> import tempfile, torch
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 4)
        >>> save_checkpoint(folder, model, extra={"step": 120})
        >>> load_checkpoint(folder, torch.nn.Linear(4, 4))
        {'step': 120}
    """
    root, ranks, model = Path(path), ranks or Ranks.of_process(), PlainModel(model).module
    failing = f"cannot read the checkpoint in {root}", "give the folder of a whole one, and the model it was saved from"
    with _as_checkpoint_errors(*failing, ranks), contextlib.ExitStack() as without_first_step:
        folder = ranks.from_rank_0(lambda: _latest(root))
        with ranks.together():
            content = _read_content(folder)
            reader = MetadataReader(folder, content[METADATA_CRC32])
        model_state = get_model_state_dict(model)  # outside of together(): ranks may agree on a scale in it
        with ranks.together():
            splits = _splits_to_fill(model, content)
            places = _model_to_fill(model, model_state, content, splits)
        optimizer_state: Any = None  # stays so without one in the checkpoint
        if optimizer is not None and content["states"] is not None:
            optimizer.zero_grad()
            if not content["states"]:
                without_first_step.enter_context(_without_first_step(optimizer))
            present_state = get_optimizer_state_dict(model, optimizer)  # it steps a new one: ranks agree on amaxes
            with ranks.together():
                optimizer_state, places_in_it = _optimizer_to_fill(optimizer, present_state, content, reader, splits)
            places |= places_in_it
        others = content["others"]  # values that are no tensors
        to_fill = {name: [state[key] for state, key in place] for name, place in places.items() if name not in others}
        tensors = {name: _to_read(parts, reader, name) for name, parts in to_fill.items()}
        group_options = {"process_group": ranks.group, "no_dist": ranks.group is None}
        dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), **group_options)
        with ranks.together():
            for name, parts in to_fill.items():
                if len(parts) > 1:  # else dcp.load has filled it
                    _fill(parts, tensors[name])
            for name in others.keys() & places.keys():
                for state, key in places[name]:
                    state[key] = others[name]
            set_model_state_dict(model, model_state)
            if optimizer is not None and optimizer_state is None:  # it begins anew
                optimizer.state.clear()
            elif optimizer is not None:
                set_optimizer_state_dict(model, optimizer, optimizer_state)
            PlainModel(model).load_delayed(content["delayed"], ranks)
    return content["extra"]


def load_extra(path: str | os.PathLike[str]) -> Any:
    """Return the last checkpoint's ``extra``, read by this process alone.

    Args:
        path: the folder that was saved to.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, torch.nn.Linear(4, 4), extra={"step": 120})
        >>> load_extra(folder)
        {'step': 120}
    """
    with _as_checkpoint_errors(f"cannot read the checkpoint in {path}", "give the folder of a whole one", Ranks()):
        return _read_content(_latest(Path(path)))["extra"]


@contextlib.contextmanager
def _as_checkpoint_errors(what: str, remedy: str, ranks: Ranks) -> Iterator[None]:
    """Raise any failure as a CheckpointError; silence torch's warning that there is no process group."""
    try:
        # filters of warnings are those of all threads: they change where there is that warning, and not elsewhere
        with ranks.as_rank_errors(), warnings.catch_warnings() if ranks.group is None else contextlib.nullcontext():
            if ranks.group is None:
                warnings.filterwarnings("ignore", message=".*torch.distributed is .*")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank} failed: {reason_of(cause)}; {remedy}") from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged or a stranger's file makes torch or Python raise
        says_enough = isinstance(error, OctavoError | OSError | RuntimeError | ValueError | TypeError)
        kind = "" if says_enough else f"{type(error).__name__}: "
        raise CheckpointError(f"{what}: {kind}{reason_of(error)}; {remedy}") from error


# --- folders ----------------------------------------------------------------------------------------------------------


def _new_folder(root: Path) -> str:
    """Remove the folders that interrupted saves have left, and make that of the next save."""
    root.mkdir(parents=True, exist_ok=True)
    for unfinished_folder in root.glob(f"save-*.{PARTIAL}"):
        shutil.rmtree(unfinished_folder)
    number = 1 + max((int(digits) for _, digits in _numbered_folders(root)), default=0)
    folder = root / f"save-{number:08}.{PARTIAL}"
    folder.mkdir()
    return str(folder)


def _numbered_folders(root: Path) -> list[tuple[Path, str]]:
    folders = ((path, path.name.removeprefix("save-")) for path in root.glob("save-*"))
    return [(path, digits) for path, digits in folders if digits.isdecimal()]


def checkpoints_in(root: Path) -> list[Path]:
    """Return the folders of the whole checkpoints in a folder, the last one first."""
    whole = [(int(digits), path) for path, digits in _numbered_folders(root) if (path / METADATA).is_file()]
    return [path for _, path in sorted(whole, reverse=True)]


def _latest(root: Path) -> str:
    if not (checkpoints := checkpoints_in(root)):
        raise CheckpointError(f"{root} holds no whole checkpoint: give the folder that save_checkpoint was given")
    return str(checkpoints[0])


def _publish(folder: Path, keep: int) -> None:
    """Make the folder the last checkpoint, and remove all but the last ``keep``."""
    folder.rename(folder.with_suffix(""))
    for old in checkpoints_in(folder.parent)[keep:]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old.rename(f"{old}.{PARTIAL}"))  # never whole by its name while it goes


# --- their content ----------------------------------------------------------------------------------------------------


class _TruthyState(defaultdict[Any, Any]):
    """An empty state of an optimizer that counts as true: torch steps an optimizer whose state is false."""

    def __bool__(self) -> bool:
        return True


@contextlib.contextmanager
def _without_first_step(optimizer: Optimizer | None) -> Iterator[None]:
    """Keep torch from stepping an optimizer that has no state."""
    if optimizer is None or optimizer.state:
        yield
        return
    state, optimizer.state = optimizer.state, _TruthyState(dict)
    try:
        yield
    finally:
        if isinstance(optimizer.state, _TruthyState):  # no other was loaded
            optimizer.state = state


def _collect(model_state: Any, optimizer_state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors to save, by name, and the content of octavo.pt."""
    values = {f"model.{name}": value for name, value in model_state.items()}
    content: dict[str, Any] = {"model": sorted(values), "states": None, "groups": []}
    if optimizer_state is not None:
        content |= {"groups": optimizer_state["param_groups"], "states": {}}
        for name, state in optimizer_state["state"].items():
            content["states"][name] = sorted(state)
            values |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return tensors, content | {"others": {name: value for name, value in values.items() if name not in tensors}}


def _splits_to_fill(model: nn.Module, content: dict[str, Any]) -> SplitRows:
    """Return the splits that are separate in the model and one Linear in the checkpoint."""
    splits: SplitRows = {}
    for layer_name, layer in model.named_modules():
        for name in ("weight", "bias", f"weight{SCALE_INV}") if isinstance(layer, SeparateSplits) else ():
            if f"model.{(joined := _full_name(layer_name, name))}" in content["model"]:
                splits[joined] = {_full_name(layer_name, split, name): n for split, n in layer.splits.items()}
    return splits


def _full_name(*names: str) -> str:
    """Return a part's name in a model, by the names of the modules around it and its own; the model's is empty."""
    return ".".join(names).lstrip(".")


def _to_read(parts: list[Any], reader: MetadataReader, name: str) -> Any:
    """Return the tensor to read: that to fill, or, for several splits, a whole one of the rows of all."""
    if len(parts) == 1:
        return parts[0]
    first = on_this_rank(parts[0])
    return torch.empty(reader.size(name), dtype=first.dtype, device=first.device)


def _fill(parts: list[Any], whole: Tensor) -> None:
    """Fill the tensors of splits with their rows of a whole one, or each with it if it is one value for all."""
    rows = [whole] * len(parts) if parts[0].shape == whole.shape else whole.split([len(part) for part in parts])
    for part, values in zip(parts, rows, strict=True):
        on_this_rank(part).copy_(values[own_slices(part.shape, part)])


def _model_to_fill(model: nn.Module, model_state: Any, content: dict[str, Any], splits: SplitRows) -> Places:
    """Return for each of the model's values in the checkpoint the places in its state dict to fill."""
    names = {name: [name] for name in model_state.keys() - {part for parts in splits.values() for part in parts}}
    names |= {whole: [*parts] for whole, parts in splits.items()}
    places: Places = {f"model.{name}": [(model_state, key) for key in keys] for name, keys in names.items()}
    missing, unexpected = sorted(places.keys() - content["model"]), sorted(content["model"] - places.keys())
    if missing or unexpected:
        remedy = "build the model that was saved (of octavo, only weight_storage='fp8' adds names)"
        for layer_name, layer in model.named_modules():
            splits_here = layer.splits if isinstance(layer, Linear) else None
            if any(f"model.{_full_name(layer_name, split, 'weight')}" in unexpected for split in splits_here or ()):
                remedy = f"the splits of {layer_name!r} were separate, as under ColwiseParallel: {SEPARATE}"
        raise CheckpointError(
            f"the checkpoint holds another model: it has no {missing[:3]}, and {unexpected[:3]} besides; {remedy}"
        )
    return places


def _optimizer_to_fill(
    optimizer: Optimizer, present: Any, content: dict[str, Any], reader: MetadataReader, splits: SplitRows
) -> tuple[dict[str, Any], Places]:
    """Return an optimizer's state dict to fill, and for each of its values in the checkpoint the places in that.

    It has the checkpoint's groups, and tensors of the ``present`` state dict, but for moments that were saved in
    another form: these have new tensors of that form.
    """
    places: Places = {}
    states: dict[str, dict[str, Any]] = {}
    groups = [
        group | {"params": [part for name in group["params"] for part in splits.get(name, [name])]}
        for group in content["groups"]
    ]
    for name, keys in content["states"].items():
        sizes = {key: reader.size(f"optimizer.{name}.{key}") for key in keys}
        rows_by_part = splits.get(name, {name: 0})
        whole_rows = sum(rows_by_part.values())
        for part, rows in rows_by_part.items():
            part_sizes = {key: _size_of_part(size, rows, whole_rows) for key, size in sizes.items()}
            state = present["state"].get(part, {})
            for moment in getattr(optimizer, "names", ()):
                state = state | _moment_to_fill(moment, state, part_sizes)
            if not set(keys) <= state.keys():
                remedy = "give an optimizer of the same class and the same parameters"
                raise CheckpointError(f"its optimizer kept {keys} of {name}, which this one does not: {remedy}")
            states[part] = {key: state[key] for key in keys}
            for key in keys:
                places.setdefault(f"optimizer.{name}.{key}", []).append((states[part], key))
    return {"state": states, "param_groups": groups}, places


def _size_of_part(size: torch.Size, rows: int, whole_rows: int) -> torch.Size:
    """Return the size that a tensor of a weight's state has for a split of these rows; 0: the weight has no splits."""
    return torch.Size((rows, *size[1:])) if rows and size[:1] == (whole_rows,) else size


def _pack(content: dict[str, Any]) -> bytes:
    """Return the bytes of octavo.pt."""
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


def _copy_content(content: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the content of octavo.pt, as `weights_only` reads it."""
    try:
        return dict(torch.load(io.BytesIO(_pack(content)), weights_only=True))
    except Exception as error:
        allowed = "tensors, numbers, strings, lists and dicts"
        message = f"extra, or a group of the optimizer, holds more than {allowed}: {first_line(error)}"
        raise CheckpointError(message) from error


def _read_content(folder: str) -> dict[str, Any]:
    try:
        saved = file_inside(Path(folder), CONTENT).read_bytes()
        check_records(saved)
        content: dict[str, Any] = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
        if content["octavo_distributed"] != FORMAT:
            raise ValueError("another format")
        if missing := {"model", "states", "groups", "others", "delayed", "extra", METADATA_CRC32} - content.keys():
            raise ValueError(f"it has no {sorted(missing)}")
    except Exception as error:  # whatever a damaged file makes torch raise
        raise CheckpointError(
            f"{Path(folder) / CONTENT} is damaged or not octavo's ({reason_of(error)}): {REMEDY}"
        ) from error
    return content


# --- moments that were saved in other codes than they have here, or on one side in none -------------------------------


def _moment_to_fill(name: str, state: dict[str, Any], sizes: dict[str, torch.Size]) -> dict[str, Any]:
    """Return tensors to fill with a moment as it was saved, if a parameter's ``state`` has another form; else none."""
    codes, scales = f"{name}_codes", f"{name}_scale_inv"
    like, saved = state.get(codes, state.get(name)), [key for key in (name, codes, scales) if key in sizes]
    if like is None or all(key in state and state[key].shape == sizes[key] for key in saved):
        return {}
    if name in sizes:
        return {name: _empty(like, torch.float32)}
    # scales of all rows: the optimizer picks this rank's
    return {codes: _empty(like, torch.uint8), scales: torch.empty(sizes[scales], device="cpu", dtype=torch.float32)}


def _empty(like: Any, dtype: torch.dtype) -> Any:
    """Return an empty tensor of another dtype, sharded as ``like``."""
    return like_sharded(torch.empty_like(on_this_rank(like), dtype=dtype), like, like.shape)


# --- delayed state ----------------------------------------------------------------------------------------------------


class PlainModel:
    """A model as checkpoints name its parts: without DistributedDataParallel and torch.compile, or wrappers' prefixes.

    Attributes:
        module: the model inside these two, as torch leaves their prefixes on weight_scale_inv.
    """

    def __init__(self, model: nn.Module) -> None:
        while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
            model = model.module if isinstance(model, DistributedDataParallel) else model._modules["_orig_mod"]  # type: ignore[assignment]
        self.module = model

    def layers(self) -> dict[str, RecipeModule]:
        """Return octavo's modules by their plain names."""
        named = self.module.named_modules()
        return {_plain_name(name): module for name, module in named if isinstance(module, RecipeModule)}

    def _delayed(self) -> dict[str, tuple[str, Tensor]]:
        """Return delayed state by its plain names: (its name in this model, the tensor)."""
        return {_plain_name(name): (name, value) for name, value in delayed_state_dict(self.module).items()}

    def gather_delayed(self, ranks: Ranks) -> dict[str, Any]:
        """Return the delayed state of all ranks, for ``load_delayed``; all ranks call it."""
        values = {name: value for name, (_, value) in self._delayed().items()}
        shapes = {name: list(value.shape) for name, value in values.items()}
        if ranks.group is not None:
            settings = [settings_of(module, name).items() for name, module in self.layers().items()]
            check_ranks_agree(dict(itertools.chain.from_iterable(settings)), [ranks.group])
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        flat = torch.cat([value.flatten() for value in values.values()] or [nothing])
        return {"shapes": shapes, "ranks": ranks.gather(flat).cpu()}

    def load_delayed(self, saved: dict[str, Any], ranks: Ranks) -> None:
        """Load what ``gather_delayed`` returned: each rank its own state, or one for all if other ranks saved it.

        A layer's state is emptied if none was saved, or if its history has another length than the saved one.
        """
        shapes = {name: torch.Size(shape) for name, shape in saved["shapes"].items()}
        rows = saved["ranks"].split([shape.numel() for shape in shapes.values()], dim=1)  # each [ranks that saved, n]
        by_rank = dict(zip(shapes, rows, strict=True))
        present, loaded = self._delayed(), {}
        linear_of_split = {  # a split whose state was not saved has that of the Linear that it was part of
            _plain_name(_full_name(layer_name, split)): _plain_name(layer_name)
            for layer_name, layer in self.module.named_modules()
            if isinstance(layer, SeparateSplits)
            for split in layer.splits
        }
        for plain_here, (name_here, value) in present.items():
            layer_here, _, kind = plain_here.rpartition(".")
            saved_layer = layer_here if plain_here in shapes else linear_of_split.get(layer_here, layer_here)
            saved_name, saved_history = (_full_name(saved_layer, key) for key in (kind, HISTORY))
            _, history_here = present[_full_name(layer_here, HISTORY)]
            if saved_history not in shapes or shapes[saved_history] != history_here.shape:
                loaded[name_here] = torch.zeros_like(value)
            elif len(by_rank[saved_name]) == ranks.size:
                loaded[name_here] = by_rank[saved_name][ranks.rank].reshape(shapes[saved_name])
            else:
                loaded[name_here] = _one_for_all_ranks(saved_name, by_rank[saved_name]).reshape(shapes[saved_name])
        load_delayed_state_dict(self.module, loaded)


def _plain_name(name: str) -> str:
    """Return the name in a plain model of a module or tensor whose name here may have wrappers' prefixes."""
    return re.sub(r"(_orig_mod|_checkpoint_wrapped_module)\.", "", name)


def _one_for_all_ranks(name: str, values: Tensor) -> Tensor:
    """Return one row for all ranks: the largest amax, or the smallest scale that was set."""
    if name.endswith(HISTORY):
        return values.amax(dim=0)
    least = torch.where(values > 0, values, torch.inf).amin(dim=0)
    return torch.where(least.isinf(), 0.0, least)


METADATA = ".metadata"  # DCP's name


class Writer(dcp.FileSystemWriter):
    """DCP's writer of a partial folder, which octavo.pt completes and which is published once all ranks have written.

    ``content``: that of octavo.pt. Errors say why they are: those that are sent to other ranks lose their cause.
    """

    def __init__(self, folder: str, content: dict[str, Any], keep: int) -> None:
        super().__init__(folder)
        self._content, self._keep = content, keep

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise CheckpointError(reason_of(error)) from error

    def finish(self, *args: Any, **kwargs: Any) -> None:
        super().finish(*args, **kwargs)
        folder = Path(self.path)
        with replacing(folder / CONTENT) as file:
            file.write(_pack({**self._content, METADATA_CRC32: zlib.crc32((folder / METADATA).read_bytes())}))
        _publish(folder, self._keep)


class _Unpickler(pickle.Unpickler):
    """An unpickler that loads the classes of DCP's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return PurePath
        loaded = super().find_class(module, name) if module.partition(".")[0] == "torch" else None
        is_dcp = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        is_class_of_dcp = is_dcp and isinstance(loaded, type) and loaded.__module__ == module
        if is_class_of_dcp or isinstance(loaded, torch.dtype) or (module, name) in _OTHER_CLASSES:
            return loaded
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs")


_OTHER_CLASSES = {("torch", "Size"), ("torch.serialization", "_get_layout")}


class MetadataReader(dcp.FileSystemReader):
    """DCP's reader, which reads the metadata when created, with the unpickler above, and checks all that it reads.

    ``crc32``: that of the metadata's file.
    """

    def __init__(self, folder: str, crc32: int) -> None:
        super().__init__(folder)
        try:
            pickled = file_inside(Path(folder), METADATA).read_bytes()
            if crc32 != zlib.crc32(pickled):
                raise ValueError("it is not what was written, by its CRC-32")
            self._metadata = _Unpickler(io.BytesIO(pickled)).load()
            self._metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # whatever a damaged file makes pickle raise
            raise CheckpointError(f"{Path(folder) / METADATA} is damaged ({reason_of(error)}): {REMEDY}") from error

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Check and read one saved shard after the other."""
        for item in plan.items:
            name, place = item.storage_index.fqn, "the metadata"
            try:
                shard = self.storage_data[item.storage_index]
                place = str(Path(self.path) / shard.relative_path)
                with open(file_inside(Path(self.path), shard.relative_path), "rb") as file:
                    file.seek(shard.offset)
                    check_records(file.read(shard.length))
                super().read_data(dataclasses.replace(plan, items=[item]), planner)
            except CheckpointError:
                raise
            except Exception as error:  # whatever a damaged file makes torch raise
                raise CheckpointError(f"{place}: {name} is damaged ({reason_of(error)}): {REMEDY}") from error
        return super().read_data(dataclasses.replace(plan, items=[]), planner)

    def size(self, name: str) -> torch.Size:
        """Return the size of a saved tensor; an empty size for anything else."""
        return getattr(self._metadata.state_dict_metadata.get(name), "size", torch.Size())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._metadata


class TensorPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, which refuses everything but tensors."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor in this checkpoint: it was not saved by octavo")
