"""The autograd.Functions: what a layer casts, multiplies, saves for backward and sends.

Files that every layer needs, each above those that import it:

rows.py           how rows lie: dense, in groups, in shards
shared_scales.py  per-tensor scales of tensors that lie on several ranks
grouped.py        rows in groups, each with a matrix of its own: experts
casts.py          casts of one role, for the products that read it; cast_together.py: of many matrices in one launch
observer.py       counts of casts, and faults in products, where somebody records a training
gather_input.py   an input whose tokens lie on several ranks
shared_casts.py   a cast that several layers read: q, k and v; gate and up
products.py       the three products, and what they save: written once, for all modules and recipes

Files that some layers need, each an autograd.Function or a few around these:

chain.py          one or two linear layers with the norm or activation before them
norm.py           which norm a chain's first cast computes; an RMS norm by itself
exchange.py       experts' rows of other ranks
cross_entropy.py  a loss of logits; linear_cross_entropy.py: with the last layer, in chunks
rotary.py         rotary positions behind queries and keys

timed.py has a recipe's casts and products as calls, for those who time them.
"""
