"""Time of the host's work before a kernel runs."""
