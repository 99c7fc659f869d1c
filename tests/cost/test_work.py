"""A step's work: its products and its traffic, counted without data."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from octavo import recipes
from octavo.cost.estimate import Estimate, estimate
from octavo.cost.rates import PUBLISHED
from octavo.cost.work import TRACED, LinearWork, Work, on_meta, run_shorter, work_of
from octavo.private import FakeTensorMode
from octavo.train import GPT, ModelConfig
from tests.support.combinations import in_full

H200 = PUBLISHED["H200"]
TOKENS = torch.zeros(4, 16, dtype=torch.int64)


def gpt(width: int = 64) -> nn.Module:
    return GPT(ModelConfig(width=width, layers=1, heads=2, context=16)).to(torch.bfloat16)


@functools.cache
def gpt_work() -> Work:
    """Return the work of a step of ``gpt()``."""
    return work_of(on_meta(gpt()), (TOKENS,))


def test_work_is_that_of_a_real_step() -> None:
    model, work = gpt(), gpt_work()
    with FlopCounterMode(display=False) as counter:
        model(TOKENS).float().sum().backward()
    products = sum(flop for op, flop in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    assert sum(layer.flop * sum(layer.products) for layer in work.linears) == products
    scores = 2 * 4 * 2 * 16 * 16 * 32  # FLOP of query . key^T: batch, heads, C, C, head width
    assert work.other_flop == scores * (2 + 5)  # forward two products, backward five: torch counts them from 2.15 on
    assert {layer.name for layer in work.linears} == {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert work.traffic.bytes > sum(p.numel() for p in model.parameters())


def test_inputs_on_a_gpu_are_counted_as_on_a_cpu() -> None:
    with FakeTensorMode():
        on_gpu = torch.empty(TOKENS.shape, dtype=torch.int64, device="cuda:0")
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    assert work_of(model, (on_gpu,)) == work_of(model, (TOKENS,))


def test_operations_between_products_are_one_kernel_where_compiled() -> None:
    class Neg(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    x = torch.ones(4, 8, requires_grad=True)
    nets = (nn.Sequential(nn.Linear(8, 8, False), *(Neg(),) * times, nn.Linear(8, 8, False)) for times in (1, 2))
    once, twice = (work_of(on_meta(net), (x,)) for net in nets)
    assert twice.traffic.compiled == once.traffic.compiled and twice.traffic.ops == once.traffic.ops + 2
    assert twice.traffic.bytes == once.traffic.bytes + 2 * 2 * 4 * 32


def test_inputs_that_are_no_tensors_are_given_on() -> None:
    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            for _ in range(times):
                x = self.layer(x)
            return x

    model, x = on_meta(Times()), torch.zeros(4, 8, device="meta")
    once, thrice = (work_of(model, (x, times)) for times in (1, 3))
    flop = [sum(layer.flop * sum(layer.products) for layer in work.linears) for work in (once, thrice)]
    one = 2 * 4 * 8 * 8  # x needs no gradient; of a layer that is called again all calls are counted alike
    assert flop == [2 * one, 3 * 3 * one]


def test_inputs_may_be_keywords_in_any_order() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.layer(input=hidden) * mask

    class Net(nn.Module):
        def __init__(self, keywords: bool) -> None:
            super().__init__()
            self.first, self.blocks, self.keywords = nn.Linear(8, 8), nn.ModuleList([Block(), Block()]), keywords

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask, x = torch.ones(8), self.first(x)
            for block in self.blocks:
                x = block(mask=mask, hidden=x) if self.keywords else block(x, mask)
            return x

    x = torch.ones(4, 8, requires_grad=True)
    by_keywords, by_place = (work_of(Net(keywords), (x,)) for keywords in (True, False))
    assert by_keywords == by_place and len(by_place.linears) == 3 and by_place.blocks is not None
    assert (
        by_keywords.inputs["blocks.0"] == 32 and by_place.blocks.forward_traffic.bytes < by_place.blocks.traffic.bytes
    )


def test_what_backward_needs_and_a_layer_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.own = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.own(self.frozen(x)))

    layers = {layer.name: layer for layer in work_of(on_meta(Twice()), (torch.ones(3, 8),)).linears}
    assert layers["frozen"].products == (True, False, False)
    assert layers["own"] == LinearWork("own", 6, 8, 8, True, True)
    with pytest.raises(ValueError, match="nothing to train"):
        work_of(on_meta(Twice().requires_grad_(False)), (torch.ones(3, 8),))


def test_experts_are_counted_as_the_loop_over_them() -> None:
    """The trainer's experts and transformers', whichever way those compute themselves, are counted as loops."""
    mixed = GPT(ModelConfig(64, 1, 2, 16, experts=4, top_k=2)).to(torch.bfloat16)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    mixtral = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    for model, name in ((mixed, "blocks.0.mlp"), (mixtral, "model.layers.0.mlp")):
        work = work_of(on_meta(model), (TOKENS,))
        rows = TOKENS.numel() * 2
        layers = {layer.name.removeprefix(f"{name}.experts."): layer[1:7] for layer in work.linears}
        assert layers["gate_up"] == (rows, 64, 2 * 96, True, True, 4)
        assert layers["down"] == (rows, 96, 64, True, True, 4)
        scores, router = 2 * 4 * 2 * 16 * 16 * 32, 2 * TOKENS.numel() * 64 * 4
        routers = [one for one in work.linears if one.name.endswith("router")]  # the trainer's is a layer
        others = work.other_flop + sum(one.flop * sum(one.products) for one in routers)
        assert others == scores * (2 + 5) + router * 3
        fp8 = estimate(model, (TOKENS,), recipes.delayed(), H200, lambda module, name: True, work=work)
        assert {"4 x 192 x 64", "4 x 64 x 96"} <= {layer.work.shape for layer in fp8.layers}
    small = estimate(mixtral, (TOKENS,), recipes.delayed(), H200, work=work)
    assert not small.layers and small.casts == 0.0  # the default select takes none of this size


@pytest.mark.parametrize("family", ["gpt", *in_full(("experts",), ("llama",))])
def test_of_many_blocks_that_are_alike_some_are_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted of five blocks by running three and four of them is what all five do and keep."""
    with torch.device("meta"):
        if family == "llama":
            config = transformers.LlamaConfig(
                vocab_size=96, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
                num_hidden_layers=TRACED + 2, use_cache=False,
            )  # fmt: skip
            model: nn.Module = transformers.LlamaForCausalLM(config).bfloat16()
        else:
            experts = 4 * (family == "experts")
            model = GPT(ModelConfig(64, TRACED + 2, 2, 16, experts=experts, top_k=2 if experts else 1)).bfloat16()

    def plan() -> tuple[Work, Estimate, int]:
        work = work_of(model, (TOKENS,))
        step = estimate(model, (TOKENS,), recipes.delayed(), H200, lambda *_: True, work=work, fuse=True)
        return work, step, run_shorter(model, lambda twin: 0, lambda short, long, more: more)

    *lengthened, more = plan()
    next(iter(model.get_submodule(lengthened[0].blocks.name))).another = True  # type: ignore[union-attr,arg-type]
    assert more == 2 and plan() == (*lengthened, 0)  # a block with another setting: all are run


def test_blocks_that_a_forward_counts_or_calls_in_another_order_are_all_run() -> None:
    class Model(nn.Module):
        def __init__(self, order: list[int]) -> None:
            super().__init__()
            self.order, self.blocks = order, nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in self.order:
                x = self.blocks[index % len(self.blocks)](x)
            return x

    class Counting(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in range(5):
                x = self.blocks[index](x)
            return x

    x = torch.ones(2, 8, device="meta")
    for model in (Model([4, 3, 2, 1, 0]), Counting([])):
        assert [layer.tokens for layer in work_of(model, (x,)).linears] == [2] * 5
        assert sum(estimate(model, (x,), None, H200).memory.saved.values()) == 4 * 2 * 8 * 4  # type: ignore[union-attr]
