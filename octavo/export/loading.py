"""Loading of checkpoints, as published on a hub, into a model whose weights live in FP8: codes stay codes.

It reads the layouts of export/layouts.py and similar ones: scales of 128 x 128 or 1 x 32 blocks, of a whole weight or
of its rows, in float32, bfloat16 or E8M0 (its bytes too), named as ``layouts.LAYOUTS`` says; and weights
in high precision. Names may be those on the hub where transformers' model has others. Of a sharded model each rank
reads its own part of a file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import require
from octavo.export.checksums import CheckedFile
from octavo.export.layouts import LAYOUTS, MX, SQUARE, places_in
from octavo.granularity import Granularity
from octavo.nn.recipe_module import RecipeModule
from octavo.reading import file_inside, read_json
from octavo.tensor.scaled_tensor import ScaledTensor
from octavo.weights.files import SCALE_INV, checked_granularity
from octavo.weights.fsdp2 import on_this_rank, own_slices
from octavo.weights.stored import StoredWeight, take_values

SCALES = tuple(dict.fromkeys(layout.scale_ending for layout in LAYOUTS.values()))  # of the names of all files' scales
OF_INPUTS = re.compile(r"\.(input_scale|activation_scale|k_scale|v_scale|q_scale|output_scale)$")  # of static casts
FileReader = Callable[[Path], CheckedFile]
Slices = tuple[slice, ...]  # of a tensor, one for each dimension
OwnPart = tuple[StoredWeight, bool]  # (this rank's part of a stored weight, whether it was rounded to new codes)


class FileScales(NamedTuple):
    """The scale_inv of codes, and which codes share one."""

    scale_inv: Tensor
    granularity: Granularity


def places_of_experts(model: nn.Module) -> dict[str, dict[str, tuple[int, slice]]]:
    """Return ``places_in`` of each parameter of experts that are stored in FP8, by its name."""
    experts = ((key, p) for key, p in model.named_parameters() if p.ndim == 3)
    return {key: places_in(model, key, p.shape) for key, p in experts if isinstance(on_this_rank(p), StoredWeight)}


def renaming(model: nn.Module, state_dict: dict[str, Tensor]) -> Callable[[str], str]:
    """Return a function from a checkpoint's names to the model's: transformers' renaming of its models, or none."""
    if (transformers := sys.modules.get("transformers")) is None or not isinstance(model, transformers.PreTrainedModel):
        return lambda key: key
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]

    def renamed(key: str) -> str:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state_dict)
        if pattern is not None:
            raise ValueError(
                f"{key} is joined with others by transformers ({name}), which is not stored in FP8 in the model: "
                "octavo.convert(model, recipe, select, weight_storage='fp8') with a select that takes the experts"
            )
        return name

    return renamed


def split_stored(model: nn.Module, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (codes and scales of weights that live in FP8, by the model's names; the other tensors as they are).

    ``model``: a transformers model; ``state_dict``, perhaps with a hub's names, is left as it is.
    """
    renamed = renaming(model, model.state_dict())
    stored: dict[str, Any] = {}
    others = dict(state_dict)
    for key, places in places_of_experts(model).items():
        if not places or any(name not in others or others[name].dtype != torch.uint8 for name in places):
            continue  # they are no codes: from_pretrained joins them
        matrices = [others.pop(name) for name in places]
        experts, rows, columns = model.get_parameter(key).shape
        codes = stored[key] = matrices[0].new_empty(experts, rows, 1, columns)
        for (expert, its_rows), matrix in zip(places.values(), matrices, strict=True):
            codes[expert, its_rows] = matrix
    for scale_name in [name for name in state_dict if name.endswith(SCALE_INV)]:
        weight_name = scale_name.removesuffix(SCALE_INV)
        stored[scale_name.replace(weight_name, renamed(weight_name))] = others.pop(scale_name)
        if weight_name in others:
            stored[renamed(weight_name)] = others.pop(weight_name)
    return stored, others


class _CheckpointTensor(NamedTuple):
    """A tensor of the checkpoint; of experts perhaps all matrices together, which are tensors of their own there.

    Attributes:
        file, key: the open file, and the tensor's name in it; of experts' matrices those of the first.
        scales: the file and name of its scales; None: it is in high precision.
        shape: of the experts' parameter, if they are matrices.
        dtype: the file's name of the dtype.
        matrices: of experts, if they are tensors of their own; else empty.
    """

    file: CheckedFile
    key: str
    scales: tuple[CheckedFile, str] | None
    shape: tuple[int, ...]
    dtype: str
    matrices: tuple[_ExpertMatrix, ...] = ()

    def read(self, part: Slices, device: torch.device) -> Tensor:
        """Return a part of the tensor on this device; nothing else of the file is read."""
        return self.file.read(self.key, part).to(device, copy=True, memory_format=torch.contiguous_format)


class _ExpertMatrix(NamedTuple):
    """A matrix of an expert: its place in the parameter [E, N, K], and its tensor [some of N, K]."""

    expert: int
    rows: slice
    tensor: _CheckpointTensor


Sources = dict[str, _CheckpointTensor]  # by name


def load_fp8(
    model: nn.Module, folder: str | os.PathLike[str], strict: bool = True, device: torch.device | str = "cpu"
) -> nn.Module:
    """Load a checkpoint into a model that octavo.convert(..., weight_storage="fp8") has converted.

    Codes become the layers' weights as they are, one tensor at a time, and no wider copy of the model is ever made: so
    make the model on the meta device. A frozen weight can have any scales, and those of rows and 1x32 blocks under
    recipes that scale so (``rowwise()``, ``mx()``). A trained one needs powers of two (as octavo and DeepSeek-V3.1
    write them): with other scales, or with another granularity than the recipe's, its codes are rounded anew, and the
    optimizer's master begins with 12 bits of the checkpoint's values. Weights that the checkpoint has in high
    precision are rounded to codes in the same way.

    Of a model that fully_shard or tensor parallelism has sharded, all ranks call this, and each reads its own part: it
    has then what loading the whole and sharding it gives, bit for bit.

    Args:
        model: with the checkpoint's names, or those that transformers gives them for this model. Parameters keep their
            identity, dtype and device; those on the meta device come to ``device``.
        folder: with ``config.json`` and ``model.safetensors``, or several files and ``model.safetensors.index.json``;
            the same on every rank.
        strict: raise where names are missing or left over, as load_state_dict does.
        device: where parameters go that are on the meta device.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError: without these files.
        ValueError: for a checkpoint in a format that can't be read or is damaged, with what is wrong; for files that
            lie outside of the folder; for layers that are not stored in FP8, and names or shapes that don't fit.
            Nothing is changed then, unless a tensor differs from its CRC-32: the tensors before it are loaded.
        MissingExtraError: without safetensors.

    Warns:
        UserWarning: of weights whose codes were rounded anew, and of scales of inputs, which are not read.

    Source:
        transformers' FineGrainedFP8Config; compressed-tensors' formats "float-quantized" and "mxfp8-quantized"; NVIDIA
        ModelOpt's FP8 and MXFP8.

    Example:
        >>> import pathlib, tempfile, torch, octavo
        >>> layer = octavo.nn.Linear(256, 512, recipe=octavo.recipes.blockwise())
        >>> with torch.device("meta"):
        ...     other = torch.nn.Linear(256, 512)
        >>> _ = octavo.convert(other, octavo.recipes.blockwise(), lambda module, name: True, "fp8")
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     octavo.export.to_safetensors(layer, f"{parent}/served")
        ...     octavo.export.load_fp8(other, f"{parent}/served").weight
        StoredWeight((512, 256), torch.float32, PerBlock(128, 128))
    """
    require("safetensors", "safetensors")
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:

        @functools.cache
        def reader(file: Path) -> CheckedFile:
            try:
                content = stack.enter_context(safe_open(file, "pt"))
            except Exception as error:  # safetensors raises its own class
                raise ValueError(f"{file} is no whole safetensors file: {error}") from error
            return CheckedFile(file, content)

        targets = _targets(model, _tensors(Path(folder), reader), strict)
        # _apply tells FSDP2 of new shards for those on the meta device; other tensors are replaced one by one
        model._apply(lambda x: x if on_this_rank(x) is x or not x.is_meta else torch.empty_like(x, device=device))
        rounded = [name for name, source in targets.items() if _load(model, name, source, device)]
    this_load = object()  # one load for all layers: those that share delayed state keep it
    for _, module in RecipeModule.named_in(model):
        module.reset_delayed_state()
        module.weight_was_loaded(this_load)
    if rounded:
        warnings.warn(
            f"{len(rounded)} weights were rounded to new codes, first {rounded[0]}: the checkpoint has them in high "
            "precision, scaled by other tiles than the recipe's, or by what is no power of two, which weights that are "
            "trained need (freeze the others before loading)",
            stacklevel=2,
        )
    return model


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def _tensors(folder: Path, reader: FileReader) -> Sources:
    """Return the checkpoint's tensors by its own names, each FP8 weight with its scales; errors as ``load_fp8``'s."""
    _check_config(folder)
    files = _files_of_tensors(folder, reader)
    scales = {key: key.removesuffix(end) for key in files for end in SCALES if key.endswith(f"weight{end}")}
    if weights := [weight for weight, count in Counter(scales.values()).items() if count > 1]:
        raise ValueError(f"{folder}: {weights[0]} has scales of two names, {' and '.join(SCALES)}; leave one of them")
    tensors: Sources = {}
    keys_of = {file: set(reader(file).keys()) for file in set(files.values())}
    scales_by_weight = {weight: (reader(files[key]), key) for key, weight in scales.items()}
    for key, path in files.items():
        if key not in keys_of[path]:
            raise ValueError(f"{folder}: the index has {key} in {path.name}, which does not hold it")
        if key in scales:
            if scales[key] not in files:
                raise ValueError(f"{folder}: there is {key} but no {scales[key]}")
            continue
        file = reader(path)
        tensor = tensors[key] = _CheckpointTensor(file, key, scales_by_weight.get(key), *file.header(key))
        is_e4m3, has_scales = tensor.dtype == "F8_E4M3", tensor.scales is not None
        if (has_scales or tensor.dtype.startswith("F8")) and not (is_e4m3 and has_scales):
            why = "without scales beside it" if is_e4m3 else "not in E4M3"
            raise ValueError(f"{folder}: {key} is {tensor.dtype}, {why}; only E4M3 codes with scales can be read")
    return tensors


def _check_config(folder: Path) -> None:
    """Raise an error if the checkpoint's config.json is missing, or names a format that ``load_fp8`` can't read."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: name a checkpoint's folder (huggingface_hub.snapshot_download)")
    config = _object(read_json(file_inside(folder, path.name)), f"{path}")
    # text_config: in models of several kinds of input
    config = _object(config.get("text_config") or {}, f"{path}: text_config") | config
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    quantization = _object(quantization, f"{path}: quantization_config")
    method = quantization.get("quant_method")
    methods = [each.method for each in LAYOUTS.values() if each.method is not None]
    if method not in (*methods, "modelopt", None):
        raise ValueError(
            f"{path}: quant_method is {method!r}; load_fp8 reads {', '.join(map(repr, methods))}, 'modelopt' and "
            "checkpoints in high precision, which have none"
        )
    if (block := quantization.get("weight_block_size")) not in (None, list(SQUARE), list(MX)):
        raise ValueError(f"{path}: weight_block_size is {block!r}; weights are stored in blocks of {SQUARE} or {MX}")


def _object(value: Any, where: str) -> dict[str, Any]:
    """Return the value, an object of JSON; else raise a ValueError that begins with ``where``."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}, not names with values")
    return value


def _files_of_tensors(folder: Path, reader: FileReader) -> dict[str, Path]:
    """Return the file of each tensor; none lies outside of the folder."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        content = _object(read_json(file_inside(folder, index.name)), f"{index}")
        names = {key: str(name) for key, name in _object(content.get("weight_map"), f"{index}: weight_map").items()}
        files = {name: file_inside(folder, name) for name in set(names.values())}
        if absent := sorted(name for name, file in files.items() if not os.path.isfile(file)):  # no name is too long
            raise FileNotFoundError(f"{folder}: {absent[0]} is missing, and {len(absent) - 1} more of {index.name}")
        return {key: files[name] for key, name in names.items()}
    if not single.is_file():
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}")
    return dict.fromkeys(reader(file_inside(folder, single.name)).keys(), single)


# --- the model --------------------------------------------------------------------------------------------------------


def _targets(model: nn.Module, checkpoint_tensors: Sources, strict: bool) -> Sources:
    """Return the checkpoint's tensor for each of the model's, by the model's names; errors as ``load_fp8``'s."""
    if (tie_weights := getattr(model, "tie_weights", None)) is not None:
        tie_weights()  # accelerate's init_empty_weights unties what transformers has tied
    state = model.state_dict(keep_vars=True)
    scales = {f"{key}{SCALE_INV}" for key in state}
    tensors = {key: tensor for key, tensor in state.items() if key not in scales}
    tensors_by_name = _by_models_names(model, tensors, checkpoint_tensors)
    surplus = [key for key in tensors_by_name if key not in tensors]
    inputs = [key for key in surplus if OF_INPUTS.search(key)]
    ignored = [OF_INPUTS.pattern, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]  # transformers'
    surplus = [key for key in surplus if not any(re.search(pattern, key) for pattern in ignored)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets = {key: source for key, source in tensors_by_name.items() if key in tensors}
    loaded_ids = {id(parameters.get(key, tensors[key])) for key in targets}
    missing = [key for key, tensor in tensors.items() if id(parameters.get(key, tensor)) not in loaded_ids]
    if strict and (missing or surplus):
        raise ValueError(
            f"the model lacks {len(surplus)} of the checkpoint's tensors{_first(surplus)}, and the checkpoint "
            f"{len(missing)} of the model's{_first(missing)}; strict=False leaves them out"
        )
    for key, source in targets.items():
        _check_target(model, key, source)
    _check_meta(model, loaded_ids)
    if inputs:
        warnings.warn(f"{len(inputs)} scales of inputs are not read: the recipe casts those itself", stacklevel=3)
    return targets


def _by_models_names(model: nn.Module, tensors: dict[str, Tensor], sources: Sources) -> Sources:
    """Return the checkpoint's tensors by the model's names; matrices of experts that are one parameter become one."""
    renamed = renaming(model, tensors)
    others = dict(sources)
    tensors_by_name: Sources = {}
    for key, places in places_of_experts(model).items():
        matrices = tuple(_ExpertMatrix(*place, others.pop(name)) for name, place in places.items() if name in others)
        if matrices and len(matrices) == len(places):
            shape = tuple(model.get_parameter(key).shape)
            tensors_by_name[key] = matrices[0].tensor._replace(shape=shape, matrices=matrices)
        elif matrices:
            raise ValueError(f"the checkpoint has {len(matrices)} of the {len(places)} tensors that make {key}")
    return tensors_by_name | {renamed(key): tensor for key, tensor in others.items()}


def _first(names: list[str]) -> str:
    return f" (first {names[0]})" if names else ""


def _check_target(model: nn.Module, key: str, source: _CheckpointTensor) -> None:
    """Raise ValueError if the tensor of this name can't be loaded from a checkpoint's."""
    module, parameter = _owner(model, key)
    if tuple(parameter.shape) != source.shape:
        raise ValueError(f"{key} is {tuple(parameter.shape)} in the model and {source.shape} in the checkpoint")
    for _, rows, matrix in source.matrices:
        if matrix.shape != (rows.stop - rows.start, parameter.shape[2]):
            raise ValueError(f"{matrix.key} is {matrix.shape}, and no {rows.stop - rows.start} rows of {key}")
        _scales_of(matrix)  # raises for scales that don't fit
    if source.matrices:
        return
    if source.scales is not None and not isinstance(on_this_rank(parameter), StoredWeight):
        raise ValueError(
            f"{key} is in FP8 in the checkpoint but not in the model, where it belongs to a {type(module).__name__}; "
            "octavo.convert(model, recipe, select, weight_storage='fp8') with a select that takes this layer"
        )
    _scales_of(source)  # as above


def _check_meta(model: nn.Module, loaded_ids: set[int]) -> None:
    """Raise ValueError if a tensor would stay on the meta device; ``loaded_ids``: the ids of those that will not."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and id(tensor) not in loaded_ids:
            raise ValueError(
                f"{name} is on the meta device and not in the checkpoint: make the model within accelerate's "
                "init_empty_weights(), which keeps buffers on theirs"
            )


def _owner(model: nn.Module, key: str) -> tuple[nn.Module, Tensor]:
    """Return the module that has a tensor of this name, and the tensor."""
    path, _, name = key.rpartition(".")
    module = model.get_submodule(path)
    return module, getattr(module, name)


def _load(model: nn.Module, key: str, source: _CheckpointTensor, device: Any) -> bool:
    """Load this rank's part of one tensor; return whether it had to be rounded to new codes."""
    module, target = _owner(model, key)
    local = on_this_rank(target)
    device = torch.device(device) if local.is_meta else local.device
    value: Tensor
    if isinstance(local, StoredWeight):
        read = _read_experts_weight if source.matrices else _read_weight
        value, was_rounded = read(target, local, source, device)
    else:
        value, was_rounded = source.read(own_slices(source.shape, target), device), False
        value = value.to(target.dtype) if target.is_floating_point() else value
    if local.is_meta and not isinstance(target, nn.Parameter):
        setattr(module, key.rpartition(".")[2], value)  # a buffer
    else:
        take_values(target, value)
    return was_rounded


class _DimSlices(NamedTuple):
    """The slices of one dimension that give the values of a part of it: whole blocks are read, then cut."""

    codes: slice  # whole blocks, which hold the part
    scales: slice  # the scales of these blocks
    wanted: slice  # where the part is in what was read

    @classmethod
    def of(cls, part: slice, size: int, scales: int, block: int) -> _DimSlices:
        """Return the slices for a part of a dimension that has so many codes and scales, and blocks of this length."""
        if scales == 1:
            return cls(codes=part, scales=slice(None), wanted=slice(None))
        block = 1 if scales == size else block
        first, end = part.start // block, -(-part.stop // block)
        codes = slice(first * block, min(end * block, size))
        return cls(codes, slice(first, end), slice(part.start - codes.start, part.stop - codes.start))


def _read_values(source: _CheckpointTensor, part: Slices, device: torch.device, scales: FileScales | None) -> Tensor:
    """Return the values of a part: of codes by these scales in float32 (whole blocks are read), others as they are."""
    if scales is None:
        return source.read(part, device)
    scale_inv, granularity = scales
    tile = (1, *granularity.tile)[-len(part) :]  # of experts' matrices each has its own scales
    dims = [_DimSlices.of(*each) for each in zip(part, source.shape, scale_inv.shape, tile, strict=True)]
    codes = source.read(tuple(dim.codes for dim in dims), device)
    scales_of_codes = scale_inv[tuple(dim.scales for dim in dims)].to(device).contiguous()
    values = ScaledTensor(codes, scales_of_codes, granularity.of_matrices(codes.shape), torch.float32).dequantize()
    return values[tuple(dim.wanted for dim in dims)]


def _read_weight(target: Tensor, local: StoredWeight, source: _CheckpointTensor, device: torch.device) -> OwnPart:
    """Return (this rank's part of the target, which is now ``local``; whether it was rounded to new codes).

    Codes stay as they are where possible.
    """
    part = own_slices(target.shape, target)
    scales = _scales_of(source)
    scale_inv = None if scales is None else scales.scale_inv
    if scale_inv is not None and scale_inv.shape == local.scales_shape(target.shape) and local.may_have(scale_inv):
        scale_inv = scale_inv if local.has_one_scale else scale_inv[own_slices(scale_inv.shape, target)]
        return _with_codes(local, source.read(part, device), scale_inv, target), False
    values = _read_values(source, part, device, scales)
    values = values.to(target.dtype) if scales is None else values
    return StoredWeight.cast(values, local.granularity, target.requires_grad, target), True


def _with_codes(local: StoredWeight, codes: Tensor, scale_inv: Tensor, target: Tensor) -> StoredWeight:
    """Return codes and their scales as this rank's part of the target, which is now ``local``."""
    scale_inv = scale_inv.to(codes.device, local.scale_inv.dtype)
    return StoredWeight(codes, scale_inv, target.dtype, local.granularity, local is not target)


def _read_experts_weight(
    target: Tensor, local: StoredWeight, source: _CheckpointTensor, device: torch.device
) -> OwnPart:
    """Return what ``_read_weight`` does, for experts whose matrices are tensors: codes stay if all scales fit."""
    experts = own_slices(target.shape, target)[0]
    scales = [_scales_of(matrix.tensor) for matrix in source.matrices]
    scale_inv = _joined_scales(target, source, scales)
    dtype = torch.float32 if scale_inv is None else local.qdata.dtype
    codes_or_values = torch.empty(local.shape, dtype=dtype, device=device)
    for (expert, rows, matrix), matrix_scales in zip(source.matrices, scales, strict=True):
        if experts.start <= expert < experts.stop:
            whole = own_slices(matrix.shape, codes_or_values)  # all of it, as that is no DTensor
            scales_to_apply = matrix_scales if scale_inv is None else None
            codes_or_values[expert - experts.start, rows] = _read_values(matrix, whole, device, scales_to_apply)
    if scale_inv is None:
        return StoredWeight.cast(codes_or_values, local.granularity, target.requires_grad, target), True
    return _with_codes(local, codes_or_values, scale_inv[experts], target), False


def _joined_scales(target: Tensor, source: _CheckpointTensor, scales: list[FileScales | None]) -> Tensor | None:
    """Return the scale_inv of all experts, made of these scales of their matrices; None if the target can't have them.

    A scale that several matrices share must be the same in all of them.
    """
    local: Any = on_this_rank(target)
    scale_inv = torch.zeros(local.scales_shape(target.shape), dtype=torch.float32, device="cpu")  # 0: none yet
    height = local.granularity.of_matrices(target.shape).tile[0]
    for (expert, rows, _), matrix_scales in zip(source.matrices, scales, strict=True):
        place = scale_inv[expert, rows.start // height : -(-rows.stop // height)]
        begins_within_block = scale_inv.shape[1] > 1 and rows.start % height
        if matrix_scales is None or matrix_scales.scale_inv.shape != place.shape or begins_within_block:
            return None
        if not ((place == 0) | (place == matrix_scales.scale_inv)).all():
            return None
        place.copy_(matrix_scales.scale_inv)
    return scale_inv if local.may_have(scale_inv) else None


def _scales_of(source: _CheckpointTensor) -> FileScales | None:
    """Return the scales of codes [N, K] or [E, N, K]; None for a tensor in high precision.

    ValueError for scales of another shape or dtype than a cast of the codes can have written.
    """
    if source.scales is None:
        return None
    file, name = source.scales
    scale_inv = file.read(name)
    if scale_inv.dtype == torch.uint8:
        scale_inv = scale_inv.view(torch.float8_e8m0fnu)
    if not scale_inv.is_floating_point():
        raise ValueError(f"{name} is {scale_inv.dtype}: store scales as float32, or as E8M0 (float8_e8m0fnu, uint8)")
    scale_inv = scale_inv.to(torch.float32, copy=True)
    if scale_inv.numel() == 1:
        scale_inv = scale_inv.reshape([1] * len(source.shape))
    elif scale_inv.ndim == 1:
        scale_inv = scale_inv.unsqueeze(1)
    return FileScales(scale_inv, checked_granularity(torch.Size(source.shape), scale_inv, name))
