import itertools

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.errors import ExportError
from octavo.export.rollout import iterate_fp8
from tests.support import forward_operands
from tests.support.forward_operands import LAYOUT_OF, fp8, layers, same_codes, seen_operands, step
from tests.support.helpers import CountOps, to_fp8
from tests.support.memory import peak_bytes


def as_they_come(net):
    pass


def kept(net):
    octavo.nn.KeptWeights(net).cast()


def frozen(net):
    net.requires_grad_(False)
    net[0].bias.requires_grad_(True)
    net(torch.randn(32, 256))


SITUATIONS = [  # KeptWeights keep none that are scaled by rows
    (recipe, situation)
    for recipe, situation in itertools.product(LAYOUT_OF, [as_they_come, kept, frozen])
    if (recipe, situation) != ("rowwise", kept)
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("recipe", "situation"), SITUATIONS)
def test_the_codes_are_those_of_the_forward(recipe, situation, training):
    net = layers(recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):  # so that a delayed scale is an earlier weight's
        step(net, optimizer)
    situation(net)
    net.train(training)
    pairs = fp8(net, LAYOUT_OF[recipe])
    with seen_operands() as operands:
        net(torch.randn(32, 256))
    assert same_codes(pairs, operands)
    assert [name for name, *_ in pairs] == ["0.weight", "1.weight", "2.weight"]


def test_training_and_evaluation_differ_under_a_delayed_recipe():
    net = layers("delayed")
    optimizer = torch.optim.SGD(net.parameters(), lr=10.0)
    for _ in range(3):
        step(net, optimizer)
    scales = [[float(scale) for _, _, scale in fp8(net.train(mode), "per-tensor")] for mode in (True, False)]
    assert scales[0] != scales[1]


def test_asking_changes_nothing():
    nets = [layers("delayed"), layers("delayed")]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for i in range(4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            torch.manual_seed(i)
            if net is nets[0]:
                fp8(net, "per-tensor")
            step(net, optimizer)
    for own, other in zip(*(net.state_dict().values() for net in nets), strict=True):
        assert torch.equal(own, other)
    assert torch.equal(nets[0][1].delayed_amax_history, nets[1][1].delayed_amax_history)


@pytest.mark.parametrize("recipe", ["blockwise", "dynamic", "delayed"])
def test_stored_weights_are_given_as_they_are(recipe):
    net = layers(recipe, stored=True)
    optimizer = octavo.optim.AdamW(net.parameters(), lr=0.01)
    step(net, optimizer)
    with CountOps() as ops:
        found = {name: codes for name, codes, scale in iterate_fp8(net, LAYOUT_OF[recipe]) if scale is not None}
    assert ops.casts == 0
    assert all(codes.data_ptr() == net.get_parameter(name).qdata.data_ptr() for name, codes in found.items())
    pairs = fp8(net, LAYOUT_OF[recipe])
    with seen_operands() as operands:
        net(torch.randn(32, 256))
    assert same_codes(pairs, operands)


def test_nothing_is_cast_twice():
    net = layers("blockwise")
    with CountOps() as ops:
        list(iterate_fp8(net))
    assert ops.casts == 3
    kept(net)
    with CountOps() as ops:
        list(iterate_fp8(net))
    assert ops.casts == 0


@pytest.mark.parametrize("layout", ["fine-grained", "compressed-tensors"])
def test_the_codes_are_those_of_the_file(tmp_path, layout):
    pytest.importorskip("huggingface_hub")
    load_file = pytest.importorskip("safetensors.torch").load_file
    net = layers("blockwise" if layout == "fine-grained" else "rowwise").eval()
    octavo.export.to_safetensors(net, tmp_path / "out", layout)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    suffix = "_scale_inv" if layout == "fine-grained" else "_scale"
    sent = {}
    for name, tensor, scale in iterate_fp8(net, layout):
        sent |= {name: tensor} if scale is None else {name: tensor, name + suffix: scale}
    assert sent.keys() == stored.keys()
    for name, tensor in sent.items():
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor.float(), stored[name].float())


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


def test_one_tensor_is_held_at_a_time():
    net = layers("blockwise", sizes=(1024,) * 9)
    codes = 1024 * 1024

    def iterate():
        for _ in iterate_fp8(net):
            pass

    iterate()
    # a cast's chunks in float32 besides; all the weights' codes are 8 times as many
    assert peak_bytes(iterate) < 2.5 * codes


def test_everything_is_given_unless_only_fp8_is_asked_for():
    llama = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    config = llama.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)
    model = llama.LlamaForCausalLM(config).bfloat16()
    to_fp8(model, octavo.RecipeMap(recipes.blockwise(), {"lm_head": None}))
    found = {name: scale is not None for name, _, scale in iterate_fp8(model)}
    assert found.keys() == {*model.state_dict()} - {"lm_head.weight"}  # the embedding's
    assert {name for name, in_fp8 in found.items() if in_fp8} == {name for name in found if "_proj" in name}
    assert [name for name, *_ in iterate_fp8(model, fp8_only=True)] == [name for name in found if found[name]]


@pytest.mark.parametrize(
    ("recipe", "layout", "message"),
    [
        (recipes.dynamic(), "fine-grained", "layout='compressed-tensors' holds those"),
        (recipes.blockwise(), "per-tensor", "layout='fine-grained' holds those"),
        (recipes.rowwise(), "per-tensor", "layout='compressed-tensors' holds those"),
        (recipes.mx(), "per-tensor", r"octavo.set_recipe\(model, octavo.recipes.dynamic\(\)\)"),
        (recipes.high_precision(), "per-tensor", "no layer's output product is in FP8"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_at_once(recipe, layout, message):
    with pytest.raises(ExportError, match=message):
        iterate_fp8(to_fp8(nn.Sequential(nn.Linear(8, 8)), recipe), layout)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="layout='gguf': use 'fine-grained', 'compressed-tensors', 'per-tensor'"):
        iterate_fp8(layers("dynamic"), "gguf")


def sharded_cells():
    found = []
    for recipe, stored, mixed, training in itertools.product(LAYOUT_OF, *[(False, True)] * 3):
        if (recipe == "rowwise" and stored) or (mixed and stored):  # FSDP2 gathers stored weights as they are
            continue
        default = (recipe, stored, mixed, training) in {
            ("delayed", False, False, True),
            ("blockwise", True, False, True),
            ("rowwise", False, True, True),
        }
        found.append(pytest.param(recipe, stored, mixed, training, marks=() if default else pytest.mark.full))
    return found


@pytest.mark.parametrize(("recipe", "stored", "mixed", "training"), sharded_cells())
def test_a_sharded_model_gives_the_codes_that_its_forward_gathers(pool, recipe, stored, mixed, training):
    ranks = pool.run(forward_operands.compare_sharded, (2,), recipe, stored, mixed, training)
    assert ranks == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("shape", [(1,), (2, 2), (3,)])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_on_other_meshes(pool, recipe, shape):
    assert not any(pool.run(forward_operands.compare_sharded, shape, recipe, False, False, True))


def test_one_sharded_tensor_is_held_at_a_time(pool):
    peak, codes = pool.run(forward_operands.sharded_peak, (2,))[0]
    assert peak < codes / 2
