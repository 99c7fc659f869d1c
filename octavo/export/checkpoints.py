"""FP8 weights with their scales in safetensors files, under the keys that serving stacks read.

A layout is where a layer's pair (qdata, scale_inv) goes, and what config.json says of it. The dequantised weight is
codes * scale in both, so that the pair is written as it was cast; each name is the key after the module's own.

    layout               weight          scale                                              read by
    fine-grained         weight [N, K]   weight_scale_inv [ceil(N/128), ceil(K/128)] fp32   transformers, vLLM, SGLang
    compressed-tensors   weight [N, K]   weight_scale [1] or [N, 1] fp32                    compressed-tensors, vLLM
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from octavo.autograd.casts import WEIGHT, cast_role
from octavo.errors import ExportError, MissingExtraError
from octavo.formats import E4M3
from octavo.granularity import ALL, Tile
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.stored_weight_files import SCALE_INV
from octavo.scaling.recipe import Cast
from octavo.tensor.stored_weight import StoredWeight

Layers = dict[str, RecipeModule]  # the modules whose output product is in FP8, by name
BLOCK = 128


class Layout(NamedTuple):
    """Where a pair is written.

    ``tiles``: those of the weight casts that it holds. ``recipe``: the named recipe that fits. ``config``: what
    config.json says of it, from the layers and the names of the matrices that stay as they are.
    """

    scale_key: str
    tiles: tuple[Tile, ...]
    recipe: str
    config: Callable[[Layers, list[str]], dict[str, Any]]


def to_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: Literal["fine-grained", "compressed-tensors"] = "fine-grained",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a checkpoint whose FP8 layers are served from the pairs that the model computes with.

    Written are ``model.safetensors`` (beyond ``max_shard_bytes``: several, and their index) and ``config.json``: a
    Hugging Face model's own, and in it ``quantization_config``. A layer whose output product is in FP8 is stored as its
    weight's cast for that product in evaluation: with a Delayed rule too by the weight's own amax. All else is
    stored as it is, tied weights once. Weights leave their device one at a time, and nothing is left of a failure.

    Args:
        model: a converted model, none of it on the meta device.
        folder: created, parents too; may exist if it is empty.
        layout: "fine-grained" holds E4M3 weights in 128x128 blocks (``recipes.blockwise()``), "compressed-tensors"
            those with one scale, or one a row (``recipes.dynamic()``, ``delayed()``, ``rowwise()``).
        max_shard_bytes: the most that one file holds; a larger tensor has a file of its own.

    Raises:
        ExportError: for a layer that the layout can't hold, with what works; no layer in FP8; a tensor that can't be
            written; a folder in use.
        MissingExtraError: without safetensors and huggingface_hub.
        ValueError: for another ``layout``, or no room in a shard.

    Warns:
        UserWarning: of sizes that are no multiple of 128 under "fine-grained", which transformers misreads when it
            dequantises.

    Source:
        transformers' FineGrainedFP8Config, the layout of DeepSeek-V3's checkpoints; compressed-tensors' format
        "float-quantized", llm-compressor's FP8_DYNAMIC.

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
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: use {' or '.join(map(repr, LAYOUTS))}")
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes!r} must be an integer of at least 1")
    try:
        from huggingface_hub import split_torch_state_dict_into_shards
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtraError(
            "to_safetensors needs safetensors and huggingface_hub: pip install octavo[safetensors]"
        ) from error
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"{folder} is a file; name a folder that is new or empty")
    if folder.exists() and any(folder.iterdir()):
        raise ExportError(
            f"{folder} is not empty, and nothing in it is overwritten; name a folder that is new or empty"
        )
    layers, skipped = _fp8_layers(model)
    _check_layers(layers, layout)
    likes, readers = _contents(model, layers, LAYOUTS[layout])
    if layout == "fine-grained":
        _check_readers(layers, skipped)
    quantization = LAYOUTS[layout].config(layers, skipped)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        partial = Path(scratch) / folder.name
        partial.mkdir()
        _write_config(partial, model, quantization)
        plan = split_torch_state_dict_into_shards(likes, max_shard_size=max_shard_bytes)
        for file, keys in plan.filename_to_tensors.items():  # one shard in memory at a time
            save_file({key: readers[key]() for key in keys}, partial / file, metadata={"format": "pt"})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            _write_json(partial / "model.safetensors.index.json", index)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)


def _fp8_layers(model: nn.Module) -> tuple[Layers, list[str]]:
    """The layers in FP8, and the names of other modules that own a matrix, but not of embeddings, never quantised."""
    named = dict(model.named_modules(remove_duplicate=False))
    layers = {name: m for name, m in named.items() if isinstance(m, RecipeModule) and m.recipe.output is not None}
    if not layers:
        raise ExportError(
            "no layer's output product is in FP8; call octavo.convert(model, recipe), or save it as it is"
        )
    others = {name: m for name, m in named.items() if name not in layers and not isinstance(m, nn.Embedding)}
    return layers, [n for n, m in others.items() if any(p.ndim >= 2 for p in m.parameters(recurse=False))]


def _check_layers(layers: Layers, layout: str) -> None:
    """Whether the layout holds every layer's pair."""
    misfits = {name: reason for name, module in layers.items() if (reason := _misfit(name, module, layout))}
    if misfits:
        name, reason = next(iter(misfits.items()))
        others = f" and {len(misfits) - 1} more layers" if len(misfits) > 1 else ""
        raise ExportError(f"layout={layout!r} can't hold {name or 'the model'}{others}: {reason}")


def _misfit(name: str, module: RecipeModule, layout: str) -> str | None:
    """Why the layout can't hold a layer's pair, and what works; or None."""
    cast, chosen = _weight_cast(module), LAYOUTS[layout]
    remedy = f"octavo.set_recipe(model, octavo.recipes.{chosen.recipe}()) makes weights that it holds"
    if module._parameters.get("weight") is None:
        return "its weight is computed from other parameters; make it one by torch's remove_parametrizations"
    if not isinstance(module, nn.Linear):
        return (
            f"{type(module).__name__} stores its weight as [K, N], which no reader takes in FP8; keep it in high "
            f"precision by octavo.RecipeMap(recipe, {{{name!r}: None}})"
        )
    if cast.format is not E4M3:
        return f"its weight is cast to {cast.format}, which no layout holds; {remedy}"
    if cast.tile not in chosen.tiles:
        other = next((name for name, that in LAYOUTS.items() if cast.tile in that.tiles), None)
        works = remedy if other is None else f"layout={other!r} holds those"
        return f"its weight's scales are {cast.granularity}; {works}"
    return None


def _check_readers(layers: Layers, skipped: list[str]) -> None:
    """What transformers' reader of "fine-grained" gets wrong."""
    for name in skipped:
        wrong = next((layer for layer in layers if layer.endswith(name)), None)
        if wrong is not None:
            raise ExportError(
                f"{name!r} stays in high precision, but by transformers' rule its name would stand for {wrong!r} too, "
                "which ends with it; rename it or put it in FP8"
            )
    shapes = {name: list(module.get_parameter("weight").shape) for name, module in layers.items()}
    ragged = {name: shape for name, shape in shapes.items() if any(n > BLOCK and n % BLOCK for n in shape)}
    if ragged:
        name, shape = next(iter(ragged.items()))
        warnings.warn(
            f"{len(ragged)} layers have sizes over 128 that 128 does not divide, first {name or 'the model'} {shape}; "
            "transformers misreads or refuses their scales where it dequantises, as without a GPU",
            stacklevel=3,
        )


def _contents(
    model: nn.Module, layers: Layers, layout: Layout
) -> tuple[dict[str, Tensor], dict[str, Callable[[], Tensor]]]:
    """The checkpoint's tensors in the state_dict's order: their like on the meta device, and what reads each."""
    pair_of = functools.lru_cache(maxsize=1)(_weight_pair)  # a weight and its scales are neighbours

    def read(module: RecipeModule, part: int) -> Tensor:
        return pair_of(module)[part]

    likes: dict[str, Tensor] = {}
    readers: dict[str, Callable[[], Tensor]] = {}
    weights = {_join(name, "weight"): name for name in layers}
    state = model.state_dict(keep_vars=True)
    dropped = _tied(model, state, weights)
    dropped |= {_join(name, SCALE_INV) for name in layers}  # of weights that live in FP8, written with these
    for key, tensor in state.items():
        if type(tensor) not in (Tensor, nn.Parameter):
            raise ExportError(
                f"{key} is a {type(tensor).__name__}, not a plain tensor; gather a sharded model first "
                "(torch.distributed.checkpoint.state_dict), and take extra state out"
            )
        if tensor.is_meta:
            raise ExportError(f"{key} is on the meta device, without values; load the checkpoint first")
        if key in weights:
            module, scale_key = layers[weights[key]], _join(weights[key], layout.scale_key)
            likes[key] = torch.empty(module.get_parameter("weight").shape, dtype=E4M3.dtype, device="meta")
            likes[scale_key] = torch.empty(_scale_shape(module), dtype=torch.float32, device="meta")
            readers[key] = functools.partial(read, module, 0)
            readers[scale_key] = functools.partial(read, module, 1)
        elif key not in dropped:
            likes[key] = torch.empty_like(tensor, device="meta")
            readers[key] = functools.partial(_owned, tensor)
    return likes, readers


def _tied(model: nn.Module, state: Mapping[str, Any], weights: Mapping[str, str]) -> set[str]:
    """The keys that are not written, as another holds the same parameter; transformers' choice where it has made one.

    Raises:
        ExportError: for a parameter that is an FP8 layer's and something else's.
    """
    keys_of: dict[int, list[str]] = {}
    for key, tensor in state.items():
        keys_of.setdefault(id(tensor), []).append(key)
    targets = getattr(model, "all_tied_weights_keys", None) or {}
    dropped: set[str] = set()
    for keys in keys_of.values():
        fp8 = [key for key in keys if key in weights]
        if fp8 and len(fp8) < len(keys):
            other = next(key for key in keys if key not in weights)
            raise ExportError(
                f"{weights[fp8[0]]}: its weight is {other} too, which is read in high precision; give the layer high "
                f"precision as well: octavo.RecipeMap(recipe, {{{weights[fp8[0]]!r}: None}})"
            )
        if not fp8:
            kept = next((key for key in keys if key not in targets), keys[0])
            dropped.update(key for key in keys if key != kept)
    return dropped


def _weight_cast(module: RecipeModule) -> Cast:
    assert module.recipe.output is not None
    return module.recipe.output[1]


def _scale_shape(module: RecipeModule) -> tuple[int, ...]:
    cast, shape = _weight_cast(module), module.get_parameter("weight").shape
    return (1,) if cast.tile == (ALL, ALL) else cast.granularity.scale_shape(shape)


def _weight_pair(module: RecipeModule) -> tuple[Tensor, Tensor]:
    """(codes [N, K], scales) on the CPU, as the output product reads them."""
    weight_NK = module.get_parameter("weight").detach()
    if isinstance(weight_NK, StoredWeight):
        codes, scale_inv = weight_NK.qdata, weight_NK.scale_inv
    else:
        operands = cast_role(weight_NK, module.recipe, WEIGHT, True, False, None)
        assert operands.as_is is not None
        codes, scale_inv = operands.as_is
    codes = codes[:, : weight_NK.shape[1]]  # without the padding that a GPU's product wants
    return _owned(codes), _owned(scale_inv).view(_scale_shape(module))


def _owned(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, with nothing else in its storage."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _join(module: str, key: str) -> str:
    return f"{module}.{key}".removeprefix(".")


def _write_config(folder: Path, model: nn.Module, quantization: dict[str, Any]) -> None:
    """A Hugging Face model's configuration, as its save_pretrained writes it; and how the weights are stored."""
    path, written = folder / "config.json", {}
    save = getattr(getattr(model, "config", None), "save_pretrained", None)
    if save is not None:
        save(folder)
        written = json.loads(path.read_text(encoding="utf-8"))
        written["architectures"] = [type(model).__name__]
        if (dtype := getattr(model, "dtype", None)) is not None:
            written["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(path, {**written, "quantization_config": quantization})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _fine_grained_config(layers: Layers, skipped: list[str]) -> dict[str, Any]:
    """transformers' FineGrainedFP8Config, with DeepSeek-V3's ``fmt``; inputs are cast by blocks as they come."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": skipped,
    }


def _compressed_tensors_config(layers: Layers, skipped: list[str]) -> dict[str, Any]:
    """compressed-tensors' QuantizationConfig: a group for each kind of weight scale; each row of inputs has its own."""
    names: dict[str, list[str]] = {}
    for name, module in layers.items():
        names.setdefault("tensor" if _weight_cast(module).tile == (ALL, ALL) else "channel", []).append(name)
    args = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(names) == 1 else targets,
            "weights": args | {"strategy": strategy, "dynamic": False},
            "input_activations": args,
            "format": "float-quantized",
        }
        for i, (strategy, targets) in enumerate(names.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": skipped,
    }


LAYOUTS = {
    "fine-grained": Layout("weight_scale_inv", ((BLOCK, BLOCK),), "blockwise", _fine_grained_config),
    "compressed-tensors": Layout("weight_scale", ((ALL, ALL), (1, ALL)), "rowwise", _compressed_tensors_config),
}
