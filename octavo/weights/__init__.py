"""Weights of layers: their codes now, and who may write them.

plain.py      when a layer's weight becomes FP8, and when its codes are thrown away: which of the ways below, in order
stored.py     a parameter that lives in FP8: its optimizer writes codes
gathered.py   under FSDP2: written at its unshard; fsdp2.py has FSDP2's hooks, and shards
kept.py       KeptWeights: written on command
files.py      state dicts: which tensors hold a weight in FP8
"""

import sys

from octavo.weights import gathered, plain, stored

# pickles of earlier versions name the modules where these classes were
sys.modules.update({"octavo.nn.gather": gathered, "octavo.nn.weight": plain, "octavo.tensor.stored_weight": stored})
