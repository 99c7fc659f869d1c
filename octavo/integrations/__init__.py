"""Octavo in other libraries' trainers: one module a library, e.g. ``octavo.integrations.transformers``.

Importing this package imports none of them.
"""
