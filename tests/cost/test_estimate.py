"""A predicted step: its work equals a counted real step's, and its time follows the rates."""

from __future__ import annotations

import copy
import dataclasses
import functools
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import octavo
from octavo import recipes
from octavo.cost.estimate import Estimate, estimate
from octavo.cost.parts import BF16_KERNELS, PARTS
from octavo.cost.rates import PUBLISHED, HostTime, PlanError
from octavo.cost.work import LinearWork, Work, head_of, on_meta, work_of
from octavo.scaling.recipe import RecipeMap
from tests.cost.test_work import H200, TOKENS, gpt, gpt_work


def test_layers_that_read_one_tensor_cast_it_once() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(512, 512, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.gate(x) * self.up(x))

    recipe, x = recipes.delayed(), torch.ones(8192, 512, requires_grad=True)
    works = work_of(on_meta(Gated()), (x,)).linears
    assert [work.input_reader for work in works] == ["gate", "gate", "down"]
    both = recipe, octavo.RecipeMap(recipe, {"up": None})
    alone, apart = (estimate(Gated(), (x,), each, H200).casts for each in both)
    of_input, of_weight, of_grad = works[0].cast_seconds(recipe, H200).values()
    assert alone == pytest.approx(2 * of_input + 3 * (of_weight + of_grad))
    assert apart == pytest.approx(2 * (of_input + of_weight + of_grad))  # the first that is converted casts it


def test_estimates_of_recipes() -> None:
    model = octavo.convert(gpt(), recipes.delayed())  # converted already, as users have it
    many = torch.empty(4096, 16, dtype=torch.int64, device="meta")
    work, chosen = (work_of(model, (many,)), {name: getattr(recipes, name)() for name in ("delayed", "dynamic", "mx")})
    asked = {"bf16": None, **chosen, "dynamic": "dynamic"}  # which is the recipe of that name
    plans = {name: estimate(model, (many,), recipe, H200, work=work) for name, recipe in asked.items()}
    assert {name: estimate.name for name, estimate in plans.items()} == {name: name for name in plans}
    bf16 = plans["bf16"]
    assert bf16.casts == 0.0 and not bf16.layers
    assert plans["dynamic"].casts > plans["delayed"].casts > 0.0
    assert plans["dynamic"].products == plans["delayed"].products < bf16.products
    assert plans["delayed"].memory.activations < bf16.memory.activations  # type: ignore[operator]
    assert {layer.work.name for layer in plans["mx"].slower} == {layer.work.name for layer in plans["mx"].layers}
    for each in plans.values():
        busy = each.products + each.casts + each.other
        assert sum(each.device) == pytest.approx(busy) and each.total == busy + each.optimizer + each.waits
        assert each.other == bf16.other and each.optimizer == pytest.approx(bf16.optimizer)


def test_the_device_waits_where_the_host_takes_longer() -> None:
    """The host is late in the blocks' forward; the device's later work hides backward's launches."""
    model, work = gpt(), gpt_work()

    def estimated(**host: HostTime) -> Estimate:
        return estimate(model, (TOKENS,), None, replace(H200, host=host), work=work)

    idle = estimated()
    forward, after = idle.device
    assert idle.waits == 0 and min(forward, after) > 0 and work.blocks is not None
    late = estimated(operation=HostTime(2 * forward / work.blocks.forward_traffic.ops, 0.0))
    assert late.waits == pytest.approx(forward) and late.total == pytest.approx(idle.total + forward)
    hidden, never = (estimated(bf16=HostTime(0.0, times * after / len(work.linears))) for times in (1, 3))
    assert hidden.waits == 0 and never.waits == pytest.approx(2 * after - forward)


def test_the_loss_counts() -> None:
    """The loss, in float32, moves 44 bytes a logit, and it keeps three tensors before the first gradient."""
    model, work, other = gpt(), gpt_work(), work_of(on_meta(nn.Linear(8, 8)), (torch.ones(3, 8),))
    logits = model(TOKENS)
    assert work.logits == logits.numel() and other.logits == 0
    plan = estimate(model, (TOKENS,), None, H200, work=work)
    assert plan.memory.saved is not None and plan.loss == 12 * logits.numel()
    assert plan.memory.saved["logits and loss"] >= plan.loss
    assert plan.peak == plan.memory.total - min(plan.memory.gradients, plan.loss)

    def moved(vocabulary: int) -> float:
        words = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary, bias=False)).to(torch.bfloat16)
        return work_of(on_meta(words), (TOKENS,)).traffic.bytes

    assert moved(4096) - moved(1024) == pytest.approx(44 * TOKENS.numel() * (4096 - 1024), rel=0.05)
    features = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8))
    assert work_of(on_meta(features), (TOKENS,)).logits == 0  # no column for each word


def test_a_product_takes_its_operations_or_its_bytes() -> None:
    rates, mx, bf16 = replace(H200, launch=0.0), recipes.mx(), recipes.high_precision()
    many, few = (LinearWork("", tokens, 8192, 8192, True, True) for tokens in (16384, 1))
    slower, faster = (work.seconds(mx, rates)[0] / work.seconds(bf16, rates)[0] for work in (many, few))
    assert slower == pytest.approx(790 / 380)  # a Hopper multiplies 32-element blocks by Triton
    # the weight is read twice, half as wide, and its gradient written, as wide
    assert faster == pytest.approx((1 + 1 + 2) / (2 + 2 + 2), rel=1e-3)
    apart = many._replace(tokens=8, groups=8)  # of eight matrices, a row each
    assert apart.seconds(mx, rates)[0] == pytest.approx(8 * few.seconds(mx, rates)[0])
    assert (few.shape, apart.shape) == ("8192 x 8192", "8 x 8192 x 8192")


def test_only_what_convert_would_convert_is_in_fp8() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 64), nn.Linear(64, 512)).to(torch.bfloat16)
    x = (torch.empty(256, 512, dtype=torch.bfloat16, device="meta"),)
    work = work_of(model, x)

    def estimated(recipe: object, select: object = None) -> Estimate:
        return estimate(model, x, recipe, H200, select, work=work)  # type: ignore[arg-type]

    assert [layer.work.name for layer in estimated(recipes.dynamic()).layers] == ["0"]
    every = estimated(recipes.dynamic(), lambda module, name: name != "1")
    assert [layer.work.name for layer in every.layers] == ["0", "2"]
    mapped = estimated(RecipeMap(recipes.high_precision(), {"1": recipes.dynamic()}))
    assert mapped.casts == 0.0 and not mapped.layers  # "1" is too small for the default select
    assert estimated(recipes.dynamic(), lambda module, name: False).products == estimated(None).products


@functools.cache
def llama() -> tuple[nn.Module, Work]:
    """Return a model, which no test changes, and the work of a step of it."""
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=1, vocab_size=64)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    return model, work_of(on_meta(model), (TOKENS,))


def test_bf16_with_the_same_fusions_and_a_loss_in_chunks() -> None:
    (model, work), rates = llama(), PUBLISHED["H100"]

    def estimated(recipe: object, **how: bool) -> Estimate:
        return estimate(model, (TOKENS,), recipe, rates, lambda *_: True, work=work, **how)  # type: ignore[arg-type]

    plain, fused = (estimated(None, fuse=fuse) for fuse in (False, True))
    assert (plain.name, fused.name) == ("bf16", "bf16, fused")
    assert fused.products == plain.products and fused.casts == 0 and not fused.layers
    x, wide, logits = TOKENS.numel() * 64, TOKENS.numel() * 176, work.logits
    # bytes an element: a norm 4 and its gradient 6, SwiGLU 6 and 10, positions of q and k 4 and 4, the loss 2 and 4
    saved = 3 * x * (132 - 10) + wide * (28 - 16) + 2 * x * (48 - 8) + logits * (44 - 6)
    launches = 3 * (24 - 2) + (5 - 2) + (24 - 2) + (6 - 2)
    assert plain.other - fused.other == pytest.approx(saved / rates.copy + launches * rates.launch)
    assert fused.loss == 4 * logits and fused.peak < plain.peak
    assert "values" not in BF16_KERNELS and "gate and up" not in BF16_KERNELS  # no products are joined

    head = head_of(work)
    assert head is not None and head.name == "lm_head"
    recipe = RecipeMap(recipes.delayed(), {"lm_head": recipes.dynamic_with_output_hp()})
    whole, chunked = (estimated(recipe, fuse=True, chunked_loss=chunked) for chunked in (False, True))
    spared = head.cast_seconds(recipes.dynamic_with_output_hp(), rates)["grad_output"]
    assert whole.casts - chunked.casts == pytest.approx(spared) and spared > 0
    assert chunked.other == pytest.approx(whole.other)  # 6 bytes a logit as well
    # all are one chunk; the gradient of the head's input is there too
    assert (whole.loss, chunked.loss) == (4 * logits, logits + 3 * logits + 2 * x)
    # blocks' scales are not known beforehand: the recipe casts their gradient
    block, in_chunks = (estimated(recipes.blockwise(), chunked_loss=chunked) for chunked in (False, True))
    assert block.casts == in_chunks.casts > 0 and in_chunks.loss == logits + 5 * logits + 2 * x
    many = work._replace(logits=8192 * 64, linears=(*work.linears[:-1], head._replace(tokens=8192)))
    chunks = estimate(model, (TOKENS,), recipe, rates, lambda *_: True, work=many, chunked_loss=True)
    assert chunks.loss == 8192 * 64 + 3 * 4096 * 64 + 2 * 8192 * 64
    with pytest.raises(PlanError, match="the gradients of lm_head are no products in FP8"):
        estimated(RecipeMap(recipes.delayed(), {"lm_head": None}), chunked_loss=True)
    with pytest.raises(PlanError, match="the gradients of lm_head are no products in FP8"):
        estimated(None, fuse=True, chunked_loss=True)
    with pytest.raises(PlanError, match="no layer computes logits"):
        estimate(nn.Linear(8, 8), (torch.ones(2, 8),), recipes.delayed(), rates, chunked_loss=True)


def test_fused_a_step_saves_less_by_kind_and_moves_less() -> None:
    model, work = llama()
    plans = [
        estimate(model, (TOKENS,), recipes.delayed(), H200, lambda module, name: True, fuse=fuse, work=work)
        for fuse in (False, True)
    ]
    plain, fused = (each.memory.saved for each in plans)
    assert plain is not None and fused is not None
    less = {kind for kind in plain if fused[kind] < 0.99 * plain[kind]}  # of fewer layers fewer scales, too
    assert less >= {"norms", "activations", "logits and loss"} and plans[1].peak < plans[0].peak
    assert plans[0].memory.activations == sum(plain.values())
    stored = estimate(
        model,
        (TOKENS,),
        recipes.delayed(),
        H200,
        lambda *_: True,
        octavo.optim.AdamW,
        work,
        fuse=True,
        weight_storage="fp8",
    )
    assert plans[1].other < stored.other < plans[0].other  # weights in FP8 are never joined, nor are their products
    already = octavo.convert(copy.deepcopy(model), recipes.delayed(), lambda *_: True, fuse=True)
    bytes_alone = dataclasses.replace(H200, launch=0.0)  # gradients of norms' weights are copied here
    once, of_fused = (
        estimate(each, (TOKENS,), recipes.delayed(), bytes_alone, lambda *_: True, work=of_step, fuse=True)
        for each, of_step in ((model, work), (already, None))
    )
    # counted as it is, and not twice; the last norm has no residual, which its row counts
    assert of_fused.other == pytest.approx(once.other, rel=0.1)
    x, wide, head = TOKENS.numel() * 64, TOKENS.numel() * 176, 64 * 64
    parts = [("norm", x)] * 3 + [("gated feed-forward", wide), ("loss", TOKENS.numel() * 64)]
    parts += [("gate and up", x), ("query, key and value", x), ("rotary embedding", 2 * x), ("values", x)]
    parts += [("residual", x), ("weights side by side", 2 * 64 * 176), ("weights side by side", 3 * head)]
    saved = sum(size * (sum(PARTS[part].plain[:2]) - sum(PARTS[part].fused[:2])) for part, size in parts)
    launches = sum(sum(PARTS[part].plain[2:]) - sum(PARTS[part].fused[2:]) for part, _ in parts)
    assert plans[0].other - plans[1].other == pytest.approx(saved / H200.copy + launches * H200.launch)


def test_the_optimizer_counts() -> None:
    def compact(parameters: object) -> torch.optim.Optimizer:
        return octavo.optim.AdamW(parameters, moments="fp8", master=None)  # type: ignore[arg-type]

    model, work = gpt(), gpt_work()
    optimizers = torch.optim.AdamW, compact
    plain, small = (estimate(model, (TOKENS,), None, H200, optimizer=make, work=work) for make in optimizers)
    assert small.memory.moments < 0.6 * plain.memory.moments and small.optimizer < plain.optimizer
