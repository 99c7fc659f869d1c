# %% [markdown]
# # A first conversion
#
# After this notebook you have seen what a cast does to numbers, converted a model, and trained it beside the same
# model in bfloat16. It takes less than a minute on a CPU, and needs Jupyter and `octavo[cli]`.

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

import octavo
from octavo import E4M3, E5M2, PerBlock, PerRow, PerTensor

torch.manual_seed(0)

# %% [markdown]
# ## What a cast does
#
# An FP8 format has 256 codes. E4M3 has three bits of mantissa and reaches 448; E5M2 has two and reaches 57344. Their
# values lie close together near 0, and the distance doubles at each power of two:

# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 2.4), sharex=True)
for axis, format in zip(axes, (E4M3, E5M2), strict=True):
    values = torch.arange(127, dtype=torch.uint8).view(format.dtype).float()
    axis.vlines(values[values <= 16], 0, 1, linewidth=0.8)
    axis.set(yticks=[], ylabel=format.name)
axes[1].set_xlabel("value")

# %% [markdown]
# A tensor's numbers don't lie where the codes do, so they are multiplied by a scale first. `octavo.quantize` returns
# the pair: the codes, and `scale_inv`, which reads them back.

# %%
x = torch.randn(4, 256)
pair = octavo.quantize(x, E4M3, PerTensor())
print(pair.qdata.dtype, pair.qdata.shape, "with", pair.scale_inv.shape, "scale")
print("numbers    ", x[0, :5])
print("read back  ", pair.dequantize()[0, :5])

# %% [markdown]
# One number that is much larger than the others takes the range for itself. Scales for rows or blocks keep that to
# themselves. SQNR is the numbers' power over that of the error, in decibels: six more halve the error.


# %%
def sqnr(x, pair):
    return 10 * torch.log10(x.square().sum() / (x - pair.dequantize()).square().sum()).item()


x = torch.randn(256, 256)
outlier = x.clone()
outlier[7, 9] = 30_000.0
others = torch.arange(256) != 7
for granularity in (PerTensor(), PerRow(), PerBlock(1, 32)):
    pair = octavo.quantize(x, E4M3, granularity)
    spoiled = octavo.quantize(outlier, E4M3, granularity).dequantize()[others]
    error = 10 * torch.log10(x[others].square().sum() / (x[others] - spoiled).square().sum()).item()
    print(f"{granularity!s:16} {sqnr(x, pair):5.1f} dB; the other rows beside an outlier: {error:5.1f} dB")

# %% [markdown]
# ## Convert a model
#
# `convert` changes linear layers in place: the parameters, their names and every reference to them stay. A recipe
# says how each of a layer's three products is cast.

# %%
plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
start = copy.deepcopy(plain)
converted = copy.deepcopy(plain)
octavo.convert(converted, octavo.recipes.dynamic(), select=lambda module, name: name != "4")
print(octavo.summary(converted))

# %% [markdown]
# ## Train both
#
# The task: say which of eight directions a noisy point in 64 dimensions lies in. Everything but the model is the
# same.

# %%
directions = torch.randn(8, 64)


def train(model, steps=120):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        kinds = torch.randint(8, (128,), generator=random)
        x = directions[kinds] + 4 * torch.randn(128, 64, generator=random)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), kinds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


curves = {"bfloat16": train(plain), "FP8": train(converted)}
last_bits = copy.deepcopy(start)
with torch.no_grad():
    for parameter in last_bits.parameters():
        parameter *= 1 + 1e-6
curves["bfloat16, last bits changed"] = train(last_bits)

# %%
figure, axis = plt.subplots(figsize=(8, 3))
for name, losses in curves.items():
    axis.plot(losses, label=name, linewidth=1)
axis.set(xlabel="step", ylabel="loss", yscale="log")
axis.legend()
for name, losses in curves.items():
    print(f"{name:28} mean loss of the last 40 steps {sum(losses[-40:]) / 40:.4f}")

# %% [markdown]
# The third curve is bfloat16 again from weights whose last bits were changed: how far *it* ends from the first is
# what chance alone does, and the measure for FP8's difference.
#
# Next: [which layers can't stand FP8](which_layers.ipynb), and [which recipe?](../guides/which-recipe.md)
