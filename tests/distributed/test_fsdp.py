"""Training under FSDP2 with FP8 all-gathers equals training of the replicated model: per recipe, situation, ranks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import octavo
from octavo import E4M3, E5M2, Cast, PerTensor, recipes
from tests.support.expert_models import whole
from tests.support.sharded_weights import average

FORWARD, GRADIENT = (Cast(fmt, PerTensor(), power_of_two=True, margin=1) for fmt in (E4M3, E5M2))
RECIPES = {
    "dynamic": recipes.dynamic,
    "delayed": lambda: recipes.delayed(history_length=2),  # begins anew within STEPS
    "blockwise": recipes.blockwise,
    "rowwise": recipes.rowwise,
    "mx": recipes.mx,
    "high_precision": recipes.high_precision,
    "power of two": lambda: octavo.Recipe((FORWARD, FORWARD), (GRADIENT, FORWARD), (GRADIENT, FORWARD)),
}
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Situation:
    """The way that a model is built, sharded and trained; see SITUATIONS."""

    sizes: tuple[int, int, int] = (256, 512, 40)  # width, hidden, outputs
    depth: int = 2
    tied: bool = False
    with_embedding: bool = False
    mixed_precision: bool = False
    chunked_loss: bool = False  # of a head that is a group of its own


SITUATIONS = {
    "even shards": Situation(),
    "uneven shards": Situation(sizes=(49, 97, 3)),
    "a rank without rows": Situation(sizes=(49, 97, 1)),
    "tied": Situation(tied=True),
    "tied to an embedding": Situation(with_embedding=True),
    "mixed precision": Situation(mixed_precision=True),
    "a loss in chunks": Situation(chunked_loss=True),
}


EVEN = SITUATIONS["even shards"]


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self, situation: Situation) -> None:
        super().__init__()
        width, hidden, outputs = situation.sizes
        self.situation = situation
        self.embedding = nn.Embedding(outputs, width) if situation.with_embedding else None
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(situation.depth))
        self.head = nn.Linear(width, outputs, bias=False)
        if situation.tied:
            self.blocks[1].fc1.weight = self.blocks[0].fc1.weight
        if self.embedding is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = x + self.embedding((x.abs().sum(-1).long() * 7) % self.embedding.num_embeddings)
        for block in self.blocks:
            x = block(x)
        if self.situation.chunked_loss:
            return octavo.nn.linear_cross_entropy(x, self.head, torch.arange(len(x)) % self.head.out_features)
        return self.head(x)


def built(situation: Situation, recipe: str) -> Net:
    torch.manual_seed(0)
    return octavo.convert(Net(situation), RECIPES[recipe](), select=lambda module, name: True)


def sharded_blocks(net: Any, mesh: Any) -> Any:
    """The net, each of its blocks a group of its own."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def sharded(situation: Situation, recipe: str, mesh: Any, reshard: bool) -> nn.Module:
    net = built(situation, recipe)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if situation.mixed_precision:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if not situation.tied:  # tied weights must be in one group
        for block in net.blocks:
            fully_shard(block, **options)
    if situation.chunked_loss:
        fully_shard(net.head, **options)
    return fully_shard(net, **options)


def batch(situation: Situation, step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + micro_batch * 10 + rank)
    return torch.randn(16, situation.sizes[0], generator=generator)


def train(net: Any, situation: Situation, replicas: Any = None, in_fp8: Any = ()) -> dict[str, Tensor]:
    """Losses, weights and delayed state after some steps of AdamW.

    ``replicas``: the mesh of a model that every rank has, whose gradients are averaged by hand; ``in_fp8``: its weights
    that ranks would send in FP8, each from its own dtype. What is sent in bf16 is cast from bf16.
    """
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x = batch(situation, step, 0, dist.get_rank())
        if replicas is not None and situation.mixed_precision:
            used = {name: p if name in in_fp8 else p.bfloat16() for name, p in net.named_parameters()}
            with torch.autocast("cpu", torch.bfloat16):
                y = torch.func.functional_call(net, used, (x.bfloat16(),))
        else:
            y = net(x)
        losses.append(y.float().square().mean())
        losses[-1].backward()
        if replicas is not None:
            average(net, replicas)
        optimizer.step()
        optimizer.zero_grad()
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = {name: whole(p) for name, p in net.named_parameters()} | octavo.nn.delayed_state_dict(net)
    return tensors | {"losses": torch.stack(losses).detach()}


def compare(mesh: Any, recipe: str, name: str, reshard: bool) -> float:
    """The largest difference of the two runs in any tensor, by its largest value."""
    situation = SITUATIONS[name]
    net = sharded(situation, recipe, mesh, reshard)
    actual = train(net, situation)
    used = {f"{name}.weight": one.fp8.gather.sent_as for name, one in net.named_modules() if hasattr(one, "fp8")}
    alone, sent = mesh["shard"].size() == 1, [(name, *way) for name, way in used.items() if way]
    in_fp8 = {
        name for name, way, casts in sent if way == "in FP8" or (way == "cast after" and alone and casts.coincide)
    }
    expected = train(built(situation, recipe), situation, mesh, in_fp8)
    assert actual.keys() == expected.keys()
    return max(off(actual[key], expected[key]) for key in actual)


def off(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(1e-30))


SHAPES = {"1 rank": (1,), "2 ranks": (2,), "4 ranks": (4,), "2 replicas of 2": (2, 2), "8 ranks": (8,)}
OF_PAIRS = ("rowwise", "blockwise", "mx")  # on 8 ranks too, of which none has whole blocks of 128 rows of "even shards"


def cells():
    """Return each recipe in each situation on each mesh; half of the weights stay gathered after forward.

    Even shards on 2 ranks and on replicas of 2 are in tests/support/seams. By default: on 2 ranks one recipe in every
    situation, a rank without rows among them, and each scaling in one.
    """
    chosen = []
    for names in itertools.product(*map(enumerate, (RECIPES, SITUATIONS, SHAPES))):
        places, (recipe, situation, shape) = zip(*names, strict=True)
        if situation == "even shards" and shape in ("2 ranks", "2 replicas of 2"):
            continue
        if shape == "8 ranks" and (recipe not in OF_PAIRS or not situation.endswith("even shards")):
            continue
        usual = shape == "2 ranks" and (recipe == "delayed" or (situation == "uneven shards" and recipe in OF_PAIRS))
        marks = [] if usual else [pytest.mark.full]
        chosen.append(pytest.param(recipe, situation, shape, sum(places) % 2 == 0, marks=marks))
    return chosen


@pytest.mark.parametrize(("recipe", "situation", "shape", "reshard"), cells())
def test_equal_to_the_replicated_model(pool, recipe, situation, shape, reshard):
    difference = max(pool.run(compare, SHAPES[shape], recipe, situation, reshard))
    # Two ranks' gradients have one sum; of four the order of adding differs, in the plain model too.
    assert difference == 0.0 if shape in ("1 rank", "2 ranks") else difference <= 2.0**-20
