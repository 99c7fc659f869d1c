"""Who decides the scale: the values Cast and Recipe, and the state of delayed scaling."""
