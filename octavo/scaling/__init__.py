"""The choice of a scale: the values Cast and Recipe, and the state of delayed scaling."""
