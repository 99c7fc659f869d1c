"""Benchmarks: one file a subject. ``python -m benchmarks`` lists them; results/ holds what was measured."""
