"""Code that several subjects share: models, timers, tables and results."""
