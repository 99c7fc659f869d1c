import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.nn.weight_cache import WeightCache
from octavo.step_count import OPTIMIZER_STEPS
from tests.support.helpers import FP8_RECIPES, CountOps, assert_equal, gradients, sqnr

K, N, T = 48, 32, 16


class WritesData(torch.optim.Optimizer):
    """As third-party optimizers do: a step that the weight's version doesn't show."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(2).add_(0.25)


class ReplacesData(WritesData):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data * 2 + 0.25


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1),
    "writes .data": WritesData,
    "replaces .data": ReplacesData,
}


def accumulating(recipe=None) -> octavo.nn.Linear:
    """A layer in the middle of an accumulation: its weight is cached and will be used."""
    layer = octavo.nn.Linear(K, N, recipe=recipe or recipes.dynamic())
    layer(inputs()).sum().backward()
    assert casts_of_a_forward(layer) == 1  # the input's only
    return layer


def inputs() -> torch.Tensor:
    return torch.randn(T, K, requires_grad=True)


def casts_of_a_forward(layer: nn.Module) -> int:
    with CountOps() as ops:
        layer(inputs())
    return ops.casts


def assert_uses_its_weight(layer: octavo.nn.Linear) -> None:
    """The next forward and backward are those of a layer that never cached anything."""
    assert layer.weight.grad is not None
    never = copy.deepcopy(layer)
    x = inputs()
    grads = []
    for module in (layer, never):
        module.weight.grad = torch.zeros_like(module.weight)
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        grads.append({"y": y.detach(), "dx": leaf.grad, "dW": module.weight.grad})
    assert_equal(*grads)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_micro_batches_share_a_cast_weight(recipe):
    layer = octavo.nn.Linear(K, N, recipe=FP8_RECIPES[recipe]())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        casts = []
        for _ in range(3):
            with CountOps() as ops:
                loss = layer(inputs()).sum()
            casts.append(ops.casts)
            loss.backward()
        assert casts == [2, 1, 1]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_cache_changes_no_gradient(recipe):
    results = []
    for clear in (False, True):
        torch.manual_seed(1)
        layer = octavo.nn.Linear(K, N, recipe=FP8_RECIPES[recipe]())
        xs = []
        for n in range(4):
            x = (n + 1) * torch.randn(T, K)  # delayed: the input's scale moves, the weight's amax is the same
            xs.append(x.requires_grad_())
            if clear:
                octavo.nn.invalidate(layer)
            layer(x).square().sum().backward()
        results.append({**gradients(layer), **{str(n): x.grad for n, x in enumerate(xs)}})
    assert_equal(*results)


def test_a_cached_pair_reads_back_as_written_while_its_delayed_scale_moves():
    layer = octavo.nn.Linear(K, N, recipe=recipes.delayed(1), bias=False)
    x, grad = torch.randn(T, K), torch.randn(T, N)
    with torch.no_grad():
        layer.weight.mul_(4)
    layer(x).backward(grad)
    with torch.no_grad():
        layer.weight.div_(4)
    leaves = []
    scales = []
    for _ in range(3):  # first micro-batch: cast with the old scale, four times too small; commits the new one
        leaf = x.clone().requires_grad_()
        layer.weight.grad.zero_()
        y = layer(leaf)
        y.backward(grad)
        leaves.append({"y": y.detach(), "dx": leaf.grad, "dW": layer.weight.grad.clone()})
        scales.append(layer.delayed_scale[1].item())
    assert scales == pytest.approx([448 / layer.weight.abs().max().item()] * 3)
    assert_equal(leaves[0], leaves[1])
    assert_equal(leaves[0], leaves[2])
    weight = layer.weight.detach()
    for found, truth in zip(leaves[0].values(), (x @ weight.t(), grad @ weight, grad.t() @ x), strict=True):
        assert sqnr(found, truth) > 20  # a scale_inv that isn't the codes' own would be off by 4


def test_a_cached_weight_is_not_rolled_into_the_history():
    layer = octavo.nn.Linear(K, N, recipe=recipes.delayed(4))
    for _ in range(3):
        layer(inputs()).sum().backward()
    assert layer.delayed_amax_history.ne(0).sum(1).tolist() == [3, 1, 3]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("recipe", ["dynamic", "delayed", "blockwise"])
def test_after_a_step_of_any_optimizer(name, recipe):
    layer = accumulating(FP8_RECIPES[recipe]())
    optimizer = OPTIMIZERS[name](layer.parameters())
    before = layer.weight.detach().clone()
    optimizer.step(lambda: layer(inputs()).sum()) if name == "LBFGS" else optimizer.step()
    assert not torch.equal(layer.weight, before)
    assert_uses_its_weight(layer)  # the gradients were not set to None


def test_after_a_step_of_an_optimizer_with_a_scheduler():
    layer = accumulating()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step
    optimizer.step()
    assert_uses_its_weight(layer)


def test_after_a_step_of_another_models_optimizer():
    layer, other = accumulating(), nn.Linear(2, 2)
    other(torch.randn(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert casts_of_a_forward(layer) == 2  # cast anew: never wrong


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(3),
    "one element": lambda layer: layer.weight[0, 0].fill_(9.0),
    "through a view": lambda layer: layer.weight.view(-1)[:5].fill_(9.0),
    "through a detached alias": lambda layer: layer.weight.detach().mul_(3),
    "init": lambda layer: nn.init.ones_(layer.weight),
    "copy_": lambda layer: layer.weight.copy_(torch.randn(N, K)),
    "set_": lambda layer: layer.weight.set_(torch.randn(N, K)),
    "p.data = t": lambda layer: setattr(layer.weight, "data", torch.randn(N, K)),
    "load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(K, N).state_dict()),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(torch.randn(N * K + N), layer.parameters()),
    "clip the weight": lambda layer: layer.weight.clamp_(-0.01, 0.01),
    ".data and invalidate": lambda layer: (layer.weight.data.mul_(3), octavo.nn.invalidate(layer)),
    "swap_tensors": lambda layer: torch.utils.swap_tensors(layer.weight, with_grad(nn.Parameter(torch.randn(N, K)))),
    "another parameter": lambda layer: setattr(layer, "weight", with_grad(nn.Parameter(torch.randn(N, K)))),
    "load_state_dict, assigned": lambda layer: (
        layer.load_state_dict(nn.Linear(K, N).state_dict(), assign=True),
        with_grad(layer.weight),
    ),
}


def with_grad(weight: nn.Parameter) -> nn.Parameter:
    weight.grad = torch.zeros_like(weight)
    return weight


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_of_the_weight(change):
    layer = accumulating()
    before = layer.weight.detach().clone()
    with torch.no_grad():
        CHANGES[change](layer)
    assert not torch.equal(layer.weight, before)
    assert_uses_its_weight(layer)


def test_an_address_that_recurs():
    for size in (64, 1024):  # a size that malloc recycles and one that it maps anew
        recurred = False
        for _ in range(200):
            layer = octavo.nn.Linear(size, size, bias=False)
            layer(torch.randn(4, size)).sum().backward()
            layer.weight.data = torch.randn(size, size)
            address, version = layer.weight.data_ptr(), layer.weight._version
            layer(torch.randn(4, size))  # caches
            layer.weight.data = torch.empty(size, size)[:0]
            layer.weight.data = torch.full((size, size), 2.0)
            recurred = recurred or (layer.weight.data_ptr(), layer.weight._version) == (address, version)
            x = torch.ones(4, size)
            torch.testing.assert_close(layer(x), torch.full((4, size), 2.0 * size))
            if recurred:
                break
        assert recurred, "no address recurred: the test tested nothing"


def test_another_part_and_another_layout_of_the_same_storage():
    layer = octavo.nn.Linear(K, K, bias=False)
    both = torch.randn(2 * K, K)
    layer.weight.data = both[:K]
    layer(inputs()).sum().backward()
    layer(inputs())  # cached
    for part in (both[K:], both[K:].t(), both[:K].t()):
        layer.weight.data = part
        assert_uses_its_weight(layer)


def test_the_first_micro_batch_always_casts():
    layer = accumulating()
    layer.weight.grad = None
    layer.weight.data.mul_(3)  # unseen by version and storage
    y = layer(x := inputs())
    assert torch.equal(y, copy.deepcopy(layer)(x))


def test_another_recipe_means_another_cast():
    layer = accumulating()
    octavo.set_recipe(layer, recipes.rowwise())
    assert casts_of_a_forward(layer) == 2
    assert_uses_its_weight(layer)
    layer.recipe = recipes.mx()  # not by set_recipe
    assert_uses_its_weight(layer)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_neither_reads_nor_writes_the_cache(context):
    layer = accumulating()
    layer.eval()
    layer.weight.data.mul_(3)  # as weights are swapped for evaluation: x.data.copy_(average)
    with context():
        x = torch.randn(T, K)
        assert torch.equal(layer(x), copy.deepcopy(layer)(x))
    layer.weight.data.div_(3)
    layer.train()
    assert casts_of_a_forward(layer) == 1
    assert_uses_its_weight(layer)


def test_a_forward_for_the_output_only_does_not_serve_one_for_gradients():
    layer = octavo.nn.Linear(K, N, recipe=recipes.rowwise())
    layer(torch.randn(T, K)).sum().backward()  # no grad_input: the transposed weight was not cast
    x = inputs()
    with CountOps() as ops:
        y = layer(x)
    assert ops.casts == 2
    y.sum().backward()
    assert x.grad.abs().sum() > 0


def test_frozen_weights_are_cast_once_a_step():
    layer = octavo.nn.Linear(K, N)
    layer.weight.requires_grad_(False)
    assert [casts_of_a_forward(layer) for _ in range(3)] == [2, 1, 1]
    with torch.no_grad():
        layer.weight.mul_(2)
    assert [casts_of_a_forward(layer) for _ in range(2)] == [2, 1]
    OPTIMIZERS["SGD"]([layer.bias]).step()
    assert casts_of_a_forward(layer) == 2


def test_moving_the_module_forgets():
    layer = accumulating()
    layer.to(torch.bfloat16).to(torch.float32)
    assert layer._weight_cache._cached is None  # frees the other device's memory, too
    assert_uses_its_weight(layer)


def test_a_cache_keeps_no_weight_alive():
    layer = accumulating()
    storage = torch.multiprocessing.reductions.StorageWeakRef(layer.weight.untyped_storage())
    layer.weight = nn.Parameter(torch.randn(N, K))
    gc.collect()
    assert storage.expired()


def test_copies_of_a_cache_are_empty():
    layer = accumulating()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other._weight_cache) is WeightCache
        assert other._weight_cache is not layer._weight_cache
        other.weight.grad = torch.zeros_like(other.weight)
        assert casts_of_a_forward(other) == 2


def test_steps_are_counted_once_each():
    octavo.nn.Linear(4, 4)
    OPTIMIZER_STEPS.watch()
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    optimizer = torch.optim.SGD([p], lr=0.1)
    before = OPTIMIZER_STEPS.count
    optimizer.step()
    assert OPTIMIZER_STEPS.count == before + 1


def test_invalidate_reaches_every_layer():
    net = nn.Sequential(octavo.nn.Linear(K, N), nn.GELU(), nn.ModuleList([octavo.nn.Linear(N, N)]))
    for layer in (net[0], net[2][0]):
        layer(torch.randn(2, layer.in_features, requires_grad=True)).sum().backward()
    octavo.nn.invalidate(net)
    for layer in (net[0], net[2][0]):
        with CountOps() as ops:
            layer(torch.randn(2, layer.in_features))
        assert ops.casts == 2
