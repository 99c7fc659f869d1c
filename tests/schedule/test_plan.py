import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import RecipeMap, recipes
from octavo.nn.saved import MIB
from octavo.schedule import BudgetError, Phase, PrecisionSchedule, Recovery
from octavo.schedule.phase import switch
from octavo.train import GPT, ModelConfig
from octavo.weights.stored import StoredWeight
from tests.support.schedule_situations import HIGH, LOW, loss_of, net, optimizer_of

PHASES = [
    Phase(recipes.delayed(), moments="fp8", master="split16", weight_storage="fp8"),
    Phase(recipes.blockwise(), master=None, weight_storage="fp8", from_step=1),
    Phase(recipes.rowwise(), moments="bf16", master="split24", weight_storage=None, from_step=2),
    Phase(recipes.mx(), master="fp16_scaled", from_step=3),
    Phase(HIGH, moments="fp32", master="split32", from_step=4),
]


def bytes_in(*tensors: Tensor) -> int:
    return sum(part.nbytes for tensor in tensors for part in inner(tensor))


def measured(model: nn.Module, optimizer) -> tuple[int, int, int]:
    """Return the bytes of (weights, masters, moments)."""
    states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    named = [(name, value) for state in states for name, value in state.items() if value.ndim]  # not step, master_kind
    return (
        bytes_in(*model.parameters()),
        bytes_in(*(value for name, value in named if name.startswith("master_"))),
        bytes_in(*(value for name, value in named if not name.startswith("master_"))),
    )


def saved(model: nn.Module, *inputs: Tensor) -> int:
    """Return bytes of storages that a real forward saves, besides those that exist anyway."""
    existing_parts = [part for t in (*model.parameters(), *model.buffers(), *inputs) for part in inner(t)]
    existing_storages = {part.untyped_storage().data_ptr() for part in existing_parts}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in inner(tensor):
            storages[part.untyped_storage().data_ptr()] = part
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*inputs)
    total = sum(part.untyped_storage().nbytes() for key, part in storages.items() if key not in existing_storages)
    output.float().sum().backward()
    return total


def inner(tensor: Tensor) -> list[Tensor]:
    return [tensor.qdata, tensor.scale_inv] if isinstance(tensor, StoredWeight) else [tensor]


def test_every_phase_takes_what_was_planned():
    torch.manual_seed(0)
    model = GPT(ModelConfig(width=128, layers=1, heads=2, context=64)).bfloat16()
    octavo.convert(model, LOW, select=lambda module, name: name != "head")
    optimizer = optimizer_of(model, master="auto")
    schedule = PrecisionSchedule(model, optimizer, PHASES)
    tokens = torch.randint(0, 256, (4, 64), dtype=torch.uint8)
    plan = schedule.plan(example_inputs=(tokens,))
    model(tokens).float().square().mean().backward()
    optimizer.step()
    for phase, target in zip(plan.phases, schedule.targets, strict=True):
        optimizer.zero_grad()
        switch(model, optimizer, target)
        activations = saved(model, tokens)
        bytes_by_kind = *measured(model, optimizer), bytes_in(*(p.grad for p in model.parameters())), activations
        expected = phase.weights, phase.masters, phase.moments, phase.gradients, phase.activations
        assert bytes_by_kind[:4] == expected[:4]
        assert activations == pytest.approx(phase.activations, rel=0.05) and activations > MIB // 4
        assert sum(bytes_by_kind) == pytest.approx(phase.total, rel=0.05)
        optimizer.step()


def test_nothing_is_computed_or_changed():
    model = net()
    optimizer = optimizer_of(model)
    schedule = PrecisionSchedule(model, optimizer, [Phase(LOW), PHASES[-1]])
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert schedule.plan(example_inputs=x) == schedule.plan(example_inputs=(x,))
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1])
    assert model[0].recipe == LOW and not optimizer.state


def test_gradients_that_do_not_stay():
    model = net()
    sizes = [p.numel() for p in model.parameters()]
    optimizer = optimizer_of(model)
    schedule = PrecisionSchedule(model, optimizer, [Phase(LOW)])
    assert schedule.plan().phases[0].gradients == 2 * sum(sizes)
    octavo.optim.update_in_backward(optimizer, 1000)
    assert schedule.plan().phases[0].gradients == 1000 + 2 * max(sizes)
    schedule = PrecisionSchedule(net(), optimizer_of(net(), gradient_storage="fp8"), [Phase(LOW)])
    assert schedule.plan().phases[0].gradients <= 1.2 * sum(sizes)


def test_frozen_weights_have_no_state():
    model = net(storage="fp8")
    model.requires_grad_(False)
    model[3].requires_grad_(True)
    (phase,) = PrecisionSchedule(model, optimizer_of(model, master="auto"), [Phase(LOW)]).plan().phases
    assert phase.masters == 2 * 16 and phase.gradients == 2 * 16


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_optimizers_of_torchs(kind):
    model = net(dtype=torch.float32)
    optimizer = kind(model.parameters(), 1e-3)
    schedule = PrecisionSchedule(model, optimizer, [Phase(LOW), Phase(HIGH, from_step=2)])
    planned = schedule.plan().phases[1].moments
    loss_of(model, 0).backward()
    optimizer.step()
    state = [v for s in optimizer.state.values() for n, v in s.items() if n != "step" and v is not None]
    assert planned == bytes_in(*state)
    steps = bytes_in(*(s["step"] for s in optimizer.state.values() if "step" in s))
    assert schedule.plan().phases[1].moments == planned + steps  # now that there is a state
    with pytest.raises(BudgetError, match="nothing but its recipe is the schedule's to change: train on smaller"):
        schedule.plan(1)


def test_an_optimizer_whose_state_is_not_known_before_it_steps():
    model = net(dtype=torch.float32)
    optimizer = torch.optim.Adagrad(model.parameters(), 1e-3)
    optimizer.state.clear()
    with pytest.raises(TypeError, match="what Adagrad keeps is known after its first step only"):
        PrecisionSchedule(model, optimizer, [Phase(LOW)]).plan()


def test_a_budget_names_the_phase_and_the_cheapest_way_to_fit():
    model = octavo.convert(nn.Sequential(nn.Linear(1024, 1024, bias=False)).bfloat16(), LOW)
    optimizer = optimizer_of(model, master="split24")
    phases = [Phase(LOW), Phase(HIGH, moments="fp32", master="split32", from_step=9000)]
    schedule = PrecisionSchedule(model, optimizer, phases)
    first, second = schedule.plan(14 * MIB).phases
    assert first.total < second.total == 14 * MIB
    assert first.bytes_per_parameter == pytest.approx(5.06, abs=0.01) and second.bytes_per_parameter == 12.0
    with pytest.raises(BudgetError, match=r"phase 1, .*from_step=9000\), takes 14.00 MiB, 1.00 MiB more than .*13.00"):
        schedule.plan(13 * MIB)
    ways = {8.1: "leave moments as they were, and promote the master alone", 7.5: "leave moments and masters"}
    for budget, way in ways.items():
        with pytest.raises(BudgetError, match=f"cheapest way to fit: {way}"):
            schedule.plan(int(budget * MIB))
    with pytest.raises(BudgetError, match=r"phase 0, .*cheapest way to fit: master=None"):
        schedule.plan(7 * MIB)
    with pytest.raises(BudgetError, match="none of the ways tried fits; the smallest takes"):
        schedule.plan(MIB)
    phases = [Phase(LOW, master="split16", weight_storage="fp8"), Phase(HIGH, weight_storage=None, from_step=9)]
    schedule = PrecisionSchedule(model, optimizer_of(model, master="auto"), phases)
    with pytest.raises(BudgetError, match="cheapest way to fit: only compute in high_precision, which takes no memory"):
        schedule.plan(int(6.2 * MIB))


def test_a_budget_proposes_nothing_that_is_so_already():
    model = octavo.convert(nn.Sequential(nn.Linear(512, 512, dtype=torch.bfloat16)), LOW, lambda *_: True)
    schedule = PrecisionSchedule(model, optimizer_of(model, master="split16"), [Phase(LOW)])
    takes = r"1\.52 MiB"
    with pytest.raises(BudgetError, match=rf"phase 0, .*cheapest way to fit: weight_storage='fp8' \({takes}\)"):
        schedule.plan(int(1.6 * MIB))
    with pytest.raises(BudgetError, match=rf"none of the ways tried fits; the smallest takes {takes} \(master=None\)"):
        schedule.plan(MIB)
    smallest = Phase(LOW, moments="fp8", master=None, weight_storage="fp8")
    with pytest.raises(BudgetError, match="none of the ways tried fits: train on smaller"):
        PrecisionSchedule(model, schedule.optimizer, [smallest]).plan(1)


def test_a_recoverys_phase_is_planned_too():
    model = net()
    schedule = PrecisionSchedule(model, optimizer_of(model), [Phase(LOW)], Recovery(Phase(HIGH, moments="fp32")))
    first, rescue = schedule.plan().phases
    assert rescue.name == "high_precision" and rescue.moments > 3 * first.moments


def test_a_table():
    model = net()
    text = str(PrecisionSchedule(model, optimizer_of(model), [Phase(RecipeMap(LOW))]).plan())
    columns = "phase recipe weights masters moments gradients bytes a parameter total"
    assert text.splitlines()[0].split() == columns.split()
    assert "map of dynamic" in text
