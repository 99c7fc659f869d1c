import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes, step_count
from octavo.nn import Experts
from octavo.step_count import _OptimizerSteps
from octavo.weights import writes
from tests.support.helpers import CountOps, assert_equal, gradients, to_fp8

KEPT = {"dynamic": recipes.dynamic, "delayed": lambda: recipes.delayed(4), "blockwise": recipes.blockwise}


def model(recipe, seed=0):
    torch.manual_seed(seed)
    return to_fp8(nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 24, bias=False)), recipe)


def batches(steps, micro_batches):
    return torch.randn(steps, micro_batches, 16, 48, generator=torch.Generator().manual_seed(1))


def trained(net, call, kept_weights=None, device="cpu", micro_batches=3):
    """Losses, weights, the last gradients and delayed state after four steps of so many micro-batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in batches(4, micro_batches).to(device):
        optimizer.zero_grad()
        if kept_weights is not None:
            kept_weights.cast()
        for x in step:
            loss = call(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    state = {f"weight {name}": value.clone() for name, value in net.state_dict().items()}
    return {"losses": torch.stack(losses)} | state | gradients(net) | octavo.nn.delayed_state_dict(net)


@pytest.mark.parametrize("recipe", KEPT)
def test_a_training_is_the_same_bit_for_bit(recipe):
    """Compiled ones are in tests/compile."""
    plain, net = model(KEPT[recipe]()), model(KEPT[recipe]())
    assert_equal(trained(net, net, octavo.nn.KeptWeights(net)), trained(plain, plain))


def test_one_op_casts_all_and_forwards_none():
    net = model(recipes.dynamic())
    kept_weights = octavo.nn.KeptWeights(net)
    with CountOps() as ops:
        kept_weights.cast()
        net(torch.randn(16, 48))
    assert ops.calls == {"multi_tensor_cast": 1, "cast": 2, "matmul": 2}  # casts of inputs


@pytest.mark.parametrize("recipe", KEPT)
def test_a_flag_leaves_all_as_it_is(recipe):
    net, flag = model(KEPT[recipe]()), torch.zeros(1, dtype=torch.int32)
    kept_weights = octavo.nn.KeptWeights(net)
    kept_weights.cast(skip=flag)
    before, state = net(torch.ones(4, 48)), octavo.nn.delayed_state_dict(net)
    for p in net.parameters():
        p.data.mul_(-3)  # unnoticed: under Delayed a write by hand makes layers cast their own
    kept_weights.cast(skip=flag.fill_(1))
    after = octavo.nn.delayed_state_dict(net)
    assert all(torch.equal(after[name], state[name]) for name in state)
    bias = net[0].bias / -3  # as it was
    with torch.no_grad():
        net[0].bias.copy_(bias)
    assert torch.allclose(net(torch.ones(4, 48)), before, rtol=1e-3, atol=1e-5)
    kept_weights.cast(skip=flag.zero_())
    assert not torch.allclose(net(torch.ones(4, 48)), before, rtol=1e-3, atol=1e-5)
    after = octavo.nn.delayed_state_dict(net)
    assert all(torch.equal(after[name], state[name]) for name in state)  # backward commits


def forward_casts(net):
    with CountOps() as ops:
        net(torch.randn(16, 48))
    return ops.casts


@pytest.mark.parametrize(
    "change",
    [
        lambda net, kept_weights: kept_weights.remove(),
        lambda net, kept_weights: octavo.nn.invalidate(net),
        lambda net, kept_weights: net.eval(),
        lambda net, kept_weights: octavo.set_recipe(net, recipes.dynamic()),
        lambda net, kept_weights: net.double().float(),
    ],
    ids=["remove", "invalidate", "eval", "set_recipe", "to another dtype and back"],
)
def test_what_ends_it(change):
    net = model(recipes.dynamic())
    kept_weights = octavo.nn.KeptWeights(net)
    kept_weights.cast()
    assert forward_casts(net) == 2
    change(net, kept_weights)
    assert forward_casts(net) == 4


def test_a_step_of_any_optimizer_ends_it_though_nothing_else_counts_steps(monkeypatch):
    """It may write weights that it does not own, which no version shows."""
    steps, handles = _OptimizerSteps(), []
    monkeypatch.setattr(writes, "OPTIMIZER_STEPS", steps)
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        register = getattr(step_count, name)
        monkeypatch.setattr(step_count, name, lambda hook, register=register: handles.append(register(hook)))
    net = model(recipes.dynamic())
    octavo.nn.KeptWeights(net).cast()
    try:
        assert forward_casts(net) == 2
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
        assert forward_casts(net) == 4
    finally:
        for handle in handles:
            handle.remove()


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


OTHERS = {
    "replaced": lambda net: setattr(net[0], "weight", nn.Parameter(2 * net[0].weight.detach())),
    "parametrized": lambda net: nn.utils.parametrize.register_parametrization(net[0], "weight", Twice()),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", [*OTHERS, "given by functional_call"])
def test_another_tensor_in_the_weights_place_is_cast_by_its_layer(name, compiled):
    """Writes, loads and steps are in tests/integration/test_sequences.py."""
    net, x = model(recipes.dynamic()), torch.randn(16, 48)
    octavo.nn.KeptWeights(net).cast()
    replaced = {}
    if name in OTHERS:
        OTHERS[name](net)
    else:
        replaced = {name: 2 * value.detach() for name, value in net.named_parameters()}

    def call(x):
        return torch.func.functional_call(net, replaced, (x,))

    y = torch.compile(call, backend="eager")(x) if compiled else call(x)
    assert torch.equal(y, torch.func.functional_call(copy.deepcopy(net), replaced, (x,)))


@pytest.mark.parametrize("recipe", KEPT)
def test_a_cast_before_backward_raises_there(recipe):
    net = model(KEPT[recipe]())
    kept_weights = octavo.nn.KeptWeights(net)
    kept_weights.cast()
    loss = net(torch.randn(16, 48)).sum()
    kept_weights.cast()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_kept():
    with pytest.raises(ValueError, match="no layer's weight can be kept"):
        octavo.nn.KeptWeights(model(recipes.rowwise()))
    assert octavo.nn.KeptWeights(model(octavo.RecipeMap(recipes.delayed(), {"0": recipes.mx()}))).names == ("2",)
    experts = Experts(2, 32, 48, recipe=recipes.dynamic())  # whose parts read its weights
    assert octavo.nn.KeptWeights(nn.ModuleList([experts, model(recipes.dynamic())])).names == ("1.0", "1.2")


def test_a_graph_reads_the_operands_of_its_weight_always(monkeypatch):
    """It can't compare: whoever compiled it casts them before each call."""
    net = model(recipes.dynamic())
    kept_weights = octavo.nn.KeptWeights(net)
    kept_weights.cast()
    buffers, weight = net[0].fp8.kept_operands, net[0].weight
    assert buffers.operands(weight, None) is buffers.pairs and buffers.operands(net[2].weight, None) is None
    with torch.no_grad():
        weight.mul_(2)
    assert buffers.operands(weight, None) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert buffers.operands(weight, None) is buffers.pairs and buffers.operands(net[2].weight, None) is None


@pytest.mark.parametrize("name", KEPT)
def test_layers_of_another_recipe_meanwhile_are_left_alone(name):
    net = model(KEPT[name]())
    kept_weights = octavo.nn.KeptWeights(net)
    kept_weights.cast()
    with octavo.using(net[0], recipes.high_precision()):
        kept_weights.cast()
        assert net[0].fp8.kept_operands is None
    kept_weights.cast()
    assert forward_casts(net) == 2


def test_a_weight_that_lies_by_columns():
    layer = octavo.nn.Linear(64, 32)
    layer.weight = nn.Parameter(torch.randn(64, 32).t())
    kept_weights, x = octavo.nn.KeptWeights(layer), torch.randn(4, 64)
    kept_weights.cast()
    assert torch.equal(layer(x), copy.deepcopy(layer)(x))


def test_a_converted_model_needs_new_ones():
    net = model(recipes.dynamic())
    kept_weights = octavo.nn.KeptWeights(net)
    net.bfloat16()
    with pytest.raises(ValueError, match="make its KeptWeights anew"):
        kept_weights.cast()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", KEPT)
def test_a_captured_step_serves_all_micro_batches(recipe):
    plain, net = model(KEPT[recipe]()).cuda(), model(KEPT[recipe]()).cuda()
    # a captured graph can't cast again by the scale that a backward pass has moved
    micro_batches = 3 if net[0].recipe.delayed is None else 1
    expected = trained(plain, plain, device="cuda", micro_batches=micro_batches)
    kept_weights, later = octavo.nn.KeptWeights(net), torch.zeros(1, dtype=torch.int32, device="cuda")
    x = torch.zeros(16, 48, device="cuda")
    initial = octavo.nn.delayed_state_dict(net)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        for _ in range(3):
            kept_weights.cast(skip=later)
            net(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept_weights.cast(skip=later)
        loss = net(x).square().mean()
        loss.backward()
    octavo.nn.load_delayed_state_dict(net, initial)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in batches(4, micro_batches).cuda():
        optimizer.zero_grad(set_to_none=False)
        for index, batch in enumerate(step):
            later.fill_(index > 0)
            x.copy_(batch)
            graph.replay()
            losses.append(loss.detach().clone())
        optimizer.step()
    state = {f"weight {name}": value.clone() for name, value in net.state_dict().items()}
    actual = {"losses": torch.stack(losses)} | state | gradients(net) | octavo.nn.delayed_state_dict(net)
    assert_equal(actual, expected)


def test_blocks_that_take_no_padding():
    row, square = (recipes.Cast(recipes.E4M3, one) for one in (recipes.PerRow(), recipes.PerBlock(8, 8)))
    recipe = octavo.Recipe((row, square), (row, square), (row, row))
    plain, net = (octavo.nn.Linear(9, 7, recipe=recipe) for _ in range(2))
    net.load_state_dict(plain.state_dict())
    kept_weights = octavo.nn.KeptWeights(net)
    kept_weights.cast()
    x = torch.randn(5, 9)
    assert kept_weights.names == ("",) and torch.equal(net(x), plain(x))
