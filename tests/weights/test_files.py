import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import octavo.export
from octavo import recipes
from octavo.weights.fsdp2 import whole
from octavo.weights.stored import StoredWeight, has_powers_of_two
from tests.support.helpers import saved_and_loaded, sqnr
from tests.support.stored_weights import STORED, H, K, T, inputs, net, plain, store, trace, widened

both = pytest.mark.parametrize("recipe", ["dynamic", "blockwise"])


@both
def test_a_state_dict_holds_plain_tensors(recipe):
    model = net(recipe)
    for state in (model.state_dict(), saved_and_loaded(model.state_dict()), model.state_dict(keep_vars=True)):
        assert set(state) == {f"{name}.weight{end}" for name in "02" for end in ("", "_scale_inv")} | {"0.bias"}
        assert all(type(value) in (torch.Tensor, nn.Parameter) for value in state.values())
        assert state["0.weight"].dtype == torch.uint8 and state["0.weight_scale_inv"].dtype == torch.float32
        assert state["0.weight"].shape == (H, 1, K)
    assert model.state_dict()["0.weight"].data_ptr() == model[0].weight.qdata.data_ptr()


@both
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("to_stored", [False, True], ids=["into plain", "into stored"])
@pytest.mark.parametrize("from_stored", [False, True], ids=["of plain", "of stored"])
def test_each_loads_the_others_file(from_stored, to_stored, assign, recipe):
    source, target = net(recipe), net(recipe, seed=1)
    values = widened(source)
    source = source if from_stored else values
    target = target if to_stored else widened(target, STORED[recipe]())
    parameter = target[0].weight
    target.load_state_dict(saved_and_loaded(source.state_dict()), strict=True, assign=assign)
    assert assign or target[0].weight is parameter
    assert isinstance(target[0].weight, StoredWeight if to_stored and (from_stored or not assign) else nn.Parameter)
    octavo.restore(target)
    assert all(torch.equal(value, values.state_dict()[name]) for name, value in target.state_dict().items())


@both
@pytest.mark.parametrize("options", [{"strict": False}, {"strict": False, "assign": True}], ids=["copy", "assign"])
def test_a_reader_that_knows_no_codes_takes_none_for_values(recipe, options):
    """A reader that knows no codes takes none for values, with strict=False too, where torch says nothing of keys."""
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: .* torch.Size\(\[288, 1, 160\]\)"):
        plain().load_state_dict(net(recipe).state_dict(), **options)
    with pytest.raises(RuntimeError, match=r"expanded size|doesn't match"):
        plain()[0].weight.data.copy_(net(recipe).state_dict()["0.weight"])


def fine_grained(power_of_two):
    """Return a state dict as DeepSeek's checkpoints: scales from each block's amax."""
    x = torch.randn(256, 384)
    scale_inv = x.view(2, 128, 3, 128).abs().amax((1, 3)) / 448
    if power_of_two:
        scale_inv = torch.exp2(torch.ceil(torch.log2(scale_inv)))
    each = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    q = (x / each).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale_inv": scale_inv}, q.float() * each


@pytest.mark.parametrize("stored", [False, True])
def test_a_fine_grained_file_loads(stored):
    state, values = fine_grained(power_of_two=True)
    layer = octavo.nn.Linear(384, 256, bias=False, recipe=recipes.blockwise())
    layer = store(layer, recipes.blockwise()) if stored else layer
    layer.load_state_dict(state)
    assert list(state) == ["weight", "weight_scale_inv"]  # the caller's stays as it was
    assert torch.equal(octavo.restore(layer).weight, values)


def test_a_fine_grained_file_of_any_scales_has_right_gradients():
    state, values = fine_grained(power_of_two=False)
    layer = store(octavo.nn.Linear(384, 256, bias=False), recipes.blockwise())
    layer.load_state_dict(state)
    assert sqnr(layer.weight.dequantize(), values) > 25
    x = inputs(T, 384, dtype=torch.float32)
    actual, truth = trace(layer, x), trace(widened(layer), x)
    assert all(sqnr(actual[name], truth[name]) > 20 for name in truth)


@both
def test_a_parameter_in_a_state_dict_is_taken_as_it_is(recipe):
    source, target = net(recipe), net(recipe, seed=1)
    target.load_state_dict(dict(source.named_parameters()))
    assert all(map(torch.equal, target.state_dict().values(), source.state_dict().values()))
    assert target[0].weight is not source[0].weight


def test_codes_of_one_rank_for_all_need_their_scales(lone_mesh):
    """As torch sends a full state dict from the first rank."""
    model, source = (fully_shard(net(seed=seed), mesh=lone_mesh) for seed in (1, 0))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    state = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    set_model_state_dict(model, dict(state), options=options)
    assert all(torch.equal(whole(value), state[name]) for name, value in model.state_dict().items())
    without = {name: value for name, value in state.items() if name != "0.weight_scale_inv"}
    with pytest.raises(ValueError, match=r"0\.weight holds FP8 codes, but the first rank no 0\.weight_scale_inv of"):
        set_model_state_dict(model, without, options=options)


def test_a_shard_takes_scales_that_are_no_powers_of_two_as_values(lone_mesh):
    model, source = (fully_shard(net(seed=seed), mesh=lone_mesh) for seed in (1, 0))
    state = source.state_dict()
    model.load_state_dict(state | {name: 3 * value for name, value in state.items() if name.endswith("scale_inv")})
    for name in ("0.weight", "2.weight"):
        loaded, saved = (each.get_parameter(name).to_local() for each in (model, source))
        assert has_powers_of_two(loaded.scale_inv)
        assert sqnr(loaded.dequantize().float(), 3 * saved.dequantize().float()) > 25


@pytest.mark.parametrize("stored", [False, True])
def test_files_that_do_not_fit(stored):
    state, _ = fine_grained(power_of_two=True)
    layer = octavo.nn.Linear(384, 256, bias=False, recipe=recipes.blockwise())
    layer = store(layer, recipes.blockwise()) if stored else layer
    for scales in (torch.ones(3, 2), torch.ones(2), torch.ones(384, 1)):
        with pytest.raises(ValueError, match=r"weight_scale_inv of shape .* does not fit \(256, 384\)"):
            layer.load_state_dict(state | {"weight_scale_inv": scales})
    for damage in (torch.nan, torch.inf, 0.0, -1.0):
        scales = torch.ones(2, 3)
        scales[1, 1] = damage
        with pytest.raises(ValueError, match=r"weight_scale_inv holds scales that are not finite and positive"):
            layer.load_state_dict(state | {"weight_scale_inv": scales})
    for wrong in (torch.ones(256, 384).bfloat16(), torch.ones(256, 384).byte()):
        with pytest.raises(ValueError, match=rf"weight beside weight_scale_inv is {wrong.dtype} \(256, 384\), neither"):
            layer.load_state_dict(state | {"weight": wrong})
    with pytest.raises(ValueError, match="weight holds FP8 codes, but there is no weight_scale_inv"):
        layer.load_state_dict({"weight": state["weight"]})
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.ones(384, 256)})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({"weight_scale_inv": torch.ones(2, 3)})


@pytest.mark.filterwarnings("ignore:.* layers have sizes over 128")
@pytest.mark.parametrize("recipe", ["dynamic", "blockwise"])
def test_an_export_has_the_stored_codes(recipe, tmp_path):
    files = pytest.importorskip("safetensors.torch")
    model = net(recipe)
    octavo.export.to_safetensors(model, tmp_path, "compressed-tensors" if recipe == "dynamic" else "fine-grained")
    written = files.load_file(next(tmp_path.glob("*.safetensors")))
    assert torch.equal(written["0.weight"].view(torch.uint8), model[0].weight.qdata.view(torch.uint8))
