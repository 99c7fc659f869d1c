"""Weights of layers: their codes now, and who may write them.

operands.py   a weight as products read it: by the first of the ways below that applies, else cast in each forward
stored.py     a parameter that lives in FP8: its optimizer writes codes. storable.py says which elements share a scale,
              stored_ops.py what torch's ops do to it, bucket.py how DistributedDataParallel sends it
gathered.py   under FSDP2: written at its unshard; shard_cast.py casts shards, fsdp2.py has FSDP2's hooks, and shards
kept.py       KeptWeights: written on command
files.py      state dicts: which tensors hold a weight in FP8
writes.py     whether a weight was written, by anything but its optimizer, or since KeptWeights cast it
reader.py     what these files need of a module that multiplies by a weight

Who does what with a weight, by the way that its codes are held:

             gives products codes       writes the codes          sends it (FSDP2)          saves and loads it
    plain    fp8_operands               fp8_operands              InFP8, CastAfter, or Way  save_as_tensors, load_stored
    stored   StoredWeight.operands      StoredWeight.write, its   AsStored                  the same
                                        optimizer's kernels
    gathered GatheredWeight.operands    GatheredWeight.write                                its shard is one of these
    kept     KeptOperands.operands      KeptWeights.cast                                    as a plain one
"""
