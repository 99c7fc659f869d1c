# %% [markdown]
# # Which layers can't stand FP8?
#
# After this notebook you can find the layer of a model that FP8 hurts, before training in FP8, and write the recipe
# that spares it. It takes less than a minute on a CPU, and needs Jupyter and `octavo[cli]`.

# %%
import copy
import tempfile

import matplotlib.pyplot as plt
import torch
from torch import nn

import octavo

torch.manual_seed(0)

# %% [markdown]
# ## A model with a weak spot
#
# Large language models have *outliers*: a few tokens whose activations are thousands of times larger than all others
# ([massive activations](https://arxiv.org/abs/2402.17762)). This small model has one by construction, larger still,
# so that it shows within a minute: its third block also reads a row of 300,000s, whose result is dropped.


# %%
class Model(nn.Module):
    def __init__(self, width=64, blocks=4):
        super().__init__()
        self.into = nn.Linear(16, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)
        self.register_buffer("outlier", torch.full((1, width), 3e5))

    def forward(self, x):
        x = self.into(x)
        for index, block in enumerate(self.blocks):
            inner = nn.functional.layer_norm(x, x.shape[-1:])
            inner = block(torch.cat([inner, self.outlier]))[:-1] if index == 2 else block(inner)
            x = x + torch.tanh(inner)
        return self.head(x)


def batches(count, seed, size=256):
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(size, 16, generator=random)
        yield x, torch.stack([x[:, :4].prod(1), x[:, 4:8].sin().sum(1), x[:, 8] * x[:, 9], x[:, 10:].norm(dim=1)], 1)


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(model, steps, seed=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches(steps, seed):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return sum(loss_of(model, batch).item() for batch in batches(8, seed=99)) / 8


model = Model()
print(f"after 60 steps in float32: {train(model, 60):.4f}")

# %% [markdown]
# ## Ask before training in FP8
#
# `octavo.inspect.compare` computes a few batches in high precision, then with one layer at a time in FP8. It leaves
# the model as it was. *predicted loss* is how much higher the trained model's loss will be for that layer.

# %%


def everything(module, name):  # these layers are small
    return True


found = octavo.inspect.compare(
    model, loss_of, list(batches(3, seed=5)), [octavo.recipes.dynamic(), octavo.recipes.blockwise()], select=everything
)
print(found)

# %% [markdown]
# `blocks.2` stands out under `dynamic`: the outlier makes the scale of the whole input, and leaves all other rows a
# handful of codes. (The SQNR of its `output` looks well, since the outlier is most of the power there: read `loss`.)
# Under `blockwise` each row has its own scale, and the layer is like the others.
#
# ## Spare it
#
# `found.recipe_map(keep=1)` writes the recipe that then loses least, with the worst layer in high precision;
# `loss=0.002` the cheapest one within that budget. Or compose your own, `dynamic` but for this layer:

# %%
print(found.recipe_map(keep=1).default.name, found.recipe_map(keep=1).rules)
spared = octavo.RecipeMap(octavo.recipes.dynamic(), {"blocks.2": octavo.recipes.blockwise()})

# %%
losses = {}
for name, recipe in (
    ("float32", None),
    ("float32, last bits changed", octavo.recipes.high_precision()),
    ("all dynamic", octavo.recipes.dynamic()),
    ("one blockwise", spared),
):
    copied = copy.deepcopy(model)
    if recipe is not None:
        octavo.convert(copied, recipe, select=everything)
    if "bits" in name:
        copied.into.weight.data *= 1 + 1e-6
    losses[name] = train(copied, 150, seed=2)
    print(f"{name:26} {losses[name]:.4f}  {losses[name] / losses['float32'] - 1:+.1%}")

# %%
figure, axis = plt.subplots(figsize=(8, 1.8))
axis.barh(list(losses), list(losses.values()))
axis.invert_yaxis()
axis.set_xlabel("loss after training")

# %% [markdown]
# Much of what `dynamic` cost came from one layer.
#
# ## Or watch a training
#
# A model that trains in FP8 already can be recorded. The findings name layer, role, cause and a remedy to copy:

# %%
record = tempfile.mkdtemp()
converted = octavo.convert(copy.deepcopy(model), octavo.recipes.dynamic(), select=everything)
optimizer = torch.optim.AdamW(converted.parameters(), lr=3e-3)
with octavo.inspect.record(converted, record, every=5, optimizer=optimizer) as recorder:
    for batch in batches(11, seed=3):
        loss = loss_of(converted, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss=loss)
for finding in octavo.inspect.diagnose(octavo.inspect.load(record))[:2]:
    print(f"{finding.layer or 'all layers'}: {finding.cause}\n  remedy: {finding.remedy}")

# %% [markdown]
# `octavo inspect FOLDER --html report.html` shows the same with plots: [where does FP8 hurt?](../inspect.md)
