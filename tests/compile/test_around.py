"""Compiled steps beside other recipes, evaluation and whole models of others; and every kind of step.

Layers of every feature are compiled in tests/support/seams, every kind of step in Inductor too by ``compile_matrix``.
"""

import dataclasses
import functools
import re

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import octavo
from benchmarks.compile.compile_cells import (
    RECIPES,
    WHATS,
    WIDTH,
    Result,
    What,
    batch,
    built,
    difference,
    mean_square,
    measure,
)
from octavo.nn.known_forwards import KnownForward
from tests.support.combinations import each_pair
from tests.support.helpers import FP8_RECIPES, every_layer, to_fp8

LINEAR = What(lambda layers: nn.Linear(WIDTH, 48))


def compiled(call=lambda model, x: model(x), backend="aot_eager", fullgraph=True, **options):
    """Return (a function or a model, compiled in one graph or ``fullgraph=False``; a counter of its graphs)."""
    torch.compiler.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(call, backend=counter, fullgraph=fullgraph, **options), counter


def state_of(model):
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().clone() for name, value in model.state_dict().items()} | gradients


def check_equal(model, other):
    assert difference(state_of(model), state_of(other)) == 0.0
    delayed = octavo.nn.delayed_state_dict(model)
    if delayed:
        assert difference(delayed, octavo.nn.delayed_state_dict(other)) == 0.0


def test_set_recipe_between_steps_compiles_once_for_each_distinct_recipe():
    call, counter = compiled()
    model, eager = built(LINEAR, "dynamic"), built(LINEAR, "dynamic")
    for step, name in enumerate(["dynamic", "delayed", "dynamic", "high_precision", "delayed", "high_precision"]):
        x, target = batch(LINEAR, step)
        for net, forward in ((model, lambda x: call(model, x)), (eager, eager)):
            net.zero_grad()
            octavo.set_recipe(net, RECIPES[name]())  # an equal value, not the same
            mean_square(forward, x, target).backward()
    check_equal(model, eager)
    assert counter.frame_count == 3


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_in_between(recipe):
    call, counter = compiled()
    model, eager = built(LINEAR, recipe), built(LINEAR, recipe)
    graphs = []
    for step in range(4):
        x, target = batch(LINEAR, step)
        model.zero_grad()
        eager.zero_grad()
        mean_square(lambda x: call(model, x), x, target).backward()
        mean_square(eager, x, target).backward()
        for mode in (torch.no_grad, torch.inference_mode):
            for net in (model, eager):
                net.eval()
            with mode():
                assert torch.equal(call(model, x), eager(x))
            for net in (model, eager):
                net.train()
        graphs.append(counter.frame_count)
    check_equal(model, eager)
    assert graphs[0] <= 3 and graphs == graphs[:1] * 4


def llama(recipe, key_heads=1, **how):
    """A Llama of one layer, by a recipe or in bf16; ``how``: options of convert."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": key_heads, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False)).bfloat16()
    return model if recipe is None else octavo.convert(model, recipe, every_layer, **how)


def tokens_of_step(step):
    return torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(step))


def llama_s_graphs(recipe):
    """Return (graphs, breaks, graphs after the second step) of a compiled Llama's training, by a recipe or in bf16."""
    model = llama(recipe)
    if recipe is not None:
        assert sum(isinstance(module, octavo.nn.Linear) for module in model.modules()) == 8
    (call, counter), graphs = compiled(model, fullgraph=False), []
    for step in range(4):
        tokens = tokens_of_step(step)
        call(input_ids=tokens, labels=tokens).loss.backward()
        graphs.append(counter.frame_count)
    return graphs[-1], sum(counters["graph_break"].values()), graphs[-1] - graphs[1]


@pytest.mark.full
def test_a_whole_llama_has_no_more_graphs_breaks_or_recompiles_than_in_bf16():
    in_bf16 = llama_s_graphs(None)
    for recipe in FP8_RECIPES.values():
        ours = llama_s_graphs(recipe())
        assert all(a <= b for a, b in zip(ours, in_bf16, strict=True)), (ours, in_bf16)


@pytest.mark.parametrize("recipe", [pytest.param("dynamic", marks=pytest.mark.full), "delayed"])
def test_a_fused_llama_equals_eager_in_one_graph(recipe):
    """A fused Llama equals eager in one graph; with fewer keys than queries torch sums bf16 gradients otherwise."""

    def step(model, tokens):
        return model(input_ids=tokens, labels=tokens).loss

    call, counter = compiled(step)
    calls = call, step
    models = [llama(RECIPES[recipe](), key_heads=2, fuse=True) for _ in calls]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for number in range(3):
        losses = []
        for call, model, optimizer in zip(calls, models, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(call(model, tokens_of_step(number)))
            losses[-1].backward()
        assert torch.equal(*losses)
        assert difference(*map(state_of, models)) == 0.0
        for optimizer in optimizers:
            optimizer.step()
    assert counter.frame_count == 1
    state, expected = map(octavo.nn.delayed_state_dict, models)
    names = [name for name in expected if re.search("q_proj|o_proj|gate_proj|down_proj|lm_head", name)]
    assert len(names) == (10 if recipe == "delayed" else 0)  # compiled, layers computed as one leave it in the first
    assert all(torch.equal(state[name], expected[name]) for name in names)
    assert sum(isinstance(module, KnownForward) for module in models[0].modules()) == 6


def tokens_of(rows):
    return (torch.randn(rows, 64, requires_grad=True),)


def sequences_of(rows):
    return (torch.randn(2, rows, 64, requires_grad=True),)


def groups_of(rows):
    return *tokens_of(rows), torch.tensor([rows // 4, rows // 2, rows - 3], dtype=torch.int32)


def routed(rows):
    return *tokens_of(rows), torch.randint(3, (rows, 2)), torch.rand(rows, 2, requires_grad=True)


MODULES = {
    "Experts": (functools.partial(octavo.nn.Experts, 3, 64, 32), routed),
    "Linear": (functools.partial(octavo.nn.Linear, 64, 32), sequences_of),
    "GroupedLinear": (functools.partial(octavo.nn.GroupedLinear, 3, 64, 32), groups_of),
    "LayerNormLinear": (functools.partial(octavo.nn.LayerNormLinear, 64, 32), tokens_of),
    "RMSNormMLP": (functools.partial(octavo.nn.RMSNormMLP, 64, 32), sequences_of),
}


@each_pair(
    module=[*MODULES],
    bias=[True, False],
    recipe=["dynamic", "delayed", "blockwise", "mx", "rowwise_with_gw_hp"],
    dynamic=[True, None],
)
def test_any_number_of_tokens_takes_one_graph(case):
    """Any number of tokens takes one graph; with ``dynamic=None`` one for the first, then one for all others."""
    make, inputs_of = MODULES[case["module"]]
    model = make(bias=case["bias"], recipe=getattr(octavo.recipes, case["recipe"])())
    call, counter = compiled(model, "eager", dynamic=case["dynamic"])
    for rows in (130, 260, 333)[: 2 if case["dynamic"] else 3]:  # above one block of blockwise()
        call(*inputs_of(rows)).square().sum().backward()
    assert counter.frame_count == (1 if case["dynamic"] else 2)


def test_an_activation_memory_budget_recomputes_no_product_while_casts_and_activations_suffice():
    """torch's partitioner takes an op that it does not know to cost nothing: it recomputed all but one product."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)))
    products = []

    def note(graph, _):
        products.extend(node for node in graph.graph.nodes if node.target is torch.ops.octavo.matmul.default)
        return make_boxed_func(graph)

    torch.compiler.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        bw_compiler=note,
        partition_fn=min_cut_rematerialization_partition,
    )
    with functorch_config.patch(activation_memory_budget=0.9):
        model = torch.compile(to_fp8(layers.bfloat16(), octavo.recipes.dynamic()), backend=backend)
        model(torch.randn(512, 32, dtype=torch.bfloat16, requires_grad=True)).square().mean().backward()
    assert len(products) == 8  # two gradients a layer


GREEN = Result(graphs=1, breaks=0, recompiles=0, difference=0.0)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", WHATS)
def test_one_graph_and_bit_for_bit(what, recipe):
    assert measure(what, recipe) == GREEN


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", ["fused modules", "training step in autocast", "activation checkpointing"])
def test_one_graph_on_a_gpu(what, recipe, mode):
    measured = measure(what, recipe, "inductor", device="cuda", mode=mode)
    assert dataclasses.replace(measured, difference=0.0) == GREEN
    assert measured.difference <= 2.0**-6  # atomics and other tiles add up in another order
