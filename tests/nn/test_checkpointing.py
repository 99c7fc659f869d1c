"""Regions recomputed from a pair: against regions whose input is rounded by hand in plain torch, bit for bit."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import octavo
from octavo import recipes
from octavo.nn.checkpointing import watched
from tests.support.helpers import assert_equal, gradients, to_fp8

T, K = 32, 64
WRAPPERS = r"_orig_mod\.|_checkpoint_wrapped_module\."  # in parameters' names


def by_hand(x: Tensor) -> Tensor:
    """The input [..., K], rounded to E4M3 by rows with scales that are powers of two."""
    scale = torch.exp2(torch.floor(torch.log2(448 / x.float().abs().amax(-1, keepdim=True))))
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


class ByHand(torch.autograd.Function):
    """A region that is computed again from its rounded input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Any) -> Tensor:
        ctx.x, ctx.region = by_hand(x), region
        return region(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(ctx.region(x), grads)
        return x.grad, None


class Block(nn.Module):
    """A norm before its layers, so that what they read is no rounded input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(K), nn.Linear(K, 2 * K), nn.Linear(2 * K, K)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(K, K)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor, region: Callable[..., Tensor] = lambda block, x: block(x)) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = region(block, x)
        return x


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, T, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def trained(model: nn.Module, *region: Any) -> dict[str, Tensor]:
    """A forward's result and its gradients."""
    y = model(batch(next(model.parameters()).dtype), *region)
    y.float().square().sum().backward()
    return {"y": y.detach(), **{re.sub(WRAPPERS, "", name): grad for name, grad in gradients(model).items()}}


def wrapped(**options: Any) -> Net:
    model = net()
    for at, block in enumerate(model.blocks):
        model.blocks[at] = checkpoint_wrapper(block, **options)
    return model


def compiled() -> Net:
    model = net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


ours, of_model = octavo.checkpoint_in_fp8, octavo.nn.checkpoint_model_in_fp8
reentrant = functools.partial(ours, use_reentrant=True)
plain = functools.partial(checkpoint, use_reentrant=False)
by_wrapper = {"checkpoint_impl": CheckpointImpl.REENTRANT}
WAYS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "not reentrant": lambda: trained(net(), ours),
    "reentrant": lambda: trained(net(), reentrant),
    "torch's wrapper": lambda: trained(wrapped(checkpoint_fn=ours)),
    "a wrapped model": lambda: trained(of_model(wrapped())),
    "a wrapped model, reentrant": lambda: trained(of_model(of_model(wrapped(**by_wrapper)))),
    "compiled regions": lambda: trained(compiled(), ours),
    "compiled around regions": lambda: trained(torch.compile(net(), backend="aot_eager"), ours),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler asks
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_from_what_is_rounded_by_hand(way: str) -> None:
    expected = trained(net(), lambda block, x: ByHand.apply(x, block))
    assert_equal(WAYS[way](), expected)
    unrounded = trained(net(), plain)
    assert torch.equal(expected["y"], unrounded["y"])
    assert not torch.equal(expected["blocks.0.fc1.weight"], unrounded["blocks.0.fc1.weight"])


def test_what_a_selective_region_keeps_is_exact() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.native_layer_norm.default])
    found, unrounded = trained(net(), functools.partial(ours, context_fn=contexts)), trained(net(), plain)
    assert torch.equal(found["blocks.1.fc1.weight"], unrounded["blocks.1.fc1.weight"])  # it reads the norm's result
    assert not torch.equal(found["blocks.1.norm.weight"], unrounded["blocks.1.norm.weight"])


def test_nested_regions_and_hooks_around_them() -> None:
    """Those of a region around it, and those that move tensors away, get the pairs."""
    moved: list[torch.dtype] = []

    def pack(x: Tensor) -> Tensor:
        moved.append(x.dtype)
        return x.clone()

    twin, model = net(), net()
    twin.blocks[0] = nn.Sequential(twin.blocks[0], nn.Linear(K, K))
    model.blocks[0] = copy.deepcopy(twin.blocks[0])

    def both(region: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(block: nn.Module, x: Tensor) -> Tensor:
            inner = block if isinstance(block, Block) else lambda x: block[1](region(block[0], x))
            return region(inner, x)

        return call

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = trained(model, both(ours))
    assert_equal(found, trained(twin, both(lambda block, x: ByHand.apply(x, block))))
    assert moved.count(torch.float8_e4m3fn) == 2  # outer regions'; an inner one's is the outer's to compute again


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_region_reads_again(use_reentrant: bool) -> None:
    """The first argument that can be rounded is; the others, and random numbers, are as they were."""
    torch.manual_seed(0)
    enter = nn.Linear(K, K)
    weight = nn.Parameter(torch.randn(K, K))
    read: list[tuple[Any, ...]] = []

    def region(*args: Any) -> Tensor:
        tokens, mask, table, weight, transposed, few, wide, x, second = args
        read.append((*(arg.detach().clone() for arg in args), noise := torch.rand(3)))
        y = x @ weight + second @ transposed + mask + table + few.sum() + wide.float() + tokens.sum() + noise.sum()
        return nn.functional.dropout(y, 0.5)

    x = torch.randn(T, K)
    arguments = (
        torch.arange(T * K).view(T, K),
        torch.full((T, K), -1e30),  # a mask
        torch.randn(T, K),  # a table, which needs no gradient
        weight,
        weight.t(),
        enter(x)[:4],
        enter(x).double(),
        enter(x),
        enter(2 * x),
    )
    with watched() as found:
        octavo.checkpoint_in_fp8(region, *arguments, use_reentrant=use_reentrant).sum().backward()
    first, second = read
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [True] * 7 + [False] + [True] * 2
    assert torch.equal(second[7], by_hand(first[7]))
    counts = {"int64": 1, "needs no gradient": 2, "a parameter": 2, "small": 1, "float64": 1, "": 1, "not the first": 1}
    assert {why: count for why, (count, _, _) in found.items()} == counts
    assert weight.grad is not None and enter.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_half_of_the_bytes(dtype: torch.dtype) -> None:
    with watched() as found:
        trained(net(dtype), ours)
    assert found == {"": (2, 2 * dtype.itemsize * 2 * T * K, 2 * 2 * T * (K + 4))}
    with watched() as found, torch.no_grad():
        net()(batch(), ours)
    assert found == {}  # where nothing is kept for backward


@pytest.mark.parametrize("recipe", [recipes.rowwise(True), recipes.blockwise(), recipes.mx(), recipes.dynamic(True)])
def test_casts_by_powers_of_two_round_a_rounded_input_to_the_same(recipe: octavo.Recipe) -> None:
    """Of numbers that are normal in both; and of the default's scales they don't."""

    def grads(recipe: octavo.Recipe, region: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layer = to_fp8(nn.Linear(128, 64), recipe)
        x = (
            (torch.rand(T, 128) + 0.01)
            * torch.exp2(torch.randint(-3, 3, (T, 1)))
            * (torch.randint(2, (T, 128)) * 2 - 1)
        )
        enter = nn.Parameter(torch.ones(128))
        region(layer, x * enter).square().sum().backward()
        return {**gradients(layer), "enter": enter.grad}

    assert_equal(grads(recipe, ours), grads(recipe, plain))
    rounded, exact = (grads(recipes.dynamic(), region)["weight"] for region in (ours, plain))
    assert not torch.equal(rounded, exact)


class TopExperts(Block):
    """As a mixture of experts is named."""


def test_a_region_that_chooses_is_left_alone() -> None:
    model = net()
    model.blocks[0] = nn.Sequential(TopExperts())
    calls = [ours, lambda block, x: ours(lambda x: block(x), x), lambda b, x: ours(functools.partial(b), x)]
    calls.append(lambda block, x: ours(block.forward, x))
    for call in calls:
        with watched() as found:
            trained(model, call)
        assert {why: count for why, (count, _, _) in found.items()} == {"a TopExperts chooses by it": 1, "": 1}


def test_summary_counts_regions_and_regions_of_no_library_are_an_error() -> None:
    model = of_model(wrapped())
    saved = octavo.summary(model, batch()).saved
    assert saved is not None
    assert saved.regions == {"": (2, 8 * 2 * T * K, 4 * T * (K + 4))}
    assert sum(saved.plain.values()) - sum(saved.converted.values()) == 8 * 2 * T * K - 4 * T * (K + 4)
    assert "2 arguments of checkpointed regions, 0.03 MiB, kept in FP8, 0.01 MiB" in str(saved)
    with pytest.raises(ValueError, match="checkpoint_wrapper; in code of your own"):
        of_model(net())


def test_backward_twice_and_a_gradient_that_is_asked_for() -> None:
    model, x = net(), batch().requires_grad_()
    y = model(x, ours).square().sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
