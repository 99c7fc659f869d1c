"""Regions recomputed from a pair: against regions whose input is rounded by hand in plain torch, bit for bit."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import octavo
from octavo import recipes
from octavo.nn.checkpointing import region_counts
from tests.support.helpers import assert_equal, gradients, to_fp8
from tests.support.regions import by_hand, region_by_hand

T, K = 32, 64
ours, of_model = octavo.checkpoint_in_fp8, octavo.nn.checkpoint_model_in_fp8
plain = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """A region with a norm before its layer, so that the layer's input is no rounded one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


def trained(region: Any = lambda block, x: block(x), change: Any = lambda block: block) -> dict[str, Tensor]:
    """The result of two regions behind a layer, and all gradients in their order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, K), change(Block()), change(Block()))
    x = model[0](torch.randn(2, T, K))
    for block in model[1:]:
        x = region(block, x)
    x.square().sum().backward()
    return {"y": x.detach(), **{str(at): p.grad for at, p in enumerate(model.parameters())}}


def compiled(block: nn.Module) -> nn.Module:
    block.compile(backend="aot_eager")
    return block


def wrapped(block: nn.Module, **options: Any) -> nn.Module:
    return of_model(of_model(nn.Sequential(checkpoint_wrapper(block, **options))))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler asks
@pytest.mark.parametrize(
    "way",
    [
        {"region": ours},
        {"region": partial(ours, use_reentrant=True)},
        {"change": wrapped},
        {"change": partial(wrapped, checkpoint_fn=ours)},
        {"change": partial(wrapped, checkpoint_impl=CheckpointImpl.REENTRANT)},
        pytest.param({"region": ours, "change": compiled}, marks=pytest.mark.full),
    ],
)
def test_recomputed_from_what_is_rounded_by_hand(way: dict[str, Any]) -> None:
    expected, unrounded = trained(region_by_hand), trained(plain)
    assert_equal(trained(**way), expected)
    assert torch.equal(expected["y"], unrounded["y"]) and not torch.equal(expected["4"], unrounded["4"])


def test_what_a_selective_region_keeps_is_exact() -> None:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.native_layer_norm.default])
    selective, unrounded = trained(partial(ours, context_fn=contexts)), trained(plain)
    assert torch.equal(selective["8"], unrounded["8"])  # the last layer's weight: it reads the norm's result
    assert not torch.equal(selective["6"], unrounded["6"])


def test_nested_regions_and_hooks_around_them() -> None:
    """Hooks of a region around a region, and hooks that move tensors away, get the pairs."""
    moved: list[torch.dtype] = []
    pack: Any = lambda x: (moved.append(x.dtype), x.clone())[1]  # noqa: E731
    nested = lambda region: lambda block, x: region(lambda x: 2 * region(block, 2 * x), x)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        nested_gradients = trained(nested(ours))
    assert_equal(nested_gradients, trained(nested(region_by_hand)))
    assert moved.count(torch.float8_e4m3fn) == 2  # an inner one's is the outer's to compute again


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_region_reads_again(use_reentrant: bool) -> None:
    """The first argument that can be rounded is; the others, and random numbers, are as they were."""
    torch.manual_seed(0)
    enter, weight, read = nn.Linear(K, K), nn.Parameter(torch.randn(K, K)), list[list[Tensor]]()

    def region(tokens: Tensor, mask: Tensor, weight: Tensor, view: Tensor, *args: Tensor) -> Tensor:
        read.append([arg.detach().clone() for arg in (tokens, mask, weight, view, *args, torch.rand(3))])
        few, wide, x, second = args
        return x @ weight + second @ view + mask + few.sum() + wide.float() + tokens.sum()

    x = torch.randn(T, K)
    exact = (torch.arange(T * K).view(T, K), torch.full((T, K), -1e30), weight, weight.t())  # the second is a mask
    rounded_args = enter(x)[:4], enter(x).double(), enter(x), enter(2 * x)
    with region_counts() as bytes_by_reason:
        ours(region, *exact, *rounded_args, use_reentrant=use_reentrant).sum().backward()
    first, again = read
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [True] * 6 + [False] + [True] * 2
    assert torch.equal(again[6], by_hand(first[6]))
    counts = {"int64": 1, "needs no gradient": 1, "a parameter": 2, "small": 1, "float64": 1, "": 1, "not the first": 1}
    assert {why: count for why, (count, _, _) in bytes_by_reason.items()} == counts
    assert weight.grad is not None and enter.weight.grad is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_input_itself_is_freed(use_reentrant: bool) -> None:
    alive, enter, block = list[bool](), nn.Linear(K, K), Block()
    for region in (checkpoint, ours):
        x = enter(torch.randn(T, K))
        y, held = region(block, x, use_reentrant=use_reentrant), weakref.ref(x)
        del x
        alive.append(held() is not None)
        y.sum().backward()
    assert alive == [True, False]


@pytest.mark.parametrize("recipe", [recipes.rowwise(True), recipes.blockwise(), recipes.mx(), recipes.dynamic(True)])
def test_casts_by_powers_of_two_round_a_rounded_input_to_the_same(recipe: octavo.Recipe) -> None:
    """Numbers that are normal in both. The default's scales, in float32, don't."""

    def grads(recipe: octavo.Recipe, region: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layer, enter = to_fp8(nn.Linear(128, K), recipe), nn.Parameter(torch.ones(128))
        x = torch.exp2(torch.rand(T, 128) * 4 + torch.randint(3, (T, 1))) * torch.randn(T, 128).sign()
        y = region(layer, x * enter).square().sum()
        y.backward(retain_graph=True)
        y.backward()
        return {**gradients(layer), "enter": enter.grad}

    assert_equal(grads(recipe, ours), grads(recipe, plain))
    rounded, exact = (grads(recipes.dynamic(), region)["weight"] for region in (ours, plain))
    assert not torch.equal(rounded, exact)


def test_a_region_that_chooses_is_left_alone() -> None:
    experts = type("TopExperts", (Block,), {})()
    x, inner = torch.randn(T, K, requires_grad=True), nn.Sequential(experts)
    functions = experts, inner, inner.forward, partial(inner), partial(Block.forward, experts), lambda x: inner(x)
    for function in functions:
        with region_counts() as bytes_by_reason:
            ours(function, x)
        assert bytes_by_reason == {"a TopExperts chooses by it": (1, 4 * T * K, 4 * T * K)}


def test_a_tensor_of_a_class_of_its_own_stays_as_it_is() -> None:
    x = TwoTensor(torch.randn(T, K), torch.randn(T, K)).requires_grad_()
    with region_counts() as bytes_by_reason:
        ours(lambda x: x * 2, x)
    assert list(bytes_by_reason) == ["a TwoTensor"]


def test_summary_counts_regions_and_a_model_without_any_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(K, K), wrapped(Block()), wrapped(Block()))
    saved = octavo.summary(model, torch.randn(2, T, K)).saved
    assert saved is not None and saved.regions == {"": (2, 8 * 2 * T * K, 4 * T * (K + 4))}
    assert sum(saved.plain.values()) - sum(saved.converted.values()) == 8 * 2 * T * K - 4 * T * (K + 4)
    assert "2 arguments of checkpointed regions, 0.03 MiB, kept in FP8, 0.01 MiB" in str(saved)
    with pytest.raises(ValueError, match="torch's checkpoint_wrapper; in code of your own"):
        of_model(nn.Sequential(Block()))
