from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import octavo
from octavo.distributed.ranks import Ranks
from octavo.train import GPT, Hooks, ModelConfig, TrainConfig, next_byte_loss, run
from octavo.train.loop import trained_model
from octavo.train.model import SPEED, Mixture, balance
from octavo.train.trainer import build_model
from tests.support.helpers import CountOps
from tests.support.pool import Pool
from tests.train.test_shard import changed, curve, nearly, train_on

SIZES = ModelConfig(width=32, layers=2, heads=2, context=16, experts=4, top_k=2)


@torch.no_grad()
def test_it_computes_what_a_loop_over_bytes_does() -> None:
    mixture, x = Mixture(SIZES), torch.randn(1, 9, 32)
    mixture.bias += torch.tensor([0.0, 0.3, -0.3, 0.1])
    h = mixture.norm(x).flatten(0, 1)
    expected = []
    for row in h:
        scores = torch.sigmoid(mixture.router.weight @ row)
        chosen = sorted(range(4), key=lambda e: -float(scores[e] + mixture.bias[e]))[:2]
        outputs = []
        for expert in chosen:
            gate, up = (mixture.experts.gate_up.weight[expert] @ row).chunk(2)
            outputs.append(scores[expert] * (mixture.experts.down.weight[expert] @ (F.silu(gate) * up)))
        expected.append(sum(outputs) / sum(scores[expert] for expert in chosen))
    torch.testing.assert_close(mixture(x)[0], torch.stack(expected))
    assert int(mixture.load.sum()) == 9 * 2
    mixture.eval()(x)
    assert int(mixture.load.sum()) == 9 * 2  # validation does not count


def test_biases_even_out_a_load_that_scores_would_not() -> None:
    mixture, x = Mixture(SIZES).requires_grad_(False), torch.randn(4, 64, 32) + 1
    mixture.router.weight[0] = 0.1  # all bytes like the first expert
    loads = []
    for _ in range(60):
        mixture(x)
        loads.append(float(mixture.load.max() / mixture.load.float().mean()))
        balance([mixture], Ranks())
    assert loads[0] > 1.5 and max(loads[-10:]) < 1.15
    assert not mixture.load.any() and abs(float(mixture.bias.sum())) < 1e-5
    assert float(mixture.bias.abs().max()) <= 60 * 2 * SPEED


def test_the_router_is_in_float32_and_no_recipe_is_for_it() -> None:
    model, x = build_model(SIZES, "blockwise", 0), torch.randint(256, (2, 16))
    in_fp8 = [m.name for m in octavo.summary(model).converted]
    assert len(in_fp8) == 2 * 4 and not any("router" in name or "head" in name for name in in_fp8)
    seen = []
    model.mixtures[0].experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    assert seen[0][2].dtype == torch.float32
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("sizes", [SIZES, ModelConfig(48, 1, 3, 8, experts=3, top_k=1)])
def test_parameters_are_counted_and_a_byte_takes_as_many_as_without_experts(sizes: ModelConfig) -> None:
    model = GPT(sizes)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert 8 * sizes.width <= 3 * sizes.top_k * sizes.hidden < 8 * sizes.width + 96 * sizes.top_k
    down = model.mixtures[0].experts.down.weight.detach()
    assert float(down.std()) == pytest.approx((2 * sizes.layers * sizes.hidden) ** -0.5, rel=0.05)


def test_more_chosen_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k is 2 of 1 experts: choose top_k 1, or more experts"):
        ModelConfig(experts=1)


@pytest.fixture
def mixed(config: TrainConfig) -> TrainConfig:
    return changed(config, model={"experts": 4}, optimizer={"steps": 6}, run={"eval_every": 3})


@pytest.mark.parametrize("shard", ["fsdp", pytest.param("ddp", marks=pytest.mark.full)])
def test_ranks_balance_what_all_of_them_chose(pool: Pool, mixed: TrainConfig, shard: str, tmp_path: object) -> None:
    config = changed(mixed, run={"dtype": "float32", "out": tmp_path}, ranks={"shard": shard})
    models: list[GPT] = []
    alone = run(changed(mixed, run={"dtype": "float32"}), hooks=Hooks(on_model=models.append))
    ((first, *_), (other, *_)) = pool.run(train_on, (2,), config, "baseline")
    assert first == other and nearly(first, curve(alone), 1e-4)
    of_ranks = trained_model(tmp_path / "float32")  # type: ignore[operator]
    assert all(torch.equal(a.bias, b.bias) for a, b in zip(of_ranks.mixtures, models[0].mixtures, strict=True))


SMALL = ModelConfig(width=32, layers=2, heads=2, context=24)


@pytest.mark.parametrize("position", [0, 5, 22])
def test_no_position_sees_the_next_ones(position):
    model = GPT(SMALL)
    tokens = torch.randint(256, (2, 24), dtype=torch.uint8)
    changed = tokens.clone()
    changed[:, position + 1 :] = torch.randint(256, (2, 23 - position), dtype=torch.uint8)
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, : position + 1], before[:, : position + 1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after[:, position + 1 :], before[:, position + 1 :], atol=1e-3)


def test_each_position_sees_all_before():
    model = GPT(SMALL)
    inputs = model.embedding(torch.randint(256, (1, 24))).detach().requires_grad_()
    model.embedding.forward = lambda tokens: inputs
    model(torch.zeros(1, 24, dtype=torch.int64))[0, -1].sum().backward()
    assert (inputs.grad[0].norm(dim=-1) > 0).all()


def test_it_starts_out_knowing_nothing():
    model = GPT(ModelConfig(width=64, layers=3, heads=2, context=32))
    tokens = torch.randint(256, (8, 33))
    loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(256)) < 0.5


def test_shorter_sequences_and_any_integer_type():
    model = GPT(SMALL)
    tokens = torch.randint(256, (2, 9), dtype=torch.uint8)
    assert model(tokens).shape == (2, 9, 256)
    assert torch.equal(model(tokens), model(tokens.long()))


def test_its_blocks_compute_as_plain_torch_until_they_get_a_recipe():
    model = GPT(SMALL)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 4 * SMALL.layers + 1
    assert all(module.bias is None for module in linear)
    assert type(model.head) is nn.Linear
    assert all(module.recipe.is_high_precision for module in linear if module is not model.head)
    with CountOps() as ops, torch.autocast("cpu", torch.bfloat16):
        next_byte_loss(model(torch.randint(256, (2, 24))), torch.randint(256, (2, 24))).backward()
    assert not ops.calls
    # a checkpoint holds parameters only: the rotary tables are made anew
    assert all(name.endswith("weight") for name in model.state_dict())


def test_initial_weights_have_variance_one_by_fan_in():
    config = ModelConfig(width=128, layers=2, heads=2, context=8)
    for name, weight in GPT(config).state_dict().items():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        expected = {"embedding.weight": 1.0, "head.weight": 0.5 * 128**-0.5}.get(name, weight.shape[1] ** -0.5)
        if name.endswith(("out.weight", "fc2.weight")):
            expected /= math.sqrt(2 * config.layers)
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
