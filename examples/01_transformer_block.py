"""A small language model of octavo's transformer blocks, trained with a recipe by names of layers.

It reads bytes of Python's own source and predicts the next one. Products are FP8 but for the output head, the first
block, and the weight gradients of the MLPs' second layers.
"""

import inspect
import math
import textwrap

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo import recipes

WIDTH, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 3
CONTEXT, BATCH, STEPS = 64, 8, 30

BY_NAME = octavo.RecipeMap(
    recipes.delayed(),
    {
        "head": None,  # in high precision
        "blocks.0.*": None,
        "*.fc2": {"grad_weight": None},  # of its three products this one
    },
)


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(
            octavo.nn.TransformerBlock(WIDTH, 3 * WIDTH, HEADS, KV_HEADS) for _ in range(LAYERS)
        )
        self.norm = octavo.nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotary = octavo.nn.rotary_table(tokens.shape[1], WIDTH // HEADS, device=x.device)  # once for all blocks
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(textwrap).encode()))
    model = Model()
    octavo.convert(model, BY_NAME, select=lambda module, name: True)
    print(octavo.summary(model))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
        window = text[starts + torch.arange(CONTEXT + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:2d}: {loss.item():.2f} nats a byte (a guess costs {math.log(256):.2f})")
    assert loss.item() < math.log(256) - 1, "it did not learn"

    torch.save(model.state_dict(), "model.pt")  # ordinary parameters: "blocks.1.mlp.fc1.weight" and so on
    octavo.set_recipe(model, recipes.high_precision())
    model.load_state_dict(torch.load("model.pt", weights_only=True))


if __name__ == "__main__":
    main()
