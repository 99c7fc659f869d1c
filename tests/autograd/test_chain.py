import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from octavo import HigherOrderGradientError, recipes
from octavo.autograd import casts
from octavo.autograd import chain as module
from octavo.autograd.casts import CastRequest, cast_role
from octavo.autograd.chain import Chain, ChainTensors, activated_linear
from octavo.autograd.chain import run_chain as run_on_tensors
from octavo.autograd.gather_input import cast_norm
from octavo.autograd.norm import Norm, norm_and_branch
from octavo.autograd.observer import Observer
from octavo.autograd.products import Layer, linear
from octavo.autograd.rows import Parts, Rows
from octavo.kernels.activations import activation_of
from octavo.kernels.reference.activation import activate
from octavo.scaling.recipe import WEIGHT
from tests.support.fused_cases import SAVED
from tests.support.helpers import FP8_RECIPES, CountOps, delayed_state, sqnr

T, K, F, N, EPS = 48, 64, 96, 40, 1e-5
each_recipe = pytest.mark.parametrize("name", FP8_RECIPES)


def layer(weight: Tensor, recipe) -> Layer:
    state = delayed_state(recipe)
    return Layer(cast_role(weight.detach(), CastRequest(recipe, WEIGHT, True, True), state), recipe, state, True)


def run_chain(x: Tensor, norm_parameters: tuple, parameters: list[tuple], chain: Chain) -> Any:
    return run_on_tensors(ChainTensors(x, *norm_parameters, *itertools.chain(*parameters)), chain)


def weights(*shapes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, k).requires_grad_(), torch.randn(n).requires_grad_()) for n, k in shapes]


def gradients(result: Tensor, grad: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [result.detach(), *torch.autograd.grad(result, tensors, grad)]


@each_recipe
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_what_is_returned_and_what_is_asked_for(name, kind):
    recipe, norm = FP8_RECIPES[name](), Norm(kind, 1e-5, False)
    x = torch.randn(T, K, dtype=torch.bfloat16)
    (parameters_of_layer,) = weights((N, K))
    parameters = torch.ones(K), torch.zeros(K) if kind == "layer_norm" else None
    for dtype, returns in itertools.product([torch.bfloat16, torch.float32], [False, True]):
        chain = Chain(norm, (layer(parameters_of_layer[0], recipe),), "", dtype, returns)
        results = run_chain(x, parameters, [parameters_of_layer], chain)
        with torch.no_grad():
            alone = run_chain(x, parameters, [parameters_of_layer], chain)
        assert isinstance(results, tuple) == isinstance(alone, tuple) == returns
        for a, b in zip(results, alone, strict=True) if returns else [(results, alone)]:
            assert a.dtype == dtype and torch.equal(a, b)


def test_results_of_the_next_dtype_where_x_and_parameters_have_their_own():
    recipe = dataclasses.replace(recipes.dynamic(), grad_weight=None)  # whose inputs are saved as they are
    x = torch.randn(T, K, requires_grad=True)
    first, second = weights((2 * F, K), (N, F))
    gamma = torch.ones(K, dtype=torch.float16, requires_grad=True)
    layers = layer(first[0], recipe), layer(second[0], dataclasses.replace(recipe, saved=SAVED))
    norm = Norm("rms_norm", 1e-5, False)
    y = run_chain(x, (gamma, None), [first, second], Chain(norm, layers, "swiglu", torch.bfloat16, False))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == first[0].grad.dtype == second[1].grad.dtype == torch.float32
    assert gamma.grad.dtype == torch.float16


@pytest.mark.parametrize("left", [(), ("grad_weight",), ("grad_input", "grad_weight")], ids=str)
def test_any_tensors_may_ask_for_gradients(left):
    recipe = dataclasses.replace(recipes.dynamic(), **dict.fromkeys(left))
    first, second = weights((F, K), (N, F))
    tensors, grad = [torch.randn(T, K), *first, *second], torch.randn(T, N)
    layers = layer(first[0], recipe), layer(second[0], recipe)

    def run(needs: tuple[bool, ...]) -> list[Tensor | None]:
        x, w, b, w2, b2 = leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        chain = Chain(None, layers, "gelu", torch.float32, False)
        with CountOps() as ops:
            run_chain(x, (None, None), [(w, b), (w2, b2)], chain).backward(grad)
        assert left or ops.calls["matmul"] == 2 + needs[0] + needs[1] + needs[3] + any(needs[:3])
        return [t.grad for t in leaves]

    whole = run((True,) * 5)
    for one in range(5):
        for needs in (tuple(i == one for i in range(5)), tuple(i != one for i in range(5))):
            for asked, gradient, expected in zip(needs, run(needs), whole, strict=True):
                assert torch.equal(gradient, expected) if asked else gradient is None


FUNCTIONS_OF_LAYERS: dict[str, Any] = {
    "linear": lambda recipe, x, w, b: linear(x, w, b, layer(w, recipe)),
    "chain of one": lambda recipe, x, w, b: run_chain(
        x, (None, None), [(w, b)], Chain(None, (layer(w, recipe),), "", torch.float32, False)
    ),
    "chain": lambda recipe, x, w, b, w2, b2: run_chain(
        x,
        (None, None),
        [(w, b), (w2, b2)],
        Chain(None, (layer(w, recipe), layer(w2, recipe)), "gelu", torch.float32, False),
    ),
    "activated": lambda recipe, x, w, b: activated_linear(x, None, w, b, layer(w, recipe), "gelu"),
    "gated": lambda recipe, x, w, b: activated_linear(x, x + 1, w, b, layer(w, recipe), "swiglu"),
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_LAYERS)
def test_a_pass_computes_the_gradients_that_it_is_asked_for(name):
    """Those of other tensors, which a later pass over the graph may ask for, cost no product."""
    first, second = weights((F, K), (N, F))
    leaves = [torch.randn(T, K, requires_grad=True), *first, *(second if name == "chain" else ())]
    y = FUNCTIONS_OF_LAYERS[name](recipes.dynamic(), *leaves)
    grad = torch.randn_like(y)
    whole = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    for wanted in itertools.product([False, True], repeat=len(leaves)):
        if any(wanted):
            asked, expected = ([*itertools.compress(tensors, wanted)] for tensors in (leaves, whole))
            with CountOps() as ops:
                gradients_of_asked = torch.autograd.grad(y, asked, grad, retain_graph=True)
            products = wanted[0] + wanted[1] + (name == "chain" and wanted[3] + any(wanted[:3]))
            assert ops.calls["matmul"] == products and all(map(torch.equal, gradients_of_asked, expected)), wanted


@pytest.mark.parametrize("name", FUNCTIONS_OF_LAYERS)
def test_without_gradients_each_input_is_cast_for_the_output_alone(name):
    first, second = weights((F, K), (N, F))
    leaves = [torch.randn(T, K), *first, *(second if name == "chain" else ())]
    with torch.no_grad(), CountOps() as ops:
        FUNCTIONS_OF_LAYERS[name](recipes.rowwise(), *leaves)
    layers = len(leaves) // 2
    # two scalings are of weights, which this file's ``layer`` casts in both layouts
    assert ops.calls == {"cast": layers, "matmul": layers, "cast_two_scalings": layers}


def test_the_norm_is_written_only_where_it_is_read(monkeypatch):
    written = []
    cast = lambda *source, keep, **named: written.append(keep) or cast_norm(*source, keep=keep, **named)  # noqa: E731
    monkeypatch.setattr(module, "cast_norm", cast)
    (parameters_of_layer,) = weights((N, K))
    for recipe in (recipes.dynamic(), dataclasses.replace(recipes.dynamic(), grad_weight=None)):
        for returns, needs_dw in itertools.product([False, True], repeat=2):
            weight = parameters_of_layer[0].detach().requires_grad_(needs_dw)
            chain = Chain(Norm("rms_norm", 1e-5, False), (layer(weight, recipe),), "", torch.float32, returns)
            run_chain(torch.ones(T, K, requires_grad=True), (torch.ones(K), None), [(weight, None)], chain)
            assert written.pop() == (returns or (needs_dw and recipe.grad_weight is None))


def test_scales_of_a_first_input_are_swizzled_with_a_norm_and_without_one(monkeypatch):
    """Its products alone read them: where a device's products read swizzled scales, no cast writes them otherwise."""
    monkeypatch.setattr(casts, "reads_swizzled", lambda device: True)
    asked, cast = [], casts.kernels.cast
    noted = lambda *args, **named: asked.append("swizzle" in named) or cast(*args, **named)  # noqa: E731
    monkeypatch.setattr(casts.kernels, "cast", noted)
    weight, x = torch.randn(F, K, dtype=torch.bfloat16), torch.randn(T * 2, K, dtype=torch.bfloat16)
    described = layer(weight, recipes.mx())
    for norm in (None, Norm("rms_norm", EPS, False)):
        asked.clear()
        run_chain(x, (torch.ones(K), None), [(weight, None)], Chain(norm, (described,), "", torch.bfloat16, False))
        assert asked == [True]


def test_only_the_norms_output_is_read():
    """Then no gradient reaches the layer, and its delayed state has seen none."""
    (parameters_of_layer,), recipe = weights((N, K)), recipes.delayed()
    x, gamma = torch.randn(T, K, requires_grad=True), torch.rand(K, requires_grad=True)
    described = layer(parameters_of_layer[0], recipe)
    chain = Chain(Norm("rms_norm", EPS, False), (described,), "", torch.float32, True)
    history = [tensor.clone() for tensor in described.state]
    with CountOps() as ops:
        _, y = run_chain(x, (gamma, None), [parameters_of_layer], chain)
        calls = dict(ops.calls)
        grads = torch.autograd.grad(y.sum(), (x, gamma, *parameters_of_layer), allow_unused=True)
    assert ops.calls["matmul"] == calls["matmul"] == 1
    assert grads[2:] == (None, None) and all(map(torch.equal, described.state, history))
    assert all(map(torch.equal, grads, torch.autograd.grad(norm_and_branch(x, gamma, EPS)[0].sum(), (x, gamma))))


def test_gradients_of_gradients_are_refused():
    (w, b), (w2, b2) = weights((F, K), (N, F))
    recipe, x, h = recipes.dynamic(), torch.randn(T, K, requires_grad=True), torch.randn(T, F, requires_grad=True)
    layers = layer(w, recipe), layer(w2, recipe)
    chain = Chain(None, layers, "gelu", torch.float32, False)
    for leaf, y in (
        (x, run_chain(x, (None, None), [(w, b), (w2, b2)], chain)),
        (x, run_chain(x, (None, None), [(w, b)], chain._replace(layers=layers[:1]))),
        (h, activated_linear(h, None, w2, b2, layers[1], "gelu")),
        (x, linear(x, w, b, layers[0])),
    ):
        with pytest.raises(HigherOrderGradientError, match=r"create_graph=True.*high_precision"):
            torch.autograd.grad(y.sum(), leaf, create_graph=True)
        with pytest.raises(HigherOrderGradientError, match=r"in batches.*high_precision"):
            torch.autograd.grad(y, leaf, torch.ones(2, *y.shape), is_grads_batched=True)


def test_ranks_that_have_rows_of_the_weight_sum_the_inputs_gradient(monkeypatch):
    monkeypatch.setattr(module, "summed", lambda dx, group: 3 * dx)
    ((w, b),) = weights((N, K))
    x, described = torch.randn(T, K, requires_grad=True), layer(w, recipes.blockwise())
    grads = []
    for parts in (None, *(Parts("no group", roles) for roles in ((True, True, False), (False, True, True)))):
        chain = Chain(None, (described._replace(rows=Rows(parts=parts)),), "", torch.float32, False)
        grads += torch.autograd.grad(run_chain(x, (None, None), [(w, b)], chain).sum(), x)
    assert all(torch.equal(grad, 3 * grads[0]) for grad in grads[1:])


def test_no_weight_is_saved_for_gradients_that_nobody_asks_for():
    (w, b), (w2, b2) = weights((F, K), (N, F))
    saved: list[int] = []
    chain = Chain(None, (layer(w, recipes.dynamic()), layer(w2, recipes.dynamic())), "gelu", torch.float32, False)
    parameters = [(w.detach(), b.detach()), (w2, b2.detach())]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x):
        run_chain(torch.randn(T, K), (None, None), parameters, chain)
    assert T * F in saved and not {w.numel(), w2.numel()} & {*saved}


# Two layers without a norm: as a chain; apart, the second by activated_linear; and with the activation between.


def in_three_ways(recipe, activation: str) -> list[list[Tensor]]:
    """The result and the gradients of x, both weights and both biases."""
    gated = activation_of(activation).gated
    x, grad = torch.randn(2, T // 2, K, requires_grad=True), torch.randn(2, T // 2, N)
    first, second = weights((2 * F if gated else F, K), (N, F))
    tensors = [x, *first, *second]
    layers = [(layer(first[0], recipe), layer(second[0], recipe)) for _ in range(3)]  # each with a state of its own
    chain = Chain(None, layers[0], activation, torch.float32, False)
    with CountOps() as ops:
        in_each_way = [gradients(run_chain(x, (None, None), [first, second], chain), grad, tensors)]
    if not recipe.saved and recipe.grad_weight:  # then there are the casts of two inputs and two gradients
        assert ops.calls["matmul"] == 6 and sum(ops.calls.values()) == 10
    h = linear(x, *first, layers[1][0])
    gate, up = h.chunk(2, dim=-1) if gated else (h, None)
    in_each_way.append(gradients(activated_linear(gate, up, *second, layers[1][1], activation), grad, tensors))
    y = linear(activate(linear(x, *first, layers[2][0]), activation), *second, layers[2][1])
    return [*in_each_way, gradients(y, grad, tensors)]


@each_recipe
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu", "geglu_tanh"])
def test_two_layers_are_the_same_in_three_ways(name, activation):
    chain, halves, apart = in_three_ways(FP8_RECIPES[name](), activation)
    for i in (0, 4, 5):  # bit for bit: the result, and the gradients of the second weight and bias
        assert torch.equal(halves[i], chain[i])
    for way in (halves, apart):  # but for the last bit of the activation and of h's gradient, and what it rounds to
        assert all(sqnr(a, b) > 30 for a, b in zip(way, chain, strict=True))


def test_a_second_pass_over_a_graph_is_cast_as_if_the_first_had_not_been():
    """Gradients of the second, by retain_graph, are a hundred times larger than the history that the first began."""
    (parameters_of_layer,) = weights((N, F))
    h, grad = torch.randn(T, F, requires_grad=True), torch.randn(T, N)
    read, of_second_pass = (h, *parameters_of_layer), []
    for as_one in (True, False):
        described = layer(parameters_of_layer[0], recipes.delayed())
        if as_one:
            y = activated_linear(h, None, *parameters_of_layer, described, "gelu")
        else:
            y = linear(activate(h, "gelu"), *parameters_of_layer, described)
        torch.autograd.grad(y, read, grad, retain_graph=True)
        of_second_pass.append(torch.autograd.grad(y, read, 100 * grad))
    assert all(sqnr(a, b) > 30 for a, b in zip(*of_second_pass, strict=True))


def test_what_is_activated_may_be_saved_in_fp8_and_read_in_high_precision():
    for changed in ({"saved": SAVED}, {"grad_weight": None}, {"saved": SAVED, "grad_weight": None}):
        chain, halves, _ = in_three_ways(dataclasses.replace(recipes.blockwise(), **changed), "swiglu")
        assert torch.equal(halves[0], chain[0]) and torch.equal(halves[4], chain[4])
        assert all(sqnr(a, b) > 30 for a, b in zip(halves[1:4], chain[1:4], strict=True))


@pytest.mark.parametrize("name", ["dynamic", "delayed"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_backward_casts_the_second_layers_input_again_as_forward_did(name, activation):
    """An observed layer saves those codes. Both forwards come before a backward, which writes the next scales."""
    recipe, results, sizes = FP8_RECIPES[name](), [], []
    first, second = weights((2 * F if activation == "swiglu" else F, K), (N, F))
    xs, dy = [torch.randn(T, K).mul_(size).requires_grad_() for size in (1, 3)], torch.randn(T, N)
    for observers in ((), (Observer(),)):
        layers = layer(first[0], recipe), layer(second[0], recipe)._replace(observers=observers)
        chain, saved = Chain(None, layers, activation, torch.float32, False), {}
        with saved_tensors_hooks(lambda t, saved=saved: saved.setdefault(t.untyped_storage(), t), lambda t: t):
            ys = [run_chain(x, (None, None), [first, second], chain) for x in xs]
        sizes.append(sum(storage.nbytes() for storage in saved))
        for x, y in zip(xs, ys, strict=True):
            for wanted in ([second[0]], [first[1], second[0]], [x, *first, *second]):
                results += torch.autograd.grad(y, wanted, dy, retain_graph=True)
    half = len(results) // 2
    assert all(torch.equal(one, other) for one, other in zip(results[:half], results[half:], strict=True))
    assert sizes[0] == sizes[1] - 2 * (T * F - 4)


def test_nothing_is_cast_that_no_gradient_reads():
    (parameters_of_layer,) = weights((N, F))
    described = layer(parameters_of_layer[0], recipes.dynamic())
    for needs, products in (((True, False), 2), ((False, True), 2), ((False, False), 1)):
        gate = torch.ones(T, F, requires_grad=needs[0])
        weight = parameters_of_layer[0].detach().requires_grad_(needs[1])
        with CountOps() as ops:
            y = activated_linear(gate, torch.ones(T, F), weight, None, described, "swiglu")
            if any(needs):
                y.sum().backward()
        assert ops.calls["matmul"] == products
        assert [one.grad is not None for one in (gate, weight)] == list(needs)
    up = torch.ones(T, F, requires_grad=True)
    activated_linear(torch.ones(T, F), up, parameters_of_layer[0].detach(), None, described, "reglu").sum().backward()
    assert up.grad is not None
