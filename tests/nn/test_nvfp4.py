"""Layers under recipes.nvfp4(): gradients, random bits over ways to compute, faults, delayed outer scales, refusals."""

import copy
import json
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import (
    E2M1,
    E4M3,
    Cast,
    Delayed,
    PerBlock,
    PerTensor,
    Recipe,
    RecipeMap,
    Rotation,
    Stochastic,
    kernels,
    recipes,
)
from octavo.errors import ExportError
from octavo.kernels.arguments import Counted
from octavo.train.model import GPT, ModelConfig
from tests.support import definitions
from tests.support.helpers import assert_equal, every_layer, gradients, sqnr, stepped
from tests.support.memory import saved_tensors

NVFP4, STALE = recipes.nvfp4(), recipes.nvfp4(history_length=2)
VECTOR = PerBlock(1, 16)


def step(model: nn.Module, x: Tensor, g: Tensor, call=None) -> dict[str, Tensor]:
    """Return the output and all gradients of one pass."""
    leaf = x.clone().requires_grad_()
    y = (call or model)(leaf)
    y.backward(g)
    result = gradients(model) | {"y": y.detach(), "x": leaf.grad}
    model.zero_grad()
    return result


def value(x: Tensor, cast: Cast) -> Tensor:
    """Return what x [R, K] reads after a cast, float64, by the tests' definition; rotated if the cast rotates."""
    rotation, seed = cast.rotation and cast.rotation.signs, cast.rounding and cast.rounding.seed
    codes, scale_inv = definitions.nvfp4(x, cast.tile, 0, 0.0, rotation, seed)
    return octavo.kernels.dequantize(codes.view(E2M1.dtype), scale_inv, cast.tile, torch.float32).double()


@pytest.mark.parametrize("tokens", [1, 15, 17, 48])
def test_the_products_are_of_the_casts(tokens: int) -> None:
    """Each in float64 of operands that the definition casts, for numbers of tokens that are no multiple of 16 too."""
    layer = octavo.nn.Linear(40, 24, recipe=NVFP4)
    x, g = torch.randn(tokens, 40), torch.randn(tokens, 24)
    result, weight = step(layer, x, g), layer.weight.detach()
    (x_cast, w_cast), (g_cast, wt_cast), (gt_cast, xt_cast) = NVFP4.output, NVFP4.grad_input, NVFP4.grad_weight
    wanted = {
        "y": value(x, x_cast) @ value(weight, w_cast).t() + layer.bias.detach().double(),
        "x": value(g, g_cast) @ value(weight.t().contiguous(), wt_cast).t(),
        "weight": value(g.t().contiguous(), gt_cast) @ value(x.t().contiguous(), xt_cast).t(),
        "bias": g.double().sum(0),
    }
    for name, exact in wanted.items():
        assert sqnr(result[name], exact) > 120, name
    plain = {"y": x @ weight.t() + layer.bias.detach(), "x": g @ weight, "weight": g.t() @ x}
    for name, exact in plain.items():
        assert sqnr(result[name], exact) > 10, name


def test_a_rotation_of_one_operand_spoils_the_weights_gradient() -> None:
    """Recipes with other signs on one side are refused; by the ops' own products they are far off."""
    gradient, of_input = NVFP4.grad_weight
    other = Cast(E2M1, VECTOR, power_of_two=True, rotation=Rotation(0))
    with pytest.raises(ValueError, match="give both the same"):
        Recipe(grad_weight=(gradient, other))
    g, x = torch.randn(24, 64), torch.randn(40, 64)
    exact, nearest = g.double() @ x.double().t(), Cast(E2M1, VECTOR, power_of_two=True, rotation=Rotation())
    assert sqnr(value(g, nearest) @ value(x, of_input).t(), exact) > 15
    assert sqnr(value(g, nearest) @ value(x, other).t(), exact) < 3


def model(recipe=NVFP4, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    k, n, out = 64, 96, 48
    layers = nn.Sequential(nn.Linear(k, n), nn.ReLU(), nn.Linear(n, out, bias=False), nn.ReLU(), nn.Linear(out, k))
    return octavo.convert(layers.to(dtype), recipe, every_layer)


def batch(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(33, 64, generator=draw).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_computed_again_and_by_a_copy_are_the_same(dtype: torch.dtype) -> None:
    """Random bits are of the numbers and of the place, so that they need no state."""
    first, data = model(dtype=dtype), batch(dtype=dtype)
    wanted = step(first, *data)
    assert_equal(step(first, *data, call=partial(checkpoint, first, use_reentrant=False)), wanted)
    assert_equal(step(copy.deepcopy(first), *data), wanted)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [NVFP4, STALE], ids=["dynamic", "delayed"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients_are_the_same(backend: str, recipe: Recipe) -> None:
    first, data = model(recipe, torch.bfloat16), batch(dtype=torch.bfloat16)
    second = copy.deepcopy(first)
    torch.compiler.reset()
    compiled = torch.compile(second, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_equal(step(second, *data, call=compiled), step(first, *data))


@pytest.mark.parametrize("recipe", [NVFP4, STALE], ids=["dynamic", "delayed"])
def test_a_resumed_training_goes_on_bit_for_bit(recipe: Recipe) -> None:
    def train(trained: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
        return [stepped(optimizer, (trained(x) - target).square().mean()) for x, target in map(batch, numbers)]

    first, resumed = model(recipe), model(recipe)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (first, resumed)]
    train(first, optimizers[0], range(3))
    saved = copy.deepcopy([first.state_dict(), optimizers[0].state_dict(), octavo.nn.delayed_state_dict(first)])
    losses = train(first, optimizers[0], range(3, 6))
    resumed.load_state_dict(saved[0])
    optimizers[1].load_state_dict(saved[1])
    octavo.nn.load_delayed_state_dict(resumed, saved[2])
    assert train(resumed, optimizers[1], range(3, 6)) == losses


def test_a_fault_reaches_its_token_and_the_scaler_skips() -> None:
    """An inf in one token makes that token's output NaN, and gradients of weights, so that the step is skipped."""
    layer = octavo.nn.Linear(64, 48, recipe=NVFP4)
    x, _ = batch()
    clean = layer(x).detach()
    faulty = x.clone()
    faulty[7, 20] = torch.inf
    y = layer(faulty)
    assert bool(y[7].isnan().all()) and torch.equal(*(torch.cat([one[:7], one[8:]]) for one in (y, clean)))
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    scaler.scale(y.square().sum()).backward()
    assert not layer.weight.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_equal({name: parameter.detach() for name, parameter in layer.named_parameters()}, before)
    optimizer.zero_grad()
    scaler.scale(layer(x).square().sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(layer.weight, before["weight"])


def test_a_stale_outer_scale_saturates_for_one_step() -> None:
    """An amax that grows up to 8 times costs nothing, 64 times saturates; the next step's scale knows it."""
    warm = octavo.nn.Linear(64, 48, bias=False, recipe=STALE)
    x, g = batch()[0], torch.randn(33, 48)
    step(warm, x, g)

    def ratio(layer: nn.Module, growth: float) -> float:
        return sqnr(step(layer, growth * x, g)["y"], growth * x.double() @ layer.weight.detach().double().t())

    usual = ratio(copy.deepcopy(warm), 1.0)
    for growth in (2.0**-6, 8.0):
        assert abs(ratio(copy.deepcopy(warm), growth) - usual) < 1.0
    assert ratio(warm, 64.0) < usual - 6
    assert abs(ratio(warm, 64.0) - usual) < 1.0


def test_what_a_stale_outer_scale_saturates_is_counted() -> None:
    """A record of a step whose input is 64 times as large as the history counts its clipped elements."""
    x = torch.randn(64, 64)
    for growth, clipped in ((1.0, False), (64.0, True)):
        state = torch.tensor([2.0**9, 1.0, 1.0])  # the scale of an amax of about 5 / 8
        cast = STALE.input_casts.as_is
        q, _, scale_inv, *_ = kernels.cast(growth * x / 8, state, 0, *cast.arguments, False, 16)
        sums, extremes = torch.zeros(71, dtype=torch.float64), torch.zeros(3)
        kernels.cast_statistics(growth * x / 8, q, scale_inv, cast.tile, sums, extremes)
        counts = dict(zip(Counted.sums, sums.tolist(), strict=False))
        assert (counts["clipped"] > 0.2 * counts["elements"]) == clipped, (growth, counts)


def test_no_token_sees_the_future() -> None:
    """Later tokens change an earlier one's output by no bit under a delayed scale, else only where a power changes."""
    x, _ = batch()
    x[0, 0] = 4.0  # the amax, of this many tokens or more
    for recipe, growth, alike in ((STALE, 100.0, True), (NVFP4, 1.2, True), (NVFP4, 1e5, False)):
        layer = octavo.nn.Linear(64, 48, recipe=recipe)
        step(layer, x, torch.randn(33, 48))
        later = x.clone()
        later[20:] = (later[20:] * growth).clamp(-4.9 if growth < 2 else -1e9, 4.9 if growth < 2 else 1e9)
        assert torch.equal(*(layer(one).detach()[:20] for one in (x, later))) == alike, (recipe.delayed, growth)


def test_what_is_refused_and_its_remedy() -> None:
    """Each message names a remedy, which works."""
    plain = Cast(E2M1, VECTOR, power_of_two=True)
    stochastic, rotated = Cast(E2M1, VECTOR, power_of_two=True, rounding=Stochastic(2)), NVFP4.grad_weight[1]
    eight = Cast(E4M3, PerTensor())
    for casts, message in (
        ({"output": (plain, eight)}, "make both E2M1 or neither"),
        ({"output": (rotated, rotated)}, "set rotation=None"),
        ({"grad_input": (rotated, rotated)}, "set rotation=None"),
        ({"output": (stochastic, plain)}, r"rounding=Stochastic\(\) is for grad_output"),
        ({"grad_input": (plain, stochastic)}, r"rounding=Stochastic\(\) is for grad_output"),
        ({"grad_weight": (plain, stochastic)}, r"rounding=Stochastic\(\) is for grad_output"),
        ({"output": (plain, plain), "saved": plain}, "not to E2M1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Recipe(**casts)
    assert Recipe(output=(plain, plain), grad_input=(stochastic, plain), grad_weight=(rotated, rotated), saved=eight)
    for wrong, message in (
        (lambda: Cast(E2M1, PerBlock(1, 32), power_of_two=True), r"PerBlock\(1, 16\) or PerBlock\(16, 16\)"),
        (lambda: Cast(E2M1, VECTOR), "power_of_two=True"),
        (lambda: Cast(E4M3, PerTensor(), rotation=Rotation()), "E4M3 has neither"),
        (lambda: Cast(E2M1, VECTOR, power_of_two=True, rounding=True), r"octavo\.Stochastic\(\)"),
        (lambda: Stochastic(1 << 31), "0 to 2"),
        (lambda: Rotation(1 << 16), "16 bits"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            wrong()


def test_layers_that_refuse_it_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r'octavo.RecipeMap\(recipe, \{"\*.experts\*": octavo.recipes.mx\(\)\}\)'):
        octavo.nn.Experts(4, 32, 32, recipe=NVFP4)
    block = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": octavo.nn.Experts(4, 32, 32), "out": nn.Linear(32, 32)})})
    octavo.convert(block, RecipeMap(NVFP4, {"*.experts*": recipes.mx()}), every_layer)
    assert block["mlp"]["experts"].gate_up.recipe == recipes.mx() and block["mlp"]["out"].recipe == NVFP4
    with pytest.raises(ValueError, match=r"33 to 50 % apart.*: leave out weight_storage"):
        octavo.convert(nn.Linear(32, 32), NVFP4, every_layer, weight_storage="fp8")
    head = octavo.nn.Linear(32, 48, bias=False, recipe=NVFP4)
    x, target = torch.randn(5, 32, requires_grad=True), torch.arange(5)
    with pytest.raises(ValueError, match=r'RecipeMap\(recipe, \{"lm_head": None\}\)'):
        octavo.nn.linear_cross_entropy(x, head, target)
    octavo.set_recipe(head, RecipeMap(NVFP4, {"*": None}))
    octavo.nn.linear_cross_entropy(x, head, target).backward()
    assert x.grad is not None


@pytest.mark.full
def test_onnx_is_refused_and_its_remedy(tmp_path) -> None:
    layer = octavo.nn.Linear(32, 32, recipe=NVFP4).eval()
    with pytest.raises(ExportError, match="set a recipe of E4M3 first"):
        octavo.export.to_onnx(layer, (torch.randn(2, 32),), tmp_path / "layer.onnx")
    octavo.set_recipe(layer, recipes.dynamic())
    octavo.export.to_onnx(layer, (torch.randn(2, 32),), tmp_path / "layer.onnx")


def test_texts_and_files_of_recipes(tmp_path) -> None:
    """Every cast is what its text says, and a recipe what its file says."""
    for recipe in (NVFP4, STALE, recipes.nvfp4(4, margin=0)):
        for cast in (*recipe.output, *recipe.grad_input, *recipe.grad_weight):
            assert Cast.of(repr(cast)) == cast and hash(Cast.of(repr(cast))) == hash(cast)
        path = tmp_path / "recipe.json"
        path.write_text(recipes.to_json(RecipeMap(recipe, {"head": None})), encoding="utf-8")
        json.loads(path.read_text(encoding="utf-8"))
        loaded = recipes.load(path)
        assert loaded.of("layer") == recipe and loaded.of("head").is_high_precision
    seeds = NVFP4.grad_input[0].rounding, NVFP4.grad_weight[0].rounding
    assert seeds[0] != seeds[1]  # both casts of grad_output, which would else draw the same for a symmetric matrix


def in_fp8(model: nn.Module, names: list[str]) -> list[bool]:
    return [not model.get_submodule(name).recipe.is_high_precision for name in names]


def test_last_blocks() -> None:
    """Of octavo.train's GPT, and of a Sequential in a Sequential."""
    gpt = GPT(ModelConfig(layers=4, width=32, heads=2))
    octavo.convert(gpt, RecipeMap(NVFP4, recipes.last_blocks(gpt, 0.5)), every_layer)
    names = [name for name, module in gpt.named_modules() if isinstance(module, octavo.nn.Linear)]
    of_blocks = [name for name in names if name.startswith("blocks.")]
    wanted = [name.split(".")[1] in "01" for name in of_blocks]
    assert in_fp8(gpt, of_blocks) == wanted and not any(in_fp8(gpt, sorted(set(names) - set(of_blocks))))

    body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(5)))
    nested = nn.Sequential(nn.Linear(32, 32), body, nn.Linear(32, 32))
    octavo.convert(nested, RecipeMap(NVFP4, recipes.last_blocks(nested, 0.2)), every_layer)
    assert in_fp8(nested, ["0", *(f"1.{number}.0" for number in range(5)), "2"]) == [True] * 5 + [False] * 2
    model(RecipeMap(NVFP4, recipes.last_blocks(nn.ModuleDict({"body": body}), 0.0)))
    with pytest.raises(ValueError, match="write rules"):
        recipes.last_blocks(nn.Linear(4, 4))


@pytest.mark.full
def test_last_blocks_of_a_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **small))
    octavo.convert(llama, RecipeMap(NVFP4, recipes.last_blocks(llama)), every_layer)
    layers = [f"model.layers.{number}.mlp.down_proj" for number in range(8)]
    assert in_fp8(llama, [*layers, "lm_head"]) == [True] * 6 + [False] * 3


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
    """Return the bytes of the tensors, besides parameters, that a forward keeps for backward."""
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved_tensors(layer, x)}.values())


def test_saved_pairs_take_less_than_a_third_of_bf16s() -> None:
    """The input's rotated pair is 0.3125 with its scales in bfloat16, of 0.25 for codes; the weight's 0.254."""
    x = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
    layer = octavo.nn.Linear(256, 512, bias=False, recipe=NVFP4, dtype=torch.bfloat16)
    of_input, of_weight = 512 * 256 * 2, 512 * 256 * 2
    assert saved_bytes(layer, x) <= 0.30 * (of_input + of_weight)
    layer.weight.requires_grad_(False)
    assert saved_bytes(layer, x) <= 0.26 * of_weight


def test_fused_modules_are_their_parts() -> None:
    """Bit for bit but for the sums of a norm's gradient, which come last."""
    x, g = batch()
    mlp = octavo.nn.RMSNormMLP(64, 96, activation="relu", bias=False, recipe=NVFP4)
    linear = octavo.nn.RMSNormLinear(64, 64, recipe=NVFP4)
    for module, parts in (
        (mlp, lambda one: mlp.fc2(mlp.fc1(mlp.norm(one)).relu())),
        (linear, lambda one: linear.linear(linear.norm(one))),
    ):
        fused, apart = step(module, x, g), step(module, x, g, call=parts)
        for name in ("x", "norm.weight"):
            assert sqnr(fused.pop(name), apart.pop(name)) > 120
        assert_equal(fused, apart)


def test_kept_and_shared_casts_are_the_same() -> None:
    """KeptWeights leaves E2M1 to each forward; three layers that read one input share its casts, bit for bit."""
    layers = nn.ModuleList(octavo.nn.Linear(64, 48, bias=False, recipe=NVFP4) for _ in range(3))
    (x, _), g = batch(), torch.randn(33, 48)

    def together(one: Tensor) -> Tensor:
        return sum(layer(one) * factor for factor, layer in enumerate(layers, 1))

    shared = step(layers, x, g, call=together)
    apart = step(layers, x, g, call=lambda one: sum(layer(one.clone()) * f for f, layer in enumerate(layers, 1)))
    assert_equal(shared, apart)
    with pytest.raises(ValueError, match=r"convert the model with dynamic\(\)"):
        octavo.nn.KeptWeights(layers)
    octavo.set_recipe(layers, RecipeMap(NVFP4, {"0": recipes.dynamic()}))
    mixed = step(layers, x, g, call=together)
    octavo.nn.KeptWeights(layers).cast()
    assert_equal(step(layers, x, g, call=together), mixed)
    with torch.no_grad():
        layers[1].weight.mul_(2)  # cast by each forward
    assert not torch.equal(step(layers, x, g, call=together)["y"], mixed["y"])


def test_delayed_casts_of_a_role_share_one_history() -> None:
    """Of the rotated and the unrotated amax the history has the latter; both rules of one recipe must agree."""
    layer = octavo.nn.Linear(64, 48, recipe=STALE)
    x, g = batch()[0], torch.randn(33, 48)
    step(layer, x, g)
    amaxes = torch.stack([x.abs().max(), layer.weight.detach().abs().max(), g.abs().max()])
    assert torch.equal(layer.fp8.state.amax_history[:, 0], amaxes)
    assert torch.equal(layer.fp8.state.scale, torch.stack([definitions.scales_of(amaxes, 2688.0, True, 3)]).flatten())
    other = Cast(E2M1, VECTOR, Delayed(2), True, margin=2, rotation=Rotation())
    with pytest.raises(ValueError, match="make them equal or one of them Dynamic"):
        Recipe(output=STALE.output, grad_weight=(other, other))
