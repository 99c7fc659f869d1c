"""Layers that read one tensor share its cast, with the bits of layers that cast for themselves."""

import copy
import dataclasses
import gc
import random
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import recipes
from octavo.autograd import shared_casts
from octavo.autograd.shared_casts import MOST_HELD
from octavo.scaling import delayed
from octavo.scaling.delayed import IN_CUDA_GRAPH, empty_state, facts_of
from octavo.scaling.recipe import INPUT, WEIGHT
from tests.support.combinations import in_full
from tests.support.helpers import FP8_RECIPES, CountOps, thread_pool

T, K = 32, 64


def layers(recipe, count=3, **options):
    torch.manual_seed(0)
    return nn.ModuleList(octavo.nn.Linear(K, K, recipe=recipe, **options) for _ in range(count))


def input_of(dtype=torch.float32, seed=1):
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return x.to(dtype).requires_grad_() * 1  # no leaf, as a layer's input


def region(model, x):
    x = x * 2
    return sum(layer(x) for layer in model)


def casts_in(call):
    with CountOps() as ops:
        result = call()
    return ops.calls["cast"] + ops.calls["cast_two_scalings"], result


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_three_readers_make_one_cast_of_the_input_and_save_it_once(recipe):
    model, saved = layers(FP8_RECIPES[recipe]()), {}
    x = input_of(dtype=torch.float32)

    def pack(t):
        if t.numel() == T * K and t.element_size() == 1:
            saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        casts, outputs = casts_in(lambda: [layer(x) for layer in model])
    assert casts == 1 + len(model)
    assert len(saved.keys() - {p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    sum(outputs).sum().backward()


def test_what_reads_something_else_casts_for_itself():
    first, second, third = layers(recipes.dynamic())
    x = input_of()
    first(x)
    assert casts_in(lambda: second(x))[0] == 1  # the weight's
    x.add_(1)
    assert casts_in(lambda: third(x))[0] == 2  # it was written
    assert casts_in(lambda: third(x))[0] == 2  # the same layer again: another forward
    assert casts_in(lambda: second(x[:16]))[0] == 2  # a view
    assert casts_in(lambda: second(x.clone()))[0] == 2
    handle = first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert casts_in(lambda: first(x))[0] == 2  # a hook gives another tensor
    handle.remove()
    first.recipe = recipes.rowwise()
    assert casts_in(lambda: first(x))[0] == 2  # it is cast otherwise
    with torch.inference_mode():
        y = torch.ones(T, K)
        assert casts_in(lambda: (second(y), third(y)))[0] == 4  # its writes can't be seen


def test_a_frozen_reader_first_leaves_the_transposed_cast_to_the_next():
    frozen, trained, other = layers(recipes.rowwise())
    frozen.requires_grad_(False)
    x = input_of()
    assert casts_in(lambda: (frozen(x), trained(x), other(x)))[0] == 3 + 2


def test_layers_under_autocast_share_the_cast_of_what_each_rounds():
    model, x = layers(recipes.dynamic()), input_of()
    with torch.autocast("cpu", torch.bfloat16):
        assert casts_in(lambda: [layer(x) for layer in model])[0] == 4
    assert casts_in(lambda: layers(recipes.dynamic(), 1)[0](x))[0] == 2  # of what was not rounded


def test_pairs_live_no_longer_than_their_tensor(monkeypatch):
    tensors = vars(shared_casts._thread).setdefault("held", {})
    tensors.clear()
    model, x = layers(recipes.dynamic()), input_of()
    with torch.no_grad():
        model[0](x)
    pair = weakref.ref(tensors[id(x)].casts[0].operands.as_is[0])
    assert pair() is not None
    del x
    gc.collect()
    assert pair() is None and not tensors
    alive = [input_of(seed=seed) for seed in range(2 * MOST_HELD)]
    for x in alive:
        model[0](x)
    assert len(tensors) == MOST_HELD
    model[1](alive[-MOST_HELD])  # what is read again stays
    model[0](input_of(seed=99))
    assert id(alive[-MOST_HELD]) in tensors and id(alive[1 - MOST_HELD]) not in tensors


def test_which_tensor_a_view_stands_for():
    x = torch.randn(T, K)
    assert shared_casts.viewed(x) is x and shared_casts.viewed(x.view(T, K)) is x and shared_casts.viewed(x[:]) is x
    for other in (x.view(-1), x[1:], x.t(), x.view(torch.int32), x.view(T, 2, K // 2)[:, 0]):
        assert shared_casts.viewed(other) is other


def test_a_trace_by_torch_jit_holds_no_cast_of_before():
    """A cast in a trace would be a constant: the example's codes, whatever input the traced layer has."""
    (first, second), x = layers(recipes.dynamic(), 2), torch.randn(T, K)
    first(x)
    with warnings.catch_warnings(action="ignore", category=torch.jit.TracerWarning):
        traced = torch.jit.trace(second, x)
    other = torch.randn(T, K)
    assert torch.equal(traced(other), second(other))


def test_threads_share_nothing():
    model, x = layers(recipes.dynamic(), 2), input_of()
    model[0](x)
    with thread_pool(1) as pool:
        count, _ = pool.submit(casts_in, lambda: model[1](x)).result()
    assert count == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_shares_as_the_first_forward_did(reentrant):
    model = layers(recipes.delayed())
    leaf = torch.ones(T, K, requires_grad=True)
    forward, y = casts_in(lambda: checkpoint(region, model, leaf, use_reentrant=reentrant))
    backward, _ = casts_in(lambda: y.sum().backward())
    assert forward == backward == 4


def test_histories_are_shared_until_a_layer_is_called_alone():
    model = layers(recipes.delayed())

    def step(*also):
        x = input_of()
        casts, y = casts_in(lambda: sum(layer(x) for layer in model))
        (y + sum(layer(x * 3) for layer in also)).sum().backward()
        return casts

    assert [step() for _ in range(3)] == [4, 4, 4]
    assert step(model[2]) == 4
    assert [step() for _ in range(2)] == [5, 5]  # its history is its own
    octavo.nn.load_delayed_state_dict(model, octavo.nn.delayed_state_dict(model))
    assert step() == 5  # compared once, and still another
    for layer in model:
        layer.reset_delayed_state()
    assert [step() for _ in range(2)] == [4, 4]


def test_histories_are_compared_once(monkeypatch):
    """Histories are compared once: on a GPU the host waits for the result."""
    model = layers(recipes.delayed())
    for step in range(3):
        region(model, input_of(seed=step)).sum().backward()
        monkeypatch.setattr(delayed, "no_modes", lambda: pytest.fail("compared again"))
        with torch.no_grad():
            model[1].weight.mul_(0.5)  # by hand: its weight's history is forgotten, its input's is not
    pairs = zip(*((recipe.output, recipe.grad_input) for recipe in (recipes.dynamic(), recipes.delayed())), strict=True)
    output, grad_input = ((one[0], delayed_one[1]) for one, delayed_one in pairs)
    of_weights = dataclasses.replace(recipes.dynamic(), output=output, grad_input=grad_input)
    assert casts_in(lambda: region(layers(of_weights), input_of()))[0] == 4


def test_what_was_cast_by_an_older_scale_is_cast_anew():
    model, x = layers(recipes.delayed(), 2), input_of()
    model[0](x)
    region(model, input_of(seed=2) * 5).sum().backward()
    assert casts_in(lambda: model[1](x))[0] == 2


def squares(layers_and_inputs):
    outputs = [layer(x) for layer, x in layers_and_inputs]
    return outputs, sum(y.square().sum() for y in outputs)


# the first four share after parameters were read
@pytest.mark.parametrize("seed", [7, 12, 14, 18, 0, 1, *in_full((2,), (3,))])
def test_layers_compute_what_layers_of_copied_inputs_do(seed):
    """Bit for bit, in any order of inputs that are shared, read alone, or cast without a number (parameters, norms)."""
    draw, torch_draw = random.Random(seed), torch.Generator().manual_seed(seed)
    recipe = recipes.delayed(4, draw.choice(["max", "most_recent"]))
    norm = octavo.nn.LayerNormLinear(K, K, recipe=recipe)
    model = nn.ModuleList([*layers(recipe, 2), norm.linear])  # the last one is called alone, and behind the norm
    twin, twin_norm = copy.deepcopy((model, norm))
    optimizer = torch.optim.SGD([*model.parameters(), *twin.parameters()], lr=1e-6)

    def data(make):
        return make(torch.randn(T, K, generator=torch_draw) * 10 ** draw.uniform(-2, 2))

    for _ in range(10):
        x, own = data(lambda x: x.requires_grad_() * 1), [data(nn.Parameter) for _ in range(3)]
        inputs = draw.choices([[x, x, x], own, [x, x, own[0]], draw.choices([x, *own], k=3)], [6, 4, 1, 1])[0]
        is_normed, retains_graph = draw.random() < 0.3, draw.random() < 0.2
        order = draw.choice([[0, 1, 2], [2, 1, 0], [1, 0, 2], draw.choices(range(3), k=4)])
        reads = [(norm if is_normed and i == 2 else model[i], inputs[i]) for i in order]
        copied_reads = [
            (twin_norm if is_normed and i == 2 else twin[i], inputs[i].detach().clone().requires_grad_()) for i in order
        ]
        (outputs, loss), (expected, copied_loss) = squares(reads), squares(copied_reads)
        assert all(map(torch.equal, outputs, expected))
        for _ in range(1 + retains_graph):
            loss.backward(retain_graph=retains_graph)
            copied_loss.backward(retain_graph=retains_graph)
        for layer, other in zip(model, twin, strict=True):
            assert all(map(torch.equal, layer.fp8.state[:2], other.fp8.state[:2]))
            assert layer.weight.grad is None or torch.equal(layer.weight.grad, other.weight.grad)
        if draw.random() < 0.7:
            optimizer.step()
            optimizer.zero_grad()


def test_layers_that_have_read_parameters_of_their_own_share_no_cast_but_by_equal_histories():
    first, second = model = layers(recipes.delayed(), 2)
    region(model, input_of()).sum().backward()
    (first(nn.Parameter(input_of() * 100)) + second(nn.Parameter(input_of()))).sum().backward()
    assert casts_in(lambda: region(model, input_of()))[0] == 4
    for layer in model:
        layer.reset_delayed_state()
    region(model, input_of()).sum().backward()
    (first(nn.Parameter(input_of())) + second(nn.Parameter(input_of()))).sum().backward()
    assert casts_in(lambda: region(model, input_of()))[0] == 3


@pytest.mark.parametrize("also_emptied", [False, True])
def test_a_history_of_amaxes_that_is_written_by_hand_is_another_from_its_next_commit_on(also_emptied):
    first, second = model = layers(recipes.delayed(), 2)
    region(model, input_of()).sum().backward()
    first.delayed_amax_history[INPUT] *= 100  # the scale stays until the next commit
    if also_emptied:
        empty_state(first.fp8.state, WEIGHT)
    assert casts_in(lambda: region(model, input_of()))[0] == 3
    region(model, input_of()).sum().backward()
    assert first.delayed_scale[INPUT] != second.delayed_scale[INPUT]
    assert casts_in(lambda: region(model, input_of()))[0] == 4


def test_a_layer_whose_history_a_cuda_graph_writes_shares_no_cast_though_it_is_emptied_or_loaded():
    first, _ = model = layers(recipes.delayed(), 2)
    region(model, input_of()).sum().backward()
    facts_of(first.fp8.state.scale).history_id = IN_CUDA_GRAPH  # as a captured commit leaves it
    assert casts_in(lambda: region(model, input_of()))[0] == 4
    for layer in model:
        layer.reset_delayed_state()
    assert casts_in(lambda: region(model, input_of()))[0] == 4
    octavo.nn.load_delayed_state_dict(model, octavo.nn.delayed_state_dict(model))
    assert casts_in(lambda: region(model, input_of()))[0] == 4


def test_a_second_pass_over_a_graph_enters_no_input_and_an_emptied_history_is_another():
    first, _ = model = layers(recipes.delayed(), 2)
    x = input_of()
    outputs = [layer(x) for layer in model]
    sum(outputs).sum().backward(retain_graph=True)
    outputs[0].sum().backward()
    assert casts_in(lambda: region(model, input_of()))[0] == 3
    empty_state(first.fp8.state, INPUT)
    assert casts_in(lambda: region(model, input_of()))[0] == 4
