"""Other FP8 libraries' interfaces over octavo's modules: one module a library, e.g. ``octavo.compat.torchao``.

A program written for that library runs with one changed import. An option that octavo cannot honour raises an error
that says what to write instead. Importing this package imports none of those libraries.
"""
