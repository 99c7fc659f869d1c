"""LoRA by PEFT over a frozen base that lives in FP8."""

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.errors import UnsupportedOpError
from octavo.weights.stored import StoredWeight
from tests.support.helpers import CountOps, assert_equal, sqnr, stepped

transformers = pytest.importorskip("transformers")

from tests.support.tiny_models import decoder  # noqa: E402

peft: Any


@pytest.fixture(scope="module", autouse=True)
def _peft() -> None:
    """Imported where its tests run: each worker would take seconds for it to collect them."""
    global peft
    peft = pytest.importorskip("peft")


# Weights are stored with powers of two, so a plain twin casts with such scales too.
RECIPES = {"dynamic": recipes.dynamic(power_of_two=True), "blockwise": recipes.blockwise()}
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def llama(hidden: int = 128, inner: int = 256, layers: int = 2, vocabulary: int = 64) -> Any:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return decoder("Llama", **sizes, num_key_value_heads=4, tie_word_embeddings=True).bfloat16()


def base_layers(module: nn.Module, name: str) -> bool:
    """Whether a layer is converted, as the default select chooses in larger models: neither the head nor adapters."""
    return "_proj" in name and "lora_" not in name


def adapted(recipe: octavo.Recipe | None, storage: Any = "fp8", after: bool = False, **options: Any) -> Any:
    """A Llama with LoRA, its base converted before or after."""
    torch.manual_seed(0)
    model = llama()
    if not after and recipe is not None:
        octavo.convert(model, recipe, base_layers, storage)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA | options))
    return octavo.convert(model, recipe, base_layers, storage) if after and recipe is not None else model


def tokens(seed: int, shape: tuple[int, int] = (2, 16)) -> Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def train(model: Any, steps: int = 3, lr: float = 1e-2, micro_batches: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        for part in range(micro_batches):
            batch = tokens(10 * step + part)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens(99)).logits


@pytest.mark.covering(1)
@pytest.mark.parametrize("after", [False, True], ids=["convert first", "get_peft_model first"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_over_a_frozen_plain_base_bit_for_bit(recipe, after):
    model, twin = adapted(RECIPES[recipe], after=after), adapted(RECIPES[recipe], storage=None)
    before = [p.qdata.view(torch.uint8).clone() for p in model.parameters() if isinstance(p, StoredWeight)]
    assert len(before) == 14
    assert train(model) == train(twin)
    assert_equal(adapters(model), adapters(twin))
    assert torch.equal(logits(model), logits(twin))
    after_training = [p.qdata.view(torch.uint8) for p in model.parameters() if isinstance(p, StoredWeight)]
    assert all(map(torch.equal, before, after_training))


def test_a_step_takes_no_cast_of_a_weight():
    """Each FP8 product casts one operand, the activation or the gradient; the other is the stored weight."""
    model = adapted(recipes.blockwise())
    with CountOps() as count:
        train(model, steps=1)
    # two micro-batches of 14 layers; what the frozen embedding feeds (query, key, value of the first) has no gradient
    products = 2 * (14 + 14 - 3)
    shared = 2 + 1  # a layer's q, k and v read one input, gate and up another
    assert count.calls["matmul"] == products and count.casts == products - 2 * 2 * shared


def memory(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    inner = [getattr(t, name, None) for t in tensors for name in ("qdata", "scale_inv", "extra_bits")]
    plain = [t for t in tensors if not isinstance(t, StoredWeight)] + [t for t in inner if t is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in plain}.values())


SIZES = {"16 M parameters": (512, 1408, 5, 2048), "100 M parameters": (1024, 2816, 8, 4096)}


@pytest.mark.parametrize("size", [pytest.param(n, marks=[pytest.mark.full] if "100" in n else []) for n in SIZES])
def test_the_base_takes_one_byte_a_parameter(size):
    model = llama(*SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(float(size.split()[0]) * 1e6, rel=0.1)
    bf16 = memory(model)
    octavo.convert(model.requires_grad_(False), recipes.blockwise(), base_layers, "fp8")
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    assert memory(model) <= 0.56 * bf16 if "100" in size else memory(model) <= 0.60 * bf16


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_are_saved_and_loaded_switched_off_and_changed(tmp_path, recipe):
    model = adapted(RECIPES[recipe])
    base = logits(model)  # LoRA begins as nothing
    train(model)
    trained = logits(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 200_000  # nothing of the base
    torch.manual_seed(0)
    other = octavo.convert(llama(), RECIPES[recipe], base_layers, "fp8")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(other, tmp_path)), trained)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    model.add_adapter("other", peft.LoraConfig(**LORA))
    for name, expected in (("other", base), ("default", trained)):
        model.set_adapter(name)
        assert torch.equal(logits(model), expected)


@pytest.mark.full
def test_merged_into_codes(tmp_path):
    """Merged weights are the sums with their adapters, rounded once more; a file has the same codes."""
    model = adapted(recipes.blockwise())
    train(model)
    trained = logits(model)
    exact = copy.deepcopy(model)
    octavo.restore(exact)
    exact = exact.merge_and_unload()
    with pytest.warns(UserWarning, match="an adapter is merged into weights that are stored in FP8"):
        merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    for name, parameter in merged.named_parameters():
        if isinstance(parameter, StoredWeight):
            assert sqnr(parameter.dequantize(), exact.get_parameter(name)) > 27  # measured: 28.3 to 28.7 dB
    assert sqnr(logits(merged), trained) > 25  # measured: 28.4 dB
    octavo.export.to_safetensors(merged, tmp_path / "served")
    written = pytest.importorskip("safetensors.torch").load_file(tmp_path / "served" / "model.safetensors")
    for name, parameter in merged.named_parameters():
        codes_or_values = parameter.qdata if isinstance(parameter, StoredWeight) else parameter
        assert torch.equal(written[name].float(), codes_or_values.float())


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_merged_in_the_weights_own_dtype(recipe):
    """octavo.restore comes first: then PEFT merges into the base's values, and nothing of octavo is left."""
    model = adapted(RECIPES[recipe])
    train(model)
    plain = adapted(None)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        with torch.no_grad():
            other.copy_(parameter.dequantize() if isinstance(parameter, StoredWeight) else parameter)
    octavo.restore(model)
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].mlp.up_proj) is nn.Linear
    assert torch.equal(logits(merged), logits(plain.merge_and_unload()))


@pytest.mark.full
def test_what_cannot_be_merged_is_refused():
    model = adapted(recipes.blockwise())
    before = logits(model)
    merged = pytest.warns(UserWarning, match="an adapter is merged")
    with merged, pytest.raises(UnsupportedOpError, match=r"safe_merge=True after octavo\.restore\(model\)"):
        model.merge_and_unload(safe_merge=True)
    assert torch.equal(logits(model), before)
    with pytest.warns(UserWarning, match="an adapter is merged"):
        model.merge_adapter()
    with pytest.raises(UnsupportedOpError, match="an adapter can't be taken out"):
        model.unmerge_adapter()


@pytest.mark.full
@pytest.mark.parametrize("after", [False, True], ids=["convert first", "get_peft_model first"])
def test_dora_is_refused_over_fp8_weights(after):
    with pytest.raises(UnsupportedOpError, match=r"adapters like DoRA\) need.*weight_storage=None"):
        train(adapted(recipes.blockwise(), after=after, use_dora=True))
    train(adapted(recipes.blockwise(), storage=None, use_dora=True))


def trainer(model: Any, folder: Any, steps: int, optimizer: Any = None) -> Any:
    """transformers' Trainer, which saves after two steps."""
    options = {"per_device_train_batch_size": 2, "max_steps": steps, "save_steps": 2, "use_cpu": True}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    data = [{"input_ids": row, "labels": row} for row in tokens(0, (8, 16))]
    arguments = transformers.TrainingArguments(folder, **options, **quiet)
    return transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))


@pytest.mark.full
def test_transformers_trainer_saves_adapters_alone_and_resumes(tmp_path):
    whole = adapted(recipes.blockwise(), after=True)
    trainer(whole, tmp_path, 4).train()
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    resumed = adapted(recipes.blockwise(), after=True)
    trainer(resumed, tmp_path, 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(adapters(resumed), adapters(whole))


@pytest.mark.full
@pytest.mark.parametrize("method", ["adapters", "all weights"])
def test_trainer_goes_on_from_an_fp8_checkpoint(tmp_path, method):
    """Trainer goes on from an FP8 checkpoint, which transformers refuses: its issues 37927, 41516, 46295, 46736."""
    recipe = octavo.RecipeMap(recipes.blockwise(), {"lm_head": None})
    octavo.export.to_safetensors(octavo.convert(llama(), recipe, base_layers), tmp_path / "served")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "served")
    with pytest.importorskip("accelerate").init_empty_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(method == "all weights")
    octavo.export.load_fp8(octavo.convert(model, recipe, base_layers, "fp8"), tmp_path / "served")
    if method == "adapters":
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    optimizer = octavo.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = logits(model)
    trainer(model, tmp_path / "run", 3, optimizer).train()
    assert not torch.equal(logits(model), before)
    assert sum(isinstance(p, StoredWeight) for p in model.parameters()) == 14


# --- against bf16 -----------------------------------------------------------------------------------------------------


def sequences(shift: int, count: int, seed: int) -> Tensor:
    """Return sequences of tokens, each five times the last plus ``shift``; one in ten is drawn: a loss to reach."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(64, (count, 1), generator=generator)]
    for _ in range(31):
        drawn = torch.rand(count, 1, generator=generator) < 0.1
        anew = torch.randint(64, (count, 1), generator=generator)
        columns.append(torch.where(drawn, anew, (5 * columns[-1] + shift) % 64))
    return torch.cat(columns, 1)


def fit(model: Any, shift: int, steps: int, lr: float, seed: int) -> float:
    """Train what can be trained; return the loss on sequences of its own."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        batch = sequences(shift, 16, 1000 * seed + step)
        stepped(optimizer, model(input_ids=batch, labels=batch).loss)
    batch = sequences(shift, 64, 7)
    with torch.no_grad():
        return float(model.eval()(input_ids=batch, labels=batch).loss)


@functools.cache
def pretrained(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = llama()
    fit(model, 1, 120, 3e-3, seed)
    return model


@functools.cache
def fine_tuned(seed: int, recipe: octavo.Recipe | None) -> float:
    """The loss after LoRA over a pretrained base, in bf16 or in FP8."""
    model = copy.deepcopy(pretrained(seed)).requires_grad_(False)
    if recipe is not None:
        octavo.convert(model, recipe, base_layers, "fp8")
    torch.manual_seed(seed)
    return fit(peft.get_peft_model(model, peft.LoraConfig(**LORA)).train(), 3, 80, 5e-3, seed)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [recipes.dynamic(), recipes.blockwise()], ids=lambda recipe: recipe.name)
def test_losses_are_those_over_bf16(recipe):
    for seed in range(3):
        loss = fine_tuned(seed, None)
        assert loss < math.log(64) / 2
        assert abs(fine_tuned(seed, recipe) / loss - 1) < 0.005
