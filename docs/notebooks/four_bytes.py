# %% [markdown]
# # A training in four bytes a parameter
#
# After this notebook you can keep a model's weights, their masters and the optimizer's moments in about four bytes a
# parameter, with no gradient that waits for the step, and have seen where each byte goes. It takes less than a
# minute on a CPU, and needs Jupyter and `octavo[cli]`.

# %%
import copy
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import octavo

torch.manual_seed(0)

# %% [markdown]
# A small model of text: it predicts the next byte of a Python source file from the sixteen before.

# %%
WIDTH, CONTEXT = 256, 16
text = torch.tensor(list(Path(textwrap.__file__).read_bytes()))
plain = nn.Sequential(
    nn.Embedding(256, WIDTH // CONTEXT),
    nn.Flatten(),
    nn.Linear(WIDTH, 4 * WIDTH),
    nn.GELU(),
    nn.Linear(4 * WIDTH, WIDTH),
    nn.GELU(),
    nn.Linear(WIDTH, 256),
).bfloat16()


def batches(count, seed=1, size=128):
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        at = torch.randint(len(text) - CONTEXT, (size,), generator=random)
        yield text[at[:, None] + torch.arange(CONTEXT)], text[at + CONTEXT]


def train(model, optimizer, steps=100):
    losses = []
    for x, following in batches(steps):
        loss = nn.functional.cross_entropy(model(x).float(), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## The usual way: 12 bytes, and a gradient
#
# A bf16 weight is 2 bytes, the float32 master beside it 2 more (the other half of its bits), its two float32 moments
# are 8, and a bf16 gradient that waits for the step 2: `moments="fp32", master="split32"`.
#
# ## In FP8
#
# Each step is one argument:
#
# - `weight_storage="fp8"`: a weight is E4M3 codes and a scale, which products read without a cast; 1 byte.
# - `master="split16"`: 8 more bits of each weight, which the optimizer alone reads; 1 byte.
# - `moments="fp8"`: two codes and their scales in blocks of 128; 2.06 bytes.
# - `update_in_backward`: gradients are used and freed while backward runs.

# %%
usual = copy.deepcopy(plain)
usual_optimizer = octavo.optim.AdamW(usual.parameters(), lr=1e-3, moments="fp32", master="split32")

small = copy.deepcopy(plain)
octavo.convert(small, octavo.recipes.dynamic(), select=lambda module, name: True, weight_storage="fp8")
small_optimizer = octavo.optim.AdamW(small.parameters(), lr=1e-3, moments="fp8", master="split16")
octavo.optim.update_in_backward(small_optimizer, outstanding_weight_updates_bytes=1 << 16)
print(small[2].weight)

# %%
curves = {"usual": train(usual, usual_optimizer), "in FP8": train(small, small_optimizer)}

# %% [markdown]
# ## Where the bytes are
#
# Counted from the tensors themselves, a parameter:


# %%
def tensors_of(value):
    """The plain tensors that a parameter or a state consists of."""
    if hasattr(value, "qdata"):  # the pair
        return [value.qdata, value.scale_inv]
    return [value] if isinstance(value, torch.Tensor) else []


def bytes_of(values):
    found = {part.data_ptr(): part.nbytes for value in values for part in tensors_of(value)}
    return sum(found.values())


count = sum(parameter.numel() for parameter in plain.parameters())
table = {}
for name, model, optimizer in (("usual", usual, usual_optimizer), ("in FP8", small, small_optimizer)):
    states = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    table[name] = {
        "weights": bytes_of(parameter.detach() for parameter in model.parameters()) / count,
        "masters": bytes_of(value for key, value in states if not key.startswith("exp_avg")) / count,
        "moments": bytes_of(value for key, value in states if key.startswith("exp_avg")) / count,
    }
    kinds = ", ".join(f"{kind} {size:.2f}" for kind, size in table[name].items())
    print(f"{name:7} {kinds}; together {sum(table[name].values()):.2f}")
print("and usual has gradients of 2.00 that wait for the step")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for name, losses in curves.items():
    left.plot(losses, label=name, linewidth=1)
left.set(xlabel="step", ylabel="loss")
left.legend()
bottom = [0.0, 0.0]
for kind in ("weights", "masters", "moments"):
    sizes = [table[name][kind] for name in table]
    right.bar(list(table), sizes, bottom=bottom, label=kind)
    bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
right.set_ylabel("bytes a parameter")
right.legend()
for name, losses in curves.items():
    print(f"{name:7} mean loss of the last 20 steps {sum(losses[-20:]) / 20:.3f}")

# %% [markdown]
# ## Save it, and go back to a plain model
#
# `state_dict()` holds codes as bytes. `octavo.restore` makes ordinary parameters again, which any program loads:

# %%
print({name: (tuple(value.shape), value.dtype) for name, value in list(small.state_dict().items())[1:4]})
restored = octavo.restore(copy.deepcopy(small))
fresh = copy.deepcopy(plain)
fresh.load_state_dict(restored.state_dict())
x, _ = next(batches(1, seed=7))
print("the same result:", torch.equal(fresh(x), restored(x)))

# %% [markdown]
# Next: [FP8 weights](../weights.md), with FSDP2 and other masters, and [what rounding does to
# moments](../study/optimizer-state.md).
