"""Weights of layers: their codes now, and who may write them.

operands.py   a weight as products read it: which of the ways below, in order, else cast in each forward
stored.py     a parameter that lives in FP8: its optimizer writes codes; storable.py says which elements share a scale
gathered.py   under FSDP2: written at its unshard; shard_cast.py casts shards, fsdp2.py has FSDP2's hooks, and shards
kept.py       KeptWeights: written on command
files.py      state dicts: which tensors hold a weight in FP8
writes.py     whether a weight was written, by anything but its optimizer, or since KeptWeights cast it
reader.py     what these files need of a module that multiplies by a weight

What is done with a weight has one name, whichever way it is kept:

             operands            write               send (FSDP2)           save, load
    plain    fp8_operands        its optimizer       InFP8, CastAfter, Way  save_as_tensors, load_stored
    stored   StoredWeight's      StoredWeight.write  AsStored               save_as_tensors, load_stored
    gathered GatheredWeight's    GatheredWeight.write
    kept     KeptOperands'       KeptWeights.cast
"""
