"""The layouts in which servers read FP8 weights: where a layer's pair (qdata, scale_inv) goes, what config.json says.

In all layouts the dequantised weight is codes * scale, so that a pair is written as it was cast. The names below come
after the module's.

    layout               weight          scale                                              read by
    fine-grained         weight [N, K]   weight_scale_inv [ceil(N/128), ceil(K/128)] fp32   transformers, vLLM, SGLang
    mxfp8                weight [N, K]   weight_scale_inv [N, K/32] E8M0                    transformers, SGLang
    compressed-tensors   weight [N, K]   weight_scale [1], [N, 1] or those of blocks fp32   compressed-tensors, vLLM
                                         weight_scale [N, K/32] E8M0                        the same
    per-tensor           weight [N, K]   weight_scale [1] fp32                              vLLM, SGLang ("fp8")

E8M0 is a byte, as uint8, the type of these readers' parameters: the scale is 2 ** (byte - 127).

In a model all experts' matrices are one parameter, [E, N, K]; its N rows may be those of gate and then those of up.
Most models' checkpoints have ``experts.0.gate_proj.weight``, ``experts.0.up_proj.weight``, ... instead, and servers
read these. transformers knows these names for its models, and reads them back in from_pretrained. Models that it has no
rule for, and octavo's own modules, keep one tensor.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import ExportError
from octavo.formats import E4M3
from octavo.granularity import BLOCK, PerBlock, PerRow, PerTensor
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.recipe import Cast
from octavo.weights.files import SCALE_INV
from octavo.weights.fsdp2 import on_this_rank, whole

PairReader = Callable[[RecipeModule, bool], tuple[Tensor, Tensor]]  # of weights.operands.pair_reader
Layers = dict[str, RecipeModule]  # the modules whose output product is in FP8, by name
TENSOR, ROW = PerTensor().tile, PerRow().tile
SQUARE, MX = (BLOCK, BLOCK), PerBlock(1, 32).tile
GATHER = "gather the model first (torch.distributed.checkpoint.state_dict)"  # what to do about shards
WrittenTensors = Iterator[tuple[str, Tensor, Tensor | None]]  # names, codes or tensors, scales or None


def written_tensors(model: nn.Module | None, key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a transformers model's save_pretrained writes for one of its tensors; else the tensor."""
    if (transformers := sys.modules.get("transformers")) is None or not isinstance(model, transformers.PreTrainedModel):
        return {key: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {key: tensor})


def places_in(model: nn.Module, key: str, shape: torch.Size) -> dict[str, tuple[int, slice]]:
    """Return {name: (expert, rows)} of the tensors that save_pretrained writes for a parameter [E, N, K].

    It is empty if save_pretrained writes the parameter itself, or tensors that are no rows of it.
    """
    experts, rows, _ = shape
    indices_by_name = written_tensors(model, key, torch.arange(experts * rows, device="cpu").view(experts, rows, 1))
    places = {}
    for name, indices in indices_by_name.items():
        first = int(indices.flatten()[0])
        expected = torch.arange(first, first + len(indices), device="cpu")
        if indices.ndim != 2 or not torch.equal(indices.flatten(), expected):
            return {}
        places[name] = first // rows, slice(first % rows, first % rows + len(indices))
    return places


def written_pairs(
    model: nn.Module | None, key: str, codes: Tensor, scale_inv: Tensor, cast: Cast
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the pairs, by names, that are written for the pair of all experts: codes [E, N, K] and scale_inv [E, ...].

    Raises ValueError if a block has rows of two matrices.
    """
    codes_by_name = written_tensors(model, key, codes)
    if list(codes_by_name) == [key]:
        return {key: (codes, scale_inv)}
    matrices_per_expert = len(codes_by_name) // len(codes)
    height, rows = cast.tile[0], codes.shape[1] // matrices_per_expert
    if matrices_per_expert > 1 and height > 1 and rows % height:
        raise ValueError(
            f"blocks of {height} rows reach from one of its {matrices_per_expert} matrices of {rows} rows into the next"
        )
    has_one_scale_per_expert = cast.tile == TENSOR
    if has_one_scale_per_expert:
        scale_inv = scale_inv.expand(-1, matrices_per_expert, -1)  # each of its matrices has that scale
    scales = written_tensors(model, key, scale_inv)
    if has_one_scale_per_expert:
        scales = {name: scale.reshape(1) for name, scale in scales.items()}
    return {name: (matrix, scales[name]) for name, matrix in codes_by_name.items()}


class Layout(NamedTuple):
    """A form in which pairs are written.

    Attributes:
        scale_ending: comes after a weight's name in the name of its scales.
        tiles: of the weight casts that the layout can hold.
        recipe: named in error messages as the remedy.
        config: returns config.json's entry for the layers and the names of the matrices that stay in high precision;
            None if the layout is not one of files.
        method: that entry's quant_method, which load_fp8 checks; of the entry's other keys it reads weight_block_size
            alone, and refuses blocks of other sizes than today's.
        matches_ends: whether transformers' reader also skips matrices whose names end in one of those names.
    """

    scale_ending: str
    tiles: tuple[tuple[int, int], ...]
    recipe: str
    config: Callable[[Layers, list[str]], dict[str, Any]] | None
    method: str | None
    matches_ends: bool


FileLayout = Literal["fine-grained", "mxfp8", "compressed-tensors"]
AnyLayout = Literal[FileLayout, "per-tensor"]


class Entry(NamedTuple):
    """A tensor of a model's state_dict, which is written as one tensor or many, with scales or without.

    Attributes:
        key: its name in the state_dict.
        tensor: the state_dict's; codes are read from the layer instead.
        layer: the layer in FP8 whose weight it is, or None.
        model: a transformers model whose experts are in FP8, whose save_pretrained names the written tensors, and may
            split one into many; else None.
    """

    key: str
    tensor: Tensor
    layer: RecipeModule | None
    model: nn.Module | None = None

    def read(self, training: bool, pair_of: PairReader) -> WrittenTensors:
        """Return (name, codes [N, K], scales in the layouts' shape and dtype) of each written tensor.

        In high precision it is (name, tensor, None).

        Args:
            training: see octavo.weights.operands.fp8_pair.
            pair_of: octavo.weights.operands.pair_reader of the model.
        """
        if self.layer is None:
            return self._written(whole(self.tensor.detach()))
        codes, scale_inv = pair_of(self.layer, training)
        return self._written(codes.detach(), scale_inv.detach().view(weight_scale_shape(self.layer)))

    def empty_tensors(self) -> WrittenTensors:
        """Return ``read``'s tensors on the meta device."""
        if self.layer is None:
            return self._written(torch.empty_like(self.tensor, device="meta"))
        codes = torch.empty(self.layer.weight_parameter.shape, dtype=E4M3.dtype, device="meta")
        return self._written(codes, torch.empty(weight_scale_shape(self.layer), dtype=torch.float32, device="meta"))

    def _written(self, tensor: Tensor, scale_inv: Tensor | None = None) -> WrittenTensors:
        """Return what is written for codes with their scales, or for a tensor in high precision."""
        if scale_inv is not None and self.layer is not None and weight_cast(self.layer).tile == MX:
            scale_inv = scale_inv.to(torch.float8_e8m0fnu).view(torch.uint8)
        if scale_inv is None or self.layer is None or tensor.ndim < 3:
            return ((name, each, scale_inv) for name, each in written_tensors(self.model, self.key, tensor).items())
        pairs = written_pairs(self.model, self.key, tensor, scale_inv, weight_cast(self.layer))
        return ((name, *pair) for name, pair in pairs.items())


def entries(model: nn.Module, layout: AnyLayout) -> tuple[list[Entry], Layers, list[str]]:
    """Return a model's tensors in the state_dict's order, tied ones once; its FP8 layers; matrices in high precision.

    Raises ExportError if the layout can't hold a layer or no server can read it, and for a model without FP8 layers.
    """
    layers, skipped = fp8_layers(model)
    if misfits := {name: reason for name, module in layers.items() if (reason := _why_not_held(name, module, layout))}:
        name, reason = next(iter(misfits.items()))
        others = f" and {len(misfits) - 1} more layers" if len(misfits) > 1 else ""
        raise ExportError(f"layout={layout!r} can't hold {name or 'the model'}{others}: {reason}")
    weights = {module.weight_name(name): name for name, module in layers.items()}
    state = model.state_dict(keep_vars=True)
    if missing := weights.keys() - state.keys():
        raise ExportError(
            f"{min(missing)} is not in the model's state_dict, whose names a wrapper has changed: unwrap it"
        )
    unwritten = _unwritten_keys(model, state, weights)
    unwritten |= {f"{weight}{SCALE_INV}" for weight in weights}  # written with the weights, which live in FP8
    tensor_entries = []
    renaming_model = model if any(module.part_name for module in layers.values()) else None
    for key, tensor in state.items():
        if key in unwritten:
            continue
        if not isinstance(tensor, Tensor) or hasattr(on_this_rank(tensor), "__tensor_flatten__"):
            raise ExportError(f"{key} is a {type(tensor).__name__}, not a plain tensor; take extra state out")
        if tensor.is_meta:
            raise ExportError(f"{key} is on the meta device, without values; load the checkpoint first")
        if key not in weights and f"{key}{SCALE_INV}" in state:
            raise ExportError(
                f"{key} is stored in FP8, but its layer's recipe has no FP8 output product: octavo.set_recipe(model, "
                f"octavo.recipes.{LAYOUTS[layout].recipe}()) before, or octavo.restore(model)"
            )
        tensor_entries.append(Entry(key, tensor, layers[weights[key]] if key in weights else None, renaming_model))
    for entry in tensor_entries:
        try:
            entry.empty_tensors()
        except ValueError as error:
            raise ExportError(f"{entry.key}: {error}; keep it in high precision by an octavo.RecipeMap") from error
    if renaming_model is not None:
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        renamed = (written_tensors(renaming_model, f"{name}.weight".removeprefix("."), empty) for name in skipped)
        skipped = [next(iter(tensors)).removesuffix(".weight") for tensors in renamed]
    return tensor_entries, layers, skipped


def fp8_layers(model: nn.Module) -> tuple[Layers, list[str]]:
    """Return the FP8 layers by name, and the names of the other modules with a matrix, which stay in high precision.

    Embeddings are left out. Raises ExportError if no layer is in FP8.
    """
    modules_by_name = dict(model.named_modules(remove_duplicate=False))
    converted = ((name, module) for name, module in modules_by_name.items() if isinstance(module, RecipeModule))
    if not (layers := {name: module for name, module in converted if module.recipe.output is not None}):
        raise ExportError(
            "no layer's output product is in FP8; call octavo.convert(model, recipe), or save it as it is"
        )
    in_fp8 = {*layers.values(), *(module.weight_owner for module in layers.values())}
    others = {name: m for name, m in modules_by_name.items() if m not in in_fp8 and not isinstance(m, nn.Embedding)}
    return layers, [name for name, m in others.items() if any(p.ndim >= 2 for p in m.parameters(recurse=False))]


def _why_not_held(name: str, module: RecipeModule, layout: AnyLayout) -> str | None:
    """Return why the layout can't hold a layer's pair, and the remedy; None if it can."""
    cast = weight_cast(module)
    remedy = f"octavo.set_recipe(model, octavo.recipes.{LAYOUTS[layout].recipe}()) makes weights that it holds"
    without_it = f"keep it in high precision by octavo.RecipeMap(recipe, {{{name!r}: None}})"
    if module.part_name:
        holder: Any = module.weight_owner
        leave_out = "; keep them in high precision by octavo.RecipeMap(recipe, {'*.experts': None})"
        if module.stores_transposed:
            return f"{type(holder).__name__} stores it as [E, K, N], which no reader takes in FP8{leave_out}"
        if any(part.recipe.output is None for part in holder.parts):
            return f"other matrices of the same experts are not in FP8, and servers read all of them alike{leave_out}"
    elif (weight := module._parameters.get("weight")) is None:
        return "its weight is computed from other parameters; make it one by torch's remove_parametrizations"
    elif weight.ndim == 2 and not isinstance(module, nn.Linear):
        return f"{type(module).__name__} stores its weight as [K, N], which no reader takes in FP8; {without_it}"
    if cast.format is not E4M3:
        return f"its weight is cast to {cast.format}, which no layout holds; {remedy}"
    if cast.tile not in LAYOUTS[layout].tiles:
        other = next((name for name, candidate in LAYOUTS.items() if cast.tile in candidate.tiles), None)
        advice = remedy if other is None else f"layout={other!r} holds those"
        return f"its weight's scales are {cast.granularity}; {advice}"
    if cast.tile == MX and (columns := module.weight_parameter.shape[-1]) % MX[1]:
        return f"it has {columns} in features, and readers take blocks of {MX[1]} that are whole; {without_it}"
    return None


def _unwritten_keys(model: nn.Module, state: Mapping[str, Any], weights: Mapping[str, str]) -> set[str]:
    """Return the keys that are not written: their parameter is written under another, if possible transformers' choice.

    Raises ExportError for an FP8 layer's parameter that another kind of module has too.
    """
    keys_of: dict[int, list[str]] = {}
    for key, tensor in state.items():
        keys_of.setdefault(id(tensor), []).append(key)
    # transformers': {key that is not written: its source}
    targets = getattr(model, "all_tied_weights_keys", None) or {}
    unwritten: set[str] = set()
    for keys in keys_of.values():
        layers = [weights[key] for key in keys if key in weights]
        if layers and len(layers) < len(keys):
            other = next(key for key in keys if key not in weights)
            raise ExportError(
                f"{layers[0]}: its weight is {other} too, which is read in high precision; give the layer high "
                f"precision as well: octavo.RecipeMap(recipe, {{{layers[0]!r}: None}})"
            )
        if not layers:
            written_key = next((key for key in keys if key not in targets), keys[0])
            unwritten.update(key for key in keys if key != written_key)
    return unwritten


def weight_cast(module: RecipeModule) -> Cast:
    """Return the cast of a layer's weight for its output product, which is in FP8."""
    assert module.recipe.output is not None
    return module.recipe.output[1]


def weight_scale_shape(module: RecipeModule) -> tuple[int, ...]:
    """Return the shape of a layer's weight scales in any layout: one scale is a vector of one."""
    cast, shape = weight_cast(module), module.weight_parameter.shape
    return (1,) if cast.tile == TENSOR and len(shape) == 2 else cast.granularity.of_matrices(shape).scale_shape(shape)


def _fine_grained_config(layers: Layers, skipped: list[str]) -> dict[str, Any]:
    """Return transformers' FineGrainedFP8Config, with DeepSeek-V3's ``fmt``; inputs are cast by blocks as they come."""
    casts = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*SQUARE]}
    return {"quant_method": "fp8", **casts, "modules_to_not_convert": skipped}


def _mxfp8_config(layers: Layers, skipped: list[str]) -> dict[str, Any]:
    """Return the configuration of MXFP8, as MiniMax's and verl's checkpoints have it."""
    mx = {"quant_method": "mxfp8", "weight_block_size": [*MX], "scale_fmt": "ue8m0"}
    return _fine_grained_config(layers, skipped) | mx


class _Scheme(NamedTuple):
    """compressed-tensors' entries for weights, and for inputs, which are cast as they come; its name of the format."""

    weights: dict[str, Any]
    inputs: dict[str, Any]
    format: str = "float-quantized"


_GROUPS_OF_32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_SCHEMES = {  # by a weight's tile
    TENSOR: _Scheme({"strategy": "tensor"}, {"strategy": "token"}),
    ROW: _Scheme({"strategy": "channel"}, {"strategy": "token"}),  # its preset FP8_DYNAMIC
    # FP8_BLOCK
    SQUARE: _Scheme({"strategy": "block", "block_structure": [*SQUARE]}, {"strategy": "group", "group_size": BLOCK}),
    MX: _Scheme(_GROUPS_OF_32, _GROUPS_OF_32, "mxfp8-quantized"),  # MXFP8
}


def _compressed_tensors_config(layers: Layers, skipped: list[str]) -> dict[str, Any]:
    """Return compressed-tensors' QuantizationConfig: a config group for each kind of weight scale."""
    targets_by_tile: dict[tuple[int, int], list[str]] = {}
    for name, module in layers.items():
        pattern = f"re:{re.escape(name.rpartition('.')[0])}[.].*" if module.part_name else name
        targets_by_tile.setdefault(weight_cast(module).tile, []).append(pattern)
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(targets_by_tile) == 1 else targets,
            "weights": args | _SCHEMES[tile].weights | {"dynamic": False},
            "input_activations": args | _SCHEMES[tile].inputs | {"dynamic": True},
            "format": _SCHEMES[tile].format,
        }
        for i, (tile, targets) in enumerate(targets_by_tile.items())
    }
    formats = {group["format"] for group in groups.values()}
    format = "mixed-precision" if len(formats) > 1 else formats.pop()
    config = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return {**config, "config_groups": groups, "ignore": skipped}


# in the order in which errors propose them: a new one is the last of files
LAYOUTS: dict[AnyLayout, Layout] = {
    "fine-grained": Layout("_scale_inv", (SQUARE,), "blockwise", _fine_grained_config, method="fp8", matches_ends=True),
    "mxfp8": Layout("_scale_inv", (MX,), "mx", _mxfp8_config, method="mxfp8", matches_ends=True),
    "compressed-tensors": Layout(
        "_scale", (*_SCHEMES,), "rowwise", _compressed_tensors_config, method="compressed-tensors", matches_ends=False
    ),
    "per-tensor": Layout("_scale", (TENSOR,), "dynamic", None, method=None, matches_ends=False),
}
