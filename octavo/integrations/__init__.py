"""Octavo in other libraries' trainers: a module for each library, such as ``octavo.integrations.transformers``.

Importing this package imports none of these libraries.
"""
