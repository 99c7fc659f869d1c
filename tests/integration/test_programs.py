"""Programs with libraries that need no integration: each as its users write it, with one line more, ``octavo.convert``.

A program returns numbers. Converted to high precision it returns those of the plain model, bit for bit; in FP8 it ends
with about the same loss. ``PROGRAMS`` has the rows of docs/integrations.md, a test says. A library that is not
installed is skipped: ``pip install litgpt x-transformers schedulefree pytorch-optimizer ema-pytorch`` runs all.
"""

from __future__ import annotations

import importlib
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo import Recipe, recipes
from octavo.errors import UnsupportedOpError
from octavo.scaling.delayed import state_of
from octavo.scaling.recipe import WEIGHT
from tests.support.helpers import every_layer, losses_on_rank, stepped
from tests.support.processes import ROOT

RECIPES = {"dynamic": recipes.dynamic(), "delayed": recipes.delayed(history_length=2)}
WIDTH, BATCH, STEPS, VOCABULARY = 32, 16, 12, 24
Prepare = Callable[[nn.Module], nn.Module]


def as_is(model: nn.Module) -> nn.Module:
    return model


def to(recipe: Recipe) -> Prepare:
    return lambda model: octavo.convert(model, recipe, every_layer)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def numbers(step: int, rank: int = 0) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, step: int, rank: int = 0) -> Tensor:
    """Return the loss of a network that has to learn to reverse its input's features."""
    x = numbers(step, rank)
    return (model(x) - x.flip(1)).square().mean()


def tokens() -> Tensor:
    """Return sequences that count on from a random token."""
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(1))
    return (first + torch.arange(17)) % VOCABULARY


# --- programs of one process ------------------------------------------------------------------------------------------


def litgpt(prepare: Prepare) -> list[float]:
    module = importlib.import_module("litgpt.model")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": WIDTH, "block_size": 32, "padded_vocab_size": VOCABULARY}
    llama = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 2 * WIDTH, "bias": False}
    torch.manual_seed(0)
    model = prepare(module.GPT(module.Config(**sizes, **llama)))
    rows, optimizer, losses = tokens(), torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        losses.append(stepped(optimizer, loss))
    model.eval()
    model.set_kv_cache(batch_size=1)  # litgpt's generate reads its cache
    generate = importlib.import_module("litgpt.generate.base").generate
    with torch.no_grad():
        generated = generate(model, rows[0, :4], 8, temperature=0.0)
    assert generated[:4].tolist() == rows[0, :4].tolist()
    return losses


def x_transformers(prepare: Prepare) -> list[float]:
    module = importlib.import_module("x_transformers")
    torch.manual_seed(0)
    layers = module.Decoder(dim=WIDTH, depth=1, heads=2, attn_dim_head=16, rotary_pos_emb=True, ff_glu=True)
    net = module.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers)
    model = module.AutoregressiveWrapper(prepare(net))
    rows, optimizer = tokens(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [stepped(optimizer, model(rows)) for _ in range(STEPS)]
    assert model.generate(rows[:1, :4], 8, temperature=0.0).shape == (1, 8)
    return losses


def schedulefree(prepare: Prepare) -> list[float]:
    """Evaluation swaps averaged weights in, by writes that no step makes: their own amax is taken, not a history."""
    model = prepare(net())
    optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(model.parameters(), lr=2e-2)
    losses = []
    for step in range(STEPS):
        model.train(), optimizer.train()
        losses.append(stepped(optimizer, loss_of(model, step)))
        model.eval(), optimizer.eval()
        with torch.no_grad():
            check_average(model, prepare, numbers(step))
            losses.append(loss_of(model, step).item())
    return losses


def check_average(model: nn.Module, prepare: Prepare, x: Tensor) -> None:
    """Check that a model computes what a new one with its weights does, whose weights have no history."""
    anew = prepare(net())
    anew.load_state_dict(model.state_dict())
    octavo.nn.load_delayed_state_dict(anew, octavo.nn.delayed_state_dict(model))
    for module in anew.modules():
        if (state := state_of(module)) is not None:
            state.scale[WEIGHT] = 0
    assert torch.equal(model.eval()(x), anew.eval()(x))


def pytorch_optimizer(prepare: Prepare) -> list[float]:
    """Optimizers that write weights in a step's middle (SAM), swap them (Lookahead) or make them orthogonal (Muon)."""
    module = importlib.import_module("pytorch_optimizer")
    losses = []
    for name in ("Lion", "ScheduleFreeAdamW", "SOAP", "Lookahead", "SAM"):
        model = prepare(net())
        weights = list(model.parameters())
        if name == "SAM":
            optimizer = module.SAM(weights, base_optimizer=module.AdamP, rho=0.05, lr=1e-2)
        elif name == "Lookahead":
            optimizer = module.Lookahead(module.AdamP(weights, lr=1e-2), k=2)
        else:
            optimizer = getattr(module, name)(weights, lr=2e-3 if name == "Lion" else 1e-2)
        getattr(optimizer, "train", lambda: None)()
        for step in range(STEPS):
            loss = loss_of(model, step)
            if name == "SAM":
                loss.backward()
                optimizer.first_step(zero_grad=True)
                loss_of(model, step).backward()
                optimizer.second_step(zero_grad=True)
            losses.append(loss.item() if name == "SAM" else stepped(optimizer, loss))
    return losses


def ema_pytorch(prepare: Prepare) -> list[float]:
    """The average is a copy of the model, whose weights are written by hand."""
    model = prepare(net())
    ema = importlib.import_module("ema_pytorch").EMA(model, beta=0.9, update_after_step=2, update_every=1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        losses.append(stepped(optimizer, loss_of(model, step)))
        ema.update()
        with torch.no_grad():
            losses.append(loss_of(ema, step).item())
            check_average(ema.ema_model, prepare, numbers(step))
    return losses


def torchscript(prepare: Prepare) -> list[float]:
    """A trained model is traced, saved, loaded, and computes what it did, for other batches too."""
    model = prepare(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [stepped(optimizer, loss_of(model, step)) for step in range(STEPS)]
    # torch deprecates it, and names octavo's checks of shapes
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.trace(model.eval(), numbers(0)), file := io.BytesIO())
        file.seek(0)
        loaded = torch.jit.load(file)
        for x in (numbers(0), numbers(1)[:5]):
            assert torch.equal(loaded(x), model(x))
        if any(isinstance(module, octavo.nn.Linear) for module in model.modules()):
            with pytest.raises(UnsupportedOpError, match=r"torch\.jit\.trace"):
                torch.jit.script(model)
    return losses


# --- programs of two ranks --------------------------------------------------------------------------------------------


def fsdp1(prepare: Prepare) -> list[float]:
    how: Any = {"use_orig_params": True, "device_id": torch.device("cpu"), "process_group": dist.group.WORLD}
    model = FullyShardedDataParallel(prepare(net()), auto_wrap_policy=ModuleWrapPolicy({Block}), **how)
    return on_rank(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def zero_redundancy(prepare: Prepare) -> list[float]:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit, which it imports
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(kind: Any, **options: Any) -> list[float]:
        model = DistributedDataParallel(prepare(net()))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=1e-2, **options)
        losses = on_rank(model, optimizer)
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        return losses

    losses = train(torch.optim.AdamW)
    assert train(octavo.optim.AdamW, moments="fp32") == losses
    assert train(octavo.optim.AdamW) == pytest.approx(losses, rel=0.05)  # other random bits on each number of ranks
    return losses


def unsharded(prepare: Prepare) -> list[float]:
    """The twin of programs of ranks: each has the whole model, and gradients are averaged here."""
    model = prepare(net())
    return on_rank(model, torch.optim.AdamW(model.parameters(), lr=1e-2), average=True)


def on_rank(model: nn.Module, optimizer: Any, average: bool = False) -> list[float]:
    return losses_on_rank(model, optimizer, lambda step: loss_of(model, step, dist.get_rank()), STEPS, average)


def task(mesh: Any, name: str, recipe: Recipe | None) -> list[float]:
    return globals()[name](as_is if recipe is None else to(recipe))


# --- the tests --------------------------------------------------------------------------------------------------------

# the row's first cell -> (module to import, program)
PROGRAMS: dict[str, tuple[str, Callable[[Prepare], list[float]]]] = {
    "`torch.jit` (TorchScript)": ("torch", torchscript),
    "`litgpt`": ("litgpt", litgpt),
    "`x-transformers`": ("x_transformers", x_transformers),
    "`schedulefree`": ("schedulefree", schedulefree),
    "`pytorch-optimizer`": ("pytorch_optimizer", pytorch_optimizer),
    "`ema-pytorch`": ("ema_pytorch", ema_pytorch),
}
ON_RANKS: dict[str, Callable[[Prepare], list[float]]] = {
    "`FullyShardedDataParallel` (FSDP1)": fsdp1,
    "`ZeroRedundancyOptimizer`": zero_redundancy,
}


@pytest.mark.full
@pytest.mark.parametrize("library", PROGRAMS)
def test_a_program_of_one_process(library: str) -> None:
    module, program = PROGRAMS[library]
    pytest.importorskip(module)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # theirs
        plain = program(as_is)
        assert program(to(recipes.high_precision())) == plain
        for recipe in RECIPES.values():
            assert program(to(recipe)) == pytest.approx(plain, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("library", ON_RANKS)
def test_a_program_of_two_ranks(pool: Any, library: str) -> None:
    name = ON_RANKS[library].__name__
    plain = pool.run(task, (2,), name, None, whole=True)
    assert pool.run(task, (2,), name, recipes.high_precision(), whole=True) == plain
    for recipe in RECIPES.values():
        actual = pool.run(task, (2,), name, recipe, whole=True)
        twins = pool.run(task, (2,), "unsharded", recipe, whole=True)
        for losses, twin, of_plain in zip(actual, twins, plain, strict=True):
            assert losses == pytest.approx(twin, rel=1e-5)
            assert losses == pytest.approx(of_plain, rel=0.1)


def test_the_page_has_a_row_for_each_program() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    section = page.split("## Without an integration")[1].split("\n## ")[0]
    assert re.findall(r"^\| (`[^|]*?) \|", section, re.MULTILINE) == [*ON_RANKS, *PROGRAMS]
