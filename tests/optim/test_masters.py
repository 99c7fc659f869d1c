"""Masters of plain weights, and of weights that live in FP8."""

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import PerBlock, PerTensor, recipes
from octavo.optim import Adam, AdamW, masters
from octavo.optim.conversion import blank
from octavo.optim.masters import FP8_MASTERS, PLAIN_MASTERS, MasterForm
from octavo.weights.stored import StoredWeight
from tests.support.stored_weights import inputs, store
from tests.support.trained import master_values


def test_a_float32_weight_needs_nothing_besides():
    p = nn.Parameter(torch.randn(3, 4))
    for name in ("auto", *FP8_MASTERS, *PLAIN_MASTERS):
        assert MasterForm.of(p, name) is PLAIN_MASTERS["fp32"]
    assert PLAIN_MASTERS["fp32"].new_state(p) == {}
    stored = PLAIN_MASTERS["fp32"].for_kernel(p, {})
    assert stored.kind == "weight" and stored.weight is p and not stored.is_random


@pytest.mark.parametrize(
    ("name", "form", "is_random"),
    [("split32", (torch.uint8, (3, 4, 5, 2)), False), ("split24", (torch.int8, (3, 4, 5)), True), (None, None, True)],
)
def test_of_a_bf16_weight_it_begins_as_the_weight(name, form, is_random):
    p = nn.Parameter(torch.randn(3, 4, 5).bfloat16())
    master = MasterForm.of(p, name)
    assert master is PLAIN_MASTERS[name]
    state = master.new_state(p)
    assert {key: (value.dtype, value.shape) for key, value in state.items()} == ({"master_rest": form} if form else {})
    stored = master.for_kernel(p.detach().view(3, 20), state)
    assert stored.kind == (name or "stochastic") and stored.is_random is is_random
    if form is None:
        assert stored.low_bits is None
    else:
        assert not state["master_rest"].any() and stored.low_bits.shape == (3, 20)
        assert stored.low_bits.data_ptr() == state["master_rest"].data_ptr()


@pytest.mark.parametrize("name", ["auto", "split24", None])
def test_a_weight_of_another_dtype_since_begins_its_master_anew(name):
    layer = nn.Linear(8, 8, bias=False)
    optimizer = AdamW(layer.parameters(), betas=(0.0, 0.0), lr=1e-3, master=name, weight_decay=0.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        layer.to(dtype)
        before = layer.weight.detach().float().clone()
        for gradient in (0.0, 1.0):
            layer.weight.grad = torch.full_like(layer.weight, gradient)
            optimizer.step()
            update = before - layer.weight.float()
            assert (update - 1e-3 * gradient).abs().max() < 3e-3 * gradient + 1e-9
            state = optimizer.state[layer.weight]
            assert ("master_rest" in state) == (dtype == torch.bfloat16 and name is not None)
            if gradient == 0.0 and "master_rest" in state:
                assert not state["master_rest"].any()


def test_names_of_other_weights():
    bf16 = {"auto": "split32", "fp32": "split32", "fp16_scaled": "split32", "split16": "split24"}
    for name, expected in bf16.items():
        assert MasterForm.of(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), name) is PLAIN_MASTERS[expected]
    dtypes = {"fp16_scaled": "float32", "fp32": "float32", "split32": "bfloat16", "split24": "bfloat16"}
    for name, of in (*dtypes.items(), (None, "bfloat16")):
        message = f"master={name!r} is for weights of torch.{of}, not torch.float16; use 'auto'"
        with pytest.raises(ValueError, match=message):
            MasterForm.of(nn.Parameter(torch.ones(2, dtype=torch.float16)), name)
    with pytest.raises(ValueError, match=r"take weights of float32, bfloat16 and float16, not torch\.float64"):
        MasterForm.of(nn.Parameter(torch.ones(2, dtype=torch.float64)), "auto")
    says = r"master='split8': use 'auto', 'split16', 'fp16_scaled', 'fp32', (.*, )?'split32', 'split24', None"
    with pytest.raises(ValueError, match=says):
        MasterForm.of(nn.Parameter(torch.ones(2)), "split8")


@pytest.mark.parametrize("write", ["copy_", "data.copy_", "data ="])
def test_a_weight_that_was_written_goes_on_from_there(write):
    p = nn.Parameter(torch.randn(2, 200).bfloat16())
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, moments="fp32", master="split32")
    for values in (None, 7e4, 1e-3):  # far above the weight; far below
        if values is not None:
            new = torch.full((2, 200), values).bfloat16()
            if write == "data =":
                p.data = new.clone()
            else:
                (p.detach() if write == "copy_" else p.data).copy_(new)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert values is None or torch.allclose(p.detach(), new - 1e-4, rtol=2.0**-7)


each_master = pytest.mark.parametrize("master", FP8_MASTERS, ids=str)
each_granularity = pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(128, 128)], ids=str)
SHAPE = (130, 300)


def parameter(granularity=None, values: Tensor | None = None) -> nn.Parameter:
    values = torch.randn(SHAPE, dtype=torch.bfloat16) if values is None else values
    return nn.Parameter(StoredWeight.cast(values, granularity or PerTensor()))


def plain(weight: nn.Parameter) -> Tensor:
    return weight.detach().dequantize().float()


def step(optimizer, gradient: Tensor) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = gradient.to(weight.dtype)
    optimizer.step()


def test_names():
    weight = parameter()
    names = {f'"{name}"' for name in (*PLAIN_MASTERS, *FP8_MASTERS) if name}
    described = str(AdamW.__doc__).partition("master:")[2].partition("clip_update:")[0]
    assert {name for name in names if name not in described} == set()
    for page, names in (("optimizer", PLAIN_MASTERS), ("weights", FP8_MASTERS)):
        text = (Path(__file__).parents[2] / f"docs/{page}.md").read_text(encoding="utf-8")
        assert [name for name in names if f"| `{name!r}`".replace("'", '"') not in text] == []
    assert MasterForm.of(weight, "auto") is FP8_MASTERS["split16"]
    for name in ("split32", "split8"):
        with pytest.raises(ValueError, match=f"master='{name}': weights stored in FP8 take 'split16', 'split24'"):
            AdamW([weight], master=name)


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
def test_who_cannot_bound_the_update_is_refused(moments):
    weight = parameter()
    for kind in (AdamW, Adam):
        assert kind([weight], moments=moments).clip_update is True
        assert kind([{"params": [weight]}], moments=moments).clip_update is True
        assert kind([("w", weight)], moments=moments).clip_update is True
        with pytest.raises(ValueError, match=r"stored in FP8 .* use octavo.optim.AdamW or Adam, with clip_update on"):
            kind([weight], moments=moments, clip_update=False)
    optimizer = AdamW([nn.Parameter(torch.ones(3))], moments="fp32")
    assert optimizer.clip_update is False
    optimizer.add_param_group({"params": weight})
    assert optimizer.clip_update is True


@each_granularity
def test_a_float32_master_is_that_of_a_float32_weight(granularity):
    """Training equals a float32 weight's bit for bit, in moments too; and the codes are its cast."""
    weight = parameter(granularity)
    wide = nn.Parameter(plain(weight))
    first, second = AdamW([weight], lr=0.02, master="fp32"), AdamW([wide], lr=0.02, clip_update=True)
    for _ in range(10):
        gradient = torch.randn(SHAPE).bfloat16()
        step(first, gradient)
        step(second, gradient)
        assert torch.equal(master_values(first, weight), wide)
        assert all(torch.equal(first.state[weight][name], value) for name, value in second.state[wide].items())
    values = wide.detach()
    assert ((plain(weight) - values).abs() <= values.abs() * 2.0**-4 + values.abs().max() * 2.0**-17).all()


GROWTH = 0.999 / 0.9  # gradients that grow so move a weight by as much as any can, at every step


@pytest.mark.covering(1)
@each_granularity
@each_master
def test_the_fastest_growth_never_saturates(master, granularity):
    values = 1e-3 * torch.randn(SHAPE)
    weight = parameter(granularity, values)
    exact = nn.Parameter(plain(weight).double())
    optimizer = AdamW([weight], lr=0.1, weight_decay=0.0, moments="fp32", master=master)
    torchs = torch.optim.AdamW([exact], lr=0.1, weight_decay=0.0)
    sign = torch.where(torch.randn(SHAPE) > 0, 1.0, -1.0)
    for number in range(50):
        step(optimizer, sign * 1e-3 * GROWTH**number)
        step(torchs, sign * 1e-3 * GROWTH**number)
        assert not ((weight.qdata.view(torch.uint8) & 0x7F) == 0x7F).any()
        bound = 448 * weight.scale_inv.max()
        assert float(exact.detach().abs().max()) <= float(bound) < 5 * float(exact.detach().abs().max())
    actual, tolerance = (master_values(optimizer, weight), {"fp32": 1e-6, "split24": 5e-5, None: 2.0}.get(master, 0.02))
    assert float(exact.detach().abs().min()) > 6  # from a thousandth
    assert ((actual - exact.detach()).abs() < tolerance * exact.detach().abs()).all()
    ratio = actual / exact.detach()
    assert abs(float(ratio.mean()) - 1) < 1e-4 + 5 * float(ratio.std()) / ratio.numel() ** 0.5
    assert float(optimizer.state[weight]["master_amax"].max()) == float(actual.abs().max())


@each_granularity
def test_without_a_master_the_mean_is_right(granularity):
    """Updates are a thirtieth of the codes' distance, so that rounding to nearest would stand still."""
    start, ulp, lr, steps = 0.3125, 2.0**-5, 1e-3, 10
    weight = parameter(granularity, torch.full((512, 512), start))
    optimizer = AdamW([weight], lr=lr, weight_decay=0.0, moments="fp32", master=None)
    for _ in range(steps):
        step(optimizer, torch.ones(512, 512))
    moved = plain(weight) - start
    sigma = math.sqrt(steps * ulp * lr / weight.numel())
    assert abs(float(moved.double().mean()) + steps * lr) < 5 * sigma
    assert 0.6 < float((moved == 0).float().mean()) < 0.9


def test_bytes_for_each_parameter():
    model = store(nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(2)]).bfloat16())
    for master, most in (("auto", 4.15), ("split24", 5.15), ("fp32", 7.15), (None, 3.15)):
        optimizer, total = AdamW(model.parameters(), master=master), 0
        for weight in model.parameters():
            weight.grad = torch.zeros(512, 512, dtype=torch.bfloat16)
        optimizer.step()
        for weight in model.parameters():
            held = [weight.qdata, weight.scale_inv, *optimizer.state[weight].values()]
            assert all(type(tensor) is Tensor for tensor in held)
            total += sum(tensor.untyped_storage().nbytes() for tensor in held)
        assert most - 0.15 <= total / (2 * 512 * 512) <= most


def test_a_state_of_another_master_begins_as_the_weight():
    weight = parameter()
    first = AdamW([weight], lr=1e-2, master="split24")
    step(first, torch.randn(SHAPE))
    second = AdamW([weight], lr=1e-2, master="split16")
    with pytest.warns(UserWarning, match="the optimizer's state was converted"):
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(master_values(second, weight), plain(weight))
    assert float(second.state[weight]["master_amax"]) == float(plain(weight).abs().max())


@each_master
def test_weights_that_were_loaded_later_are_not_lost(master):
    weight = parameter()
    optimizer = AdamW([weight], lr=0.0, master=master)
    step(optimizer, torch.zeros(SHAPE))
    with torch.no_grad():
        weight.copy_(values := 100 * torch.randn(SHAPE))
    before = plain(weight)
    step(optimizer, torch.zeros(SHAPE))
    # begun from the loaded values; without a master there are only the codes
    assert torch.allclose(plain(weight), before if master is None else values, rtol=0.07, atol=100 * 2.0**-12)


def test_backward_of_a_forward_before_the_step_raises():
    layer = store(nn.Linear(256, 128).bfloat16(), recipes.blockwise())
    y = layer(inputs(4, 256))
    step(AdamW([layer.weight]), torch.ones(128, 256))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def stored_layer(recipe="dynamic"):
    layer = nn.Linear(256, 256, bias=False).bfloat16()
    values = layer.weight.detach().clone()
    octavo.convert(layer, getattr(recipes, recipe)(), select=lambda module, name: True, weight_storage="fp8")
    return layer, values


def begun(layer, master):
    """The master's values after a step that changes nothing."""
    optimizer = AdamW(layer.parameters(), lr=0.0, weight_decay=0.0, master=master)
    layer.weight.grad = torch.ones(256, 256, dtype=torch.bfloat16)
    optimizer.step()
    assert layer.weight.extra_bits is None  # which the master has now
    return master_values(optimizer, layer.weight)


@pytest.mark.parametrize("recipe", ["dynamic", "blockwise"])
@pytest.mark.parametrize("master", [master for master in FP8_MASTERS if master is not None])
def test_it_begins_as_the_weight_before_its_cast(master, recipe):
    layer, values = stored_layer(recipe)
    codes = plain(layer.weight)
    first_values, values = begun(layer, master), values.float()
    smallest = values.abs().amax() * 2.0**-27  # below which codes and remainders end
    assert ((first_values - values).abs() <= values.abs() * 2.0**-10 + smallest).all()
    assert ((first_values - values).abs().mean() < (codes - values).abs().mean() * 2.0**-8) or master == "fp16_scaled"


WAYS = "copied", "moved", "loaded", "pickled", "evaluated", "frozen for a while", "frozen", "a frozen copy"


@pytest.mark.parametrize("way", WAYS)
def test_what_it_begins_from_stays_until_an_optimizer_takes_it_or_nobody_will(way):
    """A stored weight's values before its cast stay while it requires gradients, or an optimizer waits for them."""
    layer, values = stored_layer()
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    if way == "copied":
        layer = copy.deepcopy(layer)
    elif way == "moved":
        layer = layer.to(torch.float32).to(torch.bfloat16)
    elif way == "loaded":
        values = torch.randn(256, 256).bfloat16()
        layer.load_state_dict({"weight": values})
    elif way == "pickled":
        layer = pickle.loads(pickle.dumps(layer))
    elif way == "evaluated":
        octavo.summary(layer, x)
        with torch.inference_mode():
            layer(x)
    elif way == "frozen for a while":
        AdamW(layer.parameters())
        layer.requires_grad_(False)(x)
        layer.to(torch.float32).to(torch.bfloat16).requires_grad_(True)
    elif way == "frozen":
        layer.weight.requires_grad = False
    else:
        AdamW(layer.parameters())
        layer = copy.deepcopy(layer).requires_grad_(False)
    if way in ("frozen", "a frozen copy"):
        assert layer.weight.extra_bits is None
    else:
        values = values.float()
        assert ((begun(layer, "fp32") - values).abs() <= values.abs() * 2.0**-11 + values.abs().amax() * 2.0**-27).all()


@each_master
def test_without_data_no_codes_are_read(master, monkeypatch):
    """On the meta device a master's state has the shapes that it has with data: a large model's is planned at once."""
    values = torch.empty(256, 130, dtype=torch.bfloat16)
    weight, meta = (blank(values, PerTensor(), device) for device in (None, "meta"))
    expected = FP8_MASTERS[master].new_state(weight)
    monkeypatch.setattr(masters, "values_with", None)
    state = FP8_MASTERS[master].new_state(meta)
    assert all(tensor.is_meta for tensor in state.values())
    forms, expected_forms = ({name: (x.shape, x.dtype) for name, x in of.items()} for of in (state, expected))
    assert forms == expected_forms
