"""Whole training steps and runs."""
