"""Weights of layers: their codes now, and who may write them.

operands.py   a weight as products read it: by the first of the ways below that applies, else cast in each forward
stored.py     a parameter that lives in FP8: its optimizer writes codes. storable.py says which elements share a scale,
              stored_ops.py what torch's ops do to it, bucket.py how DistributedDataParallel sends it
gathered.py   under FSDP2: written at its unshard. ways.py says what is sent, shard_cast.py casts shards, fsdp2.py has
              FSDP2's hooks, and shards
kept.py       KeptWeights: written on command
files.py      state dicts: which tensors hold a weight in FP8
writes.py     whether a weight was written, by anything but its optimizer, or since KeptWeights cast it
reader.py     what these files need of a module that multiplies by a weight

Who writes a weight's codes, and when: the table of operands.py. Who else does something with it, by how they are held:

             gives products codes       sends it (FSDP2)          saves and loads it
    plain    fp8_operands               InFP8, CastAfter, or Way  save_as_tensors, load_stored
    stored   StoredWeight.operands      AsStored                  the same
    gathered GatheredWeight.operands                              its shard is one of these
    kept     KeptOperands.operands                                as a plain one
"""
