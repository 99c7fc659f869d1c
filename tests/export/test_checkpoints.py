from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo import E4M3, E5M2, Cast, PerBlock, PerTensor, Recipe, recipes
from octavo.errors import ExportError, MissingExtraError
from octavo.export.checkpoints import iterate_fp8, to_safetensors
from octavo.export.layouts import LAYOUTS, FileLayout
from tests.support.combinations import in_full
from tests.support.helpers import CountOps, padded_as_on_gpu, sqnr, stepped, to_fp8
from tests.support.memory import peak_bytes

LAYOUT_OF = {"blockwise": "fine-grained", "delayed": "per-tensor", "mx": "mxfp8"}
LAYOUT_OF |= dict.fromkeys(("dynamic", "rowwise"), "compressed-tensors")


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.octavo.matmul.default, torch.ops.octavo.grouped_matmul.default):
            self.operands.append((args[3].clone(), args[4].clone()))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def seen_operands() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The second operands of all FP8 products within: of forwards, the weights in order."""
    with _Seen() as seen:
        yield seen.operands


def same_codes(pairs: list[tuple[str, Tensor, Tensor]], operands: list[tuple[Tensor, Tensor]]) -> bool:
    """Return whether a model's named pairs, in forward's order, are its products' operands, bit for bit."""
    return len(pairs) == len(operands) and all(
        torch.equal(codes.view(torch.uint8), q.view(torch.uint8)) and torch.equal(scale_inv.reshape(s.shape), s.float())
        for (_, codes, scale_inv), (q, s) in zip(pairs, operands, strict=True)
    )


def fp8(model: nn.Module, layout: str) -> list[tuple[str, Tensor, Any]]:
    """Copies of a model's named pairs, with scales in float32."""
    triples = octavo.export.iterate_fp8(model, layout, fp8_only=True)  # type: ignore[arg-type]
    return [(name, codes.clone(), as_float(scale_inv).clone()) for name, codes, scale_inv in triples]


def as_float(scale_inv: Any) -> Tensor:
    return scale_inv.view(torch.float8_e8m0fnu).float() if scale_inv.dtype == torch.uint8 else scale_inv


def layers(recipe: str, stored: bool = False, sizes: tuple[int, ...] = (256, 512, 256, 512)) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(k, n) for k, n in itertools.pairwise(sizes)]
    net = nn.Sequential(*linears, nn.LayerNorm(sizes[-1]))
    if stored:
        for linear in linears:
            linear.weight.requires_grad_(recipe not in ("rowwise", "mx"))
        return octavo.convert(net, getattr(recipes, recipe)(), lambda module, name: True, "fp8")  # type: ignore[return-value]
    return to_fp8(net, getattr(recipes, recipe)())  # type: ignore[return-value]


def step(net: Any, optimizer: Any) -> None:
    stepped(optimizer, net(torch.randn(32, net[0].in_features)).square().mean())


def compare_sharded(mesh: Any, recipe: str, stored: bool, mixed: bool, training: bool) -> list[str]:
    """Return what is wrong with what this rank iterates of a model under FSDP2, after two steps."""
    net, wrong = layers(recipe, stored), []
    options: Any = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
    for layer in net[:-1]:  # the last group also holds the norm
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    optimizer = octavo.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        step(net, optimizer)
    net.train(training)
    pairs = fp8(net, LAYOUT_OF[recipe])
    with seen_operands() as operands:
        net(torch.randn(32, 256))
    if not same_codes(pairs, operands):
        wrong.append("codes")
    everything = {name: (tensor, scale) for name, tensor, scale in octavo.export.iterate_fp8(net, LAYOUT_OF[recipe])}
    if set(everything) != set(net.state_dict()) - {f"{i}.weight_scale_inv" for i in range(3)}:
        wrong.append("names")
    for name, parameter in net.named_parameters():
        if everything[name][1] is None and not torch.equal(everything[name][0], parameter.full_tensor()):
            wrong.append(name)
    step(net.train(), optimizer)  # training goes on
    return wrong


def sharded_peak(mesh: Any) -> tuple[int, int]:
    """Return (the most bytes that iterating a sharded model holds, its codes' bytes)."""
    net = layers("blockwise", True, (512,) * 17)
    for layer in net[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def iterate() -> None:
        for _ in octavo.export.iterate_fp8(net):
            pass

    iterate()
    return peak_bytes(iterate), 16 * 512 * 512


safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("huggingface_hub")

COMPRESSED = "compressed-tensors"
SUFFIXES = {"fine-grained": "_scale_inv", "mxfp8": "_scale_inv", COMPRESSED: "_scale"}


def read(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in safetensors.load_file(file).items()}


def quantization_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def layer_of(recipe: Recipe, n: int = 256, k: int = 128, dtype: torch.dtype = torch.float32) -> nn.Module:
    return octavo.nn.Linear(k, n, recipe=recipe, dtype=dtype)


def dequantized(layer: nn.Module) -> Tensor:
    """The pair's values by octavo's own conversions, from the weight's own amax."""
    cast = layer.recipe.output[1]
    return octavo.quantize(layer.weight, cast.format, cast.granularity, cast.power_of_two, cast.margin).dequantize()


def llama(recipe: Recipe, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "tie_word_embeddings": tied}
    pytest.importorskip("transformers")  # here, as ranks import this file too, for their tasks
    from tests.support import tiny_models

    model = tiny_models.decoder("Llama", **sizes).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # whose amax differs from row to row and block to block
            parameter.mul_(torch.rand(parameter.shape[0], *[1] * (parameter.ndim - 1)).to(dtype) + 0.5)
    return to_fp8(model, octavo.RecipeMap(recipe, {"lm_head": None})).eval()


def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Load by transformers' from_pretrained, which dequantises to the model's dtype."""
    import transformers

    if quantization_config(folder)["quant_method"] in ("fp8", "mxfp8"):
        from transformers.quantizers import quantizer_finegrained_fp8

        # asked for at the door; dequantising doesn't use it
        monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
        options = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        pytest.importorskip("compressed_tensors")
        options = transformers.CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*already has a `quantization_config`")  # which says how to read it
        return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=options)


def assert_same_model(loaded: nn.Module, model: nn.Module) -> None:
    """Check bit for bit: dequantised weights where a layer is in FP8, the parameters themselves elsewhere."""
    modules, theirs = dict(model.named_modules()), dict(loaded.named_parameters())
    ours = dict(model.named_parameters())
    assert theirs.keys() == ours.keys()
    for name, parameter in ours.items():
        recipe = getattr(modules[name.rpartition(".")[0]], "recipe", recipes.high_precision())
        expected = parameter if recipe.is_high_precision else dequantized(modules[name.rpartition(".")[0]])
        assert theirs[name].dtype == parameter.dtype
        assert torch.equal(theirs[name], expected), name


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "layout", "dtype", "tied", "shard_bytes"),
    [
        ("blockwise", "fine-grained", torch.float32, False, 5_000_000_000),
        ("blockwise", "fine-grained", torch.bfloat16, True, 100_000),
        ("mx", "mxfp8", torch.bfloat16, False, 5_000_000_000),
        *((name, COMPRESSED, torch.bfloat16, False, 5_000_000_000) for name in ("dynamic", "delayed", "rowwise", "mx")),
    ],
)
def test_transformers_reads_it(tmp_path, monkeypatch, name, layout, dtype, tied, shard_bytes):
    """Tied weights are written once; ``iterate_fp8`` gives what the file has."""
    model = llama(getattr(recipes, name)(), tied, dtype)
    to_safetensors(model, tmp_path / "out", layout, max_shard_bytes=shard_bytes)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (shard_bytes < 1_000_000)
    stored, sent, suffix = read(tmp_path / "out"), {}, SUFFIXES[layout]
    for key, tensor, scale in iterate_fp8(model, layout):
        sent |= {key: tensor} if scale is None else {key: tensor, key + suffix: scale}
    assert {key: tensor.dtype for key, tensor in sent.items()} == {key: tensor.dtype for key, tensor in stored.items()}
    assert all(torch.equal(tensor.float(), stored[key].float()) for key, tensor in sent.items())
    in_fp8 = {key for key, *_ in iterate_fp8(model, layout, fp8_only=True)}
    assert in_fp8 == {key for key in stored if key.endswith("_proj.weight")}
    assert {key + suffix for key in in_fp8} == {key for key in stored if key.endswith(suffix)}
    assert ("lm_head.weight" not in stored) == tied and "model.embed_tokens.weight" in stored
    loaded = load(tmp_path / "out", monkeypatch)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert_same_model(loaded, model)
    tokens = torch.randint(64, (2, 16))
    assert sqnr(loaded(tokens).logits, model(tokens).logits) > 25  # ours casts the inputs too: 28.5 to 28.9 dB measured


def test_fp8_layers_that_share_a_weight_are_written_each(tmp_path):
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[1].weight = model[0].weight
    octavo.convert(model, recipes.blockwise(), select=lambda module, name: True, weight_storage="fp8")
    to_safetensors(model, tmp_path / "out")
    assert torch.equal(read(tmp_path / "out")["1.weight"].float(), model[0].weight.qdata.float())
    octavo.export.load_fp8(model, tmp_path / "out")
    assert model[0].weight is model[1].weight


def test_the_warning_of_ragged_blocks_is_still_due(tmp_path):
    """transformers' dequantisation still takes the block's size from the number of scales."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    layer = layer_of(recipes.blockwise(), 192, 128)
    with torch.no_grad():
        layer.weight[128:] *= 16
    with pytest.warns(UserWarning, match=r"1 layers have sizes over 128 .* the model \[192, 128\]"):
        to_safetensors(layer, tmp_path / "out")
    stored = read(tmp_path / "out")
    weight = Fp8Dequantize(None)._dequantize_one(stored["weight"], stored["weight_scale_inv"])
    assert not torch.equal(weight, dequantized(layer))


PRESETS = {"dynamic": None, "delayed": None, "rowwise": "FP8_DYNAMIC", "blockwise": "FP8_BLOCK", "mx": "MXFP8"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_is_decompressed_by_compressed_tensors(tmp_path, name, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    layer = layer_of(getattr(recipes, name)(), 300, 192, dtype)
    to_safetensors(layer, tmp_path / "out", COMPRESSED)
    stored = read(tmp_path / "out")
    config = QuantizationConfig.model_validate(quantization_config(tmp_path / "out"))
    if PRESETS[name]:
        (ours,) = config.config_groups.values()
        preset = preset_name_to_scheme(PRESETS[name], ["Linear"]).model_dump()
        assert ours.model_dump() == preset | {"format": config.format}
    plain = nn.Sequential(nn.Linear(192, 300))
    apply_quantization_config(plain, config)
    theirs, scheme = plain[0].state_dict(), plain[0].quantization_scheme
    assert stored["weight_scale"].shape == theirs["weight_scale"].shape
    assert stored["weight_scale"].dtype == (scheme.weights.scale_dtype or torch.float32)
    assert stored["weight"].dtype == scheme.weights.pytorch_dtype()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    assert compressor.can_compress(nn.Linear, scheme)
    assert set(stored) == {"bias", *compressor.compression_param_names(scheme)}
    assert torch.equal(compressor.decompress(stored, scheme)["weight"].to(dtype), dequantized(layer))


def test_each_kind_of_scale_is_a_group(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    by_name = {"1": recipes.rowwise(), "2": None, "3": recipes.mx()}
    to_safetensors(to_fp8(model, octavo.RecipeMap(recipes.dynamic(), by_name)), tmp_path / "out", COMPRESSED)
    plain = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    apply_quantization_config(plain, QuantizationConfig.model_validate(quantization_config(tmp_path / "out")))
    schemes = [getattr(layer, "quantization_scheme", None) for layer in plain]
    assert [scheme and scheme.weights.strategy for scheme in schemes] == ["tensor", "channel", None, "group"]
    assert quantization_config(tmp_path / "out")["format"] == "mixed-precision"
    assert {scheme.input_activations.dynamic for scheme in schemes if scheme} == {True}


def test_padding_and_a_delayed_state_left_on_the_meta_device_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.autograd.casts.contraction_multiple", padded_as_on_gpu)
    with torch.device("meta"):
        empty = octavo.nn.Linear(64, 32, recipe=recipes.delayed())
    empty.load_state_dict(nn.Linear(64, 32).state_dict(), assign=True)
    for name, layer in {"padded": layer_of(recipes.rowwise(), 24, 20), "without a history": empty}.items():
        to_safetensors(layer, tmp_path / name, COMPRESSED)
        stored = read(tmp_path / name)
        assert torch.equal(stored["weight"].float() * stored["weight_scale"], dequantized(layer)), name


def test_fused_modules_keep_their_own_keys(tmp_path):
    model = nn.ModuleDict({"mlp": octavo.nn.RMSNormMLP(64, 96, bias=False, recipe=recipes.blockwise())})
    model["head"] = nn.Linear(64, 8)
    with pytest.warns(UserWarning, match=r"1 layers have sizes over 128 .* first mlp.fc1 \[192, 64\]"):
        to_safetensors(model, tmp_path / "out")
    stored = read(tmp_path / "out")
    fp8 = {f"mlp.{part}.{key}" for part in ("fc1", "fc2") for key in ("weight", "weight_scale_inv")}
    assert stored.keys() == fp8 | {"mlp.norm.weight", "head.weight", "head.bias"}
    assert torch.equal(stored["mlp.norm.weight"], model["mlp"].norm.weight)
    assert quantization_config(tmp_path / "out")["modules_to_not_convert"] == ["head"]


def test_views_and_products_in_high_precision_are_written_as_they_are(tmp_path):
    only_backward = dataclasses.replace(recipes.blockwise(), output=None)
    model = to_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), recipes.blockwise())
    octavo.set_recipe(model[1], only_backward)
    model[0].bias.data = torch.arange(16.0)[::2]
    folder = tmp_path / "new" / "out"
    folder.mkdir(parents=True)  # an empty folder is as good as none
    to_safetensors(model, folder)
    stored = read(folder)
    assert torch.equal(stored["0.bias"], torch.arange(16.0)[::2])
    assert torch.equal(stored["1.weight"], model[1].weight)
    assert list(folder.parent.iterdir()) == [folder]
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def two_layers(recipe: Recipe = recipes.blockwise()) -> nn.Module:
    return to_fp8(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), recipe)


E5M2_WEIGHT = Recipe(output=(Cast(E4M3, PerTensor()), Cast(E5M2, PerTensor())))
SMALL_BLOCKS = Recipe(output=(Cast(E4M3, PerBlock(1, 64)), Cast(E4M3, PerBlock(64, 64))))


@pytest.mark.parametrize(
    ("recipe", "layout", "message"),
    [
        (recipes.dynamic(), "fine-grained", r"PerTensor\(\); layout='compressed-tensors' holds those"),
        (recipes.rowwise(), "fine-grained", r"PerRow\(\); layout='compressed-tensors' holds those"),
        (recipes.blockwise(), "mxfp8", r"PerBlock\(128, 128\); layout='fine-grained' holds those"),
        (recipes.mx(), "fine-grained", r"PerBlock\(1, 32\); layout='mxfp8' holds those"),
        (recipes.mx(), COMPRESSED, r"8 in features, .* blocks of 32 that are whole; .*\(recipe, {'a': None}\)"),
        (SMALL_BLOCKS, COMPRESSED, r"PerBlock\(64, 64\); octavo.set_recipe\(model, octavo.recipes.rowwise\(\)\)"),
        (SMALL_BLOCKS, "fine-grained", r"PerBlock\(64, 64\); octavo.set_recipe\(model, octavo.recipes.blockwise\(\)\)"),
        (E5M2_WEIGHT, COMPRESSED, r"cast to E5M2, which no layout holds; octavo.set_recipe\(.*rowwise\(\)\)"),
    ],
)
def test_a_cast_without_a_place_is_refused(tmp_path, recipe, layout, message):
    with pytest.raises(ExportError, match=f"layout='{layout}' can't hold a and 1 more layers: .*{message}"):
        to_safetensors(two_layers(recipe), tmp_path / "out", layout)
    assert not any(tmp_path.iterdir())


def parametrized() -> nn.Module:
    model = two_layers()
    nn.utils.parametrizations.weight_norm(model["b"])
    return model


def with_buffer(tensor: Tensor) -> nn.Module:
    model = two_layers()
    model["a"].register_buffer("extra", tensor)
    return model


def with_shared_weight() -> nn.Module:
    model = nn.ModuleDict({"table": nn.Embedding(8, 8), "head": nn.Linear(8, 8, bias=False)})
    model["head"].weight = model["table"].weight
    return to_fp8(model, recipes.blockwise())


def with_names_alike() -> nn.Module:
    model = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "proj": nn.Linear(8, 8)})
    return to_fp8(model, octavo.RecipeMap(recipes.blockwise(), {"proj": None}))


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return to_fp8(nn.ModuleDict({"c_fc": Conv1D(8, 8)}), recipes.blockwise())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(8, 8), "no layer's output product is in FP8; call octavo.convert"),
        (lambda: layer_of(recipes.high_precision()), "no layer's output product is in FP8"),
        (parametrized, "b: its weight is computed .* remove_parametrizations"),
        (conv1d, r"c_fc: Conv1D stores its weight as \[K, N\].*RecipeMap\(recipe, {'c_fc': None}\)"),
        (lambda: two_layers().to("meta"), "a.weight is on the meta device"),
        (lambda: with_buffer(torch.empty(2, device="meta")), "a.extra is on the meta device"),
        (lambda: with_buffer(octavo.quantize(torch.ones(2), E4M3, PerTensor())), "a.extra is a ScaledTensor, not a"),
        (with_shared_weight, r"head: its weight is table.weight too.*RecipeMap\(recipe, {'head': None}\)"),
        (with_names_alike, "'proj' stays in high precision.*'q_proj' too"),
    ],
)
def test_a_model_that_cannot_be_stored_is_refused(tmp_path, build, message):
    with pytest.raises(ExportError, match=message):
        to_safetensors(build(), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="is not empty"):
        to_safetensors(two_layers(), tmp_path)
    with pytest.raises(ExportError, match=r"notes.txt is a file"):
        to_safetensors(two_layers(), tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_nothing_is_left_of_a_failure(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(safetensors, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        to_safetensors(two_layers(), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=f"layout='gguf': use {', '.join(map(repr, get_args(FileLayout)))}"):
        to_safetensors(two_layers(), tmp_path / "out", "gguf")
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be an integer of at least 1"):
        to_safetensors(two_layers(), tmp_path / "out", max_shard_bytes=0)
    with pytest.raises(ValueError, match=f"layout='gguf': use {', '.join(map(repr, LAYOUTS))}"):
        iterate_fp8(two_layers(), "gguf")


@pytest.mark.parametrize("absent", ["safetensors.torch", "huggingface_hub"])
def test_an_absent_library_is_named(tmp_path, monkeypatch, absent):
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingExtraError, match=r"pip install '.*\[safetensors\]'"):
        to_safetensors(two_layers(), tmp_path / "out")


SITUATIONS = [  # weights that are scaled by rows are neither kept nor stored
    (recipe, situation)
    for recipe, situation in itertools.product(LAYOUT_OF, ["as they come", "kept", "frozen", "stored"])
    if recipe not in ("rowwise", "mx") or situation in ("as they come", "frozen")
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("recipe", "situation"), SITUATIONS)
def test_the_codes_are_those_of_the_forward(recipe, situation, training):
    """Iterating casts each weight once, and gives codes that exist already as they are."""
    net = layers(recipe, stored=situation == "stored")
    optimizer = octavo.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(2):  # so that a delayed scale is an earlier weight's
        step(net, optimizer)
    if situation == "kept":
        octavo.nn.KeptWeights(net).cast()
    elif situation == "frozen":
        net.requires_grad_(False)
        net[0].bias.requires_grad_(True)
        net(torch.randn(32, 256))
    net.train(training)
    with CountOps() as ops:
        triples = list(iterate_fp8(net, LAYOUT_OF[recipe], fp8_only=True))
    if training:
        assert ops.casts == (0 if situation in ("kept", "stored") else 3)
    if situation == "stored":
        assert all(codes.data_ptr() == net.get_parameter(name).qdata.data_ptr() for name, codes, _ in triples)
    pairs = fp8(net, LAYOUT_OF[recipe])
    with seen_operands() as operands:
        net(torch.randn(32, 256))
    assert same_codes(pairs, operands)
    assert [name for name, *_ in pairs] == ["0.weight", "1.weight", "2.weight"]


@pytest.mark.parametrize("recipe", ["blockwise", "dynamic"])
def test_a_server_computes_what_the_trainer_computes(recipe):
    """Logits bit for bit, by an engine that holds the codes that it was sent, in the layout's own names."""
    trainer, server = layers(recipe), layers(recipe, stored=True).requires_grad_(False).eval()
    optimizer = octavo.optim.AdamW(trainer.parameters(), lr=0.01)
    x = torch.randn(16, 256)
    for _ in range(3):
        step(trainer.train(), optimizer)
        assert not torch.equal(server(x), trainer.eval()(x))
        sent = {}
        for name, tensor, scale in iterate_fp8(trainer, LAYOUT_OF[recipe]):
            sent[name] = tensor
            if scale is not None:
                sent[f"{name}_scale_inv"] = scale if scale.ndim == 2 else scale.view(1, 1)
        server.load_state_dict(sent)
        assert torch.equal(server(x), trainer(x))


@pytest.mark.parametrize(
    ("recipe", "stored", "mixed", "training"),
    [
        ("delayed", False, False, True),
        ("blockwise", True, False, True),
        ("rowwise", False, True, True),
        *in_full(("mx", True, False, True), ("delayed", False, True, False), ("dynamic", True, False, False)),
    ],
)
def test_a_sharded_model_gives_the_codes_that_its_forward_gathers(pool, recipe, stored, mixed, training):
    assert pool.run(compare_sharded, (2,), recipe, stored, mixed, training) == [[], []]


def test_one_sharded_tensor_is_held_at_a_time(pool):
    """The backend may free a tensor's buffers while the next one is gathered: of 16 tensors up to two are there."""
    peak, codes = pool.run(sharded_peak, (2,))[0]
    assert peak < codes / 2
