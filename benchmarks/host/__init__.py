"""What the host does before a kernel runs."""
