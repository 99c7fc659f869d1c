"""octavo.compat.msamp: the programs of MS-AMP's pages, what its levels keep, and what it can't do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import octavo
from octavo.compat import msamp


def trained(model, optimizer, x, steps=12):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW], ids=["Adam", "AdamW"])
def test_the_program_of_its_page(level, kind):
    """Against octavo's own words for it, and the plain model in float32."""
    plain, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8)), torch.randn(32, 64)
    spelled = octavo.convert(copy.deepcopy(plain), msamp.RECIPE, lambda module, name: True, weight_storage="fp8")
    moments = {"O1": "fp32", "O2": (octavo.optim.Moment(octavo.E4M3, rounding="stochastic"), bf16_second())}[level]
    own = getattr(octavo.optim, kind.__name__)(
        spelled.parameters(), 1e-3, moments=moments, master="fp16_scaled", gradient_storage="fp8"
    )

    model = copy.deepcopy(plain)
    optimizer = kind(model.parameters(), lr=1e-3)
    model, optimizer = msamp.initialize(model, optimizer, opt_level=level)
    losses = trained(model, optimizer, x)
    assert losses == trained(spelled, own, x)
    expected = trained(plain, kind(plain.parameters(), lr=1e-3), x)
    assert losses[-1] == pytest.approx(expected[-1], rel=0.05)
    assert expected[-1] < 0.9 * expected[0]


def bf16_second():
    return octavo.optim.Moment("bf16", rounding="stochastic")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, 2)
        self.fc1, self.fc2, self.out = nn.Linear(4 * 9, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.out.use_fp32_linear = True

    def forward(self, x):
        x = F.relu(self.fc1(F.relu(self.conv(x)).flatten(1)))
        return F.log_softmax(self.out(F.relu(self.fc2(x))), dim=1)


def test_its_training_of_images():
    """With its example's parts: convolutions, autocast, a GradScaler, clipping, a schedule of learning rates."""
    images, model = torch.randn(96, 1, 8, 8), Net()
    labels = images[:, 0, :3, :3].mean((1, 2)).mul(3).round().clamp(-1, 1).long() + 1
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), opt_level="O2")
    scaler, scheduler = torch.amp.GradScaler("cpu"), torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.7)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(images)
        loss = F.nll_loss(output.float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        msamp.clip_grad_norm_(model.parameters(), 0.5)
        assert nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 0.52  # codes are rounded
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(3e-3 * 0.49)
    assert [type(layer) is octavo.nn.Linear for layer in (model.fc1, model.fc2, model.out)] == [True, True, False]
    loaded = msamp.initialize(Net(), opt_level="O2")[0]
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded.eval()(images), model.eval()(images))


@pytest.mark.parametrize(("level", "of_moments"), [("O1", 8), ("O2", 3)])
def test_bytes_of_an_element(level, of_moments):
    model = nn.Linear(512, 512, bias=False)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), level)
    model(torch.randn(16, 512)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    sizes = {name: value.nbytes / 512**2 for name, value in state.items() if isinstance(value, torch.Tensor)}
    assert model.weight.qdata.nbytes == 512**2
    for beginning, expected in (("master", 2), ("exp_avg", of_moments)):
        found = sum(size for name, size in sizes.items() if name.startswith(beginning))
        assert found == pytest.approx(expected, abs=0.04)


def test_groups_are_taken_over():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    groups = [
        {"params": model[0].parameters(), "lr": 1e-2, "betas": (0.8, 0.9), "name": "first"},
        {"params": model[1].parameters(), "weight_decay": 0.5},
    ]
    _, optimizer = msamp.initialize(model, torch.optim.AdamW(groups, lr=1e-3, eps=1e-6))
    first, second = optimizer.param_groups
    assert (first["lr"], first["betas"], first["name"], first["eps"]) == (1e-2, (0.8, 0.9), "first", 1e-6)
    assert (second["lr"], second["weight_decay"]) == (1e-3, 0.5)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]


def test_what_it_cant_do_changes_nothing():
    model = nn.Linear(16, 16)

    def adam(**options):
        return torch.optim.AdamW(model.parameters(), **options)

    stepped = adam()
    model(torch.randn(2, 16)).sum().backward()
    stepped.step()
    for arguments, match in [
        ((adam(), "O3"), r"fully_shard\(model\) between"),
        ((adam(), "O1", True), r"octavo\.compat\.transformer_engine"),
        ((torch.optim.SGD(model.parameters()),), r"octavo\.optim\.SGD"),
        ((stepped,), "initialize before training"),
        ((adam(amsgrad=True),), "amsgrad=True: octavo.optim has none"),
    ]:
        with pytest.raises(octavo.UnsupportedOptionError, match=match):
            msamp.initialize(model, *arguments)
        assert type(model) is nn.Linear
    with pytest.raises(TypeError, match="not a torch"):
        msamp.initialize("model")
