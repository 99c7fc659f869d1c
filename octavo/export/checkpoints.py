"""FP8 weights and their scales under the keys that servers read (layouts.py), as safetensors files or one by one."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ExportError, require
from octavo.export.checksums import checksums_of
from octavo.export.layouts import (
    BLOCK,
    GATHER,
    LAYOUTS,
    SQUARE,
    AnyLayout,
    FileLayout,
    Layers,
    Layout,
    WrittenTensors,
    entries,
    weight_cast,
)
from octavo.weights.fsdp2 import on_this_rank
from octavo.weights.operands import pair_reader


def to_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: FileLayout = "fine-grained",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a checkpoint whose FP8 layers are served from the pairs that the model computes with.

    It writes ``model.safetensors`` (beyond ``max_shard_bytes`` several files and their index) and ``config.json``, that
    of a Hugging Face model with ``quantization_config`` added. A layer whose output product is in FP8 is stored as the
    cast of its weight for that product in evaluation: by the weight's own amax, even with a Delayed rule. All other
    tensors are stored as they are; tied weights once, but once for each FP8 layer. Weights leave their device one at a
    time. Headers have CRC-32s of the tensors, which ``load_fp8`` checks. A call that fails leaves no files.

    Args:
        model: a converted model, none of it on the meta device.
        folder: created, parents too; may exist if it is empty.
        layout: one of the table on the page on rollouts, which says the recipes whose E4M3 weights each holds.
        max_shard_bytes: the most that one file holds; a larger tensor has a file of its own.

    Raises:
        ExportError: for a layer that the layout can't hold, with what works; for a model without a layer in FP8, a
            tensor that can't be written, or a folder that is not empty.
        MissingExtraError: without safetensors and huggingface_hub.
        ValueError: for another ``layout``, or a ``max_shard_bytes`` below 1.

    Warns:
        UserWarning: of sizes that 128 does not divide under "fine-grained": transformers dequantises them wrongly.

    Source:
        transformers' FineGrainedFP8Config, the layouts of DeepSeek-V3's and of MiniMax-M3's MXFP8 checkpoints;
        compressed-tensors' presets FP8_DYNAMIC, FP8_BLOCK and MXFP8, as llm-compressor writes them.

    Example:
        >>> import json, pathlib, tempfile, torch, octavo
        >>> from octavo.export import to_safetensors
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))
        >>> octavo.convert(model, octavo.recipes.blockwise())[0].recipe.name
        'blockwise'
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     folder = pathlib.Path(parent) / "served"
        ...     to_safetensors(model, folder)
        ...     files = sorted(path.name for path in folder.iterdir())
        ...     config = json.loads((folder / "config.json").read_text())["quantization_config"]
        >>> files
        ['config.json', 'model.safetensors']
        >>> config["quant_method"], config["weight_block_size"], config["modules_to_not_convert"]
        ('fp8', [128, 128], ['2'])
    """
    if (chosen_layout := LAYOUTS.get(layout)) is None or chosen_layout.config is None:
        names_of_file_layouts = (repr(name) for name, each in LAYOUTS.items() if each.config is not None)
        raise ValueError(f"layout={layout!r}: use {', '.join(names_of_file_layouts)}")
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes!r} must be an integer of at least 1")
    require("safetensors", "safetensors.torch", "huggingface_hub")
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        reason = "is not empty, and nothing in it is overwritten" if folder.is_dir() else "is a file"
        raise ExportError(f"{folder} {reason}; name a folder that is new or empty")
    model_entries, layers, skipped = entries(model, layout)
    if shard := next((entry.key for entry in model_entries if on_this_rank(entry.tensor) is not entry.tensor), None):
        raise ExportError(f"{shard} is sharded: {GATHER}, or send it as it is by octavo.export.iterate_fp8")
    empty = dict(pair for entry in model_entries for pair in _by_key(entry.empty_tensors(), chosen_layout))
    if chosen_layout.matches_ends:
        _check_readers(layers, skipped)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        partial = Path(scratch) / folder.name
        partial.mkdir()
        _write_config(partial, model, chosen_layout.config(layers, skipped))
        pair_of = pair_reader(model)
        plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_bytes)
        waiting: dict[str, dict[str, Tensor]] = {file: {} for file in plan.filename_to_tensors}
        for entry in model_entries:
            for key, tensor in _by_key(entry.read(False, pair_of), chosen_layout):
                file = plan.tensor_to_filename[key]
                # in a storage of its own: safetensors takes no shared ones
                waiting[file][key] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                if len(waiting[file]) == len(plan.filename_to_tensors[file]):
                    tensors = waiting.pop(file)
                    save_file(tensors, partial / file, metadata={"format": "pt"} | checksums_of(tensors))
        assert not waiting
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            _write_json(partial / "model.safetensors.index.json", index)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)


def _check_readers(layers: Layers, skipped: list[str]) -> None:
    """Raise ExportError for what transformers' reader of "fine-grained" and "mxfp8" gets wrong, or warn of it."""
    for name in skipped:
        if (wrong := next((layer for layer in layers if layer.endswith(name)), None)) is not None:
            raise ExportError(
                f"{name!r} stays in high precision, but by transformers' rule its name would stand for {wrong!r} too, "
                "which ends with it; rename it or put it in FP8"
            )
    shapes = {name: list(m.weight_parameter.shape) for name, m in layers.items() if weight_cast(m).tile == SQUARE}
    if ragged := {name: shape for name, shape in shapes.items() if any(n > BLOCK and n % BLOCK for n in shape[-2:])}:
        name, shape = next(iter(ragged.items()))
        warnings.warn(
            f"{len(ragged)} layers have sizes over 128 that 128 does not divide, first {name or 'the model'} {shape}; "
            "transformers misreads or refuses their scales where it dequantises, as without a GPU",
            stacklevel=3,
        )


def _by_key(tensors: WrittenTensors, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) for tensors and their scales."""
    for name, tensor, scale_inv in tensors:
        yield name, tensor
        if scale_inv is not None:
            yield name + layout.scale_ending, scale_inv


def _write_config(folder: Path, model: nn.Module, quantization: dict[str, Any]) -> None:
    """Write a Hugging Face model's configuration, as its save_pretrained does, with the layout of the weights."""
    path = folder / "config.json"
    config: dict[str, Any] = {}
    if (save := getattr(getattr(model, "config", None), "save_pretrained", None)) is not None:
        save(folder)
        config = json.loads(path.read_text(encoding="utf-8"))
        config["architectures"] = [type(model).__name__]
        if (dtype := getattr(model, "dtype", None)) is not None:
            config["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(path, {**config, "quantization_config": quantization})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def iterate_fp8(
    model: nn.Module, layout: AnyLayout = "fine-grained", fp8_only: bool = False
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Return an iterator over the model's tensors, with FP8 layers' weights as the codes that their forward reads.

    For a layer whose ``output`` product is in FP8 it yields the operand of that product, bit for bit, without a second
    cast: the codes that are stored, kept or gathered, or those that a forward would cast now. In training mode
    (``model.train()``) a Delayed rule scales them by the delayed scale; in evaluation they are scaled by the weight's
    own amax, as ``to_safetensors`` writes them.

    Sharded weights (FSDP2) are gathered one at a time, in FP8 where training gathers them so: all ranks iterate to the
    end, and all get each whole tensor, which nothing else holds. Tensors that a layer holds (a weight that lives in
    FP8, or in high precision) are not copied: the next optimizer step overwrites them.

    Args:
        model: a converted model, not in the middle of a forward or backward.
        layout: the one that the server reads; see the page on rollouts.
        fp8_only: leave out the tensors that are in no FP8 product (norms, embeddings, the head).

    Yields:
        (name, codes, scale_inv), named as in ``model.state_dict()``, on the model's device; tied tensors once, but FP8
        layers that share a weight each yield it. Codes are float8_e4m3fn [N, K]. scale_inv is float32 [1], [N, 1] or
        [ceil(N / 128), ceil(K / 128)], as the recipe scales, and the value is codes * scale_inv; of 1x32 blocks it is
        uint8 [N, K / 32], E8M0's bytes, and the value is codes * 2 ** (scale_inv - 127). A tensor in high precision is
        (name, tensor, None). For a transformers model whose experts are in FP8, names are those that its
        save_pretrained writes, and each expert's matrices are tensors of their own.

    Raises:
        ExportError: for a layer that the layout can't hold, with the recipe that fits; for a model without a layer in
            FP8, or tensors that can't be sent. It is raised before the first tensor.
        ValueError: for another ``layout``.

    Source:
        ``update_weights_from_tensor`` (SGLang) and ``load_weights`` (vLLM) take such named tensors.

    Example:
        >>> import torch, octavo
        >>> model = octavo.nn.Linear(256, 512, recipe=octavo.recipes.blockwise())
        >>> [(name, tensor.dtype, None if scale is None else tuple(scale.shape))
        ...  for name, tensor, scale in octavo.export.iterate_fp8(model)]
        [('weight', torch.float8_e4m3fn, (4, 2)), ('bias', torch.float32, None)]
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: use {', '.join(map(repr, LAYOUTS))}")
    model_entries = [entry for entry in entries(model, layout)[0] if entry.layer is not None or not fp8_only]
    pair_of = pair_reader(model)
    tensors = (entry.read(entry.layer is not None and entry.layer.training, pair_of) for entry in model_entries)
    return itertools.chain.from_iterable(tensors)
