"""Train in FP8 first and in high precision at the end, with a plan of the memory and a recovery from faults."""

import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.schedule import Phase

WIDTH, STEPS = 512, 12


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8))
    octavo.convert(model.to(device, torch.bfloat16), recipes.delayed())
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-3)

    low = Phase(recipes.delayed(), moments="fp8", master="split16", weight_storage="fp8")
    high = Phase(
        recipes.high_precision(), moments="fp32", master="split32", weight_storage=None, from_step=round(0.7 * STEPS)
    )
    recovery = octavo.schedule.Recovery(Phase(recipes.high_precision()), steps=2)
    schedule = octavo.schedule.PrecisionSchedule(model, optimizer, [low, high], recovery)
    print(schedule.plan(example_inputs=[torch.empty(64, WIDTH, device=device, dtype=torch.bfloat16)]))

    for step in range(STEPS):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
        loss = (model(x) - x[:, :8]).float().square().mean()
        loss.backward()
        if step == 4:
            model[0].weight.grad[0, 0] = float("nan")  # a fault: this step changes nothing
        schedule.observe(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {model[0].recipe.name}")
    for switch in schedule.switches:
        print(f"before step {switch.step}: {switch.name}, since {switch.reason}")


if __name__ == "__main__":
    main()
