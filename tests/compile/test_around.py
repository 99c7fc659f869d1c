"""What happens around a compiled step: other recipes, evaluation, whole models of others; and every kind of step.

Layers of every feature are compiled in tests/support/seams, every kind of step in Inductor too by ``compile_matrix``.
"""

import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

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
from tests.support.helpers import FP8_RECIPES, to_fp8

LINEAR = What(lambda layers: nn.Linear(WIDTH, 48))


def compiled():
    """(a function that calls a model, compiled in one graph; what counts its graphs)."""
    torch.compiler.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(lambda model, x: model(x), backend=counter, fullgraph=True), counter


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


def llama_s_graphs(recipe):
    """(graphs, breaks, graphs after the second step) of a compiled Llama's training, by a recipe or in bf16."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False)).bfloat16()
    if recipe is not None:
        model = to_fp8(model, recipe)
        assert sum(isinstance(module, octavo.nn.Linear) for module in model.modules()) == 8
    torch.compiler.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    call, graphs = torch.compile(model, backend=counter), []
    for step in range(4):
        tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(step))
        call(input_ids=tokens, labels=tokens).loss.backward()
        graphs.append(counter.frame_count)
    return graphs[-1], sum(counters["graph_break"].values()), graphs[-1] - graphs[1]


@pytest.mark.full
def test_a_whole_llama_has_no_more_graphs_breaks_or_recompiles_than_in_bf16():
    in_bf16 = llama_s_graphs(None)
    for recipe in FP8_RECIPES.values():
        ours = llama_s_graphs(recipe())
        assert all(a <= b for a, b in zip(ours, in_bf16, strict=True)), (ours, in_bf16)


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
    found = measure(what, recipe, "inductor", device="cuda", mode=mode)
    assert dataclasses.replace(found, difference=0.0) == GREEN
    assert found.difference <= 2.0**-6  # atomics and other tiles add up in another order
