"""torchao's interface over octavo's modules, and the names of Transformer Engine's checkpoints.

A program written for torchao.float8 imports the same names from octavo.compat.torchao. An option that octavo cannot
honour raises an error that says what to write instead. Importing this package imports none of those libraries.
"""
